"""The progress of the kernels of a thread: a number that the thread writes, and others read.

There is no lock, and kernels of one chunk write nothing: a number that is one chunk old is good enough.
"""

from __future__ import annotations

import threading

LENT = -1.0  # in place of a number: this rank has lent its tensors, and waits for those who work in them


class KernelProgress:
    """The progress of a thread in the kernels that it has begun and not ended. Other threads only read it."""

    __slots__ = ("base", "part", "span")

    def __init__(self) -> None:
        self.part: float = 0.0  # how many it has done, by their bytes: half a kernel is 0.5; `LENT`: others do them
        self.base: float = 0.0  # what was done before the chunks that are under way
        self.span: float = 1.0  # how many kernels these chunks are

    def cover(self, base: float = 0.0, span: float = 1.0) -> None:
        """Sets the part of the kernels under way that the next chunks are; by default the next kernel begins."""
        self.part = self.base = base
        self.span = span


_local = threading.local()


def here() -> KernelProgress:
    """Returns that of this thread."""
    try:
        mine: KernelProgress = _local.kernel_progress
    except AttributeError:
        mine = _local.kernel_progress = KernelProgress()
    return mine
