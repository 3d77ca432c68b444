"""A message that can't be taken in ends what it was for, with the cause, and nothing else: leases and a controller."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from raycollect import backends
from raycollect.channel.messages import (
    Ask,
    Collect,
    Deny,
    Depart,
    Joined,
    Leave,
    Measure,
    Meet,
    Publish,
    Record,
    Seen,
    Tick,
    Unable,
)
from raycollect.core.model import OpKind, ReduceOp
from raycollect.driver import dispatch
from raycollect.driver.coordinators import Coordinators
from raycollect.driver.dispatch import RequestKey
from raycollect.driver.group_status import GroupStatistics, member_status
from raycollect.driver.groups import Groups
from raycollect.driver.participants import Participants, _Joining
from raycollect.driver.plan_tracker import PlanTracker
from raycollect.errors import (
    COULD_NOT_LOOK,
    ConnectionLostError,
    InternalError,
    MismatchError,
    ParticipantDiedError,
    PlanAbortedError,
    RankReport,
    from_wire,
)
from raycollect.group.channel_exchange import ChannelExchange
from raycollect.group.coordinator import PLANS, Coordinator
from raycollect.group.plan_communicator import PlanCommunicator
from raycollect.member import lease as leases
from raycollect.member import recording_agent, reporter
from raycollect.member.plan_queue import PlanQueue
from raycollect.member.sequencer import PlanSequencer
from raycollect.observe import Recorder, Tracer, stacks, timeline_session
from raycollect.pos import Container, Store
from tests.faults.thread_failures import fail_at
from tests.pure.driver.test_order_model import Fleet
from tests.pure.member.test_lease import _join, premises
from tests.pure.sites import Ref

__all__ = ["premises"]  # fixtures

WAIT_S = 20.0
BOOM = "TypeError: injected on"


class Crew(Fleet):
    """Three participants in two groups, of which none has all: the controller keeps the check of what takes both."""

    def __init__(self) -> None:
        super().__init__(3, [(0, 1), (1, 2)])

    def sum(self, first: Ref | None = None) -> PlanTracker:
        """Starts two sums of new arrays as one plan; the array of participant 0 may be another one."""
        made = [one if one is not None else self.sites[at].hold(np.arange(3)) for at, one in ((0, first), (1, None))]
        pairs = [made, [self.sites[at].hold(np.arange(3)) for at in (1, 2)]]
        refs = {one.key: one for pair in pairs for one in pair}
        places = list(refs)
        asked = []
        for group, pair in zip(self.memberships, pairs, strict=True):
            operands = tuple((rank, places.index(one.key), None) for rank, one in enumerate(pair))
            asked.append(RequestKey(group, OpKind.ALLREDUCE, operands, ReduceOp.SUM, -1, -1, True, WAIT_S))
        return dispatch.send_plan(self.controller, tuple(asked), dict(refs), 1 << 20)

    def look(self) -> Sequence[Seen | None]:
        return self.controller.participants.look(self.memberships[0].members, WAIT_S)

    def assert_works(self) -> None:
        """What is new has no trace of what failed before: a tensor in whose midst a plan was aborted is dirty."""
        first = self.sites[0].hold(np.arange(3))
        tracker = self.sum(first)
        assert tracker.wait(WAIT_S)
        assert tracker.error is None
        found = self.sites[0].store.look(first.key)
        assert isinstance(found, Container)
        np.testing.assert_array_equal(found.tensors[0], 2 * np.arange(3))


@contextmanager
def crew_of() -> Iterator[Crew]:
    made = Crew()
    try:
        made.assert_works()
        yield made
    finally:
        made.close()


def assert_told(tracker: PlanTracker, what: str) -> None:
    assert tracker.wait(WAIT_S), "it hangs"
    assert isinstance(tracker.error, InternalError), tracker.error
    assert tracker.error.detail.startswith(f"taking in {what} failed: {BOOM}")


# ---------------------------------------------------------------------------------------------- plans


@pytest.mark.parametrize(
    ("holder", "name", "what"),
    [
        (ChannelExchange, "arrived", "Arrivals"),
        (PlanTracker, "arrive", "Arrive"),
        (PlanTracker, "done", "Done"),
        (PlanQueue, "received", "Order"),
    ],
)
def test_a_plan_ends_with_the_cause_and_the_next_one_goes_on(holder: Any, name: str, what: str) -> None:
    with crew_of() as crew:
        with fail_at(holder, name):
            assert_told(crew.sum(), what)
        crew.assert_works()


def test_an_abort_that_can_not_be_taken_in_ends_the_plan_all_the_same() -> None:
    with crew_of() as crew:
        gate = threading.Event()
        crew.sites[0].queue.send(lambda: gate.wait(WAIT_S))
        tracker = crew.sum(crew.sites[0].make(np.arange(3)))
        with fail_at(PlanSequencer, "abort"):
            crew.controller.send(tracker, tracker.fail(PlanAbortedError(detail="cancelled")))
        gate.set()
        crew.assert_works()


def test_who_is_gone_is_told_of_whatever_fails() -> None:
    """The groups' end comes first; where that fails, the plans under way end all the same."""
    gate = threading.Event()
    with crew_of() as crew:
        crew.sites[0].queue.send(lambda: gate.wait(WAIT_S))
        tracker, peer = crew.sum(), crew.sites[2].peer
        line = peer.link
        with fail_at(Groups, "lost"):
            peer.closed(cast(Any, None), ConnectionLostError(detail="the end"))
        assert tracker.wait(WAIT_S)
        assert isinstance(tracker.error, ParticipantDiedError)
        gate.set()
        crew.sites[2].lease.end("its controller is gone")
        peer.link = line  # which the test closes


def test_a_plan_whose_end_can_not_be_told_as_it_was_ends_with_the_cause() -> None:
    with crew_of() as crew:
        odd = crew.sites[0].hold(np.arange(4))
        with fail_at(reporter, "_shortened"):
            tracker = crew.sum(odd)  # of another length than the other one
            assert tracker.wait(WAIT_S)
        assert isinstance(tracker.error, (InternalError, MismatchError))
        crew.assert_works()


# ---------------------------------------------------------------------------------------------- questions


def test_who_can_not_look_at_itself_says_why() -> None:
    with crew_of() as crew:
        members = crew.memberships[0].members
        with fail_at(Recorder, "story"):
            seen = crew.controller.participants.look(members, WAIT_S)
        words = [member_status(one, [], {one.actor_id: found}).state for one, found in zip(members, seen, strict=True)]
        assert sum(one.startswith(f"{COULD_NOT_LOOK}taking in Look failed: {BOOM}") for one in words) == 1
        assert all(one is not None and not one.doing.startswith(COULD_NOT_LOOK) for one in crew.look())
        crew.assert_works()


def test_a_stack_that_can_not_be_read_leaves_the_rest_of_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    with crew_of() as crew:
        with fail_at(stacks, "_doing"):
            seen = crew.look()
        assert all(one is not None and one.ended == 1 for one in seen)
        assert [one.doing for one in seen if one is not None and BOOM in one.doing] == [
            f"{COULD_NOT_LOOK}{BOOM} any thread"
        ]
        crew.assert_works()


@pytest.mark.parametrize("has_begun", [True, False])
def test_a_report_of_who_could_not_look_says_why(has_begun: bool) -> None:
    told = RankReport(
        rank=1,
        actor="W",
        answers=True,
        has_begun=has_begun,
        doing=f"{COULD_NOT_LOOK}the cause",
        stack=(),
        ended=0,
        story=(),
        step="in the consistency check" if has_begun else "",
    )
    known = " is in it (in the consistency check), and" if has_begun else ""
    assert str(told) == f"rank 1 (W){known} could not look: the cause"


def test_who_can_not_say_what_it_holds_says_why() -> None:
    with crew_of() as crew:
        members = crew.memberships[0].members
        with fail_at(Store, "statistics"):
            found = crew.controller.participants.survey(members, WAIT_S)
        (unable,) = [one for one in found if isinstance(one, Unable)]
        assert unable.detail.startswith(f"{COULD_NOT_LOOK}taking in Survey failed: {BOOM}")
        shown = GroupStatistics(members=(None, None), failures={1: unable.detail})
        assert f"rank 0: gone, or silent\n  rank 1: {COULD_NOT_LOOK}taking in Survey" in repr(shown)
        assert not any(isinstance(one, Unable) for one in crew.controller.participants.survey(members, WAIT_S))


@pytest.mark.parametrize(
    ("question", "holder", "name"),
    [
        (lambda peer: peer.ask(Measure, seq=1), PlanSequencer, "has_ended"),
        (lambda peer: peer.ask(Tick), recording_agent, "clock_id"),
        (lambda peer: peer.ask(Record, limit=100, metrics=False), recording_agent, "clock_id"),
        (lambda peer: peer.ask(Collect, ends=False), Tracer, "of"),
    ],
)
def test_all_other_questions_are_answered_as_well(question: Any, holder: Any, name: str) -> None:
    with crew_of() as crew:
        peer = crew.sites[0].peer
        try:
            with fail_at(holder, name):
                answer = question(peer).result(WAIT_S)
            assert isinstance(answer, Unable)
            assert BOOM in answer.detail
            assert not isinstance(question(peer).result(WAIT_S), Unable)
        finally:
            Tracer.current().end("me")


def test_a_timeline_names_who_could_not_record() -> None:
    with crew_of() as crew:
        peer = crew.sites[0].peer
        peer.info |= {"address": SimpleNamespace(host="here"), "pid": 1}
        with fail_at(recording_agent.RecordingAgent, "_tell_time"):
            tracked = timeline_session._Tracked(peer, 100, metrics=False)
            tracked.asked.result(WAIT_S)
        assert BOOM in tracked.refusal
        Tracer.current().end("me")


# ---------------------------------------------------------------------------------------------- groups


def test_a_member_s_place_in_a_hub_that_fails_ends_that_call(monkeypatch: pytest.MonkeyPatch) -> None:
    with crew_of() as crew:
        group, peer = crew.memberships[0], crew.sites[0].peer
        crew.controller.groups.coordinators.open(group)
        meet = Meet(group_id=group.spec.group_id, communicator="all", place="form", call=1, blob=b"")
        told = list[Any]()
        monkeypatch.setattr(Participants, "deliver", lambda self, actor_ids, orders: told.extend(orders))
        with fail_at(Coordinator, "receive"):
            peer.received(cast(Any, None), meet)
        assert [(rank, type(one)) for rank, one in told] == [(0, Deny), (1, Deny)]
        assert all(isinstance(from_wire(one.error), InternalError) for _, one in told)
        told.clear()
        with fail_at(Coordinator, "receive"):  # a question of one member to others: nobody's call
            peer.received(cast(Any, None), Ask(group_id=group.spec.group_id, communicator="all", ranks=[0]))
        assert told == []


PUBLISHED = Publish(group_id="id of g", communicator=PLANS, generation="id of g", name="name", value=b"")


@pytest.mark.parametrize("message", [Joined(request=1), PUBLISHED])
def test_a_group_that_can_not_form_is_told_why(message: Any) -> None:
    with crew_of() as crew:
        joining = _Joining(crew.memberships[0].members[0], "id of g")
        crew.controller.participants._joining[1] = joining, (joining,)
        holder, name = (Participants, "joined") if isinstance(message, Joined) else (Coordinators, "receive")
        with fail_at(holder, name):
            crew.sites[0].peer.received(cast(Any, None), message)
        assert joining.settled.is_set()
        assert BOOM in str(joining.error)


def test_a_member_that_parts_is_answered_whatever_fails() -> None:
    with crew_of() as crew:
        site, group = crew.sites[0], crew.memberships[0]
        crew.controller.groups.coordinators.open(group)
        came = SimpleQueue[Any]()
        cast(Any, site.lease._groups.by_id[group.spec.group_id]).received = came.put
        with fail_at(Groups, "breaks"):
            site.lease._reporter.tell(Depart(group_id=group.spec.group_id))
            assert came.get(timeout=WAIT_S) == Depart(group_id=group.spec.group_id)


@pytest.mark.parametrize("name", ["published", "__init__"])
def test_what_a_participant_of_a_group_can_not_take_in_ends_its_joining(
    monkeypatch: pytest.MonkeyPatch, premises: Any, name: str
) -> None:
    """What others publish; and the invitation itself."""
    premises.instruments.recorder = Recorder(time.monotonic)
    waits = lambda spec, rank, rendezvous, *_, **__: rendezvous.get("name", WAIT_S)  # noqa: E731
    monkeypatch.setattr(backends, "load", lambda *_: waits)
    came = SimpleQueue[Any]()
    here = leases.Lease("me", "a test", cast(Any, SimpleNamespace(send=came.put)), premises)
    with fail_at(PlanCommunicator, name):
        here.received(_join())
        if name == "published":
            here.received(PUBLISHED)
        error = from_wire(came.get(timeout=WAIT_S).error)
    assert BOOM in str(error)
    monkeypatch.setattr(backends, "load", lambda *_: lambda *_, **__: SimpleNamespace(close=lambda: None))
    here.received(Leave(group_id="id of g"))
    here.received(_join())
    assert came.get(timeout=WAIT_S) == Joined(request=1)
    here.end("the test is over")
