"""A program on three Ray nodes of one machine; run by test_nodes.py in a process of its own."""

from __future__ import annotations

import numpy as np
import pytest
import ray
from ray.cluster_utils import Cluster

import raycollect as col
from tests.ray.workers import Worker


def buffers(workers):
    return [worker.get_buffer.remote() for worker in workers]


def across_nodes():
    """Two members on one node and one on another: gloo by itself."""
    a, b = (Worker.options(num_cpus=0, resources={"one": 0.1}).remote() for _ in range(2))
    c = Worker.options(num_cpus=0, resources={"two": 0.1}).remote()
    d = Worker.options(num_cpus=0, resources={"three": 0.1}).remote()
    group = col.declare_collective_group([a, c, b, d])
    assert group.backend == "gloo", group.backend
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
    near = col.declare_collective_group([a, b], group_name="near")
    assert near.backend == "shm", near.backend
    with pytest.raises(col.errors.BackendUnavailableError, match="one machine"):
        col.declare_collective_group([a, c], group_name="far", backend="shm")


def main():
    arguments = {"num_cpus": 2, "object_store_memory": 100 << 20}
    cluster = Cluster(
        initialize_head=True, head_node_args={**arguments, "resources": {"one": 1}, "include_dashboard": False}
    )
    try:
        cluster.add_node(**arguments, resources={"two": 1})
        cluster.add_node(**arguments, resources={"three": 1})
        ray.init(address=cluster.address, log_to_driver=False)
        across_nodes()
    finally:
        ray.shutdown()
        cluster.shutdown()
    print("three nodes: done")


if __name__ == "__main__":
    main()
