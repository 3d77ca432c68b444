"""Ranks that share a GPU of `tests.fake_cupy`: a thread each, which stands for a process of its own.

Their results have to be the left fold, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from raycollect.backends.nccl.ipc_group import IpcCommunicator
from raycollect.core.protocols import Communicator
from tests.fake_cupy import Fake
from tests.pure.on_gpu import GpuTeam, gpus

OLD = 22907
"""An NCCL that does not take several ranks on one GPU."""


class SharingTeam(GpuTeam):
    """Ranks on one GPU, each as a process.

    Args:
        fake: The GPU.
        world_size: The number of ranks.
        processes: How many processes they are in, in turn.
    """

    is_bitwise = True

    def __init__(self, fake: Fake, world_size: int, *, processes: int = 0) -> None:
        self._fake, self._processes = fake, processes or world_size
        super().__init__(world_size)

    def as_process(self, rank: int) -> Any:
        """Lets the calling thread be that rank's process, as a context manager."""
        return self._fake.as_process(1 + rank % self._processes)

    def of(self, rank: int) -> IpcCommunicator:
        """A rank's communicator."""
        found = self.communicators[rank]
        assert isinstance(found, IpcCommunicator)
        return found

    def _create(self, rank: int) -> Communicator:
        with self.as_process(rank):
            return super()._create(rank)

    def _on(self, rank: int, body: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        with self.as_process(rank):
            return super()._on(rank, body, args)

    def close_one(self, rank: int) -> None:
        """Closes a rank's communicator, in its process."""
        with self.as_process(rank):
            self.communicators[rank].close()

    def close(self) -> None:
        for rank in range(len(self.communicators)):
            self.close_one(rank)
        super().close()


@contextmanager
def sharing(world_size: int, *, seed: int = 0, **how: Any) -> Iterator[tuple[Fake, SharingTeam]]:
    """A team whose ranks share a GPU with an old NCCL; in the end nothing of others is open."""
    with gpus(1, seed=seed, nccl_version=OLD) as fake:
        team = SharingTeam(fake, world_size, **how)
        try:
            yield fake, team
        finally:
            team.close()
        assert not fake.opened
        assert not fake.counts["nccl.communicators"]
