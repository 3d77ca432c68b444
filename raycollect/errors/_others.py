"""Errors of groups, controllers, channels, handles, batches, captured steps and memory, and internal errors."""

from __future__ import annotations

from raycollect.errors._base import RaycollectError, culprit


class GroupError(RaycollectError):
    """Something is wrong with the group itself."""

    group_name: str
    detail: str = ""

    def _where(self) -> str:
        return f"group {self.group_name!r}"


class UnknownGroupError(GroupError):
    """No group of that name is declared in this process."""

    cure = (
        "declare it (again) before it is used: declare_collective_group(actors, group_name=...) on the driver, or "
        "init_collective_group(...) in all members. Calls that take refs derive a group where group_name is left out"
    )


class GroupExistsError(GroupError):
    """A group of that name is declared already."""

    cure = "destroy_collective_group(name) first, declare it with replace=True on the driver, or choose another name"


class InvalidGroupError(GroupError, ValueError):
    """The actors, ranks, world size or options can't form a group; a ValueError as well."""


class GroupBrokenError(GroupError):
    """A member died or a collective failed in mid-kernel, so this group can't communicate any more."""

    cure = (
        "group.rebuild() forms it again over the members that live, group.replace(dead, new) with others in their "
        "place. Where the members made it: destroy_collective_group(name), and init_collective_group in all of them; "
        "in torch.distributed, destroy_process_group and init_process_group"
    )


class UnknownBackendError(GroupError, ValueError):
    """No backend of that name exists; a ValueError as well."""


class BackendNotInstalledError(GroupError):
    """The library that a backend needs is not installed."""


class BackendUnavailableError(GroupError):
    """The backend can't serve these members."""


class ControlError(RaycollectError):
    """A process may not drive these actors."""


class ControllerConflictError(ControlError):
    """A participant is leased to another controlling process.

    Attributes:
        actor: The participant.
        holder: The process that drives the participant now.
    """

    actor: str
    holder: str
    _message = "{self.actor} is driven by another controller: {self.holder}."
    cure = (
        "let that process destroy its groups, or end, or drive the actor from there; a group that was derived from "
        "refs lasts until the process ends, so declare one there, and destroy it"
    )


class SelfDrivenError(ControlError):
    """An actor called a plan in which it takes part; it would wait for itself forever."""

    actor: str
    _message = "{self.actor} drives a plan in which it takes part: its own method would have to end first."
    cure = (
        "put col.this_process() in its place, and its tensors in the place of their refs; or call from the driver or "
        "another actor, or use the imperative API inside the members; publish and subscribe take tensors, too"
    )


class BoundToProcessError(ControlError):
    """An object that works only in the process that made it was passed to another one; nothing was sent.

    Attributes:
        found: The object.
        instead: What to pass instead.
    """

    found: str
    instead: str
    _message = "{self.found} works only in the process that made it, and can't be passed to an actor or a task."

    def _advice(self) -> str:
        return self.instead


class ForkedError(ControlError):
    """The process was forked from one that is connected to Ray, and neither Ray nor raycollect work in it."""

    cure = (
        "call from the parent; or start this process by 'spawn' (multiprocessing.get_context), or let it join a group "
        "with init_collective_group(..., rendezvous='file:///path')"
    )


class RayClientError(ControlError):
    """raycollect can't work through Ray Client (ray://): it has no ObjectRef ids, and can't reach the participants."""

    cure = (
        "run the script on a cluster node (ray job submit), with ray.init(address='auto'), or let a task or an actor "
        "declare the group and call its operations"
    )


class ChannelError(RaycollectError):
    """The control plane failed."""

    detail: str
    peer: str = ""

    def _where(self) -> str:
        return self.peer


class ProtocolError(ChannelError):
    """The peer broke the protocol's rules; the connection was closed."""


class AuthenticationError(ChannelError):
    """The peer does not hold the key; the connection was closed."""


class ConnectionLostError(ChannelError):
    """The connection ended."""


class HolderUnreachableError(ChannelError):
    """The process that holds a tensor could not be reached in time; it may be alive, and the tensor is unchanged.

    Attributes:
        op: The request: ``"get"`` or ``"free"``.
        actor: The display name of the holder's actor.
        ref: The ref, in hexadecimal.
    """

    op: str = ""
    actor: str = ""
    ref: str = ""
    cure = (
        "call it again. If it fails again, check what the message names: file descriptors (ulimit -n) on both sides, "
        "the network between the hosts, or a holder that is stopped"
    )

    def _where(self) -> str:
        who = f"{self.actor} at {self.peer}" if self.actor else self.peer
        return f"{self.op} of {self.ref}: can't reach {who}"


class HandleError(RaycollectError, TypeError):
    """A handle was used as the value that it stands for; a TypeError as well."""

    detail: str


class HandleAttributeError(HandleError, AttributeError):
    """A handle has no such attribute, but its value may have it; an AttributeError as well."""


class BatchError(RaycollectError):
    """A batch, or a result of one of its calls, was used where it can't be; nothing was sent because of it."""

    detail: str


class CaptureError(RaycollectError):
    """A captured step, or a placeholder in it, was used where it can't be; nothing ran because of it."""

    detail: str


class TracedValueError(CaptureError):
    """A step's function used a placeholder as a value while the function was traced; nothing ran.

    Attributes:
        value: The argument, or the call that returns the value.
        parameter: The function's parameter that holds the value; empty for results of calls.
        use: How the value was used: ``"+"``, ``"bool()"``, ``"ray.get()"``.
        where: The line, as ``"train.py:12"``.
    """

    detail: str = "it is a placeholder for a value of each run, and has no value while the function is traced"
    value: str
    parameter: str = ""
    use: str
    where: str
    _message = "{self.use} at {self.where} uses the value of {self.value}: {self.detail}"

    def _advice(self) -> str:
        if not self.parameter:
            return "do it in a method of the actor, or return the value from the step and use it after the call"
        static = f'{self.parameter} static, by @col.step(static=("{self.parameter}",))'
        then = "the function is traced for each of its values, then"
        return f"do it in a method of an actor, or before the call; or make {static}: {then}"


class UnrecordableCallError(CaptureError):
    """A step can't record that call of Ray: a task, or the creation of an actor; nothing ran.

    Attributes:
        call: What was called.
        where: The line, as ``"train.py:12"``.
    """

    call: str
    where: str
    _message = "{self.call} at {self.where} {self.detail}"
    cure = (
        "call it before the step, and pass what it returns; or let a method of an actor, whose class inherits "
        "raycollect.CollectiveParticipant, do it"
    )


_AGAIN = "capture the step again; or use raycollect.step, which records itself again"


class CaptureBrokenError(CaptureError):
    """A captured step does not run again: a run of it failed before, or a group of it has changed; nothing was sent.

    After a failed run, values may be incomplete. The cause of this error is the error of that run, or of the group.

    Attributes:
        why: How that run failed, or what happened to the group, in one line; see `brief`.
    """

    why: str = ""
    _message = "{self.detail}: {self.why}"
    cure = f"correct the cause, bring the actors to a known state, and {_AGAIN}"

    def _advice(self) -> str:
        if self.why.startswith("UnknownGroupError"):
            return _AGAIN
        is_loss = self.why.startswith(("ParticipantDiedError", "GroupBrokenError"))
        return f"replace the lost member by group.replace(dead, new), and {_AGAIN}" if is_loss else self.cure


class ReentrantCallError(RaycollectError):
    """A finalizer, or a signal handler, made a call during another call of its thread; nothing was sent."""

    detail: str
    cure = (
        "make the call after the other one has returned: let the finalizer, or the handler, put it on a "
        "queue.SimpleQueue that another thread reads"
    )


class RetryError(RaycollectError):
    """A collective can't be run again as it was; nothing was sent."""

    op: str
    detail: str
    _message = "{self.op} can't be run again: {self.detail}"


class TimelineError(RaycollectError):
    """A timeline can't be recorded or stopped here; an earlier recording continues."""

    detail: str


class ProgressError(RaycollectError):
    """A progress bar can't be shown here; nothing was waited for because of it."""

    detail: str


class StoreFullError(RaycollectError):
    """The Python Object Store can't take more than `limit` entries."""

    limit: int
    _message = (
        "the Python Object Store holds {self.limit} tensors, its limit while this Ray can't tell when a ref is dropped."
    )
    cure = "raycollect.free(refs) what is no longer used"


class ArenaFullError(RaycollectError, MemoryError):
    """The shared memory of this process for tensors can't take more; a MemoryError as well.

    Attributes:
        nbytes: The requested size, in bytes.
        in_use: How many bytes tensors take.
        limit: How many bytes tensors may take.
        detail: The system's message, if the limit was not the reason.
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


class ResourceLimitError(RaycollectError):
    """A process has reached its limit of file descriptors or threads.

    Attributes:
        resource: ``"file descriptors"`` or ``"threads"``.
        limit: How many the process may have; -1 if unknown.
        detail: The operation that failed.
        rank: The rank of the process; -1 for the process that raises this.
        actor: The actor of that rank.
    """

    resource: str
    limit: int = -1
    detail: str = ""
    rank: int = -1
    actor: str = ""

    def _where(self) -> str:
        whose = f"the process of{culprit(self.rank, self.actor).lstrip(',')}" if self.actor else "this process"
        limit = f", its limit is {self.limit}" if self.limit >= 0 else ""
        return f"{whose} has no more {self.resource}{limit}"

    def _advice(self) -> str:
        if self.resource == "threads":
            return "raise the limit of processes and threads (ulimit -u, or the container's), or run fewer actors there"
        return "raise the limit before the process starts (ulimit -n), or close files and connections there"


def located(error: RaycollectError, rank: int, actor: str) -> RaycollectError:
    """Adds rank and actor to an error that a member has sent, if it is about the member's process."""
    if isinstance(error, ResourceLimitError) and not error.actor:
        error.rank, error.actor = rank, actor
    return error


class InternalError(RaycollectError):
    """A bug of raycollect."""

    detail: str
    _message = "{self.detail} (this is a bug of raycollect: please report it)"
