"""Odd values for every argument of the public functions: taken or refused by a typed error, and the next call works."""

from __future__ import annotations

import inspect
import pickle

import numpy as np
import pytest
import ray

import raycollect as col
from raycollect.errors import RaycollectError
from tests.support.actors import Worker, buffers
from tests.support.waiting import wait_until

HUGE = 2**20_000
"""A number that Python refuses to write out."""

ODD = [
    *(None, True, 3, -1, 2**70, HUGE, 1.5, float("nan"), float("inf"), b"x", "", "\ud800", "a\0b", "zz", "x" * 10_000),
    *([], {}, (), [None], [[1, 2]], {"a": None}, {None: 2}, object(), range(3), int, lambda: 1),
    *(np.ones(3), np.float32(4), np.int64(1), np.bool_(True)),
]
_LISTS = "allgather_refs reducescatter_refs gather_refs scatter_refs alltoall_refs"
OF_REFS = "allreduce_refs reduce_refs broadcast_refs scan_refs exscan_refs send_ref recv_ref barrier"
MADE = {"empty": {"shape": 3}, "zeros": {"shape": 3}, "full": {"shape": 3, "fill_value": 1}, "array": {"object": [1]}}
MEMBER = "is_group_initialized get_rank get_collective_group_size destroy_collective_group is_backend_available"


@pytest.fixture
def scene(actors):
    """The usual arguments of the driver's functions."""
    workers = actors(Worker, 2)
    col.declare_collective_group(workers, group_name="g")
    refs = buffers(workers)
    lists = [one.make.remote(lambda self: [np.ones(10, np.float32)] * 2) for one in workers]
    usual = {"tensor_refs": refs, "group_name": "g", "tensor_list_refs": lists, "tensor_list_in_refs": lists}
    usual |= {"tensor_list_ref": lists[0], "src_tensor_ref": refs[0], "dst_tensor_ref": refs[1], "timeout_s": 30}
    yield workers, usual
    col.allreduce_refs(refs, "g")
    first, second = col.get(refs)
    np.testing.assert_array_equal(first, second)


def odd_calls(function, usual):
    """Calls with one odd argument each; the usual ones for the others that have no default."""
    parameters = inspect.signature(function).parameters
    given = {name: usual[name] for name in parameters if name in usual}
    given |= {name: None for name, one in parameters.items() if one.default is one.empty and name not in given}
    for name in parameters:
        for odd in ODD:
            yield f"{function.__name__}({name}={'HUGE' if odd is HUGE else odd!r:.60})", {**given, name: odd}


def assert_typed(what, call):
    error = None
    try:
        call()
    except RaycollectError as exc:
        error = pickle.loads(pickle.dumps(exc))
    except Exception as exc:
        raise AssertionError(f"{what} raised {type(exc).__name__}") from exc
    assert len(str(error)) < 100_000, what


@pytest.mark.parametrize("name", f"{OF_REFS} {_LISTS}".split())
def test_operations(scene, name):
    _, usual = scene
    for what, given in odd_calls(getattr(col, name), usual):
        assert_typed(what, lambda given=given: getattr(col, name)(**given))


def test_declarations(scene):
    workers, _ = scene
    usual = {"actors": workers, "group_name": "h"}
    for what, given in odd_calls(col.declare_collective_group, usual):
        assert_typed(what, lambda given=given: col.declare_collective_group(**given).destroy())
    # The last group leaves the members in its own time.
    assert wait_until(lambda: not ray.get(workers[0].call.remote(lambda self: col.is_group_initialized("h"))))


def test_versions_of_weights(scene):
    _, usual = scene
    source, target = usual["tensor_refs"]
    with col.publish([source], name="odd") as publication, col.subscribe("odd", [target]) as subscription:
        publication.put()
        calls = {
            "name": lambda odd: col.publish([source], name=odd).close(),
            "layout": lambda odd: col.publish([source], name="other", layout=odd).close(),
            "refs": lambda odd: col.publish(odd, name="other").close(),
            "put": publication.put,
            "push": publication.push,
            "update": subscription.update,
            "timeout_s": lambda odd: subscription.update(timeout_s=odd),
            "subscribe": lambda odd: col.subscribe(odd, [target]).close(),
            "targets": lambda odd: col.subscribe("odd", odd).close(),
        }
        for name, call in calls.items():
            for odd in ODD:
                assert_typed(name, lambda odd=odd, call=call: call(odd))


@pytest.mark.parametrize("name", MADE)
def test_constructors(name):
    for what, given in odd_calls(getattr(col, name), MADE[name]):
        assert_typed(what, lambda given=given: getattr(col, name)(**given))


def test_what_is_asked_in_any_process(scene):
    for name in MEMBER.split():
        for odd in ODD:
            assert_typed(name, lambda odd=odd, name=name: getattr(col, name)(odd))
    for function in (col.by_value, col.DirectoryBulletin, col.RankTable.coerce, col.plan, col.layout_of):
        for odd in ODD:
            if not (function is col.DirectoryBulletin and isinstance(odd, str)):  # which makes a folder
                assert_typed(f"{function} {odd!r:.50}" if odd is not HUGE else function, lambda f=function, o=odd: f(o))
    for odd in ODD:
        if not isinstance(odd, str) or "\0" in odd or odd == "\ud800":
            assert_typed("timeline", lambda odd=odd: col.timeline(odd).stop())
