"""Calls of a `torch.distributed` library by one kernel: their options, and how to wait for them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from raycollect.backends.completion import late
from raycollect.backends.torch_dist.group import c10d
from raycollect.core import threads
from raycollect.core.model import Launch, ReduceOp

LOOK_S = 0.05  # How often a wait checks for an abort


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """A `torch.distributed` backend that a rank has joined."""

    backend: Any
    rank: int
    world_size: int
    group_name: str  # for errors
    is_patient: bool  # whether a collective goes on after a wait that was too short


class Calls:
    """The calls of one kernel; `look` raises if the launch was aborted, or the communicator closed."""

    def __init__(self, library: Library, launch: Launch, look: Callable[[Launch], None]) -> None:
        self.library = library
        self.has_begun: bool = False  # whether the library has accepted any call
        self.device: Any = None  # where the tensors are, if that is not CPU memory
        self._launch = launch
        self._look_outside = look
        self._until_s = time.monotonic() + launch.timeout_s

    def options(self, cls: Any, *, op: ReduceOp | None = None, root: int | None = None) -> Any:
        """Makes the library's options; its own threads give up when we do."""
        options = cls()
        options.timeout = self._left()
        if op is not None:
            options.reduceOp = getattr(c10d.ReduceOp, "SUM" if op is ReduceOp.AVG else op.name)
        if root is not None:
            options.rootRank = root
        return options

    def do(self, function: Callable[..., Any], *args: Any, is_pair: bool = False) -> None:
        """Calls the library and waits until this rank's part is done."""
        work = function(*args)
        self.has_begun = True
        if is_pair or self.device is not None or not self.library.is_patient:
            self._wait_beside(work)
        else:
            self._wait(work)

    def _wait(self, work: Any) -> None:
        # A work survives a wait that was too short.
        while True:
            try:
                work.wait(timedelta(seconds=LOOK_S))
            except RuntimeError:
                if work.is_completed():
                    work.wait()  # raises what it has, or it ended just now
                    return
                self.look()
            else:
                return

    def _wait_beside(self, work: Any) -> None:
        # gloo ends a send or receive with a wait that is too short, other libraries the whole group: waits in a thread.
        device = self.device

        def wait() -> None:
            try:
                work.wait(self._left())
                if device is not None:  # the wait may have been one of its queue only
                    getattr(torch, device.type).synchronize(device)
            except Exception as exc:
                if not isinstance(exc, RuntimeError):  # as all errors of torch are
                    threads.failed("waiting for a call of torch", exc)
                raise

        waiting = threads.apart(wait)
        while not threads.has_ended(waiting, LOOK_S):
            self.look()
        waiting.result()

    def _left(self) -> timedelta:
        return timedelta(seconds=max(self._until_s - time.monotonic(), 0.001))

    def look(self) -> None:
        """Raises if the launch was aborted or is late, or the communicator was closed."""
        self._look_outside(self._launch)
        if time.monotonic() > self._until_s:
            raise late(self.library.group_name, self._launch)
