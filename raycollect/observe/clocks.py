"""Compares the clocks of two processes by messages between them.

`time.monotonic` is one clock for all processes of a host: if both have the same clock id, the offset is zero. Otherwise
the offset is estimated by Cristian's algorithm (F. Cristian, Probabilistic clock synchronization, 1989), which assumes
that the other clock was read in the middle of the shortest round trip. The error is at most half of that round trip,
even if the two directions differ. Two such fixes, at the beginning and at the end, give the drift.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

ROUND_TRIPS = 8
"""The number of round trips of a fix."""

_LEAST_S = 1.0
"""The least time between two fixes: the drift of closer ones is noise."""


@lru_cache(maxsize=1)
def clock_id() -> str:
    """Returns the id of the clock of `time.monotonic`: boot and time namespace of this host; empty if unknown."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        with suppress(OSError):
            return f"{boot}/{Path('/proc/self/ns/time').readlink()}"
        return boot
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One round trip: sent and received by this clock, answered by the other clock."""

    sent_s: float
    remote_s: float
    received_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Fix:
    """The offset of the other clock from this clock at one moment, and its error in either direction."""

    at_s: float
    offset_s: float
    uncertainty_s: float


def fix(samples: Iterable[Sample]) -> Fix | None:
    """Returns the fix by the shortest round trip; None for no samples."""
    best = min(samples, key=lambda sample: sample.received_s - sample.sent_s, default=None)
    if best is None:
        return None
    half_s = max((best.received_s - best.sent_s) / 2, 0.0)
    middle_s = best.sent_s + half_s
    return Fix(at_s=middle_s, offset_s=best.remote_s - middle_s, uncertainty_s=half_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Alignment:
    """Converts times of the other clock to this clock."""

    first: Fix | None = None  # a fix; None: both processes have one clock
    last: Fix | None = None  # a later fix, if any

    @property
    def uncertainty_s(self) -> float:
        """The error of times between the fixes, in either direction."""
        worst_s = max((fix.uncertainty_s for fix in (self.first, self.last) if fix is not None), default=0.0)
        return worst_s / (1 + min(self.drift, 0.0))  # in seconds of this clock

    @property
    def drift(self) -> float:
        """How much faster the other clock runs, in seconds per second; 0 if unknown."""
        first, last = self.first, self.last
        if first is None or last is None:
            return 0.0
        between_s = last.at_s - first.at_s
        if between_s < max(_LEAST_S, 2 * (first.uncertainty_s + last.uncertainty_s)):
            return 0.0
        return (last.offset_s - first.offset_s) / between_s

    def local(self, remote_s: float) -> float:
        """Returns the time of this clock when the other clock showed `remote_s`."""
        first, last = self.first, self.last
        if first is None:
            return remote_s
        drift = self.drift
        if not drift and last is not None and last.uncertainty_s < first.uncertainty_s:
            first = last
        return first.at_s + (remote_s - first.at_s - first.offset_s) / (1 + drift)


SAME_CLOCK = Alignment()
