"""The table of operations: complete, and what it says of givers, pieces and folds is what each operation means."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from raycollect.core.model import OpKind, ReduceOp
from raycollect.core.operations import ALL_KERNELS, OPERATIONS, OperationSpec, by_kind, has_part
from tests.pure import counting, local_world
from tests.pure.meaning import KINDS, folded, gives_of, meaning, roots_of, takers

WORLD = 4


def test_each_operation_has_its_entry() -> None:
    assert set(OPERATIONS) == set(OpKind) - {OpKind.RECV}
    assert all(spec.kind is kind for kind, spec in OPERATIONS.items())


@pytest.mark.parametrize(
    "spec",
    [
        OperationSpec(kind=OpKind.SCAN, folds=True, substitutes=((OpKind.ALLGATHER,),)),
        OperationSpec(
            kind=OpKind.SCATTER, gives="root", gives_pieces=True, substitutes=((OpKind.REDUCE, OpKind.SEND),)
        ),
        OperationSpec(kind=OpKind.SCAN, substitutes=((OpKind.ALLGATHER,),)),
    ],
    ids=["a fold by moves", "a move by folds", "several values as one"],
)
def test_an_operation_that_contradicts_itself_is_refused(spec: OperationSpec) -> None:
    with pytest.raises(ValueError, match=spec.kind.value):
        by_kind([*OPERATIONS.values(), spec])


@pytest.mark.parametrize(
    ("name", "kinds", "needed"),
    [
        ("meaning", KINDS, ALL_KERNELS - {OpKind.RECV}),
        ("counting", counting.KINDS, ALL_KERNELS - {OpKind.SEND, OpKind.RECV}),
        ("local_world", local_world.KINDS, ALL_KERNELS),
    ],
)
def test_what_the_tests_say_of_operations_is_complete(name: str, kinds: Sequence[OpKind], needed: set[OpKind]) -> None:
    """Those without kernels are made of others: the contract has them."""
    assert needed <= set(kinds), f"tests/pure/{name}.py lacks {[kind.value for kind in needed - set(kinds)]}"


def taken(spec: OperationSpec, gives: list[Any], rank: int, root: int) -> Any:
    """What a rank takes, from the fields of the table alone."""
    values = [gives[giver] for giver in spec.givers(rank, WORLD, root)]
    if spec.gives_pieces:
        values = [value[rank] for value in values]
    if spec.folds:
        return folded(ReduceOp.SUM, values)
    return values if spec.takes_pieces else values[0]


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_rank_takes_is_what_the_operation_means(kind: OpKind) -> None:
    spec, rng = OPERATIONS[kind], np.random.default_rng(0)
    for root, peer in roots_of(kind, WORLD):
        gives = gives_of(kind, WORLD, lambda size: rng.integers(0, 9, size), lambda giver, taker: 3, root)
        for rank, expected in enumerate(meaning(kind, gives, root=root, peer=peer, op=ReduceOp.SUM)):
            assert has_part(spec.gives, rank, root, peer) == (gives[rank] is not None)
            assert has_part(spec.outputs, rank, root, peer) == (rank in takers(kind, WORLD, root, peer)), (
                "tests/pure/meaning.py"
            )
            if has_part(spec.takes, rank, root, peer):
                np.testing.assert_array_equal(taken(spec, gives, rank, root), expected)
            elif not has_part(spec.gives, rank, root, peer) or spec.takes == "root":
                assert expected is None
