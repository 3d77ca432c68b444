"""Fusion: what is put together, and that packed kernels leave the same bits as those of the tensors by themselves."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raycollect.backends import arrays
from raycollect.core.model import OpKind, ReduceOp, TensorInfo
from raycollect.core.operations import PARTIAL_FOLDS, PIECEWISE
from raycollect.core.protocols import SMALL_KERNEL_NBYTES
from raycollect.engine.fusion_buffer import FusedKernel, FusionBuffer, FusionPool, Item, room
from raycollect.planner import Request, plan
from raycollect.planner.fusion import PACKED_UP_TO_NBYTES, buckets, coalesced
from raycollect.pos import tensors
from tests.pure.conformance import listed
from tests.pure.engine.convoys import convoy_of
from tests.pure.fleet import WAIT_S, Convoy
from tests.pure.meaning import KINDS, REDUCTIONS, ROOTED, gives_of, takers

DTYPES = ("int8", "float16", "float32", "float64", "complex64", "bfloat16", ">f4")
LAYOUTS: tuple[Callable[[Any], Any], ...] = (
    lambda array: array,
    lambda array: _into(np.zeros(2 * array.size, array.dtype)[::2], array),
    lambda array: _into(np.zeros_like(array)[::-1], array),
    lambda array: array.reshape(1, -1, 1),
)


def _into(target: Any, array: Any) -> Any:
    target[...] = array
    return target


# ---------------------------------------------------------------------------------------------- what is put together


def test_several_large_tensors_are_launched_together_or_none() -> None:
    large = SMALL_KERNEL_NBYTES
    sizes = [1, large, large - 1, 10 * large, -1]
    for kind in OpKind:
        is_one = kind not in PIECEWISE and kind not in PARTIAL_FOLDS
        assert coalesced(kind, sizes, coalesces=True) == ([[1, 3]] if is_one else [])
        many = [1000] * 2000
        assert coalesced(kind, [*many, large], coalesces=True) == ([list(range(2000))] if is_one else [])
        assert coalesced(kind, [*sizes, *many], coalesces=True) == ([[1, 3], [0, 2, *range(5, 2005)]] if is_one else [])
    assert coalesced(OpKind.ALLREDUCE, sizes, coalesces=False) == []
    assert coalesced(OpKind.ALLREDUCE, [1, large, large - 1, -1], coalesces=True) == []
    assert coalesced(OpKind.ALLREDUCE, [], coalesces=True) == []


@given(
    sizes=st.lists(
        st.tuples(st.sampled_from("abc"), st.sampled_from([-1, 0, 1, 30, 64, 100, PACKED_UP_TO_NBYTES + 1])),
        max_size=40,
    ),
    staging=st.sampled_from([0, 1, 64, 150, 32 << 20]),
)
def test_buckets_hold_each_tensor_once_of_one_dtype_and_within_the_staging(
    sizes: list[tuple[str, int]], staging: int
) -> None:
    found = buckets(sizes, staging)
    assert sorted(at for bucket in found for at in bucket) == list(range(len(sizes)))
    assert all(one[0] < other[0] for one, other in pairwise(found)), "by their first tensors"
    for bucket in found:
        assert bucket == sorted(bucket)
        if len(bucket) > 1:
            assert len({sizes[at][0] for at in bucket}) == 1
            assert all(0 <= sizes[at][1] <= PACKED_UP_TO_NBYTES for at in bucket)
            assert sum(sizes[at][1] for at in bucket) <= staging
    if not staging:
        assert all(len(bucket) == 1 for bucket in found)


def test_as_much_is_put_together_as_the_staging_holds() -> None:
    assert buckets([("a", 40), ("b", 40), ("a", 60), ("a", 10), ("b", 60)], 100) == [[0, 2], [1, 4], [3]]


@pytest.mark.parametrize("kind", [kind for kind in OpKind if kind is not OpKind.BARRIER])
@pytest.mark.parametrize("empty_at", [0, 1])
def test_tensors_without_elements_take_no_place_among_the_others(kind: OpKind, empty_at: int) -> None:
    """An array without elements may say that it lies anywhere: numpy's empty slices are where their base begins."""
    world = 3
    for me in range(world):
        item = _item(kind, np.full((world, world), 2), me)
        empty = _item(kind, np.zeros((world, world), int), me)
        for number, array in enumerate(listed(item.src)):
            array[:] = [number + 1, -1]
        loaded = []
        for items in ([item], [item] * empty_at + [empty] + [item] * (1 - empty_at)):
            nbytes = sum(room(kind, one) for one in items)
            packed = FusedKernel(kind, None, 0, items=items, me=me, block=FusionBuffer(np.zeros(nbytes, np.uint8)))
            packed.load()
            loaded.append([row.tobytes() for row in listed(packed.kernel.src)])
        assert loaded[0] == loaded[1] == [array.tobytes() for array in listed(item.src)]


def _item(kind: OpKind, sizes: Any, me: int) -> Item:
    """Arrays of a rank where `sizes[giver][taker]` elements go; rank 0 is the root."""
    most, row, column = int(sizes.max()), sizes[me], sizes[:, me]
    each = [np.zeros(n) for n in row], [np.zeros(n) for n in column]
    if kind in (OpKind.ALLGATHER, OpKind.GATHER):
        src = np.zeros(sizes[me][0])
        dst = tuple(np.zeros(n) for n in sizes[:, 0]) if kind is OpKind.ALLGATHER or me == 0 else None
        return Item(src, dst, most)
    if kind in (OpKind.SCATTER, OpKind.REDUCESCATTER):
        src = tuple(np.zeros(n) for n in sizes[0]) if kind is OpKind.REDUCESCATTER or me == 0 else None
        return Item(src, np.zeros(sizes[0][me]), most)
    if kind is OpKind.ALLTOALL:
        return Item(tuple(each[0]), tuple(each[1]), most)
    array = np.zeros(sizes[0][0])
    reads = kind is not OpKind.RECV and (kind is not OpKind.BROADCAST or me == 0)
    writes = kind is not OpKind.SEND and (kind is not OpKind.REDUCE or me == 0) and (kind is not OpKind.BROADCAST or me)
    return Item(array if reads else None, array if writes else None)


# ---------------------------------------------------------------------------------------------- the same bits


def _scene(kind: OpKind, world: int, seed: int) -> list[tuple[list[Any], dict[int, Any]]]:
    """What each of some calls gives, by rank, and takes into; several dtypes and layouts, uneven sizes."""
    rng = np.random.default_rng(seed)
    calls = []
    for call in range(7):
        dtype = DTYPES[rng.integers(len(DTYPES)) if call % 2 else seed % len(DTYPES)]
        lay = LAYOUTS[rng.integers(len(LAYOUTS))]
        real = np.dtype(getattr(ml_dtypes, dtype, dtype))

        def make(size: int, real: Any = real, lay: Any = lay) -> Any:
            return lay((rng.standard_normal(size) * 3).astype(real))

        base, scale = int(rng.integers(0, 40)), 1 if seed < 2 else 300  # some of the large ones are not packed

        def size(giver: int, taker: int, base: int = base, scale: int = scale) -> int:
            return scale * ((base + 3 * giver + 5 * taker) % 41)

        gives = gives_of(kind, world, make, size, 0)
        takes = {}
        if kind in (OpKind.BROADCAST, OpKind.SEND):
            takes = {rank: np.zeros_like(gives[0]) for rank in takers(kind, world, 0, 1)}
        calls.append((gives, takes))
    return calls


def _run(
    convoy: Convoy, kind: OpKind, calls: Sequence[tuple[list[Any], dict[int, Any]]], staging: int, inplace: bool
) -> list[bytes]:
    """Runs a batch; gives the bytes of all operands and outputs."""
    root = 0 if kind in ROOTED or kind is OpKind.SEND else -1
    requests = []
    for gives, takes in calls:
        ranks = (0, 1) if kind is OpKind.SEND else range(len(gives))
        requests.append(
            Request(
                kind=kind,
                group=convoy.memberships[0].spec,
                operands=tuple(
                    (
                        rank,
                        None if gives[rank] is None else convoy.keep(rank, gives[rank]),
                        convoy.keep(rank, takes[rank]) if rank in takes else None,
                    )
                    for rank in ranks
                ),
                op=ReduceOp.SUM if kind in REDUCTIONS else None,
                root=root,
                peer=1 if kind is OpKind.SEND else -1,
                inplace=inplace,
                timeout_s=WAIT_S,
            )
        )
    planned = plan(requests, convoy.memberships * len(calls), staging=staging)
    found = []
    for _ in range(2):  # the second one as remembered, where nothing is made
        outcomes = {one: future.result(WAIT_S) for one, future in convoy.start(planned).items()}
        for _, outcome in sorted(outcomes.items()):
            assert outcome.error is None, outcome.error
            found += [tensor.tobytes() for made in outcome.outputs for tensor in made.tensors]
        for gives, takes in calls:
            for value in (*gives, *takes.values()):
                found += [
                    piece.tobytes() for piece in (value if isinstance(value, list) else [value]) if piece is not None
                ]
    return found


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind is not OpKind.BARRIER])
@pytest.mark.parametrize("backend", ["local", "shm", pytest.param("tcp", marks=pytest.mark.full)])
def test_packed_kernels_leave_the_bits_of_those_by_themselves(kind: OpKind, backend: str) -> None:
    with convoy_of(3, backend, tensors.allocate) as convoy:  # where kernels of shm work in place
        for seed in range(3):
            calls = _scene(kind, 3, seed)
            inplace = bool(seed % 2)
            alone = _run(convoy, kind, copy.deepcopy(calls), 0, inplace)
            for staging in (256, 32 << 20):
                assert _run(convoy, kind, copy.deepcopy(calls), staging, inplace) == alone


# ---------------------------------------------------------------------------------------------- staging memory


def test_a_block_is_used_by_one_at_a_time_and_lives_as_long_as_somebody_has_it() -> None:
    pool, sizes = FusionPool(), list[int]()

    def allocate(info: TensorInfo) -> Any:
        sizes.append(info.nbytes)
        return arrays.empty(info)

    first = pool.take(100, 32 << 20, allocate)
    second = pool.take(100, 32 << 20, allocate)
    assert first is not second
    first.give()
    assert pool.take(1000, 32 << 20, allocate) is first
    assert len(sizes) == 2
    first.give()
    del first, second
    gc.collect()
    assert pool.take(100, 32 << 20, allocate).memory.nbytes == sizes[-1]
    assert len(sizes) == 3


@pytest.mark.parametrize("nbytes", [1, 100, 65_537, 1 << 20, 3 << 20])
@pytest.mark.parametrize("limit", [1, 1000, 1 << 20, 32 << 20])
def test_a_block_is_at_least_what_is_needed_and_else_within_the_limit(nbytes: int, limit: int) -> None:
    block = FusionPool().take(nbytes, limit, arrays.empty)
    assert nbytes <= block.memory.nbytes <= max(nbytes, limit)
