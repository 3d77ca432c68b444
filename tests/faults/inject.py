"""Fault objects that a test puts into a participant; each says whether it was consumed."""

from __future__ import annotations

import os
import threading
from dataclasses import replace

from raycollect.errors import KernelError
from raycollect.runtime import Runtime


class Fault:
    """Does something once, at a point of the executor.

    Args:
        point: One of `raycollect.executor.POINTS`.
        action: ``"raise"``, ``"die"`` or ``"stall"`` (until `release`).
    """

    def __init__(self, point, action):
        self.point = point
        self.action = action
        self.consumed = False
        self.reached = threading.Event()
        self.released = threading.Event()

    def at(self, point, seq, rank):
        if point != self.point or self.consumed:
            return
        self.consumed = True
        self.reached.set()
        if self.action == "die":
            os._exit(1)
        if self.action == "raise":
            raise KernelError(detail=f"injected at {point}")
        assert self.released.wait(60)


def put(actor_self, point, action):
    """Puts a fault into this participant. Runs inside the actor."""
    fault = Fault(point, action)
    runtime = Runtime.current()
    runtime.instruments = replace(runtime.instruments, faults=fault)


def was_consumed(actor_self):
    """True once the fault has struck. Runs inside the actor."""
    return Runtime.current().instruments.faults.consumed
