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
from raycollect.flight import Flight
from raycollect.group import Membership
from raycollect.model import Address, GroupSpec, Key, Member, OpKind, ReduceOp, task_key
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


def _flight(world: int = 4, ranks: tuple[int, int] | None = None) -> Flight:
    """An allreduce over all ranks, or a send from the first of `ranks` to the second."""
    membership = _group(world)
    if ranks is None:
        operands = tuple((rank, rank, None) for rank in range(world))
        request = Request(kind=OpKind.ALLREDUCE, group=membership.spec, operands=operands, op=ReduceOp.SUM)
    else:
        operands = tuple((r, *((r, None) if r == ranks[0] else (None, r))) for r in sorted(ranks))
        request = Request(kind=OpKind.SEND, group=membership.spec, operands=operands, root=ranks[0], peer=ranks[1])
    return _flying([request], [membership], _refs(world))


def _learning(world: int) -> Flight:
    """An allgather whose outputs are made: the ranks meet twice at its door."""
    membership = _group(world)
    operands = tuple((rank, rank, None) for rank in range(world))
    request = Request(kind=OpKind.ALLGATHER, group=membership.spec, operands=operands)
    flight = _flying([request], [membership], _refs(world))
    assert flight.plan.rounds == 2
    return flight


def _flying(requests: list[Request], memberships: list[Membership], refs: dict[Key, Any]) -> Flight:
    planned = plan(requests, [membership.roster for membership in memberships])
    return Flight(SEQ, planned, memberships, refs)


def _come(flight: Flight, rank: int, turn: int, blob: bytes, *, seq: int = SEQ) -> list[tuple[int, Any]]:
    """One of a group comes to the door of all who take part in the flight's first request."""
    ranks = [one for one, *_ in flight.plan.requests[0].operands]
    message = Arrive(group_id="0123", seq=seq, round=turn, ranks=ranks, rank=rank, blob=blob)
    return flight.arrive(flight.plan.positions.get(f"{rank:032x}", -1), message)


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
def test_it_succeeds_when_the_last_rank_is_done(world: int) -> None:
    flight = _flight(world)
    for rank in random.Random(world).sample(range(world), world):
        assert not flight.resolved
        assert not flight.landed
        assert flight.is_pending(rank)
        assert flight.done(rank, None, []) == []
        assert not flight.is_pending(rank)
    assert flight.resolved
    assert flight.landed
    assert flight.error is None
    assert flight.wait(0)


def test_the_outcome_is_not_known_before() -> None:
    flight = _flight(2)
    flight.done(0, None, [])
    assert flight.wait(0) is False
    assert flight.error is None


def test_only_the_ranks_that_take_part_are_waited_for() -> None:
    flight = _flight(5, ranks=(4, 1))
    assert flight.plan.participants == tuple(f"{rank:032x}" for rank in (1, 4))
    assert [position for position in range(5) if flight.is_pending(position)] == [0, 1]
    flight.done(1, None, [])
    assert not flight.resolved
    flight.done(0, None, [])
    assert flight.resolved


def test_the_last_rank_may_tell_for_all() -> None:
    flight = _flight(4)
    assert flight.done(2, None, [], others=(0, 1, 2, 3)) == []
    assert flight.landed
    assert flight.resolved
    assert flight.error is None


def test_a_rank_may_tell_for_some() -> None:
    flight = _flight(4)
    flight.done(2, None, [], others=[1, 2])
    assert [rank for rank in range(4) if flight.is_pending(rank)] == [0, 3]
    assert _aborted(flight.done(0, KernelError(detail="x"), [])) == [3]


def test_done_told_twice_counts_once() -> None:
    flight = _flight(2)
    flight.done(0, None, [])
    flight.done(0, None, [])
    assert not flight.resolved
    assert flight.is_pending(1)


# ---------------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize("first", range(3))
def test_a_refusal_tells_nobody_to_abort_since_every_rank_knows(first: int) -> None:
    flight = _flight(3)
    order = [first, *(rank for rank in range(3) if rank != first)]
    for rank in order:
        assert flight.done(rank, _refused(), ["a story"]) == []
        assert flight.resolved
    assert flight.landed
    assert type(flight.error) is MismatchError


def test_a_refusal_gets_the_groups_name_the_actor_and_the_ref() -> None:
    flight = _flight(3)
    known = Violation(kind="mismatch", rank=2, field="dtype", found="x", actor="Mine(1)", ref="abcd")
    nobody = Violation(kind="mismatch", rank=-1, field="op", found="y")
    flight.done(0, _refused(Violation(kind="mismatch", rank=1, field="shape", found="[3]"), known, nobody), [])
    assert isinstance(flight.error, MismatchError)
    assert (flight.error.op, flight.error.group_name) == ("allreduce", "ring")
    first, second, third = flight.error.violations
    assert (first.actor, first.ref, first.field, first.found) == ("Worker(1)", _key(1).hex(), "shape", "[3]")
    assert second == known, "what the rank itself knew stays"
    assert (third.actor, third.ref) == ("", "")
    for part in ("'ring'", "rank 1", "Worker(1)", _key(1).hex()):
        assert part in str(flight.error)


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
    flight = _flying([request], [membership], dict.fromkeys(key for pair in keys for key in pair))
    flight.done(rank, _refused(Violation(kind="mismatch", rank=rank, field=field, found="x")), [])
    assert isinstance(flight.error, RefusedError)
    assert flight.error.violations[0].ref == keys[rank][side].hex()


def test_a_rank_without_operand_has_no_ref() -> None:
    membership = _group(2)
    request = Request(kind=OpKind.BARRIER, group=membership.spec, operands=((0, None, None), (1, None, None)))
    flight = _flying([request], [membership], {})
    flight.done(0, _refused(), [])
    assert isinstance(flight.error, RefusedError)
    assert flight.error.violations[0].ref == ""


def test_a_refusal_keeps_its_class() -> None:
    flight = _flight(2)
    flight.done(0, _refused(Violation(kind="freed", rank=0, field="operand", found="freed")), [])
    assert type(flight.error) is TensorFreedError
    several = _flight(2)
    violations = [Violation(kind=kind, rank=0, field="operand", found="x") for kind in ("freed", "dirty")]
    several.done(0, _refused(*violations), [])
    assert type(several.error) is RefusedError


def test_a_refusal_by_the_controller_itself_aborts_everyone() -> None:
    """As when a rank waits for a value that Ray knows will not come: the ranks don't know."""
    flight = _flight(3)
    assert _aborted(flight.fail(_refused())) == [0, 1, 2]
    assert isinstance(flight.error, MismatchError)


# ---------------------------------------------------------------------------------------------- lopsided


@pytest.mark.parametrize("failing", range(4))
def test_a_failure_of_one_rank_aborts_all_others_that_run(failing: int) -> None:
    flight = _flight(4)
    finished = (failing + 1) % 4
    flight.done(finished, None, [])
    orders = flight.done(failing, KernelError(detail="it broke"), ["1.0 start", "2.0 failed"])
    assert _aborted(orders) == [rank for rank in range(4) if rank not in (failing, finished)]
    assert "KernelError" in orders[0][1].reason
    assert f"rank {failing}" in orders[0][1].reason
    assert flight.resolved
    assert not flight.landed, "the others still run it"
    error = flight.error
    assert isinstance(error, KernelError)
    assert (error.op, error.group_name, error.rank, error.actor) == ("allreduce", "ring", failing, f"Worker({failing})")
    assert error.detail == "it broke"
    assert error.story == ("1.0 start", "2.0 failed")


def test_the_first_cause_stays() -> None:
    flight = _flight(3)
    flight.done(2, KernelError(detail="first"), [])
    flight.done(0, KernelError(detail="second"), [])
    flight.lost(1, "killed")
    assert isinstance(flight.error, KernelError)
    assert flight.error.detail == "first"
    assert flight.landed


def test_a_rank_that_knows_who_failed_is_believed() -> None:
    flight = _flight(3)
    flight.done(0, KernelError(detail="x", rank=2, actor="Theirs(2)", story=("its own",)), ["mine"])
    assert isinstance(flight.error, KernelError)
    assert (flight.error.rank, flight.error.actor, flight.error.story) == (2, "Theirs(2)", ("its own",))


def test_an_error_of_another_kind_is_kept_as_it_is() -> None:
    flight = _flight(2)
    error = GroupBrokenError(group_name="0123", detail="this participant left the group")
    assert _aborted(flight.done(0, error, [])) == [1]
    assert flight.error is error


def test_each_rank_is_told_to_abort_once() -> None:
    flight = _flight(6)
    told = _aborted(flight.done(0, KernelError(detail="x"), []))
    for rank in (1, 2, 3):
        told += _aborted(flight.done(rank, _echo(), []))
    told += _aborted(flight.lost(4, "killed"))
    told += _aborted(flight.fail(PlanAbortedError(detail="cancelled")))
    assert sorted(told) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_an_echo_of_an_abort_does_not_hide_the_cause(order: tuple[int, ...]) -> None:
    """Rank 1 fails; 0 and 2 see it leave and fail of that, and may tell so first."""
    flight = _flight(3)
    for rank in order:
        flight.done(rank, KernelError(detail="the cause") if rank == 1 else _echo(), [])
    assert isinstance(flight.error, KernelError)
    assert flight.error.detail == "the cause"
    assert flight.landed


def test_an_echo_does_not_hide_a_process_that_ended() -> None:
    flight = _flight(3)
    assert flight.done(0, _echo(), []) == []
    assert not flight.resolved
    assert _aborted(flight.lost(1, "killed")) == [2]
    assert isinstance(flight.error, ParticipantDiedError)
    flight.done(2, _echo(), [])
    assert isinstance(flight.error, ParticipantDiedError)


def test_echoes_alone_are_the_error_when_no_cause_comes() -> None:
    flight = _flight(2)
    flight.done(0, _echo(), [])
    assert not flight.resolved
    flight.done(1, _echo(), [])
    assert isinstance(flight.error, PlanAbortedError)
    assert flight.landed


@pytest.mark.parametrize("aborted", range(3))
def test_an_aborted_rank_among_finished_ones_is_no_success(aborted: int) -> None:
    flight = _flight(3)
    flight.done(aborted, _echo(), [])
    for rank in {0, 1, 2} - {aborted}:
        flight.done(rank, None, [])
    assert flight.resolved
    assert isinstance(flight.error, PlanAbortedError)
    assert flight.error.rank == aborted


# ---------------------------------------------------------------------------------------------- lost


def test_a_rank_lost_before_the_door_aborts_the_others() -> None:
    flight = _flight(3)
    _come(flight, 0, 0, b"zero")
    assert _aborted(flight.lost(1, "connection reset")) == [0, 2]
    error = flight.error
    assert isinstance(error, ParticipantDiedError)
    assert (error.rank, error.actor, error.group_name) == (1, "Worker(1)", "ring")
    assert "under way" in error.detail
    assert "connection reset" in error.detail


def test_a_rank_lost_after_it_was_done_is_not_missed() -> None:
    flight = _flight(2)
    flight.done(0, None, [])
    assert flight.lost(0, "killed") == []
    assert not flight.resolved
    flight.done(1, None, [])
    assert flight.error is None


def test_a_member_lost_that_takes_no_part_is_not_missed() -> None:
    flight = _flight(4, ranks=(0, 1))
    assert flight.lost(3, "killed") == []
    assert not flight.resolved


def test_losing_all_ranks_lands_the_flight() -> None:
    flight = _flight(3)
    for rank in range(3):
        flight.lost(rank, "killed")
    assert flight.landed
    assert isinstance(flight.error, ParticipantDiedError)
    assert flight.error.rank == 0


# ---------------------------------------------------------------------------------------------- timeout


def test_a_timeout_names_the_missing_ranks_and_their_actors() -> None:
    flight = _flight(4)
    error = CollectiveTimeoutError(missing=(1, 3), timeout_s=2.5)
    assert _aborted(flight.done(0, error, [])) == [1, 2, 3]
    assert isinstance(flight.error, CollectiveTimeoutError)
    assert flight.error.missing == (1, 3)
    for part in ("2.5 s", "rank 1 (Worker(1))", "rank 3 (Worker(3))"):
        assert part in str(flight.error)
    assert "Worker(2)" not in str(flight.error)


def test_a_timeout_at_the_star_knows_who_is_missing_from_the_door() -> None:
    flight = _flight(3)
    _come(flight, 0, 0, b"")
    _come(flight, 2, 0, b"")
    flight.done(0, CollectiveTimeoutError(timeout_s=1.0), [])
    assert isinstance(flight.error, CollectiveTimeoutError)
    assert flight.error.missing == (1,)


def test_a_timeout_in_the_second_round_names_who_is_missing_there() -> None:
    flight = _learning(3)
    for rank in range(3):
        _come(flight, rank, 0, b"")
    _come(flight, 2, 1, b"")
    flight.done(2, CollectiveTimeoutError(timeout_s=1.0), [])
    assert isinstance(flight.error, CollectiveTimeoutError)
    assert flight.error.missing == (0, 1)


@pytest.mark.parametrize("missing", [(3,), (-1, 2), (1, 99)])
def test_a_timeout_that_names_no_rank_of_the_group_is_told_all_the_same(missing: tuple[int, ...]) -> None:
    flight = _flight(3)
    flight.done(0, CollectiveTimeoutError(missing=missing, timeout_s=1.0), [])
    assert isinstance(flight.error, CollectiveTimeoutError)
    assert flight.error.missing == tuple(rank for rank in missing if 0 <= rank < 3)


def test_a_timeout_without_anyone_to_blame_says_so() -> None:
    flight = _flight(2)
    flight.done(0, CollectiveTimeoutError(timeout_s=1.0), [])
    assert "nobody" in str(flight.error)


# ---------------------------------------------------------------------------------------------- the star


@pytest.mark.parametrize("seed", range(4))
def test_the_last_arrival_opens_the_door_for_all(seed: int) -> None:
    flight = _learning(5)
    order = random.Random(seed).sample(range(5), 5)
    for turn in (0, 1):
        for rank in order[:-1]:
            assert _come(flight, rank, turn, bytes([turn, rank])) == []
        orders = _come(flight, order[-1], turn, bytes([turn, order[-1]]))
        assert [rank for rank, _ in orders] == list(range(5))
        (message,) = {id(message): message for _, message in orders}.values()
        blobs = [bytes([turn, rank]) for rank in range(5)]
        assert message == Arrivals(group_id="0123", seq=SEQ, round=turn, blobs=blobs, more=False)
    assert not flight.resolved


def test_the_door_of_a_send_waits_for_its_two_ranks_only() -> None:
    flight = _flight(6, ranks=(5, 2))
    assert _come(flight, 5, 0, b"five") == []
    orders = _come(flight, 2, 0, b"two")
    assert [(at, message.blobs) for at, message in orders] == [(0, [b"two", b"five"]), (1, [b"two", b"five"])]


def test_a_rank_at_the_door_twice_or_a_stranger_breaks_the_protocol() -> None:
    flight = _flight(6, ranks=(5, 2))
    _come(flight, 5, 0, b"")
    for rank in (5, 3):
        with pytest.raises(ProtocolError):
            _come(flight, rank, 0, b"")
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
            flight.arrive(0, replace(at_door, **wrong))
    assert len(flight.arrive(0, at_door)) == 2, "nothing of that was counted"


# ---------------------------------------------------------------------------------------------- the controller


def test_cancelling_aborts_everyone_and_is_the_outcome() -> None:
    flight = _flight(3)
    flight.done(1, None, [])
    orders = flight.fail(PlanAbortedError(detail="cancelled by its caller"))
    assert _aborted(orders) == [0, 2]
    assert "cancelled by its caller" in orders[0][1].reason
    error = flight.error
    assert isinstance(error, PlanAbortedError)
    assert (error.op, error.group_name, error.rank, error.actor) == ("allreduce", "ring", -1, "")
    assert flight.resolved
    assert not flight.landed
    for rank in (0, 2):
        assert flight.done(rank, _echo(), []) == []
    assert flight.landed
    assert flight.error is error


def test_cancelling_what_is_done_changes_nothing() -> None:
    flight = _flight(2)
    for rank in range(2):
        flight.done(rank, None, [])
    assert flight.fail(PlanAbortedError(detail="cancelled")) == []
    assert flight.error is None


def test_ranks_that_never_got_it_are_neither_told_nor_waited_for() -> None:
    flight = _flight(4)
    error = DispatchError(rank=2, detail="the queue is full")
    assert _aborted(flight.fail(error, unsent=(2, 3))) == [0, 1]
    assert flight.error is error
    assert (error.rank, error.actor) == (2, "Worker(2)")
    assert [flight.is_pending(rank) for rank in range(4)] == [True, True, False, False]
    flight.done(0, _echo(), [])
    flight.done(1, _echo(), [])
    assert flight.landed


def test_a_plan_that_nobody_got_has_landed_at_once() -> None:
    flight = _flight(2)
    assert flight.fail(DispatchError(detail="x"), unsent=(0, 1)) == []
    assert flight.landed
    assert flight.resolved


# ---------------------------------------------------------------------------------------------- asking


@pytest.mark.parametrize("error", [None, KernelError(detail="x")])
def test_watchers_are_called_once_with_the_outcome_known(error: RaycollectError | None) -> None:
    flight = _flight(2)
    seen: list[Any] = []
    flight.when_resolved(lambda: seen.append((flight.resolved, flight.error)))
    flight.done(0, None, [])
    assert seen == []
    flight.done(1, error, [])
    assert seen == [(True, error)]
    flight.when_resolved(lambda: seen.append("after"))
    assert seen[1:] == ["after"], "called at once"
    flight.fail(PlanAbortedError(detail="late"))
    assert len(seen) == 2


def test_a_watcher_may_ask_and_watch_again() -> None:
    flight = _flight(1)
    seen: list[str] = []
    flight.when_resolved(lambda: flight.when_resolved(lambda: seen.append("inner")))
    flight.done(0, None, [])
    assert seen == ["inner"], "no lock is held while watchers run"


def test_whoever_waits_is_woken() -> None:
    flight = _flight(2)
    started = threading.Barrier(4)

    def wait() -> bool:
        started.wait(WAIT_S)
        return flight.wait(WAIT_S)

    with ThreadPoolExecutor(3) as threads:
        waiters = [threads.submit(wait) for _ in range(3)]
        started.wait(WAIT_S)
        flight.done(0, None, [])
        flight.done(1, None, [])
        assert all(waiter.result(WAIT_S) for waiter in waiters)


@pytest.mark.parametrize("seed", range(20))
def test_events_from_many_threads_resolve_it_once(seed: int) -> None:
    flight = _flight(8)
    rng = random.Random(seed)
    errors: list[RaycollectError | None] = [rng.choice([None, KernelError(detail=str(r))]) for r in range(8)]
    barrier, calls = threading.Barrier(8), []
    flight.when_resolved(lambda: calls.append(flight.error))

    def end(rank: int) -> None:
        barrier.wait(WAIT_S)
        flight.done(rank, errors[rank], [])

    with ThreadPoolExecutor(8) as threads:
        for future in [threads.submit(end, rank) for rank in range(8)]:
            future.result(WAIT_S)
    assert flight.landed
    assert calls == [flight.error]
    assert flight.error in errors
    assert (flight.error is None) == all(error is None for error in errors)


@pytest.mark.parametrize("seed", range(60))
def test_any_story_lands_once_all_ranks_have_ended_and_never_hides_a_failure(seed: int) -> None:
    rng = random.Random(seed)
    world = rng.randint(1, 6)
    flight, running = _flight(world), set(range(world))
    failed, told = False, set[int]()
    while running:
        rank = rng.choice(sorted(running))
        event = rng.choice(["done", "done", "fail", "echo", "lost", "cancel"])
        if event == "cancel":
            orders = flight.fail(PlanAbortedError(detail="cancelled"))
        elif event == "lost":
            orders = flight.lost(rank, "killed")
        else:
            error = {"fail": KernelError(detail="x"), "echo": _echo()}.get(event)
            orders = flight.done(rank, error, [])
        if event != "cancel":
            running.discard(rank)
        failed = failed or event != "done"
        assert set(_aborted(orders)) <= running, "only who still runs it is told"
        told |= set(_aborted(orders))
        assert flight.landed == (not running)
        if event in ("fail", "lost", "cancel"):
            assert flight.resolved
            assert running <= told
    assert flight.resolved
    assert (flight.error is None) == (not failed)


# ---------------------------------------------------------------------------------------------- refs


class _Ref:
    """An operand ref, of which can be told whether it lives."""


def _watched(world: int) -> tuple[Flight, list[weakref.ref[_Ref]]]:
    """An allreduce that alone holds its refs."""
    refs = {_key(rank): _Ref() for rank in range(world)}
    flight = Flight(SEQ, _flight(world).plan, [_group(world)], refs)
    return flight, [weakref.ref(one) for one in refs.values()]


def _alive(refs: list[weakref.ref[_Ref]]) -> list[int]:
    gc.collect()
    return [rank for rank, ref in enumerate(refs) if ref() is not None]


@pytest.mark.parametrize("world", [1, 3, 4])
@pytest.mark.parametrize("first", [None, KernelError(detail="x"), PlanAbortedError(detail="an echo")])
def test_refs_live_as_long_as_anyone_runs_it(world: int, first: RaycollectError | None) -> None:
    flight, refs = _watched(world)
    for rank in range(world):
        assert _alive(refs) == list(range(world))
        flight.done(rank, None if rank else first, [])
    assert flight.landed
    assert _alive(refs) == []
    assert [flight.user_of(_key(rank)) for rank in range(world)] == [(-1, rank) for rank in range(world)]
    assert flight.writes(_key(0)) is True


def test_refs_are_let_go_where_processes_are_lost_and_where_nobody_got_it() -> None:
    flight, refs = _watched(2)
    flight.lost(1, "killed")
    assert _alive(refs) == [0, 1]
    flight.lost(0, "killed")
    assert _alive(refs) == []
    flight, refs = _watched(2)
    flight.fail(DispatchError(detail="x"), unsent=(0, 1))
    assert _alive(refs) == []


def test_refs_that_may_tell_why_an_operand_is_not_there_are_kept_until_they_have() -> None:
    flight, refs = _watched(4)
    wrong = [Violation(kind=kind, rank=rank, field="operand", found="x") for kind, rank in (("lost", 2), ("dirty", 1))]
    for rank in range(4):
        flight.done(rank, _refused(*wrong), [])
    assert _alive(refs) == [2]
    assert list(flight.refs) == [_key(2)]
    explained = _refused(Violation(kind="producer_failed", rank=2, field="operand", found="raised"))
    flight.explain(explained)
    assert flight.error is explained
    assert _alive(refs) == []


def test_what_is_explained_early_lets_go_when_the_last_has_ended() -> None:
    flight, refs = _watched(2)
    error = _refused(Violation(kind="lost", rank=0, field="operand", found="x"))
    flight.done(0, error, [])
    flight.explain(error)
    assert _alive(refs) == [0, 1]
    flight.done(1, error, [])
    assert _alive(refs) == []


@pytest.mark.parametrize("first", ["failure", "abandon"])
def test_a_failure_that_nobody_will_ask_for_is_logged_once(first: str, caplog: pytest.LogCaptureFixture) -> None:
    flight = _flight(2)
    steps = [lambda: flight.abandon(), lambda: flight.fail(KernelError(detail="it broke"))]
    for step in steps if first == "abandon" else reversed(steps):
        step()
    lines = [record.getMessage() for record in caplog.records if record.name == "raycollect"]
    (line,) = lines
    assert "allreduce failed, and nobody waited for it" in line
    assert "it broke" in line


def test_what_went_well_or_was_cancelled_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    well, cancelled = _flight(2), _flight(2)
    for rank in range(2):
        well.done(rank, None, ())
    cancelled.fail(PlanAbortedError(detail="cancelled by its caller"))
    for flight in (well, cancelled):
        assert flight.resolved
        flight.abandon()
    assert not [record for record in caplog.records if record.name == "raycollect"]
