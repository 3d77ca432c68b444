"""A collective without the agreement of its ranks, to learn what the consistency check costs. For measurements only.

What stays: the operands are looked up and compared with those of the last run, the launch is begun and ended, the
kernel stages, waits at its barrier and folds. What goes: arrivals are neither written nor read nor compared, and
nothing is staged ahead of them. With the consistency check its barrier is the kernel's first one; without it the kernel
has one of its own, so that both ways have as many. A collective that has not run before on operands like these goes
through the check, to find out what to do. It is right for small tensors of a `shm` group that stay as they are.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from raycollect.backends.shm.communicator import ShmCommunicator

__all__ = ["left_out", "set_check"]

_AGAIN = ShmCommunicator.again
_left_out = 0


def set_check(there: bool) -> None:
    """Has all collectives of this process that are run again agree from now on, or not."""
    ShmCommunicator.again = _AGAIN if there else _begin  # type: ignore[method-assign]


def left_out() -> int:
    """How often this process has left the agreement out."""
    return _left_out


def _begin(communicator: Any, launch: Any, kernel: Any, arrival: bytes, expected: Sequence[bytes]) -> None:
    """Begins the launch as `ShmCommunicator.again` does, but stages nothing, and meets nobody."""
    global _left_out
    _left_out += 1
    parts = communicator._come_in()
    try:
        parts.meeting.enter(launch, time.monotonic() + launch.timeout_s)
        communicator._begin(parts, launch)
    finally:
        communicator._go_out()
