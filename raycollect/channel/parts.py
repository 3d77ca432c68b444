"""Descriptions that are longer than a frame: `Fetched` in parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from msgspec.structs import replace

from raycollect.channel.messages import Fetched, Message
from raycollect.errors import ProtocolError

PART_NBYTES = 512 << 10
"""The most bytes of a description that one frame carries."""

MOST_NBYTES = 256 << 20
"""The longest description of a value: that of some millions of tensors."""


def parts_of(message: Message) -> Iterator[Message]:
    """The messages that carry a message: the blob, if there is one, follows the last.

    Raises:
        ProtocolError: The description is longer than `MOST_NBYTES`.
    """
    if isinstance(message, Fetched):
        found = message.found
        if len(found) > MOST_NBYTES:
            raise ProtocolError(detail=f"a description of {len(found)} bytes; the limit is {MOST_NBYTES}")
        last = max(len(found) - 1, 0) // PART_NBYTES * PART_NBYTES
        for at in range(0, last, PART_NBYTES):
            yield Fetched(found=found[at : at + PART_NBYTES], more=True)
        message = replace(message, found=found[last:])
    yield message


def joined(first: Message, receive: Callable[[], Message]) -> Message:
    """The inverse of `parts_of`; `receive` returns the next message.

    Raises:
        ProtocolError: Another message comes between the parts, or they are longer than `MOST_NBYTES` together.
    """
    if not isinstance(first, Fetched) or not first.more:
        return first
    whole, part = bytearray(first.found), first
    while part.more:
        following = receive()
        if not isinstance(following, Fetched):
            raise ProtocolError(detail=f"{type(following).__name__} between the parts of a description")
        part = following
        whole += part.found
        if len(whole) > MOST_NBYTES:
            raise ProtocolError(detail=f"a description of more than {MOST_NBYTES} bytes")
    return replace(part, found=bytes(whole))
