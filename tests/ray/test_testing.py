"""`raycollect.testing`: faults for users' own tests."""

from __future__ import annotations

import time

import numpy as np
import pytest
import ray

import raycollect as col
from raycollect import errors
from raycollect.testing import KillWorker
from tests.support.actors import Plain, Worker, filled

POINTS = "before_check", "after_check", "before_kernel", "after_kernel"


def test_seed_determines_the_fault():
    def drawn(seed, **given):
        fault = KillWorker(["a", "b", "c"], seed=seed, **given)
        return fault.rank, fault.collective, fault.point

    assert [drawn(seed) for seed in range(50)] == [drawn(seed) for seed in range(50)]
    ranks, collectives, points = (set(values) for values in zip(*map(drawn, range(200)), strict=True))
    assert (ranks, collectives, points) == ({0, 1, 2}, set(range(1, 11)), set(POINTS))
    rank, collective, point = drawn(3)
    assert drawn(3, rank=1 - rank % 2) == (1 - rank % 2, collective, point)


@pytest.mark.parametrize(
    "given",
    [
        {"rank": 2},
        {"rank": -1},
        {"collective": 0},
        {"point": "end"},
        {"mode": "segfault"},
        {"within": 0},
        {"stop_s": 0},
    ],
)
def test_argument_out_of_range(given):
    with pytest.raises(ValueError):
        KillWorker(["a", "b"], **given)
    with pytest.raises(ValueError):
        KillWorker([])


@pytest.mark.parametrize("mode", ["sigkill", "exit"])
@pytest.mark.parametrize("point", POINTS)
def test_actor_dies_in_the_collective_that_is_named(actors, mode, point):
    workers = actors(Worker, 3)
    group = col.declare_collective_group(workers)
    refs = filled(workers, [1, 2, 3])
    with KillWorker(workers, mode=mode, rank=1, collective=3, point=point) as fault:
        col.allreduce_refs(refs)
        assert not fault.has_struck()
        col.allreduce_refs(refs)
        with pytest.raises(errors.ParticipantDiedError) as died:
            for _ in range(2):  # after its kernel a rank's part is done: the next collective notices
                col.allreduce_refs(refs)
        assert died.value.rank == 1
        assert fault.has_struck()
    group.rebuild()
    refs = filled([workers[0], workers[2]], [4, 5])
    col.allreduce_refs(refs)
    np.testing.assert_array_equal(col.get(refs[0]), np.full(7, 9))


def test_stopped_actor_goes_on_and_the_result_is_right(actors):
    workers = actors(Worker, 2)
    col.declare_collective_group(workers)
    refs = filled(workers, [1, 2])
    with KillWorker(workers, mode="stop", rank=1, collective=1, point="before_check", stop_s=0.5) as fault:
        began_s = time.monotonic()
        col.allreduce_refs(refs)
        assert time.monotonic() - began_s >= 0.5
        assert fault.has_struck()
    np.testing.assert_array_equal(col.get(refs[0]), np.full(7, 3))


def test_fault_ends_with_its_block_and_is_the_only_one(actors):
    workers = actors(Plain, 2)  # without the mixin
    col.declare_collective_group(workers)
    with KillWorker(workers, rank=0), pytest.raises(errors.InvalidArgumentError), KillWorker(workers, rank=0):
        pass
    with KillWorker(workers, rank=0, collective=1, point="before_check") as fault:
        pass
    assert not fault.has_struck()
    col.barrier()
    with KillWorker(workers, rank=0, collective=2, point="after_check") as fault:
        col.barrier()
        assert not fault.has_struck()


@pytest.mark.parametrize("seed", range(3))
def test_every_run_of_a_step_counts(actors, seed):
    workers = actors(Worker, 2)
    group = col.declare_collective_group(workers)

    @col.step
    def reduce():
        return col.allreduce_refs([worker.get_buffer.remote() for worker in workers])

    if seed:
        reduce()  # traced before the block
    with KillWorker(workers, rank=0, collective=5, point="before_check") as fault:
        reduce()
    assert not fault.has_struck()
    for _ in range(5):
        reduce()
    with KillWorker(workers, seed=seed, point="before_check", within=5) as fault:
        for _ in range(fault.collective - 1):
            reduce()
        assert not fault.has_struck()
        with pytest.raises(errors.ParticipantDiedError):
            reduce()
            ray.get(workers[fault.rank].read.remote())
    assert fault.has_struck()
    group.destroy()
