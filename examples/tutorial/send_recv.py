"""send and recv: every rank's tensor goes to the next one, round a ring.

python -m examples.tutorial.send_recv
"""

from __future__ import annotations

from typing import Any

import ray
import torch

import raycollect as col
from examples.tutorial import WORLD_SIZE, run, shown


@ray.remote(num_cpus=0)
class Rank(col.CollectiveParticipant):
    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.tensor = torch.tensor([rank + 1.0])
        self.received = torch.zeros(1)

    def get_tensor(self) -> torch.Tensor:
        return self.tensor

    def get_received(self) -> torch.Tensor:
        return self.received

    @col.by_value
    def send_recv(self) -> torch.Tensor:
        # Both ends of a transfer wait for each other. With `async_op` a rank is at both of its ends at once.
        work = col.send(self.tensor, (self.rank + 1) % WORLD_SIZE, async_op=True)
        col.recv(self.received, (self.rank - 1) % WORLD_SIZE)
        work.wait()
        return self.received


def imperative(workers: list[Any]) -> list[str]:
    before = col.get([worker.get_tensor.remote() for worker in workers])
    return shown("send_recv", before, ray.get([worker.send_recv.remote() for worker in workers]))


def declarative(workers: list[Any]) -> list[str]:
    sources = [worker.get_tensor.remote() for worker in workers]
    targets = [worker.get_received.remote() for worker in workers]
    before = col.get(sources)
    for rank, source in enumerate(sources):
        col.send_ref(source, targets[(rank + 1) % WORLD_SIZE], async_op=True)
    return shown("send_recv", before, col.get(targets))


def main() -> list[list[str]]:
    return run(Rank, imperative, declarative)


if __name__ == "__main__":
    main()
