"""Who is waited for, and what they do instead: asked of the participants where a flight takes long, or is late."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from raycollect import bars
from raycollect.channel.messages import Seen
from raycollect.controller import Controller
from raycollect.course import Course
from raycollect.errors import CollectiveTimeoutError, RankReport
from raycollect.flight import Flight
from raycollect.model import Member
from raycollect.vigil import QUIET_S

__all__ = [
    "QUIET_S",
    "Attention",
    "attend",
    "awaited_s",
    "explain_delay",
    "reports",
    "step_of",
    "told",
    "wait",
]

_log = logging.getLogger("raycollect")

FIRST_S = 1.0
"""How long a wait is a wait and nothing else, in seconds."""
LOOK_S = 2.0
"""How long participants may take to say what they are doing, in seconds; who takes longer is unresponsive."""


def wait(controller: Controller, flight: Flight, timeout_s: float | None, *, progress: bool | None = None) -> bool:
    """Waits for a flight's outcome, with `Attention`; in the thread of its caller.

    Args:
        controller: Whose it is.
        flight: The flight.
        timeout_s: How long to wait, in seconds; None: for ever.
        progress: Whether to show a progress bar; None: if the caller is in a block that shows them.

    Returns:
        False where the outcome is not known in time.

    Raises:
        ProgressError: A progress bar is wanted, and can't be had.
    """
    bar = bars.wanted(controller, flight, progress)
    if flight.resolved:
        return True
    left_s = math.inf if timeout_s is None else timeout_s
    if bar is not None:
        with bar:
            return _wait_watched(flight, left_s, (Attention(controller, flight), bar))
    first_s = min(FIRST_S, QUIET_S, left_s)
    if flight.wait(first_s):
        return True
    attention, until_s = Attention(controller, flight, first_s), time.monotonic() - first_s + left_s
    while (left_s := until_s - time.monotonic()) > 0:
        if flight.wait(_finite(min(left_s, attention.left_s))):
            return True
        if time.monotonic() < until_s:
            attention.look()
    return flight.resolved


class _Watch(Protocol):
    """What is done now and then while a flight is waited for."""

    @property
    def left_s(self) -> float:
        """In how many seconds to look."""
        ...

    def look(self) -> None:
        """Looks, and does what is due."""
        ...


def _wait_watched(flight: Flight, left_s: float, watches: Sequence[_Watch]) -> bool:
    """Waits for a flight's outcome as long as is given, and looks whenever it is time; False: it is not known."""
    until_s = time.monotonic() + left_s
    while (left_s := until_s - time.monotonic()) > 0:
        if flight.wait(_finite(max(min(left_s, *(one.left_s for one in watches)), 0.0))):
            return True
        for one in watches:
            if one.left_s <= 0 and time.monotonic() < until_s:
                one.look()
    return flight.resolved


def attend(controller: Controller, flight: Flight) -> Callable[[], None]:
    """Does the same beside a coroutine's wait; nothing is waited for in the event loop's own thread.

    Args:
        controller: Whose it is.
        flight: What is waited for.

    Returns:
        What to call at the wait's end.
    """
    attention, loop = Attention(controller, flight), asyncio.get_running_loop()
    ended: list[bool] = []
    later: list[asyncio.TimerHandle] = []

    def again() -> None:
        left_s = _finite(attention.left_s)
        if left_s is not None and not ended:
            later[:] = [loop.call_later(max(left_s, 0.0), due)]

    def due() -> None:
        if not flight.resolved:  # a thread from here on: whoever is asked may take long
            loop.run_in_executor(None, attention.look).add_done_callback(lambda _: again())

    def end() -> None:
        ended.append(True)
        for one in later:
            one.cancel()

    again()
    return end


def _finite(seconds: float) -> float | None:
    return None if seconds == math.inf else seconds


class Attention:
    """What is done while a plan is waited for: a warning, once, where that lasts; and its end, where it hangs.

    It hangs where participants have ended it, and others, which came to the door as well, have not for its time limit:
    nobody waits for them in a collective, so that no limit of a collective ends it. For one thread at a time.

    Args:
        controller: Whose the flight is.
        flight: What is waited for.
        waited_s: For how long it was waited for already, in seconds.
    """

    def __init__(self, controller: Controller, flight: Flight, waited_s: float = 0.0) -> None:
        self._controller = controller
        self._flight = flight
        self._began_s = time.monotonic() - waited_s
        self._warn_s = QUIET_S
        self._limit_s = math.inf if isinstance(flight.plan, Course) else flight.plan.timeout_s  # runs have their own
        self._look_s = self._limit_s
        self._hung: frozenset[int] = frozenset()

    @property
    def left_s(self) -> float:
        """In how many seconds to look."""
        return min(self._warn_s, self._look_s) - (time.monotonic() - self._began_s)

    def look(self) -> None:
        """Looks, and does what is due."""
        waited_s = time.monotonic() - self._began_s
        if waited_s >= self._warn_s:
            self._warn_s = math.inf
            _warn(self._controller, self._flight, QUIET_S)
        if waited_s >= self._look_s:
            hung = self._hang()
            self._look_s = time.monotonic() - self._began_s + self._limit_s
            if hung & self._hung:
                self._end(sorted(hung & self._hung))
            self._hung = hung

    def _hang(self) -> frozenset[int]:
        """The positions of those who have not ended what others have ended."""
        flight = self._flight
        members = [flight.member(at) for at in range(len(flight.plan.participants))]
        seen = self._controller.look(members, LOOK_S)
        left = [at for at, one in enumerate(seen) if flight.is_pending(at) and (one is None or one.ended < flight.seq)]
        return frozenset(left if len(left) < len(seen) else ())

    def _end(self, positions: Sequence[int]) -> None:
        flight = self._flight
        names = ", ".join(f"rank {one.rank} ({one.actor})" for one in map(flight.member, positions))
        error = CollectiveTimeoutError(
            missing=tuple(flight.rank_of(at) for at in positions),
            timeout_s=self._limit_s,
            detail=f"for {self._limit_s:g} s these have not ended what others have: {names}",
        )
        self._controller.send(flight, flight.fail(error))


def _warn(controller: Controller, flight: Flight, quiet_s: float) -> None:
    """Says who has not ended a flight, and what they do."""
    listed = "".join(f"\n  - {report}" for report in reports(controller, flight, _pending(flight)))
    _log.warning(
        "%s on group %r, plan %d, is still under way after %g s; these have not ended it:%s",
        flight.plan.name,
        flight.group_name,
        flight.seq,
        quiet_s,
        listed,
    )


def explain_delay(
    controller: Controller, flight: Flight, error: CollectiveTimeoutError, timeout_s: float = LOOK_S
) -> None:
    """Adds to an error what those are doing whom it names, or else whoever has not ended; asked once.

    Args:
        controller: Whose it is.
        flight: What was waited for.
        error: The error.
        timeout_s: How long they may take to answer, in seconds.
    """
    if error.reports:
        return
    group = next((one for one in flight.groups if one.spec.name == error.group_name), None)
    members = group.members if group is not None else ()
    named = [members[rank] for rank in error.missing if rank < len(members)]
    error.reports = reports(controller, flight, named or _pending(flight), timeout_s)


def reports(
    controller: Controller, flight: Flight, members: Iterable[Member], timeout_s: float = LOOK_S
) -> tuple[RankReport, ...]:
    """What members are doing, who take part in a flight; those who have not begun it come first."""
    told_of = list(members)
    crew = [flight.member(at) for at in range(len(flight.plan.participants))]
    asked = list({one.actor_id: one for one in (*told_of, *crew)}.values())  # who waits knows since when
    seen = dict(zip((one.actor_id for one in asked), controller.look(asked, min(timeout_s, LOOK_S)), strict=True))
    found = [
        RankReport(
            rank=member.rank,
            actor=member.actor,
            has_begun=_has_begun(flight, seen[member.actor_id]),
            step=step_of(flight, seen[member.actor_id]),
            awaited_s=awaited_s(flight, member.actor_id, seen),
            **told(seen[member.actor_id]),
        )
        for member in told_of
    ]
    return tuple(sorted(found, key=lambda report: report.has_begun))


def told(seen: Seen | None) -> dict[str, Any]:
    """What a participant has said of itself, as `RankReport` and `MemberStatus` have it; None: it gave no answer."""
    if seen is None:
        return {"answers": False, "doing": "", "stack": (), "ended": 0, "story": ()}
    return {
        "answers": True,
        "doing": seen.doing,
        "stack": tuple(seen.stack),
        "ended": seen.ended,
        "story": tuple(seen.story),
    }


def step_of(flight: Flight, seen: Seen | None) -> str:
    """Where in a flight a participant is, in words; empty where it is not in it."""
    return "" if seen is None else dict(zip(seen.running, seen.steps, strict=False)).get(flight.seq, "")


def awaited_s(flight: Flight, actor_id: str, seen: Mapping[str, Seen | None]) -> float:
    """How long a participant of a flight is awaited by now, in seconds, from the first arrival at a door; 0: it is not.

    Args:
        flight: The flight.
        actor_id: Who may be awaited.
        seen: What the participants have said of themselves, by actor; one who gave no answer came to no door.
    """
    position, mine = flight.plan.positions.get(actor_id, -1), seen.get(actor_id)
    if position < 0 or _has_done(flight, mine):
        return 0.0
    last = max(_doors(flight, mine), default=-1)
    others = [_doors(flight, one).items() for other, one in seen.items() if other != actor_id]
    waits = [s for doors in others for door, s in doors if door > last and _is_at(flight, position, door)]
    return max(waits, default=0.0)


def _doors(flight: Flight, seen: Seen | None) -> dict[int, float]:
    """The doors of a flight to which a participant has come, and how many seconds ago."""
    if seen is None or not _has_begun(flight, seen):  # calls of its own have numbers, too
        return {}
    return {
        door: since_ms / 1000 for door, since_ms in zip(seen.doors, seen.doors_ms, strict=False) if flight.has(door)
    }


def _is_at(flight: Flight, position: int, door: int) -> bool:
    """Whether a participant has to come to a door of a flight: in a captured step, not all have all plans."""
    if not isinstance(flight.plan, Course):
        return True
    stage = flight.plan.stage_of(door - flight.seq)
    return stage is not None and position in stage.positions


def _has_begun(flight: Flight, seen: Seen | None) -> bool:
    return seen is not None and (
        flight.seq in seen.running
        or _has_done(flight, seen)
        or (seen.ended >= flight.seq and any(map(flight.has, seen.doors)))
    )


def _has_done(flight: Flight, seen: Seen | None) -> bool:
    """Whether it has ended a flight as it should; one that failed is ended where it never began, too."""
    return flight.error is None and seen is not None and seen.ended >= flight.seq


def _pending(flight: Flight) -> list[Member]:
    """Those who have not ended a flight."""
    return [flight.member(at) for at in range(len(flight.plan.participants)) if flight.is_pending(at)]
