"""The messages of a channel: one frozen class per message, and the table of them.

A message on the wire is a msgpack map of its fields plus ``"t"``, its name. To add one, decorate a class with
`codec.message`: it is exported here, and the tests take it from `MESSAGES`. `Broken` may come from either end; `Drop`,
`Publish`, `Ask` and `Answer` go from a member to the coordinator, and from there to other members.

`seq` is a plan's number in its controller's order; in `Arrive` and `Arrivals` it is that of one launch. `error` is what
`raycollect.errors.to_wire` made. The coordinator of a group is its controller, or rank 0 where the members formed the
group themselves (`group.coordinator`). The field `communicator` is a communicator's name: ``"all"``, ``"plans"``, or
``"s>d"`` for what rank s sends to rank d.
"""

from __future__ import annotations

from raycollect.channel.messages.codec import MESSAGES as MESSAGES
from raycollect.channel.messages.codec import Message as Message
from raycollect.channel.messages.codec import decode as decode
from raycollect.channel.messages.codec import encode as encode
from raycollect.channel.messages.coordination import *  # noqa: F403
from raycollect.channel.messages.data import *  # noqa: F403
from raycollect.channel.messages.to_controller import *  # noqa: F403
from raycollect.channel.messages.to_participant import *  # noqa: F403
