"""The groups of a controller: forms, rebuilds and dissolves them, and knows which are in use or broken."""

from __future__ import annotations

import logging
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from time import monotonic
from typing import Any

from raycollect import backends
from raycollect.core import ray_internals, submitted_calls
from raycollect.core.model import Member
from raycollect.driver import member_discovery
from raycollect.driver.coordinators import Coordinators
from raycollect.driver.group_change import living
from raycollect.driver.held_groups import HeldGroups
from raycollect.driver.participant_link import ParticipantLink
from raycollect.driver.participants import Participants
from raycollect.errors import (
    ActorGoneError,
    CollectiveTimeoutError,
    GroupBrokenError,
    GroupExistsError,
    InvalidGroupError,
    RaycollectError,
    UnknownGroupError,
)
from raycollect.group import cluster_registry, link_costs, measured_links
from raycollect.group.declaration import Declaration
from raycollect.group.membership import inner_groups, membership_of, placed, unknown
from raycollect.planner import Membership

_log = logging.getLogger("raycollect")

Declared = tuple[Membership, Declaration]
"""A group, and what was asked for, with its actors by rank."""

DERIVED_LIMIT = 16  # how many derived groups are kept; the least recently used one is dissolved first


class Groups:
    """All groups of one controller, declared and derived. Any thread may call it; one at a time forms or dissolves.

    `held` are those that calls need which were recorded, and are not sent yet.
    """

    def __init__(
        self,
        peers: Participants,
        ending: Callable[[Membership, str], None],
        drained: Callable[[Membership, float], bool],
    ) -> None:
        self.coordinators: Coordinators = Coordinators(peers)
        self._peers = peers
        self._ending = ending  # aborts the plans of a group under way, for this reason
        # Sets `draining`, and waits for the plans of a group under way; False: not all have ended in time
        self._drained = drained
        # The id of a group of which no plan begins, as its members change; set while none is being sent
        self.draining: str = ""
        self._changing = threading.RLock()  # groups and leases
        self.held: HeldGroups = HeldGroups(self._changing)
        self._declared: dict[str, Declared] = {}  # by name; keeps the actors alive (P5)
        self._derived: OrderedDict[tuple[str, ...], Membership] = OrderedDict()
        self._broken: dict[str, str] = {}  # group id -> why
        self._links = measured_links.MeasuredLinks()

    # ------------------------------------------------------------------------------------------ looking them up

    def named(self, name: Any) -> Membership:
        """A declared group; raises UnknownGroupError where there is none of that name."""
        found = self.find(name)
        if found is None:
            raise unknown(name, f"not declared; declared are {sorted(self._declared) or 'none'}")
        return found

    def find(self, name: Any) -> Membership | None:
        """A declared group; None where there is none of that name."""
        if self.draining:
            with self._changing:  # until its members are those that it will have
                pass
        found = self._declared.get(name) if isinstance(name, str) else None
        return None if found is None else found[0]

    def declared(self) -> list[Declared]:
        """All declared groups, with what was asked for."""
        with self._changing:
            return list(self._declared.values())

    def exists(self, membership: Membership) -> bool:
        """False once the group was destroyed."""
        declared = self._declared.get(membership.spec.name)
        if declared is not None and declared[0] is membership:
            return True
        return any(one is membership for one in tuple(self._derived.values()))

    def as_it_is(self, membership: Membership, timeout_s: float) -> Membership:
        """A group as it is now, if it was rebuilt; a derived one is formed again where it is gone or broken."""
        if membership.is_derived:
            return self.derive(tuple(one.actor_id for one in membership.members), timeout_s)
        return self.named(membership.spec.name)

    def check(self, memberships: Iterable[Membership]) -> None:
        """Checks that groups exist and can communicate (`Controller.check`)."""
        for membership in dict.fromkeys(memberships):
            name = membership.spec.name
            if not self.exists(membership):
                detail = "it was destroyed, or its members have changed, before the call: get it again"
                raise UnknownGroupError(group_name=name, detail=detail)
            if membership.spec.group_id == self.draining:
                raise GroupBrokenError(group_name=name, detail="its members are changing right now: call again")
            broken = self.why_broken(membership)
            if broken:
                raise GroupBrokenError(group_name=name, detail=broken)

    # ------------------------------------------------------------------------------------------ broken ones

    def why_broken(self, membership: Membership) -> str:
        """Why a group can't communicate; empty where it can."""
        return self._broken.get(membership.spec.group_id, "")

    def breaks(self, group_id: str, why: str) -> None:
        """A group can't communicate any more; the first reason is kept."""
        groups = [one for one, _ in tuple(self._declared.values())] + list(self._derived.values())
        if any(one.spec.group_id == group_id for group in groups for one in group.tree):  # not one that is destroyed
            self._broken.setdefault(group_id, why)

    def lost(self, peer: ParticipantLink, reason: str) -> None:
        """A participant's process is gone, and with it all its groups; on the hub's thread."""
        for group_id in [one for one in peer.group_ids if one in self.coordinators]:  # the others have ended
            self._broken[group_id] = f"{peer.info['actor']} died ({reason})"
            self.coordinators.lost(peer, group_id, reason)

    # ------------------------------------------------------------------------------------------ declared ones

    def add(self, declared: Declared) -> Declared:
        """Stores a group under its name, and registers it in the cluster."""
        self._declared[declared[0].spec.name] = declared
        cluster_registry.post(declared[0])
        return declared

    def declare(self, declaration: Declaration) -> Declared:
        """Forms a named group; returns when every member has joined."""
        with self._changing:
            before = self._declared.get(declaration.name)
            if before is not None:
                if not self.coordinators.is_deserted(before[0]):
                    raise GroupExistsError(group_name=declaration.name)
                self.destroy(declaration.name)  # all its members have left it
            return self.add(self._form(declaration))

    def rebuild(self, old: Membership, actors: Sequence[Any] | None, timeout_s: float) -> Declared:
        """Forms a declared group again, over the members that live or over other actors (`Group.rebuild`).

        An error leaves the group as it was, unless members could not join: then it is broken, and may be rebuilt again.
        """
        with self._changing:
            declaration = self._declaration(old).over(actors, timeout_s)
            deadline_s = monotonic() + timeout_s
            while True:
                if actors is None:
                    declaration = declaration.over(member_discovery.who_answers(declaration, deadline_s), timeout_s)
                try:
                    return self._form_again(old, declaration, {}, drains=False)
                except ActorGoneError:
                    if actors is not None or monotonic() > deadline_s:  # else one that answered was about to die
                        raise

    def change(self, old: Membership, actors: Sequence[Any], timeout_s: float, new: Mapping[int, Any]) -> Declared:
        """Forms a declared group again over other members, once its plans under way have ended; errors as `rebuild`.

        `new` has by rank the actor in the place of one of `actors` that is dead.
        """
        with self._changing:
            actors = [new.get(rank, actor) for rank, actor in enumerate(actors)]
            declaration = self._declaration(old).over(actors, timeout_s)
            dead = [old.members[rank] for rank in new]
            found = living(dead, self._peers)
            if found:
                raise InvalidGroupError(group_name=old.spec.name, detail=found)
            heirs = {one.actor_id: actor._actor_id.hex() for one, actor in zip(dead, new.values(), strict=True)}
            return self._form_again(old, declaration, heirs, drains=True)

    def _declaration(self, membership: Membership) -> Declaration:
        name = membership.spec.name
        found = self._declared.get(name)
        if found is None or found[0] is not membership:
            raise UnknownGroupError(group_name=name, detail="it was destroyed or changed meanwhile: get it again")
        return found[1]

    def _form_again(
        self, old: Membership, declaration: Declaration, heirs: Mapping[str, str], *, drains: bool
    ) -> Declared:
        try:
            formed = self._form(declaration, old=old, drains=drains)
            self.held.succeed(old, formed[0], heirs)
            return self.add(formed)
        finally:
            self.draining = ""

    def close(self) -> None:
        """Removes the groups, which end with their controller, from the cluster's registry."""
        for membership, _ in tuple(self._declared.values()):
            cluster_registry.remove(membership)

    def destroy(self, name: str) -> None:
        """Ends a declared group; raises UnknownGroupError where there is none of that name."""
        with self._changing:
            membership = self.named(name)
            del self._declared[name]
            self.held.forget(membership)
            self._dissolve(membership)

    # ------------------------------------------------------------------------------------------ derived ones

    def derived(self, actor_ids: tuple[str, ...]) -> Membership | None:
        """The group of these actors in this order; None where it was not formed before, or is broken."""
        with self._changing:
            known = self._derived.get(actor_ids)
            if known is None or known.spec.group_id in self._broken:
                return None
            self._derived.move_to_end(actor_ids)
            return known

    def derive(self, actor_ids: tuple[str, ...], timeout_s: float) -> Membership:
        """The group of these actors in this order, formed now or before."""
        with self._changing:
            known = self.derived(actor_ids)
            if known is not None:
                return known
            if actor_ids in self._derived:
                self._dissolve(self._derived.pop(actor_ids))
            name = f"derived-{secrets.token_hex(3)}"
            actors = tuple(ray_internals.actor_handle(actor_id) for actor_id in actor_ids)
            declaration = Declaration(name=name, backend="auto", actors=actors, timeout_s=timeout_s)
            membership, _ = self._form(declaration, is_derived=True)
            self._derived[actor_ids] = membership
            held = self.held.ids
            spare = [ids for ids, one in self._derived.items() if one.spec.group_id not in held]
            for ids in spare[: max(len(self._derived) - DERIVED_LIMIT, 0)]:
                if ids != actor_ids:
                    self._dissolve(self._derived.pop(ids))
            return membership

    # ------------------------------------------------------------------------------------------ their beginning and end

    def _form(
        self,
        declaration: Declaration,
        *,
        is_derived: bool = False,
        old: Membership | None = None,
        drains: bool = False,
    ) -> Declared:
        """Forms a group, in the place of `old`, which is as it was where not all are ready to join."""
        deadline_s = monotonic() + declaration.timeout_s
        member_discovery.check(declaration)
        calls = {actor._actor_id.hex(): submitted_calls.watch(actor) for actor in declaration.actors}
        infos = member_discovery.describe(declaration, deadline_s)  # all calls before have ended by then
        members = declaration.ranked(infos)
        choice = _choose_backend(declaration, members, deadline_s)
        spec = declaration.spec(secrets.token_hex(8), choice.backend)
        spec = placed(spec, [member.machine for member in members])
        membership = membership_of(
            spec,
            members,
            link_costs.current(),
            is_derived=is_derived,
            epoch=0 if old is None else old.epoch + 1,
            chosen=choice.why,
            timeout_s=declaration.plan_timeout_s,
        )
        actors = {actor._actor_id.hex(): actor for actor in declaration.actors}
        self.coordinators.open(membership)
        is_retired = False
        try:
            for info in infos:
                member = members[membership.rank_of(info["actor_id"])]
                actor_id = member.actor_id
                peer = self._peers.lease(member, actors[actor_id], info, calls[actor_id], deadline_s)
                peer.group_ids.add(spec.group_id)
            if old is not None:
                self._retire(old, deadline_s, drains=drains)
                is_retired = True
            replaces = "" if old is None else old.spec.group_id
            membership = _joined(self._peers, self._links, membership, deadline_s, replaces)
            membership = self._with_inner(membership, deadline_s)
        except BaseException as exc:
            self._dissolve(membership)
            if old is not None and is_retired:
                self._broken[old.spec.group_id] = f"it could not be rebuilt: {exc}".splitlines()[0]
            raise
        if old is not None:
            self._part(old)
        by_rank = tuple([actors[one.actor_id] for one in members])
        return membership, replace(declaration, actors=by_rank, is_by_rank=True)

    def _retire(self, old: Membership, deadline_s: float, *, drains: bool) -> None:
        """Ends all that a group does; who is a member of the next one leaves it by joining that."""
        if drains and not self._drained(old, deadline_s):
            detail = "its collectives under way have not ended in time, so its members did not change"
            raise CollectiveTimeoutError(op="change of the members", group_name=old.spec.name, detail=detail)
        self._ending(old, "its group was formed again")
        for one in reversed(old.inner):
            self._part(one)
        self.coordinators.close(old)
        cluster_registry.remove(old)

    def _with_inner(self, membership: Membership, deadline_s: float) -> Membership:
        """Adds the groups inside a group for host-by-host plans, if they can be formed."""
        inner = inner_groups(membership)
        if not inner:
            return membership
        try:
            for one in inner:
                self.coordinators.open(one)
                for member in one.members:
                    self._peers.joining(member).group_ids.add(one.spec.group_id)
            self._peers.join([one for one in inner if one.spec.world_size > 1], deadline_s)
        except RaycollectError as exc:
            for one in inner:
                self._part(one)
            if isinstance(exc, (ActorGoneError, CollectiveTimeoutError)):
                raise
            _log.warning("group %r goes without host-by-host plans: %s", membership.spec.name, exc)
            return membership
        return replace(membership, inner=inner)

    def _dissolve(self, membership: Membership) -> None:
        self._ending(membership, "its group was destroyed")
        for one in reversed(membership.tree):
            self._part(one)
        cluster_registry.remove(membership)

    def _part(self, membership: Membership) -> None:
        self._peers.part(membership)
        self.coordinators.close(membership)
        self._broken.pop(membership.spec.group_id, None)


def _joined(
    peers: Participants,
    links: measured_links.MeasuredLinks,
    membership: Membership,
    deadline_s: float,
    replaces: str,
) -> Membership:
    """Has all members join, which measure what nobody knows of the links between their hosts."""
    known = {} if membership.epoch else links.of(membership)  # rebuilt: there was trouble
    probe = measured_links.turns(membership, known)
    told = peers.join([membership], deadline_s, probe, replaces)
    links.add(membership, told)
    return replace(membership, topology=membership.topology.on_links(links.of(membership)))


def _choose_backend(declaration: Declaration, members: tuple[Member, ...], deadline_s: float) -> backends.Choice:
    machines = [member.machine for member in members]
    choice = backends.Choice(declaration.backend, "")
    if declaration.backend == "auto":
        gpus = member_discovery.gpus(declaration, members, deadline_s)
        choice = backends.choose(machines, gpus, dict(declaration.options))
    backends.check_placement(choice.backend, machines, declaration.name)
    return choice
