"""Tensors of the driver itself, and of refs of `ray.put` or of tasks, as sources of collectives."""

from __future__ import annotations

import numpy as np
import pytest
import ray

import raycollect as col
from raycollect import errors
from raycollect.driver.controller import Controller
from tests.support.actors import Plain, Worker, filled
from tests.support.waiting import wait_until

ROWS = np.arange(14.0).reshape(2, 7)


@ray.remote(num_cpus=0)
def make(value):
    return value


OWN = pytest.mark.parametrize("own", [lambda value: value, ray.put, make.remote], ids=["array", "put", "task"])


@pytest.fixture
def workers(actors):
    return actors(Worker, 2)


def floats(workers):
    return filled(workers, (1.0, 2.0))


def assert_holds(refs, expected):
    for found, one in zip(col.get(refs), expected, strict=True):
        np.testing.assert_array_equal(np.asarray(found), one)


@OWN
def test_sources_of_a_derived_group(workers, own):
    refs = floats(workers)
    assert col.broadcast_refs(refs, source=own(ROWS[1])) == refs
    assert_holds(refs, [ROWS[1]] * 2)
    col.scatter_refs(refs, own(ROWS), 1)
    assert_holds(refs, ROWS)
    whole = col.layout([2, 7], mesh={"one": 1}, dtype="float64")
    rows = [np.zeros((1, 7)), np.zeros((1, 7))]
    ray.get([worker.set_buffer.remote(row) for worker, row in zip(workers, rows, strict=True)])
    targets = [worker.get_buffer.remote() for worker in workers]
    cut = col.layout([2, 7], mesh={"rank": 2}, spec=("rank",), dtype="float64")
    col.reshard_refs([own(ROWS + 1)], targets, src=whole, dst=cut)
    assert_holds(targets, ROWS[:, None] + 1)


def test_structures_batches_steps_plans_and_works(workers):
    col.declare_collective_group(workers)
    refs = floats(workers)
    made = col.scatter_refs(None, [ROWS[0], ROWS[1]], async_op=True).wait(30)
    assert_holds(made, ROWS)
    named = [worker.make.remote(lambda self: {"a": np.zeros(7), "b": np.zeros(2)}) for worker in workers]
    col.broadcast_refs(named, 1, source={"a": ROWS[0], "b": np.ones(2)})
    for found in col.get(named):
        np.testing.assert_array_equal(found["a"], ROWS[0])
        np.testing.assert_array_equal(found["b"], np.ones(2))
    with col.batch():
        col.broadcast_refs(refs, source=ROWS[1])
        col.allreduce_refs(refs)
    assert_holds(refs, [2 * ROWS[1]] * 2)
    with col.capture() as step:
        col.broadcast_refs(refs, source=ROWS[0])
    step.run()
    step.close()
    assert_holds(refs, [ROWS[0]] * 2)
    assert "scatter" in str(col.plan(col.broadcast_refs, refs, source=ROWS[0]))


def test_bad_sources_are_refused_and_nothing_is_touched(workers):
    refs, stranger = floats(workers), Plain.remote()
    wrong = [
        (lambda: col.broadcast_refs(refs, source=refs[0]), errors.InvalidArgumentError, "source is an ObjectRef"),
        (lambda: col.broadcast_refs(refs, source=3), errors.InvalidArgumentError, "a tensor of this process"),
        (lambda: col.broadcast_refs(refs, 2, source=ROWS[0]), errors.InvalidArgumentError, "a rank from 0 to 1"),
        (lambda: col.broadcast_refs(refs, source=ROWS[0].astype("f4")), errors.MismatchError, "float32"),
        (lambda: col.scatter_refs(refs, ROWS[:1]), errors.RefusedError, "scatter"),
        (lambda: col.scatter_refs(refs, "no"), errors.ForeignRefError, "str"),
        (lambda: col.reshard_refs([ROWS] * 3, refs), errors.InvalidArgumentError, "at most one for each"),
        (lambda: col.reshard_refs([ROWS], [stranger]), errors.NotAParticipantError, r"Plain\(.*without the mixin"),
        (lambda: col.reshard_refs([ROWS], [col.this_process()]), errors.NotAMemberError, "expected a participant"),
    ]
    for call, kind, text in wrong:
        with pytest.raises(kind, match=text):
            call()
    assert_holds(refs, [np.full(7, 1.0), np.full(7, 2.0)])


def test_what_was_taken_in_is_freed(workers):
    refs = floats(workers)
    group = col.declare_collective_group(workers)
    col.broadcast_refs(refs, source=ROWS[0])
    for _ in range(3):
        col.broadcast_refs(refs, source=ROWS[0])
    assert wait_until(lambda: [member.store.held for member in group.statistics().members] == [1, 1])
    assert not list(Controller.current().plans.trackers())
