"""Programs on three Ray nodes of one machine; run by test_nodes.py, one after the other, in a process of their own."""

from __future__ import annotations

import sys
import time
import traceback

import numpy as np
import pytest
import ray
from ray.cluster_utils import Cluster

import raycollect as col
from raycollect.driver.controller import Controller
from tests.faults import inject
from tests.support.actors import Worker, buffers


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
    assert ray.get([actor.call.remote(summed) for actor in (a, c, b)]) == [3.0] * 3
    col.barrier()
    near = col.declare_collective_group([a, b], group_name="near")
    assert near.backend == "shm", near.backend
    with pytest.raises(col.errors.BackendUnavailableError, match="one machine"):
        col.declare_collective_group([a, c], group_name="far", backend="shm")
    assert near.add(c).backend == "tcp", near.backend
    col.allreduce_refs(buffers(near.actors), "near")
    assert near.remove(2).backend == "shm", near.backend
    col.allreduce_refs(buffers(near.actors), "near")


def summed(self):
    """The same by a call of the member itself."""
    tensor = np.ones(300_001)
    col.allreduce(tensor)
    return tensor.max()


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
