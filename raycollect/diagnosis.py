"""Who is waited for, and what they do instead: asked of the participants where a flight takes long, or is late."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from raycollect.channel.messages import Seen
from raycollect.controller import Controller
from raycollect.course import Course
from raycollect.errors import CollectiveTimeoutError, RankReport
from raycollect.flight import Flight
from raycollect.model import Member
from raycollect.vigil import QUIET_S

__all__ = [
    "QUIET_S",
    "awaited_s",
    "explain_delay",
    "reports",
    "step_of",
    "told",
    "wait",
    "warn_later",
]

_log = logging.getLogger("raycollect")

LOOK_S = 2.0
"""How long participants may take to say what they are doing, in seconds; who takes longer is unresponsive."""


def wait(controller: Controller, flight: Flight, timeout_s: float | None) -> bool:
    """Waits for a flight's outcome, and warns once where that takes long; in the thread of its caller.

    Args:
        controller: Whose it is.
        flight: The flight.
        timeout_s: How long to wait, in seconds; None: for ever.

    Returns:
        False where the outcome is not known in time.
    """
    if flight.resolved:
        return True
    limit_s = math.inf if timeout_s is None else timeout_s
    quiet_s = QUIET_S
    if flight.wait(None if min(quiet_s, limit_s) == math.inf else min(quiet_s, limit_s)):
        return True
    if limit_s <= quiet_s:
        return False
    _warn(controller, flight, quiet_s)
    return flight.wait(None if limit_s == math.inf else limit_s - quiet_s)


def warn_later(controller: Controller, flight: Flight) -> Callable[[], None]:
    """Warns of a coroutine's wait, once, should it last; nothing is waited for in the event loop's own thread.

    Args:
        controller: Whose it is.
        flight: What is waited for.

    Returns:
        What to call at the wait's end.
    """
    quiet_s, loop = QUIET_S, asyncio.get_running_loop()
    if quiet_s == math.inf:
        return lambda: None

    def lasts() -> None:
        if not flight.resolved:  # a thread from here on: whoever is asked may take long
            loop.run_in_executor(None, _warn, controller, flight, quiet_s)

    return loop.call_later(quiet_s, lasts).cancel


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
    if position < 0 or (mine is not None and mine.ended >= flight.seq):
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
    return seen is not None and (flight.seq in seen.running or seen.ended >= flight.seq)


def _pending(flight: Flight) -> list[Member]:
    """Those who have not ended a flight."""
    return [flight.member(at) for at in range(len(flight.plan.participants)) if flight.is_pending(at)]
