"""The protocol without I/O: two ends joined by a fake wire, and everything that a hostile wire can do."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from raycollect.channel.messages import Abort, Bye, Fetch, Fetched, Publish, decode
from raycollect.channel.protocol import (
    MAX_FRAME_NBYTES,
    MAX_HANDSHAKE_NBYTES,
    Connection,
    ConnectionState,
    Opened,
)
from raycollect.errors import AuthenticationError, ChannelError, ConnectionLostError, ProtocolError
from tests.pure.channel.wire import HELLO, SECRET, Wire


def _raises_for_ever(connection: Connection, data: bytes, error: type[ChannelError] = ChannelError) -> None:
    with pytest.raises(error):
        connection.receive(data)
    assert connection.state is ConnectionState.CLOSED
    for more in (b"", b"x", data):
        with pytest.raises(ProtocolError):
            connection.receive(more)
    with pytest.raises(ConnectionLostError):
        connection.send(Bye())


# ---------------------------------------------------------------------------------------------- handshake


@pytest.mark.parametrize("purpose", ["control", "data"])
def test_the_handshake_opens_both_ends(purpose: str) -> None:
    wire = Wire(purpose=purpose).open()
    assert wire.server_opened == wire.client_opened == Opened(purpose, HELLO)
    assert wire.server.state is wire.client.state is ConnectionState.OPEN


def test_messages_go_both_ways() -> None:
    wire = Wire().open()
    for seq in range(5):
        assert wire.server.receive(wire.client.send(Abort(seq=seq, reason="r"))) == [Abort(seq=seq, reason="r")]
        assert wire.client.receive(wire.server.send(Abort(seq=-seq, reason=""))) == [Abort(seq=-seq, reason="")]


def _challenged(at: int) -> tuple[Connection, bytes]:
    """A client, and a challenge with a wrong bit."""
    challenge = bytearray(Wire().challenge)
    challenge[at] ^= 1
    client = Connection("client", SECRET, nonce=b"C" * 16)
    client.start()
    return client, bytes(challenge)


def _swapped() -> tuple[Connection, bytes]:
    wire = Wire().open()
    first, second = (wire.client.send(Abort(seq=seq, reason="")) for seq in (1, 2))
    return wire.server, second + first


def _repeated() -> tuple[Connection, bytes]:
    wire = Wire().open()
    frame = wire.client.send(Bye())
    assert wire.server.receive(frame) == [Bye()]
    return wire.server, frame


def _sent_back() -> tuple[Connection, bytes]:
    client = Wire().open().client
    return client, client.send(Bye())


def _unknown() -> tuple[Connection, bytes]:
    wire, payload = Wire().open(), b"\x91\xa4Nope"
    return wire.server, len(payload).to_bytes(4, "big") + wire.client._outward.tag(payload) + payload


def _blob_on_control() -> tuple[Connection, bytes]:
    wire = Wire().open()
    wire.server.purpose = "data"  # a peer that breaks the rule
    return wire.client, wire.server.send(Fetched(description=b""), 3)


def _frames_in_a_blob() -> tuple[Connection, bytes]:
    wire = Wire(purpose="data").open()
    wire.client.receive(wire.server.send(Fetched(description=b""), 3))
    return wire.client, b"abc"


def _without_purpose() -> tuple[Connection, bytes]:
    client, server = Wire().client, Wire().server
    client._claim = b""  # one who holds the key, and breaks the rule
    proof = client._nonce + client._proof("client")
    return server, len(proof).to_bytes(4, "big") + proof


FORGED: dict[str, Callable[[], tuple[Connection, bytes]]] = {
    "a server with the wrong key": lambda: (
        Wire().client,
        Wire(server_secret=b"x" * 32, client_secret=b"x" * 32).open().confirmation,
    ),
    "a proof of another handshake": lambda: (Wire(server_nonce=b"T" * 16).server, Wire().proof),
    "a confirmation of another handshake": lambda: (Wire(client_nonce=b"D" * 16).client, Wire().open().confirmation),
    "a proof without a purpose": _without_purpose,
    "a proof sent back": lambda: (Wire().client, (32).to_bytes(4, "big") + Wire().proof[20:52]),
    **{
        f"a proof of {nbytes} bytes": lambda nbytes=nbytes: (Wire().server, nbytes.to_bytes(4, "big") + bytes(nbytes))
        for nbytes in (0, 1, 16, 47, 48)
    },
    "a frame repeated": _repeated,
    "frames swapped": _swapped,
    "a frame sent back": _sent_back,
    "a frame of another connection": lambda: (
        Wire().open().server,
        Wire(client_nonce=b"D" * 16).open().client.send(Bye()),
    ),
}

BROKEN: dict[str, Callable[[], tuple[Connection, bytes]]] = {
    "wrong magic": lambda: _challenged(4),
    "another version": lambda: _challenged(8),
    "a long handshake frame": lambda: (Wire().server, (MAX_HANDSHAKE_NBYTES + 1).to_bytes(4, "big")),
    "a long frame": lambda: (Wire().open().server, (MAX_FRAME_NBYTES + 1).to_bytes(4, "big")),
    "an unknown message": _unknown,
    "a blob on a control connection": _blob_on_control,
    "frames while a blob is due": _frames_in_a_blob,
}


@pytest.mark.parametrize("case", [*FORGED, *BROKEN])
def test_what_breaks_a_rule_closes_the_connection_for_ever(case: str) -> None:
    end, data = {**FORGED, **BROKEN}[case]()
    _raises_for_ever(end, data, AuthenticationError if case in FORGED else ProtocolError)


@pytest.mark.parametrize(
    "payload",
    [
        *(b"\x91" + head + b"\xff" * 5 for head in (b"\xdd", b"\xdf", b"\xc6", b"\xdb", b"\xc9")),
        *(unit * ((MAX_FRAME_NBYTES - 50) // len(unit)) for unit in (b"\x91", b"\x81\xa1t")),
    ],
    ids=lambda payload: f"{payload[:2]!r} {len(payload)}",
)
def test_what_announces_much_or_is_deep_takes_little_memory(payload: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            decode(payload)
        assert tracemalloc.get_traced_memory()[1] < 2 * MAX_FRAME_NBYTES
    finally:
        tracemalloc.stop()


def test_a_client_with_the_wrong_key_is_refused_and_told() -> None:
    wire = Wire(client_secret=b"x" * 32)
    _raises_for_ever(wire.server, wire.proof, AuthenticationError)
    _raises_for_ever(wire.client, wire.server.farewell, AuthenticationError)


def test_a_flipped_bit_anywhere_in_the_proof_is_refused() -> None:
    proof = Wire().proof
    for bit in range(8 * 4, 8 * len(proof)):
        flipped = bytearray(proof)
        flipped[bit // 8] ^= 1 << bit % 8
        _raises_for_ever(Wire().server, bytes(flipped), AuthenticationError)


def test_a_long_hello_is_refused_at_once() -> None:
    with pytest.raises(ProtocolError, match="hello"):
        Connection("client", SECRET, nonce=b"C" * 16, hello={"x": "y" * MAX_HANDSHAKE_NBYTES})


def test_nothing_can_be_sent_before_the_handshake_is_done() -> None:
    wire = Wire()
    for end in (wire.server, wire.client):
        with pytest.raises(ProtocolError):
            end.send(Bye())


def test_arguments_that_make_no_sense() -> None:
    good: dict[str, Any] = {"role": "client", "secret": SECRET, "nonce": b"C" * 16}
    for bad in ({"role": "peer"}, {"secret": b"short"}, {"nonce": b""}, {"purpose": "gossip"}):
        with pytest.raises(ValueError):
            Connection(**{**good, **bad})  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------- frames
def test_a_flipped_bit_anywhere_in_a_frame_is_refused() -> None:
    frame = Wire().open().client.send(Abort(seq=1, reason="stop"))
    for bit in range(8 * len(frame)):
        server = Wire().open().server
        flipped = bytearray(frame)
        flipped[bit // 8] ^= 1 << bit % 8
        try:  # a greater length makes it wait for more, which never says anything either
            assert server.receive(bytes(flipped)) == []
            assert bit < 32
            assert server.receive_eof().detail.startswith("the connection ended in the middle")
        except (AuthenticationError, ProtocolError):
            assert server.state is ConnectionState.CLOSED


def test_a_message_that_is_too_big_is_refused_by_its_sender_who_goes_on() -> None:
    wire = Wire().open()
    with pytest.raises(ProtocolError, match="limit"):
        wire.client.send(Publish(group_id="g", communicator="", epoch="", name="n", value=bytes(MAX_FRAME_NBYTES)))
    assert wire.server.receive(wire.client.send(Bye())) == [Bye()]


def test_the_biggest_frame_passes_in_small_chunks_and_memory_stays_bounded() -> None:
    wire = Wire().open()
    message = Publish(group_id="g", communicator="", epoch="", name="n", value=bytes(MAX_FRAME_NBYTES - 100))
    for _ in range(3):
        frame = wire.client.send(message)
        got: list[Any] = []
        for start in range(0, len(frame), 1000):
            got += wire.server.receive(memoryview(frame)[start : start + 1000])
            assert len(wire.server._buffer) <= MAX_FRAME_NBYTES + 1000
        assert got == [message]
        assert not wire.server._buffer


def test_many_frames_in_one_chunk_leave_nothing_behind() -> None:
    wire = Wire().open()
    stream = b"".join(wire.client.send(Abort(seq=n, reason="")) for n in range(20_000))
    half = wire.client.send(Bye())[:10]
    assert len(wire.server.receive(stream + half)) == 20_000
    assert bytes(wire.server._buffer) == half


def test_the_end_of_the_stream_says_whether_something_was_cut() -> None:
    wire = Wire().open()
    assert wire.server.receive_eof().detail == "the peer closed the connection"
    assert wire.client.receive(b"\0\0") == []
    assert "middle" in wire.client.receive_eof().detail
    assert "middle" in Wire().server.receive_eof().detail


# ---------------------------------------------------------------------------------------------- blobs


def test_a_blob_follows_its_frame_and_frames_follow_the_blob() -> None:
    wire = Wire(purpose="data").open()
    blob = bytes(range(256)) * 40
    stream = wire.server.send(Fetched(description=b""), len(blob)) + blob + wire.server.send(Bye())
    assert wire.client.receive(stream[:1000]) == [Fetched(description=b"", blob_nbytes=len(blob))]
    got = bytearray(wire.client.take_buffered(100))
    assert len(got) == 100
    got += wire.client.take_buffered(1 << 30)
    assert wire.client.take_buffered(5) == b""
    rest = stream[1000:]
    missing = len(blob) - len(got)
    got += rest[:missing]
    wire.client.blob_received()
    assert got == blob
    assert wire.client.receive(rest[missing:]) == [Bye()]


def test_blobs_only_where_they_are_allowed() -> None:
    control, data = Wire().open(), Wire(purpose="data").open()
    for connection, message, nbytes in (
        (control.server, Fetched(description=b""), 3),
        (data.server, Bye(), 3),
        (data.server, Fetched(description=b"", blob_nbytes=4), 3),
        (data.server, Fetched(description=b"", blob_nbytes=4), 0),
        (data.server, Fetch(key=b""), 1),
    ):
        with pytest.raises(ProtocolError):
            connection.send(message, nbytes)
    with pytest.raises(ProtocolError):
        data.client.take_buffered(1)
    with pytest.raises(ProtocolError):
        data.client.blob_received()


# ---------------------------------------------------------------------------------------------- table


def test_a_connection_starts_once() -> None:
    connection = Connection("server", SECRET, nonce=b"S" * 16)
    with pytest.raises(ProtocolError):
        connection.receive(b"")
    connection.start()
    with pytest.raises(ProtocolError):
        connection.start()
