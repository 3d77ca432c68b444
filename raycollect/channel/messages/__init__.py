"""The messages of a channel: one frozen class per message, and the table of them.

A message on the wire is a msgpack map of its fields plus ``"t"``, its name. To add one, decorate a class with
`codec.message` and export it here; the tests take it from `MESSAGES`. `Broken` may come from either end; `Drop` and
`Publish` go from a member to the coordinator, and from there to the other members.

`seq` is a plan's number in its controller's order; in `Arrive` and `Arrivals` it is that of one launch. `error` is what
`raycollect.errors.to_wire` made. The coordinator of a group is its controller, or rank 0 where the members formed the
group themselves (`group.coordinator`). A `lane` is one communicator: that of all ranks, that of the driver's
plans, or that of one (sender, receiver).
"""

from __future__ import annotations

from raycollect.channel.messages.codec import MESSAGES, Message, decode, encode
from raycollect.channel.messages.coordination import (
    Deny,
    Depart,
    Drop,
    Gone,
    Meet,
    Met,
    Missed,
    Publish,
    Stuck,
    Withdraw,
)
from raycollect.channel.messages.data import Copied, Failed, Fetch, Fetched, Free, Freed
from raycollect.channel.messages.to_controller import (
    Arrive,
    Behind,
    Broken,
    Collected,
    Done,
    Joined,
    Keeps,
    Measured,
    Ran,
    Ready,
    Refused,
    Seen,
    Surveyed,
    Ticked,
    Unable,
    Waiting,
    Welcome,
)
from raycollect.channel.messages.to_participant import (
    Abort,
    Arrivals,
    Bye,
    Collect,
    Forget,
    Go,
    Join,
    Leave,
    Look,
    Measure,
    Order,
    Record,
    Run,
    Survey,
    Tick,
    Unused,
)

__all__ = [
    "Abort",
    "Arrivals",
    "Arrive",
    "Behind",
    "Broken",
    "Bye",
    "Collect",
    "Collected",
    "Copied",
    "Deny",
    "Depart",
    "Done",
    "Drop",
    "Failed",
    "Fetch",
    "Fetched",
    "Forget",
    "Free",
    "Freed",
    "Go",
    "Gone",
    "Join",
    "Joined",
    "Keeps",
    "Leave",
    "Look",
    "MESSAGES",
    "Measure",
    "Measured",
    "Meet",
    "Message",
    "Met",
    "Missed",
    "Order",
    "Publish",
    "Ran",
    "Ready",
    "Record",
    "Refused",
    "Run",
    "Seen",
    "Stuck",
    "Survey",
    "Surveyed",
    "Tick",
    "Ticked",
    "Unable",
    "Unused",
    "Waiting",
    "Welcome",
    "Withdraw",
    "decode",
    "encode",
]
