"""The benchmarks: who is timed when and is left out why; the suites of plans, captured steps and training."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("rich", reason="the benchmarks need what `make bench` installs")

from benchmarks import unchecked
from benchmarks.interleave import RUNS_PER_ROUND, interleave, timed
from benchmarks.report import Skip, Skipped
from benchmarks.suite import Choice, close, entry, gather
from benchmarks.suites.plan import Planner
from benchmarks.targets import TARGETS, Target
from raycollect.core.model import OpKind
from tests.pure.communicators import ThreadTeam


class Clock:
    """Time that passes only when somebody works."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Fake:
    """Adds one per run, takes a known time, and tells everybody's story."""

    def __init__(self, name, story, clock, cost_s, *, wrong=False):
        self.name, self._story, self._clock, self._cost_s, self._wrong = name, story, clock, cost_s, wrong
        self.value = None
        self.closed = False

    def prepare(self, nbytes):
        self._story.append(("prepare", self.name, nbytes))

    def fill(self):
        self._story.append(("fill", self.name))
        self.value = 0

    def run(self, count):
        self._story.append(("run", self.name))
        return timed(self._work, count, self._clock)

    def _work(self):
        self._clock.now_s += self._cost_s
        self.value += 2 if self._wrong else 1

    def check(self, runs):
        if self.value != runs:
            raise AssertionError(f"{self.name}: {self.value} after {runs} runs")

    def close(self):
        self.closed = True


def _fakes(*costs_s, **options):
    story, clock = [], Clock()
    return story, [Fake(chr(ord("a") + at), story, clock, cost, **options) for at, cost in enumerate(costs_s)]


# ---------------------------------------------------------------------------------------------- interleave


def test_each_contender_is_timed_so_many_times_and_alone():
    _, fakes = _fakes(0.001, 0.25, 3.0)
    times = interleave(fakes, nbytes=4, runs=19)
    assert {name: len(spent) for name, spent in times.items()} == {"a": 19, "b": 19, "c": 19}
    assert times["a"] == pytest.approx([1.0] * 19)
    assert times["b"] == pytest.approx([250.0] * 19)
    assert times["c"] == pytest.approx([3000.0] * 19)


@pytest.mark.parametrize("runs", [1, RUNS_PER_ROUND, 30])
def test_a_wrong_result_ends_the_measurement(runs):
    _, fakes = _fakes(1.0, wrong=True)
    with pytest.raises(AssertionError, match="a: "):
        interleave(fakes, nbytes=4, runs=runs)


# ---------------------------------------------------------------------------------------------- suite


def test_who_is_not_installed_is_named_with_the_reason():
    _, (fake,) = _fakes(1.0)

    def missing(name):
        raise Skipped("it is not there")

    def broken(name):
        raise ModuleNotFoundError("No module named 'pygloo'")

    made, skipped = gather("kernel", [entry("x", missing), entry("a", lambda name: fake), entry("y", broken)])
    assert made == [fake]
    assert skipped == [
        Skip(suite="kernel", contender="x", reason="it is not there"),
        Skip(suite="kernel", contender="y", reason="No module named 'pygloo'"),
    ]
    close(made)
    assert fake.closed


def test_what_was_chosen_wins():
    assert Choice(runs=7).runs_or(1, 2) == Choice(runs=7, quick=True).runs_or(1, 2) == 7
    assert Choice(quick=True).runs_or(1, 2) == 1
    assert Choice().runs_or(1, 2) == 2


# ---------------------------------------------------------------------------------------------- plan


@pytest.mark.parametrize("fresh", [True, False])
def test_the_planner_is_checked_too(fresh):
    planner = Planner("p", 3, fresh=fresh)
    times = interleave([planner], nbytes=0, runs=4)
    assert len(times["p"]) == 4
    planner.fill()
    with pytest.raises(AssertionError, match="0 programs"):
        planner.check(1)


# ---------------------------------------------------------------------------------------------- captured, training


@pytest.mark.parametrize("ranks", [2, 3])
def test_without_the_check_a_collective_is_the_same(fleet, ranks):
    made, team = fleet(ranks), ThreadTeam("shm", ranks)
    made.communicators = team.communicators
    held = [np.full(1, rank + 1, np.float32) for rank in range(ranks)]
    keys = made.keep_all(held)
    try:
        made.must(OpKind.ALLREDUCE, keys)
        for at, there in enumerate([False, True, False, False, True], 1):
            before = unchecked.left_out()
            unchecked.set_check(there)
            made.must(OpKind.ALLREDUCE, keys)
            assert (unchecked.left_out() > before) is not there
            total = ranks * (ranks + 1) / 2 * ranks**at
            assert [array.tolist() for array in held] == [[total]] * ranks
    finally:
        unchecked.set_check(True)
        team.close()


def test_without_the_check_operands_of_another_shape_still_agree(fleet):
    made, team = fleet(2), ThreadTeam("shm", 2)
    made.communicators = team.communicators
    unchecked.set_check(False)
    try:
        before = unchecked.left_out()
        for size in (1, 2, 3):
            held = [np.ones(size, np.float32), np.ones(size, np.float32)]
            made.must(OpKind.ALLREDUCE, made.keep_all(held))
            assert [array.tolist() for array in held] == [[2.0] * size] * 2
        assert unchecked.left_out() == before
    finally:
        unchecked.set_check(True)
        team.close()


def test_the_gradient_of_the_training_target_is_that_of_the_example():
    digits = pytest.importorskip("examples.digits", reason="no scikit-learn")
    nbytes = {one.nbytes for one in TARGETS if isinstance(one, Target) and one.suite == "training"}
    assert nbytes == {digits.train_in_one_process(digits.load()[0], 1).nbytes}
