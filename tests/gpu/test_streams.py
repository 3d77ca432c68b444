"""Order on real GPUs: a collective comes after what its caller has enqueued, on whatever stream, and before the rest.

Each test puts work of a tenth of a second or more on a stream, so that what does not wait for it reads old numbers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest

pytest.importorskip("ml_dtypes", reason="raycollect needs ml_dtypes")

import numpy as np

from raycollect.backends import streams
from raycollect.core.model import Kernel, Launch, OpKind, ReduceOp
from raycollect.core.protocols import Communicator
from raycollect.errors import CollectiveTimeoutError, GroupBrokenError, PlanAbortedError
from tests.pure.communicators import Team
from tests.pure.conformance import run_launch

from . import devices
from .cases import LIBRARIES, placed, seen
from .work import WORK, Busy, Work, must_be_busy

TeamOf = Callable[[int], Team]

SIZE = 100_003

real_only = pytest.mark.skipif(devices.FAKE, reason="the fake's kernels take no time")


def _sum(src: Any, dst: Any) -> Kernel:
    return Kernel(kind=OpKind.ALLREDUCE, src=seen(src), dst=seen(dst), op=ReduceOp.SUM)


def _first(communicator: Communicator, work: Work) -> tuple[Any, Any]:
    """Tensors of the default stream, with nothing left to do for them."""
    src, dst = work.zeros(SIZE), work.zeros(SIZE)
    work.host(src), work.host(dst)
    return src, dst


# ------------------------------------------------------------------------------- before and behind


def body_between(communicator: Communicator, launch: Launch, library: str) -> tuple[np.ndarray, np.ndarray]:
    """A collective right behind an unfinished kernel, and kernels on another stream right behind the collective."""
    work: Work = WORK[library]()
    src, dst = _first(communicator, work)
    busy, mine, other = Busy(work), work.stream(), work.stream()
    with work.on(mine):
        busy.start()
        src += communicator.rank + 1
        must_be_busy(work, mine)
        run_launch(communicator, launch, _sum(src, dst))
    with work.on(other):
        src += 100  # must not reach the collective
        twice = dst * 2
        found = work.host(dst), work.host(twice)
    with work.on(mine):
        work.host(src)
    return found


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("again", range(3))
def test_a_collective_between_kernels(team_of: TeamOf, world: int, library: str, again: int) -> None:
    team = team_of(world)
    devices.need(library)
    total = sum(range(1, world + 1))
    for found, twice in team.must(body_between, team.launch(), library):
        assert (found == total).all()
        assert (twice == 2 * total).all()


def body_default(communicator: Communicator, launch: Launch, library: str) -> np.ndarray:
    """A collective on a stream of one's own, of what the default stream is still writing."""
    work: Work = WORK[library]()
    src, dst = _first(communicator, work)
    busy, mine = Busy(work), work.stream()
    busy.start()
    src += communicator.rank + 1
    with work.on(mine):
        run_launch(communicator, launch, _sum(src, dst))
        found = work.host(dst)
    work.host(src)
    return found


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("world", [1, 2])
def test_a_collective_follows_the_default_stream_too(team_of: TeamOf, world: int, library: str) -> None:
    team = team_of(world)
    devices.need(library)
    for found in team.must(body_default, team.launch(), library):
        assert (found == sum(range(1, world + 1))).all()


def body_both(communicator: Communicator, launch: Launch) -> np.ndarray:
    """A torch tensor that a kernel of torch writes, while cupy has a stream of its own here."""
    work, cupy = WORK["torch"](), WORK["cupy"]()
    src, dst = _first(communicator, work)
    busy, mine = Busy(work), work.stream()
    with cupy.on(cupy.stream()), work.on(mine):
        busy.start()
        src += communicator.rank + 1
        must_be_busy(work, mine)
        run_launch(communicator, launch, _sum(src, dst))
        return work.host(dst)


@pytest.mark.parametrize("world", [1, 2])
def test_streams_of_torch_and_of_cupy_at_once(team_of: TeamOf, world: int) -> None:
    team = team_of(world)
    devices.need("torch")
    for found in team.must(body_both, team.launch()):
        assert (found == sum(range(1, world + 1))).all()


# ------------------------------------------------------------------------------- nothing else waits


def body_overlap(communicator: Communicator, launch: Launch, library: str) -> tuple[bool, np.ndarray]:
    """A collective, and behind its start the caller's own kernels, which go on while it is waited for."""
    work: Work = WORK[library]()
    src, dst = _first(communicator, work)
    busy, mine = Busy(work), work.stream()
    with work.on(mine):
        src += communicator.rank + 1
        communicator.agree(launch, b"")
        kernel = _sum(src, dst)
        communicator.enqueue(launch, (kernel,))  # type: ignore[attr-defined]
        busy.start()
        communicator.finish(launch, kernel)  # type: ignore[attr-defined]
        goes_on = work.is_busy(mine)
        communicator.end(launch, True)
        found = work.host(dst)
    return goes_on, found


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("world", [1, 2])
def test_kernels_behind_the_start_of_a_collective_overlap_with_it(team_of: TeamOf, world: int, library: str) -> None:
    team = team_of(world)
    devices.need(library)
    for goes_on, found in team.must(body_overlap, team.launch(), library):
        assert goes_on or devices.FAKE, "waiting for the collective waited for kernels that came after it"
        assert (found == sum(range(1, world + 1))).all()


def body_others(communicator: Communicator, launch: Launch, library: str) -> tuple[bool, np.ndarray]:
    """A collective while a stream that it has nothing to do with is busy."""
    work: Work = WORK[library]()
    src, dst = _first(communicator, work)
    busy, mine, other = Busy(work), work.stream(), work.stream()
    with work.on(other):
        busy.start()
    with work.on(mine):
        src += communicator.rank + 1
        run_launch(communicator, launch, _sum(src, dst))
        goes_on = work.is_busy(other)
        found = work.host(dst)
    with work.on(other):
        work.host(work.zeros(1))
    return goes_on, found


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("world", [1, 2])
def test_a_collective_does_not_wait_for_other_streams(team_of: TeamOf, world: int, library: str) -> None:
    team = team_of(world)
    devices.need(library)
    for goes_on, found in team.must(body_others, team.launch(), library):
        assert goes_on or devices.FAKE, "the whole device was waited for"
        assert (found == sum(range(1, world + 1))).all()


# ------------------------------------------------------------------------------- other threads


def body_for_another(communicator: Communicator, launch: Launch, library: str) -> tuple[np.ndarray, np.ndarray]:
    """A call that another thread makes for its caller, as `async_op` does, and the caller's kernels meanwhile."""
    work: Work = WORK[library]()
    device = int(import_module("cupy").cuda.runtime.getDevice())
    src, dst = _first(communicator, work)
    mine, busy, own = work.stream(), Busy(work), work.zeros(SIZE)
    work.host(own)
    failed: list[BaseException] = []

    def call(told: streams.Mark | None) -> None:
        try:
            with import_module("cupy").cuda.Device(device), streams.after(told):
                run_launch(communicator, launch, _sum(src, dst))
        except BaseException as exc:
            failed.append(exc)

    with work.on(mine):
        busy.start()
        src += communicator.rank + 1
        told = streams.mark([seen(src)])
        thread = threading.Thread(target=call, args=(told,))
        thread.start()
        own += 7
        thread.join()
        if failed:
            raise failed[0]
        return work.host(dst), work.host(own)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("world", [1, 2])
def test_a_call_of_another_thread_follows_its_callers_streams(team_of: TeamOf, world: int, library: str) -> None:
    team = team_of(world)
    devices.need(library)
    for found, own in team.must(body_for_another, team.launch(), library):
        assert (found == sum(range(1, world + 1))).all()
        assert (own == 7).all()


def body_settled(communicator: Communicator, library: str) -> np.ndarray:
    """What a method leaves on its stream, used from the default stream by whoever comes next."""
    work: Work = WORK[library]()
    src, _ = _first(communicator, work)
    busy, mine = Busy(work), work.stream()
    with work.on(mine):
        busy.start()
        src += 5
        must_be_busy(work, mine)
        streams.settle([seen(src)])
    found = work.host(src + 1)
    with work.on(mine):
        work.host(src)
    return found


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_default_stream_follows_what_was_settled(team_of: TeamOf, library: str) -> None:
    team = team_of(1)
    devices.need(library)
    (found,) = team.must(body_settled, library)
    assert (found == 6).all()


# ------------------------------------------------------------------------------- without a copy


def body_large(communicator: Communicator, launch: Launch, library: str) -> tuple[int, int, bool]:
    """A collective on a large tensor where there is no room for a copy of it: address told, address, right result."""
    cupy, size = import_module("cupy"), 16 << 20
    src, dst = (placed(np.full(size, value, np.float32), "plain", library) for value in (1, 0))
    pool = cupy.get_default_memory_pool()
    pool.free_all_blocks()
    pool.set_limit(size=pool.total_bytes() + (1 << 20))
    try:
        run_launch(communicator, launch, _sum(src, dst))
    finally:
        pool.set_limit(size=0)
    address = dst.data.ptr if library == "cupy" else dst.data_ptr()
    return seen(dst).address, address, bool((dst == communicator.world_size).all())


@real_only
@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("world", [1, 2])
def test_contiguous_tensors_are_not_copied(team_of: TeamOf, world: int, library: str) -> None:
    team = team_of(world)
    devices.need(library)
    for told, address, is_right in team.must(body_large, team.launch(), library):
        assert told == address
        assert is_right


class Lent:
    """Somebody else's array: all that is known of it is the CUDA array interface."""

    def __init__(self, array: Any) -> None:
        self._array = array

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return self._array.__cuda_array_interface__


def body_lent(communicator: Communicator, launch: Launch) -> np.ndarray:
    own = placed(np.arange(SIZE, dtype=np.float32), "every other", "cupy")
    lent = Lent(own)
    assert seen(lent).address == own.data.ptr
    run_launch(communicator, launch, _sum(lent, lent))
    return own.get()


@pytest.mark.parametrize("world", [1, 2])
def test_whatever_shows_its_memory_is_worked_on(team_of: TeamOf, world: int) -> None:
    team = team_of(world)
    for found in team.must(body_lent, team.launch()):
        np.testing.assert_array_equal(found, world * np.arange(SIZE, dtype=np.float32))


# ------------------------------------------------------------------------------- limits, behind what is not done


def body_late(communicator: Communicator, launch: Launch, abort_after: bool) -> tuple[str, str, bool]:
    """A kernel of one rank that can't begin in time: what ends it, what the group says then, and the device."""
    work = WORK["cupy"]()
    src, dst = _first(communicator, work)
    busy, mine = Busy(work), work.stream()
    said = []
    with work.on(mine):
        for _ in range(2):
            busy.start()
        must_be_busy(work, mine)
        for _ in range(2):
            try:
                kernel = _sum(src, dst)
                communicator.enqueue(launch, (kernel,))  # type: ignore[attr-defined]
                if abort_after:
                    communicator.abort(launch.seq)
                communicator.finish(launch, kernel)  # type: ignore[attr-defined]
                said.append("it ended")
            except (CollectiveTimeoutError, PlanAbortedError, GroupBrokenError) as exc:
                said.append(type(exc).__name__)
        communicator.end(launch, False)
        src += 1
        works = bool((work.host(src) == 1).all())
    return said[0], said[1], works


@real_only
@pytest.mark.parametrize(("abort_after", "error"), [(False, "CollectiveTimeoutError"), (True, "PlanAbortedError")])
def test_one_rank_alone_is_ended_too(fresh_team_of: TeamOf, abort_after: bool, error: str) -> None:
    team = fresh_team_of(1)
    (found,) = team.must(body_late, team.launch(timeout_s=30.0 if abort_after else 0.02), abort_after)
    assert found[0] == error
    assert found[1] in ("GroupBrokenError", error)
    assert found[2], "the device does not go on"
