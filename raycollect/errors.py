"""Every error that raycollect raises, by whose fault it is and what to do now.

::

    RaycollectError
    ├── RefusedError              nothing ran, every tensor is untouched, the group works on
    │   ├── ForeignRefError           a ref that no actor method returned
    │   ├── NotAParticipantError      its actor lacks the mixin
    │   ├── NotAMemberError           its actor is outside the group
    │   ├── DuplicateActorError       two refs of one actor
    │   ├── MissingMemberError        a member without a ref
    │   ├── NotATensorError           the ref holds something else
    │   ├── MismatchError             the ranks disagree
    │   ├── ReadOnlyError             an operand may not be written
    │   ├── AliasError                operands overlap in memory
    │   ├── InvalidArgumentError      a root, a rank, a reduce op or a time limit that makes no sense
    │   ├── UnsupportedError          this backend or numpy has no meaning for it
    │   ├── TensorFreedError          used after it was freed
    │   ├── TensorLostError           the process that held it is gone
    │   ├── TensorDirtyError          a failed collective left it half-written
    │   ├── ProducerFailedError       the method that should have returned it raised
    │   └── AllocationError           no memory for an output or a staging buffer
    ├── GroupError                the group, not an operand
    │   ├── UnknownGroupError   GroupExistsError   InvalidGroupError   GroupBrokenError
    │   └── UnknownBackendError   BackendNotInstalledError   BackendUnavailableError
    ├── ControlError              who may drive whom
    │   └── ControllerConflictError   SelfDrivenError   RayClientError
    ├── FaultError                something failed while a plan was in flight
    │   ├── ParticipantDiedError   ActorGoneError   CollectiveTimeoutError
    │   ├── PlanAbortedError   DispatchError   KernelError
    │   └── MethodError               a method that a captured step calls raised
    ├── ChannelError              the control plane
    │   └── ProtocolError   AuthenticationError   ConnectionLostError
    ├── BatchError                a batch, or what one of its calls gave, was used where it can't be
    ├── CaptureError              a captured step was used where it can't be
    │   └── CaptureBrokenError        one of its runs failed: there will be no others
    ├── StoreFullError            the object store of a participant can't take more
    ├── ArenaFullError            the shared memory for tensors can't take more
    └── InternalError             our bug: please report it

Errors are values: their fields are public, the message is built from the fields, they survive pickling and they
cross the channel as plain msgpack (`to_wire`, `from_wire`).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar

__all__ = [
    "ActorGoneError",
    "AliasError",
    "AllocationError",
    "ArenaFullError",
    "AuthenticationError",
    "BackendNotInstalledError",
    "BackendUnavailableError",
    "BatchError",
    "CaptureBrokenError",
    "CaptureError",
    "ChannelError",
    "CollectiveTimeoutError",
    "ConnectionLostError",
    "ControlError",
    "ControllerConflictError",
    "DispatchError",
    "DuplicateActorError",
    "FaultError",
    "ForeignRefError",
    "GroupBrokenError",
    "GroupError",
    "GroupExistsError",
    "InternalError",
    "InvalidArgumentError",
    "InvalidGroupError",
    "KernelError",
    "MethodError",
    "MismatchError",
    "MissingMemberError",
    "NotAMemberError",
    "NotAParticipantError",
    "NotATensorError",
    "ParticipantDiedError",
    "PlanAbortedError",
    "ProducerFailedError",
    "ProtocolError",
    "RayClientError",
    "RaycollectError",
    "ReadOnlyError",
    "RefusedError",
    "SelfDrivenError",
    "StoreFullError",
    "TensorDirtyError",
    "TensorFreedError",
    "TensorLostError",
    "UnknownBackendError",
    "UnknownGroupError",
    "UnsupportedError",
    "Violation",
    "brief",
    "from_wire",
    "refusal",
    "to_wire",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """One reason why a plan was refused.

    Attributes:
        kind: A key of the table `REFUSALS`, such as ``"mismatch"``.
        rank: The rank whose operand is at fault; -1 where it is nobody's.
        field: What is wrong with it: ``"shape"``, ``"dtype"``, ``"ref"``, ...
        found: What was found.
        expected: What would have been right.
        actor: The actor of that rank, as ``Class(id)``.
        ref: The hexadecimal id of the ObjectRef.
        call: Which call of a batch or of a captured step, counted from 0; -1 where there is but one.
        is_step: Whether the call is counted among all of a captured step, those of methods too.
        value: What is at fault where it has no ref: what a call of a captured step gave.
    """

    kind: str
    rank: int
    field: str
    found: str
    expected: str = ""
    actor: str = ""
    ref: str = ""
    call: int = -1
    is_step: bool = False
    value: str = ""

    def __str__(self) -> str:
        who = f"rank {self.rank}" if self.rank >= 0 else "the call"
        if self.actor:
            who += f" ({self.actor})"
        if self.ref:
            who += f", ref {self.ref}"
        if self.value:
            who += f", {self.value}"
        if self.call >= 0:
            who = f"call {self.call} of the {'step' if self.is_step else 'batch'}, {who}"
        text = f"{who}: {self.field} is {self.found}"
        return f"{text}, expected {self.expected}" if self.expected else text


@dataclass(eq=False)
class RaycollectError(RuntimeError):
    """Base of all errors of this package; a RuntimeError, as what `ray.util.collective` raises."""

    def __str__(self) -> str:
        return _summary(type(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), {f.name: getattr(self, f.name) for f in fields(self)})


def _summary(cls: type) -> str:
    return (cls.__doc__ or cls.__name__).split("\n", 1)[0].rstrip(".")


def _rebuild(cls: type[RaycollectError], values: dict[str, Any]) -> RaycollectError:
    return cls(**values)


# ---------------------------------------------------------------------------------------------- refused


@dataclass(eq=False, kw_only=True)
class RefusedError(RaycollectError):
    """The plan was refused before anything ran; tensors are untouched and the group works on.

    Attributes:
        op: The operation asked for, such as ``"allreduce"``.
        group_name: The group it was asked of.
        violations: Every reason, not only the first.
    """

    op: str
    group_name: str
    violations: tuple[Violation, ...]
    cure: ClassVar[str] = "correct the operands and call again; no tensor was touched"

    def __str__(self) -> str:
        listed = "".join(f"\n  - {violation}" for violation in self.violations)
        where = f" on group {self.group_name!r}" if self.group_name else ""
        return f"{self.op}{where} was refused:{listed}\nWhat to do: {self.cure}."


class ForeignRefError(RefusedError):
    """A ref that was not returned by an actor method."""

    cure = (
        "pass the ObjectRef that a method of a CollectiveParticipant returned: not its value, and no ref of ray.put or "
        "of a task"
    )


class NotAParticipantError(RefusedError):
    """An actor without the mixin."""

    cure = "let the actor's class inherit raycollect.CollectiveParticipant"


class NotAMemberError(RefusedError):
    """A ref whose actor is outside the group."""

    cure = "pass refs of the group's members, or declare a group that holds this actor"


class DuplicateActorError(RefusedError):
    """Two refs of one actor where each rank has one operand."""

    cure = "pass exactly one ref per actor"


class MissingMemberError(RefusedError):
    """A member of the group without a ref."""

    cure = "pass one ref for each rank of the group, or declare a smaller group"


class NotATensorError(RefusedError):
    """A ref whose value is no tensor kept in the Python Object Store."""

    cure = (
        "give a numpy array or a torch tensor (or a list, tuple or dict of them); a ref's is returned by a method that "
        "is not marked by_value"
    )


class MismatchError(RefusedError):
    """The ranks disagree about what to do."""

    cure = "make op, reduce op, root, dtype and shape equal on all ranks; no tensor was touched"


class ReadOnlyError(RefusedError):
    """An operand that would be written is read-only."""

    cure = "return a writable array (Ray's arguments are read-only views: copy them), or pass inplace=False"


class AliasError(RefusedError):
    """Operands overlap in memory, so that the result would be undefined."""

    cure = "use separate buffers for operands that the plan writes"


class InvalidArgumentError(RefusedError, ValueError):
    """An argument that makes no sense: a root, a rank, a reduce op, a time limit; a ValueError as well."""

    cure = "correct that argument and call again; no tensor was touched"


class UnsupportedError(RefusedError):
    """Neither the backend nor numpy has a meaning for it."""

    cure = "choose another operation, reduce op, dtype, device or backend"


class TensorFreedError(RefusedError):
    """A tensor that was used after it was freed."""

    cure = "call the producing method again, or free it later"


class TensorLostError(RefusedError):
    """A tensor whose holder is gone, was restarted, or never ran the method."""

    cure = "call the producing method again"


class TensorDirtyError(RefusedError):
    """A tensor that a failed collective left half-written."""

    cure = "write it whole again (a collective that overwrites it, or raycollect.mark_written inside its actor)"


class ProducerFailedError(RefusedError):
    """The method that should have returned an operand raised; its exception is the cause of this one."""

    cure = "see the cause; the other ranks did nothing and go on"


class AllocationError(RefusedError):
    """An output or a staging buffer could not be had."""

    cure = "free memory on that participant, or use smaller tensors"


REFUSALS: dict[str, type[RefusedError]] = {
    "foreign": ForeignRefError,
    "not_participant": NotAParticipantError,
    "not_member": NotAMemberError,
    "duplicate": DuplicateActorError,
    "missing": MissingMemberError,
    "not_tensor": NotATensorError,
    "mismatch": MismatchError,
    "read_only": ReadOnlyError,
    "alias": AliasError,
    "argument": InvalidArgumentError,
    "unsupported": UnsupportedError,
    "freed": TensorFreedError,
    "lost": TensorLostError,
    "dirty": TensorDirtyError,
    "producer_failed": ProducerFailedError,
    "allocation": AllocationError,
}
"""Violation.kind -> the leaf that is raised when every violation is of that kind."""


def refusal(op: str, group_name: str, violations: tuple[Violation, ...]) -> RefusedError:
    """Builds the most specific error for a set of violations.

    Args:
        op: The operation asked for.
        group_name: The group it was asked of.
        violations: At least one.

    Returns:
        The leaf of the table `REFUSALS` when all violations are of one kind, else `RefusedError` itself.
    """
    kinds = {violation.kind for violation in violations}
    cls = REFUSALS[kinds.pop()] if len(kinds) == 1 else RefusedError
    return cls(op=op, group_name=group_name, violations=violations)


# ---------------------------------------------------------------------------------------------- group


@dataclass(eq=False, kw_only=True)
class GroupError(RaycollectError):
    """Something is wrong with the group itself.

    Attributes:
        group_name: The group's name.
        detail: What is wrong.
    """

    group_name: str
    detail: str = ""
    cure: ClassVar[str] = ""

    def __str__(self) -> str:
        text = f"group {self.group_name!r}: {self.detail or _summary(type(self))}"
        return f"{text}\nWhat to do: {self.cure}." if self.cure else text


class UnknownGroupError(GroupError):
    """No group of that name is declared in this process."""

    cure = (
        "declare_collective_group(actors, group_name=...) first; on the driver group_name may be left out, to derive a "
        "group from the refs; inside the members init_collective_group does as well"
    )


class GroupExistsError(GroupError):
    """A group of that name is declared already."""

    cure = "destroy_collective_group(name) first, or choose another name"


class InvalidGroupError(GroupError, ValueError):
    """The actors, ranks, world size or options can't form a group; a ValueError as well."""


class GroupBrokenError(GroupError):
    """A member died or a collective failed in mid-kernel, so this group can't communicate any more."""

    cure = "destroy_collective_group(name) and declare it again over living actors"


class UnknownBackendError(GroupError, ValueError):
    """No backend of that name exists; a ValueError as well."""


class BackendNotInstalledError(GroupError):
    """The library that a backend needs is not installed."""


class BackendUnavailableError(GroupError):
    """The backend can't serve these members."""


# ---------------------------------------------------------------------------------------------- control


class ControlError(RaycollectError):
    """Who may drive whom."""


@dataclass(eq=False, kw_only=True)
class ControllerConflictError(ControlError):
    """A participant is leased to another controlling process.

    Attributes:
        actor: The participant.
        holder: The process that drives it now.
    """

    actor: str
    holder: str

    def __str__(self) -> str:
        return (
            f"{self.actor} is driven by another controller: {self.holder}.\n"
            "What to do: let that process destroy its groups (or end), or drive the actor from there."
        )


@dataclass(eq=False, kw_only=True)
class SelfDrivenError(ControlError):
    """An actor asked for a plan in which it takes part itself; it would wait for itself for ever.

    Attributes:
        actor: The actor.
    """

    actor: str

    def __str__(self) -> str:
        return (
            f"{self.actor} drives a plan in which it takes part: its own method would have to end first.\n"
            "What to do: call from the driver or from another actor, or use the imperative API inside the members."
        )


class RayClientError(ControlError):
    """Ray Client (ray://) has no ObjectRef ids and no way to reach the participants."""

    def __str__(self) -> str:
        return (
            "raycollect can't work through Ray Client (ray://): the driver must be a process of the cluster.\n"
            "What to do: run the script on a cluster node (ray job submit), with ray.init(address='auto')."
        )


# ---------------------------------------------------------------------------------------------- faults


@dataclass(eq=False, kw_only=True)
class FaultError(RaycollectError):
    """Something failed while a plan was in flight.

    Attributes:
        op: The operation.
        group_name: The group.
        rank: The rank at fault; -1 where there is none.
        actor: The actor of that rank.
        detail: What happened.
        story: The tail of the participant's recorder, oldest first.
    """

    op: str = ""
    group_name: str = ""
    rank: int = -1
    actor: str = ""
    detail: str = ""
    story: tuple[str, ...] = ()
    cure: ClassVar[str] = ""

    def __str__(self) -> str:
        where = self.op or "a plan"
        if self.group_name or not self.op:
            where += f" on group {self.group_name!r}"
        who = f", rank {self.rank}" if self.rank >= 0 else ""
        who += f" ({self.actor})" if self.actor else ""
        text = f"{where}{who}: {self.detail or _summary(type(self))}"
        if self.story:
            text += "".join(f"\n  | {line}" for line in self.story)
        return f"{text}\nWhat to do: {self.cure}." if self.cure else text


class ParticipantDiedError(FaultError):
    """The process of a participant ended."""

    cure = "destroy the group and declare it again over living actors; the survivors are unharmed"


class ActorGoneError(FaultError):
    """An actor is dead already, often because its last handle was dropped."""

    cure = "keep a handle of the actor as long as its refs are used"


@dataclass(eq=False, kw_only=True)
class CollectiveTimeoutError(FaultError):
    """Not everyone came in time.

    Attributes:
        missing: The ranks that had not arrived.
        timeout_s: The limit, in seconds.
    """

    missing: tuple[int, ...] = ()
    timeout_s: float = 0.0
    cure = "see what the missing ranks are doing; raise timeout_s if they are only slow"


class PlanAbortedError(FaultError):
    """The plan was aborted because another rank or the driver failed, or it was cancelled."""


class DispatchError(FaultError):
    """The plan could not be submitted to every participant; it was aborted everywhere."""

    cure = "see the cause; no kernel ran and the group works on"


class KernelError(FaultError):
    """A communication library failed in mid-kernel; tensors that it was writing are dirty."""


@dataclass(eq=False, kw_only=True)
class MethodError(FaultError):
    """A method that a captured step calls raised, or returned what a run can't give back; `op` is its name.

    Attributes:
        call: The place of the call among all calls of the step, from 0.
        raised: The type of the exception, as ``"ValueError"``; empty: it returned what can't be given back.
        trace: The end of its traceback, as text.
    """

    call: int = -1
    raised: str = ""
    trace: str = ""
    cure = "mend the method, close the step and capture it again; on this actor collectives before the call are done"

    def __str__(self) -> str:
        who = f" of {self.actor}" if self.actor else ""
        what = f"raised {self.raised}: {self.detail}" if self.raised else f"returned {self.detail}"
        text = f"call {self.call} of the step, {self.op}{who}, {what}"
        if self.trace:
            text += "".join(f"\n  | {line}" for line in self.trace.splitlines())
        return f"{text}\nWhat to do: {self.cure if self.raised else _RETURN_PLAIN}."


_RETURN_PLAIN = (
    "let the step return plain values and arrays, read other things with an ordinary method, and capture it again"
)


# ---------------------------------------------------------------------------------------------- channel


@dataclass(eq=False, kw_only=True)
class ChannelError(RaycollectError):
    """The control plane failed.

    Attributes:
        detail: What happened.
        peer: The other end, as text.
    """

    detail: str
    peer: str = ""

    def __str__(self) -> str:
        return f"{self.peer}: {self.detail}" if self.peer else self.detail


class ProtocolError(ChannelError):
    """The peer broke the protocol's rules; the connection was closed."""


class AuthenticationError(ChannelError):
    """The peer does not hold the key; the connection was closed."""


class ConnectionLostError(ChannelError):
    """The connection ended."""


# ---------------------------------------------------------------------------------------------- others


@dataclass(eq=False, kw_only=True)
class BatchError(RaycollectError):
    """A batch, or what one of its calls gave, was used where it can't be; nothing was sent because of it.

    Attributes:
        detail: What was used, and what to do.
    """

    detail: str

    def __str__(self) -> str:
        return self.detail


@dataclass(eq=False, kw_only=True)
class CaptureError(RaycollectError):
    """A captured step, or what stands for a value in it, was used where it can't be; nothing ran because of it.

    Attributes:
        detail: What was used, and what to do.
    """

    detail: str

    def __str__(self) -> str:
        return self.detail


@dataclass(eq=False, kw_only=True)
class CaptureBrokenError(CaptureError):
    """A run of a captured step failed before: its values may be half-made, so that it does not run again.

    The error of that run is its cause.

    Attributes:
        why: How that run failed, in one line; see `brief`.
    """

    why: str = ""
    cure: ClassVar[str] = (
        "mend the cause, bring the actors to a state that you know, close the step and capture it again"
    )

    def __str__(self) -> str:
        return f"{self.detail}: {self.why}\nWhat to do: {self.cure}."


@dataclass(eq=False, kw_only=True)
class StoreFullError(RaycollectError):
    """The Python Object Store can't take more.

    Attributes:
        limit: How many entries it may hold.
    """

    limit: int

    def __str__(self) -> str:
        return (
            f"the Python Object Store holds {self.limit} tensors, its limit while this Ray can't tell when a ref is "
            "gone.\nWhat to do: raycollect.free(refs) what is no longer used."
        )


@dataclass(eq=False, kw_only=True)
class ArenaFullError(RaycollectError, MemoryError):
    """The shared memory of this process for tensors can't take more; a MemoryError as well.

    Attributes:
        nbytes: How many bytes were asked for.
        in_use: How many tensors take.
        limit: How many they may take.
        detail: What the system said, where the limit is not what was in the way.
    """

    nbytes: int
    in_use: int
    limit: int
    detail: str = ""

    def __str__(self) -> str:
        why = self.detail or f"tensors take {self.in_use} of at most {self.limit} bytes"
        return (
            f"the arena has no room for {self.nbytes} bytes in one piece: {why}.\n"
            "What to do: let go of tensors that are not used any more, raise RAYCOLLECT_ARENA_LIMIT before the process "
            "starts, or make this tensor in ordinary memory (numpy.empty)."
        )


@dataclass(eq=False, kw_only=True)
class InternalError(RaycollectError):
    """A bug of raycollect.

    Attributes:
        detail: What was found.
    """

    detail: str

    def __str__(self) -> str:
        return f"{self.detail} (this is a bug of raycollect: please report it)"


def brief(error: RaycollectError) -> str:
    """An error in one line: its type, what failed and where; without the traceback, and what to do."""
    if isinstance(error, RefusedError) and error.violations:
        more = len(error.violations) - 1
        text = f"{error.op} was refused: {error.violations[0]}" + (f", and {more} more" if more else "")
    else:
        text = str(error)
    return f"{type(error).__name__}: {text.partition(chr(10))[0]}"


# ---------------------------------------------------------------------------------------------- wire


def to_wire(error: RaycollectError) -> dict[str, Any]:
    """Turns an error into plain values for msgpack; the inverse of `from_wire`."""
    values = {f.name: getattr(error, f.name) for f in fields(error)}
    if "violations" in values:
        values["violations"] = [asdict(violation) for violation in values["violations"]]
    return {"type": type(error).__name__, "fields": values}


def from_wire(value: dict[str, Any]) -> RaycollectError:
    """Builds the error that `to_wire` described.

    Raises:
        ProtocolError: The value describes no error of this module.
    """
    try:
        cls = globals()[value["type"]] if value["type"] in __all__ else None
        if not (isinstance(cls, type) and issubclass(cls, RaycollectError)):
            raise ProtocolError(detail=f"unknown error type {value['type']!r}")
        values = {name: tuple(v) if isinstance(v, list) else v for name, v in value["fields"].items()}
        if "violations" in values:
            values["violations"] = tuple(Violation(**violation) for violation in values["violations"])
        return cls(**values)
    except (KeyError, TypeError, AttributeError) as exc:
        raise ProtocolError(detail=f"malformed error on the wire: {exc}") from exc
