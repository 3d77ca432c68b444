"""Kernels that work in place, many of them with one meeting."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from raycollect.backends.shm import direct
from raycollect.backends.shm.coalesced import CoalescedRow
from raycollect.core.model import Kernel, Launch, OpKind, ReduceOp
from raycollect.core.protocols import Communicator
from raycollect.pos import tensors
from tests.pure.backends.in_place_kernels import Stop, assert_aborted, body_allreduce, trio
from tests.pure.communicators import ThreadTeam
from tests.pure.conformance import REDUCTIONS

__all__ = ["trio"]  # a fixture


def together(communicator: Communicator, launch: Launch, kernels: list[Kernel]) -> int:
    """Runs kernels at once, as a launch; gives how many barriers of its own the launch had."""
    ok = False
    try:
        communicator.agree(launch, b"")
        meeting = communicator._parts.meeting  # type: ignore[attr-defined]
        before = meeting._phase
        communicator.launch(launch, kernels)
        ok = True
        return int(meeting._phase - before)
    finally:
        communicator.end(launch, ok)


def kernels_of(kind: OpKind, rank: int, arrays: list[Any], peer: int = -1) -> list[Kernel]:
    """One kernel per array, in place."""
    op = ReduceOp.SUM if kind in REDUCTIONS else None
    gives = kind in REDUCTIONS or rank == peer
    takes = kind is OpKind.ALLREDUCE or (rank == peer) == (kind is OpKind.REDUCE)
    return [Kernel(kind=kind, src=a if gives else None, dst=a if takes else None, op=op, peer=peer) for a in arrays]


def must_hold(kind: OpKind, root: int, arrays: list[list[Any]], given: list[list[Any]]) -> None:
    """Each rank's arrays are what the kernels, in place, make of what all have given."""
    for at in range(len(given[0])):
        expected = given[root][at].copy() if kind is OpKind.BROADCAST else given[0][at].copy()
        for other in given[1:] if kind in REDUCTIONS else ():
            expected += other[at]
        for rank, mine in enumerate(arrays):
            alone = kind is OpKind.REDUCE and rank != root
            np.testing.assert_array_equal(mine[at], given[rank][at] if alone else expected)


def strided(values: Any) -> Any:
    """An ordinary array with gaps."""
    array = np.zeros((values.size, 2), values.dtype)[:, 1]
    array[:] = values
    return array


ORDINARY: dict[str, Callable[[Any], Any]] = {
    "plain": np.array,
    "strided": strided,
    "swapped": lambda values: values.astype(values.dtype.newbyteorder()),
    "shared": tensors.array,
}


IN_PLACE = ("shared",) * 7
MIXED = ("plain", "strided", "shared", "swapped", "plain", "plain", "strided")


@pytest.mark.parametrize("layouts", [IN_PLACE, MIXED], ids=["in place", "staged"])
@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("kind", [OpKind.ALLREDUCE, OpKind.REDUCE, OpKind.BROADCAST])
def test_many_kernels_with_one_meeting(kind: OpKind, world: int, layouts: tuple[str, ...]) -> None:
    """The arrays have several types, layouts and sizes."""
    team = ThreadTeam("shm", world)
    rng = np.random.default_rng(world)
    root = world // 2 if kind is not OpKind.ALLREDUCE else -1
    sizes = [200_001, 3, 0, 70_000, 1, 300_000, 64]
    given = [[rng.standard_normal(n).astype("f8" if n % 2 else "f4") for n in sizes] for _ in team.everyone]
    arrays = [[ORDINARY[lay](array) for lay, array in zip(layouts, mine, strict=True)] for mine in given]

    def body(communicator: Communicator, launch: Launch) -> int:
        return together(communicator, launch, kernels_of(kind, communicator.rank, arrays[communicator.rank], root))

    for _ in range(2):  # the second time by what was remembered
        for mine, before in zip(arrays, given, strict=True):
            for array, values in zip(mine, before, strict=True):
                array[...] = values
        barriers = team.must(body, team.launch())
        assert len({*barriers}) == 1
        assert layouts is MIXED or barriers[0] <= 3, "in all, not for each kernel"
        must_hold(kind, root, arrays, given)
    team.close()


def test_one_ordinary_array_anywhere_has_all_of_them_staged(trio: ThreadTeam) -> None:
    arrays = [[tensors.full(40_000, rank + 1.0) for _ in range(3)] for rank in trio.everyone]
    arrays[1][2] = np.full(40_000, 2.0)

    def body(communicator: Communicator) -> int:
        kernels = kernels_of(OpKind.ALLREDUCE, communicator.rank, arrays[communicator.rank])
        return together(communicator, launch, kernels)

    for turn in range(3):
        launch = trio.launch()
        trio.must(body)
        assert all((array == 6 * 3**turn).all() for mine in arrays for array in mine)


@pytest.mark.parametrize("size", [1, 7, 131_072, 131_073, 300_000])
def test_a_coalesced_row_is_read_and_written_at_any_place(size: int) -> None:
    rng = np.random.default_rng(size)
    ends = np.unique(rng.integers(0, size + 1, 9))
    whole = rng.standard_normal(size)
    parts = [part.copy() if at % 2 else strided(part) for at, part in enumerate(np.split(whole, ends))]
    row = CoalescedRow(parts)
    assert (row.size, row.nbytes, row.dtype) == (size, 8 * size, np.dtype("f8"))
    for lo, hi in [(0, size), (0, 0), *np.sort(rng.integers(0, size + 1, (20, 2)), axis=1).tolist()]:
        np.testing.assert_array_equal(row.read(lo, hi), whole[lo:hi])
        whole[lo:hi] += 1
        row.write(lo, hi, whole[lo:hi])
    np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_more_kernels_than_a_listing_has_room_for(trio: ThreadTeam) -> None:
    count = 2 * direct.TOGETHER + 3
    arrays = [[tensors.full(40, rank + 1.0) for _ in range(count)] for rank in trio.everyone]

    def body(communicator: Communicator, launch: Launch) -> int:
        kernels = kernels_of(OpKind.ALLREDUCE, communicator.rank, arrays[communicator.rank])
        return together(communicator, launch, kernels)

    barriers = trio.must(body, trio.launch())
    assert all(most <= 2 * 3 + 3 for most in barriers), "of two listings, and three that are too small to be worth it"
    assert all((array == 6).all() for mine in arrays for array in mine)


def test_all_arrays_lent_together_are_kept_until_nobody_can_write_them(
    monkeypatch: pytest.MonkeyPatch, trio: ThreadTeam
) -> None:
    arrays: list[Any] = [[tensors.zeros(50_000) for _ in range(4)] for _ in trio.everyone]
    roots = [weakref.ref(array.base) for array in arrays[0]]
    stop = Stop(monkeypatch, "_reduce", lambda work: work._rank == 2)
    launch = trio.launch()

    def body(communicator: Communicator) -> int:
        kernels = kernels_of(OpKind.ALLREDUCE, communicator.rank, arrays[communicator.rank])
        return together(communicator, launch, kernels)

    futures = [trio.start(rank, body) for rank in trio.everyone]
    stop.abort_others(trio, launch, futures)
    arrays[0] = None
    gc.collect()
    assert all(root() is not None for root in roots)
    stop.go_on.set()
    assert_aborted(futures[2])
    arrays[0] = [np.zeros(100_000)]
    trio.must(
        body_allreduce, trio.launch(), [mine[0] if rank == 0 else np.zeros(100_000) for rank, mine in enumerate(arrays)]
    )
    gc.collect()
    assert all(root() is None for root in roots)
