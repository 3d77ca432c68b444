"""The executor and what operands may be: nested structures, torch tensors; what a program remembers of them."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from raycollect.backends import arrays
from raycollect.core.model import OpKind, ReduceOp
from raycollect.errors import NotATensorError, UnsupportedError
from tests.pure.fleet import MakeFleet, numbers, refused_alike
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


# ---------------------------------------------------------------------------------------------- what is at fault


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
