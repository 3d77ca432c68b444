"""A flight: events in, messages out; whatever happens, it ends with the first cause."""

from __future__ import annotations

import gc
import itertools
import random
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from raycollect.channel.messages import Abort, Arrivals, Arrive
from raycollect.core.model import Address, GroupSpec, Key, Member, OpKind, ReduceOp, task_key
from raycollect.driver.plan_tracker import PlanTracker
from raycollect.errors import (
    CollectiveTimeoutError,
    DispatchError,
    GroupBrokenError,
    KernelError,
    MismatchError,
    ParticipantDiedError,
    PlanAbortedError,
    ProtocolError,
    RaycollectError,
    RefusedError,
    TensorFreedError,
    Violation,
    refusal,
)
from raycollect.group.membership import Membership
from raycollect.planner import Request, plan

SEQ = 7
WAIT_S = 20.0


def _key(rank: int) -> Key:
    return task_key(bytes([rank + 1] * 24), 1)


def _member(rank: int) -> Member:
    return Member(
        rank=rank,
        actor_id=f"{rank:032x}",
        actor=f"Worker({rank})",
        address=Address(host="10.0.0.1", port=1000 + rank, secret=bytes(32)),
        machine="m",
        node_id="n",
        pid=rank,
        incarnation="i",
        ordered=True,
    )


def _group(world: int, name: str = "ring", group_id: str = "0123", first: int = 0) -> Membership:
    """A group of the actors from `first` on."""
    spec = GroupSpec(name=name, group_id=group_id, backend="gloo", world_size=world)
    members = tuple(replace(_member(first + rank), rank=rank) for rank in range(world))
    return Membership(spec=spec, members=members)


def _refs(count: int) -> dict[Key, Any]:
    return dict.fromkeys(map(_key, range(count)))


def _tracker(world: int = 4, ranks: tuple[int, int] | None = None) -> PlanTracker:
    """An allreduce over all ranks, or a send from the first of `ranks` to the second."""
    membership = _group(world)
    if ranks is None:
        operands = tuple((rank, rank, None) for rank in range(world))
        request = Request(kind=OpKind.ALLREDUCE, group=membership.spec, operands=operands, op=ReduceOp.SUM)
    else:
        operands = tuple((r, *((r, None) if r == ranks[0] else (None, r))) for r in sorted(ranks))
        request = Request(kind=OpKind.SEND, group=membership.spec, operands=operands, root=ranks[0], peer=ranks[1])
    return _flying([request], [membership], _refs(world))


def _learning(world: int) -> PlanTracker:
    """An allgather whose outputs are made: the ranks meet twice at its door."""
    membership = _group(world)
    operands = tuple((rank, rank, None) for rank in range(world))
    request = Request(kind=OpKind.ALLGATHER, group=membership.spec, operands=operands)
    tracker = _flying([request], [membership], _refs(world))
    assert tracker.plan.rounds == 2
    return tracker


def _flying(requests: list[Request], memberships: list[Membership], refs: dict[Key, Any]) -> PlanTracker:
    planned = plan(requests, [membership.roster for membership in memberships])
    return PlanTracker(SEQ, planned, memberships, refs)


def _come(tracker: PlanTracker, rank: int, turn: int, blob: bytes, *, seq: int = SEQ) -> list[tuple[int, Any]]:
    """One of a group comes to the door of all who take part in the flight's first request."""
    ranks = [one for one, *_ in tracker.plan.requests[0].operands]
    message = Arrive(group_id="0123", seq=seq, round=turn, ranks=ranks, rank=rank, blob=blob)
    return tracker.arrive(tracker.plan.positions.get(f"{rank:032x}", -1), message)


def _refused(*violations: Violation) -> RefusedError:
    found = violations or (Violation(kind="mismatch", rank=1, field="shape", found="[3]", expected="[4]"),)
    return refusal("allreduce", "", found)


def _aborted(orders: list[tuple[int, Any]]) -> list[int]:
    """The ranks that are told to abort; nothing else is said."""
    for _, message in orders:
        assert type(message) is Abort
        assert message.seq == SEQ
        assert message.reason
    return [rank for rank, _ in orders]


def _echo() -> PlanAbortedError:
    return PlanAbortedError(detail="rank 1 has left the launch")


# ---------------------------------------------------------------------------------------------- success


@pytest.mark.parametrize("world", range(1, 9))
def test_plan_succeeds_when_the_last_rank_is_done(world: int) -> None:
    tracker = _tracker(world)
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
    tracker = _tracker(2)
    tracker.done(0, None, [])
    assert tracker.wait(0) is False
    assert tracker.error is None


def test_only_the_ranks_that_take_part_are_waited_for() -> None:
    tracker = _tracker(5, ranks=(4, 1))
    assert tracker.plan.participants == tuple(f"{rank:032x}" for rank in (1, 4))
    assert [position for position in range(5) if tracker.is_pending(position)] == [0, 1]
    tracker.done(1, None, [])
    assert not tracker.resolved
    tracker.done(0, None, [])
    assert tracker.resolved


def test_last_rank_may_report_for_all() -> None:
    tracker = _tracker(4)
    assert tracker.done(2, None, [], others=(0, 1, 2, 3)) == []
    assert tracker.has_ended
    assert tracker.resolved
    assert tracker.error is None


def test_rank_may_report_for_some() -> None:
    tracker = _tracker(4)
    tracker.done(2, None, [], others=[1, 2])
    assert [rank for rank in range(4) if tracker.is_pending(rank)] == [0, 3]
    assert _aborted(tracker.done(0, KernelError(detail="x"), [])) == [3]


def test_duplicate_done_counts_once() -> None:
    tracker = _tracker(2)
    tracker.done(0, None, [])
    tracker.done(0, None, [])
    assert not tracker.resolved
    assert tracker.is_pending(1)


# ---------------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize("first", range(3))
def test_refusal_sends_no_aborts(first: int) -> None:
    tracker = _tracker(3)
    order = [first, *(rank for rank in range(3) if rank != first)]
    for rank in order:
        assert tracker.done(rank, _refused(), ["a story"]) == []
        assert tracker.resolved
    assert tracker.has_ended
    assert type(tracker.error) is MismatchError


def test_a_refusal_gets_the_groups_name_the_actor_and_the_ref() -> None:
    tracker = _tracker(3)
    known = Violation(kind="mismatch", rank=2, field="dtype", found="x", actor="Mine(1)", ref="abcd")
    nobody = Violation(kind="mismatch", rank=-1, field="op", found="y")
    tracker.done(0, _refused(Violation(kind="mismatch", rank=1, field="shape", found="[3]"), known, nobody), [])
    assert isinstance(tracker.error, MismatchError)
    assert (tracker.error.op, tracker.error.group_name) == ("allreduce", "ring")
    first, second, third = tracker.error.violations
    assert (first.actor, first.ref, first.field, first.found) == ("Worker(1)", _key(1).hex(), "shape", "[3]")
    assert second == known, "what the rank itself knew stays"
    assert (third.actor, third.ref) == ("", "")
    for part in ("'ring'", "rank 1", "Worker(1)", _key(1).hex()):
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
    membership = _group(3)
    places = [(2 * r, 2 * r + 1) for r in range(3)]
    request = Request(kind=OpKind.ALLGATHER, group=membership.spec, operands=tuple((r, *places[r]) for r in range(3)))
    if rank == 2:
        request = replace(
            request, kind=OpKind.SCATTER, root=0, operands=((0, *places[0]), *((r, None, places[r][1]) for r in (1, 2)))
        )
    tracker = _flying([request], [membership], dict.fromkeys(key for pair in keys for key in pair))
    tracker.done(rank, _refused(Violation(kind="mismatch", rank=rank, field=field, found="x")), [])
    assert isinstance(tracker.error, RefusedError)
    assert tracker.error.violations[0].ref == keys[rank][side].hex()


def test_a_rank_without_operand_has_no_ref() -> None:
    membership = _group(2)
    request = Request(kind=OpKind.BARRIER, group=membership.spec, operands=((0, None, None), (1, None, None)))
    tracker = _flying([request], [membership], {})
    tracker.done(0, _refused(), [])
    assert isinstance(tracker.error, RefusedError)
    assert tracker.error.violations[0].ref == ""


def test_a_refusal_keeps_its_class() -> None:
    tracker = _tracker(2)
    tracker.done(0, _refused(Violation(kind="freed", rank=0, field="operand", found="freed")), [])
    assert type(tracker.error) is TensorFreedError
    several = _tracker(2)
    violations = [Violation(kind=kind, rank=0, field="operand", found="x") for kind in ("freed", "dirty")]
    several.done(0, _refused(*violations), [])
    assert type(several.error) is RefusedError


def test_a_refusal_by_the_controller_itself_aborts_everyone() -> None:
    """As when a rank waits for a value that Ray knows will not come: the ranks don't know."""
    tracker = _tracker(3)
    assert _aborted(tracker.fail(_refused())) == [0, 1, 2]
    assert isinstance(tracker.error, MismatchError)


# ---------------------------------------------------------------------------------------------- lopsided


@pytest.mark.parametrize("failing", range(4))
def test_a_failure_of_one_rank_aborts_all_others_that_run(failing: int) -> None:
    tracker = _tracker(4)
    finished = (failing + 1) % 4
    tracker.done(finished, None, [])
    orders = tracker.done(failing, KernelError(detail="it broke"), ["1.0 start", "2.0 failed"])
    assert _aborted(orders) == [rank for rank in range(4) if rank not in (failing, finished)]
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
    tracker = _tracker(3)
    tracker.done(2, KernelError(detail="first"), [])
    tracker.done(0, KernelError(detail="second"), [])
    tracker.lost(1, "killed")
    assert isinstance(tracker.error, KernelError)
    assert tracker.error.detail == "first"
    assert tracker.has_ended


def test_error_with_a_named_culprit_is_kept_as_reported() -> None:
    tracker = _tracker(3)
    tracker.done(0, KernelError(detail="x", rank=2, actor="Theirs(2)", story=("its own",)), ["mine"])
    assert isinstance(tracker.error, KernelError)
    assert (tracker.error.rank, tracker.error.actor, tracker.error.story) == (2, "Theirs(2)", ("its own",))


def test_an_error_of_another_kind_is_kept_as_it_is() -> None:
    tracker = _tracker(2)
    error = GroupBrokenError(group_name="0123", detail="this participant left the group")
    assert _aborted(tracker.done(0, error, [])) == [1]
    assert tracker.error is error


def test_each_rank_gets_one_abort() -> None:
    tracker = _tracker(6)
    told = _aborted(tracker.done(0, KernelError(detail="x"), []))
    for rank in (1, 2, 3):
        told += _aborted(tracker.done(rank, _echo(), []))
    told += _aborted(tracker.lost(4, "killed"))
    told += _aborted(tracker.fail(PlanAbortedError(detail="cancelled")))
    assert sorted(told) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_an_echo_of_an_abort_does_not_hide_the_cause(order: tuple[int, ...]) -> None:
    """Rank 1 fails; 0 and 2 see it leave and fail of that, and may tell so first."""
    tracker = _tracker(3)
    for rank in order:
        tracker.done(rank, KernelError(detail="the cause") if rank == 1 else _echo(), [])
    assert isinstance(tracker.error, KernelError)
    assert tracker.error.detail == "the cause"
    assert tracker.has_ended


def test_an_echo_does_not_hide_a_process_that_ended() -> None:
    tracker = _tracker(3)
    assert tracker.done(0, _echo(), []) == []
    assert not tracker.resolved
    assert _aborted(tracker.lost(1, "killed")) == [2]
    assert isinstance(tracker.error, ParticipantDiedError)
    tracker.done(2, _echo(), [])
    assert isinstance(tracker.error, ParticipantDiedError)


def test_echoes_alone_are_the_error_when_no_cause_comes() -> None:
    tracker = _tracker(2)
    tracker.done(0, _echo(), [])
    assert not tracker.resolved
    tracker.done(1, _echo(), [])
    assert isinstance(tracker.error, PlanAbortedError)
    assert tracker.has_ended


@pytest.mark.parametrize("aborted", range(3))
def test_an_aborted_rank_among_finished_ones_is_no_success(aborted: int) -> None:
    tracker = _tracker(3)
    tracker.done(aborted, _echo(), [])
    for rank in {0, 1, 2} - {aborted}:
        tracker.done(rank, None, [])
    assert tracker.resolved
    assert isinstance(tracker.error, PlanAbortedError)
    assert tracker.error.rank == aborted


# ---------------------------------------------------------------------------------------------- lost


def test_a_rank_lost_before_the_door_aborts_the_others() -> None:
    tracker = _tracker(3)
    _come(tracker, 0, 0, b"zero")
    assert _aborted(tracker.lost(1, "connection reset")) == [0, 2]
    error = tracker.error
    assert isinstance(error, ParticipantDiedError)
    assert (error.rank, error.actor, error.group_name) == (1, "Worker(1)", "ring")
    assert "under way" in error.detail
    assert "connection reset" in error.detail


def test_loss_of_a_done_rank_is_ignored() -> None:
    tracker = _tracker(2)
    tracker.done(0, None, [])
    assert tracker.lost(0, "killed") == []
    assert not tracker.resolved
    tracker.done(1, None, [])
    assert tracker.error is None


def test_loss_of_an_uninvolved_member_is_ignored() -> None:
    tracker = _tracker(4, ranks=(0, 1))
    assert tracker.lost(3, "killed") == []
    assert not tracker.resolved


def test_plan_ends_when_all_ranks_are_lost() -> None:
    tracker = _tracker(3)
    for rank in range(3):
        tracker.lost(rank, "killed")
    assert tracker.has_ended
    assert isinstance(tracker.error, ParticipantDiedError)
    assert tracker.error.rank == 0


# ---------------------------------------------------------------------------------------------- timeout


def test_a_timeout_names_the_missing_ranks_and_their_actors() -> None:
    tracker = _tracker(4)
    error = CollectiveTimeoutError(missing=(1, 3), timeout_s=2.5)
    assert _aborted(tracker.done(0, error, [])) == [1, 2, 3]
    assert isinstance(tracker.error, CollectiveTimeoutError)
    assert tracker.error.missing == (1, 3)
    for part in ("2.5 s", "rank 1 (Worker(1))", "rank 3 (Worker(3))"):
        assert part in str(tracker.error)
    assert "Worker(2)" not in str(tracker.error)


def test_timeout_at_the_star_names_ranks_missing_from_the_door() -> None:
    tracker = _tracker(3)
    _come(tracker, 0, 0, b"")
    _come(tracker, 2, 0, b"")
    tracker.done(0, CollectiveTimeoutError(timeout_s=1.0), [])
    assert isinstance(tracker.error, CollectiveTimeoutError)
    assert tracker.error.missing == (1,)


def test_timeout_in_the_second_round_names_ranks_missing_there() -> None:
    tracker = _learning(3)
    for rank in range(3):
        _come(tracker, rank, 0, b"")
    _come(tracker, 2, 1, b"")
    tracker.done(2, CollectiveTimeoutError(timeout_s=1.0), [])
    assert isinstance(tracker.error, CollectiveTimeoutError)
    assert tracker.error.missing == (0, 1)


@pytest.mark.parametrize("missing", [(3,), (-1, 2), (1, 99)])
def test_timeout_naming_foreign_ranks_is_still_raised(missing: tuple[int, ...]) -> None:
    tracker = _tracker(3)
    tracker.done(0, CollectiveTimeoutError(missing=missing, timeout_s=1.0), [])
    assert isinstance(tracker.error, CollectiveTimeoutError)
    assert tracker.error.missing == tuple(rank for rank in missing if 0 <= rank < 3)


def test_a_timeout_without_anyone_to_blame_says_so() -> None:
    tracker = _tracker(2)
    tracker.done(0, CollectiveTimeoutError(timeout_s=1.0), [])
    assert "nobody" in str(tracker.error)


# ---------------------------------------------------------------------------------------------- the star


@pytest.mark.parametrize("seed", range(4))
def test_the_last_arrival_opens_the_door_for_all(seed: int) -> None:
    tracker = _learning(5)
    order = random.Random(seed).sample(range(5), 5)
    for turn in (0, 1):
        for rank in order[:-1]:
            assert _come(tracker, rank, turn, bytes([turn, rank])) == []
        orders = _come(tracker, order[-1], turn, bytes([turn, order[-1]]))
        assert [rank for rank, _ in orders] == list(range(5))
        (message,) = {id(message): message for _, message in orders}.values()
        blobs = [bytes([turn, rank]) for rank in range(5)]
        assert message == Arrivals(group_id="0123", seq=SEQ, round=turn, blobs=blobs, more=False)
    assert not tracker.resolved


def test_the_door_of_a_send_waits_for_its_two_ranks_only() -> None:
    tracker = _tracker(6, ranks=(5, 2))
    assert _come(tracker, 5, 0, b"five") == []
    orders = _come(tracker, 2, 0, b"two")
    assert [(at, message.blobs) for at, message in orders] == [(0, [b"two", b"five"]), (1, [b"two", b"five"])]


def test_a_rank_at_the_door_twice_or_a_stranger_breaks_the_protocol() -> None:
    tracker = _tracker(6, ranks=(5, 2))
    _come(tracker, 5, 0, b"")
    for rank in (5, 3):
        with pytest.raises(ProtocolError):
            _come(tracker, rank, 0, b"")
    at_door = Arrive(group_id="0123", seq=SEQ, round=0, ranks=[2, 5], rank=2, blob=b"")
    for wrong in (
        {"rank": 5},  # it is rank 2
        {"ranks": []},
        {"ranks": [2, 3]},  # rank 3 has no part
        {"ranks": [2, 9]},
        {"group_id": "of another plan"},
        {"group_id": "", "ranks": [0, 1], "rank": 1},  # it is at position 0
        {"ranks": [3, 5]},
        {"ranks": [5, 2]},
        {"ranks": [2, 2, 5]},
        {"round": 1},
        {"round": -1},
        {"seq": SEQ + 1},
        {"seq": SEQ - 1},
    ):
        with pytest.raises(ProtocolError):
            tracker.arrive(0, replace(at_door, **wrong))
    assert len(tracker.arrive(0, at_door)) == 2, "nothing of that was counted"


# ---------------------------------------------------------------------------------------------- the controller


def test_cancelling_aborts_everyone_and_is_the_outcome() -> None:
    tracker = _tracker(3)
    tracker.done(1, None, [])
    orders = tracker.fail(PlanAbortedError(detail="cancelled by its caller"))
    assert _aborted(orders) == [0, 2]
    assert "cancelled by its caller" in orders[0][1].reason
    error = tracker.error
    assert isinstance(error, PlanAbortedError)
    assert (error.op, error.group_name, error.rank, error.actor) == ("allreduce", "ring", -1, "")
    assert tracker.resolved
    assert not tracker.has_ended
    for rank in (0, 2):
        assert tracker.done(rank, _echo(), []) == []
    assert tracker.has_ended
    assert tracker.error is error


def test_cancel_of_a_done_plan_changes_nothing() -> None:
    tracker = _tracker(2)
    for rank in range(2):
        tracker.done(rank, None, [])
    assert tracker.fail(PlanAbortedError(detail="cancelled")) == []
    assert tracker.error is None


def test_unsent_ranks_get_no_abort_and_are_not_awaited() -> None:
    tracker = _tracker(4)
    error = DispatchError(rank=2, detail="the queue is full")
    assert _aborted(tracker.fail(error, unsent=(2, 3))) == [0, 1]
    assert tracker.error is error
    assert (error.rank, error.actor) == (2, "Worker(2)")
    assert [tracker.is_pending(rank) for rank in range(4)] == [True, True, False, False]
    tracker.done(0, _echo(), [])
    tracker.done(1, _echo(), [])
    assert tracker.has_ended


def test_plan_sent_to_no_rank_has_ended_at_once() -> None:
    tracker = _tracker(2)
    assert tracker.fail(DispatchError(detail="x"), unsent=(0, 1)) == []
    assert tracker.has_ended
    assert tracker.resolved


# ---------------------------------------------------------------------------------------------- asking


@pytest.mark.parametrize("error", [None, KernelError(detail="x")])
def test_watchers_are_called_once_with_the_outcome_known(error: RaycollectError | None) -> None:
    tracker = _tracker(2)
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
    tracker = _tracker(1)
    seen: list[str] = []
    tracker.when_resolved(lambda: tracker.when_resolved(lambda: seen.append("inner")))
    tracker.done(0, None, [])
    assert seen == ["inner"], "no lock is held while watchers run"


def test_all_waiters_are_woken() -> None:
    tracker = _tracker(2)
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
    tracker = _tracker(8)
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
    tracker, running = _tracker(world), set(range(world))
    failed, told = False, set[int]()
    while running:
        rank = rng.choice(sorted(running))
        event = rng.choice(["done", "done", "fail", "echo", "lost", "cancel"])
        if event == "cancel":
            orders = tracker.fail(PlanAbortedError(detail="cancelled"))
        elif event == "lost":
            orders = tracker.lost(rank, "killed")
        else:
            error = {"fail": KernelError(detail="x"), "echo": _echo()}.get(event)
            orders = tracker.done(rank, error, [])
        if event != "cancel":
            running.discard(rank)
        failed = failed or event != "done"
        assert set(_aborted(orders)) <= running, "only who still runs it is told"
        told |= set(_aborted(orders))
        assert tracker.has_ended == (not running)
        if event in ("fail", "lost", "cancel"):
            assert tracker.resolved
            assert running <= told
    assert tracker.resolved
    assert (tracker.error is None) == (not failed)


# ---------------------------------------------------------------------------------------------- refs


class _Ref:
    """An operand ref, of which can be told whether it lives."""


def _watched(world: int) -> tuple[PlanTracker, list[weakref.ref[_Ref]]]:
    """An allreduce that alone holds its refs."""
    refs = {_key(rank): _Ref() for rank in range(world)}
    tracker = PlanTracker(SEQ, _tracker(world).plan, [_group(world)], refs)
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
    assert [tracker.location.first_use(_key(rank)) for rank in range(world)] == [(-1, rank) for rank in range(world)]
    assert tracker.writes[_key(0)] is True


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
    assert list(tracker.refs) == [_key(2)]
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
    tracker = _tracker(2)
    steps = [lambda: tracker.abandon(), lambda: tracker.fail(KernelError(detail="it broke"))]
    for step in steps if first == "abandon" else reversed(steps):
        step()
    lines = [record.getMessage() for record in caplog.records if record.name == "raycollect"]
    (line,) = lines
    assert "allreduce failed, and nobody waited for it" in line
    assert "it broke" in line


def test_abandoned_success_or_cancellation_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    well, cancelled = _tracker(2), _tracker(2)
    for rank in range(2):
        well.done(rank, None, ())
    cancelled.fail(PlanAbortedError(detail="cancelled by its caller"))
    for tracker in (well, cancelled):
        assert tracker.resolved
        tracker.abandon()
    assert not [record for record in caplog.records if record.name == "raycollect"]
