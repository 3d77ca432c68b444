"""A plan under way whose participants are lost, late, or agree through the controller."""

from __future__ import annotations

import random
from typing import Any

import pytest

from raycollect.channel.messages import Arrivals, Arrive
from raycollect.core.model import OpKind
from raycollect.driver.plan_tracker import PlanTracker
from raycollect.errors import (
    CollectiveTimeoutError,
    DispatchError,
    ParticipantDiedError,
    PlanAbortedError,
    ProtocolError,
)
from raycollect.planner import Request
from tests.pure.driver.tracked_plans import SEQ, an_echo, flying, group_of, refs_of, tracked, who_aborted
from tests.support.values import replace


def _learning(world: int) -> PlanTracker:
    """An allgather whose outputs are made: the ranks meet twice in its consistency check."""
    membership = group_of(world)
    operands = tuple((rank, rank, None) for rank in range(world))
    request = Request(kind=OpKind.ALLGATHER, group=membership.spec, operands=operands)
    tracker = flying([request], [membership], refs_of(world))
    assert tracker.plan.rounds == 2
    return tracker


def _come(tracker: PlanTracker, rank: int, turn: int, blob: bytes, *, seq: int = SEQ) -> list[tuple[int, Any]]:
    """One of a group comes to the consistency check of all who take part in the flight's first request."""
    ranks = [one for one, *_ in tracker.plan.requests[0].operands]
    message = Arrive(group_id="0123", seq=seq, round=turn, ranks=ranks, rank=rank, blob=blob)
    return tracker.arrive(tracker.plan.positions.get(f"{rank:032x}", -1), message)


def test_a_rank_lost_before_the_check_aborts_the_others() -> None:
    tracker = tracked(3)
    _come(tracker, 0, 0, b"zero")
    assert who_aborted(tracker.lost(1, "connection reset")) == [0, 2]
    error = tracker.error
    assert isinstance(error, ParticipantDiedError)
    assert (error.rank, error.actor, error.group_name) == (1, "Worker(1)", "ring")
    assert "under way" in error.detail
    assert "connection reset" in error.detail


def test_loss_of_a_done_rank_is_ignored() -> None:
    tracker = tracked(2)
    tracker.done(0, None, [])
    assert tracker.lost(0, "killed") == []
    assert not tracker.resolved
    tracker.done(1, None, [])
    assert tracker.error is None


def test_loss_of_an_uninvolved_member_is_ignored() -> None:
    tracker = tracked(4, ranks=(0, 1))
    assert tracker.lost(3, "killed") == []
    assert not tracker.resolved


def test_plan_ends_when_all_ranks_are_lost() -> None:
    tracker = tracked(3)
    for rank in range(3):
        tracker.lost(rank, "killed")
    assert tracker.has_ended
    assert isinstance(tracker.error, ParticipantDiedError)
    assert tracker.error.rank == 0


def test_a_timeout_names_the_missing_ranks_and_their_actors() -> None:
    tracker = tracked(4)
    error = CollectiveTimeoutError(missing=(1, 3), timeout_s=2.5)
    assert who_aborted(tracker.done(0, error, [])) == [1, 2, 3]
    assert isinstance(tracker.error, CollectiveTimeoutError)
    assert tracker.error.missing == (1, 3)
    for part in ("2.5 s", "rank 1 (Worker(1))", "rank 3 (Worker(3))"):
        assert part in str(tracker.error)
    assert "Worker(2)" not in str(tracker.error)


def test_timeout_at_the_star_names_ranks_missing_from_the_check() -> None:
    tracker = tracked(3)
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
    tracker = tracked(3)
    tracker.done(0, CollectiveTimeoutError(missing=missing, timeout_s=1.0), [])
    assert isinstance(tracker.error, CollectiveTimeoutError)
    assert tracker.error.missing == tuple(rank for rank in missing if 0 <= rank < 3)


def test_a_timeout_without_anyone_to_blame_says_so() -> None:
    tracker = tracked(2)
    tracker.done(0, CollectiveTimeoutError(timeout_s=1.0), [])
    assert "nobody" in str(tracker.error)


@pytest.mark.parametrize("seed", range(4))
def test_the_last_arrival_completes_the_check_for_all(seed: int) -> None:
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


def test_the_check_of_a_send_waits_for_its_two_ranks_only() -> None:
    tracker = tracked(6, ranks=(5, 2))
    assert _come(tracker, 5, 0, b"five") == []
    orders = _come(tracker, 2, 0, b"two")
    assert [(at, message.blobs) for at, message in orders] == [(0, [b"two", b"five"]), (1, [b"two", b"five"])]


def test_a_rank_at_the_check_twice_or_a_stranger_breaks_the_protocol() -> None:
    tracker = tracked(6, ranks=(5, 2))
    _come(tracker, 5, 0, b"")
    for rank in (5, 3):
        with pytest.raises(ProtocolError):
            _come(tracker, rank, 0, b"")
    at_check = Arrive(group_id="0123", seq=SEQ, round=0, ranks=[2, 5], rank=2, blob=b"")
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
            tracker.arrive(0, replace(at_check, **wrong))
    assert len(tracker.arrive(0, at_check)) == 2, "nothing of that was counted"


def test_cancelling_aborts_everyone_and_is_the_outcome() -> None:
    tracker = tracked(3)
    tracker.done(1, None, [])
    orders = tracker.fail(PlanAbortedError(detail="cancelled by its caller"))
    assert who_aborted(orders) == [0, 2]
    assert "cancelled by its caller" in orders[0][1].reason
    error = tracker.error
    assert isinstance(error, PlanAbortedError)
    assert (error.op, error.group_name, error.rank, error.actor) == ("allreduce", "ring", -1, "")
    assert tracker.resolved
    assert not tracker.has_ended
    for rank in (0, 2):
        assert tracker.done(rank, an_echo(), []) == []
    assert tracker.has_ended
    assert tracker.error is error


def test_cancel_of_a_done_plan_changes_nothing() -> None:
    tracker = tracked(2)
    for rank in range(2):
        tracker.done(rank, None, [])
    assert tracker.fail(PlanAbortedError(detail="cancelled")) == []
    assert tracker.error is None


def test_unsent_ranks_get_no_abort_and_are_not_awaited() -> None:
    tracker = tracked(4)
    error = DispatchError(rank=2, detail="the queue is full")
    assert who_aborted(tracker.fail(error, unsent=(2, 3))) == [0, 1]
    assert tracker.error is error
    assert (error.rank, error.actor) == (2, "Worker(2)")
    assert [tracker.is_pending(rank) for rank in range(4)] == [True, True, False, False]
    tracker.done(0, an_echo(), [])
    tracker.done(1, an_echo(), [])
    assert tracker.has_ended


def test_plan_sent_to_no_rank_has_ended_at_once() -> None:
    tracker = tracked(2)
    assert tracker.fail(DispatchError(detail="x"), unsent=(0, 1)) == []
    assert tracker.has_ended
    assert tracker.resolved
