"""What a hostile wire can do to the channel, at random: never another error, a hang, a forged message, or much memory.

Every case is made from a seed that the test's name or its message tells. Over sockets it is
`test_fuzz_sockets`; what the holder of the key may say is in `test_fuzz_peers`.
"""

from __future__ import annotations

import random
import tracemalloc
import typing
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgpack
import pytest

from raycollect.channel.messages import Bye, Fetched, Message, decode, encode
from raycollect.channel.protocol import MAX_FRAME_NBYTES, MAX_HANDSHAKE_NBYTES, Connection, Opened, Reply, State
from raycollect.errors import ChannelError, ConnectionLostError, ProtocolError
from tests.pure.channel.hostile_wire import changed, chunks, message
from tests.pure.channel.parties import SECRET
from tests.pure.channel.wire import Wire

SEEDS = range(6)
BLOB_NBYTES = 300


# ---------------------------------------------------------------------------------------------- without I/O


@dataclass(frozen=True, slots=True, kw_only=True)
class Station:
    """One end in one state, and what its peer says next.

    Attributes:
        end: The end.
        units: Frames, and blobs, as the peer sends them.
        meant: What each of them means.
        foreign: What was said elsewhere.
    """

    end: Connection
    units: tuple[bytes, ...]
    meant: tuple[tuple[Any, ...], ...]
    foreign: tuple[bytes, ...]


def _station(rng: random.Random, role: str, purpose: str, handshakes: int) -> Station:
    """An end with so many handshake frames of its peer's still to come, and a few messages after them."""
    wire, ahead, other = Wire(purpose=purpose), Wire(purpose=purpose), Wire(purpose=purpose, client_nonce=b"D" * 16)
    ahead.open()
    other.open()
    peer, itself, stranger = (
        (ahead.client, ahead.server, other.client) if role == "server" else (ahead.server, ahead.client, other.server)
    )
    hello = Opened(purpose, wire.client._hello)
    if role == "server":
        said = [(wire.proof, (hello,))]
        end = wire.server
    else:
        said = [(wire.challenge, ()), (ahead.confirmation, (hello,))]
        end = wire.client
        if handshakes == 2:
            end = Connection("client", SECRET, nonce=b"C" * 16, purpose=purpose, hello=wire.client._hello)
            end.start()
    past, said = said[: len(said) - handshakes], said[len(said) - handshakes :]
    for unit, _ in past[1:] if role == "client" else past:
        end.receive(unit)
    foreign = [b"", ahead.proof, ahead.challenge, ahead.confirmation, other.proof, other.confirmation]
    for _ in range(4):
        one = message(rng)
        foreign += [itself.send(one), stranger.send(one)]
        if purpose == "data" and rng.random() < 0.5:
            frame = peer.send(Fetched(found=b""), BLOB_NBYTES)
            said += [(frame, (Fetched(found=b"", blob_nbytes=BLOB_NBYTES),)), (rng.randbytes(BLOB_NBYTES), ())]
        else:
            said.append((peer.send(one), (one,)))
    return Station(
        end=end,
        units=tuple(unit for unit, _ in said),
        meant=tuple(tuple(events) for _, events in said),
        foreign=tuple(foreign),
    )


STATIONS = [
    *((role, purpose, 0) for role in ("server", "client") for purpose in ("control", "data")),
    ("server", "control", 1),
    ("server", "data", 1),
    ("client", "control", 1),
    ("client", "control", 2),
    ("client", "data", 2),
]


class Reader:
    """Gives an end what comes, as a socket's owner does, and notes what it meant; it skips blobs."""

    def __init__(self, end: Connection) -> None:
        self.end = end
        self.got: list[Any] = []
        self._due = 0

    def feed(self, piece: bytes) -> None:
        rest = memoryview(piece)
        if self._due:
            taken = min(self._due, len(rest))
            self._due -= taken
            rest = rest[taken:]
            if self._due:
                return
            self.end.blob_received()
        self._note(self.end.receive(rest))
        while self._due:
            buffered = len(self.end.take_buffered(self._due))
            self._due -= buffered
            if self._due:
                break
            self.end.blob_received()
            self._note(self.end.receive(b""))
        limit = MAX_FRAME_NBYTES if self.end.state in (State.OPEN, State.BLOB) else MAX_HANDSHAKE_NBYTES
        assert len(self.end._buffer) <= limit + len(piece) + 20

    def _note(self, events: Sequence[Any]) -> None:
        self.got += [one for one in events if not isinstance(one, Reply)]  # a challenge has no tag: it is proved later
        self._due = getattr(events[-1], "blob_nbytes", 0) if events else 0


def whole(genuine: Sequence[bytes], stream: bytes) -> int:
    """How many of the true units a stream begins with."""
    at = 0
    for count, unit in enumerate(genuine):
        if stream[at : at + len(unit)] != unit:
            return count
        at += len(unit)
    return len(genuine)


@pytest.mark.parametrize(("role", "purpose", "handshakes"), STATIONS)
@pytest.mark.parametrize("seed", SEEDS)
def test_what_was_changed_is_never_accepted(role: str, purpose: str, handshakes: int, seed: int) -> None:
    for case in range(40):
        rng = random.Random(f"{seed}/{case}")
        one = _station(rng, role, purpose, handshakes)
        stream = b"".join(changed(rng, one.units, one.foreign))
        most = whole(one.units, stream)
        if most < len(one.units) and len(one.units[most]) == BLOB_NBYTES and not one.meant[most]:
            most = len(one.units)  # a blob was changed: it carries no tag, and what follows it may be right
        reader = Reader(one.end)
        try:
            for piece in chunks(rng, stream + rng.randbytes(64)):
                reader.feed(piece)
            for _ in range(20):  # whatever it was told to wait for, it ends
                reader.feed(rng.randbytes(64 << 10))
        except ChannelError:
            pass
        assert one.end.state is State.CLOSED, (seed, case)
        assert not one.end._buffer
        genuine = [event for events in one.meant[:most] for event in events]
        assert reader.got == genuine[: len(reader.got)], (seed, case)
        with pytest.raises(ProtocolError):
            one.end.receive(b"")
        with pytest.raises(ConnectionLostError):
            one.end.send(Bye())


# ---------------------------------------------------------------------------------------------- payloads


def _nested(depth: int, *, key: bytes = b"") -> bytes:
    return (b"\x91" if not key else b"\x81" + key) * depth + b"\xc0"


def _hostile(rng: random.Random) -> bytes:
    """A payload, from one who can seal it."""
    base = bytearray(encode(message(rng)))
    kind = rng.randrange(8)
    if kind == 0:
        return rng.randbytes(rng.choice((0, 1, 10, 1000)))
    if kind == 1:
        for _ in range(rng.choice((1, 1, 3))):
            base[rng.randrange(len(base))] = rng.randrange(256)
        return bytes(base)
    if kind == 2:
        return bytes(base[: rng.randrange(len(base))])
    if kind == 3:  # a header that lies about what follows
        header = rng.choice((b"\xdd", b"\xdf", b"\xc6", b"\xdb", b"\xc9"))
        lie = header + rng.choice((2**32 - 1, 2**31, 65_537)).to_bytes(4, "big")
        return rng.choice((b"\x91", b"\x95\xa4Done", b"\x93\xa6Joined\x01", b"")) + lie + rng.randbytes(10)
    if kind == 4:
        depth = rng.choice((10, 400, 510, 512, 900, 1000, 1023, 1024, 5000, 100_000))
        return rng.choice((b"", b"\x91", b"\x95\xa4Done", b"\x93\xa6Joined\x81\xa1x")) + _nested(
            depth, key=rng.choice((b"", b"\xa1t"))
        )
    if kind == 5:
        return bytes(base) + rng.randbytes(rng.choice((1, 2, 50)))
    if kind == 6:  # the right fields, the wrong types
        cls = type(message(rng))
        names = cls.__struct_fields__
        odd = [None, True, -1, 2**64 - 1, 1.5, "x", b"x", [], [[]], {}, {"x": 1}, [None], "\0" * 1000]
        return typing.cast(bytes, msgpack.packb([cls.__name__, *(rng.choice(odd) for _ in names)]))
    keys: list[Any] = [1, b"t", "t", None, 1.5, True, "seq"]
    return typing.cast(bytes, msgpack.packb([{rng.choice(keys): rng.choice(keys)} for _ in range(3)]))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_sealed_payload_is_a_message_of_the_table_or_ends_the_connection(seed: int) -> None:
    for case in range(300):
        rng = random.Random(f"{seed}/{case}")
        payload = _hostile(rng)
        wire = Wire(purpose=rng.choice(("control", "data"))).open()
        peer, end = rng.choice(((wire.client, wire.server), (wire.server, wire.client)))
        frame = len(payload).to_bytes(4, "big") + peer._outward.tag(payload) + payload
        try:
            (got,) = end.receive(frame)
        except ProtocolError:
            assert end.state is State.CLOSED, (seed, case)
        else:
            assert isinstance(got, Message), (seed, case)
            again = decode(encode(got))
            assert encode(again) == encode(got), (seed, case)


@pytest.mark.parametrize("begins", [b"", b"\x91", b"\x93\xa6Joined\x81\xa1x"])
@pytest.mark.parametrize(
    "rest",
    [
        *(head + b"\xff" * 5 for head in (b"\xdd", b"\xdf", b"\xc6", b"\xdb", b"\xc9")),
        *(_nested(depth) for depth in (100, 1000, 5000, MAX_FRAME_NBYTES - 50)),
        *(_nested(depth, key=b"\xa1t") for depth in (1000, 5000)),
    ],
    ids=lambda rest: f"{rest[:1]!r} {len(rest)}",
)
def test_lies_and_depth_cost_little_memory(begins: bytes, rest: bytes) -> None:
    tracemalloc.start()
    try:
        with suppress(ProtocolError):  # a few levels are read
            decode(begins + rest)
            assert len(rest) == 101
        assert tracemalloc.get_traced_memory()[1] < 2 * MAX_FRAME_NBYTES
    finally:
        tracemalloc.stop()
