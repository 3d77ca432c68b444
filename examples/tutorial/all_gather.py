"""allgather: every rank gets the tensors of all.

python -m examples.tutorial.all_gather
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
        self.tensor = torch.tensor([rank + 1.0])

    def get_tensor(self) -> torch.Tensor:
        return self.tensor

    @col.by_value
    def all_gather(self) -> list[torch.Tensor]:
        gather_list = [torch.zeros_like(self.tensor) for _ in range(WORLD_SIZE)]
        col.allgather(gather_list, self.tensor)
        return gather_list


def imperative(workers: list[Any]) -> list[str]:
    before = col.get([worker.get_tensor.remote() for worker in workers])
    return shown("all_gather", before, ray.get([worker.all_gather.remote() for worker in workers]))


def declarative(workers: list[Any]) -> list[str]:
    refs = [worker.get_tensor.remote() for worker in workers]
    before = col.get(refs)
    return shown("all_gather", before, col.get(col.allgather_refs(None, refs)))


def main() -> list[list[str]]:
    return run(Rank, imperative, declarative)


if __name__ == "__main__":
    main()
