"""How ranks of `tcp` come together: who may join, who is named, where they listen, and what a closed one gives back."""

from __future__ import annotations

import contextlib
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from raycollect.backends.tcp import communicator as tcp
from raycollect.backends.tcp.join import _ADDRESSES, _Arrivals, _ListenAddress, join
from raycollect.channel import Server
from raycollect.channel.protocol import Connection
from raycollect.channel.stream import open_stream
from raycollect.core import sockets
from raycollect.core.model import Address, Launch
from raycollect.core.protocols import Joining
from raycollect.errors import BackendUnavailableError, ChannelError, CollectiveTimeoutError
from tests.pure.backends.tcp_teams import NO_EXCHANGE, join_all, spec_of
from tests.pure.communicators import MemoryRendezvous, ThreadTeam
from tests.pure.conformance import run_launch
from tests.pure.watched import warnings_in


def test_a_listener_without_the_key_is_no_member() -> None:
    """Somebody who has taken a member's place in the rendezvous, and answers whatever is asked."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            try:
                while True:
                    caller, _ = server.accept()
                    with caller:
                        caller.sendall(Connection("server", b"o" * 32, nonce=b"n" * 16).start())
                        assert caller.recv(4096)  # the proof of a member, which opens nothing here
                        caller.sendall(b"\0\0\0\x20" + b"x" * 32)
                        assert caller.recv(4096) == b""  # nothing more is said to it
            except OSError:
                return  # the test is over

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        rendezvous = MemoryRendezvous()
        rendezvous.put(
            "tcp.at.0", _ADDRESSES.encode(_ListenAddress("127.0.0.1", server.getsockname()[1], "", b"k" * 32))
        )
        with pytest.raises(CollectiveTimeoutError) as caught:
            join(spec_of(2), 1, rendezvous, "127.0.0.1", 0.5)
        assert caught.value.missing == (0,)
        server.shutdown(socket.SHUT_RDWR)
        thread.join(5)
        assert not thread.is_alive()


def test_a_rank_of_this_host_that_does_not_answer_is_not_called_twice_within_the_limit() -> None:
    """It is stopped, say: the kernel accepts connections for it, and nobody reads them."""
    listening = sockets.listen_locally()
    assert listening is not None
    local, name = listening
    with local, socket.create_server(("127.0.0.1", 0)) as server:
        rendezvous = MemoryRendezvous()
        rendezvous.put(
            "tcp.at.0", _ADDRESSES.encode(_ListenAddress("127.0.0.1", server.getsockname()[1], name, b"k" * 32))
        )
        with pytest.raises(CollectiveTimeoutError) as caught:
            join(spec_of(2), 1, rendezvous, "127.0.0.1", 0.2)
        assert caught.value.missing == (0,)
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()


def test_it_listens_on_its_host_alone_and_only_while_it_joins() -> None:
    rendezvous = MemoryRendezvous()
    tried: list[str] = []

    class Watched(MemoryRendezvous):
        def put(self, name: str, value: bytes) -> None:
            if name == "tcp.at.0":
                host, port, *_ = _ADDRESSES.decode(value)
                with pytest.raises(ConnectionRefusedError):
                    socket.create_connection(("127.0.0.1", port))
                socket.create_connection((host, port)).close()
                tried.append(host)
            super().put(name, value)

    rendezvous = Watched()
    communicators = join_all(rendezvous, 2, "127.0.0.2")
    assert tried == ["127.0.0.2"]
    host, port, *_ = _ADDRESSES.decode(rendezvous.get("tcp.at.0", 0))
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, port))
    for communicator in communicators:
        communicator.close()


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::", "203.0.113.7"])
def test_a_host_that_is_not_this_one_is_refused(host: str) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(BackendUnavailableError, match="can't listen"):
        tcp.create(Joining(spec_of(2), 0, MemoryRendezvous(), NO_EXCHANGE, host=host))
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_the_connections_find_out_about_dead_hosts() -> None:
    communicators = join_all(MemoryRendezvous(), 2, "127.0.0.1", "127.0.0.2")
    for communicator in communicators:
        for peer in communicator._tcp_mesh._peers.values():
            assert peer.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert peer.sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert peer.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 120_000
            assert not peer.sock.getblocking()
        communicator.close()


def test_ranks_of_one_host_are_connected_within_it_and_others_by_the_network() -> None:
    communicators = join_all(MemoryRendezvous(), 4, "127.0.0.1", "127.0.0.2")
    for communicator in communicators:
        assert {rank for rank, peer in communicator._tcp_mesh._peers.items() if sockets.is_local(peer.sock)} == {
            (communicator.rank + 2) % 4
        }
    launch = Launch(seq=1, ranks=(0, 1, 2, 3), timeout_s=10)
    with ThreadPoolExecutor(4) as threads:
        for arrivals in threads.map(
            lambda communicator: run_launch(communicator, launch, arrival=bytes([communicator.rank])), communicators
        ):
            assert arrivals == [b"\0", b"\1", b"\2", b"\3"]
    for communicator in communicators:
        communicator.close()


@pytest.mark.parametrize("there", [False, True])
def test_where_no_name_of_this_machine_can_be_used_the_network_is(monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
    """There is none, or it is that of another network namespace."""
    listen = sockets.listen_locally

    def elsewhere() -> tuple[socket.socket, str] | None:
        listener = listen() if there else None
        return None if listener is None else (listener[0], f"{listener[1]} of another namespace")

    monkeypatch.setattr(sockets, "listen_locally", elsewhere)
    communicators = join_all(MemoryRendezvous(), 3)
    assert not any(
        sockets.is_local(peer.sock) for communicator in communicators for peer in communicator._tcp_mesh._peers.values()
    )
    for communicator in communicators:
        communicator.close()


def test_a_closed_communicator_gives_everything_back() -> None:
    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before = descriptors()
    team = ThreadTeam("tcp", 3)
    assert descriptors() == before + 3 * (2 + 2)  # two connections each, and the pair that wakes
    team.close()
    assert descriptors() == before
    for communicator in team.communicators:
        communicator.abort(1)  # nobody is there any more
        communicator.close()


# ------------------------------------------------------------------------------- who does not belong there


@pytest.mark.parametrize(
    ("purpose", "secret", "hello"),
    [
        ("mesh", bytes(32), {"rank": 1}),
        ("mesh", None, {"rank": 0}),
        ("mesh", None, {"rank": 2}),
        ("mesh", None, {"rank": "1"}),
        ("mesh", None, {}),
        ("control", None, {"rank": 1}),
        ("data", None, {}),
    ],
)
def test_only_a_member_that_is_awaited_is_taken(purpose: str, secret: bytes | None, hello: dict[str, Any]) -> None:
    """Who has another key, another rank, or comes for something else."""

    class Watched(MemoryRendezvous):
        def put(self, name: str, value: bytes) -> None:
            if name == "tcp.at.0":
                host, port, _, key = _ADDRESSES.decode(value)
                address = Address(host=host, port=port, secret=key if secret is None else secret)
                with pytest.raises(ChannelError):
                    stranger = open_stream(address, purpose, hello, 5)
                    stranger.receive(5)
            super().put(name, value)

    communicators = join_all(Watched(), 2)
    assert [list(communicator._tcp_mesh._peers) for communicator in communicators] == [[1], [0]]
    launch = Launch(seq=1, ranks=(0, 1), timeout_s=10)
    with ThreadPoolExecutor(2) as threads:
        for arrivals in threads.map(
            lambda communicator: run_launch(communicator, launch, arrival=bytes([communicator.rank])), communicators
        ):
            assert arrivals == [b"\0", b"\1"]
    for communicator in communicators:
        communicator.close()


def test_a_rank_that_connects_again_is_known_by_its_newest_connection() -> None:
    arrivals, done = _Arrivals(0, 2), dict[int, socket.socket]()
    pairs = [socket.socketpair() for _ in range(2)]
    for _, end in pairs:
        arrivals.connected(end, {"rank": 1})
    arrivals.take(done)
    assert done == {1: pairs[1][1]}
    assert pairs[0][0].recv(1) == b"", "the older one is closed"
    sockets.close([sock for pair in pairs for sock in pair])


def test_what_follows_the_handshake_is_left_for_the_mesh() -> None:
    """A listener may begin to send before the other end has read the last word of the handshake."""
    taken: list[socket.socket] = []

    class Handler:
        def connected(self, sock: socket.socket, hello: dict[str, Any]) -> None:
            sock.sendall(b"the first frame")
            taken.append(sock)

    server = Server("127.0.0.1", bytes(32), Handler())
    stream = open_stream(server.address, "mesh", {"rank": 1}, 5)
    assert stream.take_events() == []
    assert stream.sock.recv(100, socket.MSG_WAITALL | socket.MSG_PEEK) == b"the first frame"
    server.close()
    sockets.close([stream.sock, *taken])


class Crowd(MemoryRendezvous):
    """A rendezvous that strangers read too: so many come to each rank before a member can, and stay."""

    def __init__(self, count: int, words: bytes) -> None:
        super().__init__()
        self.strangers: list[socket.socket] = []
        self._count, self._words = count, words

    def put(self, name: str, value: bytes) -> None:
        for _ in range(self._count):
            stranger = socket.create_connection(_ADDRESSES.decode(value)[:2])
            with contextlib.suppress(OSError):
                stranger.sendall(self._words)
            self.strangers.append(stranger)
        super().put(name, value)


@pytest.mark.parametrize(
    "words", [b"", b"\0\0", b"\0\0\0\x99" + bytes(0x99), b"\xff" * 100_000], ids=["none", "half", "wrong", "too much"]
)
def test_hundreds_of_strangers_only_delay_a_join(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, words: bytes
) -> None:
    """Many more come than are listened to at once. Members come to the port, too, as those of other hosts do."""
    monkeypatch.setattr(sockets, "listen_locally", lambda: None)
    crowd = Crowd(120, words)
    communicators = join_all(crowd, 3)
    for communicator in communicators:
        assert sorted(communicator._tcp_mesh._peers) == sorted({0, 1, 2} - {communicator.rank})
        communicator.close()
    lines = warnings_in(caplog)
    assert lines
    assert len(lines) <= 2 * 3, "one on the first stranger, and one on all others"
    sockets.close(crowd.strangers)
