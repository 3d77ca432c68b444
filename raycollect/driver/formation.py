"""Forms and dissolves groups: the exchange between a controller and the members."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from time import monotonic
from typing import Any

from raycollect import backends
from raycollect.core import threads
from raycollect.core.claims import ClaimedError, Claims
from raycollect.core.model import Member
from raycollect.core.signals import Allowed, deliver
from raycollect.driver import member_discovery
from raycollect.driver.coordinators import Coordinators
from raycollect.driver.participant_link import ParticipantLink
from raycollect.driver.participants import Participants
from raycollect.driver.plans import PlansUnderWay
from raycollect.errors import CollectiveTimeoutError, PlanAbortedError
from raycollect.group import cluster_registry, link_costs
from raycollect.group.declaration import Declaration
from raycollect.group.membership import membership_of, placed
from raycollect.planner import Membership, plan_cache
from raycollect.ray_bridge import ray_actors, submitted_calls

_log = logging.getLogger("raycollect")

Declared = tuple[Membership, Declaration]
"""A group, and its declaration, with the actors by rank."""


class Formation:
    """Forms and dissolves the groups of one controller. Any thread may call it, the main thread inside of `Deferred`.

    No lock is held over the network. A signal that interrupts a wait leaves no part of a group.

    Args:
        peers: The participants.
        plans: Their plans under way.

    Attributes:
        coordinators: The coordinators of all groups, those that are being formed included.
        draining: The ids of the groups of which no plan begins, as their members change; set while none is being sent.
    """

    def __init__(self, peers: Participants, plans: PlansUnderWay) -> None:
        self.coordinators: Coordinators = Coordinators(peers)
        self.draining: set[str] = set()
        self._peers = peers
        self._plans = plans
        # The participants of plans and steps, valid while the revision is the same
        self._links: dict[Any, tuple[object, list[ParticipantLink]]] = {}
        self._claims = Claims()  # names, the actors of derived groups, and groups that are being dissolved
        self._broken: dict[str, str] = {}  # group id -> why
        self._ended: list[Membership] = []  # groups that have ended here, whose members may not know it yet

    def _form(
        self,
        declaration: Declaration,
        deadline_s: float,
        add: Callable[[Declared], None],
        *,
        is_derived: bool = False,
        old: Membership | None = None,
        drains: bool = False,
    ) -> Declared:
        """Forms a group and adds it in place of `old`, which stays as it was if a member is not ready to join."""
        member_discovery.check(declaration)
        calls = {ray_actors.id_of(actor): submitted_calls.watch(actor) for actor in declaration.actors}
        with Allowed():
            infos = member_discovery.describe(declaration, deadline_s)  # behind all earlier calls
            membership = _membership(declaration, infos, deadline_s, old, is_derived=is_derived)
        actors = {ray_actors.id_of(actor): actor for actor in declaration.actors}
        self.coordinators.open(membership)
        try:
            for info in infos:
                actor_id = info["actor_id"]
                member, group_id = membership.members[membership.rank_of(actor_id)], membership.spec.group_id
                self._peers.lease(member, actors[actor_id], info, calls[actor_id], deadline_s, group_id=group_id)
            if old is not None:
                self._retire(old, deadline_s, drains=drains)
            replaces = "" if old is None else old.spec.group_id
            self._peers.join(membership, deadline_s, replaces)
            by_rank = tuple([actors[member.actor_id] for member in membership.members])
            formed = membership, replace(declaration, actors=by_rank, is_by_rank=True)
            deliver()  # a signal that has arrived by now leaves no group
            add(formed)
        except BaseException:
            self._ended.append(membership)
            self._dissolve_ended()
            raise
        if old is not None:
            self._part(old)
            plan_cache.forget(old)  # a call of another thread may have been compiled since the plans ended
        if not is_derived:
            threads.survives(cluster_registry.post, membership)
        return formed

    def _retire(self, old: Membership, deadline_s: float, *, drains: bool) -> None:
        """Ends the plans and calls of a group; its members leave it when they join the next one."""
        if drains and not self._drain(old, deadline_s):
            detail = "its collectives under way have not ended in time, so its members did not change"
            raise CollectiveTimeoutError(op="change of the members", group_name=old.spec.name, detail=detail)
        self.coordinators.close(old)
        self._end_plans(old, "its group was formed again")
        cluster_registry.remove(old)

    def _drain(self, membership: Membership, deadline_s: float) -> bool:
        """Keeps plans of a group from beginning, and waits for those under way; False: not all have ended in time."""
        with self._plans.dispatching:  # no later plan begins, as each checks its groups for the new revision
            self.draining.add(membership.spec.group_id)
            self._plans.revision = object()
            under_way = self._plans.of_group(membership)
        with Allowed():
            return all(tracker.wait(max(deadline_s - monotonic(), 0)) for tracker in under_way)

    def _end_plans(self, membership: Membership, why: str) -> None:
        self._plans.revision = object()
        self._links.clear()
        plan_cache.forget(membership)
        for tracker in self._plans.of_group(membership):
            self._plans.fail(tracker, PlanAbortedError(detail=why))

    def _dissolve_ended(self, name: str = "", deadline_s: float = 0.0) -> None:
        """Dissolves the groups that have ended here; waits for another thread that dissolves one called `name`."""
        for membership in tuple(self._ended):
            until_s = deadline_s if membership.spec.name == name else 0.0
            try:
                with self._claims.claim(("ended", membership.spec.group_id), until_s):
                    self._dissolve(membership)
            except ClaimedError:
                continue

    def _dissolve(self, membership: Membership) -> None:
        if membership not in self._ended:
            return  # another thread has dissolved it
        try:
            self._end_plans(membership, "its group was destroyed")
            self._part(membership)
            cluster_registry.remove(membership)
        except Exception:  # the next attempt would fail, too
            self._ended.remove(membership)
            raise
        self._ended.remove(membership)

    # ------------------------------------------------------------------------------------------ broken ones

    def why_broken(self, membership: Membership) -> str:
        """Why a group can't communicate; empty where it can."""
        return self._broken.get(membership.spec.group_id, "")

    def lost(self, peer: ParticipantLink, reason: str) -> None:
        """A participant's process has ended: all its groups are broken. On the hub's thread."""
        for group_id in filter(self.coordinators.__contains__, tuple(peer.group_ids)):  # the others have ended
            self._broken[group_id] = f"{peer.info['actor']} died ({reason})"
            self.coordinators.lost(peer, group_id, reason)

    def _part(self, membership: Membership) -> None:
        self._peers.part(membership)
        self.coordinators.close(membership)
        self._broken.pop(membership.spec.group_id, None)


def _membership(
    declaration: Declaration,
    infos: Sequence[dict[str, Any]],
    deadline_s: float,
    old: Membership | None,
    *,
    is_derived: bool,
) -> Membership:
    """The group to form of actors that have described themselves."""
    members = declaration.ranked(infos)
    choice = _choose_backend(declaration, members, deadline_s)
    spec = declaration.spec(secrets.token_hex(8), choice.backend)
    spec = placed(spec, [member.machine for member in members])
    return membership_of(
        spec,
        members,
        link_costs.current(),
        is_derived=is_derived,
        epoch=0 if old is None else old.epoch + 1,
        chosen=choice.why,
        timeout_s=declaration.plan_timeout_s,
    )


def _choose_backend(declaration: Declaration, members: tuple[Member, ...], deadline_s: float) -> backends.BackendChoice:
    machines = [member.machine for member in members]
    choice = backends.BackendChoice(declaration.backend, "")
    if declaration.backend == "auto":
        gpus = member_discovery.gpus(declaration, members, deadline_s)
        choice = backends.choose(machines, gpus, dict(declaration.options))
    backends.check_placement(choice.backend, machines, declaration.name)
    return choice
