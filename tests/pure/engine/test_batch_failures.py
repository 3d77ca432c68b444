"""What a batch leaves behind when a kernel fails, when it is aborted, and when a tensor was dirty before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from raycollect.backends import arrays
from raycollect.core.model import Key, OpKind, ReduceOp
from raycollect.errors import (
    CollectiveTimeoutError,
    GroupBrokenError,
    KernelError,
    PlanAbortedError,
)
from raycollect.planner import Request, plan
from tests.pure.engine.convoys import allreduces, convoy_of
from tests.pure.fleet import WAIT_S, Convoy, FailAt, HoldAt


@pytest.mark.parametrize("nth", range(1, 5))
@pytest.mark.parametrize("point", ["before_kernel", "after_kernel"])
def test_a_fault_in_the_middle_leaves_exactly_what_was_being_written_dirty(point: str, nth: int) -> None:
    """Two bundles of two calls each, over tensors of their own: as many kernels, as nothing is packed."""
    with convoy_of([[0, 1, 2]]) as convoy:
        values = [np.ones((4, 3)) for _ in range(3)]
        keys = [[convoy.keep(one, row) for row in value] for one, value in enumerate(values)]
        sums = _calls(convoy, OpKind.ALLREDUCE, [[of[row] for of in keys] for row in (0, 2)])
        copies = _calls(convoy, OpKind.BROADCAST, [[of[row] for of in keys] for row in (1, 3)])
        requests, rows = [sums[0], copies[0], sums[1], copies[1]], [(0, 2), (1, 3)]
        planned = plan(requests, convoy.memberships * 4, staging=0)
        assert [together.requests for together in planned.order] == rows
        convoy.faults = fault = FailAt(point=point, rank=1, nth=nth)
        (backend,), owed = convoy.communicators[1].values(), list[int]()
        end = backend.end
        backend.end = lambda launch, ok, kernels=(): (owed.append(len(kernels)), end(launch, ok, kernels))[1]  # type: ignore[method-assign]
        outcomes = {one: future.result(WAIT_S) for one, future in convoy.start(planned).items()}
        assert fault.consumed == 1
        assert owed == [4 - nth + (point == "before_kernel")], "the backend hears of each kernel that was not run"
        hit = (nth - 1) // 2
        error = outcomes[1].error
        assert isinstance(error, KernelError)
        assert (error.op, error.rank, error.group_name) == (["allreduce", "broadcast"][hit], 1, "id-0")
        for one in range(3):
            dirty = tuple(row for row in range(4) if convoy.stores[one].is_dirty([arrays.byte_range(values[one][row])]))
            if one == 1:
                assert dirty == rows[hit]
            else:  # it may be a bundle ahead or behind, and the root of a broadcast writes nothing
                assert dirty in ((), *rows)
        if hit:
            np.testing.assert_array_equal(values[1][[0, 2]], np.full((2, 3), 3.0))
        else:
            np.testing.assert_array_equal(values[1][[1, 3]], np.ones((2, 3)))


def _calls(convoy: Convoy, kind: OpKind, keys: Sequence[Sequence[Key]]) -> list[Request]:
    """For each list of keys, by rank, a collective of them in place; from rank 0, where it has a root."""
    op, root = (ReduceOp.SUM, -1) if kind is OpKind.ALLREDUCE else (None, 0)
    return [
        Request(
            kind=kind,
            group=convoy.memberships[0].spec,
            operands=tuple(
                (rank, None, key) if rank and root == 0 else (rank, key, None) for rank, key in enumerate(of)
            ),
            op=op,
            root=root,
            timeout_s=WAIT_S,
        )
        for of in keys
    ]


def test_an_abort_between_two_launches_is_not_lost() -> None:
    """Who is aborted after a kernel, and before the next launch, begins none."""
    with convoy_of([[0, 1], [1, 2]]) as convoy:
        values = [[np.ones(2), np.ones(2)], [np.ones(2), np.ones(2)]]
        requests = allreduces(convoy, values[:1], 0) + allreduces(convoy, values[1:], 1)
        convoy.faults = hold = HoldAt(point="after_kernel", rank=1)
        futures = convoy.start(plan(requests, convoy.memberships))
        assert hold.came.wait(WAIT_S)
        assert futures[0].result(WAIT_S).error is None, "it had no other launch"
        convoy.abort(1)
        hold.go.set()
        error = futures[1].result(WAIT_S).error
        assert isinstance(error, PlanAbortedError)
        assert isinstance(futures[2].result(WAIT_S).error, PlanAbortedError), "who waits for it is aborted as well"
        np.testing.assert_array_equal(values[0], [[2, 2], [2, 2]])
        np.testing.assert_array_equal(values[1], [[1, 1], [1, 1]])
        assert [store.statistics().dirty for store in convoy.stores] == [0, 0, 0]


def test_a_group_that_is_not_there_is_an_outcome() -> None:
    with convoy_of([[0, 1], [1, 2]]) as convoy:
        requests = allreduces(convoy, [[np.ones(2), np.ones(2)]], 0) + allreduces(convoy, [[np.ones(2), np.ones(2)]], 1)
        gone = GroupBrokenError(group_name="group-1", detail="gone")

        class Missing(dict):  # type: ignore[type-arg]
            def __missing__(self, name: str) -> Any:
                raise gone

        convoy.communicators[2] = Missing()
        outcomes = convoy.run(requests, convoy.memberships)
        assert outcomes[2].error is gone
        assert isinstance(outcomes[1].error, (PlanAbortedError, CollectiveTimeoutError))
