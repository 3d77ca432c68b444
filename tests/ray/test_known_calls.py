"""Calls that a loop repeats are known by their arguments and actors; what they meant before must still hold."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import ray

import raycollect as col
from raycollect.driver import known_calls
from raycollect.driver.controller import Controller
from raycollect.errors import RefusedError
from tests.support.actor_pool import reusable
from tests.support.actors import Buffers

pytestmark = pytest.mark.timeout(120)

BufferActor = reusable(ray.remote(num_cpus=0)(Buffers))

TENS = 1, 10, 100


def fresh(workers, values=TENS):
    """Refs of arrays that were not there before."""
    pairs = zip(workers, values, strict=False)
    return [worker.make.remote(lambda _, value: np.full(2, float(value)), value) for worker, value in pairs]


def first(refs):
    return [float(value[0]) for value in col.get(list(refs))]


@pytest.fixture
def known(monkeypatch):
    """The calls that were known: the places of their operands among the refs that were given."""
    found, send = [], known_calls._send

    def noted(controller, call, *args, **named):
        found.append(call.operands)
        return send(controller, call, *args, **named)

    monkeypatch.setattr(known_calls, "_send", noted)
    return found


def test_what_is_known_of_a_group_ends_with_it(actors):
    workers = actors(BufferActor, 2)
    group = col.declare_collective_group(workers, group_name="ends")
    col.allreduce_refs(fresh(workers), group_name="ends")
    groups = {one.asked.group.spec.name for one in Controller.current().known_calls.values()}
    assert "ends" in groups
    group.destroy()
    groups = {one.asked.group.spec.name for one in Controller.current().known_calls.values()}
    assert "ends" not in groups


def test_arguments_tell_calls_apart(actors, known):
    workers = actors(BufferActor, 2)
    for _ in range(2):
        assert first(col.allreduce_refs(fresh(workers))) == [11.0] * 2
        assert first(col.allreduce_refs(fresh(workers), op="max")) == [10.0] * 2
        assert first(col.allreduce_refs(fresh(workers), snapshot=True)) == [11.0] * 2
        assert first(col.broadcast_refs(fresh(workers), 0)) == [1.0] * 2
        assert first(col.broadcast_refs(fresh(workers), 1)) == [10.0] * 2
        assert first(col.allreduce_refs(fresh(workers), async_op=True).wait()) == [11.0] * 2
        assert first(col.allreduce_refs(fresh(workers), inplace=False)) == [11.0] * 2
    assert len(known) == 1 + 6, "with and without waiting is the same call"


def test_a_group_of_the_same_name_is_another_one(actors, known):
    workers = actors(BufferActor, 3)
    for members in (workers, workers[::-1], workers):
        col.declare_collective_group(members, group_name="named anew")
        for _ in range(2):
            refs = fresh(workers)
            expected = refs if members is workers else refs[::-1]
            assert col.allreduce_refs(refs, group_name="named anew") == expected
        col.destroy_collective_group("named anew")
    assert len(known) == 3


def test_a_derived_group_gives_way_to_a_declared_one(actors, known):
    workers = actors(BufferActor, 2)
    for _ in range(2):
        col.broadcast_refs(fresh(workers), 0)
    col.declare_collective_group(workers[::-1], group_name="default")
    assert first(col.broadcast_refs(fresh(workers), 0)) == [10.0] * 2, "rank 0 is the second actor"
    col.destroy_collective_group("default")
    assert first(col.broadcast_refs(fresh(workers), 0)) == [1.0] * 2


def test_what_is_wrong_is_refused_as_in_the_first_call(actors, known):
    workers = actors(BufferActor, 2)
    for _ in range(2):
        col.allreduce_refs(fresh(workers))
    with pytest.raises(RefusedError):
        col.allreduce_refs(fresh(workers), timeout_s=-1)
    with pytest.raises(RefusedError):
        col.allreduce_refs([*fresh(workers)[:1], 5])
    uneven = [workers[0].make.remote(lambda _: np.ones(2)), workers[1].make.remote(lambda _: np.ones(3))]
    with pytest.raises(RefusedError):
        col.allreduce_refs(uneven)
    assert first(col.allreduce_refs(fresh(workers))) == [11.0] * 2


def test_threads_that_wait_at_once(actors, known):
    workers = actors(BufferActor, 4)
    pairs, wrong = (workers[:2], workers[2:]), []
    for pair in pairs:
        col.allreduce_refs(fresh(pair))

    def loop(pair):
        wrong.extend(sums for _ in range(30) if (sums := first(col.allreduce_refs(fresh(pair)))) != [11.0] * 2)

    running = [threading.Thread(target=loop, args=(pair,)) for pair in pairs]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(60)
    assert not wrong
    assert len(known) == 60
