"""The ledger: plans start after their predecessors, and an aborted plan never runs."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raycollect.member.sequencer import PlanSequencer, arrivals
from raycollect.observe import Recorder, Tracer
from raycollect.observe.trace import WAIT
from tests.pure.watched import WAIT_S, WatchedCondition


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as pool:
        yield pool


def _sequencer() -> tuple[PlanSequencer, WatchedCondition]:
    sequencer, watched = PlanSequencer(), WatchedCondition()
    sequencer._changed = sequencer._lock = watched
    return sequencer, watched


# ---------------------------------------------------------------------------------------------- abort


def test_close_wakes_waiters_and_refuses_later_plans(threads: ThreadPoolExecutor) -> None:
    sequencer, watched = _sequencer()
    sequencer.start(1, 0)
    third = threads.submit(sequencer.start, 3, 2)
    assert watched.someone_waits()
    assert sequencer.close("the controller is gone") == (1,)
    assert third.result(WAIT_S) == "the controller is gone"
    assert sequencer.reason(1) == "the controller is gone"
    assert sequencer.start(4, 3) == "the controller is gone"


# ---------------------------------------------------------------------------------------------- followers


class _Releasing:
    """A lock; once, its release lets another thread end plan 1 before the thread that held it goes on."""

    def __init__(self, sequencer: PlanSequencer, threads: ThreadPoolExecutor) -> None:
        self._lock, self._sequencer, self._threads = threading.RLock(), sequencer, threads
        self._is_due = True

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *exc: object) -> None:
        self._lock.release()
        if self._is_due:
            self._is_due = False
            self._threads.submit(self._sequencer.end, 1).result(WAIT_S)


def test_a_plan_follows_once_if_its_predecessor_ends_meanwhile(threads: ThreadPoolExecutor) -> None:
    sequencer, calls = PlanSequencer(), list[int]()
    sequencer.start(1, 0)
    sequencer._lock = _Releasing(sequencer, threads)  # type: ignore[assignment]
    sequencer.when_ended((1,), lambda: calls.append(2))
    assert calls == [2]


# ---------------------------------------------------------------------------------------------- memory


def _nbytes(sequencer: PlanSequencer) -> int:
    return sum(sys.getsizeof(value) for value in vars(sequencer).values() if isinstance(value, (dict, set, list)))


def test_memory_stays_bounded_when_every_other_plan_is_aborted() -> None:
    sequencer = PlanSequencer()
    for seq in range(1, 10_001):
        if seq % 2:
            sequencer.abort(seq, "cancelled")
            assert sequencer.start(seq, seq - 1) == "cancelled"
        else:
            assert sequencer.start(seq, seq - 1) is None
        sequencer.end(seq)
        assert len(sequencer._ended) <= 3
    assert sequencer.aborted == {}
    assert _nbytes(sequencer) < 2_000


# ---------------------------------------------------------------------------------------------- any story
@given(st.lists(st.tuples(st.sampled_from(["come", "end", "abort"]), st.integers(1, 3)), max_size=40))
def test_no_plan_runs_before_its_predecessor_or_after_its_abort(events: list[tuple[str, int]]) -> None:
    """One thread plays all: a plan comes only where `start` would not wait."""
    sequencer = PlanSequencer()
    ended: set[int] = {0}
    aborted: set[int] = set()
    running: set[int] = set()
    for event, seq in events:
        if event == "come" and seq not in ended | running and seq - 1 in ended:
            reason = sequencer.start(seq, seq - 1)
            assert (reason is not None) == (seq in aborted)
            if reason is None:
                running.add(seq)
            else:
                sequencer.end(seq)
                aborted.discard(seq)
                ended.add(seq)
        elif event == "end" and seq in running:
            sequencer.end(seq)
            running.discard(seq)
            aborted.discard(seq)
            ended.add(seq)
        elif event == "abort":
            assert sequencer.abort(seq, "because") == (seq in ended)
            if seq not in ended:
                aborted.add(seq)
        assert sequencer.running() == tuple(sorted(running))
        for other in aborted:
            assert sequencer.reason(other) == "because"


def test_aborts_at_any_moment_leave_no_thread_waiting(threads: ThreadPoolExecutor) -> None:
    for seed in range(20):
        sequencer = PlanSequencer()
        barrier = threading.Barrier(9)
        rng = random.Random(seed)
        doomed = set(rng.sample(range(1, 9), 3))

        def run(seq: int, sequencer: PlanSequencer = sequencer, barrier: threading.Barrier = barrier) -> str | None:
            barrier.wait(WAIT_S)
            reason = sequencer.start(seq, seq - 1)
            sequencer.end(seq)
            return reason

        futures: dict[int, Future[str | None]] = {seq: threads.submit(run, seq) for seq in range(8, 0, -1)}
        barrier.wait(WAIT_S)
        for seq in doomed:
            sequencer.abort(seq, "doomed")
        reasons = {seq: future.result(WAIT_S) for seq, future in futures.items()}
        assert {seq for seq, reason in reasons.items() if reason} <= doomed
        assert sequencer.running() == ()


# ---------------------------------------------------------------------------------------------- checks


def test_story_records_arrivals_at_checks() -> None:
    now_s = iter(range(100))
    recorder = Recorder(lambda: float(next(now_s)))
    for what, seq in [
        ("start", 3),
        ("check", 3),
        ("check", 3),
        ("agreed", 3),
        ("check", 4),
        ("start", 5),
        ("failed", 5),
    ]:
        recorder.add(what, seq)
    recorder.add("check", 3)  # the second round
    assert arrivals(recorder.story(), 10.0) == {4: 6.0, 3: 3.0}
    assert arrivals(recorder.story(), 6.5) == {4: 2.5, 3: 0.0}, "what came since it was asked is no time in the future"
    assert arrivals((), 1.0) == {}


@pytest.mark.parametrize("seed", range(5))
def test_plans_that_wait_without_a_thread_go_on_in_their_order(seed: int) -> None:
    count, sequencer, went = 37, PlanSequencer(), list[int]()
    coming = list(range(1, count + 1))
    random.Random(seed).shuffle(coming)

    def go(seq: int) -> None:
        assert sequencer.start(seq, seq - 1) is None  # would wait for ever, were it too early
        went.append(seq)

    for seq in coming:
        sequencer.after(seq, seq - 1, lambda seq=seq: go(seq))  # type: ignore[misc]
        while sequencer.running():  # as the thread of each does
            sequencer.end(sequencer.running()[0])
    assert went == list(range(1, count + 1))
    assert not sequencer._later


def test_nothing_goes_on_after_the_close() -> None:
    sequencer, went = PlanSequencer(), list[int]()
    sequencer.start(1, 0)
    sequencer.after(2, 1, lambda: went.append(2))
    sequencer.close("the controller is gone")
    sequencer.end(1)
    sequencer.after(3, 2, lambda: went.append(3))
    sequencer.after(4, 0, lambda: went.append(4))
    assert went == []


def test_a_wait_without_a_thread_is_in_the_timeline() -> None:
    tracer, times = Tracer(), iter([5.0, 8.0])
    ring = tracer.begin("a test")
    assert ring is not None
    ring.clock = lambda: next(times)
    sequencer = PlanSequencer(tracer)
    sequencer.start(1, 0)
    sequencer.after(2, 1, lambda: sequencer.start(2, 1))
    sequencer.end(1)
    (span,) = ring.read().spans
    assert (span.kind, span.name, span.begin_s, span.end_s, span.seq) == (WAIT, "earlier plans", 5.0, 8.0, 2)
    assert not sequencer._arrived_s
