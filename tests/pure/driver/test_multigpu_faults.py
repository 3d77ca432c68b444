"""Collectives of lists with a tensor of each GPU that fail midway: lists are as they were, or dirty."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from raycollect.backends import across
from raycollect.core.model import OpKind, ReduceOp
from raycollect.errors import (
    CollectiveTimeoutError,
    FaultError,
    KernelError,
    TensorDirtyError,
)
from raycollect.planner import (
    GpuLists,
    Request,
)
from tests.pure.driver.multigpu_calls import (
    GPUS,
    LISTS,
    Gpus,
    asked,
    convoy,
    every_seed,
    everyone,
    gpus,
    refused,
    values,
)
from tests.pure.fleet import Convoy, FailAt
from tests.pure.mixed import WORLD, host, same

__all__ = ["convoy", "gpus"]  # fixtures


def kept(convoy: Convoy, kind: OpKind, lists: Sequence[Any], **more: Any) -> Request:
    """A request of lists that the participants hold; rank 1 is the root, if there is one."""
    keys = [convoy.keep(rank, row) for rank, row in enumerate(lists)]
    found = asked(convoy.memberships[0], kind, keys, root=-1 if kind is OpKind.ALLREDUCE else 1, **more)
    if kind is not OpKind.BROADCAST:
        return replace(found, op=ReduceOp.SUM)
    operands = tuple((rank, key, None) if rank == 1 else (rank, None, key) for rank, key in enumerate(keys))
    return replace(found, operands=operands)


@pytest.mark.parametrize("kind", [OpKind.ALLREDUCE, OpKind.BROADCAST, OpKind.REDUCE])
@pytest.mark.parametrize("point", ["after_check", "before_kernel"])
def test_failure_before_the_write_leaves_the_lists_unchanged(
    gpus: Gpus, convoy: Convoy, kind: OpKind, point: str
) -> None:
    lists = gpus.lists([2, 0])
    before = [host(row) for row in lists]
    convoy.faults = fault = FailAt(point=point, rank=2)
    outcomes = convoy.run([kept(convoy, kind, lists)], convoy.memberships)
    assert fault.consumed == 1
    assert isinstance(outcomes[2].error, KernelError)
    assert all(outcome.error is not None for outcome in outcomes.values())
    same(lists, before)
    assert [store.statistics().dirty for store in convoy.stores] == [0] * WORLD


@every_seed
@pytest.mark.parametrize("kind", [OpKind.ALLREDUCE, OpKind.REDUCE])
def test_all_ranks_have_their_results_or_keep_what_they_had(gpus: Gpus, convoy: Convoy, kind: OpKind) -> None:
    lists = gpus.lists([2, 0])
    expected = [host(row) for row in lists]
    total = everyone(2).sum(axis=0)
    request = kept(convoy, kind, lists, snapshot=True)
    for outcome in convoy.run([request], convoy.memberships).values():
        assert outcome.error is None, outcome.error
    if kind is OpKind.ALLREDUCE:
        expected = [[total] * 2] * WORLD
    else:
        expected[1][0] = total
    same(lists, expected)
    convoy.faults = fault = FailAt(point="before_commit", rank=2)
    outcomes = convoy.run([request], convoy.memberships)
    assert fault.consumed == 1
    assert all(outcome.error is not None for outcome in outcomes.values())
    same(lists, expected)
    assert [store.statistics().dirty for store in convoy.stores] == [0] * WORLD


def test_a_gpu_that_does_not_get_there_ends_the_call_in_time(gpus: Gpus) -> None:
    """What rank 1 gives is never written: it hears of its deadline before it enters a kernel, and keeps its list."""
    fake, cuda = gpus.fake, gpus.cupy.cuda
    lists = gpus.lists([0, 1])
    late = gpus.lists([2, 3])[1]
    before = [host(lists[0]), host(late), host(lists[2])]
    with cuda.Device(3):
        fake.hold(cuda.Stream.null)
        late[1] += 0
    outcomes = gpus.run(OpKind.ALLREDUCE, [lists[0], late, lists[2]], timeout_s=1.0)
    errors = [outcome.error for outcome in outcomes]
    assert all(isinstance(one, FaultError) for one in errors), errors
    assert isinstance(errors[1], CollectiveTimeoutError)
    assert "a device has not finished" in str(errors[1])
    with cuda.Device(3):
        fake.release(cuda.Stream.null)
    same([lists[0], late, lists[2]], before)
    assert gpus.fleet.dirty == [0] * WORLD


def test_failure_during_the_write_leaves_lists_dirty(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the tensors that the call writes, on the rank that fails."""
    spread = across.spread

    def broken(sources: Any, targets: Any) -> None:
        if targets[0].device == "cuda:3":
            raise RuntimeError("no way to GPU 3")
        spread(sources, targets)

    lists = [*gpus.lists([0, 1])[:2], gpus.lists([3, 1])[2]]
    keys = gpus.fleet.keep_all(lists)
    with monkeypatch.context() as changed:
        changed.setattr(across, "spread", broken)
        outcomes = gpus.fleet.run(OpKind.BROADCAST, keys, root=0, lists=GpuLists(src_tensor=1))
    assert [type(outcome.error) for outcome in outcomes] == [type(None), type(None), KernelError]
    assert "no way to GPU 3" in str(outcomes[2].error)
    assert gpus.fleet.dirty == [0, 0, 2]
    assert "half-written" in refused(gpus.fleet.run(OpKind.ALLREDUCE, keys, lists=LISTS), TensorDirtyError)
    gpus.fleet.must(OpKind.BROADCAST, keys, root=0, lists=GpuLists(src_tensor=1))  # writes them whole
    assert gpus.fleet.dirty == [0, 0, 0]
    same(lists, [[values(0, 1, (5,))] * 2] * WORLD)


@pytest.mark.parametrize("name", ["fold", "spread"])
def test_an_error_keeps_no_memory(gpus: Gpus, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Neither the stand-ins nor the lists, by the frames of what has caused it."""

    def broken(*_: Any) -> None:
        raise RuntimeError("no way")

    keys = gpus.fleet.keep_all(gpus.lists([2, 0], (1000,)))
    gpus.fleet.must(OpKind.ALLREDUCE, keys, lists=LISTS)
    before = [gpus.fake.allocated(device) for device in range(GPUS)]
    with monkeypatch.context() as changed:
        changed.setattr(across, name, broken)
        outcomes = gpus.fleet.run(OpKind.ALLREDUCE, keys, lists=LISTS)
    gc.collect()
    gpus.fake.drain()
    assert [type(outcome.error) for outcome in outcomes] == [KernelError] * WORLD
    assert [str(outcome.error.__cause__) for outcome in outcomes if outcome.error] == ["no way"] * WORLD
    assert [gpus.fake.allocated(device) for device in range(GPUS)] == before


@every_seed
def test_a_gpu_that_runs_full_midway_leaves_no_copy_behind(gpus: Gpus) -> None:
    """Tensors with gaps need memory as they are brought; what is under way then ends before its target is freed."""
    fake, size = gpus.fake, 1 << 10
    lists = [
        [[gpus.put(np.ones(size, "f4"), one, gaps=True) for _ in range(2 * WORLD)] for one in (rank, 3)]
        for rank in range(WORLD)
    ]
    room = [[gpus.put(np.zeros(size, "f4"), one) for one in (rank, 3)] for rank in range(WORLD)]
    fake.limit(fake.allocated(3) + size * 4 * 3 // 2, 3)
    with gpus.cupy.cuda.Device(3):
        fake.hold(gpus.cupy.cuda.Stream.null)
    outcomes = gpus.run(OpKind.REDUCESCATTER, lists, room, op=ReduceOp.SUM)
    gc.collect()
    fake.limit(1 << 40, 3)
    with gpus.cupy.cuda.Device(3):
        fake.release(gpus.cupy.cuda.Stream.null)
    assert all(outcome.error is not None for outcome in outcomes)
    same(lists, [[[np.ones(size)] * 2 * WORLD] * 2] * WORLD)


def test_only_the_tensor_that_is_named_becomes_half_written(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(sources: Any, targets: Any) -> None:
        raise RuntimeError("no way")

    lists = gpus.lists([0, 1])
    keys = gpus.fleet.keep_all(lists)
    with monkeypatch.context() as changed:
        changed.setattr(across, "spread", broken)
        outcomes = gpus.fleet.run(OpKind.REDUCE, keys, root=1, lists=GpuLists(dst_tensor=1))
    assert isinstance(outcomes[1].error, KernelError)
    assert gpus.fleet.dirty == [0, 1, 0]
    gpus.fleet.must(OpKind.SEND, keys, root=1, peer=2, lists=GpuLists(src_tensor=0, dst_tensor=0))  # the other one
    refused(
        gpus.fleet.run(OpKind.SEND, keys, root=1, peer=2, lists=GpuLists(src_tensor=1, dst_tensor=0)), TensorDirtyError
    )
