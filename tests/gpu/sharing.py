"""Ranks that share one GPU and work in each other's memory by CUDA IPC, whatever NCCL there is.

Real ones are processes. On the fake they are threads that stand for processes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any

from raycollect.backends.nccl.ipc_group import share
from raycollect.core.model import GroupSpec
from raycollect.core.protocols import Communicator, Joining
from tests.pure.communicators import MemoryExchange, ProcessTeam, Team, ThreadTeam, Worker

from . import devices

DEVICE = 0


class SharingThreads(ThreadTeam):
    """Ranks in threads of this process, each as a process of the fake."""

    def __init__(self, world_size: int) -> None:
        super().__init__("nccl", world_size)

    def _create(self, rank: int) -> Communicator:
        with _as_process(rank):
            exchange = MemoryExchange(self.server, rank)
            return share(Joining(self.spec, rank, self.rendezvous, exchange), device=DEVICE)

    def _on(self, rank: int, body: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        with _as_process(rank):
            return super()._on(rank, body, args)

    def close(self) -> None:
        for rank, communicator in enumerate(self.communicators):
            with _as_process(rank):
                communicator.close()
        super().close()


def _as_process(rank: int) -> AbstractContextManager[None]:
    chosen: AbstractContextManager[None] = import_module("tests.fake_cupy").as_process(1 + rank)
    return chosen if devices.FAKE else nullcontext()


class SharingProcesses(ProcessTeam):
    """Ranks in worker processes, all on one GPU."""

    def __init__(self, world_size: int, workers: Sequence[Worker]) -> None:
        Team.__init__(self, "nccl", world_size)
        self.workers = workers[:world_size]
        self.exchanges = [MemoryExchange(self.server, rank) for rank in self.everyone]
        self.must(body_share, self.spec)


def body_share(process_group: Any, spec: GroupSpec) -> None:
    """Joins; the worker's thread works on that GPU from now on."""
    import_module("cupy").cuda.Device(DEVICE).use()
    if not devices.why_no_torch():
        import_module("torch").cuda.set_device(DEVICE)
    process_group.taken = share(
        Joining(spec, process_group.rank, process_group.line, process_group.line), device=DEVICE
    )


def form(world_size: int, workers: Callable[[int], Sequence[Worker]]) -> Team:
    """Makes a team.

    Args:
        world_size: How many ranks.
        workers: Gives processes for so many.
    """
    return SharingThreads(world_size) if devices.FAKE else SharingProcesses(world_size, workers(world_size))
