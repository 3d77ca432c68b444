"""Messages between the members of a group and its coordinator, for the members' own calls."""

from __future__ import annotations

from raycollect.channel.messages.base import Error, Message


class Meet(Message, frozen=True, kw_only=True):
    """A member waits at `place` with what it brings; answered by `Met` or `Missed` with the same `call`."""

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
    """All members of the communicator are there; what they brought, in rank order."""

    group_id: str
    communicator: str
    call: int
    blobs: list[bytes]


class Missed(Message, frozen=True, kw_only=True):
    """The meeting is off; the ranks in `missing` had not come to it."""

    group_id: str
    communicator: str
    call: int
    missing: list[int]


class Drop(Message, frozen=True, kw_only=True):
    """A member has given up one generation of a communicator, since its launch `seq` failed with `error`."""

    group_id: str
    communicator: str
    generation: str
    seq: int
    rank: int
    error: Error


class Publish(Message, frozen=True, kw_only=True):
    """A value of the rendezvous of one generation of a communicator."""

    group_id: str
    communicator: str
    generation: str
    name: str
    value: bytes


class Ask(Message, frozen=True, kw_only=True):
    """A member asks some ranks of a communicator how far they have come, and what they are doing."""

    group_id: str
    communicator: str
    ranks: list[int]


class Answer(Message, frozen=True, kw_only=True):
    """Answers `Ask`, to all ranks of the communicator: where the rank stands (`Standing`), and what runs (`Doing`)."""

    group_id: str
    communicator: str
    rank: int
    place: str
    seq: int
    doing: str
    stack: list[str]


class Depart(Message, frozen=True, kw_only=True):
    """A member has destroyed the group on its side."""

    group_id: str


class Gone(Message, frozen=True, kw_only=True):
    """A member will not take part any more: its process has ended, or it has departed."""

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


class Deny(Message, frozen=True, kw_only=True):
    """A call on a communicator can't come about: those it waits for wait for the caller."""

    group_id: str
    communicator: str
    call: int
    error: Error
