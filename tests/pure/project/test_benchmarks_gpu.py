"""The script that checks and times GPUs: all of it on the fake of cupy, and what it does when things go wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks import gpu, gpu_ipc, gpu_ranks
from benchmarks.gpu import Line, Part, Run
from raycollect.core.model import OpKind, ReduceOp
from tests.gpu import devices
from tests.pure.conformance import Case
from tests.pure.operands import operand

ROOT = Path(__file__).parents[3]
BOTH = {gpu_ranks.OURS: 200.0, gpu_ranks.BARE: 100.0, gpu_ranks.COPY: 50.0}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """A run on a machine where one rank can be had, and no more; its teams are nothing."""
    monkeypatch.setattr(devices, "why_not_so_many", lambda ranks: "one is all there is" if ranks > 1 else "")
    monkeypatch.setattr(gpu, "form", lambda *_: SimpleNamespace(close=lambda: None))
    return Run(quick=True, file=tmp_path / "lines.json")


def _part(lines, *, ranks=1, budget_s=5.0):
    return Part(name="bandwidth", ranks=ranks, budget_s=budget_s, lines=lines)


# ---------------------------------------------------------------------------------------------- all of it


def _on_the_fake(folder: Path, *arguments: str) -> tuple[list[dict[str, Any]], str]:
    """Runs the script in a process of its own; gives its lines, and what it printed."""
    file, script = folder / "lines.json", ROOT / "benchmarks" / "gpu.py"
    environment = os.environ | {"RAYCOLLECT_FAKE_GPU": "1"}
    environment.pop("PYTHONPATH", None)  # it finds what it needs by itself
    ended = subprocess.run(
        [sys.executable, str(script), "--quick", "--json", str(file), *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        env=environment,
        cwd=folder,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return json.loads(file.read_text())["lines"], ended.stdout


def test_the_whole_script_on_the_fake(tmp_path: Path) -> None:
    lines, said = _on_the_fake(tmp_path)
    assert {(line["part"], line["ranks"]) for line in lines} == {
        *((part, ranks) for part in ("checks", "bandwidth", "overhead", "graphs") for ranks in (1, 2)),
        (gpu_ipc.PART, 2),
    }
    assert all(line["ok"] for line in lines)
    checked = {line["case"] for line in lines if line["part"] == "checks" and line["ranks"] == 2}
    assert checked == {f"{kind.value} of {dtype}" for kind in gpu.KINDS for dtype in gpu.FAKED_DTYPES}
    timed = [line for line in lines if line["part"] in ("bandwidth", gpu_ipc.PART)]
    assert {line["case"] for line in timed} == set(gpu_ranks.OPS) == set(gpu_ipc.OPS)
    assert all(min(line["times_us"].values()) > 0 for line in timed)
    assert "of NCCL" in said.rpartition("right")[2], "the table comes last"


def test_only_the_parts_that_are_named_run(tmp_path: Path) -> None:
    lines, _ = _on_the_fake(tmp_path, "--limit", "60", "--parts", "overhead", "graphs")
    assert {line["part"] for line in lines} == {"overhead", "graphs"}
    with pytest.raises(SystemExit):
        gpu.main(["--parts", "no such part"])


def test_each_line_is_in_the_file_at_once(run: Run, tmp_path: Path) -> None:
    """A machine that is taken away leaves what was found there."""
    seen = []

    def lines(team, quick):
        for case in ("allreduce", "broadcast"):
            yield Line(part="bandwidth", ranks=1, case=case)
            seen.append([line["case"] for line in json.loads((tmp_path / "lines.json").read_text())["lines"]])

    run.part(_part(lines))
    assert seen == [["allreduce"], ["allreduce", "broadcast"]]


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(devices, "FAKE", False)
    monkeypatch.setattr(devices, "why_none", lambda: "no GPU to test on: nobody sees one")
    assert gpu.main([]) == 2
    assert "nobody sees one" in capsys.readouterr().out


# ---------------------------------------------------------------------------------------------- what goes wrong


def test_what_can_not_run_here_says_so_and_the_rest_goes_on(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run.part(_part(lambda team, quick: iter(()), ranks=2))
    run.part(_part(lambda team, quick: iter([Line(part="bandwidth", ranks=1, times_us=BOTH, nbytes=1 << 20)])))
    assert run.report() == 0
    said = capsys.readouterr().out
    assert "can't run here: one is all there is" in said
    assert "reached in 0 of 1" in said


def test_a_part_that_fails_does_not_end_the_run(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(team, quick):
        yield Line(part="bandwidth", ranks=1, case="allreduce", times_us=BOTH, nbytes=1024)
        raise ValueError("the card is on fire")

    run.part(_part(broken))
    run.part(_part(lambda team, quick: iter([Line(part="bandwidth", ranks=1, case="broadcast", said="fine")])))
    assert [line.case for line in run.lines] == ["allreduce", "", "broadcast"]
    assert run.report() == 1
    assert "the card is on fire" in capsys.readouterr().out


def test_a_part_stops_when_its_time_is_over(run: Run) -> None:
    given = [Line(part="bandwidth", ranks=1, case=str(at)) for at in range(5)]
    run.part(_part(lambda team, quick: iter(given), budget_s=0.0))
    assert [line.case for line in run.lines] == ["0", ""]
    assert "stopped" in run.lines[-1].said
    assert run.report() == 0


def test_a_part_that_does_not_end_is_left_behind(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "GRACE_S", 0.0)
    go_on, ended = threading.Event(), threading.Event()

    def stuck(team, quick):
        try:
            go_on.wait(20)
            yield Line(part="bandwidth", ranks=1, case="too late")
        finally:
            ended.set()

    run.part(_part(stuck, budget_s=0.05))
    assert "did not end" in run.lines[-1].said
    run.part(_part(lambda team, quick: iter([Line(part="bandwidth", ranks=1, case="the next one")])))
    go_on.set()
    assert ended.wait(20)
    assert [line.case for line in run.lines] == ["", "the next one"]
    assert run.report() == 3


def test_the_watchdog_ends_it_with_what_it_has(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    codes: list[int] = []
    monkeypatch.setattr(gpu.os, "_exit", codes.append)
    run.part(_part(lambda team, quick: iter([Line(part="bandwidth", ranks=1, case="scatter", said="a result")])))
    run.give_up(3.0)
    assert codes == [3]
    assert "watchdog" in capsys.readouterr().out
    assert [line["case"] for line in json.loads((tmp_path / "lines.json").read_text())["lines"]] == ["scatter", ""]


# ---------------------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "complex64"])
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT])
@pytest.mark.parametrize("seed", [0, 1])
def test_rounding_is_allowed_and_nothing_more(dtype: str, op: ReduceOp, seed: int) -> None:
    world, size = 3, 257
    case = Case(kind=OpKind.ALLREDUCE, dtype=dtype, size=size, op=op, seed=seed)
    rank = SimpleNamespace(rank=1, world_size=world)
    parts = [operand(of, dtype, size, seed).astype("complex128" if dtype[0] == "c" else "float64") for of in range(3)]
    exact = {ReduceOp.SUM: np.sum, ReduceOp.AVG: np.mean, ReduceOp.PRODUCT: np.prod}[op](parts, axis=0)
    got = exact.astype(dtype)
    assert gpu_ranks._off(case, rank, got, got) == ""
    wrong = got.copy()
    wrong[seed + 100] = parts[0][seed + 100] * 30
    assert "1 of 257" in gpu_ranks._off(case, rank, got, wrong)


@pytest.mark.parametrize("dtype", ["int16", "bool", "float32"])
def test_what_is_only_moved_has_its_bits(dtype: str) -> None:
    values = operand(0, dtype, 33)
    case, rank = Case(kind=OpKind.ALLGATHER, dtype=dtype, size=33), SimpleNamespace(rank=0, world_size=2)
    other = values.copy()
    other[7] = ~other[7] if dtype != "float32" else np.nextafter(other[7], np.float32(9))
    assert gpu_ranks._off(case, rank, (values, values), (values, values)) == ""
    assert "piece 1" in gpu_ranks._off(case, rank, (values, values), (values, other))


def test_the_slowest_rank_counts() -> None:
    ranks = [{"a": [1.0, 2.0, 9.0], "b": [0.5]}, {"a": [3.0, 3.0, 3.0], "b": [0.25]}]
    assert gpu.slowest(ranks) == {"a": 3000.0, "b": 500.0}


def test_columns_stand_one_under_the_other() -> None:
    assert gpu.columns([("op", "GB/s"), ("allreduce", "7")]) == ["op         GB/s", "allreduce     7"]


def test_the_goal_counts_from_a_megabyte_on() -> None:
    def line(nbytes: int, ours: float) -> Line:
        return Line(part="bandwidth", ranks=1, case="allreduce", nbytes=nbytes, times_us=BOTH | {gpu_ranks.OURS: ours})

    shown = gpu.table({"gpu": "one"}, [line(1 << 10, 900.0), line(1 << 20, 104.0), line(1 << 26, 120.0)])
    assert "reached in 1 of 2" in shown
    assert "96%" in shown


def test_ranks_that_share_a_gpu_have_a_goal_of_their_own() -> None:
    def line(case: str, nbytes: int, ours: float) -> Line:
        times = {gpu_ranks.OURS: ours, gpu_ranks.COPY: 70.0}
        return Line(part=gpu_ipc.PART, ranks=2, case=case, nbytes=nbytes, times_us=times)

    lines = [line("allreduce", 1 << 10, 900.0), line("allreduce", 1 << 20, 99.0), line("allreduce", 1 << 26, 101.0)]
    shown = gpu.table({"gpu": "one"}, [*lines, line("broadcast", 1 << 26, 70.0)])
    assert "reached in 1 of 2" in shown
    assert "71%" in shown
