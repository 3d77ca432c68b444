"""Tensors that are given other memory while a method or a plan uses them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from raycollect.core.model import OpKind
from raycollect.planner.layout import layout
from tests.pure.dtensors import FakeDTensor, FakeMesh, Shard
from tests.pure.engine.convoys import convoy_of
from tests.pure.engine.step_programs import MakeTeam, team
from tests.pure.fleet import WAIT_S, HoldAt, MakeFleet
from tests.pure.resharding import bound, request_of
from tests.pure.teams import Script, pinned
from tests.support.values import replace

__all__ = ["team"]  # fixtures

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


LAYOUT = {"": layout([3], mesh={"dp": 1}, spec=("dp",), dtype="float32")}
RESHARD = bound(LAYOUT, LAYOUT, (0,), (1,))


def _dtensor() -> FakeDTensor:
    return FakeDTensor(np.zeros(3, "float32"), (3,), FakeMesh(np.arange(1), (0,)), (Shard(0),))


def _swap(dtensor: FakeDTensor, value: float) -> None:
    # As `to_empty`, `to` and `cpu` of a module do.
    dtensor._local_tensor = np.full(3, value, "float32")


def test_a_reshard_uses_the_local_tensors_that_dtensors_have_now() -> None:
    src, dst = _dtensor(), _dtensor()
    with convoy_of(2) as convoy:
        (membership,) = convoy.memberships
        given, taken = convoy.keep(0, src), convoy.keep(1, dst)
        operands = ((0, given, None), (1, None, taken))
        request = replace(request_of(RESHARD, membership.spec, timeout_s=WAIT_S), operands=operands)
        for value in (1.0, 2.0, 3.0):
            _swap(src, value)
            _swap(dst, -1.0)
            outcomes = convoy.run([request], [membership])
            assert [outcome.error for outcome in outcomes.values()] == [None, None]
            np.testing.assert_array_equal(dst.to_local(), np.full(3, value))


def test_a_step_uses_the_local_tensors_that_returned_dtensors_have_now(team: MakeTeam) -> None:
    src, dst = _dtensor(), _dtensor()
    scripts = [Script(0), Script(1, [pinned(dst)])]
    slot = scripts[0].call("make")
    one = team(2, scripts)
    one.actors[0].methods = {"make": lambda: src}
    one.collective(OpKind.ALLTOALL, {0: slot}, {1: 0}, reshard=RESHARD)
    for value in (1.0, 2.0, 3.0, 4.0):
        _swap(src, value)
        _swap(dst, -1.0)
        for factor in (1, 2):  # the second run has the same tensors
            src._local_tensor *= factor
            one.run()
            np.testing.assert_array_equal(dst.to_local(), np.full(3, value * factor))
