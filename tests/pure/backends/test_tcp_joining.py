"""How ranks of `tcp` come together: who may join, who is named, where they listen, and what a closed one gives back."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from raycollect.backends.tcp import communicator as tcp
from raycollect.backends.tcp import join as _tcp_join
from raycollect.backends.tcp.join import _ADDRESSES, _Address
from raycollect.core import sockets
from raycollect.core.model import Kernel, Launch, OpKind, ReduceOp
from raycollect.errors import BackendUnavailableError, CollectiveTimeoutError, GroupBrokenError
from tests.pure.backends.tcp_teams import NO_EXCHANGE, join_all, spec_of
from tests.pure.communicators import MemoryRendezvous, ThreadTeam
from tests.pure.conformance import run_launch


class Visited(MemoryRendezvous):
    """A rendezvous that strangers read too: each says something to whoever listens, before a member can."""

    def __init__(self, *said: bytes) -> None:
        super().__init__()
        self.strangers: list[socket.socket] = []
        self._said = said

    def put(self, name: str, value: bytes) -> None:
        if name.startswith("tcp.at."):
            for words in self._said:
                stranger = socket.create_connection(_ADDRESSES.decode(value)[:2])
                stranger.sendall(words)
                self.strangers.append(stranger)
        super().put(name, value)


def hello(rank: int, peer: int) -> bytes:
    return _tcp_join._HELLO.pack(b"rcT3", rank, peer, b"n" * 32)


STRANGERS = {
    "silent": b"",
    "half a hello": hello(2, 0)[:-1],
    "garbage": b"GET / HTTP/1.1\r\nHost: here\r\nAccept: everything\r\n\r\n",
    "not a member": hello(7, 0) + b"x" * 32,
    "without the key": hello(2, 0) + b"x" * 32,
    "for another rank": hello(2, 5) + b"x" * 32,
}


@pytest.mark.parametrize("who", STRANGERS)
def test_strangers_neither_join_nor_hold_up_the_members(who: str) -> None:
    rendezvous = Visited(*(STRANGERS[who],) * 3)
    made = join_all(rendezvous, 3)
    assert len(rendezvous.strangers) == 9
    launch = Launch(seq=1, ranks=(0, 1, 2), timeout_s=10)
    with ThreadPoolExecutor(3) as threads:
        for arrivals in threads.map(lambda one: run_launch(one, launch, arrival=bytes([one.rank])), made):
            assert arrivals == [b"\0", b"\1", b"\2"]
    for stranger in rendezvous.strangers:  # dropped, at the latest when all have come
        stranger.settimeout(5)
        try:
            while stranger.recv(4096):
                pass
        except ConnectionResetError:
            pass
        stranger.close()
    for communicator in made:
        communicator.close()


def test_more_strangers_than_are_listened_to_only_delay_a_join(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_tcp_join, "MAX_STRANGERS", 1)
    monkeypatch.setattr(_tcp_join, "HELLO_TIMEOUT_S", 0.1)
    rendezvous = Visited(*(b"",) * 8)
    for communicator in join_all(rendezvous, 2):
        communicator.close()
    for stranger in rendezvous.strangers:
        stranger.close()


def test_a_listener_without_the_key_is_no_member(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody who has taken a member's place in the rendezvous, and answers whatever is asked."""
    monkeypatch.setattr(tcp, "JOIN_TIMEOUT_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            try:
                while True:
                    caller, _ = server.accept()
                    with caller:
                        caller.recv(4096)
                        caller.sendall(b"x" * 64)
                        assert caller.recv(4096) == b""  # nothing more is said to it
            except OSError:
                return  # the test is over

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        rendezvous = MemoryRendezvous()
        rendezvous.put("tcp.at.0", _ADDRESSES.encode(_Address("127.0.0.1", server.getsockname()[1], "")))
        rendezvous.put("tcp.key", b"k" * 32)
        with pytest.raises(CollectiveTimeoutError) as caught:
            tcp.create(spec_of(2), 1, rendezvous, NO_EXCHANGE)
        assert caught.value.missing == (0,)
        server.shutdown(socket.SHUT_RDWR)
        thread.join(5)
        assert not thread.is_alive()


@pytest.mark.parametrize("present", [0, 1, 2])
def test_members_that_never_come_are_named(monkeypatch: pytest.MonkeyPatch, present: int) -> None:
    monkeypatch.setattr(tcp, "JOIN_TIMEOUT_S", 0.2)
    with pytest.raises(CollectiveTimeoutError) as caught:
        tcp.create(spec_of(3), present, MemoryRendezvous(), NO_EXCHANGE)
    assert caught.value.op == "join"
    assert set(caught.value.missing) <= {0, 1, 2} - {present}
    assert caught.value.missing == tuple(range(present)) or present == 0
    assert caught.value.missing


def test_it_listens_on_its_host_alone_and_only_while_it_joins() -> None:
    rendezvous = MemoryRendezvous()
    tried: list[str] = []

    class Watched(MemoryRendezvous):
        def put(self, name: str, value: bytes) -> None:
            if name == "tcp.at.0":
                host, port, _ = _ADDRESSES.decode(value)
                with pytest.raises(ConnectionRefusedError):
                    socket.create_connection(("127.0.0.1", port))
                socket.create_connection((host, port)).close()
                tried.append(host)
            super().put(name, value)

    rendezvous = Watched()
    made = join_all(rendezvous, 2, "127.0.0.2")
    assert tried == ["127.0.0.2"]
    for rank in (0, 1):
        host, port, _ = _ADDRESSES.decode(rendezvous.get(f"tcp.at.{rank}", 0))
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, port))
    for communicator in made:
        communicator.close()


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::", "203.0.113.7"])
def test_a_host_that_is_not_this_one_is_refused(host: str) -> None:
    with pytest.raises(BackendUnavailableError, match="can't listen"):
        tcp.create(spec_of(2), 0, MemoryRendezvous(), NO_EXCHANGE, host=host)


def test_the_connections_find_out_about_dead_hosts() -> None:
    made = join_all(MemoryRendezvous(), 2, "127.0.0.1", "127.0.0.2")
    for communicator in made:
        for peer in communicator._link._peers.values():
            assert peer.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert peer.sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert peer.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 120_000
            assert not peer.sock.getblocking()
        communicator.close()


def test_ranks_of_one_host_are_connected_within_it_and_others_by_the_network() -> None:
    made = join_all(MemoryRendezvous(), 4, "127.0.0.1", "127.0.0.2")
    for one in made:
        assert {rank for rank, peer in one._link._peers.items() if sockets.is_local(peer.sock)} == {(one.rank + 2) % 4}
    launch = Launch(seq=1, ranks=(0, 1, 2, 3), timeout_s=10)
    with ThreadPoolExecutor(4) as threads:
        for arrivals in threads.map(lambda one: run_launch(one, launch, arrival=bytes([one.rank])), made):
            assert arrivals == [b"\0", b"\1", b"\2", b"\3"]
    for communicator in made:
        communicator.close()


@pytest.mark.parametrize("there", [False, True])
def test_where_no_name_of_this_machine_can_be_used_the_network_is(monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
    """There is none, or it is that of another network namespace."""
    listen = sockets.listen_locally

    def elsewhere() -> tuple[socket.socket, str] | None:
        made = listen() if there else None
        return None if made is None else (made[0], f"{made[1]} of another namespace")

    monkeypatch.setattr(sockets, "listen_locally", elsewhere)
    made = join_all(MemoryRendezvous(), 3)
    assert not any(sockets.is_local(peer.sock) for one in made for peer in one._link._peers.values())
    for communicator in made:
        communicator.close()


def test_a_closed_communicator_gives_everything_back() -> None:
    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before = descriptors()
    made = ThreadTeam("tcp", 3)
    assert descriptors() == before + 3 * (2 + 2)  # two connections each, and the pair that wakes
    made.close()
    assert descriptors() == before
    for communicator in made.communicators:
        communicator.abort(1)  # nobody is there any more
        communicator.close()


def test_one_rank_needs_no_socket() -> None:
    made = tcp.create(spec_of(1), 0, MemoryRendezvous(), NO_EXCHANGE, host="no such host")
    array = np.ones(3)
    launch = Launch(seq=1, ranks=(0,), timeout_s=1)
    kernel = Kernel(kind=OpKind.ALLREDUCE, src=array, dst=array, op=ReduceOp.SUM)
    assert run_launch(made, launch, kernel, Kernel(kind=OpKind.BARRIER), arrival=b"me") == [b"me"]
    made.close()
    with pytest.raises(GroupBrokenError):
        made.agree(launch, b"")
