"""Those who have no business at the port where a `tcp` group forms: it forms all the same, and the log stays short."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest

from raycollect.backends.tcp import communicator as tcp
from raycollect.backends.tcp import join as _tcp_join
from raycollect.backends.tcp.join import _ADDRESSES, MAX_STRANGERS, Shake, _Joining, _Protocol
from raycollect.core import sockets
from raycollect.core.model import GroupSpec, Launch
from tests.pure.backends.tcp_teams import join_all
from tests.pure.communicators import MemoryRendezvous
from tests.pure.conformance import run_launch
from tests.pure.watched import warnings_in

KEY, OTHER_KEY = b"k" * 32, b"o" * 32


def spec_of(group_id: str = "1", world_size: int = 3) -> GroupSpec:
    return GroupSpec(name="g", group_id=group_id, backend="tcp", world_size=world_size)


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
    return _Protocol(key, spec_of(group_id), rank)


def test_members_of_one_group_shake_hands() -> None:
    for rank in (1, 2):
        assert len(converse(hands(rank=rank).connector(0), hands().listener(frozenset({1, 2})))) == 4


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
    """Each would be given longer than the join, and many more come than are listened to at once."""
    monkeypatch.setattr(_tcp_join, "_GRACE_S", 0.02)
    monkeypatch.setattr(_tcp_join, "HELLO_TIMEOUT_S", 2 * tcp.JOIN_TIMEOUT_S)
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


def test_a_join_without_strangers_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    for communicator in join_all(MemoryRendezvous(), 4):
        communicator.close()
    assert warnings_in(caplog) == []


def test_members_that_had_to_make_room_call_again(monkeypatch: pytest.MonkeyPatch, most: list[int]) -> None:
    """So little time is given that members, too, are dropped among the strangers."""
    monkeypatch.setattr(_tcp_join, "_GRACE_S", 0.0)
    monkeypatch.setattr(_tcp_join, "MAX_STRANGERS", 1)
    for seed in range(5):
        crowd = Crowd(20 + seed, b"")
        made = join_all(crowd, 4)
        for communicator in made:
            assert len(communicator._link._peers) == 3
            communicator.close()
        crowd.leave()
    assert max(most) <= 1 + 4
