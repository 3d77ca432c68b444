"""Collectives of lists with a tensor of each GPU: whole programs of the planner, on a fake of cupy, against numpy."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from raycollect.core.model import OpKind, ReduceOp
from raycollect.errors import (
    InvalidArgumentError,
)
from raycollect.planner import (
    GpuLists,
    Made,
)
from tests.pure.driver.multigpu_calls import LISTS, Gpus, asked, convoy, every_seed, everyone, gpus, refused, values
from tests.pure.fleet import Convoy
from tests.pure.mixed import WORLD, host, same
from tests.pure.teams import Team

__all__ = ["convoy", "gpus"]  # fixtures


LAYOUTS = {"home first": [0, 1, 2], "home last": [3, 1, 0], "home absent": [3], "two": [2, 3], "all": [1, 3, 0, 2]}


every_layout = pytest.mark.parametrize("devices", LAYOUTS.values(), ids=LAYOUTS.keys())


OPS: list[tuple[Any, str, ReduceOp, Callable[..., Any]]] = [
    ((5,), "float32", ReduceOp.SUM, np.sum),
    ((1001,), "float64", ReduceOp.SUM, np.sum),
    ((3, 1), "float32", ReduceOp.MAX, np.max),
    ((), "int64", ReduceOp.PRODUCT, np.prod),
    ((7,), "int16", ReduceOp.MIN, np.min),
    ((4,), "float64", ReduceOp.AVG, np.mean),
    ((0,), "float32", ReduceOp.SUM, np.sum),
    ((6,), "uint8", ReduceOp.BXOR, np.bitwise_xor.reduce),
]


@every_seed
@every_layout
def test_allreduce(gpus: Gpus, devices: list[int]) -> None:
    for shape, dtype, op, rule in OPS:
        lists = gpus.lists(devices, shape, dtype)
        assert gpus.must(OpKind.ALLREDUCE, lists, op=op) == [None] * WORLD
        expected = rule(everyone(len(devices), shape, dtype), axis=0)
        for one in itertools.chain(*lists):
            np.testing.assert_allclose(host(one), expected, rtol=1e-12)
    assert gpus.fleet.dirty == [0] * WORLD


def test_an_average_of_float16_does_not_leave_its_range(gpus: Gpus) -> None:
    """As NCCL's, which divides before it adds: the sum of a rank's GPUs would be infinite."""
    lists = [[gpus.put(np.full(7, 20000 + rank, "f2"), one) for one in (2, 0, 3, 1)] for rank in range(WORLD)]
    gpus.must(OpKind.ALLREDUCE, lists, op=ReduceOp.AVG)
    for one in itertools.chain(*lists):
        np.testing.assert_allclose(host(one), np.full(7, 20000), rtol=2e-3)


@pytest.mark.parametrize(("op", "rule"), [(ReduceOp.MIN, np.nanmin), (ReduceOp.MAX, np.nanmax)])
def test_a_nan_hides_no_number(gpus: Gpus, op: ReduceOp, rule: Callable[..., Any]) -> None:
    """NCCL gives the number; so must what comes before it, on whichever GPU the NaN is."""
    given = [[np.array([9, 1, 5], "f4"), np.array([2, 8, 5], "f4")] for _ in range(WORLD)]
    given[0] = [np.array([np.nan, 0, np.nan], "f4"), np.array([77, np.nan, -3], "f4")]
    lists = [[gpus.put(one, at) for at, one in enumerate(row)] for row in given]
    gpus.must(OpKind.ALLREDUCE, lists, op=op)
    same(lists, [[rule(np.stack([*itertools.chain(*given)]), axis=0)] * 2] * WORLD)


@every_seed
@every_layout
def test_allreduce_into_new_lists(gpus: Gpus, devices: list[int]) -> None:
    lists = gpus.lists(devices, (2, 9))
    before = [host(row) for row in lists]
    made = gpus.must(OpKind.ALLREDUCE, lists, inplace=False)
    total = everyone(len(devices), (2, 9)).sum(axis=0)
    same(lists, before)
    same(made, [[total] * len(devices)] * WORLD)
    assert [[one.device.id for one in row] for row in made] == [devices] * WORLD


@every_seed
@every_layout
def test_reduce(gpus: Gpus, devices: list[int]) -> None:
    for root, chosen in [(0, len(devices) - 1), (2, 0)]:
        lists = gpus.lists(devices, (13,), gaps=True)
        expected = [host(row) for row in lists]
        expected[root][chosen] = everyone(len(devices), (13,)).sum(axis=0)
        gpus.must(OpKind.REDUCE, lists, root=root, lists=GpuLists(dst_tensor=chosen))
        same(lists, expected)


@every_seed
@every_layout
def test_broadcast(gpus: Gpus, devices: list[int]) -> None:
    for root, chosen in itertools.product((0, 2), range(len(devices))):
        lists = gpus.lists(devices, (2, 7), gaps=root == 2)
        gpus.must(OpKind.BROADCAST, lists, root=root, lists=GpuLists(src_tensor=chosen))
        same(lists, [[values(root, chosen, (2, 7))] * len(devices)] * WORLD)


@every_seed
@every_layout
@pytest.mark.parametrize("is_made", [False, True], ids=["given", "made"])
def test_allgather(gpus: Gpus, devices: list[int], is_made: bool) -> None:
    given = gpus.lists(devices, (3, 5), gaps=True)
    count = WORLD * len(devices)
    room = [[[gpus.put(np.zeros((3, 5), "f4"), one) for _ in range(count)] for one in devices] for _ in given]
    made = gpus.must(OpKind.ALLGATHER, given, None if is_made else room)
    whole = list(everyone(len(devices), (3, 5)))
    for row in made if is_made else room:
        same(row, [whole] * len(devices))
        assert [{one.device.id for one in tensors} for tensors in row] == [{one} for one in devices]
    same(given, [whole[at : at + len(devices)] for at in range(0, count, len(devices))])


@every_seed
@every_layout
@pytest.mark.parametrize("is_made", [False, True], ids=["given", "made"])
def test_reducescatter(gpus: Gpus, devices: list[int], is_made: bool) -> None:
    count = len(devices)
    items = [
        [[values(r, g, (11,)) * (p + 1) for p in range(WORLD * count)] for g in range(count)] for r in range(WORLD)
    ]
    rules: list[tuple[ReduceOp, Callable[..., Any]]] = [(ReduceOp.SUM, np.sum), (ReduceOp.AVG, np.mean)]
    for op, rule in rules:
        given = [[gpus.put(one, d) for one, d in zip(rows, devices, strict=True)] for rows in items]
        room = [[gpus.put(np.zeros(11, "f4"), one) for one in devices] for _ in range(WORLD)]
        made = gpus.must(OpKind.REDUCESCATTER, given, None if is_made else room, op=op)
        expected = rule(everyone(count, (11,)), axis=0)
        for rank, row in enumerate(made if is_made else room):
            for at, one in enumerate(row):
                np.testing.assert_allclose(host(one), expected * (rank * count + at + 1), rtol=1e-6)
                assert one.device.id == devices[at]
        same(given, items)


@every_seed
@pytest.mark.parametrize(("source", "target"), [(0, 0), (0, 3), (3, 1), (1, 2)])
def test_send_goes_from_one_gpu_to_another(gpus: Gpus, source: int, target: int) -> None:
    devices = [1, 3, 0, 2]
    lists = gpus.lists(devices, (9,))
    expected = [host(row) for row in lists]
    expected[0][devices.index(target)] = values(2, devices.index(source), (9,))
    gpus.must(OpKind.SEND, lists, root=2, peer=0, lists=GpuLists(src_tensor=source, dst_tensor=target))
    same(lists, expected)


def test_a_send_takes_single_tensors_as_well(gpus: Gpus) -> None:
    tensors = [gpus.put(values(rank, 0, (9,)), 3 - rank) for rank in range(WORLD)]
    gpus.must(OpKind.SEND, tensors, root=0, peer=2, lists=GpuLists(src_tensor=3, dst_tensor=1))
    same(tensors[2], values(0, 0, (9,)))
    where = GpuLists(src_tensor=3, dst_tensor=2)
    assert "of which there is a tensor: 1" in refused(
        gpus.run(OpKind.SEND, tensors, root=0, peer=2, lists=where), InvalidArgumentError
    )


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, "bool", "complex64", "float16"])
def test_other_types_can_be_moved(gpus: Gpus, dtype: Any) -> None:
    lists = gpus.lists([2, 0], (6,), dtype)
    gpus.must(OpKind.BROADCAST, lists, root=1, lists=GpuLists(src_tensor=1))
    same(lists, [[values(1, 1, (6,), dtype)] * 2] * WORLD)


@every_seed
def test_a_program_runs_again_and_again_on_the_same_lists(gpus: Gpus) -> None:
    lists = gpus.lists([2, 0], (6,))
    keys = gpus.fleet.keep_all(lists)
    expected = everyone(2, (6,)).sum(axis=0)
    for _ in range(4):
        gpus.fleet.must(OpKind.ALLREDUCE, keys, lists=LISTS)
        same(lists, [[expected] * 2] * WORLD)
        expected = expected * 2 * WORLD


@every_seed
def test_a_batch_of_lists_and_of_plain_tensors(gpus: Gpus, convoy: Convoy) -> None:
    (there,) = convoy.memberships
    first, second = gpus.lists([2, 0, 3], (5,)), gpus.lists([1, 0, 2], (5,))
    plain = [gpus.put(np.arange(4.0) + rank, rank) for rank in range(WORLD)]
    keys = [[convoy.keep(rank, side[rank]) for rank in range(WORLD)] for side in (first, second, plain)]
    requests = [
        asked(there, OpKind.ALLREDUCE, keys[0], op=ReduceOp.SUM),
        asked(there, OpKind.ALLREDUCE, keys[2], op=ReduceOp.MAX, lists=None),
        asked(there, OpKind.ALLREDUCE, keys[1], op=ReduceOp.SUM),
        asked(there, OpKind.ALLGATHER, keys[0]),  # of what the first one gives
        asked(there, OpKind.REDUCESCATTER, [Made(3)] * WORLD, op=ReduceOp.SUM),
    ]
    outcomes = convoy.run(requests, [there] * len(requests))
    for outcome in outcomes.values():
        assert outcome.error is None, outcome.error
    total = everyone(3).sum(axis=0)
    same(first, [[total] * 3] * WORLD)
    same(second, [[total] * 3] * WORLD)
    same(plain, [np.arange(4.0) + WORLD - 1] * WORLD)
    for outcome in outcomes.values():
        gathered, scattered = (one.value for one in outcome.outputs)
        same(gathered, [[total] * 9] * 3)
        same(scattered, [total * 9] * 3)


@every_seed
def test_a_captured_step_of_lists(gpus: Gpus) -> None:
    """The lists are the methods' own, written anew in each run; what is gathered of them is made in each."""
    devices = [3, 0]
    step = Team(WORLD)
    step.close()
    step.communicators = gpus.fleet.communicators  # type: ignore[assignment]
    step.spec = replace(step.spec, backend="nccl", memory="cuda")
    step._threads = gpus.fleet._threads
    seen: list[Any] = []
    for rank, script in enumerate(step.scripts):
        step.actors[rank].methods = {
            "make": lambda factor, rank=rank: [
                gpus.put(values(rank, at, (5,)) * np.float32(factor), one) for at, one in enumerate(devices)
            ],
            "take": lambda lists: seen.append(host(lists)),
        }
        script.argument()
    made = {rank: script.call("make", script.arguments[0]) for rank, script in enumerate(step.scripts)}
    step.collective(OpKind.ALLREDUCE, made, lists=LISTS)
    gathered = step.collective(OpKind.ALLGATHER, made, lists=LISTS)
    for script, slots in zip(step.scripts, gathered, strict=True):
        script.call("take", slots[0])
    for factor in (1.0, 2.0, 3.0, 4.0):
        step.run(factor)
        total = everyone(2).sum(axis=0) * np.float32(factor)
        same(seen, [[[total] * 2 * WORLD] * 2] * WORLD)
        seen.clear()
