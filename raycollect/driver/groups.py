"""The groups of a controller: forms, rebuilds and dissolves them, and knows which are in use or broken."""

from __future__ import annotations

import logging
import resource
import secrets
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from math import inf
from time import monotonic
from typing import Any

from raycollect.core import threads
from raycollect.core.claims import ClaimedError
from raycollect.core.signals import Allowed, Deferred
from raycollect.driver import member_discovery
from raycollect.driver.derived_groups import DerivedGroups
from raycollect.driver.formation import Declared, Formation
from raycollect.driver.group_change import living
from raycollect.driver.participant_link import ParticipantLink
from raycollect.driver.participants import Participants
from raycollect.driver.plans import PlansUnderWay
from raycollect.errors import (
    ActorGoneError,
    CollectiveTimeoutError,
    GroupBrokenError,
    GroupExistsError,
    InvalidGroupError,
    ReentrantCallError,
    UnknownGroupError,
)
from raycollect.group import cluster_registry
from raycollect.group.declaration import Declaration
from raycollect.group.membership import unknown
from raycollect.planner import Membership
from raycollect.ray_bridge import ray_actors

_log = logging.getLogger("raycollect")

_MOST_LINKS = 256  # for how many plans the participants are cached

MOST_DERIVED = 256
"""The most derived groups of an actor, unless they would take more than an eighth of its file descriptors."""


class Groups(Formation):
    """All groups of one controller, declared and derived. Any thread may call it.

    A thread claims what it forms or changes: a name, or the actors of a derived group. Other groups are free meanwhile.
    Signals are deferred except in waits: one that interrupts a wait leaves no part of a group, and one that arrives
    later takes effect when all is done.

    Attributes:
        held: The ids of the groups of calls that were recorded and are not sent yet, as often as they are held. A
            finalizer may remove them: no lock is taken.
    """

    def __init__(self, peers: Participants, plans: PlansUnderWay) -> None:
        super().__init__(peers, plans)
        self.held: list[str] = []
        self._is_closed = False
        self._lock = threading.RLock()  # held briefly, when a name gets another group
        self._declared: dict[str, Declared] = {}  # by name; keeps the actors alive (P5)
        self._derived = DerivedGroups(_most_derived())

    # ------------------------------------------------------------------------------------------ looking them up

    def named(self, name: Any) -> Membership:
        """A declared group; raises UnknownGroupError if no group has that name."""
        membership = self.find(name)
        if membership is None:
            raise self._unknown(name)
        return membership

    def find(self, name: Any, limit_s: float | None = None) -> Membership | None:
        """A declared group; None if no group has that name.

        While its members change this waits for those that it will have; CollectiveTimeoutError: `limit_s` is over.
        """
        declared = self._declared.get(name) if isinstance(name, str) else None
        if declared is not None and declared[0].spec.group_id in self.draining:
            if not self._claims.wait(name, inf if limit_s is None else monotonic() + limit_s):
                detail = f"after {limit_s:g} s its members are still being changed by another thread"
                raise CollectiveTimeoutError(group_name=name, detail=detail, timeout_s=limit_s or 0.0)
            declared = self._declared.get(name)
        return None if declared is None else declared[0]

    def is_declared(self, name: str) -> bool:
        """Whether there is a declared group of that name; never waits."""
        return name in self._declared

    def declared(self) -> list[Declared]:
        """All declared groups, with their declarations."""
        return list(self._declared.values())

    def exists(self, membership: Membership) -> bool:
        """False once the group was destroyed."""
        declared = self._declared.get(membership.spec.name)
        return (declared is not None and declared[0] is membership) or membership in self._derived

    def as_it_is(self, membership: Membership, timeout_s: float) -> Membership:
        """The current group after rebuilds; a derived group is formed again if it was dissolved or is broken."""
        if membership.is_derived:
            return self.derive(tuple(member.actor_id for member in membership.members), timeout_s)
        return self.named(membership.spec.name)

    def links(self, memberships: Sequence[Membership], actor_ids: tuple[str, ...]) -> list[ParticipantLink]:
        """The leased participants of a plan or captured step, by position; raises as `check` does."""
        key, revision = (tuple(memberships), actor_ids), self._plans.revision
        cached = self._links.get(key)
        if cached is not None and cached[0] is revision:
            return cached[1]
        self.check(memberships)
        groups = dict.fromkeys(memberships)
        peers = [self._peers.leased(actor_id, groups) for actor_id in actor_ids]
        if cached is not None or len(self._links) >= _MOST_LINKS:
            self._links.clear()
        self._links[key] = revision, peers
        return peers

    def check(self, memberships: Iterable[Membership]) -> None:
        """Checks that groups exist and can communicate."""
        if self._is_closed:
            name = next((group.spec.name for group in memberships), "")
            detail = "it has ended with what used it, as Ray was shut down meanwhile; capture steps of it again, too"
            raise UnknownGroupError(group_name=name, detail=detail)
        for membership in dict.fromkeys(memberships):
            name = membership.spec.name
            if not self.exists(membership):
                detail = "it was destroyed, or its members have changed, before the call: get it again"
                raise UnknownGroupError(group_name=name, detail=detail)
            if membership.spec.group_id in self.draining:
                raise GroupBrokenError(group_name=name, detail="its members are changing right now: call again")
            broken = self.why_broken(membership)
            if broken:
                raise GroupBrokenError(group_name=name, detail=broken)

    # ------------------------------------------------------------------------------------------ broken ones

    def breaks(self, group_id: str, why: str) -> None:
        """Marks a group as broken; the first reason counts."""
        groups = [group for group, _ in tuple(self._declared.values())] + [*self._derived.all()]
        if any(group.spec.group_id == group_id for group in groups):  # not a destroyed one
            self._broken.setdefault(group_id, why)

    def bury(self, peer: ParticipantLink) -> None:
        """Dissolves the derived groups of a participant whose process has ended, in another thread."""
        actor_id = peer.info["actor_id"]
        if any(group.rank_of(actor_id) >= 0 for group in self._derived.all()):
            threads.bounded(self._dissolve_idle)

    # ------------------------------------------------------------------------------------------ declared ones

    def add(self, declared: Declared, old: Membership | None = None) -> None:
        """Stores a group under its name, in the place of `old`.

        Raises:
            UnknownGroupError: `old` was destroyed meanwhile.
        """
        with self._lock:
            if old is not None:
                self._declaration(old)
            self._declared[declared[0].spec.name] = declared

    def declare(self, declaration: Declaration, *, replaces: bool = False) -> Declared:
        """Forms a named group, by `replaces` in the place of another; returns when every member has joined."""
        name, deadline_s = declaration.name, monotonic() + declaration.timeout_s
        with self._claimed(name, name, deadline_s):
            before = self._declared.get(name)
            if before is not None:
                if not replaces and not self.coordinators.is_deserted(before[0]):
                    raise GroupExistsError(group_name=name)
                with suppress(UnknownGroupError):  # another thread has destroyed it
                    self.destroy(name)  # or all its members have left it
            return self._form(declaration, deadline_s, self.add)

    def rebuild(self, old: Membership, actors: Sequence[Any] | None, timeout_s: float) -> Declared:
        """Forms a declared group again, over the members that live or over other actors (`Group.rebuild`).

        An error leaves the group as it was, unless members could not join: then it is broken, and may be rebuilt again.
        """
        deadline_s = monotonic() + timeout_s
        with self._claimed(old.spec.name, old.spec.name, deadline_s):
            declaration = self._declaration(old).over(actors, timeout_s)
            while True:
                if actors is None:
                    with Allowed():
                        alive = member_discovery.who_answers(declaration, deadline_s)
                    declaration = declaration.over(alive, timeout_s)
                try:
                    return self._form_again(old, declaration, deadline_s, drains=False)
                except ActorGoneError:
                    if actors is not None or monotonic() > deadline_s:  # otherwise a member died after its answer
                        raise

    def change(self, old: Membership, actors: Sequence[Any], timeout_s: float, new: Mapping[int, Any]) -> Declared:
        """Forms a declared group again over other members, once its plans under way have ended; errors as `rebuild`.

        `new` has by rank the actor in the place of one of `actors` that is dead.
        """
        deadline_s = monotonic() + timeout_s
        with self._claimed(old.spec.name, old.spec.name, deadline_s):
            actors = [new.get(rank, actor) for rank, actor in enumerate(actors)]
            declaration = self._declaration(old).over(actors, timeout_s)
            dead = [old.members[rank] for rank in new]
            with Allowed():
                reason = living(dead, self._peers)
            if reason:
                raise InvalidGroupError(group_name=old.spec.name, detail=reason)
            return self._form_again(old, declaration, deadline_s, drains=True)

    def _declaration(self, membership: Membership) -> Declaration:
        name = membership.spec.name
        declared = self._declared.get(name)
        if declared is None or declared[0] is not membership:
            raise UnknownGroupError(group_name=name, detail="it was destroyed or changed meanwhile: get it again")
        return declared[1]

    def _form_again(self, old: Membership, declaration: Declaration, deadline_s: float, *, drains: bool) -> Declared:
        try:
            return self._form(declaration, deadline_s, partial(self.add, old=old), old=old, drains=drains)
        except BaseException as exc:
            if self.exists(old) and old.spec.group_id not in self.coordinators:  # its members have left it
                self._broken[old.spec.group_id] = f"it could not be rebuilt: {exc}".splitlines()[0]
            raise
        finally:
            self.draining.discard(old.spec.group_id)

    def close(self) -> None:
        """Removes the groups, which end with their controller, from the cluster's registry."""
        self._is_closed = True
        self._links.clear()
        self._plans.revision = object()
        for membership, _ in tuple(self._declared.values()):
            cluster_registry.remove(membership)

    def destroy(self, name: Any) -> None:
        """Ends a declared group; raises UnknownGroupError if no group has that name."""
        with Deferred():
            with self._lock:
                declared = self._declared.get(name) if isinstance(name, str) else None
                if declared is None:
                    raise self._unknown(name)
                self._ended.append(declared[0])
                del self._declared[name]
            self._dissolve_ended()

    # ------------------------------------------------------------------------------------------ derived ones

    def derived(self, actor_ids: tuple[str, ...]) -> Membership | None:
        """The group of these actors in this order; None if it was not formed before, or is broken."""
        membership = self._derived.find(actor_ids)
        return None if membership is None or membership.spec.group_id in self._broken else membership

    def derive(self, actor_ids: tuple[str, ...], timeout_s: float) -> Membership:
        """The group of these actors in this order, formed now or before."""
        deadline_s = monotonic() + timeout_s
        with self._claimed(actor_ids, "", deadline_s):
            membership = self.derived(actor_ids)
            if membership is not None:
                return membership
            self._ended += self._derived.take(lambda group: group.participants == actor_ids)  # it is broken
            self._dissolve_ended()
            actors = tuple(ray_actors.actor_handle(actor_id) for actor_id in actor_ids)
            name = f"derived-{secrets.token_hex(3)}"
            declaration = Declaration(name=name, backend="auto", actors=actors, timeout_s=timeout_s)
            membership, _ = self._form(
                declaration, deadline_s, lambda formed: self._derived.add(formed[0]), is_derived=True
            )
            if self._broken or self._derived.full(actor_ids):
                self._dissolve_idle(membership)
            return membership

    def _dissolve_idle(self, newest: Membership | None = None) -> None:
        """Dissolves derived groups that are broken, and surplus ones of the actors of the newest group."""
        with self._plans.none_begins() as under_way:
            busy = {*self.held, *(group.spec.group_id for group in under_way)}
            self._ended += self._derived.take(lambda group: group.spec.group_id in self._broken.keys() - busy)
            if newest is not None:
                self._ended += self._derived.take_surplus(newest, lambda group: group.spec.group_id not in busy)
        self._dissolve_ended()

    # ------------------------------------------------------------------------------------------ their beginning and end

    @contextmanager
    def _claimed(self, key: str | tuple[str, ...], name: str, deadline_s: float) -> Iterator[None]:
        """Keeps other threads from forming or changing a group; waits for one that does. Defers signals."""
        try:
            with Deferred(), self._claims.claim(key, deadline_s):
                self._dissolve_ended(name, deadline_s)
                yield
        except ClaimedError as exc:
            if exc.is_own:
                detail = "a finalizer, or a signal handler, uses a group that its thread is just forming or changing"
                raise ReentrantCallError(detail=detail) from None
            detail = "another thread is forming the group, or changing its members"
            raise CollectiveTimeoutError(op="declare", group_name=name, detail=detail) from None

    def _unknown(self, name: Any) -> UnknownGroupError:
        return unknown(name, f"not declared; declared are {sorted(self._declared) or 'none'}")


def _most_derived() -> int:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]  # that of actors is the same, as a rule
    return MOST_DERIVED if limit == resource.RLIM_INFINITY else max(min(MOST_DERIVED, limit // 8), 16)
