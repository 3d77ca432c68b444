"""allreduce: every rank gets the sum over all.

python -m examples.tutorial.all_reduce
"""

from __future__ import annotations

from typing import Any

import ray
import torch

import raycollect as col
from examples.tutorial import run, shown


@ray.remote(num_cpus=0)
class Rank(col.CollectiveParticipant):
    def __init__(self, rank: int) -> None:
        self.tensor = torch.tensor([rank + 1.0])

    def get_tensor(self) -> torch.Tensor:
        return self.tensor

    @col.by_value
    def all_reduce(self) -> torch.Tensor:
        col.allreduce(self.tensor, op=col.ReduceOp.SUM)
        return self.tensor


def imperative(workers: list[Any]) -> list[str]:
    before = col.get([worker.get_tensor.remote() for worker in workers])
    return shown("all_reduce", before, ray.get([worker.all_reduce.remote() for worker in workers]))


def declarative(workers: list[Any]) -> list[str]:
    refs = [worker.get_tensor.remote() for worker in workers]
    before = col.get(refs)
    return shown("all_reduce", before, col.get(col.allreduce_refs(refs, op=col.ReduceOp.SUM)))


def main() -> list[list[str]]:
    return run(Rank, imperative, declarative)


if __name__ == "__main__":
    main()
