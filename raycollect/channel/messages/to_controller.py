"""Messages from a participant to its controller."""

from __future__ import annotations

from msgspec import field

from raycollect.channel.messages.base import Error, Message
from raycollect.core.codec import Wire


class Welcome(Message, frozen=True, kw_only=True):
    """The connection is accepted: the lease is granted, or the client is a member of the group with this id.

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
    """Answers a request that failed, with the cause."""

    request: int
    detail: str


class Broken(Message, frozen=True, kw_only=True):
    """This end failed, so the state of the connection is unknown, and it ends. The last message of either end."""

    detail: str


class Arrive(Message, frozen=True, kw_only=True):
    """A rank arrives in a round of the agreement of launch `seq`, with its `blob`, and waits for all of `ranks`.

    Without a group the agreement is that of a whole plan, and ranks are indices of its participants.
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
    """Plan `seq` follows a call whose end this participant can't see: an actor task has to report it."""

    seq: int


class Keeps(Message, frozen=True, kw_only=True):
    """A method of this participant returns tensors that stay here: its calls need tokens (P5)."""

    method: str


class Done(Message, frozen=True, kw_only=True):
    """This participant has ended plan `seq`; `ranks` are the indices of all participants known to have run all of it.

    `story` is the tail of its recorder if `error` is set.
    """

    seq: int
    ranks: list[int]
    error: Error | None = None
    story: list[str]


class Ran(Message, frozen=True, kw_only=True):
    """This participant has ended run `seq` of a capture, with these results; failures are reported by `Done`."""

    seq: int
    payload: bytes


class StoreStatistics(Wire, frozen=True, kw_only=True):
    """The numbers of keys with tensors, of half-written memory ranges, and of keys freed so far."""

    held: int
    dirty: int
    freed: int


class ArenaStatistics(Wire, frozen=True, kw_only=True):
    """The state of an arena, in bytes except for `blocks`.

    Attributes:
        limit: The most that it may hold, also before the first tensor creates it; 0: it is disabled or not available.
        in_use: The bytes of tensors.
        backed: The bytes with memory: those of tensors, and those reserved for later ones.
        blocks: The number of allocations.
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
    """Answers `Look`: the activity (`stacks.Doing`), running plans, the last ended plan, the tail of the recorder.

    `steps` describes the position of each plan in `running`; `checks` are the launches in whose agreements the
    participant arrived last, `checks_ms` the milliseconds since then; `cut` is `sockets.cut_links`.
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
    """Answers `Measure`: whether the plan has begun and has ended, and the fields of `progress.BytesDone`."""

    request: int
    has_begun: bool
    has_ended: bool
    done: int
    total: int
    lent: int


class Ticked(Message, frozen=True, kw_only=True):
    """Answers `Record` and `Tick`: the time of `time.monotonic`, and the name of that clock.

    `refusal`: the reason if nothing is recorded for this controller.
    """

    request: int
    at_s: float
    clock: str
    refusal: str


class Collected(Message, frozen=True, kw_only=True):
    """Answers `Collect`: the result of `observe.trace.encode_recorded`, or empty without records.

    It is sent in as many parts as frames need; `more`: another part follows.
    """

    request: int
    payload: bytes
    more: bool
