"""Messages from a participant to its controller."""

from __future__ import annotations

from msgspec import field

from raycollect.channel.messages.base import Error, Message
from raycollect.core.codec import Wire


class Welcome(Message, frozen=True, kw_only=True):
    """Whoever connected is taken: the lease is granted; or it is a member of the group, whose id this is.

    `has_mailbox`: the participant takes letters from the controller's mailbox.
    """

    has_mailbox: bool = False
    group_id: str


class Refused(Message, frozen=True, kw_only=True):
    """The lease is not granted."""

    error: Error


class Joined(Message, frozen=True, kw_only=True):
    """Answers `Join`."""

    error: Error | None = None
    request: int


class Unable(Message, frozen=True, kw_only=True):
    """Answers a request that could not be done, with the cause."""

    request: int
    detail: str


class Broken(Message, frozen=True, kw_only=True):
    """This end failed, so that the state of the connection is unknown: it ends. Sent by either end, as its last."""

    detail: str


class Arrive(Message, frozen=True, kw_only=True):
    """A rank is in the check of launch `seq`, with what it brings to this round; it waits for all of `ranks`.

    Without a group the consistency check is that of a whole plan, and ranks are places among its participants.
    """

    group_id: str
    seq: int
    round: int
    ranks: list[int]
    rank: int
    blob: bytes


class Waiting(Message, frozen=True, kw_only=True):
    """A participant has reached plan `seq`, and waits for the tensor under `key`."""

    seq: int
    key: bytes


class Behind(Message, frozen=True, kw_only=True):
    """Plan `seq` is behind a call whose end this participant can't tell: an actor task has to tell it."""

    seq: int


class Keeps(Message, frozen=True, kw_only=True):
    """A method of this participant returns tensors that stay here: its calls are to bring tokens (P5)."""

    method: str


class Done(Message, frozen=True, kw_only=True):
    """This participant has ended plan `seq`; `ranks` are the places of all that are known to have run all of it.

    `story` is the tail of its recorder where `error` is set.
    """

    seq: int
    ranks: list[int]
    error: Error | None = None
    story: list[str]


class Ran(Message, frozen=True, kw_only=True):
    """This participant has ended run `seq` of a capture, and this is what it gives back; `Done` tells of failures."""

    seq: int
    payload: bytes


class StoreStatistics(Wire, frozen=True, kw_only=True):
    """How many keys hold tensors, how many memory ranges are half-written, and how many keys were freed so far."""

    held: int
    dirty: int
    freed: int


class ArenaStatistics(Wire, frozen=True, kw_only=True):
    """What an arena holds at one moment, in bytes except for `blocks`.

    Attributes:
        limit: The most it may hold; 0 where there is no arena: not needed yet, switched off, or not available.
        in_use: The bytes of tensors.
        backed: The bytes with memory: those of tensors, and those kept for the next ones.
        blocks: How many allocations there are.
        mapped: Address space for the arenas of other processes, which own the memory.
    """

    limit: int = 0
    in_use: int = 0
    backed: int = 0
    blocks: int = 0
    mapped: int


class Surveyed(Message, frozen=True, kw_only=True):
    """Answers `Survey`."""

    request: int
    store: StoreStatistics
    arena: ArenaStatistics


class Seen(Message, frozen=True, kw_only=True):
    """Answers `Look`: what runs (`stacks.Doing`), the plans under way, the last that ended, the tail of the story.

    `steps` says of each of the plans in `running` where it is, in words; `checks` are the launches to whose consistency
    checks the participant came last, `checks_ms` for each of them how many milliseconds ago; `cut` is
    `sockets.cut_links`.
    """

    doing: str
    stack: list[str] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    steps: list[str] = field(default_factory=list)
    checks: list[int] = field(default_factory=list)
    checks_ms: list[int] = field(default_factory=list)
    ended: int = 0
    story: list[str] = field(default_factory=list)
    cut: list[str] = field(default_factory=list)
    request: int


class Measured(Message, frozen=True, kw_only=True):
    """Answers `Measure`: whether the plan has begun and has ended there, and the fields of `progress.BytesDone`."""

    request: int
    has_begun: bool
    has_ended: bool
    done: int
    total: int
    lent: int


class Ticked(Message, frozen=True, kw_only=True):
    """Answers `Record` and `Tick`: what `time.monotonic` shows, and what names that clock.

    `refusal`: why nothing is recorded for this controller, in words.
    """

    request: int
    at_s: float
    clock: str
    refusal: str


class Collected(Message, frozen=True, kw_only=True):
    """Answers `Collect`: what `observe.trace.encode_recorded` made, or nothing where nothing was recorded.

    It comes in as many parts as frames need; `more`: another one follows.
    """

    request: int
    payload: bytes
    more: bool
