"""Staging: what a copy comes after, how long it is waited for, and what is left where something goes wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ml_dtypes  # noqa: F401 - numpy knows bfloat16 by it
import numpy as np
import pytest

from raycollect.backends import arrays, streams
from raycollect.core.model import OpKind, TensorInfo
from raycollect.engine import device_staging
from raycollect.engine.device_staging import transfer
from raycollect.engine.run import Outcome
from raycollect.errors import (
    AllocationError,
    CollectiveTimeoutError,
    KernelError,
    MismatchError,
    PlanAbortedError,
)
from tests.fake_cupy import Fake
from tests.pure.fleet import WAIT_S, FailAt, Fleet
from tests.pure.mixed import HOMES, PEER, ROOT, WORLD, Mixed, same, seeds
from tests.support.values import replace

# ---------------------------------------------------------------------------------------------- streams


@seeds
@pytest.mark.parametrize("where", ["the same GPU", "another GPU", "the host"])
def test_a_copy_in_another_thread_follows_what_its_caller_had_enqueued(where: str, fake: Fake) -> None:
    cupy = fake.cupy
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        source = cupy.zeros(300)[::2]
    with cupy.cuda.Device(1 if where == "another GPU" else 0):
        target = np.zeros((10, 15)) if where == "the host" else cupy.zeros((10, 15))
    fake.drain()
    for turn in range(6):
        with stream:
            source += 1
            told = streams.mark([arrays.describe(source)])

        def copy(told: streams.Mark | None = told, given: Any = source) -> None:
            with streams.after(told):
                transfer(arrays.memory(target), arrays.memory(given), lambda: None)

        with ThreadPoolExecutor(1) as thread:
            thread.submit(copy).result(WAIT_S)
        with cupy.cuda.Device(1 if where == "another GPU" else 0):
            same(target, np.full((10, 15), turn + 1.0))


def test_a_device_that_does_not_come_to_an_end_is_waited_for_until_the_limit_or_an_abort(
    fake: Fake, mixed: Callable[[str], Mixed]
) -> None:
    one = mixed("local")
    tensor = arrays.memory(one.put(np.ones(4), 0))
    fake.drain()
    stream = fake.cupy.cuda.Stream(non_blocking=True)
    fake.hold(stream)
    asked = []

    def check() -> None:
        asked.append(1)
        if len(asked) == 3:
            raise PlanAbortedError(detail="enough")

    with fake.cupy.cuda.Device(0), stream:
        tensor.tensor.fill(2)
        with pytest.raises(PlanAbortedError, match="enough"):
            transfer(np.zeros(4), tensor, check)
    values = [tensor.tensor, *(np.ones(4) for _ in range(WORLD - 1))]
    planned = one.fleet.plan(OpKind.ALLREDUCE, one.fleet.keep_all(values), timeout_s=0.2)
    futures = []
    for rank in range(WORLD):
        entered = (fake.cupy.cuda.Device(0), stream) if rank == 0 else ()
        futures.append(one.fleet._threads.submit(_run_in, entered, one.fleet, planned, rank))
    outcomes = [future.result(WAIT_S) for future in futures]
    assert type(outcomes[0].error) is CollectiveTimeoutError
    assert "waiting for a device" in str(outcomes[0].error)
    fake.release(stream)
    fake.drain()
    assert one.fleet.dirty[0] == 0
    same(tensor.tensor, np.full(4, 2.0))


def _run_in(entered: Sequence[Any], fleet: Fleet, planned: Any, rank: int) -> Outcome:
    for one in entered:
        one.__enter__()
    try:
        return fleet.run_one(planned, rank, 1)
    finally:
        for one in reversed(entered):
            one.__exit__(None, None, None)


# ---------------------------------------------------------------------------------------------- what goes wrong


@pytest.mark.parametrize("point", ["before_kernel", "after_kernel", "after_check", "before_check"])
@pytest.mark.parametrize("backend", ["local", "nccl"])
def test_a_failure_leaves_a_staged_tensor_as_it_was(backend: str, point: str, mixed: Callable[[str], Mixed]) -> None:
    one = mixed(backend)
    devices = [None if backend == "nccl" else 0, *HOMES[backend][1:]]
    tensors = [one.put(np.full(6, rank + 1.0), devices[rank]) for rank in range(WORLD)]
    one.fleet.faults = FailAt(point=point, rank=0)
    first, *others = one.fleet.start(OpKind.ALLREDUCE, one.fleet.keep_all(tensors))
    assert type(first.result(WAIT_S).error) is KernelError
    for communicator in one.fleet.communicators[1:]:  # as the controller does it when a rank has failed
        communicator.abort(one.fleet.seq)
    for other in others:
        other.result(WAIT_S)
    assert one.fleet.dirty[0] == 0
    same(tensors[0], np.full(6, 1.0))


def test_a_failure_of_the_copy_back_leaves_the_tensor_dirty(
    fake: Fake, mixed: Callable[[str], Mixed], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = mixed("local")
    tensors = [one.put(np.ones(6), 0 if rank == 0 else None) for rank in range(WORLD)]
    monkeypatch.setattr(device_staging, "_put", lambda *_: (_ for _ in ()).throw(RuntimeError("the bus is off")))
    outcomes = one.fleet.run(OpKind.ALLREDUCE, one.fleet.keep_all(tensors))
    assert type(outcomes[0].error) is KernelError
    assert "a copy from the host to cuda:0 failed: the bus is off" in str(outcomes[0].error)
    assert one.fleet.dirty == [1, 0, 0]


@pytest.mark.parametrize("kind", [OpKind.ALLREDUCE, OpKind.ALLGATHER])
def test_all_ranks_are_told_where_one_has_no_memory_for_stand_ins(
    kind: OpKind, fake: Fake, mixed: Callable[[str], Mixed]
) -> None:
    one = mixed("nccl")
    fake.limit(fake.allocated(0) + 1000, 0)
    tensors = [np.ones(4000), *(one.put(np.ones(4000), rank) for rank in range(1, WORLD))]
    outcomes = one.fleet.run(kind, one.fleet.keep_all(tensors))
    for outcome in outcomes:
        assert type(outcome.error) is AllocationError
        (violation,) = outcome.error.violations
        assert (violation.rank, violation.field) == (0, "staging")
    assert one.fleet.dirty == [0] * WORLD


def test_where_nobody_brings_tensors_anywhere_all_lie_on_devices_of_one_kind(mixed: Callable[[str], Mixed]) -> None:
    one = mixed("local")
    one.fleet.spec = replace(one.fleet.spec, memory="")
    tensors = [one.put(np.ones(3), 0 if rank == 1 else None) for rank in range(WORLD)]
    for outcome in one.fleet.run(OpKind.ALLREDUCE, one.fleet.keep_all(tensors)):
        assert type(outcome.error) is MismatchError
        assert [(v.rank, v.field, v.found) for v in outcome.error.violations] == [(1, "device", "cuda")]


def test_an_output_on_a_device_that_is_not_here_is_refused_on_all_ranks(mixed: Callable[[str], Mixed]) -> None:
    one = mixed("local")
    tried = []

    def allocate(info: TensorInfo) -> Any:
        if info.device != "cpu":
            tried.append(info.device)
            raise ImportError("No module named 'cupy'")
        return arrays.empty(info)

    one.fleet.allocate = allocate
    keys = {ROOT: one.fleet.keep(ROOT, one.put(np.ones(3), 1))}
    outcomes = one.fleet.run(OpKind.SEND, keys, {PEER: None}, root=ROOT, peer=PEER)
    assert tried == ["cuda:1"]
    for outcome in outcomes:
        assert type(outcome.error) is AllocationError
        assert "No module named 'cupy'" in str(outcome.error)
