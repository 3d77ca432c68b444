"""Arrivals of any length, over exchanges of short messages.

A long arrival travels as its digest first. All ranks see the same messages, so all decide alike: if each rank's message
says that it knows the arrivals of all by an earlier run, nothing else is sent; else the arrivals follow in parts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

from raycollect.core.codec import MOST_NBYTES, Codec, Wire
from raycollect.core.model import Kernel
from raycollect.core.protocols import ARRIVAL_NBYTES
from raycollect.errors import ProtocolError

_ALL_MESSAGES_NBYTES = 900 << 10  # of the messages of all ranks, which the controller sends on in one frame


def part_nbytes(ranks: int) -> int:
    """The longest message in an agreement of so many ranks."""
    return min(ARRIVAL_NBYTES, _ALL_MESSAGES_NBYTES // ranks)


def most_parts(ranks: int) -> int:
    """The most messages of a rank in a round of the agreement."""
    return 1 + -(-MOST_NBYTES // part_nbytes(ranks))


_NO_PART = b"\x00"  # not empty: an empty message is a commit
_MARK = b"\xc0"  # the first byte of a digest's message; no other arrival begins with it


class _Digest(Wire, frozen=True, kw_only=True):
    """The first message of a long arrival, or of any arrival among known long ones."""

    nbytes: int
    digest: bytes
    earlier: bytes  # the digest of the arrivals of all ranks in an earlier run; empty: there was none


_DIGESTS = Codec[_Digest](_Digest, "digest of an arrival")

Agree = Callable[[bytes, Kernel | None], Sequence[bytes]]
"""Exchanges one message, as `Launches.agree`."""


def exchange(agree: Agree, arrival: bytes, kernel: Kernel | None = None, *, ranks: int) -> Sequence[bytes]:
    """Exchanges the arrivals of so many ranks without an earlier run; returns those of all.

    Raises:
        RefusedError: The kernel can't be prepared. Nothing was sent.
        ProtocolError: Another rank's messages are malformed.
    """
    if len(arrival) <= part_nbytes(ranks):
        return whole(agree, arrival, agree(arrival, kernel))
    return whole(agree, arrival, agree(_message(arrival, b""), None))


def whole(agree: Agree, arrival: bytes, messages: Sequence[bytes]) -> Sequence[bytes]:
    """Returns the arrivals of all ranks from their first messages; exchanges the parts of long ones.

    Raises:
        ProtocolError: Another rank's messages are malformed.
    """
    digests = [_DIGESTS.decode(bytes(message[1:])) if message[:1] == _MARK else None for message in messages]
    most = max((digest.nbytes for digest in digests if digest is not None), default=0)
    if not most:
        return messages
    if most > MOST_NBYTES:
        raise ProtocolError(detail=f"an arrival of {most} bytes")
    parts = [bytearray() for _ in messages]
    nbytes = part_nbytes(len(messages))
    for start in range(0, most, nbytes):
        received = agree(arrival[start : start + nbytes] or _NO_PART, None)
        for digest, gathered, part in zip(digests, parts, received, strict=True):
            if digest is not None and start < digest.nbytes:
                gathered += part
    arrivals = list[bytes]()
    for digest, gathered, message in zip(digests, parts, messages, strict=True):
        arrivals.append(bytes(message if digest is None else gathered))
        if digest is not None and (len(gathered), _hashed(gathered)) != (digest.nbytes, digest.digest):
            raise ProtocolError(detail="the parts of an arrival do not fit its digest")
    return arrivals


def messages_of(arrivals: Sequence[bytes]) -> tuple[bytes, ...]:
    """Returns the ranks' first messages in a later run with the same arrivals."""
    if all(len(arrival) <= part_nbytes(len(arrivals)) for arrival in arrivals):
        return tuple(arrivals)
    earlier = _hashed(b"".join(map(_hashed, arrivals)))
    return tuple([_message(arrival, earlier) for arrival in arrivals])


def _message(arrival: bytes, earlier: bytes) -> bytes:
    return _MARK + _DIGESTS.encode(_Digest(nbytes=len(arrival), digest=_hashed(arrival), earlier=earlier))


def _hashed(data: bytes | bytearray) -> bytes:
    return hashlib.blake2b(data, digest_size=32).digest()
