"""The executor and pieces: lists of tensors, one contiguous tensor, and what is not one piece per rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from raycollect.core.model import OpKind
from raycollect.errors import InvalidArgumentError, MismatchError
from tests.pure.fleet import MakeFleet, refused_alike


@pytest.mark.parametrize("shape", [(6,), (6, 2), (3, 4), (3, 2, 2), (3,), (0,), (3, 0)])
def test_a_contiguous_tensor_is_a_list_of_equal_pieces(shape: tuple[int, ...], fleet: MakeFleet) -> None:
    one = fleet(3)
    gives = [np.arange(np.prod(shape), dtype="int64").reshape(shape) + 100 * rank for rank in range(3)]
    takes = [np.zeros_like(give) for give in gives]
    one.must(OpKind.ALLTOALL, one.keep_all(gives), one.keep_all(takes))
    for rank, take in enumerate(takes):
        np.testing.assert_array_equal(take, np.concatenate([np.split(give, 3)[rank] for give in gives]))


def test_pieces_of_one_tensor_make_outputs_of_their_shape(fleet: MakeFleet) -> None:
    one = fleet(2)
    for value, shape in ((np.arange(8.0).reshape(2, 4), (4,)), (np.arange(8.0).reshape(4, 2), (2, 2))):
        outcomes = one.must(OpKind.REDUCESCATTER, one.keep_all([value, value]))
        for rank, outcome in enumerate(outcomes):
            made = outcome.outputs[0].value
            assert made.shape == shape
            np.testing.assert_array_equal(made.ravel(), 2 * value.ravel()[4 * rank : 4 * rank + 4])


NO_PIECES: dict[str, Callable[[], Any]] = {
    "a list too short": lambda: [np.zeros(2)] * 2,
    "a list too long": lambda: [np.zeros(2) for _ in range(4)],
    "a dict": lambda: {"a": np.zeros(2), "b": np.zeros(2), "c": np.zeros(2)},
    "a tensor that does not divide": lambda: np.zeros(7),
    "a tensor without dimensions": lambda: np.zeros(()),
    "a tensor with gaps": lambda: np.zeros((6, 2))[:, 0],
    "unequally many tensors": lambda: [np.zeros(2), np.zeros(2), [np.zeros(2), np.zeros(2)]],
}


@pytest.mark.parametrize("call", [False, True], ids=["plan", "call"])
@pytest.mark.parametrize("side", ["input", "output"])
@pytest.mark.parametrize("name", NO_PIECES)
def test_what_is_not_one_piece_per_rank_is_refused_naming_which_end(
    name: str, side: str, call: bool, fleet: MakeFleet
) -> None:
    one = fleet(3)
    sides = [[[np.ones(2) for _ in range(3)] for _ in range(3)] for _ in range(2)]
    sides[side == "output"][1] = NO_PIECES[name]()
    keys = [one.keep_all(values) for values in sides]
    outcomes = one.call(OpKind.ALLTOALL, *sides) if call else one.run(OpKind.ALLTOALL, *keys)
    error = refused_alike(outcomes)
    assert type(error) is (MismatchError if name == "unequally many tensors" else InvalidArgumentError)
    ref = "" if call else keys[side == "output"][1].hex()
    assert [(v.rank, v.field, v.ref) for v in error.violations] == [(1, side, ref)]
    for values in sides[1][::2]:
        np.testing.assert_array_equal(np.stack(values), np.ones((3, 2)))
    one.works_on()


def test_pieces_of_several_dtypes_are_refused_though_giver_and_taker_agree(fleet: MakeFleet) -> None:
    """One kernel moves all pieces."""
    one = fleet(3)
    gives = {0: one.keep(0, [np.ones(2), np.ones(2), np.ones(2, "float32")])}
    takes = one.keep_all([np.zeros(2), np.zeros(2), np.zeros(2, "float32")])
    error = refused_alike(one.run(OpKind.SCATTER, gives, takes, root=0))
    assert [(v.rank, v.field) for v in error.violations] == [(0, "dtype of input 2"), (2, "dtype of output")]
    one.works_on()
