"""Calls that a loop repeats are known by their arguments and actors; what they meant before must still hold."""

from __future__ import annotations

import signal
import threading

import numpy as np
import pytest
import ray

import raycollect as col
from raycollect.driver import known_calls
from raycollect.driver.controller import Controller
from raycollect.driver.dispatch import send_prepared
from raycollect.errors import RefusedError
from tests.lives import lasting
from tests.ray.workers import Buffers
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(120)

BufferActor = lasting(ray.remote(num_cpus=0)(Buffers))

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


def test_results_are_in_rank_order_whatever_the_order_of_the_list(actors, known):
    workers = actors(BufferActor, 3)
    col.declare_collective_group(workers, group_name="known")
    for turn in range(3):
        refs = fresh(workers)
        results = col.allreduce_refs([refs[2], refs[0], refs[1]], group_name="known")
        assert results == refs
        assert first(results) == [111.0] * 3
        assert len(known) == turn
    assert known == [(1, 2, 0)] * 2


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


def lists(workers):
    """Refs of tensor lists of one array per worker that were not there before."""
    return [
        worker.make.remote(lambda _, value: [np.full(2, value + at) for at in range(2)], float(value))
        for worker, value in zip(workers, TENS, strict=False)
    ]


def all_of(refs):
    """The first element of each array of each ref."""
    values = col.get(list(refs))
    return [[float(one[0]) for one in value] if isinstance(value, list) else float(value[0]) for value in values]


OPERATIONS = {
    "reduce": (lambda ones, _: col.reduce_refs(ones, 1), [1], [11.0]),
    "scan": (lambda ones, _: col.scan_refs(ones), [0, 1], [1.0, 11.0]),
    "exscan": (lambda ones, _: col.exscan_refs(ones), [0, 1], [1.0, 1.0]),
    "allgather": (lambda ones, several: col.allgather_refs(several, ones), [2, 3], [[1.0, 10.0]] * 2),
    "reducescatter": (lambda ones, several: col.reducescatter_refs(ones, several), [0, 1], [11.0, 13.0]),
    "gather": (lambda ones, several: col.gather_refs(several[1], ones, 1), [3], [[1.0, 10.0]]),
    "scatter": (lambda ones, several: col.scatter_refs(ones, several[1], 1), [0, 1], [10.0, 11.0]),
    "send": (lambda ones, _: col.send_ref(ones[1], ones[0]), [0], [10.0]),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_in_place_is_known(actors, known, name):
    call, places, expected = OPERATIONS[name]
    workers = actors(BufferActor, 2)
    for turn in range(3):
        ones, several = fresh(workers), lists(workers)
        result = call(ones, several)
        found = result if isinstance(result, list) else [result]
        assert [(ones + several).index(ref) for ref in found] == places
        assert all_of(found) == expected
        assert len(known) == turn


def test_alltoall_is_known_where_its_outputs_are_others_than_its_inputs(actors, known):
    workers = actors(BufferActor, 2)
    for _ in range(2):
        inputs, outputs = lists(workers), lists(workers)
        assert col.alltoall_refs(outputs, inputs) == outputs
        assert all_of(outputs) == [[1.0, 10.0], [2.0, 11.0]]
        assert col.alltoall_refs(outputs, outputs) == outputs
        assert all_of(outputs) == [[1.0, 2.0], [10.0, 11.0]]
    assert len(known) == 1


def test_what_is_made_and_one_ref_in_place_of_a_list_are_not_known(actors, known):
    workers = actors(BufferActor, 2)
    col.declare_collective_group(workers, group_name="made")
    for _ in range(2):
        results = col.allgather_refs(None, fresh(workers), group_name="made")
        assert all_of(results) == [[1.0, 10.0]] * 2
        assert all_of([col.send_ref(fresh(workers)[0], workers[1], group_name="made")]) == [1.0]
    (alone,) = workers[:1]
    for _ in range(2):
        assert first(col.allreduce_refs(fresh([alone]))) == [1.0]
    assert len(known) == 1
    with pytest.raises(RefusedError):
        col.allreduce_refs(*fresh([alone]))
    assert len(known) == 1


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


def test_they_are_forgotten_before_they_are_too_many(actors, known, monkeypatch):
    monkeypatch.setattr(known_calls, "MOST", 2)
    workers = actors(BufferActor, 2)
    for timeout_s in (40, 41, 42, 43):
        col.allreduce_refs(fresh(workers), timeout_s=timeout_s)
    assert len(Controller.current().known_calls) <= 2


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


def test_a_caller_that_is_interrupted_gives_the_bell_back(actors, known, monkeypatch):
    workers = actors(BufferActor, 2)
    for _ in range(2):
        col.allreduce_refs(fresh(workers))
    trackers = []

    def interrupted(*args):
        trackers.append(send_prepared(*args))
        signal.raise_signal(signal.SIGINT)
        return trackers[-1]

    with monkeypatch.context() as patched:
        patched.setattr(known_calls, "send_prepared", interrupted)
        with pytest.raises(KeyboardInterrupt):
            col.allreduce_refs(fresh(workers))
    assert first(col.allreduce_refs(fresh(workers))) == [11.0] * 2
    assert trackers[0].wait(20), "nobody looks at the bell any more, and yet it ends"
    wait_until(lambda: trackers[0].has_ended)
    bell = Controller.current().claim_bell()
    assert bell is not None
    bell.release()
