"""The executor before and in the check: what is refused, on all ranks and touching nothing, and what is waited for."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from raycollect.backends import arrays
from raycollect.core.model import Kernel, Key, Launch, OpKind
from raycollect.errors import (
    AllocationError,
    PlanAbortedError,
)
from raycollect.pos import Container
from tests.pure.fleet import WAIT_S, MakeFleet, numbers
from tests.pure.local_world import LocalCommunicator

# ---------------------------------------------------------------------------------------------- refused


def test_an_output_that_cannot_be_made_is_refused_on_all(fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(info: Any) -> Any:
        raise MemoryError("no memory for these tests")

    one = fleet(2)
    values = numbers(0, 2)
    keys = one.keep_all(values)
    with monkeypatch.context() as patch:
        patch.setattr(one, "allocate", no_memory)
        for outcome in one.run(OpKind.ALLREDUCE, keys, inplace=False):
            assert type(outcome.error) is AllocationError
            assert ": output is too large for the memory that is left (" in str(outcome.error)
            assert "40 bytes" in str(outcome.error)
        for outcome in one.run(OpKind.SEND, {0: keys[0], 1: None}, root=0, peer=1):
            assert type(outcome.error) is AllocationError
            assert {v.rank for v in outcome.error.violations} == {1}, "only the destination had to make one"
    one.works_on()


class Offered(LocalCommunicator):
    """Notes the kernels that it may prepare before the agreement."""

    kernels: Sequence[Kernel | None] = ()

    def agree(self, launch: Launch, arrival: bytes, kernel: Kernel | None = None, *more: Any) -> Sequence[bytes]:
        self.kernels = [*self.kernels, kernel]
        return super().agree(launch, arrival, kernel, *more)


def test_a_backend_may_prepare_a_kernel_only_if_the_ranks_own_tensors_fit(fleet: MakeFleet) -> None:
    one = fleet(2)
    offered = Offered(one.communicators[0]._world, 0)  # type: ignore[attr-defined]
    one.communicators[0] = offered
    for size, dtype, fits in ((3, "float64", True), (4, "float64", False), (3, "float32", False)):
        gives = one.keep_all([np.ones(3) for _ in range(2)])
        takes = one.keep_all([[np.zeros(size, dtype) for _ in range(2)] for _ in range(2)])
        assert [outcome.error is None for outcome in one.run(OpKind.ALLGATHER, gives, takes)] == [fits] * 2
        assert (offered.kernels[-1] is not None) == fits


# ---------------------------------------------------------------------------------------------- waiting


def test_a_producer_that_comes_later_is_waited_for(fleet: MakeFleet) -> None:
    one = fleet(2)
    asked: list[Key] = []
    told = threading.Event()
    one.waiting[1] = lambda key: (asked.append(key), told.set())  # type: ignore[func-returns-value, assignment]
    late = one.new_key()
    futures = one.start(OpKind.ALLREDUCE, [one.keep(0, first := np.ones(3)), late])
    assert told.wait(WAIT_S)
    assert asked == [late]
    assert not futures[1].done()
    container = Container.of(second := np.full(3, 2.0), arrays.is_tensor)
    assert container is not None
    one.stores[1].put(late, container)
    assert [future.result(WAIT_S).error for future in futures] == [None, None]
    np.testing.assert_array_equal(first, np.full(3, 3.0))
    np.testing.assert_array_equal(second, np.full(3, 3.0))
    assert one.story(1) == ["waiting", "prepare", "check", "agreed", "done"]


def test_an_abort_ends_the_wait_for_a_producer(fleet: MakeFleet) -> None:
    one = fleet(2)
    told = threading.Event()
    one.waiting[1] = lambda key: told.set()
    value = np.ones(3)
    futures = one.start(OpKind.ALLREDUCE, [one.keep(0, value), one.new_key()])
    assert told.wait(WAIT_S)
    one.aborts[1][one.seq] = "cancelled by its caller"
    one.stores[1].wake()
    errors = [future.result(WAIT_S).error for future in futures]
    assert all(isinstance(error, PlanAbortedError) for error in errors)
    assert "cancelled by its caller" in str(errors[1])
    assert "rank 1 has left" in str(errors[0]), "the others do not wait for it"
    np.testing.assert_array_equal(value, np.ones(3))
    assert one.stores[0].statistics().dirty == 0
    one.works_on()
