"""Errors of the control plane, of handles, batches, captured steps and memory, and our own bugs."""

from __future__ import annotations

from dataclasses import dataclass

from raycollect.errors._base import RaycollectError, culprit


@dataclass(eq=False, kw_only=True)
class ChannelError(RaycollectError):
    """The control plane failed."""

    detail: str
    peer: str = ""

    def _text(self) -> str:
        return f"{self.peer}: {self.detail}" if self.peer else self.detail


class ProtocolError(ChannelError):
    """The peer broke the protocol's rules; the connection was closed."""


class AuthenticationError(ChannelError):
    """The peer does not hold the key; the connection was closed."""


class ConnectionLostError(ChannelError):
    """The connection ended."""


@dataclass(eq=False, kw_only=True)
class HolderUnreachableError(ChannelError):
    """The process that holds a tensor could not be reached in time; it may well live, and the tensor is as it was.

    Attributes:
        op: What was asked of it: ``"get"`` or ``"free"``.
        actor: What a person calls it.
        ref: The ref, in hexadecimal.
    """

    op: str = ""
    actor: str = ""
    ref: str = ""
    cure = (
        "call it again. If it fails again, check what the message names: file descriptors (ulimit -n) on both sides, "
        "the network between the hosts, or a holder that is stopped"
    )

    def _text(self) -> str:
        who = f"{self.actor} at {self.peer}" if self.actor else self.peer
        return f"{self.op} of {self.ref}: can't reach {who}: {self.detail}"


@dataclass(eq=False, kw_only=True)
class HandleError(RaycollectError, TypeError):
    """A handle was used as the value that it stands for; a TypeError as well."""

    detail: str


@dataclass(eq=False, kw_only=True)
class HandleAttributeError(HandleError, AttributeError):
    """A handle was asked for an attribute that only the value may have; an AttributeError as well."""


@dataclass(eq=False, kw_only=True)
class BatchError(RaycollectError):
    """A batch, or what one of its calls gave, was used where it can't be; nothing was sent because of it."""

    detail: str


@dataclass(eq=False, kw_only=True)
class CaptureError(RaycollectError):
    """A captured step, or what stands for a value in it, was used where it can't be; nothing ran because of it."""

    detail: str


@dataclass(eq=False, kw_only=True)
class TracedValueError(CaptureError):
    """A step's function used what stands for a value of each run as the value, while it was traced; nothing ran.

    Attributes:
        value: What stands there: the argument, or the call that gives the value.
        parameter: The parameter of the function that it is, or is in; empty for what calls give.
        use: How it was used: ``"+"``, ``"bool()"``, ``"ray.get()"``.
        where: The line, as ``"train.py:12"``.
    """

    detail: str = "it stands for a value of each run, and has none while the step's function is traced"
    value: str
    parameter: str = ""
    use: str
    where: str

    def _text(self) -> str:
        return f"{self.use} at {self.where} uses the value of {self.value}: {self.detail}"

    def _advice(self) -> str:
        if not self.parameter:
            return "do it in a method of the actor, or return the value from the step and use it after the call"
        static = f'@col.step(static=("{self.parameter}",))'
        return (
            f"do it in a method of an actor, or before the call; or make {self.parameter} static, by {static}: the "
            "function is traced for each of its values, then"
        )


@dataclass(eq=False, kw_only=True)
class UnrecordableCallError(CaptureError):
    """A step can't record that call of Ray: a task, or the creation of an actor; nothing ran.

    Attributes:
        call: What was called.
        where: The line, as ``"train.py:12"``.
    """

    call: str
    where: str
    cure = (
        "call it before the step, and pass what it returns; or let a method of an actor, whose class inherits "
        "raycollect.CollectiveParticipant, do it"
    )

    def _text(self) -> str:
        return f"{self.call} at {self.where} {self.detail}"


_AGAIN = "capture the step again; or use raycollect.step, which records itself again"


@dataclass(eq=False, kw_only=True)
class CaptureBrokenError(CaptureError):
    """A captured step does not run again: a run of it failed before, or a group of it has changed; nothing was sent.

    After a failed run values may be half-made. The error of that run, or of the group, is its cause.

    Attributes:
        why: How that run failed, or what became of the group, in one line; see `brief`.
    """

    why: str = ""
    cure = f"correct the cause, bring the actors to a known state, and {_AGAIN}"

    def _text(self) -> str:
        return f"{self.detail}: {self.why}"

    def _advice(self) -> str:
        if self.why.startswith("UnknownGroupError"):
            return _AGAIN
        is_loss = self.why.startswith(("ParticipantDiedError", "GroupBrokenError"))
        return f"replace the lost member by group.replace(dead, new), and {_AGAIN}" if is_loss else self.cure


@dataclass(eq=False, kw_only=True)
class ReentrantCallError(RaycollectError):
    """A finalizer, or a signal handler, made a call in the middle of another call of its thread; nothing was sent."""

    detail: str
    cure = (
        "make the call after the other one has returned: let the finalizer, or the handler, put it on a "
        "queue.SimpleQueue that another thread reads"
    )


@dataclass(eq=False, kw_only=True)
class RetryError(RaycollectError):
    """A collective can't be run again as it was; nothing was sent."""

    op: str
    detail: str

    def _text(self) -> str:
        return f"{self.op} can't be run again: {self.detail}"


@dataclass(eq=False, kw_only=True)
class TimelineError(RaycollectError):
    """A timeline was asked for where there can't be one; what was recorded before goes on."""

    detail: str


@dataclass(eq=False, kw_only=True)
class ProgressError(RaycollectError):
    """A progress bar was asked for where there can't be one; nothing was waited for because of it."""

    detail: str


@dataclass(eq=False, kw_only=True)
class StoreFullError(RaycollectError):
    """The Python Object Store can't take more than `limit` entries."""

    limit: int
    cure = "raycollect.free(refs) what is no longer used"

    def _text(self) -> str:
        holds = f"the Python Object Store holds {self.limit} tensors"
        return f"{holds}, its limit while this Ray can't tell when a ref is gone."


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
    cure = (
        "let go of tensors that are not used any more, raise RAYCOLLECT_ARENA_LIMIT before the process starts, or make "
        "this tensor in ordinary memory (numpy.empty)"
    )

    def _text(self) -> str:
        why = self.detail or f"tensors take {self.in_use} of at most {self.limit} bytes"
        return f"the arena has no room for {self.nbytes} bytes in one piece: {why}."


@dataclass(eq=False, kw_only=True)
class ResourceLimitError(RaycollectError):
    """A process has no more file descriptors, or no more threads, to give.

    Attributes:
        resource: ``"file descriptors"`` or ``"threads"``.
        limit: How many the process may have, as far as it knows; -1: it knows of no limit.
        detail: What failed for that.
        rank: The rank whose process it is; -1: the process that raises this.
        actor: The actor of that rank.
    """

    resource: str
    limit: int = -1
    detail: str = ""
    rank: int = -1
    actor: str = ""

    def _text(self) -> str:
        whose = f"the process of{culprit(self.rank, self.actor).lstrip(',')}" if self.actor else "this process"
        limit = f", its limit is {self.limit}" if self.limit >= 0 else ""
        return f"{whose} has no more {self.resource}{limit}: {self.detail}"

    def _advice(self) -> str:
        if self.resource == "threads":
            return "raise the limit of processes and threads (ulimit -u, or the container's), or run fewer actors there"
        return "raise the limit before the process starts (ulimit -n), or close files and connections there"


def located(error: RaycollectError, rank: int, actor: str) -> RaycollectError:
    """An error that a member has sent; one of its process says whose that is."""
    if isinstance(error, ResourceLimitError) and not error.actor:
        error.rank, error.actor = rank, actor
    return error


@dataclass(eq=False, kw_only=True)
class InternalError(RaycollectError):
    """A bug of raycollect."""

    detail: str

    def _text(self) -> str:
        return f"{self.detail} (this is a bug of raycollect: please report it)"
