"""A group class of Ray's own as a backend: as it is, with Ray's types, in actors without the mixin."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import ray

from raycollect.core.model import GroupSpec, Kernel, Launch, OpKind, ReduceOp
from raycollect.core.protocols import Joining

pytest.importorskip("torch", reason="Ray's gloo group is torch's")


@ray.remote
class Member:
    """One rank; it knows nothing of participants."""

    def join(self, rank: int, world_size: int) -> tuple[str, ...]:
        from ray.util.collective.collective_group.torch_gloo_collective_group import TorchGLOOGroup

        from raycollect import backends, types
        from raycollect.backends.adopted import register_collective_backend

        register_collective_backend("RAY_GLOO", TorchGLOOGroup)
        spec = GroupSpec(name="g", group_id="nonce", backend="ray_gloo", world_size=world_size)
        self.everyone = tuple(range(world_size))
        self.communicator: Any = backends.load(types.Backend.RAY_GLOO)(Joining(spec, rank, None, None))
        return backends.ops_of("ray_gloo")

    def run(self, seq: int, kernel: Kernel) -> Kernel:
        # What Ray hands over is read-only; a result is written.
        dst = tuple(map(np.copy, kernel.dst)) if isinstance(kernel.dst, tuple) else kernel.dst
        dst = dst.copy() if isinstance(dst, np.ndarray) else dst
        kernel = Kernel(kind=kernel.kind, src=kernel.src, dst=dst, op=kernel.op, peer=kernel.peer)
        self.communicator.launch(Launch(seq=seq, ranks=self.everyone, timeout_s=20), (kernel,))
        return kernel

    def leave(self) -> None:
        self.communicator.close()


@pytest.mark.full
def test_gloo_group_of_ray_is_adopted(actors: Any) -> None:
    a, b = members = actors(Member, 2)
    ops = ray.get([member.join.remote(rank, 2) for rank, member in enumerate(members)])
    assert (
        ops[0]
        == ops[1]
        == ("allreduce", "reduce", "broadcast", "allgather", "reducescatter", "send", "recv", "barrier")
    )
    x, y = np.array([1.0, 5.0, 3.0]), np.array([4.0, 2.0, 3.0])

    def both(seq: int, first: Kernel, second: Kernel) -> list[Kernel]:
        return ray.get([a.run.remote(seq, first), b.run.remote(seq, second)])

    expected = {ReduceOp.MAX: np.maximum(x, y), ReduceOp.AVG: (x + y) / 2}
    for seq, (op, whole) in enumerate(expected.items(), 1):
        ended = both(seq, *(Kernel(kind=OpKind.ALLREDUCE, src=src, dst=np.zeros(3), op=op) for src in (x, y)))
        for kernel in ended:
            np.testing.assert_array_equal(kernel.dst, whole)

    pieces = (np.zeros(3), np.zeros(1))
    for kernel in both(3, *(Kernel(kind=OpKind.ALLGATHER, src=src, dst=pieces) for src in (x, y[:1]))):
        np.testing.assert_array_equal(kernel.dst[0], x)
        np.testing.assert_array_equal(kernel.dst[1], y[:1])

    send, recv = Kernel(kind=OpKind.SEND, src=x, peer=1), Kernel(kind=OpKind.RECV, dst=np.zeros(3), peer=0)
    np.testing.assert_array_equal(both(4, send, recv)[1].dst, x)
    ray.get([member.leave.remote() for member in members])
