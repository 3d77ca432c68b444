"""The protocol without I/O: two ends joined by a fake wire, and everything that a hostile wire can do."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raycollect.channel.messages import Abort, Bye, Done, Fetch, Fetched, Message, Publish
from raycollect.channel.protocol import (
    MAX_FRAME_NBYTES,
    MAX_HANDSHAKE_NBYTES,
    MOVES,
    Connection,
    Move,
    Opened,
    State,
)
from raycollect.errors import AuthenticationError, ChannelError, ConnectionLostError, ProtocolError
from tests.pure.channel.wire import HELLO, SECRET, Wire


def _raises_for_ever(connection: Connection, data: bytes, error: type[ChannelError] = ChannelError) -> None:
    with pytest.raises(error):
        connection.receive(data)
    assert connection.state is State.CLOSED
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
    assert wire.server.state is wire.client.state is State.OPEN


def test_messages_go_both_ways() -> None:
    wire = Wire().open()
    for seq in range(5):
        assert wire.server.receive(wire.client.send(Abort(seq=seq, reason="r"))) == [Abort(seq=seq, reason="r")]
        assert wire.client.receive(wire.server.send(Abort(seq=-seq, reason=""))) == [Abort(seq=-seq, reason="")]


def test_a_client_with_the_wrong_key_is_refused_and_told() -> None:
    wire = Wire(client_secret=b"x" * 32)
    _raises_for_ever(wire.server, wire.proof, AuthenticationError)
    _raises_for_ever(wire.client, wire.server.farewell, AuthenticationError)


def test_a_server_with_the_wrong_key_is_refused() -> None:
    wire, other = Wire(), Wire(server_secret=b"x" * 32, client_secret=b"x" * 32).open()
    _raises_for_ever(wire.client, other.confirmation, AuthenticationError)


def test_a_replayed_handshake_is_refused() -> None:
    old = Wire().open()
    _raises_for_ever(Wire(server_nonce=b"T" * 16).server, old.proof, AuthenticationError)
    _raises_for_ever(Wire(client_nonce=b"D" * 16).client, old.confirmation, AuthenticationError)


def test_a_proof_sent_back_to_its_sender_confirms_nothing() -> None:
    wire = Wire()
    _raises_for_ever(wire.client, (32).to_bytes(4, "big") + wire.proof[20:52], AuthenticationError)


@pytest.mark.parametrize("at", [4, 8])
def test_wrong_magic_and_version_are_refused(at: int) -> None:
    challenge = bytearray(Wire().challenge)
    challenge[at] ^= 1
    client = Connection("client", SECRET, nonce=b"C" * 16)
    client.start()
    _raises_for_ever(client, bytes(challenge), ProtocolError)


def test_a_flipped_bit_anywhere_in_the_proof_is_refused() -> None:
    proof = Wire().proof
    for bit in range(8 * 4, 8 * len(proof)):
        flipped = bytearray(proof)
        flipped[bit // 8] ^= 1 << bit % 8
        _raises_for_ever(Wire().server, bytes(flipped), AuthenticationError)


@pytest.mark.parametrize("nbytes", [0, 1, 16, 47, 48])
def test_a_short_proof_is_refused(nbytes: int) -> None:
    _raises_for_ever(Wire().server, nbytes.to_bytes(4, "big") + bytes(nbytes), AuthenticationError)


@given(st.binary(max_size=300))
def test_garbage_instead_of_a_handshake_opens_nothing(data: bytes) -> None:
    for end in (Wire().server, Connection("client", SECRET, nonce=b"C" * 16)):
        if end.state is State.NEW:
            end.start()
        try:
            assert end.receive(data) == []
        except ChannelError:
            assert end.state is State.CLOSED
        assert end.state is not State.OPEN


def test_a_long_handshake_frame_is_refused_by_its_length() -> None:
    _raises_for_ever(Wire().server, (MAX_HANDSHAKE_NBYTES + 1).to_bytes(4, "big"), ProtocolError)
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
@given(st.data())
def test_any_chunking_gives_the_same_events(data: st.DataObject) -> None:
    wire = Wire()
    sent: list[Message] = [
        Done(seq=n, ranks=[n], error=None, story=["x" * n]) for n in range(data.draw(st.integers(0, 8)))
    ]
    sender = Wire().open().client  # equal nonces and key, so an equal stream
    stream = wire.proof + b"".join(sender.send(message) for message in sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=20)))
    got: list[Any] = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        got += wire.server.receive(stream[start:end])
    assert got[1:] == [Opened("control", HELLO), *sent]


def test_byte_by_byte() -> None:
    wire = Wire().open()
    frame = wire.client.send(Abort(seq=3, reason="slow"))
    got = [event for byte in frame for event in wire.server.receive(bytes([byte]))]
    assert got == [Abort(seq=3, reason="slow")]


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
            assert server.state is State.CLOSED


def test_a_replayed_frame_is_refused() -> None:
    wire = Wire().open()
    frame = wire.client.send(Bye())
    assert wire.server.receive(frame) == [Bye()]
    _raises_for_ever(wire.server, frame, AuthenticationError)


def test_swapped_and_dropped_frames_are_refused() -> None:
    wire = Wire().open()
    first, second = wire.client.send(Abort(seq=1, reason="")), wire.client.send(Abort(seq=2, reason=""))
    _raises_for_ever(wire.server, second + first, AuthenticationError)


def test_a_frame_sent_back_to_its_sender_is_refused() -> None:
    wire = Wire().open()
    _raises_for_ever(wire.client, wire.client.send(Bye()), AuthenticationError)


def test_a_frame_of_another_connection_is_refused() -> None:
    frame = Wire(client_nonce=b"D" * 16).open().client.send(Bye())
    _raises_for_ever(Wire().open().server, frame, AuthenticationError)


def test_an_oversized_length_is_refused_before_its_payload_comes() -> None:
    _raises_for_ever(Wire().open().server, (MAX_FRAME_NBYTES + 1).to_bytes(4, "big"), ProtocolError)


def test_a_message_that_is_too_big_is_refused_by_its_sender_who_goes_on() -> None:
    wire = Wire().open()
    with pytest.raises(ProtocolError, match="limit"):
        wire.client.send(Publish(group_id="g", communicator="", generation="", name="n", value=bytes(MAX_FRAME_NBYTES)))
    assert wire.server.receive(wire.client.send(Bye())) == [Bye()]


def test_the_biggest_frame_passes_in_small_chunks_and_memory_stays_bounded() -> None:
    wire = Wire().open()
    message = Publish(group_id="g", communicator="", generation="", name="n", value=bytes(MAX_FRAME_NBYTES - 100))
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


def test_an_unknown_message_closes_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire().open()
    monkeypatch.setattr("raycollect.channel.protocol.encode", lambda message: b"\x81\xa1t\xa4Nope")
    _raises_for_ever(wire.server, wire.client.send(Bye()), ProtocolError)


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
    stream = wire.server.send(Fetched(found=b""), len(blob)) + blob + wire.server.send(Bye())
    assert wire.client.receive(stream[:1000]) == [Fetched(found=b"", blob_nbytes=len(blob))]
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


def test_frames_buffered_behind_a_blob_wait_for_its_end() -> None:
    wire = Wire(purpose="data").open()
    stream = wire.server.send(Fetched(found=b""), 3) + b"abc" + wire.server.send(Bye())
    assert wire.client.receive(stream) == [Fetched(found=b"", blob_nbytes=3)]
    assert wire.client.take_buffered(99) == b"abc"
    wire.client.blob_received()
    assert wire.client.receive(b"") == [Bye()]


def test_the_receiver_of_a_blob_can_still_send() -> None:
    wire = Wire(purpose="data").open()
    wire.client.receive(wire.server.send(Fetched(found=b""), 3))
    assert wire.server.receive(wire.client.send(Bye())) == [Bye()]


def test_feeding_frames_while_a_blob_is_due_breaks_the_rules() -> None:
    wire = Wire(purpose="data").open()
    wire.client.receive(wire.server.send(Fetched(found=b""), 3))
    _raises_for_ever(wire.client, b"abc", ProtocolError)


def test_blobs_only_where_they_are_allowed() -> None:
    control, data = Wire().open(), Wire(purpose="data").open()
    for connection, message, nbytes in (
        (control.server, Fetched(found=b""), 3),
        (data.server, Bye(), 3),
        (data.server, Fetched(found=b"", blob_nbytes=4), 3),
        (data.server, Fetched(found=b"", blob_nbytes=4), 0),
        (data.server, Fetch(key=b""), 1),
    ):
        with pytest.raises(ProtocolError):
            connection.send(message, nbytes)
    with pytest.raises(ProtocolError):
        data.client.take_buffered(1)
    with pytest.raises(ProtocolError):
        data.client.blob_received()


def test_a_blob_announced_on_a_control_connection_closes_it() -> None:
    wire = Wire().open()
    wire.server.purpose = "data"  # a peer that breaks the rule
    _raises_for_ever(wire.client, wire.server.send(Fetched(found=b""), 3), ProtocolError)


# ---------------------------------------------------------------------------------------------- table


def test_every_state_can_be_closed_and_only_by_the_table() -> None:
    assert all(MOVES[state, Move.CLOSE] is State.CLOSED for state in State)
    assert {state for (state, _), _ in MOVES.items()} == set(State)
    assert set(MOVES.values()) == set(State) - {State.NEW}


def test_a_connection_starts_once() -> None:
    connection = Connection("server", SECRET, nonce=b"S" * 16)
    with pytest.raises(ProtocolError):
        connection.receive(b"")
    connection.start()
    with pytest.raises(ProtocolError):
        connection.start()
