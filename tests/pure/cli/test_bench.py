"""The command `bench`: its options, its tables, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from raycollect.cli import bench
from tests.pure.cli.command_line import run_command


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Links of known costs instead of measured ones; lists which were asked for."""
    from raycollect.cli import calibrate
    from raycollect.group.link_costs import Measured
    from raycollect.planner import Link

    asked: list[str] = []

    def measure(backend: str) -> Measured:
        asked.append(backend)
        link = Link(latency_s=2e-5, bandwidth=4e9)
        return Measured(place="inside", backend=backend, link=link, how="measured: by a test")

    monkeypatch.setattr(calibrate, "measure", measure)
    return asked


def test_calibrating_prints_a_table_and_writes_where_the_planner_reads(measured: list[str], tmp_path: Path) -> None:
    from raycollect.group import link_costs

    environ = {"XDG_CONFIG_HOME": str(tmp_path), "RAYCOLLECT_COSTS": None}
    result = run_command("bench", "--calibrate", environ=environ)
    assert result.exit_code == 0
    assert measured == ["shm", "tcp"]
    assert [line.split()[0] for line in result.stdout.splitlines()] == ["hosts", "inside", "inside", "between"]
    path = tmp_path / "raycollect" / "costs.json"
    assert result.stderr == f"written to {path}\n"
    found = link_costs.current({"XDG_CONFIG_HOME": str(tmp_path)})
    assert (found.inside.bandwidth, found.between) == (4e9, link_costs.Costs().between)


def test_what_lies_between_hosts_can_be_given(measured: list[str], tmp_path: Path) -> None:
    from raycollect.group import link_costs

    path = tmp_path / "costs.json"
    result = run_command("bench", "--calibrate", "--between", "50", "25", "--output", str(path))
    assert result.exit_code == 0
    assert "not measured" in result.stdout
    found = link_costs.read(path).between
    assert (found.latency_s, found.bandwidth) == (pytest.approx(5e-5), pytest.approx(25e9 / 8))


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        (["--output", "x.json"], "Give --calibrate"),
        (["--calibrate", "--between", "0", "25"], "0.0"),
        (["--calibrate", "--between", "nan", "25"], "nan"),
        (["--calibrate", "--between", "50", "inf"], "inf"),
        (["--calibrate", "--between", "50"], "between"),
        (["--calibrate", "--output", "/dev/null/x.json"], "/dev/null/x.json"),
    ],
)
def test_a_wrong_bench_is_a_usage_error(measured: list[str], args: list[str], problem: str) -> None:
    result = run_command("bench", *args)
    assert result.exit_code == 2
    assert problem in result.stderr


def test_a_measurement_that_fails_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from raycollect.cli import calibrate
    from raycollect.errors import KernelError

    def measure(backend: str) -> None:
        raise KernelError(op="calibrate", group_name=backend, detail="the machine is busy")

    monkeypatch.setattr(calibrate, "measure", measure)
    result = run_command("bench", "--calibrate", "--output", str(tmp_path / "costs.json"))
    assert result.exit_code == 1
    assert "the machine is busy" in result.stderr
    assert not (tmp_path / "costs.json").exists()


def test_what_was_measured_is_printed_as_json(measured: list[str], tmp_path: Path) -> None:
    result = run_command("bench", "--calibrate", "--json", "--output", str(tmp_path / "costs.json"))
    assert [(one["place"], one["backend"]) for one in json.loads(result.stdout)] == [
        ("inside", "shm"),
        ("inside", "tcp"),
    ]


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A median of 1 ms for all ways and sizes, without Ray; lists the address of the cluster, and what is asked for."""
    from raycollect.cli import measuring

    asked: list[Any] = []

    def measure(settings: measuring.Settings) -> tuple[str, list[measuring.Row]]:
        asked.append(settings)
        rows = [
            measuring.Row(
                way=way,
                nbytes=nbytes,
                median_s=1e-3,
                p90_s=2e-3,
                algorithm_bandwidth=nbytes * 1e3,
                bus_bandwidth=nbytes * 1.5e3,
                wrong=0,
            )
            for way in settings.ways
            for nbytes in settings.sizes
        ]
        return "shm", rows

    monkeypatch.setattr(measuring, "measure", measure)
    monkeypatch.setattr(bench, "start_ray", asked.append)
    return asked


def test_what_the_command_offers_is_what_there_is() -> None:
    from raycollect.cli import measuring

    assert (tuple(measuring.OPERATIONS), tuple(measuring.WAYS)) == (bench.OPERATIONS, bench.WAYS)


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("4:64M", tuple(4 ** (at + 1) for at in range(13))),
        ("4:63", (4, 16)),
        ("1K:1k", (1024,)),
        ("4, 1K,1M,4", (4, 1 << 10, 1 << 20)),
        ("1G", (1 << 30,)),
    ],
)
def test_sizes_are_a_range_or_a_list(text: str, sizes: tuple[int, ...]) -> None:
    assert bench.sizes_of(text) == sizes


def test_an_allreduce_is_timed_by_default(timed: list[Any]) -> None:
    from raycollect.cli import measuring

    result = run_command("bench")
    assert (result.exit_code, result.stderr) == (0, "")
    address, settings = timed
    assert address is None
    assert settings == measuring.Settings(
        operation="allreduce",
        ranks=2,
        sizes=tuple(4 ** (at + 1) for at in range(13)),
        backend="auto",
        runs=20,
        ways=("captured", "refs", "members"),
    )
    lines = result.stdout.splitlines()
    assert lines[0] == "allreduce of float32 between 2 actors over shm, 20 runs each"
    assert [line for line in lines if line in settings.ways] == ["captured", "refs", "members"]
    assert lines[-1].split() == ["64", "MiB", "1", "ms", "2", "ms", "67.109", "100.663", "0"]


def test_what_is_timed_can_be_said(timed: list[Any]) -> None:
    options = ["--ranks", "3", "--sizes", "1K,1M", "--backend", "tcp", "--runs", "7", "--ways", "members,refs"]
    result = run_command("bench", "allgather", *options, "--address", "10.0.0.1:6379", "--json")
    assert result.exit_code == 0
    address, settings = timed
    assert (address, settings.operation, settings.ranks, settings.backend) == ("10.0.0.1:6379", "allgather", 3, "tcp")
    told = json.loads(result.stdout)
    assert (told["operation"], told["backend"], told["runs"]) == ("allgather", "shm", 7)
    assert [(row["way"], row["nbytes"]) for row in told["rows"]] == [
        ("members", 1 << 10),
        ("members", 1 << 20),
        ("refs", 1 << 10),
        ("refs", 1 << 20),
    ]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["scan"], "'scan'"),
        (["--ranks", "1"], "1"),
        (["--runs", "0"], "0"),
        (["--sizes", "0"], "'0' is not a number of bytes"),
        (["--sizes", "4:"], "'' is not a number of bytes"),
        (["--sizes", "1K,12T"], "'12T' is not a number of bytes"),
        (["--sizes", "1M:4"], "1M is more than 4"),
        (["--ways", "refs,graph"], "'graph' is none of captured, refs, members"),
        (["--ways", ""], "'' is none of"),
        (["--between", "50", "25"], "Give --calibrate with --between"),
        (["--calibrate", "allreduce"], "leave OPERATION out"),
        (["--calibrate", "--runs", "5"], "leave --runs out"),
    ],
)
def test_a_collective_that_can_not_be_timed_is_a_usage_error(timed: list[Any], args: list[str], says: str) -> None:
    result = run_command("bench", *args)
    assert (result.exit_code, result.stdout, timed) == (2, "", [])
    assert says in result.stderr


@pytest.mark.parametrize(
    ("operation", "result"),
    [
        ("allreduce", [[6] * 9] * 3),
        ("broadcast", [[1] * 9] * 3),
        ("allgather", [[1, 1, 1, 2, 2, 2, 3, 3, 3]] * 3),
        ("reducescatter", [[6] * 3] * 3),
        ("alltoall", [[1, 1, 1, 2, 2, 2, 3, 3, 3]] * 3),
        ("send", [None, [1] * 9, None]),
    ],
)
def test_a_result_that_is_not_what_the_ranks_gave_is_wrong(operation: str, result: list[list[int] | None]) -> None:
    from raycollect.cli.measuring import Rank, whole_of

    whole = whole_of(operation, 3, 36 + 3)
    for rank, expected in enumerate(result):
        one = Rank(rank, 3)
        one.prepare(operation, whole)
        one.fill()
        assert one.given.tolist() == [rank + 1] * (3 if operation == "allgather" else 9)
        if expected is None:
            assert one.wrong() == 0, "it has no result"
            continue
        assert one.taken.shape == (len(expected),)
        one.taken[:] = expected
        assert one.wrong() == 0
        assert not one.taken.any()
        one.taken[:] = expected
        one.taken[-1] += 1
        assert one.wrong() == 1
