"""What failed is run again, where that gives what it would have given."""

from __future__ import annotations

import numpy as np
import pytest
import ray

import raycollect as col
from raycollect import errors
from tests.faults import inject
from tests.support.actors import Worker, block, filled


def other_buffer(self):
    """Another tensor of the actor."""
    if not hasattr(self, "other"):
        self.other = np.full(7, 10)
    return self.other


def assert_hold(refs, value):
    for found in col.get(refs):
        np.testing.assert_array_equal(found, np.full(7, value))


def test_retry_succeeds_after_a_late_rank_arrives(actors, gate):
    workers = actors(Worker, 2)
    col.declare_collective_group(workers)
    refs = filled(workers, (1, 2))
    blocked = block(workers[1], gate)
    work = col.allreduce_refs(refs, async_op=True, timeout_s=3)  # which holds for the retry as well
    with pytest.raises(errors.RetryError, match="under way"):
        work.retry()
    with pytest.raises(errors.CollectiveTimeoutError):
        work.wait()
    again = work.retry()
    ray.get([gate.open.remote(), blocked])
    assert again.wait() == refs
    assert_hold(refs, 3)
    with pytest.raises(errors.RetryError, match="ended without an error"):
        again.retry()


@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_new_outputs_leave_the_operands_as_they_were(actors, backend):
    workers = actors(Worker, 2)
    col.declare_collective_group(workers, backend=backend)
    refs = filled(workers, (1, 2))
    ray.get(workers[1].call.remote(inject.put, "after_kernel", "raise"))
    work = col.allreduce_refs(refs, inplace=False, async_op=True)
    with pytest.raises(errors.KernelError):
        work.wait()
    again = work.retry()
    assert_hold(again.wait(), 3)
    assert not set(again.refs) & {*work.refs, *refs}
    assert_hold([refs[0]], 1)
    assert_hold([refs[1]], 2)


def test_retry_of_half_written_tensors_is_refused(actors):
    workers = actors(Worker, 2)
    col.declare_collective_group(workers)
    refs = filled(workers, (1, 2))
    ray.get(workers[1].call.remote(inject.put, "after_kernel", "raise"))
    work = col.allreduce_refs(refs, async_op=True)
    with pytest.raises(errors.KernelError):
        work.wait()
    with pytest.raises(errors.TensorDirtyError, match="rank 1"):
        work.retry().wait()


@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_a_batch_that_can_be_repeated(actors, backend):
    workers = actors(Worker, 2)
    col.declare_collective_group(workers, backend=backend)
    refs = filled(workers, (1, 2))
    others = [worker.make.remote(other_buffer) for worker in workers]
    ray.get(workers[1].call.remote(inject.put, "after_kernel", "raise"))
    with pytest.raises(errors.KernelError), col.batch() as b:
        sums = col.allreduce_refs(refs, inplace=False)
        col.allreduce_refs(sums)
        col.send_ref(refs[0], others[1])
    doubled, same, sent = b.work.retry().wait()
    assert_hold(doubled, 6)
    assert same == doubled
    assert sent == others[1]
    assert_hold([sent], 1)
    assert_hold([others[0]], 10)


def test_retry_after_a_rebuild(actors):
    """A restarted member has lost its tensors; connections that broke have not."""
    workers = actors(Worker, 2)
    group = col.declare_collective_group(workers, backend="gloo", timeout_s=20)
    refs = filled(workers, (1, 2))
    ray.get(workers[1].call.remote(inject.put, "before_kernel", "raise"))
    work = col.allreduce_refs(refs, inplace=False, async_op=True, timeout_s=5)
    with pytest.raises(errors.RaycollectError):
        work.wait()
    if group.status(0).state == "broken":
        with pytest.raises(errors.GroupBrokenError, match="rebuild"):
            work.retry()
    group.rebuild()
    assert_hold(work.retry().wait(), 3)
    (other,) = actors(Worker, 1)
    group.rebuild([workers[0], other])
    with pytest.raises(errors.RetryError, match="other members"):
        work.retry()
    group.destroy()
    with pytest.raises(errors.UnknownGroupError):
        work.retry()


# ---------------------------------------------------------------------------------------------- all or nothing


@pytest.mark.parametrize(
    ("backend", "size"),
    [
        pytest.param(backend, size, marks=[pytest.mark.full] * ((backend == "tcp") != (size == 7)))
        for backend in ("shm", "tcp", "gloo")
        for size in (7, 300_001)
    ],
)
def test_a_snapshot_gives_the_same_result(actors, backend, size):
    workers = actors(Worker, 3)
    col.declare_collective_group(workers, backend=backend)
    ray.get([worker.set_buffer.remote(np.arange(size) + rank) for rank, worker in enumerate(workers)])
    refs = [worker.get_buffer.remote() for worker in workers]
    for times in (1, 3):
        assert col.allreduce_refs(refs, snapshot=True) == refs
        for found in col.get(refs):
            np.testing.assert_array_equal(found, times * (3 * np.arange(size) + 3))
    assert col.reduce_refs(refs, 1, snapshot=True) == refs[1]
    for found, times in zip(col.get(refs), (3, 9, 3), strict=True):
        np.testing.assert_array_equal(found, times * (3 * np.arange(size) + 3))


@pytest.mark.parametrize(
    ("backend", "point"),
    [
        pytest.param(backend, point, marks=[pytest.mark.full] * ((backend == "tcp") != (point == "after_kernel")))
        for backend in ("shm", "tcp")
        for point in ("before_kernel", "after_kernel", "before_commit")
    ],
)
def test_a_failure_before_all_have_the_result_changes_nothing(actors, backend, point):
    workers = actors(Worker, 3)
    col.declare_collective_group(workers, backend=backend, timeout_s=20)
    refs = filled(workers, (1, 2, 4))
    ray.get(workers[1].call.remote(inject.put, point, "raise"))
    work = col.allreduce_refs(refs, snapshot=True, async_op=True)
    with pytest.raises(errors.KernelError) as caught:
        work.wait()
    assert caught.value.rank == 1
    for found, value in zip(col.get(refs), (1, 2, 4), strict=True):
        np.testing.assert_array_equal(found, np.full(7, value))
    assert work.retry().wait() == refs
    assert_hold(refs, 7)


@pytest.mark.parametrize("point", ["before_kernel", "before_commit"])
def test_a_death_before_all_have_the_result_changes_nothing(actors, point):
    workers = actors(Worker, 3)
    group = col.declare_collective_group(workers)
    refs = filled(workers, (1, 2, 4))
    ray.get(workers[1].call.remote(inject.put, point, "die"))
    with pytest.raises(errors.ParticipantDiedError):
        col.allreduce_refs(refs, snapshot=True)
    assert_hold([refs[0]], 1)
    assert_hold([refs[2]], 4)
    group.rebuild()
    col.allreduce_refs([refs[0], refs[2]], snapshot=True)
    assert_hold([refs[0], refs[2]], 5)


def test_ranks_keep_results_committed_before_a_failure(actors):
    """What fails later fails on one rank only: its tensor is dirty, the others hold the result."""
    workers = actors(Worker, 3)
    col.declare_collective_group(workers)
    refs = filled(workers, (1, 2, 4))
    ray.get(workers[1].call.remote(inject.put, "after_commit", "raise"))
    work = col.allreduce_refs(refs, snapshot=True, async_op=True)
    with pytest.raises(errors.KernelError):
        work.wait()
    assert_hold([refs[0], refs[2]], 7)
    with pytest.raises(errors.TensorDirtyError):
        col.get(refs[1])
    with pytest.raises(errors.RetryError, match="hold its result"):
        work.retry()


def test_cancel_precedes_the_collective_or_has_no_effect(actors, gate):
    workers = actors(Worker, 2)
    col.declare_collective_group(workers)
    refs = filled(workers, (1, 2))
    blocked = block(workers[1], gate)
    work = col.allreduce_refs(refs, snapshot=True, async_op=True)
    assert work.cancel()
    ray.get(workers[0].read.remote())  # behind the plan, which it has given up by then
    ray.get([gate.open.remote(), blocked])
    with pytest.raises(errors.PlanAbortedError):
        work.wait()
    assert_hold([refs[0]], 1)
    assert_hold([refs[1]], 2)
    work.retry().wait()
    assert_hold(refs, 3)


def test_snapshot_is_refused_in_a_batch_and_needless_for_outputs(actors):
    workers = actors(Worker, 2)
    col.declare_collective_group(workers)
    refs = filled(workers, (1, 2))
    with pytest.raises(errors.InvalidArgumentError, match="by itself"), col.batch():
        col.allreduce_refs(refs, snapshot=True)
    assert_hold(col.allreduce_refs(refs, inplace=False, snapshot=True), 3)  # new tensors: nothing is overwritten
