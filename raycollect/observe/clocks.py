"""How the clocks of two processes are to each other, from messages that go to and fro between them.

`time.monotonic` is one clock for all processes of a host: where both name the same one, the offset is nothing. For
others it is estimated as Cristian's algorithm does (F. Cristian, Probabilistic clock synchronization, 1989): the other
clock is taken to have been read in the middle of the shortest round trip. That is wrong by half of the round trip at
most, however the way there and the way back differ. Two such fixes, at the beginning and at the end, tell how one clock
drifts against the other.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

__all__ = ["ROUND_TRIPS", "Alignment", "Fix", "Sample", "clock_id", "fix"]

ROUND_TRIPS = 8
"""How many round trips a fix is made of."""

_LEAST_S = 1.0
"""Fixes that are closer to each other tell nothing of drift that would not be noise."""


@lru_cache(maxsize=1)
def clock_id() -> str:
    """What names the clock of `time.monotonic`: the boot of this host and the time namespace; empty: not known."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        with suppress(OSError):
            return f"{boot}/{Path('/proc/self/ns/time').readlink()}"
        return boot
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One round trip.

    Attributes:
        sent_s: When the question left, by one's own clock.
        remote_s: When it was answered, by the other one.
        received_s: When the answer was back.
    """

    sent_s: float
    remote_s: float
    received_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Fix:
    """What the other clock showed at a moment of one's own.

    Attributes:
        at_s: The moment.
        offset_s: The other clock less one's own.
        uncertainty_s: By how much that may be wrong, either way.
    """

    at_s: float
    offset_s: float
    uncertainty_s: float


def fix(samples: Iterable[Sample]) -> Fix | None:
    """The best that can be known from round trips; None where there is none."""
    best = min(samples, key=lambda one: one.received_s - one.sent_s, default=None)
    if best is None:
        return None
    half_s = max((best.received_s - best.sent_s) / 2, 0.0)
    middle_s = best.sent_s + half_s
    return Fix(at_s=middle_s, offset_s=best.remote_s - middle_s, uncertainty_s=half_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Alignment:
    """From the other clock to one's own.

    Attributes:
        first: A fix; None: it is the same clock.
        last: A later one, if there is any.
    """

    first: Fix | None = None
    last: Fix | None = None

    @property
    def uncertainty_s(self) -> float:
        """By how much times may be wrong between the fixes, either way."""
        worst_s = max((one.uncertainty_s for one in (self.first, self.last) if one is not None), default=0.0)
        return worst_s / (1 + min(self.drift, 0.0))  # what is wrong by the other clock is more by a faster one

    @property
    def drift(self) -> float:
        """How much faster the other clock goes, in seconds per second; 0 where that is not known."""
        first, last = self.first, self.last
        if first is None or last is None:
            return 0.0
        between_s = last.at_s - first.at_s
        if between_s < max(_LEAST_S, 2 * (first.uncertainty_s + last.uncertainty_s)):
            return 0.0
        return (last.offset_s - first.offset_s) / between_s

    def local(self, remote_s: float) -> float:
        """When it was, by one's own clock, that the other one showed this."""
        first, last = self.first, self.last
        if first is None:
            return remote_s
        drift = self.drift
        if not drift and last is not None and last.uncertainty_s < first.uncertainty_s:
            first = last
        return first.at_s + (remote_s - first.at_s - first.offset_s) / (1 + drift)
