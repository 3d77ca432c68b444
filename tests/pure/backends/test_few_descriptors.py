"""Processes that may open few files: what needs more says so and lives, and what is out of reach is not lost."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from raycollect.backends.tcp import communicator as tcp
from raycollect.backends.tcp.join import join
from raycollect.channel import Server
from raycollect.core import sockets
from raycollect.core.model import Address, task_key
from raycollect.core.protocols import Joining
from raycollect.errors import (
    CollectiveTimeoutError,
    TensorLostError,
)
from raycollect.pos import Store
from raycollect.pos import fetch as fetching
from tests.pure.backends.tcp_teams import NO_EXCHANGE, spec_of
from tests.pure.communicators import MemoryRendezvous
from tests.pure.fleet import contain

KEY = task_key(bytes(24), 1)


# ------------------------------------------------------------------------------- groups


class Full(socket.socket):
    """Listens, and has no room for whoever calls: so many times."""

    times = 0
    attempts = 0

    def accept(self) -> tuple[socket.socket, Any]:
        Full.attempts += 1
        if Full.attempts > Full.times:
            return super().accept()
        raise OSError(errno.EMFILE, "Too many open files")


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> type[Full]:
    """All who listen are full."""
    listen = sockets.listen
    monkeypatch.setattr(sockets, "listen", lambda host: Full(fileno=listen(host).detach()))
    monkeypatch.setattr(sockets, "listen_locally", lambda: None)
    monkeypatch.setattr(Full, "attempts", 0)
    return Full


def test_who_has_no_room_for_a_member_takes_it_later(full: type[Full], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Full, "times", 2)
    rendezvous = MemoryRendezvous()
    with ThreadPoolExecutor(2) as threads:
        joins = [threads.submit(tcp.create, Joining(spec_of(2), rank, rendezvous, NO_EXCHANGE)) for rank in range(2)]
    for pending in joins:
        pending.result().close()
    assert full.attempts == 3


def test_who_has_no_room_says_so_and_does_not_spin(full: type[Full], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Full, "times", 1 << 30)
    rendezvous = MemoryRendezvous()
    with ThreadPoolExecutor(2) as threads:
        joins = [threads.submit(join, spec_of(2), rank, rendezvous, "127.0.0.1", 0.4) for rank in range(2)]
    late = joins[0].exception()
    assert isinstance(late, CollectiveTimeoutError)
    assert late.missing == (1,)
    assert "no connection can be accepted for now: [Errno 24] Too many open files" in late.detail
    assert 1 <= full.attempts <= 4


# ------------------------------------------------------------------------------- values


class Holder:
    """Serves a store, as a participant does."""

    def __init__(self) -> None:
        self.store = Store()
        self.server = Server("127.0.0.1", bytes(range(32)), self)

    def opened(self, link: Any) -> None:
        """No controller comes."""

    def received(self, link: Any, message: Any) -> None:
        """No controller comes."""

    def closed(self, link: Any, reason: Any) -> None:
        """No controller comes."""

    def serve_data(self, link: Any) -> None:
        fetching.serve(link, self.store)


@pytest.fixture
def holder() -> Iterator[Holder]:
    started = Holder()
    started.store.put(KEY, contain(np.arange(3.0)))
    yield started
    fetching.close_idle()
    started.server.close()


def get(address: Address, timeout_s: float) -> Any:
    return fetching.fetch(address, KEY, actor="Worker(3f2a91)", timeout_s=timeout_s)


def refusing(monkeypatch: pytest.MonkeyPatch, times: int, number: int) -> list[int]:
    """Has so many connections fail; gives what counts them."""
    original, attempts = socket.socket.connect, [0]

    def connect(sock: socket.socket, place: Any) -> None:
        attempts[0] += 1
        if attempts[0] <= times:
            raise OSError(number, os.strerror(number))
        original(sock, place)

    monkeypatch.setattr(socket.socket, "connect", connect)
    return attempts


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EHOSTUNREACH])
def test_who_can_not_connect_for_a_moment_asks_again(
    holder: Holder, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    attempts = refusing(monkeypatch, 2, number)
    np.testing.assert_array_equal(get(holder.server.address, 20), np.arange(3.0))
    assert attempts == [3]


def test_where_nobody_listens_any_more_the_value_is_lost(holder: Holder) -> None:
    np.testing.assert_array_equal(get(holder.server.address, 20), np.arange(3.0))
    holder.server.close()
    with pytest.raises(TensorLostError, match="Connection refused"):
        get(holder.server.address, 20)
