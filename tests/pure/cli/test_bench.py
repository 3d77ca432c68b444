"""The command `bench`: what it refuses, and what it measures for the planner."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from raycollect.cli import harness
from raycollect.group import link_costs
from tests.pure.cli.command_line import run_command


def test_calibrating_writes_where_the_planner_reads_or_refuses_a_busy_machine(tmp_path: Path) -> None:
    environ = {"XDG_CONFIG_HOME": str(tmp_path), "RAYCOLLECT_COSTS": None}
    result = run_command("bench", "--calibrate", "--between", "50", "25", "--json", environ=environ)
    costs = link_costs.current({"XDG_CONFIG_HOME": str(tmp_path)})
    if result.exit_code:
        assert (result.exit_code, result.stdout, costs) == (1, "", link_costs.Costs())
        return
    assert [link["backend"] for link in json.loads(result.stdout)] == ["shm", "tcp", "tcp"]
    assert [(link.place, link.backend) for link in costs.measured[-1:]] == [("between", "tcp")]
    assert (costs.between.latency_s, costs.between.bandwidth) == (pytest.approx(5e-5), pytest.approx(25e9 / 8))


@pytest.mark.parametrize(
    "args",
    [
        ["--output", "x.json"],
        ["--between", "50", "25"],
        ["--calibrate", "--between", "0", "25"],
        ["--calibrate", "--between", "nan", "25"],
        ["--calibrate", "--between", "50", "inf"],
        ["--calibrate", "--between", "50"],
        ["--calibrate", "allreduce"],
        ["--calibrate", "--runs", "5"],
        ["scan"],
        ["--ranks", "1"],
        ["--runs", "0"],
        ["--sizes", "0"],
        ["--sizes", "4:"],
        ["--sizes", "1K,12T"],
        ["--sizes", "1M:4"],
        ["--sizes", "1:2:4"],
        ["--ways", "refs,graph"],
        ["--ways", ""],
    ],
)
def test_a_wrong_bench_is_a_usage_error(args: list[str]) -> None:
    result = run_command("bench", *args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr


class Counting:
    """A contender that lists what is asked of it, in a list that all share."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self.name, self.calls, self.runs = name, calls, 0

    def prepare(self, nbytes: int) -> None:
        self.calls.append(f"prepare {self.name}")

    def fill(self) -> None:
        self.runs = 0

    def run(self, count: int) -> list[float]:
        self.calls.append(self.name)
        self.runs += count
        return [1.0] * count

    def check(self, runs: int) -> None:
        assert runs == self.runs <= harness.RUNS_PER_ROUND

    def close(self) -> None: ...


def test_contenders_take_turns_in_orders_that_are_drawn() -> None:
    calls: list[str] = []
    contenders = [Counting(name, calls) for name in "abc"]
    spent_s = harness.interleave(contenders, nbytes=4, runs=40, warmup=1, burst=2)
    assert spent_s == dict.fromkeys("abc", [1.0] * 40)
    turns = [tuple(calls[at : at + 3]) for at in range(3, len(calls), 3)]
    assert {tuple(sorted(turn)) for turn in turns} == {("a", "b", "c")}
    assert len(turns) == 21
    draw = random.Random(4)
    assert turns == [tuple(one.name for one in draw.sample(contenders, 3)) for _ in turns]
