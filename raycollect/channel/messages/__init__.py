"""The messages of a channel: one frozen class per message, and the table of them.

A message on the wire is an array in msgpack's format: its name, and its fields in order. To add one, derive a class
from `Message`: it is exported here, and the tests take it from `MESSAGES`. `Broken` may come from either end; `Drop`,
`Publish`, `Ask` and `Answer` go from a member to the coordinator, and from there to other members.

`seq` is a plan's number in its controller's order; in `Arrive` and `Arrivals` it is that of one launch. `error` is what
`raycollect.errors.to_wire` made. The coordinator of a group is its controller, or rank 0 where the members formed the
group themselves (`group.coordinator`). The field `communicator` is a communicator's name: ``"all"``, ``"plans"``, or
``"s>d"`` for what rank s sends to rank d.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Union

import msgpack
import msgspec

from raycollect.channel.messages.base import Message as Message
from raycollect.channel.messages.coordination import *  # noqa: F403
from raycollect.channel.messages.data import *  # noqa: F403
from raycollect.channel.messages.to_controller import *  # noqa: F403
from raycollect.channel.messages.to_participant import *  # noqa: F403
from raycollect.core.codec import MALFORMED, as_builtin, refuse_extension
from raycollect.errors import ProtocolError

MESSAGES: dict[str, type[Message]] = {cls.__name__: cls for cls in Message.__subclasses__()}
"""Name on the wire -> class."""

_MOST_TOLD = 300  # how many characters of a reason an error tells

_encode: Callable[[Any], bytes] = msgspec.msgpack.Encoder(enc_hook=as_builtin).encode
_decode: Callable[[Any], Message] = msgspec.msgpack.Decoder(
    Union[tuple(MESSAGES.values())],  # noqa: UP007 - made of a table
    ext_hook=refuse_extension,
).decode


def encode(message: Message) -> bytes:
    """Packs a message.

    Raises:
        ProtocolError: A field holds what msgpack can't carry.
    """
    try:
        return _encode(message)
    except UnicodeEncodeError:  # an odd file name in somebody's traceback must not keep an error from being told
        plain = msgspec.to_builtins(message, builtin_types=(bytes,), enc_hook=as_builtin)
        data: bytes = msgpack.packb(plain, unicode_errors="backslashreplace")
        return data
    except MALFORMED as exc:
        raise ProtocolError(detail=f"{type(message).__name__} can't be packed: {str(exc)[:_MOST_TOLD]}") from exc


def decode(data: bytes | bytearray) -> Message:
    """Unpacks a message; the inverse of `encode`.

    Raises:
        ProtocolError: It is no message of the table, or has other fields or other types than the table says.
    """
    try:
        return _decode(data)
    except MALFORMED as exc:
        raise ProtocolError(detail=f"malformed message: {str(exc)[:_MOST_TOLD]}") from exc
