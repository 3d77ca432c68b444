"""Messages from a controller to a participant."""

from __future__ import annotations

from raycollect.channel.messages.base import Message
from raycollect.core.model import GroupSpec, Member


class Join(Message, frozen=True, kw_only=True):
    """Become `rank` of a group; answered by `Joined` with the same `request`.

    `replaces` is the id of the group of this name in whose place it comes, as its members have changed; "": none.
    """

    group: GroupSpec
    rank: int
    members: list[Member]
    replaces: str = ""
    request: int


class Leave(Message, frozen=True, kw_only=True):
    """Give up a group and all that it holds."""

    group_id: str


class Abort(Message, frozen=True, kw_only=True):
    """Plan `seq` will not happen: wake whoever waits in it, and refuse it when it comes."""

    seq: int
    reason: str


class Arrivals(Message, frozen=True, kw_only=True):
    """The arrivals of one round of an agreement, in rank order; answers `Arrive`.

    It comes in as many parts as frames need; `more`: another one follows.
    """

    group_id: str
    seq: int
    round: int
    blobs: list[bytes]
    more: bool


class Survey(Message, frozen=True, kw_only=True):
    """Tell what your memory holds; answered by `Surveyed` with the same `request`."""

    request: int


class Look(Message, frozen=True, kw_only=True):
    """Tell what you are doing; answered by `Seen` with the same `request`."""

    request: int


class Measure(Message, frozen=True, kw_only=True):
    """Tell how far you are in plan `seq`, or in that run of a captured step; answered by `Measured`."""

    request: int
    seq: int


class Record(Message, frozen=True, kw_only=True):
    """Record a timeline, with so many entries at most; answered by `Ticked` with the same `request`."""

    request: int
    limit: int


class Tick(Message, frozen=True, kw_only=True):
    """Tell what your clock shows; answered by `Ticked` with the same `request`."""

    request: int


class Collect(Message, frozen=True, kw_only=True):
    """Tell what you have recorded; answered by `Collected` with the same `request`. `ends`: and record no more."""

    request: int
    ends: bool


class Order(Message, frozen=True, kw_only=True):
    """Run your half of a plan: what `planner.encode_order` made, where it does not come as an actor task.

    `in_order`: as if it did, behind the task `after` and all before it (empty: there are none). Else when its operands
    are there.
    """

    payload: bytes
    in_order: bool
    after: bytes


class Unused(Message, frozen=True, kw_only=True):
    """Nobody holds the values of these keys any more, whose tokens came from this controller."""

    keys: list[bytes]


class Run(Message, frozen=True, kw_only=True):
    """Do run `seq` of a capture, with these arguments, after plan `predecessor`; answered by `Ran` or `Done`.

    `after` is the task of the method call behind which it comes; empty: none; `UNKNOWN_TASK`: an actor task tells when
    it may begin. On the controller's own host runs come by the doorbell, where their arguments fit.
    """

    capture: bytes
    seq: int
    predecessor: int
    payload: bytes
    after: bytes


class Forget(Message, frozen=True, kw_only=True):
    """A capture is closed: let go of all that it holds."""

    capture: bytes


class Bye(Message, frozen=True, kw_only=True):
    """The controller ends the lease."""
