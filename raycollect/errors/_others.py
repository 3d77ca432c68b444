"""Errors of handles, batches, captured steps and memory, and our own bugs."""

from __future__ import annotations

from dataclasses import dataclass

from raycollect.errors._base import RaycollectError
from raycollect.errors.text import listed


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


_REPLACE = (
    "put another member in the place of the lost one by group.replace(dead, new), and bring the actors to a known "
    "state; then the step runs again"
)


@dataclass(eq=False, kw_only=True)
class CaptureBrokenError(CaptureError):
    """A run of a captured step failed before: its values may be half-made, so that it does not run again.

    The error of that run is its cause.

    Attributes:
        why: How that run failed, in one line; see `brief`.
    """

    why: str = ""
    cure = "correct the cause, bring the actors to a known state, close the step and capture it again"

    def _text(self) -> str:
        return f"{self.detail}: {self.why}"

    def _advice(self) -> str:
        is_loss = self.why.startswith(("ParticipantDiedError", "GroupBrokenError"))
        return _REPLACE if is_loss else self.cure


@dataclass(eq=False, kw_only=True)
class CaptureMembersError(CaptureError):
    """The members of a group have changed, and a captured step needs what is not there any more; nothing ran.

    Attributes:
        lost: What it has lost: the calls, with the ranks, actors and refs that they name.
    """

    lost: tuple[str, ...] = ()
    cure = "close the step and capture it again, with the current members"

    def _text(self) -> str:
        return f"{self.detail}: {listed(self.lost, '; ')}"


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
class InternalError(RaycollectError):
    """A bug of raycollect."""

    detail: str

    def _text(self) -> str:
        return f"{self.detail} (this is a bug of raycollect: please report it)"
