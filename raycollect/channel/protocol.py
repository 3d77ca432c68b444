"""The channel's protocol, without I/O, clock or threads: bytes in, events out.

The rules:

1. The server speaks first. All handshake frames are ``length:4 | payload``, at most 4 KiB::

       server -> client   challenge      MAGIC:4 | version:2 | server nonce:16
       client -> server   proof          client nonce:16 | HMAC:32 | len(purpose):1 | purpose | msgpack(hello)
       server -> client   confirmation   HMAC:32          (or REFUSAL, and the end)

   Each HMAC-SHA256 is keyed with the secret and covers its sender's role, both nonces, purpose and hello. Both nonces
   are fresh, so that frames of one connection don't open another. The hello is parsed after its HMAC was checked.
2. Then both ends send frames, ``length:4 | tag:16 | payload``, at most 1 MiB of payload. The tag is a keyed BLAKE2b of
   (number of the frame, length, payload) with a key of this connection and this direction: a frame that was forged,
   cut, repeated, swapped or sent back to its sender has a wrong tag.
3. On a "data" connection, a frame whose message says ``blob_nbytes > 0`` is followed by that many raw bytes. They
   carry no tag: they are as trustworthy as the network. The next frame's tag must still be correct.
4. A "mesh" connection has another protocol after the handshake: the reader of the handshake reads no byte beyond it
   (`Connection.handshake_left`).
5. Breaking a rule closes the connection forever.

Integers are big endian. The table `MOVES` has the transitions of a connection; any other transition breaks a rule.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from raycollect.channel.messages import Message, decode, encode
from raycollect.core.codec import Codec
from raycollect.errors import AuthenticationError, ChannelError, ConnectionLostError, ProtocolError

MAGIC = b"RCOL"
VERSION = 33
OTHER_VERSION = "the peer speaks version"  # the beginning of the error for another release
NONCE_NBYTES = 16
PROOF_NBYTES = 32
TAG_NBYTES = 16
MIN_SECRET_NBYTES = 16
MAX_FRAME_NBYTES = 1 << 20
MAX_HANDSHAKE_NBYTES = 4096
PURPOSES = ("control", "data", "mesh")
REFUSAL = b"refused"

_HELLOS = Codec[dict[str, Any]](dict[str, Any], "hello")
_LENGTH = struct.Struct(">I")
_NUMBERED = struct.Struct(">QI")
_CHALLENGE = struct.Struct(f">4sH{NONCE_NBYTES}s")

Buffer = bytes | bytearray | memoryview


class ConnectionState(enum.Enum):
    """The state of a connection, seen from one end."""

    NEW = enum.auto()
    CHALLENGING = enum.auto()  # server: sent its challenge, expects the proof
    CALLING = enum.auto()  # client: expects the challenge
    PROVING = enum.auto()  # client: sent its proof, expects the confirmation
    OPEN = enum.auto()
    BLOB = enum.auto()  # the next bytes are raw
    CLOSED = enum.auto()


class Move(enum.Enum):
    """The transitions of a connection."""

    SEND_CHALLENGE = enum.auto()
    AWAIT_CHALLENGE = enum.auto()
    RECEIVE_CHALLENGE = enum.auto()
    RECEIVE_PROOF = enum.auto()
    RECEIVE_CONFIRMATION = enum.auto()
    BEGIN_BLOB = enum.auto()
    END_BLOB = enum.auto()
    CLOSE = enum.auto()


MOVES: dict[tuple[ConnectionState, Move], ConnectionState] = {
    (ConnectionState.NEW, Move.SEND_CHALLENGE): ConnectionState.CHALLENGING,
    (ConnectionState.NEW, Move.AWAIT_CHALLENGE): ConnectionState.CALLING,
    (ConnectionState.CALLING, Move.RECEIVE_CHALLENGE): ConnectionState.PROVING,
    (ConnectionState.PROVING, Move.RECEIVE_CONFIRMATION): ConnectionState.OPEN,
    (ConnectionState.CHALLENGING, Move.RECEIVE_PROOF): ConnectionState.OPEN,
    (ConnectionState.OPEN, Move.BEGIN_BLOB): ConnectionState.BLOB,
    (ConnectionState.BLOB, Move.END_BLOB): ConnectionState.OPEN,
    **{(state, Move.CLOSE): ConnectionState.CLOSED for state in ConnectionState},
}

ROLES = {"server": Move.SEND_CHALLENGE, "client": Move.AWAIT_CHALLENGE}  # role -> its first move


@dataclass(frozen=True, slots=True)
class Reply:
    """These bytes must be sent now."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Opened:
    """The handshake is done: the peer holds the secret. `hello` is the client's description of itself."""

    purpose: str
    hello: dict[str, Any]


Event = Reply | Opened | Message


class _Seal:
    """Makes the tags of one direction; each call is for the next frame."""

    __slots__ = ("_keyed", "_number")

    def __init__(self, key: bytes) -> None:
        self._keyed = hashlib.blake2b(key=key, digest_size=TAG_NBYTES)
        self._number = 0

    def tag(self, payload: bytes | bytearray) -> bytes:
        digest = self._keyed.copy()  # cheaper than hashing the key again
        digest.update(_NUMBERED.pack(self._number, len(payload)))
        digest.update(payload)
        self._number += 1
        return digest.digest()


class Connection:
    """One end of a channel.

    `send` and `receive` share no state while the connection is open, so one thread may send (under the endpoint's
    lock) while another receives.
    """

    def __init__(
        self,
        role: str,
        secret: bytes,
        *,
        nonce: bytes,
        purpose: str = "control",
        hello: dict[str, Any] | None = None,
    ) -> None:
        """Makes an end that has sent nothing yet.

        Args:
            role: ``"server"`` or ``"client"``.
            secret: The key that both ends hold.
            nonce: 16 random bytes, never used before.
            purpose: One of `PURPOSES`; the client's choice.
            hello: The client's description of itself, plain values.

        Raises:
            ValueError: An argument is invalid.
            ProtocolError: `hello` is too big, or can't be packed.
        """
        if role not in ROLES or purpose not in PURPOSES:
            raise ValueError(f"no such connection: {role} {purpose}")
        if len(secret) < MIN_SECRET_NBYTES or len(nonce) != NONCE_NBYTES:
            raise ValueError(f"secret of {len(secret)} bytes, nonce of {len(nonce)} bytes")
        self.state: ConnectionState = ConnectionState.NEW
        self.purpose = purpose
        self.farewell: bytes = b""
        self._role = role
        self._secret = secret
        self._nonce = nonce
        self._hello = {} if hello is None else hello
        self._claim = _claim(purpose, self._hello)
        self._nonces = b""
        self._buffer = bytearray()
        self._offset = 0
        self._blob_left = 0
        self._outward = self._inward = _Seal(b"")
        if NONCE_NBYTES + PROOF_NBYTES + len(self._claim) > MAX_HANDSHAKE_NBYTES:
            raise ProtocolError(detail=f"the hello has {len(self._claim)} bytes, the limit is {MAX_HANDSHAKE_NBYTES}")

    def start(self) -> bytes:
        """Begins the handshake; returns the first bytes to send, none for a client."""
        self._move(ROLES[self._role])
        if self._role == "client":
            return b""
        return _framed(_CHALLENGE.pack(MAGIC, VERSION, self._nonce))

    def send(self, message: Message, blob_nbytes: int = 0) -> bytes:
        """Makes the frame of a message; `blob_nbytes` raw bytes must follow it, and are written into the message.

        Raises:
            ConnectionLostError, ProtocolError: As of `payload`.
        """
        return self.seal(self.payload(message, blob_nbytes))

    def seal(self, payload: bytes) -> bytes:
        """Makes the next frame, of a payload; frames have to be sent in the order of these calls."""
        return _LENGTH.pack(len(payload)) + self._outward.tag(payload) + payload

    def payload(self, message: Message, blob_nbytes: int = 0) -> bytes:
        """Makes the payload of a message.

        Raises:
            ConnectionLostError: The connection is closed.
            ProtocolError: The handshake is not done, the message is too big or can't be packed, or it may not have
                a blob here. Nothing was sent and the connection goes on.
        """
        if self.state is ConnectionState.CLOSED:
            raise ConnectionLostError(detail="the connection is closed")
        if self.state is not ConnectionState.OPEN and self.state is not ConnectionState.BLOB:
            raise ProtocolError(detail=f"can't send {type(message).__name__}: the connection is {self.state.name}")
        if blob_nbytes:
            message = self._with_blob(message, blob_nbytes)
        elif getattr(message, "blob_nbytes", 0):
            raise ProtocolError(detail=f"{type(message).__name__} announces a blob that does not follow")
        payload = encode(message)
        if len(payload) > MAX_FRAME_NBYTES:
            name = type(message).__name__
            raise ProtocolError(detail=f"{name} has {len(payload)} bytes, the limit is {MAX_FRAME_NBYTES}")
        return payload

    def _with_blob(self, message: Message, blob_nbytes: int) -> Message:
        declared = getattr(message, "blob_nbytes", None)
        if declared not in (0, blob_nbytes) or self.purpose != "data":
            raise ProtocolError(detail=f"{type(message).__name__} can't have a blob of {blob_nbytes} bytes here")
        return replace(message, blob_nbytes=blob_nbytes)

    def receive(self, data: Buffer) -> list[Event]:
        """Takes bytes from the peer; returns their events, in order. Pass ``b""`` to continue after a blob.

        After an exception the connection is closed, and later calls raise; the events of the failed call are lost.

        Raises:
            ProtocolError: A rule was broken; the connection is closed.
            AuthenticationError: The peer doesn't hold the secret; the connection is closed.
        """
        if self.state is ConnectionState.CLOSED or self.state is ConnectionState.NEW:
            raise ProtocolError(detail=f"received on a connection that is {self.state.name}")
        events: list[Event] = []
        try:
            if data:
                if self.state is ConnectionState.BLOB:
                    raise ProtocolError(detail="received frames while a blob is due")
                self._buffer += data
            while (event := self._next_event()) is not None:
                events += event
        except ChannelError:
            self.close()
            raise
        if self._offset:
            del self._buffer[: self._offset]
            self._offset = 0
        return events

    @property
    def handshake_left(self) -> int:
        """The missing bytes of the handshake's next frame, as far as known; 0: the handshake is done."""
        if self.state not in _HANDSHAKE:
            return 0
        here = len(self._buffer) - self._offset
        if here < _LENGTH.size:
            return _LENGTH.size - here
        (nbytes,) = _LENGTH.unpack_from(self._buffer, self._offset)
        return int(_LENGTH.size + nbytes - here)

    def receive_eof(self) -> ConnectionLostError:
        """Closes after the peer's last byte; returns the reason."""
        whole = self.state is ConnectionState.OPEN and not self._buffer
        cut = f"the connection ended in the middle of something ({self.state.name})"
        self.close()
        return ConnectionLostError(detail="the peer closed the connection" if whole else cut)

    def take_buffered(self, nbytes: int) -> bytes:
        """Returns up to `nbytes` of the current blob that were received with its frame; empty when used up."""
        if self.state is not ConnectionState.BLOB:
            raise ProtocolError(detail=f"no blob is due: the connection is {self.state.name}")
        taken = bytes(self._buffer[: min(nbytes, self._blob_left)])
        del self._buffer[: len(taken)]
        self._blob_left -= len(taken)
        return taken

    def blob_received(self) -> None:
        """Marks the end of the blob; frames follow."""
        self._move(Move.END_BLOB)
        self._blob_left = 0

    def close(self) -> None:
        """Ends the connection and drops buffered bytes."""
        self._move(Move.CLOSE)
        self._buffer = bytearray()
        self._offset = 0

    def _move(self, move: Move) -> None:
        try:
            self.state = MOVES[self.state, move]
        except KeyError:
            raise ProtocolError(detail=f"{move.name} is not possible while {self.state.name}") from None

    def _next_event(self) -> list[Event] | None:
        if self.state is ConnectionState.OPEN:
            return self._next_message()
        read = _HANDSHAKE.get(self.state)
        if read is None:
            return None
        payload = self._next_payload(0, MAX_HANDSHAKE_NBYTES)
        return None if payload is None else read(self, bytes(payload))

    def _next_payload(self, tag_nbytes: int, limit: int) -> bytearray | None:
        # The length is checked before the rest is awaited.
        start = self._offset + _LENGTH.size
        if len(self._buffer) < start:
            return None
        (nbytes,) = _LENGTH.unpack_from(self._buffer, self._offset)
        if nbytes > limit:
            raise ProtocolError(detail=f"a frame of {nbytes} bytes; the limit is {limit}")
        start += tag_nbytes
        if len(self._buffer) < start + nbytes:
            return None
        self._offset = start + nbytes
        return self._buffer[start : self._offset]

    def _next_message(self) -> list[Event] | None:
        payload = self._next_payload(TAG_NBYTES, MAX_FRAME_NBYTES)
        if payload is None:
            return None
        start = self._offset - len(payload) - TAG_NBYTES
        if not hmac.compare_digest(self._inward.tag(payload), self._buffer[start : start + TAG_NBYTES]):
            raise AuthenticationError(detail="a frame was forged, damaged, repeated or out of order")
        message = decode(payload)
        self._blob_left = getattr(message, "blob_nbytes", 0)
        if self._blob_left:
            if self.purpose != "data":
                raise ProtocolError(detail="a blob on a control connection")
            self._move(Move.BEGIN_BLOB)
        return [message]

    def _receive_challenge(self, payload: bytes) -> list[Event]:
        if len(payload) != _CHALLENGE.size or not payload.startswith(MAGIC):
            raise ProtocolError(detail="the peer is not a raycollect endpoint")
        _, version, nonce = _CHALLENGE.unpack(payload)
        if version != VERSION:
            raise ProtocolError(detail=f"{OTHER_VERSION} {version} of the protocol, this end {VERSION}")
        self._nonces = nonce + self._nonce
        self._move(Move.RECEIVE_CHALLENGE)
        return [Reply(_framed(self._nonce + self._proof("client") + self._claim))]

    def _receive_proof(self, payload: bytes) -> list[Event]:
        split = NONCE_NBYTES + PROOF_NBYTES
        self._nonces = self._nonce + payload[:NONCE_NBYTES]
        self._claim = payload[split:]
        if len(payload) <= split or not hmac.compare_digest(self._proof("client"), payload[NONCE_NBYTES:split]):
            self.farewell = _framed(REFUSAL)
            raise AuthenticationError(detail="the client does not hold the key")
        self.purpose, self._hello = _read_claim(self._claim)
        return self._open(Move.RECEIVE_PROOF, Reply(_framed(self._proof("server"))))

    def _receive_confirmation(self, payload: bytes) -> list[Event]:
        if payload == REFUSAL:
            raise AuthenticationError(detail="the server refused the key")
        if not hmac.compare_digest(self._proof("server"), payload):
            raise AuthenticationError(detail="the server does not hold the key")
        return self._open(Move.RECEIVE_CONFIRMATION)

    def _open(self, move: Move, *replies: Reply) -> list[Event]:
        self._move(move)
        keys = {role: self._hmac(f"session key of the {role}") for role in ROLES}
        self._outward = _Seal(keys.pop(self._role))
        self._inward = _Seal(keys.popitem()[1])
        return [*replies, Opened(self.purpose, self._hello)]

    def _proof(self, role: str) -> bytes:
        return self._hmac(f"proof of the {role}")

    def _hmac(self, label: str) -> bytes:
        # The label ends with a zero byte and the nonces have a fixed size, so no two inputs read the same.
        return hmac.digest(self._secret, f"raycollect {label}\0".encode() + self._nonces + self._claim, "sha256")


_HANDSHAKE: dict[ConnectionState, Callable[[Connection, bytes], list[Event]]] = {
    ConnectionState.CALLING: Connection._receive_challenge,
    ConnectionState.CHALLENGING: Connection._receive_proof,
    ConnectionState.PROVING: Connection._receive_confirmation,
}


def _framed(payload: bytes) -> bytes:
    return _LENGTH.pack(len(payload)) + payload


def _claim(purpose: str, hello: dict[str, Any]) -> bytes:
    name = purpose.encode()
    return bytes([len(name)]) + name + _HELLOS.encode(hello)


def _read_claim(claim: bytes) -> tuple[str, dict[str, Any]]:
    name, hello = claim[1 : 1 + claim[0]], claim[1 + claim[0] :]
    purpose = {valid.encode(): valid for valid in PURPOSES}.get(name)
    if purpose is None:
        raise ProtocolError(detail=f"unknown purpose {name[:20]!r}")
    return purpose, _HELLOS.decode(hello)
