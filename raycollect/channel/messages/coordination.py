"""Messages between the members of a group and its coordinator, for the members' own calls."""

from __future__ import annotations

from raycollect.channel.messages.base import Error, Message


class Meet(Message, frozen=True, kw_only=True):
    """A member waits at `place` with what it brings; answered by `Met` with the same `call`."""

    group_id: str
    communicator: str
    place: str
    call: int
    blob: bytes


class Withdraw(Message, frozen=True, kw_only=True):
    """A member gives up waiting; `timed_out`: and so ends the meeting for all who wait at its place."""

    group_id: str
    communicator: str
    call: int
    timed_out: bool


class Met(Message, frozen=True, kw_only=True):
    """Answers `Meet`, and ends it: all members were there, or some were missing, or the call can't come about.

    `call` is that of `Meet`; with an `error` it is the number of the member's call, or 0 for whichever is under way.
    """

    group_id: str
    communicator: str
    call: int
    blobs: list[bytes]  # what all brought, in rank order; empty: the meeting is off
    missing: list[int]  # the ranks that had not come to it
    error: Error | None  # what the call has to raise


class Drop(Message, frozen=True, kw_only=True):
    """A member is out of step in one epoch of a communicator, since its launch `seq` failed with `error`."""

    group_id: str
    communicator: str
    epoch: str
    seq: int
    rank: int
    error: Error


class Publish(Message, frozen=True, kw_only=True):
    """A value of the rendezvous of one epoch of a communicator."""

    group_id: str
    communicator: str
    epoch: str
    name: str
    value: bytes


class Ask(Message, frozen=True, kw_only=True):
    """A member asks some ranks of a communicator how far they have come, and what they are doing."""

    group_id: str
    communicator: str
    ranks: list[int]


class Answer(Message, frozen=True, kw_only=True):
    """Answers `Ask`, to all ranks of the communicator: how far the rank is (`Position`), and what runs (`Doing`)."""

    group_id: str
    communicator: str
    rank: int
    place: str
    seq: int
    doing: str
    stack: list[str]


class Gone(Message, frozen=True, kw_only=True):
    """A member will not take part any more: its process has ended, or it has destroyed the group on its side.

    A member that destroys it says so itself, and gets its message back from a controller once that is known there.
    """

    group_id: str
    rank: int
    died: bool
    detail: str


class Stuck(Message, frozen=True, kw_only=True):
    """A member has waited for long: in a call on a communicator, in plan `seq` (no communicator), or no more (neither).

    `begun` is the latest plan that it has begun; `ranks` are all that take part in what it waits in. Of a plan the
    participant names no group, and no ranks: the controller knows them. `is_long`: it tells so for the second time.
    """

    group_id: str
    communicator: str
    call: int
    seq: int
    op: str
    ranks: list[int]
    begun: int
    is_long: bool
