"""Ranks on GPUs: one in this process; several in processes of their own, each on its GPU, or together on one.

On the fake, ranks are threads, since its NCCL knows one process.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from raycollect import backends
from raycollect.core.protocols import Communicator, Joining
from tests.pure.communicators import MemoryExchange, ProcessTeam, Team, ThreadTeam, Worker
from tests.support.values import replace

from . import devices


class GpuThreads(ThreadTeam):
    """Ranks in threads of this process, in turn on its GPUs."""

    def __init__(self, world_size: int) -> None:
        self._count = devices.count()
        super().__init__("nccl", world_size)

    def _create(self, rank: int) -> Communicator:
        create = backends.load(self.backend, self.spec.name)
        spec = replace(self.spec, options=(("device", rank % self._count),))
        return create(Joining(spec, rank, self.rendezvous, MemoryExchange(self.server, rank)))

    def _on(self, rank: int, body: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        with import_module("cupy").cuda.Device(rank % self._count):
            return super()._on(rank, body, args)


class GpuProcesses(ProcessTeam):
    """Ranks in worker processes, in turn on the GPUs."""

    def __init__(self, world_size: int, workers: Sequence[Worker]) -> None:
        count = devices.count()
        for rank in range(world_size):
            chosen = workers[rank].call((("device", rank), body_use_device, (rank % count,)), {})
            if isinstance(chosen, BaseException):
                raise chosen
        super().__init__("nccl", world_size, workers, addresses=[devices.host_of(rank) for rank in range(world_size)])


def body_use_device(seat: Any, device: int) -> None:
    """The worker's thread works on this GPU from now on, torch too; a group without the option takes it."""
    os.environ.update(devices.environment_of(seat.rank))
    import_module("cupy").cuda.Device(device).use()
    if not devices.why_no_torch():
        import_module("torch").cuda.set_device(device)


def form(world_size: int, workers: Callable[[int], Sequence[Worker]]) -> Team:
    """Makes a team.

    Args:
        world_size: How many ranks.
        workers: Gives processes for so many.
    """
    if world_size == 1 or devices.FAKE:
        return GpuThreads(world_size)
    return GpuProcesses(world_size, workers(world_size))
