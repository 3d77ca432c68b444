"""Messages of data connections: a client asks for values, and a server answers."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from raycollect.channel.messages.base import Error, Message


class Fetch(Message, frozen=True, kw_only=True):
    """Asks for the value under `key`, once no plan writes it; answered by `Fetched` or `Failed`.

    `domain` names those processes whose memory the client can read; the server may then lend its own: shared memory, or
    with `reads_processes` any.
    """

    reads_processes: bool = False
    domain: str = ""
    key: bytes


class Read(Message, frozen=True, kw_only=True):
    """Asks for boxes of the tensors under `key`; answered by `Fetched`, boxes in place of tensors, or `Failed`.

    A box is the place of its tensor, that of its first element there, and its size, each but the first per dimension.
    """

    boxes: list[tuple[int, tuple[int, ...], tuple[int, ...]]]
    domain: str = ""
    key: bytes


MOST_DESCRIBED_NBYTES = 64 << 20
"""The longest description of a value, in bytes."""


class Fetched(Message, frozen=True, kw_only=True):
    """Describes the value, as msgpack in `found`; `blob_nbytes` bytes follow the frame.

    These are its bytes, after the description where that is too long for a frame: then `found` is empty, and the
    description takes `described_nbytes`. What is lent instead of sent is described too, and `Copied` is due.
    """

    blob_nbytes: Annotated[int, Meta(ge=0)] = 0
    described_nbytes: Annotated[int, Meta(ge=0, le=MOST_DESCRIBED_NBYTES)] = 0
    found: bytes


class Copied(Message, frozen=True, kw_only=True):
    """Says that the client has read what it was lent; has no answer."""


class Free(Message, frozen=True, kw_only=True):
    """Asks to drop values; answered by `Freed`."""

    keys: list[bytes]


class Freed(Message, frozen=True, kw_only=True):
    """The number of keys that were held."""

    count: int


class Failed(Message, frozen=True, kw_only=True):
    """The request could not be served."""

    error: Error
