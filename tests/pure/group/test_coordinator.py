"""The rules of a coordinator: who meets whom, and who hears of what."""

from __future__ import annotations

import pytest

from raycollect.channel.messages import Ask, Done, Gone, Meet, Met, Stuck, Withdraw
from raycollect.errors import MismatchError, ProtocolError, from_wire
from raycollect.group.coordinator import Coordinator


def meet(place="form", call=1, blob=b"", communicator="all"):
    return Meet(group_id="g", communicator=communicator, place=place, call=call, blob=blob)


def withdraw(call=1, *, timed_out=True, communicator="all"):
    return Withdraw(group_id="g", communicator=communicator, call=call, timed_out=timed_out)


def stuck(communicator="all", call=1, seq=0, ranks=(0, 1), begun=0, is_long=False):
    return Stuck(
        group_id="g",
        communicator=communicator,
        call=call,
        seq=seq,
        op="allreduce",
        ranks=list(ranks),
        begun=begun,
        is_long=is_long,
    )


@pytest.fixture
def gate():
    return Coordinator("g", 3, "team")


def test_ranks_at_different_places_do_not_meet(gate):
    gate.receive(0, meet("form"))
    gate.receive(1, meet("check x/1/0"))
    assert gate.receive(2, meet("form")) == []
    assert [rank for rank, _ in gate.receive(1, meet("form", call=2))] == [0, 1, 2]


def test_timed_out_withdrawal_ends_the_meeting_for_all_waiting_ranks(gate):
    gate.receive(0, meet(call=4))
    gate.receive(2, meet(call=9))
    missed = {
        rank: Met(group_id="g", communicator="all", call=call, blobs=[], missing=[1], error=None)
        for rank, call in ((0, 4), (2, 9))
    }
    assert dict(gate.receive(2, withdraw(9))) == missed
    assert gate.receive(1, meet()) == []  # the late one waits for what they do next
    gate.receive(0, meet(call=5))
    assert [rank for rank, _ in gate.receive(2, meet(call=10))] == [0, 1, 2]


def test_withdrawal_without_timeout_removes_one_rank(gate):
    gate.receive(0, meet(call=4))
    gate.receive(2, meet(call=9))
    assert [rank for rank, _ in gate.receive(2, withdraw(9, timed_out=False))] == [2]
    gate.receive(1, meet())
    assert [rank for rank, _ in gate.receive(2, meet(call=10))] == [0, 1, 2]


def test_late_withdrawal_changes_nothing(gate):
    for rank in range(3):
        gate.receive(rank, meet())
    gate.receive(0, meet(call=2))
    assert gate.receive(0, withdraw(1)) == []
    gate.receive(1, meet(call=2))
    assert [rank for rank, _ in gate.receive(2, meet(call=2))] == [0, 1, 2]


@pytest.mark.parametrize(("leave", "died"), [(lambda g: g.lost(1, "why"), True), (None, False)])
def test_departed_rank_is_announced_to_all_and_to_later_arrivals(gate, leave, died):
    gate.receive(0, meet())
    orders = leave(gate) if leave else gate.receive(1, Gone(group_id="g", rank=2, died=True, detail=""))
    assert [rank for rank, _ in orders] == [0, 2]
    assert all(isinstance(m, Gone) and (m.rank, m.died) == (1, died) for _, m in orders)
    assert gate.lost(1, "again") == []
    assert gate.receive(0, withdraw(1)) == []  # nothing to withdraw: it was told
    [(rank, message)] = gate.receive(2, meet())
    assert rank == 2
    assert isinstance(message, Gone)
    gate.receive(0, meet(communicator="0>2"))
    assert [type(m) for _, m in gate.receive(2, meet(communicator="0>2"))] == [Met, Met]


def test_a_call_for_a_rank_in_a_plan_that_waits_for_the_caller_is_denied(gate):
    assert gate.receive(1, stuck(communicator="", seq=8)) == []
    [(rank, denial)] = gate.receive(0, stuck(call=3, begun=7))
    assert rank == 0
    assert (type(denial), denial.call, denial.blobs) == (Met, 3, [])
    error = from_wire(denial.error)
    assert isinstance(error, MismatchError)
    assert [violation.rank for violation in error.violations] == [0, 1]


def denied(orders):
    return [(rank, one.call, from_wire(one.error).violations[0].rank) for rank, one in orders]


def test_ranks_that_come_later_to_a_call_that_was_denied_are_denied_once(gate):
    plan = stuck(communicator="", seq=8, ranks=(0, 1, 2))
    gate.receive(1, plan)
    assert denied(gate.receive(0, stuck(call=3, begun=7, ranks=(0, 1, 2)))) == [(0, 3, 0)]
    gate.receive(0, stuck(communicator="", seq=0))
    gate.receive(1, stuck(communicator="", seq=0))  # the plan has ended
    late = {"begun": 8, "ranks": (0, 1, 2), "is_long": True}
    assert denied(gate.receive(2, stuck(call=5, begun=8, ranks=(0, 1, 2)))) == [], "rank 0 may be about to come"
    assert denied(gate.receive(2, stuck(call=5, **late))) == [(2, 5, 0)]
    gate.receive(2, stuck(communicator="", seq=0))
    assert denied(gate.receive(2, stuck(call=6, **late))) == [], "its next call is another one"
    assert denied(gate.receive(1, stuck(call=4, **late))) == [(1, 4, 0)]
    assert denied(gate.receive(0, stuck(call=4, **late))) == []


def test_a_rank_that_was_denied_and_meets_again_waits_for_all(gate):
    gate.receive(1, stuck(communicator="", seq=8, ranks=(0, 1, 2)))
    gate.receive(0, stuck(call=3, begun=7, ranks=(0, 1, 2)))
    for rank in (0, 1):
        gate.receive(rank, stuck(communicator="", seq=0))
    gate.receive(0, meet(call=4))
    assert gate.receive(2, stuck(call=5, begun=8, ranks=(0, 1, 2), is_long=True)) == []


@pytest.mark.parametrize(
    ("call", "plan"),
    [
        (stuck(begun=8), stuck(communicator="", seq=8)),  # the caller has begun that plan
        (stuck(communicator="0>2", ranks=(0, 2)), stuck(communicator="", seq=8)),  # the call waits for another
        (stuck(), stuck(communicator="", seq=8, ranks=(1, 2))),  # the plan waits for another
    ],
)
def test_a_call_that_can_come_about_is_left_alone(gate, call, plan):
    assert gate.receive(1, plan) == []
    assert gate.receive(0, call) == []


def test_a_wait_that_is_over_denies_nothing(gate):
    gate.receive(1, stuck(communicator="", seq=8))
    gate.receive(1, stuck(communicator="", seq=0))
    assert gate.receive(0, stuck()) == []


@pytest.mark.parametrize("communicator", ["", "0>0", "0>3", "-1>0", "0>1>2", "none"])
def test_a_communicator_that_is_none_breaks_the_protocol(gate, communicator):
    with pytest.raises(ProtocolError):
        gate.receive(0, meet(communicator=communicator))


def test_a_stranger_to_a_communicator_and_to_the_coordinator_breaks_the_protocol(gate):
    with pytest.raises(ProtocolError):
        gate.receive(2, meet(communicator="0>1"))
    with pytest.raises(ProtocolError):
        gate.receive(0, Done(seq=1, ranks=[], error=None, story=[]))


def test_a_question_reaches_those_who_are_asked_in_the_communicator(gate):
    question = Ask(group_id="g", communicator="2>0", ranks=[1, 2, 7])
    assert gate.receive(0, question) == [(2, question)]
    with pytest.raises(ProtocolError):
        gate.receive(1, question)
