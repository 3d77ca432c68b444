"""Servers, a hub and handlers on real sockets, of which nothing may be left when a test ends."""

from __future__ import annotations

import gc
import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from raycollect.channel import ControlLink, DataLink, Hub, Server
from raycollect.channel.messages import Failed, Fetch, Fetched, Free, Freed, Message
from raycollect.core.model import Address
from raycollect.errors import ChannelError

SECRET = b"s" * 32
LIMIT_S = 10.0
HOST = "127.0.0.1"


class Party:
    """A handler that puts what it is told into queues, and may answer."""

    def __init__(self, answer: Callable[[ControlLink, Message], None] | None = None) -> None:
        self.links: queue.Queue[ControlLink] = queue.Queue()
        self.messages: queue.Queue[Message] = queue.Queue()
        self.reasons: queue.Queue[ChannelError] = queue.Queue()
        self.answer = answer
        self.value = memoryview(b"")
        self.release = threading.Event()

    def opened(self, link: ControlLink) -> None:
        self.links.put(link)

    def received(self, link: ControlLink, message: Message) -> None:
        self.messages.put(message)
        if self.answer is not None:
            self.answer(link, message)

    def closed(self, link: ControlLink, reason: ChannelError) -> None:
        self.reasons.put(reason)

    def serve_data(self, link: DataLink) -> None:
        while (request := link.receive()) is not None:
            if isinstance(request, Fetch):
                if request.key == b"boom":
                    raise RuntimeError("boom")
                half = len(self.value) // 2
                link.send(Fetched(description=b"n2"), [self.value[:half], self.value[half:]])
            elif isinstance(request, Free):
                link.send(Freed(count=len(request.keys)))
            else:
                link.send(Failed(error={}))


def echo(link: ControlLink, message: Message) -> None:
    link.send(message)


class Rig:
    """Servers and a hub that are closed when the test ends, after which no thread and no descriptor may be left."""

    def __init__(self) -> None:
        self.hub = Hub()
        self.servers: list[Server] = []

    def serve(self, party: Party) -> Address:
        self.servers.append(Server(HOST, SECRET, party))
        return self.servers[-1].address

    def connect(self, address: Address, party: Party, hello: dict[str, Any] | None = None) -> ControlLink:
        return self.hub.connect(address, hello or {}, party, LIMIT_S)

    def close(self) -> None:
        self.hub.close()
        for each in self.servers:
            each.close()


def _leftovers() -> tuple[int, Counter[str]]:
    threads = Counter(thread.name for thread in threading.enumerate() if thread.name.startswith("raycollect"))
    return sum(1 for _ in Path("/proc/self/fd").iterdir()), threads


@pytest.fixture
def rig() -> Iterator[Rig]:
    gc.collect()
    descriptors, threads = _leftovers()
    rig = Rig()
    yield rig
    rig.close()
    gc.collect()
    now = _leftovers()
    assert now[0] <= descriptors  # those of other tests may go meanwhile
    assert not now[1] - threads
