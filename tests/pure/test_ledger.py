"""The ledger: plans start after their predecessors, and an aborted plan never runs."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raycollect.ledger import Ledger

CALM = settings(deadline=None)  # the machine's load is none of these tests' business

WAIT_S = 20.0


class WatchedCondition(threading.Condition):
    """Tells how many waits have begun, so that no test sleeps to see that something waits."""

    def __init__(self) -> None:
        super().__init__()
        self._begun = threading.Semaphore(0)

    def wait(self, timeout: float | None = None) -> bool:
        self._begun.release()
        if not super().wait(timeout if timeout is not None else WAIT_S):
            raise TimeoutError("nobody ended this wait")
        return True

    def someone_waits(self) -> bool:
        """True once one more wait has begun; whoever began it holds the lock until it really waits."""
        return self._begun.acquire(timeout=WAIT_S)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as pool:
        yield pool


def _ledger() -> tuple[Ledger, WatchedCondition]:
    ledger, watched = Ledger(), WatchedCondition()
    ledger._changed = watched
    return ledger, watched


def test_the_first_plan_starts_at_once() -> None:
    ledger = Ledger()
    assert ledger.start(1, 0) is None
    assert ledger.running() == (1,)
    ledger.end(1)
    assert ledger.running() == ()


def test_numbers_of_plans_that_went_elsewhere_are_skipped() -> None:
    ledger = Ledger()
    for seq, predecessor in ((5, 0), (9, 5), (40, 9)):
        assert ledger.start(seq, predecessor) is None
        ledger.end(seq)


def test_a_plan_waits_for_its_predecessor(threads: ThreadPoolExecutor) -> None:
    ledger, watched = _ledger()
    ledger.start(1, 0)
    second = threads.submit(ledger.start, 2, 1)
    assert watched.someone_waits()
    assert not second.done()
    assert ledger.running() == (1,)
    ledger.end(1)
    assert second.result(WAIT_S) is None
    assert ledger.running() == (2,)


def test_a_plan_waits_for_a_predecessor_that_has_not_come(threads: ThreadPoolExecutor) -> None:
    ledger, watched = _ledger()
    second = threads.submit(ledger.start, 2, 1)
    assert watched.someone_waits()
    assert ledger.start(1, 0) is None
    assert not second.done()
    ledger.end(1)
    assert second.result(WAIT_S) is None


@pytest.mark.parametrize("seed", range(10))
def test_plans_that_come_in_any_order_run_in_theirs(seed: int, threads: ThreadPoolExecutor) -> None:
    ledger = Ledger()
    seqs = sorted(random.Random(seed).sample(range(1, 100), 12))
    chain = list(zip(seqs, [0, *seqs[:-1]], strict=True))
    random.Random(seed + 1).shuffle(chain)
    ran: list[int] = []

    def run(seq: int, predecessor: int) -> None:
        assert ledger.start(seq, predecessor) is None
        assert ledger.running() == (seq,), "one at a time"
        ran.append(seq)
        ledger.end(seq)

    for future in [threads.submit(run, *link) for link in chain]:
        future.result(WAIT_S)
    assert ran == seqs


# ---------------------------------------------------------------------------------------------- abort


def test_a_plan_aborted_before_it_comes_does_not_run() -> None:
    ledger = Ledger()
    assert ledger.abort(1, "rank 2 died") is False, "nobody has to be woken"
    assert ledger.reason(1) == "rank 2 died"
    assert ledger.start(1, 0) == "rank 2 died"
    assert ledger.running() == ()


def test_an_aborted_plan_counts_as_ended_before_it_comes() -> None:
    ledger = Ledger()
    ledger.abort(1, "cancelled")
    assert ledger.start(2, 1) is None
    ledger.end(2)
    assert ledger.start(1, 0) == "cancelled", "a tombstone: it comes late, and does nothing"
    ledger.end(1)
    assert ledger.start(3, 2) is None


def test_aborting_a_plan_that_waits_wakes_it(threads: ThreadPoolExecutor) -> None:
    ledger, watched = _ledger()
    ledger.start(1, 0)
    second = threads.submit(ledger.start, 2, 1)
    assert watched.someone_waits()
    assert ledger.abort(2, "cancelled") is False, "it was in no communicator"
    assert second.result(WAIT_S) == "cancelled"
    assert ledger.running() == (1,)


def test_aborting_a_plan_wakes_the_one_that_waits_for_it(threads: ThreadPoolExecutor) -> None:
    ledger, watched = _ledger()
    second = threads.submit(ledger.start, 2, 1)
    assert watched.someone_waits()
    ledger.abort(1, "never sent")
    assert second.result(WAIT_S) is None


def test_aborting_a_running_plan_says_that_it_must_be_woken() -> None:
    ledger = Ledger()
    ledger.start(1, 0)
    assert ledger.abort(1, "cancelled") is True
    assert ledger.reason(1) == "cancelled"
    assert ledger.running() == (1,), "until it has ended, however"
    assert ledger.abort(1, "again") is True, "it has not ended yet"


def test_a_plan_has_run_once_it_came_and_ended() -> None:
    ledger = Ledger()
    assert not ledger.has_run(1)
    ledger.start(1, 0)
    assert not ledger.has_run(1)
    ledger.end(1)
    assert ledger.has_run(1)
    ledger.abort(2, "cancelled")
    assert not ledger.has_run(2), "a tombstone has not come"
    ledger.start(3, 2)
    ledger.end(3)
    assert ledger.has_run(3)
    assert not ledger.has_run(2)


def test_the_successor_of_an_aborted_running_plan_waits_for_its_end(threads: ThreadPoolExecutor) -> None:
    ledger, watched = _ledger()
    ledger.start(1, 0)
    ledger.abort(1, "cancelled")
    second = threads.submit(ledger.start, 2, 1)
    assert watched.someone_waits()
    assert not second.done()
    ledger.end(1)
    assert second.result(WAIT_S) is None
    assert ledger.reason(1) is None


def test_a_successor_does_not_pass_a_running_plan_by_a_tombstone(threads: ThreadPoolExecutor) -> None:
    """Plan 1 runs, 2 was cancelled before it came, 3 names 2: it still has to wait for 1 (P2)."""
    ledger, watched = _ledger()
    ledger.start(1, 0)
    ledger.abort(2, "cancelled")
    third = threads.submit(ledger.start, 3, 2)
    assert watched.someone_waits()
    assert ledger.running() == (1,)
    assert ledger.abort(1, "late") is True, "plan 1 is still known to run"
    ledger.end(1)
    assert third.result(WAIT_S) is None
    assert ledger.running() == (3,)


@pytest.mark.xfail(
    reason="a tombstone does not know its predecessor, so plan 3 overtakes plan 1 where methods come out of order"
)
def test_a_successor_does_not_pass_a_plan_that_has_not_come_by_a_tombstone(threads: ThreadPoolExecutor) -> None:
    """Plan 1 is on its way, 2 was cancelled before it came, 3 comes first: on other ranks 1 runs before 3."""
    ledger, _ = _ledger()
    ledger.abort(2, "cancelled")
    third = threads.submit(ledger.start, 3, 2)
    threads.submit(ledger.start, 2, 1).result(WAIT_S)
    ledger.end(2)
    assert ledger.abort(1, "late") is False
    try:
        assert ledger.reason(1) == "late", "plan 1 counts as ended, though it never came"
    finally:
        ledger.end(1)
        third.result(WAIT_S)


def test_aborting_a_plan_that_has_ended_does_nothing() -> None:
    ledger = Ledger()
    ledger.start(1, 0)
    ledger.end(1)
    assert ledger.abort(1, "too late") is False
    assert ledger.reason(1) is None
    ledger.start(2, 1)
    ledger.end(2)
    assert ledger.abort(1, "too late") is False
    assert ledger.reason(1) is None


def test_the_first_reason_of_an_abort_is_kept_for_a_plan_that_has_not_come() -> None:
    ledger = Ledger()
    ledger.abort(1, "first")
    assert ledger.abort(1, "second") is False
    assert ledger.start(1, 0) == "first"


def test_ending_a_plan_that_never_started_ends_it() -> None:
    """The runtime ends every plan that came, also one that it refused before it asked the ledger."""
    ledger = Ledger()
    ledger.end(1)
    assert ledger.start(2, 1) is None


# ---------------------------------------------------------------------------------------------- memory


def _nbytes(ledger: Ledger) -> int:
    return sum(sys.getsizeof(value) for value in vars(ledger).values() if isinstance(value, (dict, set, list)))


@pytest.mark.parametrize("stride", [1, 7])
def test_memory_stays_bounded_over_ten_thousand_plans(stride: int) -> None:
    ledger, before = Ledger(), 0
    for seq in range(stride, 10_000 * stride + 1, stride):
        assert ledger.start(seq, before) is None
        ledger.end(seq)
        before = seq
        assert len(ledger._ended) <= 2
    assert _nbytes(ledger) < 2_000


def test_memory_stays_bounded_when_every_other_plan_is_aborted() -> None:
    ledger = Ledger()
    for seq in range(1, 10_001):
        if seq % 2:
            ledger.abort(seq, "cancelled")
            assert ledger.start(seq, seq - 1) == "cancelled"
        else:
            assert ledger.start(seq, seq - 1) is None
        ledger.end(seq)
        assert len(ledger._ended) <= 3
    assert ledger._aborted == {}
    assert _nbytes(ledger) < 2_000


# ---------------------------------------------------------------------------------------------- any story


@CALM
@given(st.lists(st.tuples(st.sampled_from(["come", "end", "abort"]), st.integers(1, 8)), max_size=40))
def test_no_plan_runs_before_its_predecessor_or_after_its_abort(events: list[tuple[str, int]]) -> None:
    """One thread plays all: a plan comes only where `start` would not wait."""
    ledger = Ledger()
    ended: set[int] = {0}
    aborted: set[int] = set()
    running: set[int] = set()
    for event, seq in events:
        if event == "come" and seq not in ended - aborted and seq not in running:
            if seq in aborted or set(range(1, seq)) <= ended:
                reason = ledger.start(seq, seq - 1)
                assert (reason is not None) == (seq in aborted)
                if reason is None:
                    running.add(seq)
        elif event == "end" and seq in running:
            ledger.end(seq)
            running.discard(seq)
            ended.add(seq)
        elif event == "abort" and seq not in ended:
            assert ledger.abort(seq, "because") == (seq in running)
            if seq not in running:
                aborted.add(seq)
                ended.add(seq)
        assert ledger.running() == tuple(sorted(running))
        for other in aborted:
            assert ledger.reason(other) == "because"


def test_many_threads_and_an_abort_at_any_moment_leave_nobody_waiting(threads: ThreadPoolExecutor) -> None:
    for seed in range(20):
        ledger = Ledger()
        barrier = threading.Barrier(9)
        rng = random.Random(seed)
        doomed = set(rng.sample(range(1, 9), 3))

        def run(seq: int, ledger: Ledger = ledger, barrier: threading.Barrier = barrier) -> str | None:
            barrier.wait(WAIT_S)
            reason = ledger.start(seq, seq - 1)
            ledger.end(seq)
            return reason

        futures: dict[int, Future[str | None]] = {seq: threads.submit(run, seq) for seq in range(8, 0, -1)}
        barrier.wait(WAIT_S)
        for seq in doomed:
            ledger.abort(seq, "doomed")
        reasons = {seq: future.result(WAIT_S) for seq, future in futures.items()}
        assert {seq for seq, reason in reasons.items() if reason} <= doomed
        assert ledger.running() == ()
