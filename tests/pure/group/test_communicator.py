"""What becomes of a call when another rank leaves, dies or fails: ranks in threads, and messages held back."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest

from raycollect.channel.messages import Drop
from raycollect.core import timers
from raycollect.engine.run import Outcome
from raycollect.errors import (
    CollectiveTimeoutError,
    GroupBrokenError,
    InternalError,
    KernelError,
    ParticipantDiedError,
    PlanAbortedError,
    RaycollectError,
)
from raycollect.group import member_communicator
from raycollect.group.coordinator_client import CommunicatorState
from raycollect.group.member_communicator import MemberCommunicator
from tests.pure.group.tables import WORLD, Call, Plain, Seeing, Table, agreed_calls, assert_set, error_of, start_calls
from tests.pure.watched import WAIT_S
from tests.support.waiting import interrupt_in, wait_until


@pytest.mark.parametrize("kind", [Plain, Seeing])
@pytest.mark.parametrize("how", ["member", "coordinator"])
def test_a_call_for_which_the_dead_did_their_part_ends_well(
    table: Callable[..., Table], monkeypatch: pytest.MonkeyPatch, kind: type[Plain], how: str
) -> None:
    """Only the next one hears of the death."""
    later: list[Callable[[], None]] = []

    def begin_later(delay_s: float, call: Callable[[], None]) -> None:
        assert 0 < delay_s <= 1
        later.append(call)

    here = table(kind)
    calls = start_calls(here)
    dead = 2 if how == "member" else 0
    living = [rank for rank in range(WORLD) if rank != dead]
    assert_set(calls[dead][0].passed)
    calls[dead][0].go.set()
    calls[dead][1].result(WAIT_S)
    for rank in living:
        assert_set(calls[rank][0].passed)
    monkeypatch.setattr(timers, "soon_or_now", begin_later)
    if how == "member":
        here.kill(dead)
    else:
        for rank in living:
            here.process_groups[rank].orphaned(ParticipantDiedError(rank=0, detail="its process has ended"))
    told = {rank: [one for one in here.communicators[rank].events if one != "close"] for rank in living}
    assert told == dict.fromkeys(living, [("lost", dead)] if kind is Seeing else [])
    assert len(later) == (0 if kind is Seeing else 2), "it may not see it by itself"
    for rank in living:
        calls[rank][0].go.set()
        calls[rank][1].result(WAIT_S)
        again = error_of(here.start(Call(here.process_groups[rank])))
        assert isinstance(again, GroupBrokenError)
        assert f"rank {dead} (W{dead})" in str(again)
    for call in later:
        call()  # after the launch has ended it changes nothing


def test_call_missing_the_work_of_dead_ranks_names_them(table: Callable[..., Table]) -> None:
    here = table(Seeing)
    calls = agreed_calls(here, lambda: Outcome(error=PlanAbortedError(detail="rank 2 has ended")))
    here.kill(2)
    for rank in (0, 1):
        calls[rank][0].go.set()
        error = error_of(calls[rank][1])
        assert isinstance(error, ParticipantDiedError)
        assert error.rank == 2
    calls[2][0].go.set()
    calls[2][1].exception(WAIT_S)


@pytest.mark.parametrize("kind", [Plain, Seeing])
def test_a_call_that_is_whole_here_returns_though_it_failed_elsewhere(
    table: Callable[..., Table], kind: type[Plain]
) -> None:
    """Where the backend sees for itself what is lacking, nobody is interrupted by what another says of its own end."""
    here = table(kind)
    calls = agreed_calls(here)
    calls[2][0]._ends = lambda: Outcome(error=KernelError(rank=2, detail="no memory"))
    calls[2][0].go.set()
    assert isinstance(error_of(calls[2][1]), KernelError)
    assert (("abort", 2) in here.communicators[0].events) == (kind is Plain), "the others must be woken there"
    for rank in (0, 1):
        calls[rank][0].go.set()
        calls[rank][1].result(WAIT_S)


@pytest.mark.parametrize("kind", [Plain, Seeing])
def test_a_call_for_which_a_rank_that_leaves_did_its_part_ends_well(
    table: Callable[..., Table], kind: type[Plain]
) -> None:
    here = table(kind)
    calls = agreed_calls(here)
    calls[2][0].go.set()
    calls[2][1].result(WAIT_S)
    here.process_groups[2].close()
    assert [one for rank in (0, 1) for one in here.communicators[rank].events] == []
    for rank in (0, 1):
        calls[rank][0].go.set()
        calls[rank][1].result(WAIT_S)
        assert isinstance(error_of(here.start(Call(here.process_groups[rank]))), GroupBrokenError)


def test_one_rank_tells_that_the_ranks_are_out_of_step(table: Callable[..., Table]) -> None:
    """What is said of an epoch that is over changes nothing."""
    here, told = table(), list[Drop]()
    here.form()
    here.heard = lambda rank, message: told.append(message) if isinstance(message, Drop) else None
    for rank in (1, 0, 2, 1):
        here.process_groups[rank].communicator("all")._leave(KernelError(detail="no memory"))
    assert [one.rank for one in told] == [1]
    _all_call(here)
    here.process_groups[0].received(told[0])
    assert here.process_groups[0].communicator("all").client.state is CommunicatorState.OK


def test_a_rank_that_waits_for_one_that_has_left_an_earlier_launch_is_woken(table: Callable[..., Table]) -> None:
    """It begins again, where that rank comes next."""
    here = table(Seeing)
    here.form()
    calls = [Call(process_group) for process_group in here.process_groups]
    for call in calls:
        call.go.set()
    first, client = here.start(calls[0]), here.process_groups[0].communicator("all").client
    assert wait_until(lambda: client.call is not None and client.call.place.startswith("check "))
    here.process_groups[1].communicator("all")._leave(PlanAbortedError(detail="it was interrupted"))
    assert ("abort", 2) in here.communicators[0].events
    for future in (here.start(calls[1]), here.start(calls[2]), first):
        future.result(WAIT_S)


class Broken(Call):
    """One that finds the connection to rank 0 ended when it first begins."""

    def _attempt(self, communicator: Any, seq: int) -> Outcome:
        if self.passed.is_set():
            return super()._attempt(communicator, seq)
        self.passed.set()
        self.go.set()
        return Outcome(error=GroupBrokenError(group_name="g", detail="the connection to rank 0 has ended"))


@pytest.mark.parametrize("error", [KernelError(detail="no memory"), PlanAbortedError(detail="it begins again")])
def test_who_sees_a_rank_leave_before_its_word_comes_waits_for_that(
    table: Callable[..., Table], error: RaycollectError
) -> None:
    """A rank that has left closes its connections, and says why: the one may be noticed before the other."""
    here = table()
    here.form()
    here.holds = lambda rank, message: rank == 1 and isinstance(message, Drop)
    here.process_groups[0].communicator("all")._leave(error)
    call = Broken(here.process_groups[1])
    outcome = here.start(call)
    assert_set(call.passed)
    others = [Call(here.process_groups[rank]) for rank in (0, 2)]
    for one in others:
        one.go.set()
    rest = [here.start(one) for one in others]
    here.release()
    for future in (outcome, *rest):
        future.result(WAIT_S)


def test_a_connection_that_ends_without_a_word_breaks_the_call_for_all(
    table: Callable[..., Table], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(member_communicator, "CAUSE_S", 0.01)
    here = table()
    here.form()
    others = [here.start(Call(here.process_groups[rank])) for rank in (0, 2)]
    for one in (here.start(Broken(here.process_groups[1])), *others):
        assert isinstance(error_of(one), GroupBrokenError)


class Odd(Call):
    """One in which something fails that nobody has foreseen."""

    def _attempt(self, communicator: Any, seq: int) -> Outcome:
        raise ZeroDivisionError


def test_the_others_hear_at_once_of_what_nobody_has_foreseen(table: Callable[..., Table]) -> None:
    here = table()
    here.form()
    others = [here.start(Call(here.process_groups[rank])) for rank in (0, 2)]
    for one in (here.start(Odd(here.process_groups[1])), *others):
        error = error_of(one)
        assert isinstance(error, InternalError)
        assert "ZeroDivisionError" in error.detail
    _all_call(here)


def _all_call(here: Table) -> list[int]:
    """A call of all ranks that goes well; gives the numbers of its launch."""
    calls = [Call(process_group) for process_group in here.process_groups]
    for call in calls:
        call.go.set()
    for future in [here.start(call) for call in calls]:
        future.result(WAIT_S)
    return [call.seq for call in calls]


def test_a_call_that_is_interrupted_before_its_turn_never_begins(table: Callable[..., Table]) -> None:
    """Its tensors are the user's again; the others wait for the next call of the rank."""
    here = table()
    here.form()
    first, lost, *others = [Call(here.process_groups[rank]) for rank in (0, 0, 1, 2)]
    lost.go.set()
    begun = [first.begin(), *map(here.start, others)]
    interrupting = interrupt_in(MemberCommunicator.run, threading.Condition.wait)
    with pytest.raises(KeyboardInterrupt):
        lost()
    interrupting.join(WAIT_S)
    for call in (first, *others):
        call.go.set()
    for future in begun:
        future.result(WAIT_S)
    assert _all_call(here) == [first.seq + 1] * WORLD
    assert not lost.seq


def test_a_rank_that_the_others_never_join_says_who_is_missing_and_how_long_it_waited(
    table: Callable[..., Table],
) -> None:
    here = table()
    error = error_of(here.start(Call(here.process_groups[0], timeout_s=0.1)))
    assert isinstance(error, CollectiveTimeoutError)
    assert (error.missing, error.timeout_s) == ((1, 2), 0.1)


@pytest.mark.parametrize("kind", [Plain, Seeing])
def test_ranks_out_of_step_meet_and_go_on(table: Callable[..., Table], kind: type[Plain]) -> None:
    """Where the backend can, with what they have, above all numbers that a rank has seen; else with new ones."""
    here = table(kind)
    assert _all_call(here) == [1] * WORLD
    made = [here.communicators[rank] for rank in range(WORLD)]
    early = [here.start(Call(here.process_groups[rank], timeout_s=0.1)) for rank in (0, 1)]
    for future in early:
        error = error_of(future)
        assert isinstance(error, CollectiveTimeoutError)
        assert error.missing == (2,)
    resumes = kind is Seeing
    assert _all_call(here) == [3 if resumes else 1] * WORLD
    assert [here.communicators[rank] is made[rank] for rank in range(WORLD)] == [resumes] * WORLD
    assert ["close" in one.events for one in made] == [not resumes] * WORLD
    assert _all_call(here) == [4 if resumes else 2] * WORLD


@pytest.mark.parametrize(
    "error", [InternalError(detail="odd"), GroupBrokenError(group_name="g", detail="a connection has ended")]
)
def test_all_make_new_communicators_where_one_rank_has_none_left(
    table: Callable[..., Table], error: RaycollectError
) -> None:
    here = table(Seeing)
    calls = start_calls(here)
    made = [here.communicators[rank] for rank in range(WORLD)]
    calls[1][0]._ends = lambda: Outcome(error=error)
    for call, _ in calls:
        call.go.set()
    outcomes = [future.exception(WAIT_S) for _, future in calls]
    assert [type(one) for one in outcomes] == [type(None), type(error), type(None)]
    assert _all_call(here) == [1] * WORLD
    assert not any(here.communicators[rank] is made[rank] for rank in range(WORLD))
    assert all("close" in one.events for one in made)


@pytest.mark.parametrize("kind", [Plain, Seeing])
@pytest.mark.parametrize("seed", range(4))
def test_whatever_ranks_do_in_their_calls_they_meet_in_the_next_one(
    table: Callable[..., Table], kind: type[Plain], seed: int
) -> None:
    """Some are late, some fail before or after the agreement, each at its own time."""
    rng, here = random.Random(seed), table(kind)
    ends: list[Callable[[], Outcome]] = [
        Outcome,
        Outcome,
        lambda: Outcome(error=KernelError(detail="no memory")),
        lambda: Outcome(error=InternalError(detail="odd")),
        lambda: Outcome(error=PlanAbortedError(detail="a rank has left")),
        lambda: _raise(KeyboardInterrupt()),
    ]
    for _ in range(4):
        calls = []
        for rank in rng.sample(range(WORLD), rng.randint(1, WORLD)):
            call = Call(here.process_groups[rank], rng.choice(ends), timeout_s=0.1)
            call.go.set()
            calls.append(here.start(call))
        for future in calls:
            future.exception(WAIT_S)
        assert len(set(_all_call(here))) == 1
    assert {communicator.communicator("all").client.state for communicator in here.process_groups} == {
        CommunicatorState.OK
    }


def _raise(error: BaseException) -> Outcome:
    raise error
