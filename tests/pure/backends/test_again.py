"""The short way to the consistency check in shared memory: what is done again, and what holds the memory meanwhile."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raycollect.backends.shm.staged import StagedKernels
from raycollect.core.model import Kernel, Launch, OpKind, ReduceOp
from raycollect.errors import (
    CollectiveTimeoutError,
    GroupBrokenError,
    PlanAbortedError,
    UnsupportedError,
    Violation,
    refusal,
)
from raycollect.pos import tensors
from tests.pure.closing import closing_all
from tests.pure.communicators import ThreadTeam
from tests.pure.engine.repeated_loops import Loop, Rebound
from tests.pure.watched import WAIT_S

SIZES = (1, 7, 3000, 5000, 70_001, 140_001)
"""In float64: small, staged by one chunk, large enough for work in place, and more than one chunk."""


def mapped() -> int:
    """How many groups' memories this process has mapped, by those who hold them."""
    gc.collect()
    return Path("/proc/self/maps").read_text().count("memfd:raycollect")


def summing(array: Any, **others: Any) -> Kernel:
    return Kernel(kind=OpKind.ALLREDUCE, src=array, dst=array, op=ReduceOp.SUM, **others)


def again(communicator: Any, launch: Launch, kernel: Kernel, arrival: bytes, expected: Sequence[bytes]) -> Any:
    """One whole launch of a kernel that was run before; gives what all brought, or None if that was expected."""
    ok = False
    try:
        brought = communicator.agree(launch, arrival, kernel, expected)
        communicator.launch(launch, (kernel,))
        ok = True
        return None if brought is expected else brought
    finally:
        communicator.end(launch, ok)


MakeTeam = Callable[[int], ThreadTeam]


@pytest.fixture
def team() -> Iterator[MakeTeam]:
    with closing_all(partial(ThreadTeam, "shm")) as make:
        yield make


class Crew:
    """Ranks that sum arrays of their own, with a kernel each that is kept from launch to launch."""

    def __init__(self, team: ThreadTeam, arrays: Sequence[Any]) -> None:
        self.team, self.arrays = team, list(arrays)
        self.kernels = [summing(array) for array in arrays]
        self.sums = 0
        self.expected = {ranks: (b"as ever",) * len(ranks) for ranks in self.subsets}

    @property
    def subsets(self) -> list[tuple[int, ...]]:
        world = len(self.arrays)
        chosen = [tuple(rank for rank in range(world) if bits >> rank & 1) for bits in range(1, 1 << world)]
        return [ranks for ranks in chosen if len(ranks) > 1 or world == 1]

    def sum(self, ranks: tuple[int, ...] = ()) -> None:
        """They sum what they have not had before, and all have the sum of those who came; the others what they had."""
        ranks = ranks or self.team.everyone
        self.sums += 1
        for rank, array in enumerate(self.arrays):
            array[...] = 100.0**rank * self.sums + np.arange(array.size) % 5
        before = [array.copy() for array in self.arrays]
        launch = self.team.launch(ranks, timeout_s=5.0)

        def come(communicator: Any) -> Any:
            rank = communicator.rank
            return again(communicator, launch, self.kernels[rank], b"as ever", self.expected[ranks])

        assert self.team.must(come, ranks=ranks) == [None] * len(ranks)
        total = sum(before[rank] for rank in ranks)
        for rank, array in enumerate(self.arrays):
            np.testing.assert_array_equal(array, total if rank in ranks else before[rank])


# ---------------------------------------------------------------------------------------------- kernels again


@pytest.mark.parametrize("make", [np.zeros, tensors.zeros], ids=["plain", "shared"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_kernel_that_is_run_again_sums_again(team: MakeTeam, world: int, size: int, make: Any) -> None:
    crew = Crew(team(world), [make(size) for _ in range(world)])
    for _ in range(5):
        crew.sum()


@pytest.mark.parametrize("size", SIZES[:-1])
@pytest.mark.parametrize("seed", range(3))
def test_a_kernel_remembered_for_some_ranks_is_run_by_others(team: MakeTeam, seed: int, size: int) -> None:
    rng, crew = random.Random(seed), Crew(team(3), [np.zeros(size) for _ in range(3)])
    for _ in range(15):
        ranks = rng.choice(crew.subsets)
        for _ in range(rng.randrange(1, 3)):
            crew.sum(ranks)


# ---------------------------------------------------------------------------------------------- who holds the memory


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("remembered", [False, True])
@pytest.mark.parametrize("size", [5, 5000, 140_001])
def test_closing_between_the_check_and_the_end_leaves_the_memory_till_then(
    team: MakeTeam, world: int, remembered: bool, size: int
) -> None:
    pair = team(world)
    crew = Crew(pair, [np.zeros(size) for _ in range(world)])
    for _ in range(2 * remembered):
        crew.sum()
    communicator: Any = pair.communicators[0]
    launch, held = pair.launch(timeout_s=5.0), mapped()
    gives = [np.full(size, rank + 1.0) for rank in range(world)]
    for array, give in zip(crew.arrays, gives, strict=True):
        array[...] = give
    others = [
        pair.start(rank, again, launch, crew.kernels[rank], b"as ever", crew.expected[launch.ranks])
        for rank in range(1, world)
    ]
    expected = crew.expected[launch.ranks]
    assert communicator.agree(launch, b"as ever", crew.kernels[0], expected) is expected
    closing = threading.Thread(target=communicator.close)
    closing.start()
    closing.join(WAIT_S)
    assert mapped() == held
    needs_no_barrier = size < 100_000
    if needs_no_barrier:
        communicator.launch(launch, (crew.kernels[0],))
        np.testing.assert_array_equal(crew.arrays[0], sum(gives))
    else:
        with pytest.raises(PlanAbortedError):
            communicator.launch(launch, (crew.kernels[0],))
    assert mapped() == held
    ranks = communicator.end(launch, needs_no_barrier)
    assert (0 in ranks) is needs_no_barrier
    assert mapped() == held - 1
    for rank, other in enumerate(others, 1):
        if isinstance(other.result(WAIT_S), PlanAbortedError):
            assert not needs_no_barrier
        else:  # or rank 0 was at the last barrier before it was closed
            assert other.result() is None
            np.testing.assert_array_equal(crew.arrays[rank], sum(gives))
    assert communicator.end(launch, True) == ()
    with pytest.raises(GroupBrokenError):
        communicator.agree(pair.launch(), b"", crew.kernels[0], (b"",) * world)
    assert communicator.end(launch, True) == ()
    communicator.close()
    assert mapped() == held - 1


def _refused(*args: object) -> None:
    violation = Violation(kind="unsupported", rank=0, field="operand", found="this", expected="that")
    raise refusal("", "", (violation,))


@pytest.mark.parametrize("expects", [False, True])
def test_after_a_refusal_it_goes_to_the_same_check(
    team: MakeTeam, monkeypatch: pytest.MonkeyPatch, expects: bool
) -> None:
    """As a run goes on. The other, who expects what was brought before, is told what was brought."""
    pair, held = team(2), mapped()
    crew = Crew(pair, [np.zeros(5) for _ in range(2)])
    crew.sum()
    launch = pair.launch(timeout_s=5.0)
    expected, kernels = crew.expected[launch.ranks], crew.kernels
    other = pair.start(
        1,
        lambda communicator: (
            communicator.agree(launch, b"as ever", kernels[1], expected),
            communicator.end(launch, False),
        ),
    )
    communicator: Any = pair.communicators[0]
    with monkeypatch.context() as patch:
        stage_again = StagedKernels.stage_again
        patch.setattr(StagedKernels, "stage_again", lambda self, *args: self._rank and stage_again(self, *args))
        patch.setattr(StagedKernels, "stage", _refused)
        with pytest.raises(UnsupportedError):
            communicator.agree(launch, b"as ever", kernels[0], expected)
    brought = [b"why", b"as ever"]
    assert list(communicator.agree(launch, b"why", expected=expected if expects else None)) == brought
    assert communicator.end(launch, False) == ()
    assert other.result(WAIT_S) == (brought, ())
    for _ in range(2):
        crew.sum()
    communicator.close()
    assert mapped() == held - 1, "nobody holds it"


@pytest.mark.parametrize("how", ["nobody comes", "an abort", "the other has left"])
def test_after_a_check_that_nobody_passes_it_ends_and_comes_again(team: MakeTeam, how: str) -> None:
    pair, held = team(2), mapped()
    crew = Crew(pair, [np.zeros(5) for _ in range(2)])
    for _ in range(2):
        crew.sum()
    communicator: Any = pair.communicators[0]
    launch = pair.launch(timeout_s=0.01 if how == "nobody comes" else WAIT_S)
    if how == "an abort":
        communicator.abort(launch.seq)
    elif how == "the other has left":
        pair.communicators[1].end(launch, False)
    with pytest.raises(CollectiveTimeoutError if how == "nobody comes" else PlanAbortedError):
        communicator.agree(launch, b"as ever", crew.kernels[0], crew.expected[launch.ranks])
    assert communicator.end(launch, False) == ()
    for _ in range(2):
        crew.sum()
    communicator.close()
    assert mapped() == held - 1, "nobody holds it"


# ---------------------------------------------------------------------------------------------- captured steps


@pytest.mark.parametrize("size", [5000, 50_000])
def test_an_array_that_comes_to_lie_in_shared_memory_is_summed(size: int) -> None:
    """On one rank, in a loop: the other goes on as in the runs before."""
    loop = Loop("shm", [np.zeros(size), Rebound(np.zeros(size))], timeout_s=5.0)
    try:
        for make in (np.zeros, tensors.zeros, np.zeros, tensors.zeros):
            loop.values[1].array = make(size)
            loop.must()
    finally:
        loop.close()
