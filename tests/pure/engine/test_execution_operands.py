"""The executor and what operands may be: nested structures, torch tensors; what a program remembers of them."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from raycollect.backends import arrays
from raycollect.core.model import OpKind, ReduceOp
from raycollect.core.protocols import NoFaults
from raycollect.errors import KernelError, NotATensorError, TensorDirtyError, UnsupportedError
from tests.pure.fleet import FailAt, Fleet, MakeFleet, numbers, refused_alike
from tests.support.values import replace

torch = pytest.importorskip("torch")


# ---------------------------------------------------------------------------------------------- torch


def test_numpy_and_torch_meet(fleet: MakeFleet) -> None:
    one = fleet(3)
    leaf = torch.full((2,), 2.0, requires_grad=True)
    values = [np.ones(2, "float32"), leaf, np.full(2, 4.0, "float32")]
    outcomes = one.must(OpKind.ALLREDUCE, one.keep_all(values), inplace=False)
    assert [type(outcome.outputs[0].value) for outcome in outcomes] == [np.ndarray, torch.Tensor, np.ndarray]
    assert outcomes[1].outputs[0].value.tolist() == [7.0, 7.0]
    narrow = [torch.ones(2, dtype=torch.bfloat16), np.full(2, 2, ml_dtypes.bfloat16), np.full(2, 4, ml_dtypes.bfloat16)]
    one.must(OpKind.ALLREDUCE, one.keep_all(narrow))
    assert narrow[0].tolist() == [7.0, 7.0]


def test_torch_knows_what_a_collective_has_written(fleet: MakeFleet) -> None:
    """Else a gradient would be computed from weights that are not those of the forward pass, and nobody would know."""
    one = fleet(2)
    weights = [torch.full((3,), float(rank), requires_grad=True) for rank in range(2)]
    keys = one.keep_all(weights)
    losses = [(weight * weight).sum() for weight in weights]
    one.must(OpKind.BROADCAST, keys, root=0)
    losses[0].backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        losses[1].backward()
    for _ in range(4):  # the later ones are done again as they were
        versions = [weight._version for weight in weights]
        one.must(OpKind.ALLREDUCE, keys)
        assert all(weight._version > version for weight, version in zip(weights, versions, strict=True))


def test_a_tensor_whose_storage_was_given_back_is_refused_naming_it(fleet: MakeFleet) -> None:
    one = fleet(2)
    value = torch.ones(4)
    keys = one.keep_all([value, np.ones(4, "f4")])
    gone = torch.ones(4)
    gone.untyped_storage().resize_(0)
    value.data = gone
    error = refused_alike(one.run(OpKind.ALLREDUCE, keys))
    assert isinstance(error, NotATensorError)
    assert [(v.rank, v.ref) for v in error.violations] == [(0, keys[0].hex())]
    one.works_on()


@pytest.mark.parametrize("kind", ["numpy", "torch", "view"])
def test_a_half_written_tensor_of_any_library_stays_dirty_while_it_lives(kind: str, fleet: MakeFleet) -> None:
    one = fleet(2)
    make: Callable[[], Any] = {
        "numpy": lambda: np.ones(3),
        "torch": lambda: torch.ones(3, dtype=torch.float64),
        "view": lambda: torch.ones(5, dtype=torch.float64)[1:4],
    }[kind]
    values = [make(), make()]
    keys = one.keep_all(values)
    one.faults = fault = FailAt(point="before_kernel", rank=1)
    outcomes = one.run(OpKind.ALLREDUCE, keys)
    one.faults = NoFaults()
    assert fault.consumed == 1
    assert isinstance(outcomes[1].error, KernelError)
    del outcomes
    gc.collect()
    assert one.dirty == [1, 1]
    error = refused_alike(one.run(OpKind.ALLREDUCE, keys))
    assert isinstance(error, TensorDirtyError)
    for rank in range(2):
        one.stores[rank].free([keys[rank]])
    del values, error
    gc.collect()
    assert one.dirty == [0, 0]


# ---------------------------------------------------------------------------------------------- what is at fault


def _dirty(one: Fleet, value: Any) -> None:
    one.stores[1].mark_dirty([arrays.byte_range(value)], [value])


def _frozen(one: Fleet, value: Any) -> None:
    value.flags.writeable = False


@pytest.mark.parametrize(
    ("kind", "spoil", "side"),
    [
        (OpKind.REDUCESCATTER, _dirty, 0),
        (OpKind.REDUCESCATTER, _frozen, 1),
        (OpKind.SCATTER, _frozen, 1),
        (OpKind.SCATTER, _dirty, 0),
    ],
)
def test_a_violation_names_the_ref_that_is_at_fault(kind: OpKind, spoil: Any, side: int, fleet: MakeFleet) -> None:
    one = fleet(2)
    sides = [np.ones((2, 3)), np.zeros(3)]
    keys = {rank: [one.keep(rank, value.copy()) for value in sides] for rank in (0,)}
    keys[1] = [one.keep(1, value) for value in sides]
    spoil(one, sides[side])
    gives = {rank: keys[rank][0] for rank in ((1,) if kind is OpKind.SCATTER else (0, 1))}
    root = {"root": 1} if kind is OpKind.SCATTER else {}
    error = refused_alike(one.run(kind, gives, {rank: keys[rank][1] for rank in range(2)}, **root))
    assert [(v.rank, v.ref) for v in error.violations] == [(1, keys[1][side].hex())]
    one.works_on()


def test_a_missing_output_is_named_by_its_own_ref(fleet: MakeFleet) -> None:
    one = fleet(2)
    takes = [one.keep(0, [np.zeros(2), np.zeros(2)]), one.new_key()]
    error = refused_alike(one.run(OpKind.ALLGATHER, one.keep_all([np.ones(2), np.ones(2)]), takes))
    assert [(v.kind, v.rank, v.ref) for v in error.violations] == [("lost", 1, takes[1].hex())]


def test_the_reduce_op_of_pieces_is_checked_on_their_dtype(fleet: MakeFleet) -> None:
    one = fleet(2)
    error = refused_alike(one.run(OpKind.REDUCESCATTER, one.keep_all(numbers(0, 2, (2, 2), "int16")), op=ReduceOp.AVG))
    assert isinstance(error, UnsupportedError)
    assert [v.rank for v in error.violations] == [0, 1]


@pytest.mark.parametrize("lacking", [False, True], ids=["native", "substitute"])
def test_outputs_that_are_overwritten_whole_may_be_dirty_before(lacking: bool, fleet: MakeFleet) -> None:
    one = fleet(2)
    if lacking:
        one.spec = replace(one.spec, ops=("gather", "broadcast"))
    takes = [np.zeros((2, 2)) for _ in range(2)]
    for rank, take in enumerate(takes):
        one.stores[rank].mark_dirty([arrays.byte_range(take)], [take])
    one.must(OpKind.ALLGATHER, one.keep_all([np.ones(2), np.ones(2)]), one.keep_all(takes))
    assert one.dirty == [0, 0]
    np.testing.assert_array_equal(takes[1], np.ones((2, 2)))


# ---------------------------------------------------------------------------------------------- what is remembered


def test_memory_of_programs_is_bounded(fleet: MakeFleet) -> None:
    one = fleet(1)
    key = one.keep(0, np.ones(2))
    for timeout_s in range(1, 40):
        one.must(OpKind.ALLREDUCE, [key], timeout_s=float(timeout_s))
    found = one.stores[0].look(key)
    assert 1 <= len(found.memo) <= 8  # type: ignore[union-attr]
