"""reduce: one rank gets the sum over all; the other tensors stay unchanged.

python -m examples.tutorial.reduce
"""

from __future__ import annotations

from typing import Any

import ray
import torch

import raycollect as col
from examples.tutorial import run

ROOT = 0


@ray.remote(num_cpus=0)
class Rank(col.CollectiveParticipant):
    def __init__(self, rank: int) -> None:
        self.tensor = torch.tensor([rank + 1.0])

    def get_tensor(self) -> torch.Tensor:
        return self.tensor

    @col.by_value
    def reduce(self) -> torch.Tensor:
        col.reduce(self.tensor, dst_rank=ROOT, op=col.ReduceOp.SUM)
        return self.tensor


def shown(before: list[torch.Tensor], after: list[torch.Tensor]) -> list[str]:
    lines = [f"Rank {rank} before reduce: {tensor}" for rank, tensor in enumerate(before)]
    lines.append(f"Rank {ROOT} is the root.")
    for rank, tensor in enumerate(after):
        lines.append(f"Rank {rank} after reduce: {'' if rank == ROOT else '(unchanged) '}{tensor}")
    return lines


def imperative(workers: list[Any]) -> list[str]:
    before = col.get([worker.get_tensor.remote() for worker in workers])
    return shown(before, ray.get([worker.reduce.remote() for worker in workers]))


def declarative(workers: list[Any]) -> list[str]:
    refs = [worker.get_tensor.remote() for worker in workers]
    before = col.get(refs)
    col.reduce_refs(refs, dst_rank=ROOT, op=col.ReduceOp.SUM)
    return shown(before, col.get(refs))


def main() -> list[list[str]]:
    return run(Rank, imperative, declarative)


if __name__ == "__main__":
    main()
