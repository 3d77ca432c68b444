"""Messages from a controller to a participant."""

from __future__ import annotations

from raycollect.channel.messages.base import Message
from raycollect.core.model import GroupSpec, Member


class Join(Message, frozen=True, kw_only=True):
    """Become `rank` of a group; answered by `Joined` with the same `request`.

    `replaces` is the id of the group of this name that it replaces, as its members have changed; "": none.
    """

    group: GroupSpec
    rank: int
    members: list[Member]
    replaces: str = ""
    request: int


class Leave(Message, frozen=True, kw_only=True):
    """Leave a group and release its resources."""

    group_id: str


class Abort(Message, frozen=True, kw_only=True):
    """Plan `seq` is aborted: wake threads that wait in it, and refuse it when it arrives; answered by `Done`.

    Without a reason it goes on, and is only answered: all participants have committed it, and one of them failed.
    """

    seq: int
    reason: str


class Arrivals(Message, frozen=True, kw_only=True):
    """The arrivals of one round of an agreement, in rank order; answers `Arrive`.

    It is sent in as many parts as frames need; `more`: another part follows.
    """

    group_id: str
    seq: int
    round: int
    blobs: list[bytes]
    more: bool


class Survey(Message, frozen=True, kw_only=True):
    """Report the content of your memory; answered by `Surveyed` with the same `request`."""

    request: int


class Look(Message, frozen=True, kw_only=True):
    """Report your activity; answered by `Seen` with the same `request`."""

    request: int


class Measure(Message, frozen=True, kw_only=True):
    """Report the progress of plan `seq`, or of that run of a captured step; answered by `Measured`."""

    request: int
    seq: int


class Record(Message, frozen=True, kw_only=True):
    """Record a timeline of at most `limit` entries; answered by `Ticked` with the same `request`."""

    request: int
    limit: int


class Tick(Message, frozen=True, kw_only=True):
    """Report the time of your clock; answered by `Ticked` with the same `request`."""

    request: int


class Collect(Message, frozen=True, kw_only=True):
    """Send your records; answered by `Collected` with the same `request`.

    `ends`: stop recording. `after`: only entries with a greater number; -1: all.
    """

    request: int
    ends: bool
    after: int


class Order(Message, frozen=True, kw_only=True):
    """Run your part of a plan, encoded by `planner.encode_order`, which is not sent as an actor task.

    `in_order`: run it in the order of actor tasks, after the task `after` and all before it (empty: none). Else run it
    when its operands are available.
    """

    payload: bytes
    in_order: bool
    after: bytes


class Unused(Message, frozen=True, kw_only=True):
    """No reference is left to the values of these keys, whose tokens are those of this controller."""

    keys: list[bytes]


class BeginRun(Message, frozen=True, kw_only=True):
    """Do run `seq` of a capture, with these arguments, after plan `predecessor`; answered by `Ran` or `Done`.

    `after` is the task of the preceding method call; empty: none; `UNKNOWN_TASK`: an actor task reports when the run
    may begin. On the controller's own host runs are sent by the doorbell, if their arguments fit.
    """

    capture: bytes
    seq: int
    predecessor: int
    payload: bytes
    after: bytes


class Forget(Message, frozen=True, kw_only=True):
    """A capture is closed: release its resources."""

    capture: bytes


class Bye(Message, frozen=True, kw_only=True):
    """The controller ends the lease."""
