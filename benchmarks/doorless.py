"""A collective without the agreement of its ranks, to learn what the door costs. For measurements only.

What stays: the operands are looked up and compared with those of the last run, the launch is begun and ended, the
kernel stages, waits at its barrier and folds. What goes: arrivals are neither written nor read nor compared, and
nothing is staged ahead of them. With the door its barrier is the kernel's first one; without it the kernel has one of
its own, so that both ways have as many. A collective that has not run before goes through the door, to find out what to
do. It is right for small tensors of a `shm` group that stay as they are.
"""

from __future__ import annotations

import time
from typing import Any

from raycollect.executor import Execution

__all__ = ["left_out", "set_door"]

_AGREE, _STAGE = Execution._agree, Execution._stage
_left_out = 0


def set_door(there: bool) -> None:
    """Has all collectives of this process agree from now on, or not."""
    Execution._agree = _AGREE if there else _agree
    Execution._stage = _STAGE if there else _begin


def left_out() -> int:
    """How often this process has left the agreement out."""
    return _left_out


def _agree(execution: Execution) -> Any:
    global _left_out
    if execution._known is None:
        return _AGREE(execution)
    _left_out += 1
    return execution._known.script


def _begin(execution: Execution, kernel: Any) -> None:
    """Begins the launch as `ShmCommunicator.stage` does, but stages nothing."""
    opened = execution._launches.stage()
    if execution._known is None or opened is None:
        _STAGE(execution, kernel)
        return
    communicator: Any = opened[0]
    launch = opened[1]
    parts = communicator._come_in()
    try:
        parts.meeting.enter(launch, time.monotonic() + launch.timeout_s)
        communicator._begin(parts, launch)
    finally:
        communicator._go_out()
