"""A job of torch.distributed whose ranks are threads of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from raycollect.backends.dtensors import placement_of
from raycollect.core.placement import Placement

_Result = TypeVar("_Result")

WAIT_S = 120.0


@dataclass
class Held:
    """A parameter on one rank."""

    placement: Placement | None
    local: Any
    full: Any


def run(world: int, body: Callable[[], _Result]) -> list[_Result]:
    """Runs a function on each rank of a job; returns the results by rank, or raises what the first one raised."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed import multi_threaded_pg as threaded

    found: list[Any] = [None] * world
    raised: list[BaseException] = []
    store = dist.HashStore()

    def rank_of_job(rank: int) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=world, store=store)
            found[rank] = body()
        except BaseException as exc:
            raised.append(exc)
            threaded.ProcessLocalGroup.exception_handle(exc)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    threaded._install_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    try:
        ranks = [threading.Thread(target=rank_of_job, args=(rank,), daemon=True) for rank in range(world)]
        for one in ranks:
            one.start()
        for one in ranks:
            one.join(WAIT_S)
    finally:
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        threaded._uninstall_threaded_pg()
    if raised:
        raise raised[0]
    assert not any(one.is_alive() for one in ranks)
    return found


def fsdp_over_tp(mesh: Sequence[int], sizes: Sequence[int]) -> list[Held]:
    """Weights of so many rows, split by tensor parallelism over the last axis of a mesh, and by FSDP2 over the others.

    With three axes, FSDP2 replicates over the first.
    """
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    names = ("replicate", "shard", "tp")[-len(mesh) :]
    whole = init_device_mesh("cpu", tuple(mesh), mesh_dim_names=names)
    found = []
    for rows in sizes:
        module = nn.Linear(2, rows, bias=False)
        with torch.no_grad():
            module.weight.copy_(torch.arange(2.0 * rows).reshape(rows, 2))
        parallelize_module(module, whole["tp"], ColwiseParallel())
        fully_shard(module, mesh=whole[names[:-1]] if len(mesh) > 2 else whole[names[0]])
        weight: Any = module.weight
        local, full = weight.to_local().detach().numpy().copy(), weight.full_tensor().detach().numpy()
        found.append(Held(placement_of(weight), local, full))
    return found
