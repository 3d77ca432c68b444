"""A send and the receive that matches it, and a send without one.

The document has ``import ray.util.collective as col``, cupy and ``num_gpus=1``; its ``col.send(target_rank)`` and
``col.recv(src_rank)`` lack the tensor, its ``options={rank=[0, 1], ...}`` is not valid Python, and its last line hangs.

python -m examples.documents.point_to_point
"""

from __future__ import annotations

from typing import Any

import numpy as np
import ray

import raycollect as col


@ray.remote(num_cpus=0)
class Worker:
    def __init__(self, value: float) -> None:
        self.buffer = np.full((10,), value, dtype=np.float32)

    def get_buffer(self) -> np.ndarray[Any, Any]:
        return self.buffer

    def do_send(self, target_rank: int = 0, timeout_s: float | None = None) -> None:
        # this call is blocking
        col.send(self.buffer, target_rank, timeout_s=timeout_s)

    def do_recv(self, src_rank: int = 0) -> None:
        # this call is blocking
        col.recv(self.buffer, src_rank)

    def do_allreduce(self) -> np.ndarray[Any, Any]:
        # this call is blocking as well
        col.allreduce(self.buffer)
        return self.buffer


def main() -> tuple[np.ndarray[Any, Any], str]:
    # Create two actors
    A: Any = Worker.remote(3)  # noqa: N806
    B: Any = Worker.remote(4)  # noqa: N806

    # Put A and B in a collective group
    col.declare_collective_group([A, B], options={"rank": [0, 1], "world_size": 2, "backend": "gloo"})

    # let A send a message to B; a send/recv has to be specified once at each worker
    ray.get([A.do_send.remote(target_rank=1), B.do_recv.remote(src_rank=0)])
    received: np.ndarray[Any, Any] = ray.get(B.get_buffer.remote())

    # An anti-pattern: no rank receives. In the document this hangs; here it is an error that names the rank.
    error = ""
    try:
        ray.get([A.do_send.remote(target_rank=1, timeout_s=0.5)])
    except col.errors.CollectiveTimeoutError as exc:
        error = str(exc)
    ray.get([A.do_allreduce.remote(), B.do_allreduce.remote()])  # and the group still works
    col.destroy_collective_group()
    return received, error


if __name__ == "__main__":
    print(*main(), sep="\n")
