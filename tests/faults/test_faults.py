"""What P4 promises, besides what the matrix of faults says (`test_fault_matrix`)."""

from __future__ import annotations

import pytest
import ray

import raycollect as col
from raycollect import errors
from tests.faults import inject
from tests.faults.groups import assert_works
from tests.support.actors import Plain, Worker, buffers


@pytest.mark.full
def test_plan_without_an_arrival_or_a_limit_of_its_caller_does_not_time_out(actors, gate):
    workers = actors(Worker, 2)
    col.declare_collective_group(workers, timeout_s=3)
    blocked = [worker.call.remote(lambda self, gate: ray.get(gate.wait.remote()), gate) for worker in workers]
    work = col.allreduce_refs(buffers(workers), async_op=True)
    with pytest.raises(errors.CollectiveTimeoutError, match="goes on"):
        work.wait(timeout_s=4)
    assert not work.done()
    ray.get(gate.open.remote())
    ray.get(blocked)
    work.wait()


def test_outputs_of_a_failed_plan_raise_where_they_are_used(actors):
    workers = actors(Worker, 2)
    col.declare_collective_group(workers)
    ray.get(workers[1].call.remote(inject.put, "after_check", "raise"))
    work = col.allreduce_refs(buffers(workers), inplace=False, async_op=True)
    with pytest.raises(errors.KernelError):
        work.wait()
    with pytest.raises(errors.KernelError):
        ray.get(workers[1].set_buffer.remote(work.refs[1]))
    assert_works(workers)


def test_a_join_that_fails_leaves_no_lease(actors):
    workers = actors(Worker, 2)
    (other,) = actors(Plain, 1)

    def forget(self):
        import raycollect.backends as backends

        broken = backends.BACKENDS["shm"]
        import dataclasses

        backends.BACKENDS["shm"] = dataclasses.replace(broken, libraries=("no_such_library",), install="pip install it")

    ray.get(workers[1].call.remote(forget))
    with pytest.raises(errors.BackendNotInstalledError, match="pip install it"):
        col.declare_collective_group(workers, backend="shm", timeout_s=20)

    def drive(self, workers):
        col.declare_collective_group(workers, backend="gloo")
        col.destroy_collective_group()

    ray.get(other.call.remote(drive, workers))
