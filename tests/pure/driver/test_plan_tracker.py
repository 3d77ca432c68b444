"""A plan under way: events in, messages out; whatever happens, it ends with the first cause."""

from __future__ import annotations

import gc
import itertools
import random
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from raycollect.core.model import OpKind, task_key
from raycollect.driver.plan_tracker import PlanTracker
from raycollect.errors import (
    DispatchError,
    GroupBrokenError,
    KernelError,
    MismatchError,
    ParticipantDiedError,
    PlanAbortedError,
    RaycollectError,
    RefusedError,
    TensorFreedError,
    Violation,
    refusal,
)
from raycollect.planner import Request
from tests.pure.driver.tracked_plans import SEQ, an_echo, flying, group_of, key_of, tracked, who_aborted
from tests.support.values import replace

WAIT_S = 20.0


def _refused(*violations: Violation) -> RefusedError:
    found = violations or (Violation(kind="mismatch", rank=1, field="shape", found="[3]", expected="[4]"),)
    return refusal("allreduce", "", found)


@pytest.mark.parametrize("world", range(1, 9))
def test_plan_succeeds_when_the_last_rank_is_done(world: int) -> None:
    tracker = tracked(world)
    for rank in random.Random(world).sample(range(world), world):
        assert not tracker.resolved
        assert not tracker.has_ended
        assert tracker.is_pending(rank)
        assert tracker.done(rank, None, []) == []
        assert not tracker.is_pending(rank)
    assert tracker.resolved
    assert tracker.has_ended
    assert tracker.error is None
    assert tracker.wait(0)


def test_plan_is_unresolved_before_the_last_rank() -> None:
    tracker = tracked(2)
    tracker.done(0, None, [])
    assert tracker.wait(0) is False
    assert tracker.error is None


def test_only_the_ranks_that_take_part_are_waited_for() -> None:
    tracker = tracked(5, ranks=(4, 1))
    assert tracker.plan.participants == tuple(f"{rank:032x}" for rank in (1, 4))
    assert [position for position in range(5) if tracker.is_pending(position)] == [0, 1]
    tracker.done(1, None, [])
    assert not tracker.resolved
    tracker.done(0, None, [])
    assert tracker.resolved


def test_last_rank_may_report_for_all() -> None:
    tracker = tracked(4)
    assert tracker.done(2, None, [], others=(0, 1, 2, 3)) == []
    assert tracker.has_ended
    assert tracker.resolved
    assert tracker.error is None


def test_rank_may_report_for_some() -> None:
    tracker = tracked(4)
    tracker.done(2, None, [], others=[1, 2])
    assert [rank for rank in range(4) if tracker.is_pending(rank)] == [0, 3]
    assert who_aborted(tracker.done(0, KernelError(detail="x"), [])) == [3]


def test_duplicate_done_counts_once() -> None:
    tracker = tracked(2)
    tracker.done(0, None, [])
    tracker.done(0, None, [])
    assert not tracker.resolved
    assert tracker.is_pending(1)


@pytest.mark.parametrize("first", range(3))
def test_refusal_sends_no_aborts(first: int) -> None:
    tracker = tracked(3)
    order = [first, *(rank for rank in range(3) if rank != first)]
    for rank in order:
        assert tracker.done(rank, _refused(), ["a story"]) == []
        assert tracker.resolved
    assert tracker.has_ended
    assert type(tracker.error) is MismatchError


def test_a_refusal_gets_the_groups_name_the_actor_and_the_ref() -> None:
    tracker = tracked(3)
    known = Violation(kind="mismatch", rank=2, field="dtype", found="x", actor="Mine(1)", ref="abcd")
    nobody = Violation(kind="mismatch", rank=-1, field="op", found="y")
    tracker.done(0, _refused(Violation(kind="mismatch", rank=1, field="shape", found="[3]"), known, nobody), [])
    assert isinstance(tracker.error, MismatchError)
    assert (tracker.error.op, tracker.error.group_name) == ("allreduce", "ring")
    first, second, third = tracker.error.violations
    assert (first.actor, first.ref, first.field, first.found) == ("Worker(1)", key_of(1).hex(), "shape", "[3]")
    assert second == known, "what the rank itself knew stays"
    assert (third.actor, third.ref) == ("", "")
    for part in ("'ring'", "rank 1", "Worker(1)", key_of(1).hex()):
        assert part in str(tracker.error)


@pytest.mark.parametrize(
    ("rank", "field", "side"),
    [
        (0, "shape", 0),
        (0, "dtype of input 1", 0),
        (1, "dtype of output 0", 1),
        (1, "shape of output", 1),
        (1, "op", 0),
        (2, "shape of output 1", 1),
        (2, "shape", 1),
    ],
)
def test_a_violation_gets_the_ref_of_the_end_that_it_is_about(rank: int, field: str, side: int) -> None:
    keys = [(task_key(bytes([r, 0]) * 12, 1), task_key(bytes([r, 1]) * 12, 1)) for r in range(3)]
    membership = group_of(3)
    places = [(2 * r, 2 * r + 1) for r in range(3)]
    request = Request(kind=OpKind.ALLGATHER, group=membership.spec, operands=tuple((r, *places[r]) for r in range(3)))
    if rank == 2:
        request = replace(
            request, kind=OpKind.SCATTER, root=0, operands=((0, *places[0]), *((r, None, places[r][1]) for r in (1, 2)))
        )
    tracker = flying([request], [membership], dict.fromkeys(key for pair in keys for key in pair))
    tracker.done(rank, _refused(Violation(kind="mismatch", rank=rank, field=field, found="x")), [])
    assert isinstance(tracker.error, RefusedError)
    assert tracker.error.violations[0].ref == keys[rank][side].hex()


def test_a_rank_without_operand_has_no_ref() -> None:
    membership = group_of(2)
    request = Request(kind=OpKind.BARRIER, group=membership.spec, operands=((0, None, None), (1, None, None)))
    tracker = flying([request], [membership], {})
    tracker.done(0, _refused(), [])
    assert isinstance(tracker.error, RefusedError)
    assert tracker.error.violations[0].ref == ""


def test_a_refusal_keeps_its_class() -> None:
    tracker = tracked(2)
    tracker.done(0, _refused(Violation(kind="freed", rank=0, field="operand", found="freed")), [])
    assert type(tracker.error) is TensorFreedError
    several = tracked(2)
    violations = [Violation(kind=kind, rank=0, field="operand", found="x") for kind in ("freed", "dirty")]
    several.done(0, _refused(*violations), [])
    assert type(several.error) is RefusedError


def test_a_refusal_by_the_controller_itself_aborts_everyone() -> None:
    """As when a rank waits for a value that Ray knows will not come: the ranks don't know."""
    tracker = tracked(3)
    assert who_aborted(tracker.fail(_refused())) == [0, 1, 2]
    assert isinstance(tracker.error, MismatchError)


@pytest.mark.parametrize("failing", range(4))
def test_a_failure_of_one_rank_aborts_all_others_that_run(failing: int) -> None:
    tracker = tracked(4)
    finished = (failing + 1) % 4
    tracker.done(finished, None, [])
    orders = tracker.done(failing, KernelError(detail="it broke"), ["1.0 start", "2.0 failed"])
    assert who_aborted(orders) == [rank for rank in range(4) if rank not in (failing, finished)]
    assert "KernelError" in orders[0][1].reason
    assert f"rank {failing}" in orders[0][1].reason
    assert tracker.resolved
    assert not tracker.has_ended, "the others still run it"
    error = tracker.error
    assert isinstance(error, KernelError)
    assert (error.op, error.group_name, error.rank, error.actor) == ("allreduce", "ring", failing, f"Worker({failing})")
    assert error.detail == "it broke"
    assert error.story == ("1.0 start", "2.0 failed")


def test_the_first_cause_stays() -> None:
    tracker = tracked(3)
    tracker.done(2, KernelError(detail="first"), [])
    tracker.done(0, KernelError(detail="second"), [])
    tracker.lost(1, "killed")
    assert isinstance(tracker.error, KernelError)
    assert tracker.error.detail == "first"
    assert tracker.has_ended


def test_error_with_a_named_culprit_is_kept_as_reported() -> None:
    tracker = tracked(3)
    tracker.done(0, KernelError(detail="x", rank=2, actor="Theirs(2)", story=("its own",)), ["mine"])
    assert isinstance(tracker.error, KernelError)
    assert (tracker.error.rank, tracker.error.actor, tracker.error.story) == (2, "Theirs(2)", ("its own",))


def test_an_error_of_another_kind_is_kept_as_it_is() -> None:
    tracker = tracked(2)
    error = GroupBrokenError(group_name="0123", detail="this participant left the group")
    assert who_aborted(tracker.done(0, error, [])) == [1]
    assert tracker.error is error


def test_each_rank_gets_one_abort() -> None:
    tracker = tracked(6)
    told = who_aborted(tracker.done(0, KernelError(detail="x"), []))
    for rank in (1, 2, 3):
        told += who_aborted(tracker.done(rank, an_echo(), []))
    told += who_aborted(tracker.lost(4, "killed"))
    told += who_aborted(tracker.fail(PlanAbortedError(detail="cancelled")))
    assert sorted(told) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_an_echo_of_an_abort_does_not_hide_the_cause(order: tuple[int, ...]) -> None:
    """Rank 1 fails; 0 and 2 see it leave and fail of that, and may tell so first."""
    tracker = tracked(3)
    for rank in order:
        tracker.done(rank, KernelError(detail="the cause") if rank == 1 else an_echo(), [])
    assert isinstance(tracker.error, KernelError)
    assert tracker.error.detail == "the cause"
    assert tracker.has_ended


def test_an_echo_does_not_hide_a_process_that_ended() -> None:
    tracker = tracked(3)
    assert tracker.done(0, an_echo(), []) == []
    assert not tracker.resolved
    assert who_aborted(tracker.lost(1, "killed")) == [2]
    assert isinstance(tracker.error, ParticipantDiedError)
    tracker.done(2, an_echo(), [])
    assert isinstance(tracker.error, ParticipantDiedError)


def test_echoes_alone_are_the_error_when_no_cause_comes() -> None:
    tracker = tracked(2)
    tracker.done(0, an_echo(), [])
    assert not tracker.resolved
    tracker.done(1, an_echo(), [])
    assert isinstance(tracker.error, PlanAbortedError)
    assert tracker.has_ended


@pytest.mark.parametrize("aborted", range(3))
def test_an_aborted_rank_among_finished_ones_is_no_success(aborted: int) -> None:
    tracker = tracked(3)
    tracker.done(aborted, an_echo(), [])
    for rank in {0, 1, 2} - {aborted}:
        tracker.done(rank, None, [])
    assert tracker.resolved
    assert isinstance(tracker.error, PlanAbortedError)
    assert tracker.error.rank == aborted


@pytest.mark.parametrize("error", [None, KernelError(detail="x")])
def test_watchers_are_called_once_with_the_outcome_known(error: RaycollectError | None) -> None:
    tracker = tracked(2)
    seen: list[Any] = []
    tracker.when_resolved(lambda: seen.append((tracker.resolved, tracker.error)))
    tracker.done(0, None, [])
    assert seen == []
    tracker.done(1, error, [])
    assert seen == [(True, error)]
    tracker.when_resolved(lambda: seen.append("after"))
    assert seen[1:] == ["after"], "called at once"
    tracker.fail(PlanAbortedError(detail="late"))
    assert len(seen) == 2


def test_a_watcher_may_ask_and_watch_again() -> None:
    tracker = tracked(1)
    seen: list[str] = []
    tracker.when_resolved(lambda: tracker.when_resolved(lambda: seen.append("inner")))
    tracker.done(0, None, [])
    assert seen == ["inner"], "no lock is held while watchers run"


def test_all_waiters_are_woken() -> None:
    tracker = tracked(2)
    started = threading.Barrier(4)

    def wait() -> bool:
        started.wait(WAIT_S)
        return tracker.wait(WAIT_S)

    with ThreadPoolExecutor(3) as threads:
        waiters = [threads.submit(wait) for _ in range(3)]
        started.wait(WAIT_S)
        tracker.done(0, None, [])
        tracker.done(1, None, [])
        assert all(waiter.result(WAIT_S) for waiter in waiters)


@pytest.mark.parametrize("seed", range(20))
def test_events_from_many_threads_resolve_it_once(seed: int) -> None:
    tracker = tracked(8)
    rng = random.Random(seed)
    errors: list[RaycollectError | None] = [rng.choice([None, KernelError(detail=str(r))]) for r in range(8)]
    barrier, calls = threading.Barrier(8), []
    tracker.when_resolved(lambda: calls.append(tracker.error))

    def end(rank: int) -> None:
        barrier.wait(WAIT_S)
        tracker.done(rank, errors[rank], [])

    with ThreadPoolExecutor(8) as threads:
        for future in [threads.submit(end, rank) for rank in range(8)]:
            future.result(WAIT_S)
    assert tracker.has_ended
    assert calls == [tracker.error]
    assert tracker.error in errors
    assert (tracker.error is None) == all(error is None for error in errors)


@pytest.mark.parametrize("seed", range(60))
def test_any_sequence_ends_with_all_ranks_and_hides_no_failure(seed: int) -> None:
    rng = random.Random(seed)
    world = rng.randint(1, 6)
    tracker, running = tracked(world), set(range(world))
    failed, told = False, set[int]()
    while running:
        rank = rng.choice(sorted(running))
        event = rng.choice(["done", "done", "fail", "echo", "lost", "cancel"])
        if event == "cancel":
            orders = tracker.fail(PlanAbortedError(detail="cancelled"))
        elif event == "lost":
            orders = tracker.lost(rank, "killed")
        else:
            error = {"fail": KernelError(detail="x"), "echo": an_echo()}.get(event)
            orders = tracker.done(rank, error, [])
        if event != "cancel":
            running.discard(rank)
        failed = failed or event != "done"
        assert set(who_aborted(orders)) <= running, "only who still runs it is told"
        told |= set(who_aborted(orders))
        assert tracker.has_ended == (not running)
        if event in ("fail", "lost", "cancel"):
            assert tracker.resolved
            assert running <= told
    assert tracker.resolved
    assert (tracker.error is None) == (not failed)


class _Ref:
    """An operand ref, of which can be told whether it lives."""


def _watched(world: int) -> tuple[PlanTracker, list[weakref.ref[_Ref]]]:
    """An allreduce that alone holds its refs."""
    refs = {key_of(rank): _Ref() for rank in range(world)}
    tracker = PlanTracker(SEQ, tracked(world).plan, [group_of(world)], refs)
    return tracker, [weakref.ref(one) for one in refs.values()]


def _alive(refs: list[weakref.ref[_Ref]]) -> list[int]:
    gc.collect()
    return [rank for rank, ref in enumerate(refs) if ref() is not None]


@pytest.mark.parametrize("world", [1, 3, 4])
@pytest.mark.parametrize("first", [None, KernelError(detail="x"), PlanAbortedError(detail="an echo")])
def test_refs_live_as_long_as_anyone_runs_it(world: int, first: RaycollectError | None) -> None:
    tracker, refs = _watched(world)
    for rank in range(world):
        assert _alive(refs) == list(range(world))
        tracker.done(rank, None if rank else first, [])
    assert tracker.has_ended
    assert _alive(refs) == []
    assert [tracker.location.first_use(key_of(rank)) for rank in range(world)] == [(-1, rank) for rank in range(world)]
    assert tracker.writes[key_of(0)] is True


def test_lost_and_unsent_ranks_release_their_refs() -> None:
    tracker, refs = _watched(2)
    tracker.lost(1, "killed")
    assert _alive(refs) == [0, 1]
    tracker.lost(0, "killed")
    assert _alive(refs) == []
    tracker, refs = _watched(2)
    tracker.fail(DispatchError(detail="x"), unsent=(0, 1))
    assert _alive(refs) == []


def test_refs_of_lost_operands_are_kept_until_explained() -> None:
    tracker, refs = _watched(4)
    wrong = [Violation(kind=kind, rank=rank, field="operand", found="x") for kind, rank in (("lost", 2), ("dirty", 1))]
    for rank in range(4):
        tracker.done(rank, _refused(*wrong), [])
    assert _alive(refs) == [2]
    assert list(tracker.refs) == [key_of(2)]
    explained = _refused(Violation(kind="producer_failed", rank=2, field="operand", found="raised"))
    tracker.explain(explained)
    assert tracker.error is explained
    assert _alive(refs) == []


def test_early_explained_plan_releases_refs_after_the_last_rank() -> None:
    tracker, refs = _watched(2)
    error = _refused(Violation(kind="lost", rank=0, field="operand", found="x"))
    tracker.done(0, error, [])
    tracker.explain(error)
    assert _alive(refs) == [0, 1]
    tracker.done(1, error, [])
    assert _alive(refs) == []


@pytest.mark.parametrize("first", ["failure", "abandon"])
def test_abandoned_failure_is_logged_once(first: str, caplog: pytest.LogCaptureFixture) -> None:
    tracker = tracked(2)
    steps = [lambda: tracker.abandon(), lambda: tracker.fail(KernelError(detail="it broke"))]
    for step in steps if first == "abandon" else reversed(steps):
        step()
    lines = [record.getMessage() for record in caplog.records if record.name == "raycollect"]
    (line,) = lines
    assert "allreduce failed, and nobody waited for it" in line
    assert "it broke" in line


def test_abandoned_success_or_cancellation_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    well, cancelled = tracked(2), tracked(2)
    for rank in range(2):
        well.done(rank, None, ())
    cancelled.fail(PlanAbortedError(detail="cancelled by its caller"))
    for tracker in (well, cancelled):
        assert tracker.resolved
        tracker.abandon()
    assert not [record for record in caplog.records if record.name == "raycollect"]
