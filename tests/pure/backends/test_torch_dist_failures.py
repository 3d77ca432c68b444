"""torch.distributed's kernels that end early: aborts, large arrays in parts, and closing."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from raycollect import backends
from raycollect.core.model import Kernel, Launch, OpKind, ReduceOp
from raycollect.core.protocols import Communicator
from raycollect.errors import GroupBrokenError, PlanAbortedError
from tests.pure.conformance import body_arrive

if importlib.util.find_spec("torch") is None or not backends.is_available("torch:gloo"):
    pytest.skip("no torch with gloo is installed", allow_module_level=True)

from raycollect.backends.meshed import MESH_UP_TO_NBYTES
from raycollect.backends.torch_dist import run as _torch_run
from raycollect.backends.torch_dist.calls import Calls
from tests.pure.backends.torch_teams import OptionsTeam, body_sum, gloo_of, plugin, teams
from tests.support.waiting import wait_until

__all__ = ["plugin", "teams"]  # fixtures


def started(communicator: Communicator, launch: Launch, kernel: Kernel) -> None:
    communicator.launch(launch, (kernel,))


def wait_for_kernel(team: OptionsTeam, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Gives a function that returns when a rank waits in the library."""
    looks: list[float] = []
    look = Calls.look

    def recorded(calls: Calls) -> None:
        if calls.has_begun:
            looks.append(time.monotonic())
        look(calls)

    monkeypatch.setattr(Calls, "look", recorded)

    def wait() -> None:
        assert wait_until(lambda: looks), "nobody entered the library"

    return wait


def kernel_of(kind: OpKind, array: np.ndarray) -> Kernel:
    side = (array, array.copy()) if kind is OpKind.ALLTOALL else array
    return Kernel(kind=kind, src=side, dst=side, op=ReduceOp.SUM, peer=1, most=array.size)


LARGE = MESH_UP_TO_NBYTES[0][1] // 8 + 1
"""So many elements are for the library, between two ranks and among three."""


@pytest.mark.parametrize("kind", [OpKind.ALLREDUCE, OpKind.BROADCAST])
def test_an_abort_wakes_a_rank_in_mid_kernel_and_what_comes_late_is_not_written(
    teams: Callable[..., OptionsTeam], monkeypatch: pytest.MonkeyPatch, kind: OpKind
) -> None:
    """The library works in the user's array, so its connections are ended, and with them its kernel."""
    team = teams(world_size=3)
    in_kernel = wait_for_kernel(team, monkeypatch)
    array, launch = np.ones(LARGE), team.launch(timeout_s=60)
    waiting = team.start(0, started, launch, kernel_of(kind, array))
    in_kernel()
    was_under_way, ended = list[bool](), list[bool]()
    settle = Calls._settle

    def recorded(calls: Calls, work: Any) -> None:
        was_under_way.append(not work.is_completed())
        settle(calls, work)
        ended.append(work.is_completed())

    monkeypatch.setattr(Calls, "_settle", recorded)
    team.communicators[0].abort(launch.seq)
    assert isinstance(waiting.result(5), PlanAbortedError)
    assert any(was_under_way)
    assert all(ended), "no thread of the library is in the array"
    left = array.copy()
    for late in team.run(started, launch, kernel_of(kind, np.full(LARGE, 7.0)), ranks=(1, 2)):
        assert isinstance(late, PlanAbortedError | None)  # the root of a broadcast need not see that nobody takes it
    np.testing.assert_array_equal(array, left)
    for body in (body_arrive, body_sum):
        args = (team.launch(),) if body is body_arrive else (team.launch(), 1)
        assert isinstance(team.run(body, *args, ranks=(0,))[0], GroupBrokenError)


def test_where_connections_can_not_be_ended_the_library_gets_memory_of_its_own(
    plugin: Callable[..., None], teams: Callable[..., OptionsTeam], monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin("mine", lambda store, rank, size, timeout: gloo_of(store, rank, size), extended_api=False)
    team = teams("torch:mine")
    given: list[int] = []
    lend = _torch_run.host_tensor
    monkeypatch.setattr(_torch_run, "host_tensor", lambda array: given.append(array.ctypes.data) or lend(array))
    results = team.must(body_large, team.launch(), team.launch())
    assert all(sums == 3.0 and moved == 2.0 for sums, moved, _ in results)
    assert given
    assert not {at for *_, at in results} & set(given)


def body_large(communicator: Communicator, first: Launch, second: Launch) -> tuple[float, float, int]:
    """An allreduce and a broadcast of large arrays, in place."""
    array = np.full(LARGE, communicator.rank + 1.0)
    communicator.launch(first, (Kernel(kind=OpKind.ALLREDUCE, src=array, dst=array, op=ReduceOp.SUM),))
    moved = np.full(LARGE, communicator.rank + 1.0)
    communicator.launch(second, (Kernel(kind=OpKind.BROADCAST, src=moved, dst=moved, peer=1),))
    return float(array.min()), float(moved.max()), array.ctypes.data


def body_parts(communicator: Communicator, launches: list[Launch], size: int) -> list[bool]:
    """Arrays of several parts: in place, and averaged from one array into another, which has gaps on one rank."""
    own = np.arange(size, dtype=np.float64) * (communicator.rank + 1)
    out = np.zeros((size, 2))[:, 0] if communicator.rank == 1 else np.zeros(size)
    communicator.launch(launches[0], (Kernel(kind=OpKind.ALLREDUCE, src=own, dst=out, op=ReduceOp.AVG),))
    is_kept = bool((own == np.arange(size) * (communicator.rank + 1.0)).all())
    communicator.launch(launches[1], (Kernel(kind=OpKind.ALLREDUCE, src=own, dst=own, op=ReduceOp.SUM),))
    return [is_kept, bool((out == np.arange(size) * 2.0).all()), bool((own == np.arange(size) * 6.0).all())]


def test_large_arrays_are_reduced_in_parts_at_the_same_time(
    teams: Callable[..., OptionsTeam], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_torch_run, "PART_NBYTES", MESH_UP_TO_NBYTES[0][1] // 6)  # 7 parts
    team, begin = teams(world_size=3), Calls.begin
    open_at_once: list[int] = []

    def recorded(calls: Calls, *args: Any) -> Any:
        work = begin(calls, *args)
        open_at_once.append(len(calls._open))
        return work

    monkeypatch.setattr(Calls, "begin", recorded)
    results = team.must(body_parts, [team.launch() for _ in range(2)], LARGE + LARGE // 6)
    assert results == [[True] * 3] * 3
    assert len(open_at_once) == 3 * 2 * 7
    assert max(open_at_once) == _torch_run.AHEAD


def test_close_wakes_a_rank_in_mid_kernel(teams: Callable[..., OptionsTeam], monkeypatch: pytest.MonkeyPatch) -> None:
    team = teams()
    in_kernel = wait_for_kernel(team, monkeypatch)
    waiting = team.start(0, started, team.launch(timeout_s=60), kernel_of(OpKind.ALLREDUCE, np.ones(LARGE)))
    in_kernel()
    team.communicators[0].close()
    team.communicators[0].close()
    assert isinstance(waiting.result(5), GroupBrokenError)
