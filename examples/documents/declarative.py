"""The declarative call that the documents announced: a collective specified completely, not partially on each actor.

The document uses cupy, and ``options={rank=[0, 1], ...}``, which is not valid Python. Here the class has the mixin.

python -m examples.documents.declarative
"""

from __future__ import annotations

from typing import Any

import numpy as np
import ray

import raycollect as col


@ray.remote(num_cpus=0)
class Worker(col.CollectiveParticipant):
    def __init__(self) -> None:
        self.buffer = np.ones((10,), dtype=np.float32)

    def get_buffer(self) -> np.ndarray[Any, Any]:
        return self.buffer


def main() -> list[np.ndarray[Any, Any]]:
    # Create two actors and create a collective group
    A: Any = Worker.remote()  # noqa: N806
    B: Any = Worker.remote()  # noqa: N806
    col.declare_collective_group([A, B], options={"rank": [0, 1], "world_size": 2})

    # Specify a collective allreduce "completely" instead of "partially" on each actor
    refs = [A.get_buffer.remote(), B.get_buffer.remote()]
    col.allreduce_refs(refs)
    buffers: list[np.ndarray[Any, Any]] = col.get(refs)
    col.destroy_collective_group()
    return buffers


if __name__ == "__main__":
    print(main())
