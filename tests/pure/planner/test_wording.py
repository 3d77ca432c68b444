"""Quantities and ranks in words, and which tensors an explanation takes as packed."""

from __future__ import annotations

import random

import ml_dtypes  # noqa: F401 - numpy knows bfloat16 by it
import numpy as np
import pytest

from raycollect.core.model import OpKind, ReduceOp
from raycollect.planner import Request, plan
from raycollect.planner.sizes import Sizes
from raycollect.planner.wording import counted, nbytes_words, ranks_words, seconds_words
from tests.pure.planner.explained import allreduce, info, membership, told


def test_large_tensors_of_one_machine_are_told_to_run_together():
    there = membership([0] * 2, backend="shm")
    requests = [allreduce(there, tag) for tag in "abcd"]
    found = told(requests, there, {"a": info(10), "b": info(1 << 20), "c": info(10_000), "d": info(20)})
    assert {(row.packed, row.together) for row in found.rows} == {((2, 4, 1), 2)}
    assert "2 of 4 tensors with one meeting of the ranks" in found.explain()


WORDS = {
    nbytes_words: {0: "0 B", 1023: "1023 B", 1024: "1 KiB", 1536: "1.5 KiB", 1048572: "1 MiB", 3 << 40: "3 TiB"},
    seconds_words: {0: "0 us", 1.5e-7: "0.15 us", 3.1e-3: "3.1 ms", 0.99999e-3: "1 ms", 12e-6: "12 us", 75.0: "75 s"},
    ranks_words: {(): "", (3,): "3", (0, 1): "0-1", (0, 1, 2, 5, 7, 8): "0-2, 5, 7-8"},
    lambda one: counted(*one): {
        (1, "box"): "1 box",
        (2, "box"): "2 boxes",
        (0, "process"): "0 processes",
        (3, "call"): "3 calls",
    },
}


@pytest.mark.parametrize(("tell", "cases"), WORDS.items())
def test_quantities_and_ranks_in_words(tell, cases):
    assert {value: tell(value) for value in cases} == cases


def test_kernels_that_are_not_packed_cost_their_start():
    there = membership([0] * 2)
    requests = [allreduce(there, tag) for tag in range(10)]
    held = {tag: info(10) for tag in range(10)}
    packed, loose = told(requests, there, held), told(requests, there, held, staging=0)
    assert loose.time_s > 5 * packed.time_s


PIECED = (OpKind.ALLGATHER, OpKind.GATHER, OpKind.SCATTER, OpKind.REDUCESCATTER, OpKind.ALLTOALL)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kind", [OpKind.ALLREDUCE, *PIECED])
def test_the_staging_of_a_tensor_is_what_the_executor_counts(kind, seed):
    from raycollect.engine.fusion_buffer import Item, size_of

    rng = random.Random(seed)
    count = rng.randrange(2, 6)
    there = membership([0] * count)
    sizes = [rng.randrange(50) for _ in range(count)]  # of the piece of, or for, each rank
    in_pieces = kind in PIECED[2:]
    whole = tuple(info(size)[0] for size in sizes)
    held = {("x", rank): whole if in_pieces else info(sizes[rank] if kind in PIECED else 7) for rank in range(count)}
    rooted = kind in (OpKind.GATHER, OpKind.SCATTER)
    operands = tuple((r, None if kind is OpKind.SCATTER and r else ("x", r), None) for r in range(count))
    op = ReduceOp.SUM if kind in (OpKind.ALLREDUCE, OpKind.REDUCESCATTER) else None
    request = Request(kind=kind, group=there.spec, operands=operands, op=op, root=0 if rooted else -1)
    array = np.empty(7, np.float32)
    expected = size_of(kind, Item((array,), (array,), max(sizes)) if kind in PIECED else Item(array, array), count)
    assert Sizes(plan([request], [there]), held).staged(0) == [("float32", expected)]
