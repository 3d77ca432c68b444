"""Progress bars: what a wait that lasts shows on stderr, by tqdm. They are drawn by the thread that waits."""

from __future__ import annotations

import logging
import math
import time
from contextvars import ContextVar, Token
from functools import cache
from types import TracebackType
from typing import Any

from raycollect.errors import ProgressError, Violation, refusal
from raycollect.flight import Flight
from raycollect.gauge import Gauge, Progress, Surveyor

__all__ = ["AFTER_S", "Bar", "ProgressBars", "progress", "wanted"]

_log = logging.getLogger("raycollect")

AFTER_S = 0.5
"""How long a wait is not worth a bar, in seconds, where nobody says otherwise."""

EVERY_S = 0.2
"""How often participants are asked how far they are, in seconds."""

LEAD_S = 0.05
"""How long before a bar is drawn for the first time they are asked."""

_after_s: ContextVar[float | None] = ContextVar("raycollect_progress", default=None)


class ProgressBars:
    """What `progress` gives: a block inside of which waits that last show a bar. It can be entered again and again."""

    def __init__(self, after_s: float) -> None:
        self._after_s = after_s
        self._tokens: list[Token[float | None]] = []

    def __enter__(self) -> ProgressBars:  # noqa: PYI034 - Python 3.10 has no `Self`
        self._tokens.append(_after_s.set(self._after_s))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        _after_s.reset(self._tokens.pop())


def progress(*, after_s: float = AFTER_S) -> ProgressBars:
    """Shows how far collectives are, for as long as they are waited for.

    Inside a block ``with progress():``, whatever waits for a collective shows a bar on stderr, if it lasts: the
    driver's verbs, the ends of batches, `Work.wait`, runs of captured steps, `get` and `free`. ``await`` shows none,
    nor do threads that the block starts. A bar counts the bytes of all participants together, and names who is far
    behind.

    Args:
        after_s: How long a wait has to last, in seconds.

    Raises:
        ProgressError: tqdm is not installed.
        InvalidArgumentError: An argument makes no sense.
    """
    if not isinstance(after_s, (int, float)) or not 0 <= after_s < math.inf:
        violation = Violation(
            kind="argument", rank=-1, field="after_s", found=repr(after_s), expected="a number of seconds"
        )
        raise refusal("progress", "", (violation,))
    _tqdm()
    return ProgressBars(after_s)


def wanted(surveyor: Surveyor, flight: Flight, shows: bool | None) -> Bar | None:
    """The bar of a wait that begins; None where there is to be none.

    Args:
        surveyor: Who asks the participants.
        flight: What is waited for.
        shows: Whether a bar is wanted; None: inside the block of `progress` alone.

    Raises:
        ProgressError: It is wanted, and tqdm is not installed.
    """
    around_s = _after_s.get()
    if shows is False or (shows is None and around_s is None):
        return None
    return Bar(surveyor, flight, AFTER_S if around_s is None else around_s, _tqdm())


def _tqdm() -> Any:
    """The bar that goes with this process: a terminal's, or a notebook's.

    Raises:
        ProgressError: It is not installed.
    """
    try:
        from tqdm.auto import tqdm  # it is heavy, and an extra
    except ImportError as exc:
        detail = f"progress bars are drawn by tqdm, which can't be imported ({exc}): pip install 'raycollect[progress]'"
        raise ProgressError(detail=detail) from None
    return _rated(tqdm)


@cache
def _rated(made_by: Any) -> Any:
    """A class of bars whose rate is told: tqdm's own would be that of the last move for ever, where nothing moves."""

    class Rated(made_by):  # type: ignore[misc]
        rate = 0.0

        @property
        def format_dict(self) -> dict[str, Any]:
            return {**super().format_dict, "rate": self.rate}

    return Rated


class Bar:
    """The bar of one wait. A context manager, around the wait; in between, `look` whenever `left_s` says so.

    It ends full where what was waited for went well, and stays where it is where that failed, or is not known.

    Args:
        surveyor: Who asks the participants.
        flight: What is waited for.
        after_s: How long the wait has to last, in seconds.
        make: tqdm, or what looks like it.
    """

    def __init__(self, surveyor: Surveyor, flight: Flight, after_s: float, make: Any) -> None:
        self._flight = flight
        self._make = make
        self._began_s = time.monotonic()
        self._gauge = Gauge(surveyor, flight, self._began_s)
        self._drawn: Any = None
        self._is_asked = False
        self._next_s = self._began_s + max(after_s - LEAD_S, 0.0)

    def __enter__(self) -> Bar:  # noqa: PYI034 - Python 3.10 has no `Self`
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        drawn, self._drawn, self._next_s = self._drawn, None, math.inf
        if drawn is None:
            return
        try:
            far = self._gauge.read()
            went_well = self._flight.resolved and self._flight.error is None
            self._show(drawn, far, "" if went_well else None)
            drawn.leave = bool(far.total_nbytes) or not went_well  # where nobody ever told of bytes, there is nothing
            drawn.close()
        except Exception as exc:  # noqa: BLE001 - see `look`
            _log.debug("a progress bar could not be ended: %s", exc)

    @property
    def left_s(self) -> float:
        """In how many seconds to look."""
        return self._next_s - time.monotonic()

    def look(self) -> None:
        """Hears how far the participants are, shows it, and asks them again; waits for nobody."""
        self._gauge.hear()
        try:
            if self._is_asked:
                self._draw()
            self._next_s = time.monotonic() + (EVERY_S if self._is_asked else LEAD_S)
        except Exception as exc:  # noqa: BLE001 - a stderr that is closed, a widget that is gone: the wait goes on without
            self._drawn, self._next_s = None, math.inf
            _log.debug("a progress bar could not be drawn: %s", exc)
            return
        self._gauge.ask()
        self._is_asked = True

    def _draw(self) -> None:
        far = self._gauge.read()
        if self._drawn is None:
            name = self._flight.plan.name
            self._drawn = self._make(desc=name, unit="B", unit_scale=True, total=far.total_nbytes or None)
        self._show(self._drawn, far)

    def _show(self, drawn: Any, far: Progress, postfix: str | None = None) -> None:
        """Brings a bar to where the participants are.

        Args:
            drawn: The bar.
            far: Where they are.
            postfix: What stands behind it; None: who is far behind.
        """
        if far.total_nbytes:
            drawn.total, drawn.n = far.total_nbytes, far.done_nbytes
        drawn.start_t = time.time() - far.elapsed_s  # tqdm's clock is the wall's
        drawn.rate = far.rate
        behind = far.laggard
        drawn.set_postfix_str(("" if behind is None else str(behind)) if postfix is None else postfix, refresh=False)
        drawn.refresh()
