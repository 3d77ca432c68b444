"""What participants publish to Ray's metrics while a timeline is recorded with ``metrics=True``.

A thread reads the numbers from the ring every few seconds, so collectives do nothing for them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from ray.util.metrics import Counter, Histogram

from raycollect.core import threads
from raycollect.observe import Place, Ring, Span
from raycollect.observe.trace import CHECK, COLLECTIVE, KERNEL, Mark

EVERY_S = 2.0
"""How often the ring is read, in seconds."""

TAGS = ("group", "op", "backend", "rank")
_BOUNDS_S = [1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0]

CALLS, NBYTES, SECONDS, CHECK_SECONDS = (
    "raycollect_calls",
    "raycollect_bytes",
    "raycollect_seconds",
    "raycollect_check_seconds",
)
METRICS = {
    CALLS: "Collectives that this rank has run.",
    NBYTES: "Bytes of these collectives, as nccl-tests count them.",
    SECONDS: "Time of a collective on this rank, from leaving the consistency check to the end of its kernels.",
    CHECK_SECONDS: "Time in the consistency check of a plan: how long this rank waited until all had agreed.",
}
"""Name -> description. Ray puts ``ray_`` before names, and ``_total`` behind those of counters."""


@cache
def ray_meters() -> Mapping[str, Any]:
    """Ray's counters and histograms, by name."""
    return {
        **{name: Counter(name, METRICS[name], tag_keys=TAGS) for name in (CALLS, NBYTES)},
        **{
            name: Histogram(name, METRICS[name], boundaries=_BOUNDS_S, tag_keys=TAGS)
            for name in (SECONDS, CHECK_SECONDS)
        },
    }


class Publisher:
    """Publishes the spans that come into a ring, until it is closed; `places` gives this process's groups by id."""

    def __init__(
        self, ring: Ring, places: Callable[[], Mapping[str, Place]], meters: Mapping[str, Any] | None = None
    ) -> None:
        self._ring = ring
        self._places = places
        self._meters = meters
        self._mark = Mark()
        self._over = threading.Event()
        self._ended = threads.apart(self._work)

    def close(self) -> None:
        """Lets the thread publish the rest and end. Never waits."""
        self._over.set()

    def join(self, timeout_s: float) -> bool:
        """Waits for the end of the thread; False where it has not ended in time."""
        return threads.has_ended(self._ended, timeout_s)

    def _work(self) -> None:
        while not self._over.wait(EVERY_S):
            threads.survives(self._flush, place="publishing metrics")
        threads.survives(self._flush, place="publishing metrics")

    def _flush(self) -> None:
        meters = ray_meters() if self._meters is None else self._meters
        self._mark, spans = self._ring.since(self._mark)
        places = {**self._ring.groups, **self._places()}
        for span in spans:
            _publish(span, places, meters)


def _publish(span: Span, places: Mapping[str, Place], meters: Mapping[str, Any]) -> None:
    label = span.label
    if span.error or not (span.kind == CHECK or (span.kind in (COLLECTIVE, KERNEL) and label.calls)):
        return
    place = places.get(label.group_id)
    tags = {
        "group": label.group_id if place is None else place.name,
        "op": label.op,
        "backend": "" if place is None else place.backend,
        "rank": str(label.rank),
    }
    took_s = span.end_s - span.begin_s
    if span.kind == CHECK:
        meters[CHECK_SECONDS].observe(took_s, tags=tags)
        return
    for name, value in ((CALLS, label.calls), (NBYTES, label.nbytes)):
        if value > 0:  # Ray accepts no other
            meters[name].inc(value, tags=tags)
    meters[SECONDS].observe(took_s, tags=tags)
