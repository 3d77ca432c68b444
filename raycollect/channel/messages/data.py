"""Messages of data connections: a client asks for values, and a server answers."""

from __future__ import annotations

from typing import Any

from raycollect.channel.messages.codec import Error, Message, message


@message
class Fetch(Message):
    """Asks for the value under `key`, once no plan writes it; answered by `Fetched` or `Failed`.

    `domain` names those processes whose memory the client can read; the server may then lend its own.
    """

    key: bytes
    domain: str = ""


@message
class Read(Message):
    """Asks for boxes of the tensors under `key`; answered by `Fetched`, boxes in place of tensors, or `Failed`.

    A box is the place of its tensor, that of its first element there, and its size, each but the first per dimension.
    """

    key: bytes
    boxes: list[Any]
    domain: str = ""


@message
class Fetched(Message):
    """Describes the value, as msgpack in `found`; its bytes, `blob_nbytes` of them, follow the frame.

    A long description comes in parts (`channel.parts`); `more`: another part follows. What is lent instead of sent is
    described there too, and `Copied` is due.
    """

    found: bytes
    more: bool = False
    blob_nbytes: int = 0

    def __post_init__(self) -> None:
        if self.blob_nbytes < 0:
            raise ValueError(f"a blob of {self.blob_nbytes} bytes")


@message
class Copied(Message):
    """Says that the client has read what it was lent; has no answer."""


@message
class Free(Message):
    """Asks to drop values; answered by `Freed`."""

    keys: list[bytes]


@message
class Freed(Message):
    """The number of keys that were held."""

    count: int


@message
class Failed(Message):
    """The request could not be served."""

    error: Error
