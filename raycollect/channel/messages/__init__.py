"""The messages of a channel: one frozen class per message, and the table of them.

A message on the wire is an array in msgpack's format: its name, and its fields in order. To add one, derive a class
from `Message`: it is exported here, and the tests find it in `MESSAGES`. Either end sends `Broken`; `Drop`, `Publish`,
`Ask`, `Answer` and `Gone` are sent from a member to the coordinator, and from there to other members.

`seq` is a plan's number in its controller's order; in `Arrive` and `Arrivals` it is that of one launch. `error` is the
result of `raycollect.errors.to_wire`. The coordinator of a group is its controller, or rank 0 if the members formed the
group themselves (`group.coordinator`). The field `communicator` is a communicator's name: ``"all"``, ``"plans"``, or
``"s>d"`` for sends from rank s to rank d.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Union

from raycollect.channel.messages.base import Message as Message
from raycollect.channel.messages.coordination import *  # noqa: F403
from raycollect.channel.messages.data import *  # noqa: F403
from raycollect.channel.messages.to_controller import *  # noqa: F403
from raycollect.channel.messages.to_participant import *  # noqa: F403
from raycollect.core.codec import Codec

MESSAGES: dict[str, type[Message]] = {cls.__name__: cls for cls in Message.__subclasses__()}
"""Name on the wire -> class."""

_CODEC = Codec[Message](Union[tuple(MESSAGES.values())], "message")  # noqa: UP007 - built from a table
encode: Callable[[Message], bytes] = _CODEC.encode
decode: Callable[[bytes | bytearray], Message] = _CODEC.decode
