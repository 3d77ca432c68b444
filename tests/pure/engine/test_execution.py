"""The executor: what each operation does to the operands of ranks in threads, over the backend `local`."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from raycollect.backends import arrays
from raycollect.core.model import OpKind, ReduceOp
from raycollect.engine.execution import Outcome
from raycollect.pos import Container
from tests.pure.fleet import WAIT_S, HoldAt, MakeFleet, numbers

# ---------------------------------------------------------------------------------------------- what is meant


@pytest.mark.parametrize(
    "value",
    [
        np.arange(6.0).reshape(2, 3),
        np.array(7, "int16"),
        np.zeros((0, 4), "float32"),
        np.arange(6).reshape(2, 3).T,
        [np.arange(3), np.ones((2, 2), "complex64")],
        (np.arange(3),),
        {"w": np.arange(4.0), "b": np.ones(1, bool), 3: np.zeros(2)},
    ],
    ids=["matrix", "scalar", "empty", "transposed", "list", "tuple", "dict"],
)
def test_send_to_nowhere_makes_an_output_as_the_source_has_it(value: Any, fleet: MakeFleet) -> None:
    one = fleet(2)
    outcomes = one.must(OpKind.SEND, {0: one.keep(0, value), 1: None}, root=0, peer=1)
    assert outcomes[0].outputs == ()
    (made,) = outcomes[1].outputs
    source = Container.of(value, arrays.is_tensor)
    assert source is not None
    assert made.structure == source.structure
    assert type(made.value) is type(value)
    for got, sent in zip(made.tensors, source.tensors, strict=True):
        np.testing.assert_array_equal(got, sent)
        assert (got.dtype, got.shape) == (sent.dtype, sent.shape)
        assert not np.shares_memory(got, sent)


def test_a_barrier_lets_nobody_through_before_all_have_come(fleet: MakeFleet) -> None:
    one = fleet(3)
    one.faults = hold = HoldAt(point="before_check", rank=2)
    futures = one.start(OpKind.BARRIER, dict.fromkeys(range(3)))
    assert hold.came.wait(WAIT_S)
    assert not any(future.done() for future in futures)
    hold.go.set()
    assert [future.result(WAIT_S) for future in futures] == [Outcome()] * 3


@pytest.mark.parametrize("seed", range(5))
def test_a_loop_over_the_same_and_other_operands_stays_right(seed: int, fleet: MakeFleet) -> None:
    """What a program remembers about its operand must not outlive a change of it."""
    rng, one = random.Random(seed), fleet(3)
    values = numbers(seed, 3, (4,))
    expected = [value.copy() for value in values]
    keys = one.keep_all(values)
    for _ in range(25):
        root, op = rng.randrange(3), rng.choice([ReduceOp.SUM, ReduceOp.MAX, ReduceOp.AVG])
        if rng.random() < 0.4:
            one.must(OpKind.BROADCAST, keys, root=root)
            expected = [expected[root].copy() for _ in range(3)]
        else:
            one.must(OpKind.ALLREDUCE, keys, op=op)
            folded = np.maximum.reduce(expected) if op is ReduceOp.MAX else np.add.reduce(expected)
            expected = [folded / (3 if op is ReduceOp.AVG else 1) for _ in range(3)]
        changed = rng.randrange(3)
        values[changed] += 1
        expected[changed] += 1
        for value, right in zip(values, expected, strict=True):
            np.testing.assert_array_equal(value, right)


# ---------------------------------------------------------------------------------------------- every operation


def _same(found: Any, expected: Any) -> None:
    """Compares arrays, or lists of arrays."""
    if isinstance(expected, list):
        assert type(found) is list
        assert len(found) == len(expected)
        for one, right in zip(found, expected, strict=True):
            _same(one, right)
    else:
        np.testing.assert_array_equal(found, expected)
