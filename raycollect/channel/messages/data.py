"""Messages of data connections: a client asks for values, and a server answers."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from raycollect.channel.messages.base import Error, Message
from raycollect.core.codec import MOST_NBYTES


class Fetch(Message, frozen=True, kw_only=True):
    """Requests the value under `key`, when no plan writes it; answered by `Fetched` or `Failed`.

    `domain` identifies the processes whose memory the client can read; a server among them may lend its shared memory,
    and with `reads_processes` all its memory.
    """

    reads_processes: bool = False
    domain: str = ""
    key: bytes


class Read(Message, frozen=True, kw_only=True):
    """Requests boxes of the tensors under `key`; answered by `Fetched`, with boxes instead of tensors, or `Failed`.

    A box is the index of its tensor, and the position of its first element and its size per dimension. With `since`,
    the answer has the boxes' deltas from the tensors under that key, where these are smaller, and no other boxes.
    """

    boxes: list[tuple[int, tuple[int, ...], tuple[int, ...]]]
    domain: str = ""
    since: bytes = b""
    key: bytes


class Fetched(Message, frozen=True, kw_only=True):
    """Describes the value, as msgpack in `description`; `blob_nbytes` bytes follow the frame.

    These are its bytes, after the description if that is too long for a frame: then `description` is empty, and the
    description takes `described_nbytes`. The description also covers lent memory, for which `Copied` is due.
    """

    blob_nbytes: Annotated[int, Meta(ge=0)] = 0
    described_nbytes: Annotated[int, Meta(ge=0, le=MOST_NBYTES)] = 0
    description: bytes


class Copied(Message, frozen=True, kw_only=True):
    """The client has read the lent memory; not answered."""


class Free(Message, frozen=True, kw_only=True):
    """Requests to drop values; answered by `Freed`. With an `owner`, only those with tokens of this owner."""

    owner: bytes = b""
    keys: list[bytes]


class Freed(Message, frozen=True, kw_only=True):
    """The number of keys that were held."""

    count: int


class Failed(Message, frozen=True, kw_only=True):
    """The request could not be served."""

    error: Error
