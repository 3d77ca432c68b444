"""Publishes the counters of a process to Ray's metrics."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from functools import cache
from typing import Protocol

from ray.util.metrics import Counter

from raycollect.core import threads
from raycollect.core.timers import Watcher
from raycollect.observe.counters import Counters, Tally
from raycollect.ray_bridge import ray_session

ENVIRONMENT_VARIABLE = "RAYCOLLECT_METRICS"

EVERY_S = 2.0
"""How often totals are published while they change, in seconds."""

TAGS = ("group", "operation")

METRICS = {
    "raycollect_calls_total": ("calls", "Collectives that this rank has completed."),
    "raycollect_bytes_total": ("nbytes", "Bytes of these collectives, as nccl-tests count them."),
    "raycollect_seconds_total": ("seconds", "Their time, from the end of the agreement to the end of the kernels."),
    "raycollect_wait_seconds_total": (
        "wait_seconds",
        "Time of their agreement, which is mostly waiting for other ranks.",
    ),
    "raycollect_failures_total": ("failures", "Runs that failed on this rank, aborted ones included."),
}
"""Name -> (field of `Tally`, description). Ray puts ``ray_`` before the names."""


class Meter(Protocol):
    """One of Ray's counters."""

    def inc(self, value: float, tags: dict[str, str]) -> None:
        """Adds to it."""


@cache
def ray_meters() -> Mapping[str, Meter]:
    """Returns Ray's counters, by name."""
    return {name: Counter(name, description, tag_keys=TAGS) for name, (_, description) in METRICS.items()}


class MetricsPublisher(Watcher):
    """Publishes totals from the timer's thread, every few seconds while they change, and only while Ray runs."""

    def __init__(
        self,
        counters: Counters,
        meters: Callable[[], Mapping[str, Meter]] = ray_meters,
        is_connected: Callable[[], bool] = ray_session.is_connected,
    ) -> None:
        super().__init__()
        self._counters = counters
        self._meters = meters
        self._is_connected = is_connected
        self._published: dict[tuple[str, Tally], float] = {}

    def wake(self) -> None:
        """Publishes soon. Never raises."""
        if self._is_connected():
            threads.survives(self.look_after, EVERY_S)
        else:
            self._counters.is_idle = True  # the process may join Ray later

    def look(self) -> float:
        """Publishes the counts since the last look."""
        counters, has_changed = self._counters, False
        counters.is_idle = self._is_connected()  # first: counts from now on call `wake`
        if not counters.is_idle:
            return math.inf
        meters = self._meters()
        for tally in counters.tallies():
            tags = {"group": tally.group, "operation": tally.operation}
            for name, (field, _) in METRICS.items():
                total = getattr(tally, field)
                fresh = total - self._published.get((name, tally), 0)
                if fresh > 0:
                    meters[name].inc(fresh, tags=tags)
                    self._published[name, tally] = total
                    has_changed = True
        counters.is_idle = not has_changed
        return EVERY_S if has_changed else math.inf


def publish(counters: Counters, name_of: Callable[[str], str]) -> None:
    """Publishes the totals of a process if its environment asks for it; `name_of`: as in `Counters`."""
    counters.name_of = name_of
    if os.environ.get(ENVIRONMENT_VARIABLE) == "1":
        counters.publish = MetricsPublisher(counters).wake
