"""The progress of a thread's kernels: a number that the thread writes, and others read.

It has no lock, and kernels of one chunk write nothing: readers tolerate a number that is one chunk old.
"""

from __future__ import annotations

import threading

LENT = -1.0  # instead of a number: this rank has lent its tensors, and waits for the ranks that use them


class KernelProgress:
    """The progress of a thread in its unfinished kernels. Other threads only read it."""

    __slots__ = ("base", "part", "span")

    def __init__(self) -> None:
        self.part: float = 0.0  # finished kernels, by bytes: half a kernel is 0.5; `LENT`: other ranks do them
        self.base: float = 0.0  # the progress before the current chunks
        self.span: float = 1.0  # the number of kernels that these chunks make up

    def cover(self, base: float = 0.0, span: float = 1.0) -> None:
        """Sets the share of the kernels that the next chunks make up; by default, the next kernel begins."""
        self.part = self.base = base
        self.span = span


_local = threading.local()


def here() -> KernelProgress:
    """Returns the progress of this thread."""
    try:
        mine: KernelProgress = _local.kernel_progress
    except AttributeError:
        mine = _local.kernel_progress = KernelProgress()
    return mine
