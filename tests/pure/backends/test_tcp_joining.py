"""How ranks of `tcp` come together: who may join, who is named, where they listen, and what a closed one gives back."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from raycollect.backends.tcp import communicator as tcp
from raycollect.backends.tcp import join as _tcp_join
from raycollect.backends.tcp.join import _ADDRESSES, MAX_STRANGERS, Shake, _Address, _Joining, _Protocol
from raycollect.core import sockets
from raycollect.core.model import Launch
from raycollect.errors import BackendUnavailableError, CollectiveTimeoutError
from tests.pure.backends.tcp_teams import NO_EXCHANGE, join_all, spec_of
from tests.pure.communicators import MemoryRendezvous, ThreadTeam
from tests.pure.conformance import run_launch
from tests.pure.watched import warnings_in
from tests.support.values import replace


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


# ------------------------------------------------------------------------------- who does not belong there

KEY, OTHER_KEY = b"k" * 32, b"o" * 32


# ------------------------------------------------------------------------------- what is said


def step(end: Shake, got: bytes | None) -> bytes:
    """Gives one end what it waits for; gives what it says."""
    return (next(end) if got is None else end.send(got))[0]


def converse(connector: Shake, listener: Shake) -> list[bytes]:
    """A whole handshake; gives what was said, from one end and the other in turn."""
    assert step(listener, None) == b""
    hello = step(connector, None)
    answer = step(listener, hello)
    proof = step(connector, answer)
    done = step(listener, proof)
    for end, got in ((connector, done), (listener, None)):
        with pytest.raises(StopIteration):
            step(end, got)
    return [hello, answer, proof, done]


def hands(key: bytes = KEY, group_id: str = "1", rank: int = 0) -> _Protocol:
    return _Protocol(key, replace(spec_of(3), group_id=group_id), rank)


@pytest.mark.parametrize(
    "stranger",
    [hands(OTHER_KEY, rank=1), hands(group_id="2", rank=1), hands(OTHER_KEY, "2", 1)],
    ids=["another key", "another group", "both"],
)
def test_who_has_another_groups_key_hears_nothing_that_helps(stranger: _Protocol) -> None:
    connector, listener = stranger.connector(0), hands().listener(frozenset({1, 2}))
    step(listener, None)
    answer = step(listener, step(connector, None))
    with pytest.raises(ValueError, match="the listener does not have"):
        connector.send(answer)
    for tag in (answer[32:], stranger._tag("connector", (1, 0, bytes(64))), bytes(32)):
        again, mine = hands().listener(frozenset({1, 2})), stranger.connector(0)
        step(again, None)
        step(again, step(mine, None))
        with pytest.raises(ValueError, match="the connector does not have"):
            again.send(tag)


def test_what_was_overheard_opens_nothing_a_second_time() -> None:
    hello, answer, proof, _ = converse(hands(rank=1).connector(0), hands().listener(frozenset({1, 2})))
    listener = hands().listener(frozenset({1, 2}))
    step(listener, None)
    step(listener, hello)
    with pytest.raises(ValueError, match="the connector does not have"):
        listener.send(proof)
    connector = hands(rank=1).connector(0)
    step(connector, None)
    with pytest.raises(ValueError, match="the listener does not have"):
        connector.send(answer)


def test_a_proof_for_one_pair_of_ranks_is_none_for_another() -> None:
    hello = step(hands(rank=1).connector(0), None)
    for end, expected in ((hands(rank=2), {1}), (hands(rank=0), {2})):
        listener = end.listener(frozenset(expected))
        step(listener, None)
        with pytest.raises(ValueError, match="a stranger"):
            listener.send(hello)


# ------------------------------------------------------------------------------- at the port


class Crowd(MemoryRendezvous):
    """A rendezvous that strangers read too: so many come to each rank before a member can, and stay."""

    def __init__(self, count: int, words: bytes) -> None:
        super().__init__()
        self.strangers: list[socket.socket] = []
        self._count, self._words = count, words

    def put(self, name: str, value: bytes) -> None:
        if name.startswith("tcp.at."):
            for _ in range(self._count):
                stranger = socket.create_connection(_ADDRESSES.decode(value)[:2])
                with contextlib.suppress(OSError):
                    stranger.sendall(self._words)
                self.strangers.append(stranger)
        super().put(name, value)

    def leave(self) -> None:
        for stranger in self.strangers:
            stranger.close()


@pytest.fixture
def most(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many connections each call left a rank with. Members come to the port, too, as those of other hosts do."""
    monkeypatch.setattr(sockets, "listen_locally", lambda: None)
    seen: list[int] = []
    answer = _Joining._accept

    def counted(joining: _Joining, listener: socket.socket) -> None:
        answer(joining, listener)
        seen.append(len(joining._handshakes))

    monkeypatch.setattr(_Joining, "_accept", counted)
    return seen


WORDS = {
    "say nothing": b"",
    "say half": step(hands(OTHER_KEY, rank=2).connector(0), None)[:-1],
    "have another key": step(hands(OTHER_KEY, rank=2).connector(0), None),
    "say too much": b"\xff" * 100_000,
}


@pytest.mark.parametrize("who", WORDS)
def test_hundreds_of_strangers_only_delay_a_join(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, most: list[int], who: str
) -> None:
    """Many more come than are listened to at once."""
    monkeypatch.setattr(_tcp_join, "HELLO_TIMEOUT_S", 0.1)
    crowd = Crowd(300, WORDS[who])
    made = join_all(crowd, 3)
    for communicator in made[1:]:
        assert sorted(communicator._link._peers) == sorted({0, 1, 2} - {communicator.rank})
    assert max(most) <= MAX_STRANGERS + 3
    first = [line for line in warnings_in(caplog) if "refused a connection from" in line]
    more = [line for line in warnings_in(caplog) if "more connections" in line]
    assert 1 <= len(first) <= 2  # ranks 0 and 1 are called; the last rank listens for nobody
    assert len(more) <= len(first)
    assert all(line.startswith("group 'g', rank ") for line in (*first, *more))
    assert len(warnings_in(caplog)) == len(first) + len(more)
    launch = Launch(seq=1, ranks=(0,), timeout_s=5)
    assert run_launch(made[0], launch, arrival=b"me") == [b"me"]
    for communicator in made:
        communicator.close()
    crowd.leave()
