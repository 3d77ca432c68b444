"""Two ways to form a group: each actor joins by itself, or the driver declares the group.

The document has ``import ray.util.collective as collective``, cupy, ``num_gpus=1`` and the backend "nccl"; and its
second part adds two workers to the first two, which makes four in a group of two.

python -m examples.documents.groups
"""

from __future__ import annotations

from typing import Any

import numpy as np
import ray

import raycollect as collective


@ray.remote(num_cpus=0)
class Worker:
    def __init__(self) -> None:
        self.send = np.ones((4,), dtype=np.float32)
        self.recv = np.zeros((4,), dtype=np.float32)

    def setup(self, world_size: int, rank: int) -> bool:
        collective.init_collective_group(world_size, rank, "gloo", "default")
        return True

    def compute(self, group_name: str = "default") -> np.ndarray[Any, Any]:
        collective.allreduce(self.send, group_name)
        return self.send

    def destroy(self) -> None:
        collective.destroy_group()


def imperative() -> list[np.ndarray[Any, Any]]:
    num_workers = 2
    workers: list[Any] = []
    init_rets = []
    for i in range(num_workers):
        w: Any = Worker.remote()
        workers.append(w)
        init_rets.append(w.setup.remote(num_workers, i))
    _ = ray.get(init_rets)
    results: list[np.ndarray[Any, Any]] = ray.get([w.compute.remote() for w in workers])
    ray.get([w.destroy.remote() for w in workers])
    return results


def declarative() -> list[np.ndarray[Any, Any]]:
    workers: list[Any] = [Worker.remote() for _ in range(2)]
    _options = {"group_name": "177", "world_size": 2, "ranks": [0, 1], "backend": "gloo"}
    collective.declare_collective_group(workers, **_options)
    results: list[np.ndarray[Any, Any]] = ray.get([w.compute.remote("177") for w in workers])
    collective.destroy_collective_group("177")
    return results


if __name__ == "__main__":
    print(imperative(), declarative())
