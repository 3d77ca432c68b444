"""A declared group, as the process that declared it holds it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from raycollect.core import html
from raycollect.core.model import GroupLike, name_of
from raycollect.core.signals import Deferred
from raycollect.driver import group_change, member_discovery
from raycollect.driver.controller import Controller
from raycollect.driver.group_status import GroupStatistics, GroupStatus, member_statistics, member_status
from raycollect.driver.plan_tracker import PlanTracker
from raycollect.errors import ActorGoneError, InvalidGroupError, UnknownGroupError, refuse, wrong_time_limit
from raycollect.errors.text import as_name, listed, shown
from raycollect.group import membership as groups
from raycollect.group.declaration import Declaration
from raycollect.group.rank_table import ActorPlacement, RankTable
from raycollect.member import init
from raycollect.planner import Membership
from raycollect.planner.wording import counted
from raycollect.ray_bridge import ray_session
from raycollect.ray_bridge.driver_handle import DriverHandle, is_handle

_log = logging.getLogger("raycollect")

SHOWN_S = 0.5  # how long a notebook waits for the members' answers, in seconds

MOST_NAMED = 8  # how many members, and collectives under way, are named where a group is shown


class Group:
    """A declared group, in the process that declared it. Holds its actors' handles."""

    def __init__(self, controller: Controller, membership: Membership, declaration: Declaration) -> None:
        self._controller = controller
        self._membership = membership
        self._declaration = declaration

    @property
    def name(self) -> str:
        """Its name."""
        return self._membership.spec.name

    @property
    def world_size(self) -> int:
        """How many ranks it has."""
        return self._membership.spec.world_size

    @property
    def backend(self) -> str:
        """The backend that it uses, never ``"auto"``."""
        return self._membership.spec.backend

    @property
    def actors(self) -> tuple[Any, ...]:
        """The actor handles by rank."""
        return self._declaration.actors

    def get_rank(self, actor: Any) -> int:
        """The rank of an actor; -1 where it is no member."""
        return next((rank for rank, other in enumerate(self.actors) if is_handle(actor) and other == actor), -1)

    def call(self, method: str, /, *args: Any, **kwargs: Any) -> list[Any]:
        """Calls a method of every actor, as ``actor.method.remote(*args, **kwargs)``; all get the same arguments.

        For arguments that differ from rank to rank, call the methods of `actors`.

        Returns:
            One ref per rank, in rank order, as the driver's operations take them.

        Raises:
            AttributeError: The actors have no such method. None was called.
        """
        methods = [getattr(actor, method) for actor in self.actors]
        return [method.remote(*args, **kwargs) for method in methods]

    @property
    def epoch(self) -> int:
        """How often it was rebuilt, or its members changed."""
        return self._membership.epoch

    def rank_table(self) -> RankTable:
        """Which rank runs on which device of which node; ``group.rank_table().write(path)`` writes the file.

        A device is the accelerator that Ray gave the actor; where the actors of a node do not have one each, devices
        are counted from 0 on.
        """
        members = self._membership.members
        return RankTable.of_places([ActorPlacement.of(m.node_id, dict(m.accelerators), m.actor) for m in members])

    def status(self, timeout_s: float = 2.0) -> GroupStatus:
        """The group's state, and its members' current activity. Members answer from a separate thread, also while busy.

        Args:
            timeout_s: How long to wait for their answers, in seconds; 0: they are not asked.

        Raises:
            InvalidArgumentError: `timeout_s` makes no sense.
        """
        refuse("status", wrong_time_limit(timeout_s, also=(0,)))
        membership, controller = self._membership, self._controller
        state, detail = self._state()
        asked_members = membership.members if timeout_s > 0 else ()
        answers = controller.participants.look(asked_members, timeout_s) if asked_members else [None] * self.world_size
        trackers = self._under_way()
        by_actor = dict(zip((m.actor_id for m in membership.members), answers, strict=True))
        members = tuple(member_status(m, trackers, by_actor) for m in membership.members)
        return GroupStatus(state=state, detail=detail, members=members)

    def _under_way(self) -> list[PlanTracker]:
        trackers = self._controller.plans.trackers()
        return [tracker for tracker in trackers if self._membership in tracker.groups and not tracker.has_ended]

    def _state(self) -> tuple[str, str]:
        if not self._controller.groups.exists(self._membership):
            return groups.DESTROYED, ""
        detail = self._controller.groups.why_broken(self._membership)
        return (groups.BROKEN if detail else groups.ALIVE), detail

    def statistics(self, timeout_s: float = 10.0) -> GroupStatistics:
        """The tensors and memory of its members. They answer from a separate thread, also while busy.

        Args:
            timeout_s: How long to wait for their answers, in seconds.

        Raises:
            InvalidArgumentError: `timeout_s` makes no sense.
            UnknownGroupError: It was destroyed.
        """
        refuse("statistics", wrong_time_limit(timeout_s, also=(0,)))
        if not self._controller.groups.exists(self._membership):
            raise UnknownGroupError(group_name=self.name, detail="it was destroyed: declare it again")
        answers = self._controller.participants.survey(self._membership.members, timeout_s)
        pairs = zip(self._membership.members, answers, strict=True)
        return GroupStatistics(
            members=tuple(None if said is None else member_statistics(member, said) for member, said in pairs)
        )

    def rebuild(self, actors: Sequence[Any] | None = None, *, timeout_s: float = 60.0) -> Group:
        """Forms the group again under its name, after a member has died or a collective has broken it.

        The group gets a new epoch: plans of the old epoch are aborted, and its messages are ignored.
        Members' own calls go on in the new group, and steps as after `add`.

        Args:
            actors: The actor handles by rank: old members, in any order, and new ones. None: the members that live, in
                the order of their ranks. One that Ray restarts (`max_restarts`) is waited for; it has lost its tensors.
            timeout_s: How long to wait for the members, in seconds.

        Returns:
            This group.

        Raises:
            UnknownGroupError: It was destroyed. Nothing has changed, as with all errors but the last.
            InvalidGroupError: The actors can't form a group; with every reason.
            GroupBrokenError: No member lives.
            ActorGoneError: One of `actors` is dead.
            CollectiveTimeoutError: One is busy, or pending; the error names it. Rebuild it without that one.
            RaycollectError: A member could not join. The group is broken, and may be rebuilt again.
        """
        groups = self._controller.groups
        with Deferred():
            self._membership, self._declaration = groups.rebuild(self._membership, actors, timeout_s)
        return self

    def add(self, actors: Any, *, timeout_s: float = 60.0) -> Group:
        """Adds members: an actor handle, or a list of them. They get the ranks after those of now, in their order.

        As `remove` and `replace` do, it waits for methods that were submitted to the members before, and for plans of
        the group under way; plans of other threads that begin meanwhile wait for it. The group has a new epoch, and
        ``backend="auto"`` is chosen anew. Refs of members that stay are valid. Steps are traced again by their next
        call; captured steps of the group raise CaptureBrokenError in their next run.

        Args:
            actors: Actors that are no members.
            timeout_s: How long to wait for all of this, in seconds.

        Returns:
            This group.

        Raises:
            UnknownGroupError: It was destroyed. Nothing has changed, as with all errors but the last.
            InvalidGroupError: The arguments can't be; with every reason.
            ActorGoneError: A member is dead, or an actor that is added: replace or remove it.
            CollectiveTimeoutError: A method or a plan has not ended in time; the error names it.
            ControllerConflictError: Another process drives an actor that is added.
            RaycollectError: A member could not join. The group is broken, and may be rebuilt.
        """
        return self._change(group_change.added(self._membership, self.actors, actors), timeout_s)

    def remove(self, members: Any, *, timeout_s: float = 60.0) -> Group:
        """Removes members, dead or alive: a rank or an actor handle, or a list of them. The actors themselves live on.

        The ranks of the others close up, in their order. Arguments, result, errors, and effects on steps are as
        of `add`.
        """
        return self._change(group_change.removed(self._membership, self.actors, members), timeout_s)

    def replace(self, dead: Any, new: Any, *, timeout_s: float = 60.0) -> Group:
        """Puts another actor at the rank of a member that has died; or others, as lists of one length.

        All other ranks stay. Results, errors, and effects on steps are as of `add`.

        Args:
            dead: A rank or an actor handle, or a list of them. That they live is an InvalidGroupError.
            new: The actor handle, or a list of them, in the same order.
            timeout_s: How long to wait, in seconds, as in `add`.
        """
        return self._change(self.actors, timeout_s, group_change.replaced(self._membership, dead, new))

    def _change(self, actors: Sequence[Any], timeout_s: float, new: Mapping[int, Any] | None = None) -> Group:
        groups = self._controller.groups
        with Deferred():
            self._membership, self._declaration = groups.change(self._membership, actors, timeout_s, new or {})
        return self

    def destroy(self) -> None:
        """Ends the group; the actors live on. Collectives of it under way are aborted."""
        self._controller.groups.destroy(self.name)

    def __reduce__(self) -> tuple[Any, ...]:
        """In another process it is its name, which the members' operations take there."""
        return str, (self.name,)

    def _why(self) -> str:
        if self._declaration.backend != "auto":
            return "as it was declared"
        return f"chosen, as {self._membership.chosen}"

    @html.shown
    def _repr_html_(self) -> str:
        status = self.status(SHOWN_S if self._state()[0] != groups.DESTROYED else 0.0)
        trackers = self._under_way()
        plans = (f"{tracker.plan.name} (plan {tracker.seq})" for tracker in trackers)
        facts = [
            ("state", f"{status.state}{status.detail and f': {status.detail}'}"),
            ("backend", f"{self.backend}, {self._why()}"),
            ("epoch", f"{self.epoch}, how often it was rebuilt, or its members changed" if self.epoch else ""),
            ("under way", listed(plans, most=MOST_NAMED) or "nothing"),
            ("live view", html.link(self._controller.live_link)),
        ]
        title = f"group {self.name!r}: {counted(self.world_size, 'rank')}, {status.state}"
        return html.block("group", title, html.pairs(facts), status._rows())

    def __repr__(self) -> str:
        members = listed((member.actor for member in self._membership.members), most=MOST_NAMED)
        return f"<Group {self.name!r} of {members}; backend {self.backend}, {self._state()[0]}>"


def declare_collective_group(
    actors: Sequence[Any],
    world_size: int | None = None,
    ranks: Sequence[int] | None = None,
    backend: str = "auto",
    group_name: str = "default",
    gloo_timeout: float | None = None,
    *,
    options: Mapping[str, Any] | None = None,
    rank_table: Any = None,
    pg_options: Any = None,
    timeout_s: float | None = None,
    replace: bool = False,
) -> Group:
    """Declares actors to be a group; returns when every member has joined.

    Actors whose classes inherit `CollectiveParticipant` can do all that there is. Any other actor can be a member, too:
    it makes imperative calls and takes part in barriers, but has no tensors that refs could stand for.

    Args:
        actors: The actor handles; `this_process()` stands for the caller.
        world_size: The number of actors, if given.
        ranks: The rank of each actor, a permutation of 0 to n-1; by default their order.
        backend: ``"auto"`` takes `nccl` where Ray gave each of several members a GPU and they have cupy, else shared
            memory where all members share a host and sockets otherwise; others by name.
        group_name: What to call it; the operations use ``"default"`` unless told otherwise.
        gloo_timeout: How long imperative calls of the members wait for each other where they do not say, in
            milliseconds; on every backend, for all its name. By default `timeout_s`, or 30,000 where that is not given.
        options: The same arguments as a dict, ``rank`` for ``ranks`` too.
        rank_table: The ranks by node and device instead: the path of a file, its content as a dict, or a `RankTable`.
            Where neither this nor `ranks` is given, the file that ``RANK_TABLE_FILE`` names is used.
        pg_options: Options for the backend: a dict of plain values, or an object with such attributes. To
            ``"torch:sccl"`` a rank table's ``chip_map`` is added.
        timeout_s: How long to wait for the members, in seconds; an actor that is still pending is named. It is also
            how long ranks wait for each other in calls that do not say. Default 60.
        replace: Whether a declared group of that name is destroyed first, as `destroy_collective_group` does, with its
            actors dead or alive. So a notebook's cell can run again.

    Returns:
        The group.

    Raises:
        InvalidGroupError: The arguments can't form a group; with every reason.
        GroupExistsError: A group of that name is declared, and `replace` is False.
        UnknownBackendError, BackendNotInstalledError, BackendUnavailableError: The backend can't be used.
        ActorGoneError, ParticipantDiedError, CollectiveTimeoutError: A member did not join.
        ControllerConflictError: Another process drives one of the actors.
        SelfDrivenError: The calling actor is among them.
        RayClientError: This process is connected by ray://.
    """
    arguments: dict[str, Any] = {
        "world_size": world_size,
        "ranks": ranks,
        "backend": backend,
        "group_name": group_name,
        "gloo_timeout": gloo_timeout,
        "rank_table": rank_table,
        "pg_options": pg_options,
        "timeout_s": timeout_s,
    }
    if ray_session.is_started():
        Controller.current()  # it may not be allowed here; an invalid declaration starts no cluster
    declaration = Declaration.of(actors, **_with_options(arguments, options))
    if not ray_session.is_started():
        raise ActorGoneError(op="declare", group_name=declaration.name, detail=member_discovery.OF_ANOTHER_RAY)
    controller = Controller.current()
    return Group(controller, *controller.groups.declare(declaration, replaces=replace))


create_collective_group = declare_collective_group


def this_process() -> DriverHandle:
    """Stands for the calling process among the `actors` of a group that it declares: the driver becomes a rank of it.

    In the driver's operations over that group, tensors of this process (an array; a list, tuple or dict of arrays)
    stand where other ranks have refs. They are read, or written in place, as those of actors are. Results have them in
    the same places, and new arrays where a call makes something on the driver. Until a call with ``async_op=True`` has
    ended, its tensors are in use.

    Raises:
        RayClientError: This process is connected by ray://.
    """
    return Controller.current().driver_rank().handle


def _with_options(arguments: dict[str, Any], options: Any) -> dict[str, Any]:
    if options is not None and not isinstance(options, Mapping):
        detail = f"options is {shown(options)}, not a dict"
        raise InvalidGroupError(group_name=as_name(arguments["group_name"]), detail=detail)
    given = dict(() if options is None else options)
    if "rank" in given:
        given["ranks"] = given.pop("rank")
    strange = sorted(map(shown, given.keys() - arguments.keys()))
    if strange:
        detail = f"unknown options {listed(strange)}; there are {sorted([*arguments, 'rank'])}"
        raise InvalidGroupError(group_name=as_name(arguments["group_name"]), detail=detail)
    return {**arguments, **given}


def destroy_collective_group(group_name: GroupLike = "default") -> None:
    """Ends a declared group; the actors live on. Collectives of it under way are aborted.

    Inside a member it leaves that group. Where the driver declared it, the driver's operations then raise
    GroupBrokenError; once all members have left, its name is free there. In an actor or task that is no member (any
    more) it only logs a warning, as in `ray.util.collective`, so that cleaning up twice does no harm.

    Raises:
        UnknownGroupError: On the driver: there is no group of that name.
    """
    name = name_of(group_name)
    if init.is_group_initialized(name) and not Controller.is_rank_of(name):
        init.destroy_collective_group(name)
        return
    if not ray_session.is_started():
        raise groups.unknown(name, "no Ray runs in this process, so no group is declared")
    controller = Controller.current()
    if ray_session.is_worker() and controller.groups.find(name) is None:
        _log.warning("there is no group %r to destroy in this process", name)
    else:
        controller.groups.destroy(name)


destroy_group = destroy_collective_group
