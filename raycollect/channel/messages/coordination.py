"""Messages between the members of a group and its coordinator, for the members' own calls."""

from __future__ import annotations

from raycollect.channel.messages.base import Error, Message


class Meet(Message, frozen=True, kw_only=True):
    """A member waits at `place` with its `blob`; answered by `Met` with the same `call`."""

    group_id: str
    communicator: str
    place: str
    call: int
    blob: bytes


class Withdraw(Message, frozen=True, kw_only=True):
    """A member stops waiting; with `timed_out`, this ends the meeting for all members that wait at its place."""

    group_id: str
    communicator: str
    call: int
    timed_out: bool


class Met(Message, frozen=True, kw_only=True):
    """Answers `Meet`, and ends it: all members arrived, or some were missing, or the call is impossible.

    `call` is that of `Meet`; with an `error` it is the number of the member's call, or 0 for the current call.
    """

    group_id: str
    communicator: str
    call: int
    blobs: list[bytes]  # the blobs of all members, in rank order; empty: the meeting failed
    missing: list[int]  # the ranks that had not arrived
    error: Error | None  # the error for the call to raise


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
    """A member asks some ranks of a communicator for their position and activity."""

    group_id: str
    communicator: str
    ranks: list[int]


class Answer(Message, frozen=True, kw_only=True):
    """Answers `Ask`, to all ranks of the communicator: the rank's position (`RankPosition`) and activity (`Doing`)."""

    group_id: str
    communicator: str
    rank: int
    place: str
    seq: int
    doing: str
    stack: list[str]


class Gone(Message, frozen=True, kw_only=True):
    """A member no longer takes part: its process has ended, or it has destroyed the group on its side.

    A member that destroys the group sends it, and a controller sends it back as an acknowledgement.
    """

    group_id: str
    rank: int
    died: bool
    detail: str


class Stuck(Message, frozen=True, kw_only=True):
    """A member waits for long: in a call on a communicator, in plan `seq` (no communicator), or no longer (neither).

    `begun` is the latest plan that it has begun; `ranks` are all ranks of the call. For a plan group and ranks are
    empty: the controller knows them. `is_long`: this is the second report.
    """

    group_id: str
    communicator: str
    call: int
    seq: int
    op: str
    ranks: list[int]
    begun: int
    is_long: bool
