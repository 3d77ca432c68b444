"""Tensors that are given other memory while a method or a plan uses them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from raycollect.core.model import OpKind
from tests.pure.fleet import WAIT_S, HoldAt, MakeFleet

torch = pytest.importorskip("torch")


def _other_storage(tensor: Any) -> Any:
    tensor.set_(torch.full((4,), 9.0))
    return tensor


def _other_data(tensor: Any) -> Any:
    tensor.data = torch.full((7,), 9.0)
    return tensor


CHANGES: dict[str, Callable[[Any], Any]] = {"set_": _other_storage, "data": _other_data}


@pytest.mark.parametrize("point", ["before_check", "after_check", "before_kernel"])
@pytest.mark.parametrize("name", CHANGES)
def test_a_tensor_that_is_given_other_memory_meanwhile_keeps_its_own(name: str, point: str, fleet: MakeFleet) -> None:
    """A thread of the actor gives it the memory. The collective writes what it has looked at, whoever has that now."""
    one = fleet(2)
    tensor = torch.ones(4)
    before = tensor.view(-1)  # of the same storage
    values = [np.full(4, 2.0, "float32"), tensor]
    keys = one.keep_all(values)
    one.must(OpKind.ALLREDUCE, keys)  # it is remembered
    for _ in range(2):
        one.faults = hold = HoldAt(point=point, rank=1)
        futures = one.start(OpKind.ALLREDUCE, keys)
        assert hold.came.wait(WAIT_S)
        changed = CHANGES[name](tensor)
        was = changed.clone()
        hold.go.set()
        for future in futures:
            assert future.result(WAIT_S).error is None
        assert torch.equal(changed, was)
        np.testing.assert_array_equal(before, values[0])
        tensor.data = before
    one.works_on()
