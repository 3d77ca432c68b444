"""A leased participant, as its controller sees it: questions, and answers, over a link that may end at any time."""

from __future__ import annotations

import gc
import math
import threading
import weakref
from types import SimpleNamespace

import pytest

from raycollect.channel import Mailbox
from raycollect.channel.messages import (
    ArenaStatistics,
    Bye,
    Joined,
    Leave,
    Look,
    StoreStatistics,
    Survey,
    Surveyed,
    Welcome,
)
from raycollect.driver import participants as peers_module
from raycollect.driver.participant_link import ParticipantLink
from raycollect.driver.participants import Participants
from raycollect.errors import ActorGoneError, ConnectionLostError
from raycollect.ray_bridge import call_tokens
from tests.pure.driver import leased


class Line(leased.Line):
    """A link on which nothing answers by itself; broken, it refuses to send."""

    broken = False

    def send(self, message):
        if self.broken:
            raise ConnectionLostError(detail="the link is closed")
        super().send(message)


class Owner:
    """What a peer tells its controller."""

    def __init__(self):
        self.heard = []

    def received(self, peer, message):
        self.heard.append(message)

    def lost(self, peer, reason):
        self.heard.append(reason)


@pytest.fixture
def peer():
    made = ParticipantLink(Owner(), {"participant": True, "actor": "Worker(3f2a91)"}, object())
    made.link = Line()
    return made


def answer(request):
    store, arena = StoreStatistics(held=1, dirty=2, freed=3), ArenaStatistics(mapped=4)
    return Surveyed(request=request, store=store, arena=arena)


def test_each_answer_goes_to_its_question_and_other_messages_are_passed_on(peer):
    first, second = peer.ask(Survey), peer.ask(Survey)
    asked = [message.request for message in peer.link.sent]
    assert all(type(message) is Survey for message in peer.link.sent)
    peer.received(peer.link, answer(asked[1]))
    assert second.result(0) == answer(asked[1])
    assert not first.done()
    for number in (asked[0], asked[0], asked[0] + 7):  # the last two are no question's
        peer.received(peer.link, answer(number))
    assert first.result(0) == answer(asked[0])
    assert peer._owner.heard == []
    joined = Joined(request=asked[0])
    peer.received(peer.link, joined)
    assert peer._owner.heard == [joined]


@pytest.mark.parametrize("ends", ["later", "after it broke", "while one is asked"])
def test_questions_end_with_the_connection(peer, ends):
    line, reason = peer.link, ConnectionLostError(detail="reset")
    if ends == "while one is asked":
        line.send = lambda message: peer.closed(line, reason)
    line.broken = ends == "after it broke"
    asked = peer.ask(Survey)
    if ends != "while one is asked":
        assert not asked.done()
        peer.closed(line, reason)
    assert asked.result(0) is None
    assert peer._owner.heard == ["reset"]
    assert peer.ask(Survey).result(0) is None


def test_a_participant_given_back_keeps_no_slot(peer):
    """Its connection goes on as long as somebody holds what it has returned."""
    peer.slot = Mailbox().take_slot()
    slot = weakref.ref(peer.slot)
    peer._tokens = SimpleNamespace(end=lambda close: None)
    peer.retire()
    gc.collect()
    assert slot() is None


@pytest.mark.parametrize("all_joined", [True, False])
def test_the_end_of_a_member_counts_for_those_who_join_until_all_have(all_joined):
    peers = Participants("me")
    members = [SimpleNamespace(actor_id=f"actor {rank}") for rank in range(2)]
    join = peers_module._Join(dict(enumerate(members)))
    peers._joins.update(dict.fromkeys(join.members, join))
    try:
        for request in range(1 + all_joined):
            peers.joined(Joined(request=request))
        peers.give_up(SimpleNamespace(info={"actor_id": "actor 1", "actor": "W(1)"}), "killed")
        assert (join.error is None) == all_joined
        assert join.over.is_set()
    finally:
        peers.close()


def test_a_member_whose_connection_ends_as_it_is_given_back_keeps_no_other_from_that():
    """`destroy` is called by the user's thread, and the hub's hears of the end of a connection."""
    parted = []
    peers = Participants("me")
    peers.owner = SimpleNamespace(parted=lambda peer: parted.append(peer.info["actor_id"]))
    members = [SimpleNamespace(actor_id=f"actor {rank}") for rank in range(2)]
    try:
        for one in members:
            peer = ParticipantLink(Owner(), {"participant": True, "actor_id": one.actor_id}, None)
            peer.link, peer.group_ids = Line(), {"a group"}
            peers.add(peer)
        first, _ = peers.all()
        first.send = lambda message: peers.drop(first)
        peers.part(SimpleNamespace(spec=SimpleNamespace(group_id="a group"), members=members))
        assert peers.all() == ()
        assert "actor 1" in parted
    finally:
        peers.close()


class Contended:
    """A lock; before it is first taken, another thread makes a call."""

    def __init__(self, call):
        self._call, self._lock = call, threading.RLock()

    def __enter__(self):
        call, self._call = self._call, None
        if call is not None:
            call()
        self._lock.acquire()

    def __exit__(self, *exc):
        self._lock.release()


def test_a_timeline_collects_from_an_actor_whose_last_two_groups_end_at_once():
    events, peers = [], Participants("me")
    peers.owner = SimpleNamespace(parted=lambda peer: None)
    members = [SimpleNamespace(actor_id="actor 0")]
    first, second = (SimpleNamespace(spec=SimpleNamespace(group_id=name), members=members) for name in "ab")
    peer = ParticipantLink(Owner(), {"participant": True, "actor_id": "actor 0"}, object())
    peer.link, peer.group_ids = Line(), {"a", "b"}
    peer.send = lambda message: events.append(type(message))
    peers.add(peer)
    peers.timeline = SimpleNamespace(leaving=lambda peer: events.append("collected"))
    peers._lock = Contended(lambda: peers.part(second))
    try:
        peers.part(first)
        assert events == [Leave, Leave, "collected", Bye]
        assert peers.all() == ()
    finally:
        peers.close()


def test_a_question_after_the_end_of_a_lease_has_no_answer_at_once():
    """The connection may go on, as long as somebody holds a value with a lent token."""
    peer = ParticipantLink(Owner(), {"participant": True, "actor_id": "actor 0"}, object())
    peer.link = Line()
    before = peer.ask(Look)
    assert not before.done()
    peer.retire()
    assert before.result(0) is None
    assert peer.ask(Look).result(0) is None


def test_a_participant_whose_connection_ends_before_its_lease_is_known_is_not_leased(monkeypatch):
    """Nobody would hear of it later: who asks it to join would wait until the time is over."""
    peers = Participants("me")
    peers.owner = SimpleNamespace(lost=lambda peer, reason: peers.drop(peer))
    line = Line()
    member = SimpleNamespace(actor_id="actor 0", incarnation="1", machine="another", address=None, rank=0, actor="W(1)")

    def connect(address, hello, peer, timeout_s):
        peer.received(line, Welcome(group_id=""))
        peer.closed(line, ConnectionLostError(detail="reset"))
        return line

    monkeypatch.setattr(peers._hub, "connect", connect)
    monkeypatch.setattr(peers_module.ray_actors, "describe_process", lambda: "me")
    monkeypatch.setattr(peers_module.ray_session, "worker_id", lambda: "worker")
    monkeypatch.setattr(peers_module.ray_session, "machine_id", lambda: "mine")
    info = {"participant": True, "ordered": True, "actor_id": "actor 0", "actor": "W(1)", "incarnation": "1"}
    try:
        with pytest.raises(ActorGoneError, match="as it was leased"):
            peers.lease(member, SimpleNamespace(), info, None, math.inf, group_id="a group")
        assert peers.all() == ()
    finally:
        peers.close()


def test_the_end_of_a_group_lets_go_of_the_tokens_of_members_that_have_died():
    """The hub's thread hears of the death, and may not; nobody else might for as long as the process lives."""
    let_go = []
    peers = Participants("me")
    call_tokens._ended.append(SimpleNamespace(_let_go=lambda: let_go.append(True)))
    try:
        members = [SimpleNamespace(actor_id="one that has died")]
        peers.part(SimpleNamespace(spec=SimpleNamespace(group_id="a group"), members=members))
        assert let_go == [True]
    finally:
        call_tokens._ended.clear()
        peers.close()


def test_what_asks_to_be_called_again_lets_the_hub_go_on(monkeypatch):
    """As of keys that can't be told: the hub's thread tried it again and again, and did nothing else."""
    peers, later, calls = Participants("me"), [], []
    monkeypatch.setattr(peers._hub, "later", lambda delay_s, call: later.append(call) or True)

    def again():
        calls.append(None)
        if len(calls) < 3:
            peers._soon(again)

    try:
        peers._soon(again)
        for count in (1, 2, 3):
            later.pop()()
            assert len(calls) == count
        assert later == []
    finally:
        peers.close()
