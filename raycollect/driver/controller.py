"""What a controlling process holds: its leased participants, its groups, and its plans under way.

There is one controller per process and Ray session. A participant is leased with its control connection and given back
when its last group here is destroyed (P10).
"""

from __future__ import annotations

import atexit
import itertools
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from time import monotonic
from typing import Any

from raycollect.channel import Mailbox
from raycollect.core import limits, threads
from raycollect.core.model import GroupLike, name_of
from raycollect.core.signals import Allowed, Deferred
from raycollect.driver.controller_messages import ControllerMessages
from raycollect.driver.dispatch_lock import DispatchLock
from raycollect.driver.driver_rank import DriverRank
from raycollect.driver.groups import Groups
from raycollect.driver.participant_link import ParticipantLink
from raycollect.driver.participants import Participants
from raycollect.driver.plan_timeouts import PlanTimeouts
from raycollect.driver.plan_tracker import Outgoing, PlanTracker
from raycollect.errors import PlanAbortedError, UnknownGroupError, copy_error
from raycollect.member.runtime import Runtime, this_runtime
from raycollect.observe.timeline_session import TimelineSession
from raycollect.planner import Membership, plan_cache
from raycollect.pos import fetch
from raycollect.ray_bridge import ray_session

_MOST_LINKS = 256  # for how many plans it is known who takes part

# How long a captured step that was dropped in a run is left alone before anybody looks at it again, in seconds
_LOOK_S, _MOST_LOOK_S = 0.05, 1.0


class Controller:
    """What a controlling process holds. `Controller.current()` makes it on first use.

    Attributes:
        dispatching: Held while a plan, or a run of a captured step, is sent to all its participants (P2).
        revision: Changes whenever a group, or a member of one, is gone, and where a group's members begin to change.
        messages: Takes what participants say.
        numbers: The numbers of plans, one per launch; taken under `dispatching`.
        under_way: The plans and runs that had not ended everywhere when they were last looked at, by number.
        timeouts: Ends plans and runs at the time limits that their callers gave.
        known_calls: What calls found out that were made before, for `driver.known_calls`.
        mailbox: By which participants of this host get plans; None: there is none.
    """

    _current: Controller | None = None
    _making = threading.Lock()

    @classmethod
    def current(cls) -> Controller:
        """The controller of this process and Ray session; starts Ray if need be."""
        ray_session.ensure_ray()
        session, current = ray_session.core_worker(), cls._current
        if current is not None and current.session is session:
            return current
        with cls._making:
            if cls._current is None or cls._current.session is not session:
                if cls._current is not None:
                    cls._current.close()
                try:
                    cls._current = cls(session, this_runtime())
                except (OSError, RuntimeError) as exc:
                    lacking = limits.exhausted(exc, "starting the controller")
                    if lacking is None:
                        raise
                    raise copy_error(lacking) from exc
                _close_before_ray()
            return cls._current

    @classmethod
    def running(cls) -> Controller | None:
        """The controller of this process and Ray session, if there is one; starts nothing."""
        current = cls._current
        return current if current is not None and ray_session.is_in(current.session) else None

    @classmethod
    def is_rank_of(cls, group_name: GroupLike) -> bool:
        """Whether this process is a rank of the declared group of that name, which it drives; starts nothing."""
        running = cls.running()
        return running is not None and running.takes_part(group_name) is not None

    @classmethod
    def drives(cls, name: str) -> bool:
        """Whether this process has declared a group of that name; starts nothing."""
        current = cls.running()
        return current is not None and current.groups.is_declared(name)

    def __init__(self, session: object, runtime: Runtime) -> None:
        self.session = session
        self._runtime = runtime
        self.dispatching: DispatchLock = DispatchLock()
        self.revision: object = object()
        self.known_calls: dict[Any, Any] = {}
        self._links: dict[Any, tuple[object, list[ParticipantLink]]] = {}  # as long as the revision is the same
        self.messages: ControllerMessages = ControllerMessages(self)
        self.mailbox: Mailbox | None = _make_mailbox()
        self.participants: Participants = Participants(self.messages, secrets.token_hex(8), self.mailbox)
        self.groups: Groups = Groups(self.participants, self._group_ends, self._drained, self._none_begins)
        self._driver_rank: DriverRank | None = None
        self._is_closed = False
        self.numbers: Iterator[int] = itertools.count(1)
        self.timeouts: PlanTimeouts = PlanTimeouts(self)
        self.under_way: dict[int, PlanTracker] = {}
        runtime.process_groups.drives = self.drives
        runtime.timelines.begin_from_environment()
        self.observed(runtime.timelines.running)

    def observed(self, timeline: TimelineSession | None) -> None:
        """Sets the timeline that records all participants, now and later; None: none."""
        self.participants.timeline = timeline
        if timeline is not None:
            for peer in self.participants.all():
                if not peer.is_here:  # else what it records is in this process's part
                    timeline.leased(peer)

    def driver_rank(self) -> DriverRank:
        """This process as a participant, made on first use."""
        with self._making:
            if self._driver_rank is None:
                self._driver_rank = DriverRank(self._runtime)
            return self._driver_rank

    def takes_part(self, group_name: GroupLike, limit_s: float | None = None) -> DriverRank | None:
        """This process as a participant, if it is a member of the declared group of that name; waits as `find` does."""
        rank = self._driver_rank
        found = None if rank is None else self.groups.find(name_of(group_name), limit_s)
        return rank if rank is not None and found is not None and found.rank_of(rank.actor_id) >= 0 else None

    def close(self) -> None:
        """Gives back all leases; may be called twice."""
        for tracker in self.trackers():  # runs that have ended well are not failed
            tracker.fail(PlanAbortedError(detail="the controller was closed"))
        self.timeouts.stop()
        self.under_way.clear()
        self._links.clear()
        self._is_closed = True
        self.revision = object()
        self.groups.close()
        self.participants.close()
        if self._driver_rank is not None:
            self._driver_rank.close()
        if self.mailbox is not None:
            self.mailbox.close()
        fetch.close_idle()

    def links(self, memberships: Sequence[Membership], actor_ids: tuple[str, ...]) -> list[ParticipantLink]:
        """The leased participants of a plan or captured step, by position; raises as `check` does."""
        key, revision = (tuple(memberships), actor_ids), self.revision
        known = self._links.get(key)
        if known is not None and known[0] is revision:
            return known[1]
        self.check(memberships)
        groups = dict.fromkeys(memberships)
        found = [self.participants.leased(actor_id, groups) for actor_id in actor_ids]
        if known is not None or len(self._links) >= _MOST_LINKS:
            self._links.clear()
        self._links[key] = revision, found
        return found

    def check(self, memberships: Sequence[Membership]) -> None:
        """Checks that groups exist and can communicate."""
        if self._is_closed:
            name = memberships[0].spec.name if memberships else ""
            detail = "it has ended with what used it, as Ray was shut down meanwhile; capture steps of it again, too"
            raise UnknownGroupError(group_name=name, detail=detail)
        self.groups.check(memberships)

    def _group_ends(self, membership: Membership, why: str) -> None:
        self.revision = object()
        self._links.clear()
        plan_cache.forget(membership)
        known = tuple(self.known_calls.items())
        self.known_calls = {asked: call for asked, call in known if call.asked.group is not membership}
        for tracker in self._plans_of(membership):
            self.send(tracker, tracker.fail(PlanAbortedError(detail=why)))

    def _drained(self, membership: Membership, deadline_s: float) -> bool:
        with self.dispatching:  # a plan that began before is waited for; none begins after it, as all look again
            self.groups.draining.add(membership.spec.group_id)
            self.revision = object()
            under_way = self._plans_of(membership)
        with Allowed():
            return all(tracker.wait(max(deadline_s - monotonic(), 0)) for tracker in under_way)

    @contextmanager
    def _none_begins(self) -> Iterator[list[Membership]]:
        with Deferred(), self.dispatching:
            yield [group for tracker in self.trackers() if not tracker.resolved for group in tracker.groups]
            self.revision = object()  # as groups may have ended in the block

    def _plans_of(self, membership: Membership) -> list[PlanTracker]:
        return [tracker for tracker in self.trackers() if membership in tracker.groups]

    # ------------------------------------------------------------------------------------------ plans under way

    def register(self, tracker: PlanTracker) -> None:
        """Adds a plan, or a run, under the number that was taken last, and takes those of its other launches."""
        ring = self._runtime.tracer.ring
        if ring is not None:
            tracker.ring, tracker.began_s = ring, ring.clock()
        for _ in range(tracker.plan.width - 1):
            next(self.numbers)
        self.under_way[tracker.seq] = tracker

    def trackers(self) -> list[PlanTracker]:
        """The plans that have not ended everywhere. What ends in shared memory is seen to have ended by asking."""
        found = []
        for tracker in tuple(self.under_way.values()):
            if tracker.has_ended:
                self.under_way.pop(tracker.seq, None)
            elif tracker.seq in self.under_way:
                found.append(tracker)
        return found

    def send(self, tracker: PlanTracker, outgoing: Outgoing) -> None:
        """Sends what a plan has to say, and forgets the plan once it has ended everywhere."""
        if outgoing:
            self.participants.deliver(tracker.plan.participants, outgoing)
        if tracker.has_ended:
            self.under_way.pop(tracker.seq, None)

    def abandon(self, let_go: Callable[[], bool], held: tuple[Membership, ...], delay_s: float = 0.0) -> None:
        """Closes a capture that nobody refers to, once its last run has ended; `let_go` returns False until then.

        Takes no lock: the garbage collector may call it, in any thread at any place. The hub's thread does the rest.
        """

        def close() -> None:
            if let_go():
                for membership in held:
                    self.groups.held.remove(membership.spec.group_id)
            else:
                self.abandon(let_go, held, min(delay_s + _LOOK_S, _MOST_LOOK_S))

        self.participants.later(delay_s, partial(self.dispatching.soon, close))


def _make_mailbox() -> Mailbox | None:
    try:
        return Mailbox()
    except OSError:  # this system has no memory to share, or none is left
        return None


@atexit.register  # runs before Ray's own
def _close_running() -> None:
    """Ends before Ray does: a thread that lets go of a ref while Ray shuts down ends the process."""
    running = Controller.running()
    if running is not None:
        threads.survives(running.close)


_close_before_ray = cache(partial(ray_session.before_shutdown, _close_running, is_last=True))
