"""A `timeout_s` that the caller gives bounds the whole call, waits for methods, tasks and runs included (P4)."""

from __future__ import annotations

import pickle
import time

import numpy as np
import pytest
import ray

import raycollect as col
from raycollect import errors
from raycollect.channel.doorbell import IN_FLIGHT
from tests.support.actors import Gate, Worker, buffers
from tests.support.waiting import wait_until

LIMIT_S = 0.4
"""The limit of calls that can't end."""

WHOLE = col.layout((10,), mesh={"rank": 1})

WITHIN_S = 20.0
"""Far less than a wait without a limit: gates stay closed for 60 s."""


def hold(self, gate, begun):
    ray.get([begun.open.remote(), gate.wait.remote()])


@pytest.fixture
def block(actors, gate):
    """Keeps an actor in a method, which has begun, until the gate opens; returns the ref of its end."""

    def start(worker):
        (begun,) = actors(Gate, 1, max_concurrency=32)
        ref = worker.call.remote(hold, gate, begun)
        ray.get(begun.wait.remote())
        return ref

    return start


@pytest.fixture
def timed():
    """Expects a call to end at its limit; returns its error."""

    def run(call):
        began_s = time.monotonic()
        with pytest.raises(errors.CollectiveTimeoutError) as caught:
            call()
        assert LIMIT_S * 0.9 < time.monotonic() - began_s < WITHIN_S
        assert pickle.loads(pickle.dumps(caught.value)).missing == caught.value.missing
        return caught.value

    return run


@ray.remote(num_cpus=0)
def late(gate):
    """A task whose value does not come before the gate opens."""
    ray.get(gate.wait.remote())
    return np.ones(10, np.float32)


def in_batch(refs):
    with col.batch(timeout_s=LIMIT_S) as batch:
        col.allreduce_refs(refs)
        col.broadcast_refs(refs)
    batch.wait()


CALLS = {
    "in place": lambda workers, refs: col.allreduce_refs(refs, timeout_s=LIMIT_S),
    "async": lambda workers, refs: col.allreduce_refs(refs, async_op=True, timeout_s=LIMIT_S).wait(),
    "a new tensor": lambda workers, refs: col.allreduce_refs(refs, inplace=False, timeout_s=LIMIT_S),
    "barrier": lambda workers, refs: col.barrier(timeout_s=LIMIT_S),
    "send to an actor": lambda workers, refs: col.send_ref(refs[1], workers[0], timeout_s=LIMIT_S),
    "batch": lambda workers, refs: in_batch(refs),
    "retry": lambda workers, refs: retried(refs),
}


def retried(refs):
    work = col.allreduce_refs(refs, async_op=True, timeout_s=LIMIT_S)
    with pytest.raises(errors.CollectiveTimeoutError):
        work.wait()
    work.retry().wait()


@pytest.mark.parametrize(
    ("name", "held"),
    [(name, (0, 1)) for name in CALLS] + [pytest.param(name, (1,), marks=pytest.mark.full) for name in CALLS],
)
def test_a_call_behind_methods_ends_at_its_limit(actors, gate, block, timed, name, held):
    workers = actors(Worker, 2)
    col.declare_collective_group(workers)
    refs = buffers(workers)
    col.allreduce_refs(refs)
    blocked = [block(workers[rank]) for rank in held]
    error = timed(lambda: CALLS[name](workers, refs))
    assert error.timeout_s == LIMIT_S
    assert error.missing == held
    assert [(one.rank, one.answers) for one in error.reports] == [(rank, True) for rank in held]
    assert all("Buffers.call" in one.doing for one in error.reports)
    ray.get(gate.open.remote())
    ray.get(blocked)
    col.allreduce_refs(refs)
    for ref in refs:
        np.testing.assert_array_equal(col.get(ref), np.full(10, 4), "the call that timed out has not run")


def test_a_limit_holds_though_nobody_waits(actors, gate, block, caplog):
    workers = actors(Worker, 2)
    col.declare_collective_group(workers)
    refs = buffers(workers)
    blocked = [block(worker) for worker in workers]
    del caplog.records[:]
    col.allreduce_refs(refs, async_op=True, timeout_s=LIMIT_S)
    assert wait_until(lambda: any("nobody waited for it" in one.getMessage() for one in caplog.records), WITHIN_S)
    ray.get(gate.open.remote())
    ray.get(blocked)


@pytest.mark.parametrize("is_known", [False, True])
def test_a_run_that_nobody_waits_for_lets_the_others_go_at_its_limit(actors, gate, is_known):
    workers = actors(Worker, 2)
    col.declare_collective_group(workers)
    refs = buffers(workers)
    with col.capture() as step:
        step.call(workers[0].call, ray.put(lambda self, gate: ray.get(gate.wait.remote())), ray.put(gate))
        col.allreduce_refs(refs)
    if is_known:  # the last call of each actor
        ray.get([worker.read.remote() for worker in workers])
    run = step.run(async_op=True, timeout_s=LIMIT_S)
    ray.get(workers[1].read.remote(), timeout=WITHIN_S)  # it was held up by the run
    with pytest.raises(errors.CollectiveTimeoutError) as caught:
        run.wait()
    assert (caught.value.missing, caught.value.timeout_s) == ((0,), LIMIT_S)
    assert caught.value.reports[0].doing
    ray.get(gate.open.remote())
    col.allreduce_refs(refs)


def test_a_run_waits_no_longer_than_its_limit_for_runs_before_it(actors, gate, block, timed):
    workers = actors(Worker, 2)
    col.declare_collective_group(workers)
    refs = buffers(workers)
    with col.capture() as step:
        col.allreduce_refs(refs)
    blocked = block(workers[1])
    runs = [step.run(async_op=True) for _ in range(IN_FLIGHT)]
    error = timed(lambda: step.run(async_op=True, timeout_s=LIMIT_S))
    assert error.timeout_s == LIMIT_S
    ray.get(gate.open.remote())
    ray.get(blocked)
    for run in runs:
        run.wait()
    step.run()
    step.close()


TASKS = {
    "an operand": lambda refs, task, **options: col.allreduce_refs([refs[0], task], **options),
    "a source": lambda refs, task, **options: col.broadcast_refs(refs, source=task, **options),
    "a list": lambda refs, task, **options: col.scatter_refs(refs, task, **options),
    "a source of a reshard": lambda refs, task, **options: col.reshard_refs(
        [task], refs[:1], src=WHOLE, dst=WHOLE, **options
    ),
}


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("name", TASKS)
def test_a_ref_of_a_task_is_waited_for_within_the_limit(actors, gate, timed, name, async_op):
    workers = actors(Worker, 2)
    col.declare_collective_group(workers)
    refs = buffers(workers)
    task = late.remote(gate)
    error = timed(lambda: TASKS[name](refs, task, async_op=async_op, timeout_s=LIMIT_S))
    assert (error.timeout_s, error.group_name) == (LIMIT_S, "default")
    assert task.hex() in error.detail
    ray.get(gate.open.remote())
    col.allreduce_refs(refs)


def test_a_group_is_derived_within_the_limit(actors, gate, block, timed):
    workers = actors(Worker, 2)
    refs = buffers(workers)
    blocked = block(workers[1])
    timed(lambda: col.allreduce_refs(refs, async_op=True, timeout_s=LIMIT_S))
    ray.get(gate.open.remote())
    ray.get(blocked)
    col.allreduce_refs(refs)


def test_get_and_free_wait_no_longer_than_told_for_what_writes(actors, gate, block):
    workers = actors(Worker, 2)
    col.declare_collective_group(workers)
    refs = buffers(workers)
    col.allreduce_refs(refs)
    blocked = block(workers[1])
    work = col.allreduce_refs(refs, async_op=True)
    for call in (col.get, col.free):
        for given in (refs, ray.get(refs)):  # also by what stands for them
            with pytest.raises(ray.exceptions.GetTimeoutError):
                call(given, timeout_s=LIMIT_S)
    ray.get(gate.open.remote())
    ray.get(blocked)
    work.wait()
    assert col.free(refs, timeout_s=WITHIN_S) == 2
