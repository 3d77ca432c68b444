"""What the ranks of `test_torch_process_group` run."""

from __future__ import annotations

import os
import random
import socket
import threading
import time
import warnings
from contextlib import nullcontext, suppress
from datetime import timedelta
from unittest import mock

import pytest
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import raycollect.torch
from raycollect.errors import (
    InvalidArgumentError,
    NotATensorError,
    UnsupportedError,
)
from raycollect.pos.segments import Segments
from tests.support.waiting import interrupt_in

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int8, torch.bool)


def begun(body, rank, world, store, options, *args):
    """Runs a body in a process with both groups, and ends them."""
    torch.set_num_threads(1)
    options = {"timeout": timedelta(seconds=30), **options}
    dist.init_process_group("raycollect", init_method=store, rank=rank, world_size=world, **options)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # names that torch has changed
            return body(rank, world, *args)
    finally:
        dist.destroy_process_group()


def summed(rank, world, more=0):
    x = torch.full((5,), rank + 1.0 + more / world)
    dist.all_reduce(x)
    return float(x[0])


def free_port():
    """A free port below those that the system picks itself, as it may give one of these to others meanwhile."""
    while True:
        port = random.randrange(20_000, 30_000)
        with socket.socket() as sock, suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port


def by_server(kind, port, rank, world):
    method = f"tcp://127.0.0.1:{port}"
    if kind == "env":
        method = "env://"
        os.environ |= {
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(port),
            "RANK": str(rank),
            "WORLD_SIZE": str(world),
        }
    return begun(summed, rank, world, method, {})


# ---------------------------------------------------------------------------------------------- operations


def every_operation(rank, world):
    """What the functions of torch give, whose tensors are lists, or wholes of all ranks, even and uneven."""
    for dtype in DTYPES:
        for size in (0, 1, 7, 20_000):
            given = [_operand(number, dtype, size) for number in range(world)]
            _operation_on(rank, world, dtype, size, given)


def _operand(rank, dtype, size):
    """Whole numbers: all sums of them are exact."""
    return torch.randint(0, 9, (size,), generator=torch.Generator().manual_seed(rank)).to(dtype)


def _operation_on(rank, world, dtype, size, given):
    mine = given[rank]
    total = torch.stack(given).any(0) if dtype is torch.bool else torch.stack(given).sum(0).to(dtype)
    outs = [torch.zeros(size, dtype=dtype) for _ in range(6)]
    rows = torch.zeros(world, size, dtype=dtype)
    pieces = [torch.zeros(size, dtype=dtype) for _ in range(world)]
    for tensor, op in ((outs[0], dist.all_reduce), (outs[1], lambda x: dist.reduce(x, 1))):
        tensor.copy_(mine)
        op(tensor)
    dist.broadcast(outs[2].copy_(mine), 1)
    dist.all_gather(pieces, mine)
    dist.all_gather_into_tensor(rows.view(-1), mine)
    wanted = [total, total if rank == 1 else outs[1], given[1]]
    assert all(map(torch.equal, (*outs[:3], *pieces, rows), (*wanted, *given, torch.stack(given))))
    dist.all_gather_into_tensor(rows.zero_(), mine)
    dist.gather(mine, pieces if rank == 1 else None, 1)
    dist.scatter(outs[3], given if rank == 0 else None, 0)
    dist.all_reduce(outs[4].copy_(mine), dist.ReduceOp.MAX)
    most = torch.stack(given).any(0) if dtype is torch.bool else torch.stack(given).amax(0)
    assert all(map(torch.equal, (rows, *pieces, *outs[3:5]), (torch.stack(given), *given, mine, most)))
    if dtype is not torch.bool:
        dist.reduce_scatter(outs[4], given)
        dist.reduce_scatter_tensor(outs[5], torch.cat(given))
        assert torch.equal(outs[4], (mine * world).to(dtype))
        assert torch.equal(outs[5], outs[4])
    give, take = [rank + to for to in range(world)], [rank + of for of in range(world)]
    uneven = torch.zeros(sum(take), 2, dtype=dtype)
    dist.all_to_all_single(uneven, torch.full((sum(give), 2), rank + 1).to(dtype), take, give)
    assert (
        uneven[:, 0].tolist() == torch.repeat_interleave(torch.arange(world) + 1, torch.tensor(take)).to(dtype).tolist()
    )


def rings(rank, world):
    after, before = (rank + 1) % world, (rank - 1) % world
    given = torch.arange(1000.0) + rank
    back, forth = torch.zeros(1000), torch.zeros(1000)
    batch = [
        dist.P2POp(dist.isend, given, after),
        dist.P2POp(dist.isend, given, before),
        dist.P2POp(dist.irecv, forth, before),
        dist.P2POp(dist.irecv, back, after),
    ]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    assert float(forth[0]) == before
    assert float(back[0]) == after
    if rank == 0:
        dist.send(given, 1)
    elif rank == 1:
        assert dist.recv(back, 0) == 0
        assert torch.equal(back, torch.arange(1000.0))


def asked_by_torch(rank, world, is_for_cuda):
    """What torch asks of a group: its devices, where objects travel, and what a backend might support."""
    group, cpu = dist.group.WORLD, torch.device("cpu")
    c10d = dist.distributed_c10d
    capability = dist.Backend.backend_capability
    assert capability["raycollect"] == (["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"])
    assert dist.Backend.default_device_backend_map["cpu"] == "gloo"
    assert dist.get_backend() == "raycollect"
    with mock.patch.dict(capability, raycollect=["cpu", "cuda"] if is_for_cuda else ["cpu"]):
        assert c10d._device_capability() == (["cpu", "cuda"] if is_for_cuda else ["cpu"])
        assert c10d._get_object_coll_device() == "cpu"
        objects = [{"rank": rank}, None]
        dist.broadcast_object_list(objects, 1)
        gathered = [None] * world
        dist.all_gather_object(gathered, rank)
        assert (objects, gathered) == ([{"rank": 1}, None], list(range(world)))
        dist.barrier()
        mesh = init_device_mesh("cpu", (world, 1))
        x = torch.full((3,), rank + 1.0)
        dist.all_reduce(x, group=mesh.get_group(0))
        assert x.tolist() == [world * (world + 1) / 2] * 3
        assert init_device_mesh("cuda", (world,)).get_group() is group
        assert c10d._get_split_source(group) is None
        assert dist.new_group([1]) is not None
    assert not group._get_backend(cpu).supports_splitting
    assert not group._get_backend(torch.device("cuda", 0)).supports_tensor_alloc(torch.device("cuda", 0))
    with pytest.raises(RuntimeError):
        group._get_backend(torch.device("xpu"))


def many_under_way(rank, world):
    tensors = [torch.full((100,), rank + at + 0.0) for at in range(20)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    futures = [work.get_future() for work in works[::2]]
    last = torch.ones(3)
    dist.all_reduce(last)  # behind them
    assert all(work.is_completed() and work.is_success() for work in works)
    for at, tensor in enumerate(tensors):
        assert float(tensor[0]) == 1 + 2 * at
    assert [future.wait()[0] is tensor for future, tensor in zip(futures, tensors[::2], strict=True)] == [True] * 10
    chained = dist.all_reduce(torch.ones(1), async_op=True).get_future().then(lambda done: done.value()[0] * 10)
    assert float(chained.wait()) == 20


def interrupted(rank, world):
    """Ctrl-C on rank 0, in a call behind one that is under way: it never begins."""
    store = dist.distributed_c10d._get_default_store()
    first, lost = torch.ones(1), torch.ones(1)
    if rank:
        store.get("interrupted")
    work = dist.all_reduce(first, async_op=True)
    if not rank:
        interrupting = interrupt_in(dist.all_reduce, threading.Condition.wait)
        with pytest.raises(KeyboardInterrupt):
            dist.all_reduce(lost)
        interrupting.join()
        store.set("interrupted", "yes")
    work.wait()
    assert summed(rank, world) == 3
    assert float(lost) == 1


def subgroups(rank, world):
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 2]), dist.new_group([2])]
    for group in pairs:
        members = dist.get_process_group_ranks(group) if group is not dist.GroupMember.NON_GROUP_MEMBER else []
        if rank in members:
            x = torch.full((4,), float(rank))
            dist.all_reduce(x, group=group)
            dist.broadcast(x, members[0], group)
            assert float(x[0]) == sum(members)
            dist.destroy_process_group(group)
    some = dist.new_group([0, 1], use_local_synchronization=True) if rank < 2 else None
    if some is not None:
        dist.barrier(some)


def refused(rank, world):
    for call in (
        lambda: dist.send(torch.ones(1), 1 - rank, tag=3),
        lambda: dist.recv(torch.ones(1), 1 - rank, tag=3),
        lambda: dist.recv(torch.ones(1)),
        lambda: dist.all_reduce(torch.ones(4).to_sparse()),
    ):
        with pytest.raises((UnsupportedError, NotATensorError)):
            call()
    with pytest.raises(InvalidArgumentError):
        dist.group.WORLD.send([torch.ones(1)], rank, 0).wait()  # torch's own function refuses it, too
    strided = torch.zeros(8, 2)[:, 0]
    for call in (
        lambda: dist.all_gather_into_tensor(strided, torch.ones(4)),
        lambda: dist.reduce_scatter_tensor(torch.ones(4), strided),
        lambda: dist.all_to_all_single(strided, torch.ones(8)),
    ):
        with pytest.raises(InvalidArgumentError) as caught:
            call()
        assert {violation.rank for violation in caught.value.violations} == {0, 1}
        assert all(violation.found.endswith("not contiguous") for violation in caught.value.violations)
    assert summed(rank, world) == 3


def unwaited(rank, world, count, size):
    """What is sent and received without a wait; the group is destroyed at once, and then the tensors are looked at."""
    tensors = [torch.full((size,), at + 1.0 if rank == 0 else 0.0) for at in range(count)]
    for tensor in tensors:
        dist.isend(tensor, 1) if rank == 0 else dist.irecv(tensor, 0)
    return [tensor.numpy() for tensor in tensors]


def never_received(rank, world, how):
    """Says how long it takes to leave a group with a send under way, in seconds, and what the log says."""
    store = dist.distributed_c10d._get_default_store()
    if rank:
        return store.get("left").decode()
    group = dist.group.WORLD
    group.set_timeout(timedelta(seconds=60 if how == "abort" else 0.3))
    for _ in range(3):
        dist.isend(torch.ones(5), 1)
    begun_s = time.monotonic()
    getattr(group, how)()
    took_s = time.monotonic() - begun_s
    store.set("left", "yes")
    return took_s


# ---------------------------------------------------------------------------------------------- training


class Model(torch.nn.Module):
    """With a buffer that ranks share, and a layer that only some batches use."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.first = torch.nn.Linear(32, 64)
        self.norm = torch.nn.BatchNorm1d(64)
        self.last = torch.nn.Linear(64, 8)
        self.spare = torch.nn.Linear(64, 8)

    def forward(self, x, spare=False):
        x = self.norm(self.first(x)).relu()
        return self.last(x) + (self.spare(x) if spare else 0)


def _batch(rank, step):
    return torch.randn(6, 32, generator=torch.Generator().manual_seed(100 * rank + step))


def _train(model, rank, before=lambda step: None, spare=lambda step: True):
    """Three steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        before(step)
        model(_batch(rank, step), spare(step)).square().sum().backward()
        optimizer.step()


def data_parallel(rank, world, how):
    """Three steps on both groups: two ranks have the same bits whichever adds them."""
    gloo = dist.new_group(backend="gloo")
    models = []
    for group in (None, gloo):
        options = {"gradient_as_bucket_view": how == "views", "find_unused_parameters": how == "unused"}
        model = DistributedDataParallel(Model(), process_group=group, bucket_cap_mb=0.01, **options)
        if how == "hook" and group is None:
            model.register_comm_hook(None, raycollect.torch.allreduce_hook)

        def accumulate(step, model=model):
            with model.no_sync():
                model(_batch(rank, 50 + step), True).square().sum().backward()

        before = accumulate if how == "accumulated" else lambda step: None
        _train(model, rank, before, lambda step: how != "unused" or (step + rank) % 2 == 0)
        models.append(model.module)
    _same(models[0].state_dict(), models[1].state_dict())


def in_shared_memory(rank, world, is_possible):
    """The hook moves DDP's buckets, of which the gradients are views, and those that DDP makes after the first step."""
    model = DistributedDataParallel(Model(), bucket_cap_mb=0.01, gradient_as_bucket_view=True)
    model.register_comm_hook(None, raycollect.torch.allreduce_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    segments, places = Segments.current(), []
    with nullcontext() if is_possible else mock.patch.object(Segments, "allocate", side_effect=OSError("off")):
        for step in range(3):
            optimizer.zero_grad()
            model(_batch(rank, step), True).square().sum().backward()
            gradients = [parameter.grad for parameter in model.parameters()]
            addresses = [segments.locate(gradient.data_ptr(), gradient.nbytes) for gradient in gradients]
            assert all(place is not None for place in addresses) == is_possible
            places.append({gradient.data_ptr() for gradient in gradients})
    assert places[1] == places[2]  # moved once


def without_a_rank(rank, world, how):
    """The last rank comes to no backward pass: torch's C++ reads the futures of the others' calls."""
    model = DistributedDataParallel(Model(), bucket_cap_mb=0.01)
    if how == "hook":
        model.register_comm_hook(None, raycollect.torch.allreduce_hook)
    loss = model(_batch(rank, 0), True).square().sum()
    store = dist.distributed_c10d._get_default_store()
    if rank == world - 1:
        return store.get("waited").decode()  # and leaves only then
    dist.group.WORLD.set_timeout(timedelta(milliseconds=300))
    with pytest.raises(RuntimeError) as caught:
        loss.backward()
    store.set("waited", "yes")
    return f"{caught.type.__name__}: {caught.value}"


def _same(mine, other):
    assert mine.keys() == other.keys()
    for name, value in mine.items():
        assert torch.equal(value, other[name]), name


def fully_sharded(rank, world):
    from torch.distributed.fsdp import FullyShardedDataParallel

    values = []
    for group in (dist.group.WORLD, dist.new_group(backend="gloo")):
        model = FullyShardedDataParallel(Model(), process_group=group, device_id=torch.device("cpu"))
        _train(model, rank)
        with FullyShardedDataParallel.summon_full_params(model):
            values.append({name: value.detach().clone() for name, value in model.named_parameters()})
    _same(*values)


def fully_sharded_in_place(rank, world):
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    values = []
    for group in (dist.group.WORLD, dist.new_group(backend="gloo")):
        mesh = DeviceMesh.from_group(group, "cpu")
        model = Model()
        for layer in (model.first, model.last, model):
            fully_shard(layer, mesh=mesh)
        _train(model, rank)
        values.append({name: value.full_tensor() for name, value in model.named_parameters()})
    _same(*values)


def dtensors(rank, world):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world,))
    whole = torch.arange(35.0).view(7, 5)
    rows = distribute_tensor(whole.clone(), mesh, [Shard(0)])
    columns = rows.redistribute(mesh, [Shard(1)])
    assert torch.equal(columns.redistribute(mesh, [Replicate()]).to_local(), whole)
    product = rows.sum(0).redistribute(mesh, [Replicate()]).to_local()
    assert torch.equal(product, whole.sum(0))


# ---------------------------------------------------------------------------------------------- autograd


def differentiated(name, rank, how):
    """The gradients of this rank's tensors, and their own, beside those of the whole computation in one process."""
    world = 3
    inputs = [_batch(of, 0)[:world, :4].double() for of in range(world)]
    mine = inputs[rank].clone().requires_grad_()
    loss = _loss(rank, DISTRIBUTED[how](mine, name))
    (gradient,) = torch.autograd.grad(loss, mine, create_graph=True)
    (again,) = torch.autograd.grad(gradient.square().sum(), mine)
    alone = [tensor.clone().requires_grad_() for tensor in inputs]
    whole = sum(_loss(of, IN_ONE[how](alone, of)) for of in range(world))
    wanted = torch.autograd.grad(whole, alone, create_graph=True)
    twice = torch.autograd.grad(sum(tensor.square().sum() for tensor in wanted), alone)
    torch.testing.assert_close(gradient, wanted[rank])
    torch.testing.assert_close(again, twice[rank])


def _loss(rank, values):
    return sum((value.sin() * (rank + at + 1)).sum() for at, value in enumerate(values))


DISTRIBUTED = {
    "all_reduce": lambda x, name: [raycollect.torch.all_reduce(x.square(), group_name=name)],
    "average": lambda x, name: [raycollect.torch.reduce_scatter(x.square().unbind(), "avg", name)],
    "all_gather": lambda x, name: raycollect.torch.all_gather(x.square().t(), name),
    "reduce_scatter": lambda x, name: [raycollect.torch.reduce_scatter(x.square().unbind(), group_name=name)],
    "all_to_all": lambda x, name: raycollect.torch.all_to_all(x.square().unbind(), name),
}
IN_ONE = {
    "all_reduce": lambda xs, rank: [sum(x.square() for x in xs)],
    "average": lambda xs, rank: [sum(x.square()[rank] for x in xs) / len(xs)],
    "all_gather": lambda xs, rank: [x.square().t() for x in xs],
    "reduce_scatter": lambda xs, rank: [sum(x.square()[rank] for x in xs)],
    "all_to_all": lambda xs, rank: [x.square()[rank] for x in xs],
}


def no_gradient(name, rank):
    for call in (
        lambda: raycollect.torch.all_reduce(torch.ones(2), "max", name),
        lambda: raycollect.torch.reduce_scatter([torch.ones(2)] * 2, "no op", name),
    ):
        with pytest.raises(InvalidArgumentError, match="differentiated"):
            call()
