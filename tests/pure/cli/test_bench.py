"""The command `bench`: its options, its table, and what it refuses. What it times, `tests/ray/test_bench.py` runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from raycollect.cli import bench, calibrate, measuring
from raycollect.group import link_costs
from tests.pure.cli.command_line import run_command


def test_calibrating_prints_a_table_and_writes_where_the_planner_reads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(calibrate, "BACKENDS", ())  # what it measures is tested with what measures
    given, environ = ["--between", "50", "25"], {"XDG_CONFIG_HOME": str(tmp_path), "RAYCOLLECT_COSTS": None}
    result = run_command("bench", "--calibrate", *given, environ=environ)
    assert result.exit_code == 0, result.stderr
    assert ["between", "tcp"] in [line.split()[:2] for line in result.stdout.splitlines()]
    path = tmp_path / "raycollect" / "costs.json"
    assert result.stderr == f"written to {path}\n"
    costs = link_costs.current({"XDG_CONFIG_HOME": str(tmp_path)})
    assert [link.backend for link in costs.measured] == ["tcp"]
    assert (costs.between.latency_s, costs.between.bandwidth) == (pytest.approx(5e-5), pytest.approx(25e9 / 8))
    result = run_command("bench", "--calibrate", "--json", "--output", "/dev/null/x.json", *given)
    assert (result.exit_code, [link["backend"] for link in json.loads(result.stdout)]) == (2, ["tcp"])
    assert "/dev/null/x.json" in result.stderr


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--output", "x.json"], "Give --calibrate with --output"),
        (["--between", "50", "25"], "Give --calibrate with --between"),
        (["--calibrate", "--between", "0", "25"], "0.0"),
        (["--calibrate", "--between", "nan", "25"], "nan"),
        (["--calibrate", "--between", "50", "inf"], "inf"),
        (["--calibrate", "--between", "50"], "between"),
        (["--calibrate", "allreduce"], "leave OPERATION out"),
        (["--calibrate", "--runs", "5"], "leave --runs out"),
        (["scan"], "'scan'"),
        (["--ranks", "1"], "1"),
        (["--runs", "0"], "0"),
        (["--sizes", "0"], "'0' is not a number of bytes"),
        (["--sizes", "4:"], "'' is not a number of bytes"),
        (["--sizes", "1K,12T"], "'12T' is not a number of bytes"),
        (["--sizes", "1M:4"], "'1M:4' is no range"),
        (["--sizes", "1:2:4"], "'1:2:4' is no range"),
        (["--ways", "refs,graph"], "'graph' is none of captured, refs, members"),
        (["--ways", ""], "'' is none of"),
    ],
)
def test_a_wrong_bench_is_a_usage_error(args: list[str], says: str) -> None:
    result = run_command("bench", *args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert says in result.stderr


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A median of 1 ms for all ways and sizes, without Ray; lists the address of the cluster, and what is asked for."""
    requests: list[Any] = []

    def measure(*, ways: tuple[str, ...], sizes: tuple[int, ...], **more: Any) -> tuple[str, list[measuring.Timing]]:
        requests.append({**more, "ways": ways, "sizes": sizes})
        cells = [(way, nbytes) for way in ways for nbytes in sizes]
        return "shm", [measuring.Timing(way, nbytes, 1e-3, 2e-3, nbytes * 1e3, nbytes * 1.5e3) for way, nbytes in cells]

    monkeypatch.setattr(measuring, "measure", measure)
    monkeypatch.setattr(bench, "start_ray", requests.append)
    return requests


def test_an_allreduce_is_timed_by_default(timed: list[Any]) -> None:
    result = run_command("bench")
    assert (result.exit_code, result.stderr) == (0, "")
    sizes = tuple(4 ** (at + 1) for at in range(13))
    ways = ("captured", "refs", "members")
    settings = {"operation": "allreduce", "ranks": 2, "sizes": sizes, "backend": "auto", "runs": 20, "ways": ways}
    assert timed == [None, settings]
    lines = result.stdout.splitlines()
    assert lines[0] == "allreduce of float32 between 2 actors over shm, 20 runs each"
    assert [line for line in lines if line in ways] == ["captured", "refs", "members"]
    assert lines[-1].split() == ["64", "MiB", "1", "ms", "2", "ms", "67.109", "100.663"]


@pytest.mark.parametrize(
    ("text", "sizes"),
    [("4:63", (4, 16)), ("1K:1k", (1024,)), ("4, 1K,1M,4", (4, 1 << 10, 1 << 20)), ("1G", (1 << 30,))],
)
def test_what_is_timed_can_be_said(timed: list[Any], text: str, sizes: tuple[int, ...]) -> None:
    options = ["--ranks", "3", "--sizes", text, "--backend", "tcp", "--runs", "7", "--ways", "members,refs"]
    result = run_command("bench", "allgather", *options, "--address", "10.0.0.1:6379", "--json")
    assert result.exit_code == 0
    address, settings = timed
    assert (address, settings["operation"]) == ("10.0.0.1:6379", "allgather")
    assert (settings["ranks"], settings["backend"]) == (3, "tcp")
    printed = json.loads(result.stdout)
    assert (printed["operation"], printed["backend"], printed["runs"]) == ("allgather", "shm", 7)
    rows = [(row["way"], row["nbytes"]) for row in printed["rows"]]
    assert rows == [(way, nbytes) for way in ("members", "refs") for nbytes in sizes]
