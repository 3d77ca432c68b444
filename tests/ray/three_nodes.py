"""Programs on three Ray nodes of one machine; run by test_nodes.py, one after the other, in a process of their own."""

from __future__ import annotations

import functools
import sys
import tempfile
import time
import traceback
from pathlib import Path

import numpy as np
import pytest
import ray
from ray.cluster_utils import Cluster

import raycollect as col
from raycollect.core.model import RANK_ORDER, OpKind, ReduceOp
from raycollect.driver.controller import Controller
from raycollect.group import link_costs
from raycollect.member.runtime import Runtime
from raycollect.planner import Request, passes, plan_part
from raycollect.planner.algorithms import ALGORITHMS, build
from raycollect.planner.cost import Layout, priced
from tests.faults import inject
from tests.ray.workers import Worker, buffers
from tests.waiting import wait_until


def across_nodes():
    """Two members on one node and one on another: tcp by itself."""
    a, b = (Worker.options(num_cpus=0, resources={"one": 0.1}).remote() for _ in range(2))
    c = Worker.options(num_cpus=0, resources={"two": 0.1}).remote()
    d = Worker.options(num_cpus=0, resources={"three": 0.1}).remote()
    group = col.declare_collective_group([a, c, b, d])
    assert group.backend == "tcp", group.backend
    assert len({member.node_id for member in group.status().members}) == 3
    refs = buffers(group.actors)
    col.allreduce_refs(refs)
    for found in col.get(refs):
        np.testing.assert_array_equal(found, np.full(10, 4))
    col.broadcast_refs(buffers(group.actors), src_rank=3)
    made = col.send_ref(refs[1], d)
    np.testing.assert_array_equal(np.asarray(ray.get(made)), np.full(10, 4))
    ray.get(c.set_buffer.remote(made))  # fetched from another node
    col.barrier()
    col.destroy_collective_group()
    every_operation(col.declare_collective_group([a, c, b]).actors)
    ray.get([actor.call.remote(every_call) for actor in (a, c, b)])
    col.barrier()
    near = col.declare_collective_group([a, b], group_name="near")
    assert near.backend == "shm", near.backend
    with pytest.raises(col.errors.BackendUnavailableError, match="one machine"):
        col.declare_collective_group([a, c], group_name="far", backend="shm")
    assert near.add(c).backend == "tcp", near.backend
    col.allreduce_refs(buffers(near.actors), "near")
    assert near.remove(2).backend == "shm", near.backend
    col.allreduce_refs(buffers(near.actors), "near")


SIZES = (4, 0, 300_001)


def part(giver, taker):
    """What a rank gives another."""
    return np.arange(SIZES[taker], dtype=np.float32) + giver


def every_operation(actors):
    """The core of the conformance suite: ranks 0 and 2 on one node, rank 1 on another; sizes differ."""
    world = len(actors)

    def keep(function):
        made = [function(rank) for rank in range(world)]
        return [a.make.remote(lambda self, value: value, value) for a, value in zip(actors, made, strict=True)]

    def check(refs, expected):
        for found, wanted in zip(col.get(refs), expected, strict=True):
            pairs = zip(found, wanted, strict=True) if isinstance(wanted, list) else [(found, wanted)]
            for one, other in pairs:
                np.testing.assert_array_equal(one, other)

    same = keep(lambda rank: part(rank, 2))
    uneven = keep(lambda rank: part(rank, rank))
    lists = keep(lambda rank: [part(rank, taker) for taker in range(world)])
    everything = [part(rank, rank) for rank in range(world)]
    total = part(0, 2) + part(1, 2) + part(2, 2)
    check(col.allreduce_refs(same, inplace=False), [total] * world)
    for root in range(world):
        check([col.reduce_refs(same, root, inplace=False)], [total])
        check([col.gather_refs(None, uneven, root)], [everything])
        check(col.scatter_refs(None, lists[root], root), [part(root, taker) for taker in range(world)])
    check(col.allgather_refs(None, uneven), [everything] * world)
    check(col.reducescatter_refs(None, lists), [part(0, t) + part(1, t) + part(2, t) for t in range(world)])
    check(col.alltoall_refs(None, lists), [[part(giver, taker) for giver in range(world)] for taker in range(world)])
    src, dst = col.layout([4, 4], mesh={"r": 1}), col.layout([4, 4], mesh={"r": 2})
    whole = np.arange(16, dtype=np.float32).reshape(4, 4)
    given, near = actors[1].make.remote(lambda self, value: value, whole), [actors[0], actors[2]]
    (row,) = col.plan(col.reshard_refs, [given], near, src=src, dst=dst).rows
    assert row.moved.nbytes_between == row.moved.least_between == whole.nbytes, row.moved  # once to the node of both
    check(col.reshard_refs([given], near, src=src, dst=dst), [whole] * 2)


def every_call(self):
    """The same by imperative calls inside each member, of the driver's group and of one of their own."""
    rank, world = col.get_rank(), col.get_collective_group_size()
    col.init_collective_group(world, rank, "gloo", "own")
    for name in ("default", "own"):
        total = part(0, 2) + part(1, 2) + part(2, 2)
        tensor = part(rank, 2)
        col.allreduce(tensor, name)
        np.testing.assert_array_equal(tensor, total)
        for root in range(world):
            tensor = part(rank, 2)
            col.reduce(tensor, root, name)
            np.testing.assert_array_equal(tensor, total if rank == root else part(rank, 2))
            col.broadcast(tensor, root, name)
            np.testing.assert_array_equal(tensor, total)
            blank = [np.zeros_like(part(r, r)) for r in range(world)]
            col.gather(blank if rank == root else None, part(rank, rank), root, name)
            np.testing.assert_array_equal(blank[2], part(2, 2) if rank == root else np.zeros_like(blank[2]))
            mine = np.zeros_like(part(0, rank))
            col.scatter(mine, [part(root, r) for r in range(world)] if rank == root else None, root, name)
            np.testing.assert_array_equal(mine, part(root, rank))
        blank = [np.zeros_like(part(r, r)) for r in range(world)]
        col.allgather(blank, part(rank, rank), name)
        for r in range(world):
            np.testing.assert_array_equal(blank[r], part(r, r))
        mine, given = np.zeros_like(part(0, rank)), [part(rank, r) for r in range(world)]
        col.reducescatter(mine, given, name)
        np.testing.assert_array_equal(mine, part(0, rank) + part(1, rank) + part(2, rank))
        blank = [np.zeros_like(part(r, rank)) for r in range(world)]
        col.alltoall(blank, given, name)
        for r in range(world):
            np.testing.assert_array_equal(blank[r], part(r, rank))
        if rank == 0:
            col.send(given[2], 1, name)
        elif rank == 1:
            got = np.zeros_like(part(0, 2))
            col.recv(got, 0, name)
            np.testing.assert_array_equal(got, part(0, 2))
        col.barrier(name)
    col.destroy_collective_group("own")


def host_by_host():
    """Two members on each of two nodes, one on the third: by costs that make it cheaper, and wherever it can be."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        slow = Path(folder, "costs.json")
        link_costs.write(slow, [link_costs.given(latency_s=1e-3, bandwidth=1e6)])
        patch.setenv(link_costs.ENVIRONMENT_VARIABLE, str(slow))
        without_inner()
        workers = [_on(node) for node in PLACES]
        _host_by_host(workers, "tcp", ())
        _host_by_host(workers, "gloo", (OpKind.ALLREDUCE,))
        patch.setattr(passes, "route", forced)
        _host_by_host(workers, "tcp", (OpKind.BROADCAST, OpKind.ALLREDUCE))
        _host_by_host(workers, "gloo", (OpKind.BROADCAST, OpKind.ALLREDUCE))


PLACES = ("one", "one", "two", "three", "three")


def _on(node):
    return Worker.options(num_cpus=0, resources={node: 0.1}).remote()


def without_inner():
    """Where a group inside can't be formed, the group around does without."""
    workers = [Worker.options(num_cpus=0, resources={node: 0.1}).remote() for node in ("one", "two", "one")]
    ray.get(workers[2].call.remote(refuse_shared_memory))
    group = col.declare_collective_group(workers, pg_options=dict([RANK_ORDER]))
    assert Controller.current().groups.named("default").inner == ()
    refs = buffers(workers)
    col.allreduce_refs(refs)
    np.testing.assert_array_equal(col.get(refs[0]), np.full(10, 3))
    group.destroy()
    assert wait_until(lambda: not any(ray.get([worker.call.remote(open_groups) for worker in workers])))


def refuse_shared_memory(self):
    """Lets no group of this participant have shared memory."""
    from raycollect import backends

    load = backends.load

    def refusing(name, *arguments):
        if name == "shm":
            raise col.errors.BackendUnavailableError(group_name=arguments[0], detail="no shared memory today")
        return load(name, *arguments)

    backends.load = refusing


def open_groups(self):
    """How many groups this participant has a place in, those inside others included."""
    lease = Runtime.current()._lease
    return 0 if lease is None else len(lease._groups.by_id)


def forced(part, membership):
    """Routes host by host, whatever it costs."""
    if not membership.inner or part.request.kind not in ALGORITHMS["hierarchical"].kinds:
        return part
    return build(part, membership, ALGORITHMS["hierarchical"])


def _host_by_host(workers, backend, routed):
    # tcp has groups inside a group only where it does not go host by host itself.
    options = dict([RANK_ORDER]) if backend == "tcp" else None
    group = col.declare_collective_group(workers, backend=backend, pg_options=options)
    assert [m.spec.world_size for m in Controller.current().groups.named("default").tree] == [5, 2, 1, 2, 3]
    values = [np.random.default_rng(rank).normal(size=2501) for rank in range(5)]
    refs = [w.make.remote(lambda self, v: v.copy(), value) for w, value in zip(workers, values, strict=True)]
    for kind in routed:
        assert algorithm(kind, values[0].nbytes, root=3 if kind is OpKind.BROADCAST else -1) == "hierarchical", backend
    if OpKind.ALLREDUCE in routed:
        (row,) = col.plan(col.allreduce_refs, refs).rows
        topology = Controller.current().groups.named("default").topology
        native = priced(OpKind.ALLREDUCE, backend, Layout.of(topology, rank_order=backend == "tcp"))
        _, between = native.traffic(row.nbytes)
        assert row.algorithm == "hierarchical"
        assert 0 < row.way.nbytes_between < between, "fewer bytes between hosts than by the backend's own kernel"
    total = functools.reduce(np.add, values)
    for found in col.get(col.allreduce_refs(refs, inplace=False)):
        np.testing.assert_allclose(found, total, rtol=1e-12)
        if backend == "tcp":
            np.testing.assert_array_equal(found, total, "the left fold in rank order")
    with col.batch():
        col.broadcast_refs(refs, 3)
        made = col.allreduce_refs(refs, op="max", inplace=False)
        pair = col.send_ref(made[4], refs[0])
        col.allreduce_refs(refs)
    for found in col.get(refs):
        np.testing.assert_allclose(found, 5 * values[3], rtol=1e-12)
    assert pair == refs[0]
    assert not ray.get(workers[0].call.remote(lambda self: [col.is_group_initialized(n) for n in ("default/host-0",)]))[
        0
    ]
    refused = [w.make.remote(lambda self, n: np.zeros(n), 2500 + (rank == 2)) for rank, w in enumerate(workers)]
    with pytest.raises(col.errors.MismatchError):
        col.allreduce_refs(refused)
    col.destroy_collective_group()
    assert wait_until(lambda: not any(ray.get([worker.call.remote(open_groups) for worker in workers])))
    col.declare_collective_group(workers, backend=backend, pg_options=options)
    ray.get(workers[3].call.remote(inject.put, "after_kernel", "die"))
    with pytest.raises(col.errors.ParticipantDiedError) as caught:
        col.allreduce_refs(refs, timeout_s=30)
    assert caught.value.rank == 3
    assert caught.value.group_name == "default"
    ray.get([worker.read.remote() for worker in workers[:3]])
    with pytest.raises(col.errors.GroupBrokenError):
        col.allreduce_refs(refs)
    col.destroy_collective_group()
    workers[3] = _on(PLACES[3])
    del group


def algorithm(kind, nbytes, *, root):
    """The algorithm of an operation of group "default" for so many bytes."""
    membership = Controller.current().groups.named("default")
    operands = [
        (rank, 0, None) if root in (rank, -1) else (rank, None, 0) for rank in range(membership.spec.world_size)
    ]
    op = ReduceOp.SUM if kind is OpKind.ALLREDUCE else None
    request = Request(kind=kind, group=membership.spec, operands=tuple(operands), op=op, root=root)
    return [choice.name for choice in plan_part(request, membership).choices if choice.at_least <= nbytes][-1]


def node_dies(cluster):
    """A whole node goes amid a collective, with two of four members; the others go on, then with a new one."""
    places = ("one", "two", "two", "three")
    workers = [Worker.options(num_cpus=0, resources={node: 0.1}).remote() for node in places]
    group = col.declare_collective_group(workers)
    assert group.backend == "tcp", group.backend
    refs = buffers(workers)
    col.allreduce_refs(refs, snapshot=True)
    ray.get(workers[2].call.remote(inject.put, "before_kernel", "stall"))
    work = col.allreduce_refs(refs, snapshot=True, async_op=True)
    assert not work.done()
    (lost,) = [one for one in cluster.list_all_nodes() if one.node_id == group.status(0).members[1].node_id]
    began_s = time.monotonic()
    cluster.remove_node(lost, allow_graceful=False)
    with pytest.raises(col.errors.ParticipantDiedError) as caught:
        work.wait(timeout_s=60)
    print(f"told after {time.monotonic() - began_s:.2f} s")
    assert caught.value.rank in (1, 2), caught.value
    assert "Buffers(" in caught.value.actor
    left = [refs[0], refs[3]]
    for found in col.get(left):
        np.testing.assert_array_equal(found, np.full(10, 4), "all or nothing")
    group.rebuild()
    assert group.actors == (workers[0], workers[3])
    col.allreduce_refs(left)
    np.testing.assert_array_equal(col.get(refs[3]), np.full(10, 8))
    fresh = Worker.options(num_cpus=0, resources={"three": 0.1}).remote()
    group.rebuild([workers[0], fresh, workers[3]])
    every_operation(group.actors)


PROGRAMS = {
    "across": lambda cluster: across_nodes(),
    "inside": lambda cluster: host_by_host(),
    "lost": node_dies,
}


def main(*names):
    arguments = {"num_cpus": 2, "object_store_memory": 100 << 20}
    cluster = Cluster(
        initialize_head=True, head_node_args={**arguments, "resources": {"one": 1}, "include_dashboard": False}
    )
    try:
        cluster.add_node(**arguments, resources={"two": 1})
        cluster.add_node(**arguments, resources={"three": 1})
        for name in names:
            run(name, cluster)
    finally:
        cluster.shutdown()


def run(name, cluster):
    """Runs a program as a driver of its own, and says how it went."""
    ray.init(address=cluster.address, log_to_driver=False)
    try:
        PROGRAMS[name](cluster)
        print(f"{name}: done")
    except Exception:  # the others run all the same
        print(f"{name}: {traceback.format_exc()}")
    finally:
        Controller.current().close()
        Controller._current = None
        ray.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
