"""What the two ends of a channel can say: one frozen class per message, and the table of them.

A message on the wire is a msgpack map of its fields plus ``"t"``, its name. To add one, declare a dataclass with
`@_message`; its field annotations are its schema, and the tests pick it up from `MESSAGES`.

==========  ===============================================================
control     controller -> participant: Join Leave Abort Arrivals Stored Survey Look Order Go Run Forget Bye
            Record Tick Collect Measure
control     participant -> controller: Welcome Refused Joined Arrive Waiting Ready Store Done Ran Surveyed Seen
            Ticked Collected Measured
control     member -> hub: Meet Withdraw Depart Stuck; hub -> member: Met Missed Gone Deny
control     member -> hub -> other members: Drop Publish
data        client -> server: Fetch Copied Free; server -> client: Fetched Freed Failed
==========  ===============================================================

The hub of a group is its controller, or rank 0 where the members made the group themselves (`raycollect.gate`).

`seq` is a plan's number in its controller's one order, in `Arrive` and `Arrivals` that of one of its launches; `error`
what `raycollect.errors.to_wire` made.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache
from typing import Annotated, Any, TypeVar

from raycollect import errors
from raycollect.channel.packing import pack, unpack
from raycollect.errors import ProtocolError, RankReport, RaycollectError, Violation

__all__ = [
    "MESSAGES",
    "Abort",
    "Arrivals",
    "Arrive",
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
    "Leave",
    "Look",
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
    "Store",
    "Seen",
    "Stored",
    "Stuck",
    "Survey",
    "Surveyed",
    "Tick",
    "Ticked",
    "Waiting",
    "Welcome",
    "Withdraw",
    "decode",
    "encode",
]


class Message:
    """Base of all messages."""

    __slots__ = ()


_Reader = Callable[[Any], Any]
"""Turns a value off the wire into a field's value; raises TypeError where it can't."""

_M = TypeVar("_M", bound=type[Message])

Error = Annotated[dict[str, Any], RaycollectError]
"""What `raycollect.errors.to_wire` made."""

MESSAGES: dict[str, type[Message]] = {}
"""Name on the wire -> class."""

_FIELDS: dict[type[Message], tuple[str, ...]] = {}
_READERS: dict[str, tuple[tuple[str, _Reader], ...]] = {}


def _message(cls: _M) -> _M:
    """Registers a message under its class name."""
    hints = typing.get_type_hints(cls, include_extras=True)
    names = tuple(f.name for f in fields(typing.cast(Any, cls)))
    MESSAGES[cls.__name__] = cls
    _FIELDS[cls] = names
    _READERS[cls.__name__] = tuple((name, _reader(hints[name])) for name in names)
    return cls


# ---------------------------------------------------------------------------------------------- schema


def _reader(hint: Any) -> _Reader:
    """Derives from an annotation how its values are read: once per field, when the module is imported."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return lambda value: value
    if hint == Error:
        return _read_error
    if hint in (Violation, RankReport):
        return _fields_of(hint)
    if hint is float:
        return _read_float
    if hint in (int, str, bytes, bool, types.NoneType):
        return _exactly(hint)
    if origin is list:
        return _list_of(_reader(args[0]))
    if origin is tuple and args[1:] == (Ellipsis,):
        read = _list_of(_reader(args[0]))
        return lambda value: tuple(read(value))
    if origin is dict and args == (str, Any):
        return _read_dict
    if origin in (typing.Union, types.UnionType) and len(args) == 2 and args[1] is types.NoneType:
        some = _reader(args[0])
        return lambda value: None if value is None else some(value)
    raise TypeError(f"no wire form for a field of type {hint}")


def _exactly(expected: type) -> _Reader:
    def read(value: Any) -> Any:
        if type(value) is not expected:  # not isinstance: True is no int here
            raise TypeError(f"{type(value).__name__}, expected {expected.__name__}")
        return value

    return read


def _read_float(value: Any) -> float:
    if type(value) not in (float, int):
        raise TypeError(f"{type(value).__name__}, expected float")
    return float(value)


def _read_dict(value: Any) -> dict[str, Any]:
    if type(value) is not dict or not all(type(key) is str for key in value):
        raise TypeError(f"{type(value).__name__}, expected a dict with str keys")
    return value


def _read_error(value: Any) -> dict[str, Any]:
    """Checks the fields that an error has; `from_wire` finds those that it lacks, and those that it can't have."""
    error = _read_dict(value)
    cls, values = getattr(errors, str(error.get("type")), None), error.get("fields")
    if isinstance(cls, type) and issubclass(cls, RaycollectError) and type(values) is dict:
        _read_fields(cls, values)
    return error


def _fields_of(cls: type) -> _Reader:
    def read(value: Any) -> dict[str, Any]:
        found = _read_dict(value)
        _read_fields(cls, found)
        return found

    return read


def _read_fields(cls: type, values: dict[str, Any]) -> None:
    for name, read in _readers(cls):
        if name in values:
            read(values[name])


@cache
def _readers(cls: type) -> tuple[tuple[str, _Reader], ...]:
    """How the fields of an error, or of a violation, are read."""
    hints = typing.get_type_hints(cls)
    return tuple((field.name, _reader(hints[field.name])) for field in fields(typing.cast(Any, cls)))


def _list_of(read: _Reader) -> _Reader:
    def read_list(value: Any) -> list[Any]:
        if type(value) is not list:
            raise TypeError(f"{type(value).__name__}, expected list")
        return [read(item) for item in value]

    return read_list


# ---------------------------------------------------------------------------------------------- codec


def encode(message: Message) -> bytes:
    """Packs a message.

    Raises:
        ProtocolError: A field holds what msgpack can't carry.
    """
    cls = type(message)
    return pack({"t": cls.__name__, **{name: getattr(message, name) for name in _FIELDS[cls]}})


def decode(data: bytes | bytearray) -> Message:
    """Unpacks a message; the inverse of `encode`.

    Raises:
        ProtocolError: It is no message of the table, or has other fields or other types than the table says.
    """
    values = unpack(data)
    name: Any = values.pop("t", None) if type(values) is dict else None
    readers = _READERS.get(name) if type(name) is str else None
    if readers is None:
        shown = repr(name[:80]) if type(name) is str else f"of type {type(name).__name__}"  # it may be nested deeply
        raise ProtocolError(detail=f"unknown message name {shown}")
    if len(values) != len(readers):
        raise ProtocolError(detail=f"{name} has {len(values)} fields, expected {len(readers)}")
    field = ""
    try:
        for field, read in readers:
            values[field] = read(values[field])
        return MESSAGES[name](**values)
    except KeyError:
        raise ProtocolError(detail=f"{name} lacks the field {field!r}") from None
    except (TypeError, ValueError, OverflowError) as exc:
        raise ProtocolError(detail=f"{name}.{field}: {exc}") from exc


# ---------------------------------------------------------------------------------------------- to participants


@_message
@dataclass(frozen=True, slots=True, kw_only=True)
class Join(Message):
    """Become `rank` of a group; answered by `Joined` with the same `request`."""

    request: int
    group: dict[str, Any]
    rank: int
    members: list[dict[str, Any]]


@_message
@dataclass(frozen=True, slots=True, kw_only=True)
class Leave(Message):
    """Give up a group and all that it holds."""

    group_id: str


@_message
@dataclass(frozen=True, slots=True, kw_only=True)
class Abort(Message):
    """Plan `seq` will not happen: wake whoever waits in it, and refuse it when it comes."""

    seq: int
    reason: str


@_message
@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals(Message):
    """What all gave to one round of a door, in the order of their ranks; answers `Arrive`.

    It comes in as many parts as frames need; `more`: another one follows.
    """

    group_id: str
    seq: int
    round: int
    blobs: list[bytes]
    more: bool


@_message
@dataclass(frozen=True, slots=True, kw_only=True)
class Stored(Message):
    """A value of the rendezvous store, as some member published it by `Store`."""

    group_id: str
    name: str
    value: bytes


@_message
@dataclass(frozen=True, slots=True, kw_only=True)
class Survey(Message):
    """Tell what your memory holds; answered by `Surveyed` with the same `request`."""

    request: int


@_message
@dataclass(frozen=True, slots=True, kw_only=True)
class Look(Message):
    """Tell what you are doing; answered by `Seen` with the same `request`."""

    request: int


@_message
@dataclass(frozen=True, slots=True, kw_only=True)
class Measure(Message):
    """Tell how far you are in plan `seq`, or in that run of a captured step; answered by `Measured`."""

    request: int
    seq: int


@_message
@dataclass(frozen=True, slots=True, kw_only=True)
class Record(Message):
    """Record a timeline, with so many entries at most; answered by `Ticked` with the same `request`.

    `metrics`: publish what is recorded to Ray's metrics, too.
    """

    request: int
    limit: int
    metrics: bool


@_message
@dataclass(frozen=True, slots=True, kw_only=True)
class Tick(Message):
    """Tell what your clock shows; answered by `Ticked` with the same `request`."""

    request: int


@_message
@dataclass(frozen=True, slots=True, kw_only=True)
class Collect(Message):
    """Tell what you have recorded; answered by `Collected` with the same `request`. `ends`: and record no more."""

    request: int
    ends: bool


@_message
@dataclass(frozen=True, slots=True, kw_only=True)
class Order(Message):
    """Run your half of a plan: what `planner.encode_order` made, where it does not come as an actor task.

    `together`: somebody may have to wait for an operand, or for another plan; say `Ready` when you have both, and begin
    at `Go`.
    """

    payload: bytes
    together: bool


@_message
@dataclass(frozen=True, slots=True, kw_only=True)
class Go(Message):
    """All participants have said that they are `Ready` for plan `seq`."""

    seq: int


@_message
@dataclass(frozen=True, slots=True, kw_only=True)
class Run(Message):
    """Do run `seq` of a capture, with these arguments, after plan `predecessor`; answered by `Ran` or `Done`.

    On the controller's own host runs come by the doorbell, where their arguments fit.
    """

    capture: bytes
    seq: int
    predecessor: int
    payload: bytes


@_message
@dataclass(frozen=True, slots=True, kw_only=True)
class Forget(Message):
    """A capture is closed: let go of all that it holds."""

    capture: bytes


@_message
@dataclass(frozen=True, slots=True, kw_only=True)
class Bye(Message):
    """The controller ends the lease."""


# ---------------------------------------------------------------------------------------------- to the controller


@_message
@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome(Message):
    """The lease is granted; `participant` says who answers."""

    participant: dict[str, Any]


@_message
@dataclass(frozen=True, slots=True, kw_only=True)
class Refused(Message):
    """The lease is not granted."""

    error: Error


@_message
@dataclass(frozen=True, slots=True, kw_only=True)
class Joined(Message):
    """Answers `Join`."""

    request: int
    error: Error | None = None


@_message
@dataclass(frozen=True, slots=True, kw_only=True)
class Arrive(Message):
    """A rank is at the door of launch `seq`, with what it brings to this round; it waits for all of `ranks`.

    Without a group the door is that of a whole plan, and ranks are places among its participants.
    """

    group_id: str
    seq: int
    round: int
    ranks: list[int]
    rank: int
    blob: bytes


@_message
@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting(Message):
    """A participant has reached plan `seq`, and waits for the tensor under `key`."""

    seq: int
    key: bytes


@_message
@dataclass(frozen=True, slots=True, kw_only=True)
class Ready(Message):
    """A participant has all that it needs for plan `seq`, and waits for `Go`; `late`: it has waited for too long."""

    seq: int
    late: bool


@_message
@dataclass(frozen=True, slots=True, kw_only=True)
class Store(Message):
    """Publishes a value to all members of a group."""

    group_id: str
    name: str
    value: bytes


@_message
@dataclass(frozen=True, slots=True, kw_only=True)
class Done(Message):
    """This participant has ended plan `seq`; `ranks` are the places of all that are known to have run all of it.

    `story` is the tail of its recorder where `error` is set.
    """

    seq: int
    ranks: list[int]
    error: Error | None = None
    story: list[str]


@_message
@dataclass(frozen=True, slots=True, kw_only=True)
class Ran(Message):
    """This participant has ended run `seq` of a capture, and this is what it gives back; `Done` tells of failures."""

    seq: int
    payload: bytes


@_message
@dataclass(frozen=True, slots=True, kw_only=True)
class Surveyed(Message):
    """Answers `Survey`: the fields of `StoreStatistics`, then those of `ArenaStatistics`."""

    request: int
    held: int
    dirty: int
    freed: int
    limit: int
    in_use: int
    backed: int
    blocks: int
    mapped: int


@_message
@dataclass(frozen=True, slots=True, kw_only=True)
class Seen(Message):
    """Answers `Look`: what runs (`stacks.Doing`), the plans under way, the last that ended, the tail of the story.

    `steps` says of each of the plans in `running` where it is, in words; `doors` are the launches to whose doors the
    participant came last, `doors_ms` for each of them how many milliseconds ago.
    """

    request: int
    doing: str
    stack: list[str]
    running: list[int]
    steps: list[str]
    doors: list[int]
    doors_ms: list[int]
    ended: int
    story: list[str]


@_message
@dataclass(frozen=True, slots=True, kw_only=True)
class Measured(Message):
    """Answers `Measure`: whether the plan has begun and has ended there, and the fields of `reach.Reach`, in bytes."""

    request: int
    has_begun: bool
    has_ended: bool
    done: int
    total: int
    lent: int


@_message
@dataclass(frozen=True, slots=True, kw_only=True)
class Ticked(Message):
    """Answers `Record` and `Tick`: what `time.monotonic` shows, and what names that clock.

    `refusal`: why nothing is recorded for this controller, in words.
    """

    request: int
    at_s: float
    clock: str
    refusal: str


@_message
@dataclass(frozen=True, slots=True, kw_only=True)
class Collected(Message):
    """Answers `Collect`: what `observe.trace.encode_recorded` made, or nothing where nothing was recorded.

    It comes in as many parts as frames need; `more`: another one follows.
    """

    request: int
    payload: bytes
    more: bool


# ---------------------------------------------------------------------------------------------- members and their hub


@_message
@dataclass(frozen=True, slots=True, kw_only=True)
class Meet(Message):
    """A member waits at `place` of a lane, with what it brings; answered by `Met` or `Missed` with the same `call`."""

    group_id: str
    lane: str
    place: str
    call: int
    blob: bytes


@_message
@dataclass(frozen=True, slots=True, kw_only=True)
class Withdraw(Message):
    """A member gives up waiting; `timed_out`: and so ends the meeting for all who wait at its place."""

    group_id: str
    lane: str
    call: int
    timed_out: bool


@_message
@dataclass(frozen=True, slots=True, kw_only=True)
class Met(Message):
    """All members of the lane are there; what they brought, in rank order."""

    group_id: str
    lane: str
    call: int
    blobs: list[bytes]


@_message
@dataclass(frozen=True, slots=True, kw_only=True)
class Missed(Message):
    """The meeting is off; the ranks in `missing` had not come to it."""

    group_id: str
    lane: str
    call: int
    missing: list[int]


@_message
@dataclass(frozen=True, slots=True, kw_only=True)
class Drop(Message):
    """A member has given up the communicator of one generation of a lane, when launch `seq` of it failed by `error`."""

    group_id: str
    lane: str
    generation: str
    seq: int
    rank: int
    error: Error


@_message
@dataclass(frozen=True, slots=True, kw_only=True)
class Publish(Message):
    """A value of the rendezvous of one generation of a lane."""

    group_id: str
    lane: str
    generation: str
    name: str
    value: bytes


@_message
@dataclass(frozen=True, slots=True, kw_only=True)
class Depart(Message):
    """A member has destroyed the group on its side."""

    group_id: str


@_message
@dataclass(frozen=True, slots=True, kw_only=True)
class Gone(Message):
    """A member will not take part any more: its process has ended, or it has departed."""

    group_id: str
    rank: int
    died: bool
    detail: str


@_message
@dataclass(frozen=True, slots=True, kw_only=True)
class Stuck(Message):
    """A member has waited for long: in a call on a lane, in plan `seq` (no lane), or no more (neither).

    `begun` is the latest plan that it has begun; `ranks` are all that take part in what it waits in. Of a plan the
    participant names no group, and no ranks: the controller knows them.
    """

    group_id: str
    lane: str
    call: int
    seq: int
    op: str
    ranks: list[int]
    begun: int


@_message
@dataclass(frozen=True, slots=True, kw_only=True)
class Deny(Message):
    """A call on a lane can't come about: those it waits for wait for the caller."""

    group_id: str
    lane: str
    call: int
    error: Error


# ---------------------------------------------------------------------------------------------- data


@_message
@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch(Message):
    """Asks for the value under `key`, waiting up to `timeout_s` for it; answered by `Fetched` or `Failed`.

    `domain` names those processes whose memory the client can read; the server may then lend its own.
    """

    key: bytes
    timeout_s: float
    domain: str = ""


@_message
@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched(Message):
    """Describes the value in `found`; its bytes, `blob_nbytes` of them, follow the frame.

    What is lent instead is described there too, and `Copied` is due.
    """

    found: dict[str, Any]
    blob_nbytes: int = 0

    def __post_init__(self) -> None:
        """Refuses a negative size."""
        if self.blob_nbytes < 0:
            raise ValueError(f"a blob of {self.blob_nbytes} bytes")


@_message
@dataclass(frozen=True, slots=True, kw_only=True)
class Copied(Message):
    """Says that the client has read what it was lent; has no answer."""


@_message
@dataclass(frozen=True, slots=True, kw_only=True)
class Free(Message):
    """Asks to drop values; answered by `Freed`."""

    keys: list[bytes]


@_message
@dataclass(frozen=True, slots=True, kw_only=True)
class Freed(Message):
    """How many of the keys were held."""

    count: int


@_message
@dataclass(frozen=True, slots=True, kw_only=True)
class Failed(Message):
    """The request could not be served."""

    error: Error
