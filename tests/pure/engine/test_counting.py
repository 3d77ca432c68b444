"""What runs add to the counters of their process."""

from __future__ import annotations

import numpy as np

from raycollect.core.model import OpKind
from raycollect.observe import Counters
from raycollect.planner import plan
from tests.pure.engine.convoys import allreduces, convoy_of
from tests.pure.fleet import FailAt, Fleet


def counted(counters: Counters) -> dict[str, tuple[int, int, int]]:
    return {one.operation: (one.calls, one.nbytes, one.failures) for one in counters.tallies()}


def test_first_and_repeated_runs_are_counted_with_their_bytes_and_times() -> None:
    fleet = Fleet(2)
    keys = fleet.keep_all([np.ones(10) for _ in range(2)])
    for _ in range(3):
        fleet.must(OpKind.ALLREDUCE, keys)
    fleet.must(OpKind.BROADCAST, keys, root=0)
    for counters in fleet.counters:
        assert counted(counters) == {"allreduce": (3, 240, 0), "broadcast": (1, 80, 0)}
        assert all(one.seconds > 0 and one.wait_seconds > 0 for one in counters.tallies())
    fleet.close()


def test_calls_of_members_are_counted() -> None:
    fleet = Fleet(2)
    for _ in range(3):
        fleet.call(OpKind.ALLREDUCE, [np.ones(10) for _ in range(2)])
    assert [counted(one) for one in fleet.counters] == [{"allreduce": (3, 240, 0)}] * 2
    fleet.close()


def test_a_run_that_fails_is_a_failure_and_no_call() -> None:
    fleet = Fleet(2)
    keys = fleet.keep_all([np.ones(10) for _ in range(2)])
    fleet.faults = fault = FailAt(point="after_kernel", rank=1)
    fleet.run(OpKind.ALLREDUCE, keys)
    assert fault.consumed
    assert counted(fleet.counters[1]) == {"allreduce": (0, 0, 1)}
    fleet.run(OpKind.ALLREDUCE, fleet.keep_all([np.ones(3), np.ones(4)]))
    assert counted(fleet.counters[1]) == {"allreduce": (0, 0, 2)}, "nor one that the agreement refuses"
    fleet.close()


def test_the_calls_of_a_batch_are_counted_one_by_one_and_share_its_wait() -> None:
    with convoy_of([[0, 1], [0, 1]]) as convoy:
        values = [[np.ones(10) for _ in range(2)] for _ in range(2)]
        requests = [*allreduces(convoy, values[:1], 0), *allreduces(convoy, values[1:], 1)]
        for future in convoy.start(plan(requests, convoy.memberships)).values():
            assert future.result(20).error is None
        for counters in convoy.counters:
            assert [(one.calls, one.nbytes) for one in counters.tallies()] == [(1, 80), (1, 80)]
            first, second = (one.wait_seconds for one in counters.tallies())
            assert first == second > 0
