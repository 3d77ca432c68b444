"""What a controller does with what its participants say, over links that refuse what is too long for the channel."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from raycollect.channel.messages import Abort, Arrive, Done, Join, Joined, Meet, Met, Publish, encode
from raycollect.channel.protocol import MAX_FRAME_NBYTES
from raycollect.core.model import Launch
from raycollect.driver import member_discovery
from raycollect.driver.controller import Controller
from raycollect.driver.dispatch import prepare
from raycollect.driver.groups import Declared
from raycollect.errors import (
    ActorGoneError,
    ConnectionLostError,
    GroupBrokenError,
    GroupError,
    KernelError,
    ProtocolError,
    UnknownGroupError,
    from_wire,
)
from raycollect.group.channel_exchange import ChannelExchange
from raycollect.group.coordinator import ALL, PLANS
from raycollect.ray_bridge.submitted_calls import AllHeld, SubmittedCalls
from tests.pure.driver.leased import Line, controller, crew, declared, lease, registered, registered_anew, said
from tests.pure.driver.sending import send_plan
from tests.pure.driver.tracked_plans import asked, flying, group, key_of
from tests.support.waiting import interrupt_in

__all__ = ["controller"]  # a fixture

WAIT_S = 20.0


@pytest.mark.parametrize(
    ("nbytes", "parts"), [(0, 1), (1000, 1), (1 << 18, 2), ((1 << 18) + 1, 4), ((1 << 20) - 200, 4)]
)
def test_an_answer_at_the_check_comes_in_as_many_parts_as_frames_need(
    controller: Controller, nbytes: int, parts: int
) -> None:
    tracker = registered(controller)
    peers = crew(controller, tracker)
    everybody = list(range(4))
    for at, peer in enumerate(peers):
        message = Arrive(group_id="", seq=tracker.seq, round=0, ranks=everybody, rank=at, blob=bytes([at]) * nbytes)
        encode(message)
        controller.messages.received(peer, message)
    for peer in peers:
        told = said(peer)
        assert [one.more for one in told] == [True] * (parts - 1) + [False]
        exchange = ChannelExchange("", 0, lambda message: None)
        for one in told:
            exchange.arrived(one.seq, one.round, one.blobs, more=one.more)
        launch = Launch(seq=tracker.seq, ranks=tuple(everybody), timeout_s=WAIT_S)
        assert exchange(launch, b"") == [bytes([at]) * nbytes for at in everybody]
    for peer in peers:
        controller.messages.received(peer, Done(seq=tracker.seq, ranks=[], error=None, story=[]))
    assert tracker.has_ended
    assert tracker.error is None
    assert list(controller.plans.trackers()) == []


@pytest.mark.parametrize(("nbytes", "fits"), [(1000, True), (1 << 19, False)])
def test_a_meeting_of_members_that_is_too_long_ends_their_calls(
    controller: Controller, nbytes: int, fits: bool
) -> None:
    pair = group("pair", (5, 6))
    peers = list(lease(controller, pair).values())
    controller.groups.coordinators.open(pair)
    for call, peer in enumerate(peers, start=3):
        meet = Meet(group_id=pair.spec.group_id, communicator=ALL, place="check", call=call, blob=bytes(nbytes))
        controller.messages.received(peer, meet)
    told = [said(peer) for peer in peers]
    assert [[type(one) for one in mine] for mine in told] == [[Met]] * 2
    assert all((mine[0].error is None, bool(mine[0].blobs)) == (fits, fits) for mine in told)
    if not fits:
        assert all("the limit" in str(from_wire(mine[0].error)) for mine in told)
        assert all((mine[0].communicator, mine[0].group_id) == (ALL, pair.spec.group_id) for mine in told)


def test_oversized_message_outside_a_meeting_raises_protocol_error(controller: Controller) -> None:
    pair = group("pair", (5, 6))
    lease(controller, pair)
    with pytest.raises(ProtocolError, match="Abort has"):
        controller.groups.coordinators.relay(pair, [(0, Abort(seq=1, reason="x" * MAX_FRAME_NBYTES))])


def test_early_publish_reaches_members_invited_later(controller):
    """Rank 0 is quick: what it publishes must not reach rank 1 before rank 1 knows of the group, and would drop it."""
    membership = group("late", (5, 6))
    peers = list(lease(controller, membership).values())
    for peer in peers:
        peer.group_ids.add(membership.spec.group_id)
    controller.groups.coordinators.open(membership)
    group_id = membership.spec.group_id
    published = Publish(group_id=group_id, communicator=PLANS, epoch=group_id, name="at.0", value=b"here")
    hub = threading.Thread(target=lambda: controller.messages.received(peers[0], published))

    class Quick(Line):
        """Rank 0's, which answers at once."""

        def send(self, message: Any) -> None:
            super().send(message)
            if isinstance(message, Join):
                hub.start()
                controller.messages.received(peers[0], Joined(request=message.request, error=None))

    class Slow(Line):
        """Rank 1's; the hub has time to overtake the invitation."""

        def send(self, message: Any) -> None:
            if isinstance(message, Join):
                hub.join(0.2)
                controller.messages.received(peers[1], Joined(request=message.request, error=None))
            super().send(message)

    peers[0].link, peers[1].link = Quick(), Slow()  # type: ignore[assignment]
    controller.participants.join(membership, time.monotonic() + WAIT_S)
    hub.join(WAIT_S)
    assert [type(message) for message in said(peers[1])] == [Join, Publish]
    assert [type(message) for message in said(peers[0])] == [Join]


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_signal_while_a_plan_is_sent_comes_up_once_all_have_it(controller, at):
    membership = group("team", (5, 6, 7))
    controller.groups.add(declared(membership))
    peers = list(lease(controller, membership).values())

    sent = []

    def submit(place: int) -> list[Any]:
        if place == at:
            signal.raise_signal(signal.SIGINT)
        sent.append(place)
        return []

    for place, peer in enumerate(peers):
        peer.submit = lambda payload, outputs, place=place: submit(place)  # type: ignore[method-assign]
    refs = {key_of(place): object() for place in range(3)}
    with pytest.raises(KeyboardInterrupt):
        send_plan(controller, (asked(membership, (0, 1, 2)),), refs)
    assert sent == [0, 1, 2]
    (tracker,) = controller.plans.trackers()
    for place, peer in enumerate(peers):
        controller.messages.received(peer, Done(seq=tracker.seq, ranks=[], error=None, story=[]))
        assert tracker.is_pending(place) is False
    assert tracker.error is None
    assert not controller.plans.trackers()


def test_a_signal_in_the_wait_for_the_queues_of_actors_leaves_no_plan_behind(controller: Controller) -> None:
    """Another thread may hold one of them for long; nobody has been told anything yet."""
    membership = group("team", (5, 6, 7))
    controller.groups.add(declared(membership))
    peers = list(lease(controller, membership).values())

    for peer in peers:
        peer.calls = SubmittedCalls()
    has_it, let_go = threading.Event(), threading.Event()

    def hold() -> None:
        with peers[1].calls.lock:  # type: ignore[union-attr]
            has_it.set()
            let_go.wait(WAIT_S)

    holding = threading.Thread(target=hold)
    holding.start()
    assert has_it.wait(WAIT_S)
    interrupting = interrupt_in(AllHeld.__enter__)
    with pytest.raises(KeyboardInterrupt):
        send_plan(controller, (asked(membership, (0, 1, 2)),), {key_of(at): object() for at in range(3)})
    interrupting.join(WAIT_S)
    with controller.plans.dispatching:  # nobody waits for the other thread
        assert not controller.plans.trackers()
    let_go.set()
    holding.join(WAIT_S)
    assert [said(peer) for peer in peers] == [[], [], []]


@pytest.mark.parametrize(("ends", "kind"), [("group", UnknownGroupError), ("participant", GroupBrokenError)])
def test_what_ends_in_the_wait_for_the_queues_of_actors_gets_no_plan(
    controller: Controller, ends: str, kind: type[GroupError]
) -> None:
    """Whoever ended it has looked for the plans under way, and ends none that begins later: it would never end."""
    membership = group("team", (5, 6, 7))
    controller.groups.add(declared(membership))
    controller.groups.coordinators.open(membership)
    peers = list(lease(controller, membership).values())

    class Held:
        """A lock that is waited for until something has ended."""

        def __init__(self) -> None:
            self._lock = threading.RLock()
            self.release = self._lock.release

        def acquire(self, *args: Any, **options: Any) -> bool:
            if ends == "group":
                controller.groups.destroy("team")
            else:
                peers[1].closed(peers[1].link, ConnectionLostError(detail="reset"))  # type: ignore[arg-type]
            return self._lock.acquire(*args, **options)

        def __enter__(self) -> bool:
            return self._lock.acquire()

        def __exit__(self, *exc: object) -> None:
            self.release()

    for peer in peers:
        peer.group_ids.add(membership.spec.group_id)
        peer.calls = SubmittedCalls()
        peer.submit = lambda payload, outputs: []  # type: ignore[method-assign]
    peers[2].calls.lock = Held()  # type: ignore[assignment, union-attr]
    with pytest.raises(kind):
        send_plan(controller, (asked(membership, (0, 1, 2)),), {key_of(at): object() for at in range(3)})
    assert not controller.plans.trackers()


# ---------------------------------------------------------------------------------------------- what is let go of


def test_released_participant_ends_its_running_plans(controller):
    """Nobody hears of it any more, so that the plan would hold its refs for good."""
    membership = group("team", (5, 6, 7))
    controller.groups.add(declared(membership))
    peers = list(lease(controller, membership).values())
    for peer in peers:
        peer.group_ids.add(membership.spec.group_id)
    tracker = registered_anew(controller, flying(asked(membership, (0, 1, 2))))
    tracker.fail(KernelError(detail="no memory"))
    assert controller.plans.trackers()
    controller.groups.destroy("team")
    assert not controller.plans.trackers()
    assert tracker.has_ended
    assert not tracker.refs
    assert isinstance(tracker.error, KernelError)


def test_a_group_that_is_gone_breaks_no_more(controller):
    membership = group("team", (5, 6))
    controller.groups.add(declared(membership))
    controller.groups.coordinators.open(membership)
    controller.groups.breaks(membership.spec.group_id, "a kernel failed")
    assert controller.groups.why_broken(membership) == "a kernel failed"
    controller.groups.destroy("team")
    assert membership.spec.group_id not in controller.groups.coordinators
    controller.groups.breaks(membership.spec.group_id, "a late word")
    assert not controller.groups._broken


def test_the_plans_of_a_group_go_with_it(controller):
    membership = group("team", (5, 6))
    controller.groups.add(declared(membership))
    calls = (asked(membership, (0, 1)),)
    first = prepare(calls, 0, ())
    assert prepare(calls, 0, ()) is first
    controller.groups.destroy("team")
    assert prepare(calls, 0, ()) is not first


def test_no_call_finds_the_members_of_before_until_those_of_now_have_taken_their_place(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have left that group already: a plan that began there would fail."""
    old, now = group("team", (5, 6)), group("team", (5, 6, 7))
    groups, refused = controller.groups, list[str]()
    groups.add(declared(old))

    def form(_: Any, __: float, add: Callable[[Declared], None], **___: Any) -> Declared:
        groups.draining.add(old.spec.group_id)
        with pytest.raises(GroupBrokenError, match="are changing right now"):
            groups.check([old])
        refused.append("before it is stored")
        add(declared(now))
        return declared(now)

    monkeypatch.setattr(groups, "_form", form)
    monkeypatch.setattr(member_discovery, "who_answers", lambda *_: None)
    assert groups.rebuild(old, None, WAIT_S)[0] is groups.named("team") is now
    assert refused


def test_a_member_that_dies_between_its_lease_and_its_join_is_named(controller: Controller) -> None:
    """As where it dies before and after: who forms the group again may leave it out."""
    team = group("team", (5, 6))
    _, second = lease(controller, team).values()
    controller.participants.drop(second)
    with pytest.raises(ActorGoneError, match="before it was asked to join") as caught:
        controller.participants.join(team, time.monotonic() + WAIT_S)
    assert (caught.value.rank, caught.value.actor) == (1, team.members[1].actor)
