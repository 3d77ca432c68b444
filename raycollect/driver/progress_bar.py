"""Progress bars on stderr during long waits, by tqdm. The waiting thread draws them."""

from __future__ import annotations

import logging
import math
import time
from contextvars import ContextVar
from functools import cache
from typing import Any

from raycollect.driver.participants import Participants
from raycollect.driver.plan_tracker import PlanTracker
from raycollect.driver.progress import Progress, ProgressProbe
from raycollect.errors import MOST_S, ProgressError, is_time_limit, refusal, wrong_argument
from raycollect.errors.text import shown

_log = logging.getLogger("raycollect")

AFTER_S = 0.5  # after how long a wait shows a bar by default, in seconds

EVERY_S = 0.2  # how often participants are asked for their progress, in seconds

around_s: ContextVar[tuple[float, ...]] = ContextVar("raycollect_progress", default=())
"""After how long waits show a bar, for each block of `progress` around the caller, the innermost last."""


class ProgressBars:
    """What `progress` gives: a block inside of which waits that last show a bar. Threads may share it."""

    def __init__(self, after_s: float) -> None:
        self._after_s = after_s

    def __enter__(self) -> ProgressBars:  # noqa: PYI034 - Python 3.10 has no `Self`
        around_s.set((*around_s.get(), self._after_s))
        return self

    def __exit__(self, kind: object, exc: object, trace: object) -> None:
        around_s.set(around_s.get()[:-1])


def progress(*, after_s: float = AFTER_S) -> ProgressBars:
    """Shows how far collectives are, for as long as they are waited for.

    Inside a block ``with progress():``, whatever waits for a collective shows a bar on stderr, if it lasts: the
    driver's operations, the ends of batches, `Work.wait`, runs of captured steps, `get` and `free`. ``await`` shows
    none, nor do threads that the block starts. A bar counts the bytes of all participants together, and names who is
    far behind.

    Args:
        after_s: How long a wait has to last, in seconds.

    Raises:
        ProgressError: tqdm is not installed.
        InvalidArgumentError: An argument makes no sense.
    """
    if not (is_time_limit(after_s) or (isinstance(after_s, (int, float)) and after_s == 0)):
        expected = f"a number of seconds from 0 to {MOST_S:g}"
        raise refusal("progress", "", (wrong_argument("after_s", shown(after_s), expected),))
    _tqdm()
    return ProgressBars(after_s)


def _tqdm() -> Any:
    try:
        from tqdm.auto import tqdm  # it is heavy, and an extra
    except ImportError as exc:
        detail = f"progress bars are drawn by tqdm, which can't be imported ({exc}): pip install 'raycollect[progress]'"
        raise ProgressError(detail=detail) from None
    return _rated(tqdm)


@cache
def _rated(made_by: Any) -> Any:
    """A class of bars with a given rate: tqdm's own is that of the last move for ever, where nothing moves."""

    class Rated(made_by):  # type: ignore[misc]
        rate = 0.0

        @property
        def format_dict(self) -> dict[str, Any]:
            return {**super().format_dict, "rate": self.rate}

    return Rated


class Bar:
    """The bar of one wait: a context manager around the wait; meanwhile `look` is called when `left_s` is over.

    It ends full where the plan succeeded, and stays where it is where that failed, or is not known.

    Raises:
        ProgressError: tqdm is not installed.
    """

    def __init__(self, participants: Participants, tracker: PlanTracker) -> None:
        after_s = (AFTER_S, *around_s.get())[-1]
        self._tracker = tracker
        self._make = _tqdm()
        self._probe = ProgressProbe(participants, tracker, time.monotonic())
        self._drawn: Any = None
        self._is_asked = False
        self._next_s = time.monotonic() + max(after_s - EVERY_S, 0.0)

    def __enter__(self) -> Bar:  # noqa: PYI034 - Python 3.10 has no `Self`
        return self

    def __exit__(self, kind: object, exc: object, trace: object) -> None:
        drawn, self._drawn, self._next_s = self._drawn, None, math.inf
        if drawn is None:
            return
        try:
            far = self._probe.read()
            went_well = self._tracker.resolved and self._tracker.error is None
            self._show(drawn, far, "" if went_well else None)
            drawn.leave = bool(far.total_nbytes) or not went_well  # where nobody ever told of bytes, there is nothing
            drawn.close()
        except Exception as exc:  # noqa: BLE001 - see `look`
            _log.debug("a progress bar could not be ended: %s", exc)

    @property
    def left_s(self) -> float:
        """In how many seconds the next look is due."""
        return self._next_s - time.monotonic()

    def look(self) -> None:
        """Takes the participants' answers, shows them, and asks again; does not wait."""
        self._probe.hear()
        try:
            if self._is_asked:
                far = self._probe.read()
                if self._drawn is None:
                    total, name = far.total_nbytes or None, self._tracker.plan.name
                    self._drawn = self._make(desc=name, unit="B", unit_scale=True, total=total)
                self._show(self._drawn, far)
            self._next_s = time.monotonic() + EVERY_S
        except Exception as exc:  # noqa: BLE001 - a stderr that is closed, a widget that is gone: the wait goes on without
            self._drawn, self._next_s = None, math.inf
            _log.debug("a progress bar could not be drawn: %s", exc)
            return
        self._probe.ask()
        self._is_asked = True

    def _show(self, drawn: Any, far: Progress, postfix: str | None = None) -> None:
        if far.total_nbytes:
            drawn.total, drawn.n = far.total_nbytes, far.done_nbytes
        drawn.start_t = time.time() - far.elapsed_s  # tqdm's clock is the wall's
        drawn.rate = far.rate
        behind = far.laggard
        drawn.set_postfix_str(("" if behind is None else str(behind)) if postfix is None else postfix, refresh=False)
        drawn.refresh()
