"""What a loop's runs remember of each other, and what they must notice."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from raycollect.backends import arrays
from raycollect.core.model import OpKind, ReduceOp, task_key
from raycollect.errors import KernelError, PlanAbortedError, TensorDirtyError
from raycollect.planner import Made, Request, plan
from tests.pure.engine.convoys import convoy_of
from tests.pure.engine.repeated_loops import Rebound
from tests.pure.fleet import WAIT_S, Convoy, contain


@pytest.fixture
def pair() -> Iterator[Convoy]:
    with convoy_of(2) as made:
        yield made


def _request(pair: Convoy, kind: OpKind, operands: Any, **arguments: Any) -> Request:
    return Request(kind=kind, group=pair.memberships[0].spec, operands=operands, timeout_s=WAIT_S, **arguments)


class LateFor:
    """Rank 1 comes only when rank 0 has looked at its operands and something has been done to them."""

    def __init__(self) -> None:
        self.looked, self.go = threading.Event(), threading.Event()

    def at(self, point: str, seq: int, rank: int) -> None:
        if (point, rank) == ("before_check", 0):
            self.looked.set()
        if (point, rank) == ("start", 1):
            assert self.go.wait(WAIT_S)


@pytest.mark.parametrize("change", ["dirty", "read-only", "moved"])
def test_what_a_second_look_finds_is_an_error_and_not_dropped(pair: Convoy, change: str) -> None:
    """The other rank brings a tensor of another library, to which all agree. This rank's own changes meanwhile."""
    torch = pytest.importorskip("torch")
    tensor, other = Rebound(np.ones(3)), np.ones(3)
    mine, first, second = pair.keep(0, tensor), pair.keep(1, other), pair.keep(1, torch.from_numpy(other))
    planned, changed = (
        plan([_request(pair, OpKind.ALLREDUCE, ((0, mine, None), (1, key, None)), op=ReduceOp.SUM)], pair.memberships)
        for key in (first, second)
    )
    for _ in range(2):
        assert all(future.result(WAIT_S).error is None for future in pair.start(planned).values())
    ((left,),) = [list(one.values()) for one in pair.communicators[:1]]
    heard: list[Any] = []
    end = left.end
    left.end = lambda launch, ok, owed=(): (heard.extend(owed), end(launch, ok, owed))[1]  # type: ignore[method-assign]
    tensor.array[:], other[:] = 1.0, 5.0
    pair.faults = late = LateFor()
    running = pair.start(changed)
    assert late.looked.wait(WAIT_S)
    if change == "dirty":
        pair.stores[0].mark_dirty([arrays.byte_range(tensor.array)], [tensor.array])
    elif change == "read-only":
        tensor.array.setflags(write=False)
    else:
        tensor.array = np.full(3, 100.0)
    was = tensor.array.copy()
    late.go.set()
    error = running[0].result(WAIT_S).error
    assert isinstance(error, KernelError)
    assert (error.op, error.rank) == ("allreduce", 0)
    assert isinstance(running[1].result(WAIT_S).error, PlanAbortedError)
    assert len(heard) == 1, "the backend hears that rank 1 may be in the kernel"
    np.testing.assert_array_equal(tensor.array, was)


def test_operands_are_those_of_the_moment_in_which_the_last_has_come(pair: Convoy) -> None:
    """The method that is awaited replaces a tensor in a list that another call uses."""
    late, first, old, new = np.ones(2), np.ones(2), np.ones(3), np.full(3, 10.0)
    held, other = [old], np.ones(3)
    awaited, at = task_key(b"a method's task, it runs", 1), pair.keep(0, held)
    mine, beside = pair.keep(1, first), pair.keep(1, [other])

    def method(key: Any) -> None:
        assert key == awaited
        held[0] = new
        pair.stores[0].put(key, contain(late))

    pair.waiting = method
    requests = [
        _request(pair, OpKind.ALLREDUCE, ((0, at, None), (1, beside, None)), op=ReduceOp.SUM),
        _request(pair, OpKind.ALLREDUCE, ((0, awaited, None), (1, mine, None)), op=ReduceOp.SUM),
    ]
    assert all(one.error is None for one in pair.run(requests, pair.memberships * 2).values())
    assert (old.tolist(), new.tolist(), other.tolist()) == ([1.0] * 3, [11.0] * 3, [11.0] * 3)


def test_dirt_is_excused_only_by_what_comes_before_in_the_batch(pair: Convoy) -> None:
    """A call that is brought to a later round of the consistency check reads what a later call will write whole."""
    dirty, whole, scratch = np.full(3, -999.0), np.array([7.0, 8.0, 9.0]), np.zeros(3)
    at, source, first = pair.keep(0, dirty), pair.keep(1, whole), pair.keep(0, scratch)
    pair.stores[0].mark_dirty([arrays.byte_range(dirty)], [dirty])
    makes = _request(pair, OpKind.SEND, ((0, first, None), (1, None, None)), root=0, peer=1)
    reads = _request(pair, OpKind.BROADCAST, ((0, at, None), (1, None, Made(0))), root=0)
    writes = _request(pair, OpKind.BROADCAST, ((0, None, at), (1, source, None)), root=1)
    for requests in ([makes, reads], [makes, reads, writes]):
        for outcome in pair.run(requests, pair.memberships * len(requests)).values():
            assert isinstance(outcome.error, TensorDirtyError)
            assert [violation.call for violation in outcome.error.violations] == [1]
        np.testing.assert_array_equal(dirty, np.full(3, -999.0))
    for outcome in pair.run([makes, writes, reads], pair.memberships * 3).values():
        assert outcome.error is None
    np.testing.assert_array_equal(dirty, whole)
