"""What one who holds the key may say, at random: at most its own link ends, and the process serves whoever comes next.

Every case is made from a seed that the test's name tells. What a wire without the key can do is in `test_protocol`, and
what bytes that are no message do in `tests/pure/core/test_codec.py`.
"""

from __future__ import annotations

import queue
import random
import secrets
import threading
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from raycollect.backends.shm import segment
from raycollect.channel import ControlLink, DataClient, Hub
from raycollect.channel.messages import (
    MESSAGES,
    Done,
    Fetched,
    Free,
    Freed,
    Join,
    Joined,
    Message,
    Order,
    Refused,
    Survey,
    Surveyed,
    Waiting,
    Welcome,
    decode,
    encode,
)
from raycollect.core.model import GroupSpec, Member
from raycollect.driver.controller import Controller
from raycollect.driver.participant_link import ParticipantLink
from raycollect.driver.plan_tracker import PlanTracker
from raycollect.errors import (
    ChannelError,
    ConnectionLostError,
    KernelError,
    PlanAbortedError,
    refusal,
    to_wire,
)
from raycollect.member.participant import Participant
from raycollect.planner import Ticket, encode_order, encode_program
from tests.pure import participants
from tests.pure.channel.parties import LIMIT_S
from tests.pure.driver.leased import controller, lease, registered_anew
from tests.pure.driver.tracked_plans import asked, flying, group, key_of
from tests.pure.thread_faults import helper_threads
from tests.support.values import named_member, replace

__all__ = ["controller"]

SEEDS = range(12)
MESSAGES_SAID = 40

NAMES = ("left", "right", "nobody")


def message(rng: random.Random, cls: type[Message] | None = None) -> Message:
    """Any message of the table, with values of the right types."""
    cls = cls or MESSAGES[rng.choice(sorted(set(MESSAGES) - {"Fetched"}))]
    hints = typing.get_type_hints(cls)
    return cls(**{name: value(rng, hints[name]) for name in sorted({*cls.__struct_fields__} - {"blob_nbytes"})})


def value(rng: random.Random, hint: Any) -> Any:
    """Any value of a field's type; now and then one at the edge of what it can be."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if type(None) in args:
        return None if rng.random() < 0.3 else value(rng, args[0])
    if origin is tuple and args[1:] != (Ellipsis,):
        return tuple(value(rng, part) for part in args)
    if origin in (list, tuple):
        return origin(value(rng, args[0]) for _ in range(rng.choice((0, 1, 2, 5))))
    if origin is dict:
        return {rng.choice(("type", "fields", "name", "x")): rng.choice((None, -1, "x", [], {})) for _ in range(3)}
    plain: dict[Any, Callable[[], Any]] = {
        int: lambda: rng.choice((0, 1, 2, -1, 2**31, 2**63, -(2**63), rng.randrange(10))),
        float: lambda: rng.choice((0.0, -1.0, 1e-9, float("inf"), rng.random())),
        bool: lambda: rng.random() < 0.5,
        GroupSpec: lambda: GroupSpec(
            name="g", group_id="id of left", backend="shm", world_size=rng.choice((1, 2, 2**62))
        ),
        Member: lambda: named_member("W", rng.choice((0, -1))),
        str: lambda: rng.choice(("", "g", "all", "0>1", "9>9", "x" * 300, "\0", "𝄞")),
        bytes: lambda: rng.randbytes(rng.choice((0, 1, 16, 28, 500))),
    }
    if hint not in plain:  # a part of a message
        return hint(**{name: value(rng, part) for name, part in typing.get_type_hints(hint).items()})
    return plain[hint]()


def _error(rng: random.Random) -> Any:
    """What `from_wire` takes; often with something wrong in it."""
    violation = {"kind": "mismatch", "rank": rng.choice((0, -1, 99)), "field": "shape", "found": "3"}
    good: list[Any] = [to_wire(KernelError(rank=rng.choice((0, 1, 99)), detail="x"))]
    good += [to_wire(refusal("allreduce", "", ())), to_wire(PlanAbortedError(detail="x"))]
    error = rng.choice(good)
    if rng.random() < 0.5:
        return error
    changed = {"type": error["type"], "fields": dict(error["fields"])}
    odd = rng.choice((None, -1, "x", b"x", [], [1], {}, [violation], [None], 2**63, 1.5))
    changed["fields"][rng.choice([*changed["fields"], "more"])] = odd
    return rng.choice((changed, {**changed, "type": odd}, {"type": error["type"]}, {}, {"fields": {}}))


def plausible(rng: random.Random, cls: type[Message]) -> Message:
    """A message with fields that mean something to its receiver, most of them."""
    hints, sample = typing.get_type_hints(cls), message(rng, cls)
    valid: dict[str, Any] = {
        "group_id": lambda: rng.choice((*(f"id of {name}" for name in NAMES), "")),
        "seq": lambda: rng.choice((0, 1, 2, 3, 2**63)),
        "predecessor": lambda: rng.choice((0, 1, 2**63)),
        "rank": lambda: rng.choice((0, 1, 2, -1, 99)),
        "round": lambda: rng.choice((0, 0, 1, -1)),
        "ranks": lambda: rng.choice(([0, 1], [0, 1, 2], [0, 1, 2, 3], [], [1, 1], [-1], [2**63])),
        "request": lambda: rng.choice((0, 1, 2**63)),
        "communicator": lambda: rng.choice(("all", "0>1", "1>0", "0>0", "x", "")),
        "error": lambda: _error(rng) if dict in (hints["error"], typing.get_origin(hints["error"])) else _maybe(rng),
    }
    changes = {name: valid[name]() for name in hints if name in valid and rng.random() < 0.9}
    return typing.cast(Message, replace(typing.cast(Any, sample), **changes))


def _maybe(rng: random.Random) -> Any:
    return None if rng.random() < 0.3 else _error(rng)


# ---------------------------------------------------------------------------------------------- to a participant


class Caller:
    """A controller's end: what it was told, and how its link ended."""

    def __init__(self) -> None:
        self.events: queue.Queue[Any] = queue.Queue()

    def received(self, link: ControlLink, message: Message) -> None:
        self.events.put(message)

    def closed(self, link: ControlLink, reason: ChannelError) -> None:
        self.events.put(reason)

    def hear(self, *kinds: type) -> Any:
        """The next thing of one of these kinds."""
        while not isinstance(event := self.events.get(timeout=LIMIT_S), kinds):
            pass
        return event


@pytest.fixture
def participant(monkeypatch: pytest.MonkeyPatch) -> Iterator[Participant]:
    """A participant's process without Ray, with its server on a socket."""
    monkeypatch.setattr(segment, "JOIN_TIMEOUT_S", 0.2)  # else rank 0 waits for its members, lease or not
    before = helper_threads()
    started = participants.participant()
    yield started
    started.close()
    for thread in helper_threads(before):
        thread.join(LIMIT_S)
        assert not thread.is_alive()
    assert started.runtime.process_groups._process_groups == {}


@pytest.fixture
def hub() -> Iterator[Hub]:
    started = Hub()
    yield started
    started.close()


def drive(participant: Participant, hub: Hub) -> tuple[Caller, ControlLink]:
    """Becomes its controller, as soon as the one before is gone."""
    for _ in range(1000):
        caller = Caller()
        link = hub.connect(
            participant._server.address, {"controller": secrets.token_hex(4), "description": "a test"}, caller, LIMIT_S
        )
        if isinstance(caller.hear(Welcome, Refused), Welcome):
            return caller, link
        link.close()
    raise AssertionError("the lease of the controller before did not end")


def asks(participant: Participant, hub: Hub) -> None:
    """The next controller gets its answers, and the participant's threads for it live."""
    caller, link = drive(participant, hub)
    for request in (1, 2**40):
        link.send(Survey(request=request))
        assert caller.hear(Surveyed).request == request
    link.close()


SPEC = GroupSpec(name="g", group_id="id of left", backend="shm", world_size=2)
MEMBERS = [named_member(f"W{rank}", rank) for rank in range(2)]


def _join(rng: random.Random) -> Join:
    odd: dict[str, Any] = {
        "name": ("", "x" * 300),
        "group_id": ("", "id of right"),
        "backend": ("", "nobody", "tcp"),
        "world_size": (1, 3, 2**62),
        "ops": ((), ("x",)),
        "memory": ("cuda", "x"),
        "options": ((("timeout", None),), (("x", (1, "y")),)),
        "timeout_s": (-1.0, float("inf"), 0.0),
    }
    spec = SPEC
    if rng.random() < 0.7:
        name = rng.choice(sorted(odd))
        spec = replace(SPEC, **{name: rng.choice(odd[name])})
    members = rng.choice((MEMBERS, MEMBERS, MEMBERS, [], MEMBERS[:1]))
    return Join(request=1, group=spec, rank=rng.choice((0, 0, 1, -1, 2, 99)), members=members)


def _order(rng: random.Random) -> Order:
    """A program of groups that may be there or not, after plans that may never come."""
    left, right = group("left", (5, 6)), group("right", (5, 7))
    flight = flying(asked(left, (0, 1)), asked(right, (2, 3)))
    payload = bytearray(
        encode_order(
            Ticket(rng.choice((0, 1, 2, 2**63)), rng.choice((0, 0, 7, 2**63))),
            [key_of(at) for at in range(2)],
            encode_program(flight.plan.program(0)),
        )
    )
    if rng.random() < 0.5:
        payload[rng.randrange(20)] ^= 1 << rng.randrange(8)
    return Order(
        payload=bytes(payload[: rng.choice((len(payload), rng.randrange(len(payload))))]),
        in_order=False,
        after=b"",
    )


def _for_participant(rng: random.Random, name: str) -> Message:
    makers: dict[str, Callable[[random.Random], Message]] = {"Join": _join, "Order": _order}
    if name in makers and rng.random() < 0.7:
        return makers[name](rng)
    return plausible(rng, MESSAGES[name])


@pytest.mark.parametrize("seed", SEEDS)
def test_a_participant_outlives_any_controller(participant: Participant, hub: Hub, seed: int) -> None:
    """Who has no lease may say nothing: that ends its link, and nobody else's."""
    rng = random.Random(seed)
    names = rng.sample(sorted(MESSAGES), len(MESSAGES)) * 4
    while names:
        caller, link = drive(participant, hub)
        stranger = Caller()
        other = hub.connect(participant._server.address, {"controller": "other"}, stranger, LIMIT_S)
        assert isinstance(stranger.hear(Refused), Refused)
        other.send(_for_participant(rng, names[-1]))
        stranger.hear(ChannelError)
        link.send(Survey(request=7))
        assert caller.hear(Surveyed).request == 7
        try:
            for name in names[:MESSAGES_SAID]:
                link.send(_for_participant(rng, name))
        except ConnectionLostError:
            pass
        del names[:MESSAGES_SAID]
        link.close()
    asks(participant, hub)


def test_a_hello_of_any_kind_is_answered(participant: Participant, hub: Hub) -> None:
    for hello in ({}, {"controller": None}, {"controller": ["x"] * 100, "description": {}}, {"x": "y" * 3000}):
        caller = Caller()
        link = hub.connect(participant._server.address, hello, caller, LIMIT_S)
        caller.hear(Welcome, Refused)
        link.close()
        caller.hear(ChannelError)
    asks(participant, hub)


@pytest.mark.parametrize("seed", range(4))
def test_a_holder_outlives_any_client(participant: Participant, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(6):
        client = DataClient(participant._server.address, LIMIT_S)
        try:
            for _ in range(10):
                said = plausible(rng, MESSAGES[rng.choice(("Fetch", "Free", "Copied", *sorted(MESSAGES)))])
                client.request(said, timeout_s=LIMIT_S)
        except ChannelError:
            pass
        client.close()
    client = DataClient(participant._server.address, LIMIT_S)
    payload = encode(Fetched(description=b"", blob_nbytes=rng.choice((1, 2**40, 2**63))))  # nobody asked
    stream = client._stream
    stream.sock.sendall(len(payload).to_bytes(4, "big") + stream.connection._outward.tag(payload) + payload)
    with pytest.raises(ConnectionLostError):
        client.request(Free(keys=[]))
    client = DataClient(participant._server.address, LIMIT_S)
    assert client.request(Free(keys=[])) == Freed(count=0)
    client.close()


def test_nothing_of_a_hostile_lease_keeps_a_thread(participant: Participant, hub: Hub) -> None:
    """Members that never come, operands and predecessors that never do: all is over with the lease."""
    before = _threads("raycollect-order")
    caller, link = drive(participant, hub)
    link.send(Join(request=1, group=SPEC, rank=1, members=MEMBERS))
    left = group("left", (5, 6))
    program = flying(asked(left, (0, 1))).plan.program(0)
    for seq, predecessor in ((5, 0), (6, 4), (7, 5)):
        payload = encode_order(Ticket(seq, predecessor), [key_of(0)], encode_program(program))
        link.send(Order(payload=payload, in_order=False, after=b""))
    caller.hear(Waiting)  # the first order has its turn: its predecessor is the start
    link.close()
    asks(participant, hub)
    for thread in _threads("raycollect-order") - before:
        thread.join(LIMIT_S)
        assert not thread.is_alive()


def test_a_controller_that_comes_anew_finds_nothing_of_the_groups_that_it_had(
    participant: Participant, hub: Hub
) -> None:
    """Its first connection may be there still."""
    for group_id in ("one", "the next"):
        caller = Caller()
        link = hub.connect(participant._server.address, {"controller": "me", "description": "a test"}, caller, LIMIT_S)
        caller.hear(Welcome)
        spec = replace(SPEC, group_id=group_id, world_size=1)
        link.send(Join(request=1, group=spec, rank=0, members=MEMBERS[:1]))
        assert caller.hear(Joined).error is None
        assert set(participant.runtime.process_groups.by_id) == {group_id}
    link.close()
    asks(participant, hub)


def _threads(name: str) -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == name}


# ---------------------------------------------------------------------------------------------- to a controller


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """A controller of actors 5, 6, 7 in one group and 7, 8 in another, with plans under way in both.

    Attributes:
        controller: The controller.
        peers: By the number of the actor.
        flights: What is under way.
    """

    controller: Controller
    peers: dict[int, ParticipantLink]
    trackers: tuple[PlanTracker, ...]


@pytest.fixture
def scene(controller: Controller) -> Scene:
    left, right = group("left", (5, 6, 7)), group("right", (8, 7))
    links = lease(controller, left, right)
    for item in (left, right):
        controller.groups.coordinators.open(item)
        for member in item.members:
            links[member.actor].group_ids.add(item.spec.group_id)
    plans = [
        flying(asked(left, (0, 1, 2))),
        flying(asked(left, (0, 1, 2)), asked(right, (4, 3))),
        flying(asked(right, (4, 3))),
    ]
    trackers = [registered_anew(controller, item) for item in plans]
    peers = {number: links[f"Worker({number})"] for number in (5, 6, 7, 8)}
    return Scene(controller=controller, peers=peers, trackers=tuple(trackers))


def hear(peer: ParticipantLink, said: Message) -> bool:
    """Gives a peer a message as its link does: whatever goes wrong ends the link, and False is returned."""
    try:
        peer.received(typing.cast(Any, peer.link), decode(encode(said)))
    except Exception as exc:
        end(peer, repr(exc))
        return False
    return True


def end(peer: ParticipantLink, why: str) -> None:
    peer.closed(typing.cast(Any, peer.link), ConnectionLostError(detail=why))


TO_CONTROLLER = (
    *("Arrive", "Done", "Waiting", "Joined", "Publish", "Meet", "Stuck", "Drop", "Gone", "Ran", "Behind", "Keeps"),
    *("Surveyed", "Ticked", "Collected", "Measured"),
)


@pytest.mark.parametrize("seed", range(60))
def test_a_controller_outlives_any_participant(scene: Scene, seed: int) -> None:
    rng = random.Random(seed)
    hostile = scene.peers[rng.choice((5, 6, 7, 8))]
    survey = hostile.ask(Survey)
    alive = True
    for _ in range(MESSAGES_SAID):
        name = rng.choice((*TO_CONTROLLER, *TO_CONTROLLER, *sorted(MESSAGES)))
        alive = alive and hear(hostile, plausible(rng, MESSAGES[name]))
    if alive:
        end(hostile, "it left")
    assert survey.done()
    _serves_the_others(scene, hostile)


def _serves_the_others(scene: Scene, hostile: ParticipantLink) -> None:
    """Who has said nothing wrong goes on, and every plan has an outcome: also those of a participant that is gone."""
    others = {peer.info["actor_id"]: peer for peer in scene.peers.values() if peer is not hostile}
    for tracker in scene.trackers:
        for at, participant in enumerate(tracker.plan.participants):
            if participant in others and tracker.is_pending(at):
                assert hear(others[participant], Done(seq=tracker.seq, ranks=[], error=None, story=[]))
        assert tracker.resolved
        assert tracker.has_ended
        str(tracker.error)
    assert list(scene.controller.plans.trackers()) == []
