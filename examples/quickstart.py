"""The shortest use: two actors, one call, and both buffers hold the sum.

python examples/quickstart.py
"""

from __future__ import annotations

from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray

import raycollect as col


@ray.remote(num_cpus=0)
class Worker(col.CollectiveParticipant):
    def __init__(self) -> None:
        self.buffer = np.ones(10, np.float32)

    def get_buffer(self) -> NDArray[np.float32]:
        return self.buffer


def main() -> list[NDArray[np.float32]]:
    # Ray starts by itself; RAY_ADDRESS names a cluster. Any, as its types know `remote` of `@ray.method`s only.
    A: Any = Worker.remote()  # noqa: N806
    B: Any = Worker.remote()  # noqa: N806
    col.declare_collective_group([A, B])

    refs = [A.get_buffer.remote(), B.get_buffer.remote()]  # real ObjectRefs, but the arrays stay in their actors
    col.allreduce_refs(refs)  # both buffers now hold the sum

    buffers: list[NDArray[np.float32]] = col.get(refs)
    col.destroy_collective_group()
    return buffers


if __name__ == "__main__":
    for name, buffer in zip("AB", main(), strict=True):
        print(f"{name}: {buffer}")
