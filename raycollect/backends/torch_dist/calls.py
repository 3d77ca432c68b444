"""Calls of a `torch.distributed` library by one kernel: their options and waits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from raycollect.backends.kernels import late
from raycollect.backends.torch_dist.group import c10d
from raycollect.core import threads
from raycollect.core.model import Launch, ReduceOp

LOOK_S = 0.05  # How often a wait checks for an abort
SETTLE_S = 10.0  # How long after its time limit a library call may take to end once its connections were shut down


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """A `torch.distributed` backend that a rank has joined."""

    backend: Any
    rank: int
    world_size: int
    group_name: str  # for errors
    is_patient: bool  # whether a collective continues after a wait that timed out
    # shuts down the library's connections, and so ends its running calls; None: impossible
    sever: Callable[[], None] | None = None


class Calls:
    """The calls of one kernel; `look` raises if the launch was aborted, or the communicator closed."""

    def __init__(self, library: Library, launch: Launch, look: Callable[[Launch], None]) -> None:
        self.library = library
        self.has_begun: bool = False  # whether the library has accepted any call
        self.device: Any = None  # the device of the tensors, unless they are in CPU memory
        self._open: list[Any] = []  # works that have begun and not been finished
        self._launch = launch
        self._look_outside = look
        self._until_s = time.monotonic() + launch.timeout_s

    def options(self, cls: Any, *, op: ReduceOp | None = None, root: int | None = None) -> Any:
        """Makes the library's options; its own threads get the same time limit."""
        options = cls()
        options.timeout = self._left()
        if op is not None:
            options.reduceOp = getattr(c10d.ReduceOp, "SUM" if op is ReduceOp.AVG else op.name)
        if root is not None:
            options.rootRank = root
        return options

    def do(self, function: Callable[..., Any], *args: Any, is_pair: bool = False) -> None:
        """Calls the library and waits until this rank's part is done."""
        with self.settled():
            self.finish(self.begin(function, *args), is_pair=is_pair)

    def begin(self, function: Callable[..., Any], *args: Any) -> Any:
        """Calls the library; the work continues in its threads. Called within `settled`."""
        work = function(*args)
        self.has_begun = True
        self._open.append(work)
        return work

    def finish(self, work: Any, *, is_pair: bool = False) -> None:
        """Waits until this rank's part of a work is done."""
        if is_pair or not self._is_patient:
            self._wait_beside(work)
        else:
            self._wait(work)
        self._open.remove(work)

    @contextmanager
    def settled(self) -> Iterator[None]:
        """Ensures that a failure leaves no running work in the user's arrays."""
        try:
            yield
        except BaseException:
            works, self._open = self._open, []
            for work in works if self._is_patient else ():
                self._settle(work)
            raise

    @property
    def _is_patient(self) -> bool:
        return self.library.is_patient and self.device is None

    def _wait(self, work: Any) -> None:
        # A work survives a wait that timed out.
        while True:
            try:
                work.wait(timedelta(seconds=LOOK_S))
            except RuntimeError:
                if work.is_completed():
                    work.wait()  # raises its error, if it has failed
                    return
                self.look()
            else:
                return

    def _settle(self, work: Any) -> None:
        # Waits until the library no longer uses the user's arrays, soon after its connections were shut down.
        if self.library.sever is None or work.is_completed():
            return
        self.library.sever()
        until_s = max(self._until_s, time.monotonic()) + SETTLE_S
        while not work.is_completed() and time.monotonic() < until_s:
            with suppress(RuntimeError):
                work.wait(timedelta(seconds=LOOK_S))

    def _wait_beside(self, work: Any) -> None:
        # A wait that times out ends a send or receive of gloo, and the whole group of other libraries: waits in a
        # thread.
        device = self.device

        def wait() -> None:
            try:
                work.wait(self._left())
                if device is not None:  # the wait may only have enqueued a wait
                    getattr(torch, device.type).synchronize(device)
            except Exception as exc:
                if not isinstance(exc, RuntimeError):  # all errors of torch are
                    threads.failed("waiting for a call of torch", exc)
                raise

        waiting = threads.call_in_helper(wait)
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
