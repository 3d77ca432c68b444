"""The state of a controlling process: its leased participants, its plans under way, and its groups.

Each of these uses only those before it; `ControllerMessages` passes them the participants' messages. There is one
controller per process and Ray session. The lease of a participant begins with its control connection, and ends when its
last group here is destroyed (P10).
"""

from __future__ import annotations

import atexit
import secrets
import threading
from collections.abc import Callable
from functools import cache, partial

from raycollect.channel import Mailbox
from raycollect.core import limits, threads
from raycollect.core.model import GroupLike, name_of
from raycollect.driver.controller_messages import ControllerMessages
from raycollect.driver.driver_rank import DriverRank
from raycollect.driver.groups import Groups
from raycollect.driver.participants import Participants
from raycollect.driver.plan_timeouts import PlanTimeouts
from raycollect.driver.plans import PlansUnderWay
from raycollect.errors import copy_error
from raycollect.member.runtime import Runtime, this_runtime
from raycollect.observe.timeline_session import TimelineSession
from raycollect.planner import Membership
from raycollect.pos import fetch
from raycollect.ray_bridge import ray_session

# How long a captured step that was dropped in a run is left alone before anybody looks at it again, in seconds
_LOOK_S, _MOST_LOOK_S = 0.05, 1.0


class Controller:
    """The state of a controlling process. `Controller.current()` makes it on first use.

    Attributes:
        mailbox: Carries plans to participants of this host; None if unavailable.
        participants: The leased participants.
        plans: The plans and runs under way.
        timeouts: Ends plans and runs at the time limits that their callers gave.
        groups: The groups.
        messages: Handles the participants' messages.
        live_link: The address of the live view; empty: there is none.
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
        self.mailbox: Mailbox | None = _make_mailbox()
        self.participants: Participants = Participants(secrets.token_hex(8), self.mailbox)
        self.plans: PlansUnderWay = PlansUnderWay(self.participants, runtime.tracer)
        self.timeouts: PlanTimeouts = PlanTimeouts(self.plans, self.participants)
        self.groups: Groups = Groups(self.participants, self.plans)
        self.messages: ControllerMessages = ControllerMessages(self.participants, self.plans, self.groups)
        self.participants.owner = self.messages
        self.live_link: str = ""
        self._driver_rank: DriverRank | None = None
        runtime.process_groups.drives = self.drives
        runtime.timelines.begin_from_environment()
        self.observed(runtime.timelines.running)

    def observed(self, timeline: TimelineSession | None) -> None:
        """Sets the timeline that records all participants, now and later; None: none."""
        self.participants.timeline = timeline
        if timeline is not None:
            for peer in self.participants.all():
                if not peer.is_here:  # this process records for itself
                    timeline.leased(peer)

    def driver_rank(self) -> DriverRank:
        """This process as a participant; created on first use."""
        with self._making:
            if self._driver_rank is None:
                self._driver_rank = DriverRank(self._runtime)
            return self._driver_rank

    def takes_part(self, group_name: GroupLike, limit_s: float | None = None) -> DriverRank | None:
        """This process as a participant, if it is a member of the declared group of that name; waits as `find` does."""
        rank = self._driver_rank
        membership = None if rank is None else self.groups.find(name_of(group_name), limit_s)
        return rank if rank is not None and membership is not None and membership.rank_of(rank.actor_id) >= 0 else None

    def close(self) -> None:
        """Gives back all leases; may be called twice."""
        self.plans.close()
        self.timeouts.stop()
        self.groups.close()
        self.participants.close()
        if self._driver_rank is not None:
            self._driver_rank.close()
        if self.mailbox is not None:
            self.mailbox.close()
        fetch.close_idle()

    def abandon(self, let_go: Callable[[], bool], held: tuple[Membership, ...], delay_s: float = 0.0) -> None:
        """Closes a capture without references once its last run has ended; `let_go` returns False until then.

        Takes no lock: the garbage collector may call it, in any thread at any place. The hub's thread does the rest.
        """

        def close() -> None:
            if let_go():
                for membership in held:
                    self.groups.held.remove(membership.spec.group_id)
            else:
                self.abandon(let_go, held, min(delay_s + _LOOK_S, _MOST_LOOK_S))

        self.participants.later(delay_s, partial(self.plans.dispatching.soon, close))


def _make_mailbox() -> Mailbox | None:
    try:
        return Mailbox()
    except OSError:  # no shared memory, or none left
        return None


@atexit.register  # runs before Ray's own
def _close_running() -> None:
    """Ends before Ray does: a thread that lets go of a ref while Ray shuts down ends the process."""
    running = Controller.running()
    if running is not None:
        threads.survives(running.close)


_close_before_ray = cache(partial(ray_session.before_shutdown, _close_running, is_last=True))
