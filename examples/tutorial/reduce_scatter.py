"""reducescatter: the sum over all, of which every rank gets its part.

The input of a rank is one contiguous tensor here, as long as the parts of all ranks together. A list of parts works as
well.

python -m examples.tutorial.reduce_scatter
"""

from __future__ import annotations

from typing import Any

import ray
import torch

import raycollect as col
from examples.tutorial import WORLD_SIZE, run, shown

TENSOR_SIZE = 2


@ray.remote(num_cpus=0)
class Rank(col.CollectiveParticipant):
    def __init__(self, rank: int) -> None:
        self.input_tensor = torch.ones(TENSOR_SIZE * WORLD_SIZE) * (rank + 1)

    def get_input(self) -> torch.Tensor:
        return self.input_tensor

    @col.by_value
    def reduce_scatter(self) -> torch.Tensor:
        output_tensor = torch.empty(TENSOR_SIZE)
        col.reducescatter(output_tensor, self.input_tensor, op=col.ReduceOp.SUM)
        return output_tensor


def imperative(workers: list[Any]) -> list[str]:
    before = col.get([worker.get_input.remote() for worker in workers])
    return shown("reduce_scatter", before, ray.get([worker.reduce_scatter.remote() for worker in workers]))


def declarative(workers: list[Any]) -> list[str]:
    refs = [worker.get_input.remote() for worker in workers]
    before = col.get(refs)
    return shown("reduce_scatter", before, col.get(col.reducescatter_refs(None, refs, op=col.ReduceOp.SUM)))


def main() -> list[list[str]]:
    return run(Rank, imperative, declarative)


if __name__ == "__main__":
    main()
