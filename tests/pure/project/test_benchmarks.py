"""The benchmarks: who is timed when and is left out why; the suites of plans, captured steps and training."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("rich", reason="the benchmarks need what `make bench` installs")

from benchmarks import unchecked
from benchmarks.interleave import RUNS_PER_ROUND, interleave, timed
from benchmarks.report import Skip, Skipped
from benchmarks.suite import Choice, close, entry, gather
from benchmarks.suites import captured, training
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


def test_nobody_always_follows_the_same_one():
    """Whoever comes next pays for what one leaves behind, so each of the others has to come next now and then."""
    story, fakes = _fakes(1.0, 1.0, 1.0)
    interleave(fakes, nbytes=4, runs=40, warmup=0)
    ran = "".join(name for what, name, *_ in story if what == "run")
    turns = [ran[at : at + 3] for at in range(0, len(ran), 3)]
    assert all(sorted(turn) == ["a", "b", "c"] for turn in turns)
    assert {turn[0] for turn in turns} == {"a", "b", "c"}
    assert {turn[at : at + 2] for turn in turns for at in (0, 1)} == {"ab", "ac", "ba", "bc", "ca", "cb"}


def test_operands_are_filled_before_every_round():
    story, fakes = _fakes(1.0, 1.0)
    interleave(fakes, nbytes=4, runs=2 * RUNS_PER_ROUND + 1, warmup=0)
    assert story.count(("fill", "a")) == story.count(("fill", "b")) == 3
    assert story[:4] == [("prepare", "a", 4), ("prepare", "b", 4), ("fill", "a"), ("fill", "b")]


def test_the_warmup_is_not_timed():
    story, fakes = _fakes(1.0)
    assert len(interleave(fakes, nbytes=4, runs=5, warmup=7)["a"]) == 5
    assert story.count(("run", "a")) == 12


def test_a_burst_is_one_turn():
    story, fakes = _fakes(0.5, 1.0)
    times = interleave(fakes, nbytes=4, runs=25, warmup=1, burst=10)
    assert [len(spent) for spent in times.values()] == [30, 30]
    assert story.count(("run", "a")) == 4


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


def test_who_fails_to_start_is_not_taken_for_skipped_and_the_others_are_closed():
    _, (fake,) = _fakes(1.0)

    def failing(name):
        raise ValueError("no port")

    with pytest.raises(ValueError, match="no port"):
        gather("kernel", [entry("a", lambda name: fake), entry("z", failing)])
    assert fake.closed


def test_all_are_closed_though_one_fails_to():
    _, fakes = _fakes(1.0, 1.0, 1.0)

    def refuse():
        raise OSError("stuck")

    fakes[1].close = refuse
    with pytest.raises(OSError, match="stuck"):
        close(fakes)
    assert fakes[0].closed
    assert fakes[2].closed


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


def test_a_burst_of_the_captured_suite_stays_within_float32():
    for ranks in (2, 4, 16):
        assert ranks * (ranks + 1) / 2 * float(ranks) ** (captured.BURST - 1) < np.finfo(np.float32).max


def test_an_iteration_is_its_share_of_the_burst():
    class Three(training.Training):
        def __init__(self):
            self.done = []

        def operate(self):
            self.done.append("iteration")

        def finish(self):
            self.done.append("finish")

    three = Three()
    times = three.run(3)
    assert three.done == ["iteration"] * 3 + ["finish"]
    assert len(times) == 3
    assert len(set(times)) == 1


def test_the_gradient_of_the_training_target_is_that_of_the_example():
    digits = pytest.importorskip("examples.digits", reason="no scikit-learn")
    nbytes = {one.nbytes for one in TARGETS if isinstance(one, Target) and one.suite == "training"}
    assert nbytes == {digits.train_in_one_process(digits.load()[0], 1).nbytes}
