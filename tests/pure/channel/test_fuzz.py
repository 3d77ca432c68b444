"""What a hostile wire can do to the channel, at random: never another error, a hang, a forged message, or much memory.

Every case is made from a seed that the test's name or its message tells. What the holder of the key may say is in
`test_channel_fuzz_peers.py`.
"""

from __future__ import annotations

import dataclasses
import random
import socket
import threading
import tracemalloc
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
import pytest

from raycollect.channel import DataClient, server
from raycollect.channel.messages import MESSAGES, Bye, Done, Fetch, Fetched, Message, Publish, decode, encode
from raycollect.channel.protocol import MAX_FRAME_NBYTES, MAX_HANDSHAKE_NBYTES, Connection, Opened, Reply, State
from raycollect.core.model import Address
from raycollect.errors import ChannelError, ConnectionLostError, ProtocolError
from tests.pure.channel.test_protocol import Wire
from tests.pure.channel.test_sockets import HOST, LIMIT_S, SECRET, Party, Rig, echo, rig

__all__ = ["rig"]

SEEDS = range(6)
BLOB_NBYTES = 300


# ---------------------------------------------------------------------------------------------- what is said


def message(rng: random.Random, cls: type[Message] | None = None) -> Message:
    """Any message of the table, with values of the right types."""
    cls = cls or MESSAGES[rng.choice(sorted(set(MESSAGES) - {"Fetched"}))]
    hints = typing.get_type_hints(cls)
    names = {field.name for field in dataclasses.fields(typing.cast(Any, cls))} - {"blob_nbytes"}
    return cls(**{name: value(rng, hints[name]) for name in sorted(names)})


def value(rng: random.Random, hint: Any) -> Any:
    """Any value of a field's type; now and then one at the edge of what it can be."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if type(None) in args:
        return None if rng.random() < 0.3 else value(rng, args[0])
    if origin in (list, tuple):
        return origin(value(rng, args[0]) for _ in range(rng.choice((0, 1, 2, 5))))
    if origin is dict:
        return {rng.choice(("type", "fields", "name", "x")): rng.choice((None, -1, "x", [], {})) for _ in range(3)}
    plain: dict[Any, Callable[[], Any]] = {
        int: lambda: rng.choice((0, 1, 2, -1, 2**31, 2**63, -(2**63), rng.randrange(10))),
        float: lambda: rng.choice((0.0, -1.0, 1e-9, float("inf"), rng.random())),
        bool: lambda: rng.random() < 0.5,
        str: lambda: rng.choice(("", "g", "all", "0>1", "9>9", "x" * 300, "\0", "𝄞")),
        bytes: lambda: rng.randbytes(rng.choice((0, 1, 16, 28, 500))),
    }
    return plain[hint]()


def changed(rng: random.Random, units: Sequence[bytes], foreign: Sequence[bytes]) -> list[bytes]:
    """The units of a stream, after one thing was done to them.

    Args:
        rng: What decides.
        units: The true ones.
        foreign: What was said elsewhere: by this end itself, or in another connection.
    """
    made = list(units)
    at = rng.randrange(len(made))
    one = bytearray(made[at])
    place = rng.randrange(len(one) + 1)
    kind = rng.choice(("flip", "flip", "cut", "end", "swap", "repeat", "drop", "insert", "announce", "foreign", "zero"))
    if kind == "flip" and one:
        one[place % len(one)] ^= 1 << rng.randrange(8)
        made[at] = bytes(one)
    elif kind == "cut":
        made[at] = bytes(one[:place])
    elif kind == "end":
        made[at:] = [bytes(one[:place])]
    elif kind == "swap":
        other = rng.randrange(len(made))
        made[at], made[other] = made[other], made[at]
    elif kind == "repeat":
        made.insert(rng.randrange(at, len(made)) + 1, made[at])
    elif kind == "drop":
        del made[at]
    elif kind == "insert":
        made[at] = bytes(one[:place]) + rng.randbytes(rng.choice((1, 4, 20, 5000))) + bytes(one[place:])
    elif kind == "announce":
        limits = (0, 1, MAX_HANDSHAKE_NBYTES, MAX_HANDSHAKE_NBYTES + 1, MAX_FRAME_NBYTES, MAX_FRAME_NBYTES + 1)
        one[:4] = rng.choice((*limits, 2**32 - 1, rng.getrandbits(32))).to_bytes(4, "big")
        made[at] = bytes(one)
    elif kind == "foreign":
        made[at] = rng.choice(foreign)
    elif kind == "zero":
        made[at] = bytes(len(one))
    return made


def chunks(rng: random.Random, stream: bytes) -> Iterator[bytes]:
    """The stream, in pieces as a socket may give them."""
    most = rng.choice((1, 7, 100, 5000, 1 << 20))
    at = 0
    while at < len(stream):
        step = rng.randint(1, most)
        yield stream[at : at + step]
        at += step


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
            frame = peer.send(Fetched(found={}), BLOB_NBYTES)
            said += [(frame, (Fetched(found={}, blob_nbytes=BLOB_NBYTES),)), (rng.randbytes(BLOB_NBYTES), ())]
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


@pytest.mark.parametrize(("role", "purpose", "handshakes"), STATIONS)
@pytest.mark.parametrize("seed", SEEDS)
def test_what_was_not_changed_is_accepted_in_any_pieces(role: str, purpose: str, handshakes: int, seed: int) -> None:
    for case in range(5):
        rng = random.Random(f"{seed}/{case}")
        one = _station(rng, role, purpose, handshakes)
        reader = Reader(one.end)
        for piece in chunks(rng, b"".join(one.units)):
            reader.feed(piece)
        assert reader.got == [event for events in one.meant for event in events]
        assert one.end.state is State.OPEN


@pytest.mark.parametrize(("role", "purpose", "handshakes"), STATIONS)
@pytest.mark.parametrize("nbytes", [MAX_FRAME_NBYTES + 1, 2**31, 2**32 - 1])
def test_a_length_is_judged_before_memory_is_taken(role: str, purpose: str, handshakes: int, nbytes: int) -> None:
    end = _station(random.Random(0), role, purpose, handshakes).end
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError, match="the limit is"):
            end.receive(nbytes.to_bytes(4, "big") + bytes(100))
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


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
        return rng.choice((b"\x81\xa1t", b"\x82\xa1t\xa4Done\xa3seq", b"")) + lie + rng.randbytes(10)
    if kind == 4:
        depth = rng.choice((10, 400, 510, 512, 900, 1000, 1023, 1024, 5000, 100_000))
        return rng.choice((b"", b"\x81\xa1t", b"\x82\xa1t\xa4Done\xa3seq")) + _nested(
            depth, key=rng.choice((b"", b"\xa1t"))
        )
    if kind == 5:
        return bytes(base) + rng.randbytes(rng.choice((1, 2, 50)))
    if kind == 6:  # the right fields, the wrong types
        cls = type(message(rng))
        names = [field.name for field in dataclasses.fields(typing.cast(Any, cls))]
        odd = [None, True, -1, 2**64 - 1, 1.5, "x", b"x", [], [[]], {}, {"x": 1}, [None], "\0" * 1000]
        return typing.cast(bytes, msgpack.packb({"t": cls.__name__, **{name: rng.choice(odd) for name in names}}))
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


@pytest.mark.parametrize(
    "payload",
    [
        b"\xdd" + b"\xff" * 4,
        b"\xdf" + b"\xff" * 4,
        b"\xc6" + b"\xff" * 4,
        b"\xdb" + b"\xff" * 4,
        b"\xc9" + b"\xff" * 5,
        b"\x81\xa1t\xdd\x00\x01\x00\x01",
        *(_nested(depth) for depth in (100, 1000, 5000, MAX_FRAME_NBYTES - 1)),
        *(b"\x81\xa1t" + _nested(depth) for depth in (100, 300, 500, 900, 1020, 5000)),
        *(b"\x81\xa1t" + _nested(depth, key=b"\xa1t") for depth in (100, 300, 500, 900, 1020, 5000)),
    ],
)
def test_lies_and_depth_cost_little_memory(payload: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            decode(payload)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("item", [b"\x90", b"\x80", b"\xa0", b"\xc4\x00", b"\xcb" + bytes(8), b"\x91\x90"])
def test_a_payload_of_many_small_things_costs_a_bounded_multiple(item: bytes) -> None:
    rows = (MAX_FRAME_NBYTES - 100) // (65_000 * len(item) + 5) or 1
    per_row = min(65_000, (MAX_FRAME_NBYTES - 100) // len(item))
    row = b"\xdd" + per_row.to_bytes(4, "big") + item * per_row
    payload = b"\x81\xa1t\xdd" + rows.to_bytes(4, "big") + row * rows
    assert len(payload) <= MAX_FRAME_NBYTES
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            decode(payload)
        assert tracemalloc.get_traced_memory()[1] < 150 * MAX_FRAME_NBYTES
    finally:
        tracemalloc.stop()


# ---------------------------------------------------------------------------------------------- over sockets


def _say(sock: socket.socket, pieces: Iterator[bytes]) -> None:
    """Sends what the other end takes, then waits until it closes."""
    try:
        for piece in pieces:
            sock.sendall(piece)
        sock.shutdown(socket.SHUT_WR)
    except OSError:
        pass
    sock.settimeout(LIMIT_S)
    try:
        while sock.recv(65536):
            pass
    except ConnectionError:
        pass


def _greet(sock: socket.socket, end: Connection) -> bytes:
    """Waits for the peer's next handshake frame; gives what has to be answered."""
    while True:
        for event in end.receive(sock.recv(4096) or b""):
            if isinstance(event, Reply):
                return event.data
        if end.state is State.OPEN:
            return b""


@pytest.mark.parametrize("seed", range(24))
def test_a_hostile_client_ends_its_own_connection_only(rig: Rig, seed: int) -> None:
    rng = random.Random(seed)
    there, friendly = Party(echo), Party()
    address = rig.serve(there)
    friend = rig.connect(address, friendly)
    there.links.get(timeout=LIMIT_S)
    with socket.create_connection((HOST, address.port), LIMIT_S) as sock:
        stage = seed % 3
        key = SECRET if stage else b"w" * 32
        end = Connection("client", key, nonce=rng.randbytes(16), purpose=rng.choice(("control", "data")), hello={})
        end.start()
        proof = _greet(sock, end)
        if stage < 2:
            _say(sock, chunks(rng, b"".join([*changed(rng, [proof], [b"", proof]), rng.randbytes(5000)])))
        else:
            sock.sendall(proof)
            _greet(sock, end)
            frames = [end.send(message(rng)) for _ in range(5)]
            _say(sock, chunks(rng, b"".join([*changed(rng, frames, [proof, b""]), rng.randbytes(2 << 20)])))
    friend.send(Bye())
    while friendly.messages.get(timeout=LIMIT_S) != Bye():
        pass
    rig.connect(address, Party()).close()


class Impostor:
    """A server that shakes hands until one stage, says something else there, and ends."""

    def __init__(self, rng: random.Random, stage: int) -> None:
        self.sent: list[Message] = []
        self._rng = rng
        self._stage = stage
        self._listener = socket.create_server((HOST, 0))
        self.address = Address(host=HOST, port=self._listener.getsockname()[1], secret=SECRET)
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def close(self) -> None:
        self._thread.join(LIMIT_S)
        self._listener.close()

    def _serve(self) -> None:
        rng = self._rng
        sock, _ = self._listener.accept()
        with sock:
            sock.settimeout(LIMIT_S)
            end = Connection("server", SECRET, nonce=rng.randbytes(16))
            units = [end.start()]
            if self._stage:
                sock.sendall(units[0])
                units = [_greet(sock, end)]
            if self._stage > 1:
                sock.sendall(units[0])
                self.sent = [message(rng) for _ in range(5)]
                units = [end.send(one) for one in self.sent]
            _say(sock, chunks(rng, b"".join([*changed(rng, units, [b"", units[0]]), rng.randbytes(100)])))


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("seed", range(8))
def test_a_hostile_server_gives_the_hub_a_typed_error(rig: Rig, stage: int, seed: int) -> None:
    rng = random.Random(100 * stage + seed)
    impostor, here = Impostor(rng, stage), Party()
    try:
        rig.hub.connect(impostor.address, {}, here, LIMIT_S)
    except ChannelError:
        assert stage < 2 or here.messages.empty()
    else:
        assert isinstance(here.reasons.get(timeout=LIMIT_S), ChannelError)
        got = [here.messages.get_nowait() for _ in range(here.messages.qsize())]
        assert got == impostor.sent[: len(got)]
        assert here.reasons.empty()
    impostor.close()


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_a_hostile_server_gives_a_data_client_a_typed_error(stage: int, seed: int) -> None:
    impostor = Impostor(random.Random(1000 * stage + seed), stage)
    with pytest.raises(ChannelError):
        client = DataClient(impostor.address, LIMIT_S)
        try:
            for _ in range(20):
                client.request(Fetch(key=b"", timeout_s=1.0))
        finally:
            client.close()
    impostor.close()


def test_half_open_clients_cost_little_memory_and_time(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as there may be, each with all but one byte of the longest proof; one that comes byte by byte."""
    monkeypatch.setattr(server, "HANDSHAKE_TIMEOUT_S", 3.0)
    address = rig.serve(Party(echo))
    here = Party()
    friend = rig.connect(address, here)
    words = MAX_HANDSHAKE_NBYTES.to_bytes(4, "big") + bytes(MAX_HANDSHAKE_NBYTES - 1)
    strangers = [socket.create_connection((HOST, address.port), LIMIT_S) for _ in range(server.MAX_HALF_OPEN)]
    tracemalloc.start()
    try:
        for stranger in strangers[1:]:
            stranger.sendall(words)
        for byte in words[:100]:
            strangers[0].sendall(bytes([byte]))
        friend.send(Bye())
        assert here.messages.get(timeout=LIMIT_S) == Bye()
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
        for stranger in strangers:
            _say(stranger, iter(()))
    finally:
        tracemalloc.stop()
        for stranger in strangers:
            stranger.close()
    rig.connect(address, Party()).close()


def test_a_peer_that_never_ends_its_frame_holds_no_more_than_a_frame(rig: Rig) -> None:
    """It holds the key, and is slow for ever: others are served, and the server's end closes it."""
    there = Party(echo)
    address = rig.serve(there)
    with socket.create_connection((HOST, address.port), LIMIT_S) as sock:
        end = Connection("client", SECRET, nonce=b"N" * 16, hello={})
        end.start()
        sock.sendall(_greet(sock, end))
        _greet(sock, end)
        frame = end.send(Publish(group_id="g", lane="", generation="", name="n", value=bytes(MAX_FRAME_NBYTES - 100)))
        slow = there.links.get(timeout=LIMIT_S)
        sock.sendall(frame[:-1])
        here = Party()
        link = rig.connect(address, here)
        for seq in range(50):
            link.send(Done(seq=seq, ranks=[], error=None, story=[]))
            assert here.messages.get(timeout=LIMIT_S) == Done(seq=seq, ranks=[], error=None, story=[])
        assert len(slow._connection._buffer) <= len(frame)
        rig.servers[0].close()
        assert isinstance(there.reasons.get(timeout=LIMIT_S), ConnectionLostError)
