"""Leases without Ray and without a connection: what tests of a participant's side give them, and hear of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import pytest

from raycollect import backends
from raycollect.backends.capabilities import Capabilities
from raycollect.channel.messages import Join, Message, Welcome
from raycollect.core.model import GroupSpec
from raycollect.core.protocols import Joining
from raycollect.member.lease import Lease
from raycollect.member.participant import Participant
from raycollect.planner import Ticket, encode_order, encode_program
from tests.pure.driver.tracked_plans import asked, flying, group, key_of
from tests.pure.participants import participant
from tests.support.values import named_member

WAIT_S = 10.0
BACKEND = "scripted"

_Message = TypeVar("_Message", bound=Message)


class Heard:
    """A controller's link: all messages, and those that a test waits for."""

    peer = "the controller"

    def __init__(self, controller: str = "me", **more: Any) -> None:
        self.hello = {"controller": controller, "description": "a test", **more}
        self.messages: list[Message] = []
        self._received: SimpleQueue[Message] = SimpleQueue()

    def send(self, message: Message) -> None:
        self.messages.append(message)
        self._received.put(message)

    def next(self, kind: type[_Message]) -> _Message:
        """The next message of a kind; the others are dropped."""
        while not isinstance(message := self._received.get(timeout=WAIT_S), kind):
            pass
        return message


def join(**changes: Any) -> Join:
    members = [named_member(f"W{rank}", rank) for rank in range(2)]
    fields: dict[str, Any] = {"rank": 0, "members": members, "replaces": ""}
    spec = {name: value for name, value in changes.items() if name not in fields}
    group = GroupSpec(**{"name": "g", "group_id": "id of g", "backend": BACKEND, "world_size": 2, **spec})
    return Join(request=1, group=group, **{name: changes.get(name, value) for name, value in fields.items()})


def leased(premises: Participant, controller: str = "me", **hello: Any) -> tuple[Lease, Heard]:
    heard = Heard(controller, **hello)
    premises.opened(cast(Any, heard))
    heard.next(Welcome)
    heard.messages.clear()
    return premises.leased(), heard


class Backend:
    """What makes the communicators of groups that are joined by `join`."""

    def __init__(self) -> None:
        self.create: Callable[[Joining], Any] = lambda joining: SimpleNamespace(close=lambda: None)


@pytest.fixture
def backend() -> Iterator[Backend]:
    backend = Backend()

    def create(joining: Joining) -> Any:
        return backend.create(joining)

    backends.register(Capabilities(name=BACKEND, factory=create, interruptible=True, bitwise=True, cross_host=True))
    yield backend
    del backends.BACKENDS[BACKEND]


@pytest.fixture
def premises(backend: Backend) -> Iterator[Participant]:
    """Who is leased."""
    leased = participant()
    yield leased
    leased.close()


def plan(ticket: Ticket) -> bytes:
    spec = group("g", (5, 6))
    program = flying(asked(spec, (0, 1))).plan.program(0)
    return encode_order(ticket, [key_of(at) for at in range(program.keys)], encode_program(program))
