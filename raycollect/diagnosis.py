"""Who is waited for, and what they do instead: asked of the participants where a flight takes long, or is late."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterable, Mapping

from raycollect.controller import Controller
from raycollect.errors import CollectiveTimeoutError, RankReport
from raycollect.flight import Flight
from raycollect.model import Member

__all__ = ["QUIET_S", "WARNING_VARIABLE", "explain_delay", "reports", "wait", "warn_after_s"]

_log = logging.getLogger("raycollect")

WARNING_VARIABLE = "RAYCOLLECT_STALL_WARNING_S"
"""The environment variable that says after how many seconds of waiting a warning is logged; 0: never."""
WARN_AFTER_S = 10.0
LOOK_S = 2.0
"""How long participants may take to say what they are doing, in seconds; who takes longer is unresponsive."""


def warn_after_s(environ: Mapping[str, str] = os.environ) -> float:
    """After how long a wait is warned of, in seconds."""
    text = environ.get(WARNING_VARIABLE, "")
    try:
        found = float(text) if text else WARN_AFTER_S
    except ValueError:
        _log.warning("%s is %r, not a number of seconds: %g is taken", WARNING_VARIABLE, text, WARN_AFTER_S)
        found = WARN_AFTER_S
    return found if found > 0 else math.inf


QUIET_S = warn_after_s()
"""After how long waits are warned of in this process, in seconds."""


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
    listed = "".join(f"\n  - {report}" for report in reports(controller, flight, _pending(flight)))
    _log.warning(
        "%s on group %r, plan %d, is still under way after %g s; these have not ended it:%s",
        flight.plan.name,
        flight.group_name,
        flight.seq,
        quiet_s,
        listed,
    )
    return flight.wait(None if limit_s == math.inf else limit_s - quiet_s)


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
    asked = list(members)
    answers = controller.look(asked, min(timeout_s, LOOK_S))
    found = [
        RankReport(
            rank=member.rank,
            actor=member.actor,
            answers=seen is not None,
            has_begun=seen is not None and (flight.seq in seen.running or seen.ended >= flight.seq),
            doing=seen.doing if seen is not None else "",
            stack=tuple(seen.stack) if seen is not None else (),
            ended=seen.ended if seen is not None else 0,
            story=tuple(seen.story) if seen is not None else (),
        )
        for member, seen in zip(asked, answers, strict=True)
    ]
    return tuple(sorted(found, key=lambda report: report.has_begun))


def _pending(flight: Flight) -> list[Member]:
    """Those who have not ended a flight."""
    return [flight.member(at) for at in range(len(flight.plan.participants)) if flight.is_pending(at)]
