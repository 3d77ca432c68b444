"""How far the kernels of a thread are: a number that the thread writes, and others read where somebody asks.

There is no lock, and nothing is noted for a kernel of one chunk: a number that is one chunk old is good enough.
"""

from __future__ import annotations

import threading

__all__ = ["LENT", "Meter", "here"]

LENT = -1.0
"""In place of a number: this rank has lent its tensors, and waits for those who work in them."""


class Meter:
    """How far a thread is in the kernels that it has begun and not ended. Other threads only read it.

    Attributes:
        part: How many of them it has done, by their bytes: half of one kernel is 0.5. `LENT`: others do them.
        base: What was done before the chunks that are under way.
        span: How many kernels these chunks are.
    """

    __slots__ = ("base", "part", "span")

    def __init__(self) -> None:
        self.part: float = 0.0
        self.base: float = 0.0
        self.span: float = 1.0

    def clear(self) -> None:
        """Begins the next kernel."""
        self.part = self.base = 0.0
        self.span = 1.0

    def cover(self, base: float, span: float) -> None:
        """Says which part of the kernels under way the chunks are that come next; see `base` and `span`."""
        self.part = self.base = base
        self.span = span


_local = threading.local()


def here() -> Meter:
    """The meter of this thread."""
    try:
        meter: Meter = _local.meter
    except AttributeError:
        meter = _local.meter = Meter()
    return meter
