"""For `test_torch_group`, by torchrun: a process group on CUDA tensors; without GPUs, on tensors of the CPU.

torch_program.py BACKEND
"""

from __future__ import annotations

import os
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import raycollect.torch

ON_GPU = torch.cuda.is_available()
KIND = "cuda" if ON_GPU else "cpu"
SIZE = 300_007


def beside() -> AbstractContextManager[Any]:
    """A stream of one's own, which is busy for some tenths of a second."""
    if not ON_GPU:
        return nullcontext()
    stream, tensor = torch.cuda.Stream(), torch.zeros(1 << 27, device=KIND)
    synchronize()
    with torch.cuda.stream(stream):
        for _ in range(400):
            tensor += 1
    return torch.cuda.stream(stream)


def synchronize() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


def full(value: float) -> torch.Tensor:
    return torch.full((SIZE,), value, dtype=torch.float32, device=KIND)


def must(found: torch.Tensor, expected: Any) -> None:
    torch.testing.assert_close(found.cpu(), torch.as_tensor(expected, dtype=found.dtype).expand(found.shape))


def collectives(rank: int, world: int) -> None:
    total = world * (world + 1) / 2
    for async_op in (False, True):
        mine, pieces, row = full(0), [full(0) for _ in range(world)], torch.zeros(world * SIZE, device=KIND)
        with beside():
            mine += rank + 1  # a collective that does not follow the stream reads 0
            given = mine.clone()
            works = [
                dist.all_reduce(mine, async_op=async_op),
                dist.all_gather(pieces, given, async_op=async_op),
                dist.all_gather_into_tensor(row, given, async_op=async_op),
            ]
            for work in works:
                if work is not None:
                    work.wait()
        must(mine, total)
        for at, piece in enumerate(pieces):
            must(piece, at + 1)
            must(row[at * SIZE : (at + 1) * SIZE], at + 1)
    x = full(rank + 1)
    if rank < 2:
        (dist.send if rank == 0 else dist.recv)(x, 1 - rank)
        must(x, 1)
    future = dist.all_reduce(x := full(rank + 1), async_op=True).get_future()
    must(future.then(lambda ended: ended.value()[0] * 2).wait(), 2 * total)
    must(x, total)


def questions(rank: int, world: int) -> None:
    devices = dist.distributed_c10d._device_capability()
    assert devices == (["cpu", "cuda"] if torch.backends.cuda.is_built() else ["cpu"]), devices
    objects = [{"rank": rank}, torch.ones(2, device=KIND)]
    dist.broadcast_object_list(objects, 1)
    assert objects[0] == {"rank": 1}
    dist.barrier()
    mesh = init_device_mesh(KIND, (world,))
    dist.all_reduce(x := full(1), group=mesh.get_group())
    must(x, world)


def training(rank: int, world: int) -> None:
    """DDP with and without the hook, and FSDP: the gradients and parameters of one process with all data."""
    batches = torch.randn(world, 8, 64, generator=torch.Generator().manual_seed(1)).to(KIND)

    def model() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2)).to(KIND)

    alone = model()
    torch.stack([alone(batch).square().sum() for batch in batches]).mean().backward()
    expected = [parameter.grad for parameter in alone.parameters()]
    for hook in (None, raycollect.torch.allreduce_hook):
        parallel = DistributedDataParallel(model(), bucket_cap_mb=0.01)
        if hook is not None:
            parallel.register_comm_hook(None, hook)
        with beside():
            parallel(batches[rank]).square().sum().backward()
            synchronize()
        for parameter, gradient in zip(parallel.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, gradient)
    sharded = fully_shard(model(), mesh=init_device_mesh(KIND, (world,)))
    with beside():
        sharded(batches[rank]).square().sum().backward()
        synchronize()
    for parameter, gradient in zip(sharded.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor(), gradient)


def main() -> None:
    rank = int(os.environ["LOCAL_RANK"])
    if ON_GPU:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group("raycollect", pg_options={"backend": sys.argv[1]})
    for part in (questions, collectives, training):
        part(rank, dist.get_world_size())
        print(f"rank {rank}: {part.__name__} right", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
