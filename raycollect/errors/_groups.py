"""Errors of groups, and of who may drive whom."""

from __future__ import annotations

from dataclasses import dataclass

from raycollect.errors._base import RaycollectError, summary


@dataclass(eq=False, kw_only=True)
class GroupError(RaycollectError):
    """Something is wrong with the group itself."""

    group_name: str
    detail: str = ""

    def _text(self) -> str:
        told = summary(type(self))
        return f"group {self.group_name!r}: {self.detail or told[:1].lower() + told[1:]}"


class UnknownGroupError(GroupError):
    """No group of that name is declared in this process."""

    cure = (
        "declare it (again) before it is used: declare_collective_group(actors, group_name=...) on the driver, or "
        "init_collective_group(...) in all members. Calls that take refs derive a group where group_name is left out"
    )


class GroupExistsError(GroupError):
    """A group of that name is declared already."""

    cure = "destroy_collective_group(name) first, or choose another name"


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
    cure = (
        "let that process destroy its groups, or end, or drive the actor from there; a group that was derived from "
        "refs lasts until the process ends, so declare one there, and destroy it"
    )

    def _text(self) -> str:
        return f"{self.actor} is driven by another controller: {self.holder}."


@dataclass(eq=False, kw_only=True)
class SelfDrivenError(ControlError):
    """An actor asked for a plan in which it takes part itself; it would wait for itself for ever."""

    actor: str
    cure = (
        "put col.this_process() in its place, and its tensors in the place of their refs; or call from the driver or "
        "another actor, or use the imperative API inside the members"
    )

    def _text(self) -> str:
        return f"{self.actor} drives a plan in which it takes part: its own method would have to end first."


@dataclass(eq=False, kw_only=True)
class BoundToProcessError(ControlError):
    """An object that works only in the process that made it was passed to another one; nothing was sent.

    Attributes:
        found: The object.
        instead: What to pass instead of it.
    """

    found: str
    instead: str

    def _text(self) -> str:
        return f"{self.found} works only in the process that made it, and can't be passed to an actor or a task."

    def _advice(self) -> str:
        return self.instead


class ForkedError(ControlError):
    """A process that was forked from one that Ray is connected in; the connection is that one's."""

    cure = (
        "call from the parent; or start this process by 'spawn' (multiprocessing.get_context), or let it join a group "
        "with init_collective_group(..., rendezvous='file:///path')"
    )

    def _text(self) -> str:
        return "this process was forked from one that is connected to Ray, and neither Ray nor raycollect work in it."


class RayClientError(ControlError):
    """Ray Client (ray://) has no ObjectRef ids and no way to reach the participants."""

    cure = "run the script on a cluster node (ray job submit), with ray.init(address='auto')"

    def _text(self) -> str:
        return "raycollect can't work through Ray Client (ray://): the driver must be a process of the cluster."
