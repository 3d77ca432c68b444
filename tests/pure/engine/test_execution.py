"""The executor: what each operation does to the operands of ranks in threads, over the backend `local`."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest

from raycollect.backends import arrays
from raycollect.core.model import OpKind, ReduceOp
from raycollect.engine.execution import Outcome
from raycollect.pos import Container
from tests.pure.fleet import WAIT_S, Fleet, HoldAt, MakeFleet, launched, numbers
from tests.pure.meaning import REDUCTIONS, gives_of, meaning, roots_of, takers

# ---------------------------------------------------------------------------------------------- what is meant


def test_the_root_of_a_broadcast_may_be_read_only(fleet: MakeFleet) -> None:
    one = fleet(3)
    values = numbers(1, 3)
    values[1].flags.writeable = False
    one.must(OpKind.BROADCAST, one.keep_all(values), root=1)
    np.testing.assert_array_equal(values[0], values[1])


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


def test_views_and_other_layouts_are_reduced_where_they_are(fleet: MakeFleet) -> None:
    one = fleet(2)
    base = np.arange(12.0).reshape(3, 4)
    one.must(OpKind.ALLREDUCE, [one.keep(0, base[:, 1]), one.keep(1, np.ones(3))])
    np.testing.assert_array_equal(base[:, 1], [2.0, 6.0, 10.0])
    np.testing.assert_array_equal(base[:, 0], [0.0, 4.0, 8.0])
    np.testing.assert_array_equal(base[:, 2:], np.arange(12.0).reshape(3, 4)[:, 2:])


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


def _uneven(giver: int, taker: int) -> int:
    return (3 * giver + 5 * taker + 1) % 7


def _same(found: Any, expected: Any) -> None:
    """Compares arrays, or lists of arrays."""
    if isinstance(expected, list):
        assert type(found) is list
        assert len(found) == len(expected)
        for one, right in zip(found, expected, strict=True):
            _same(one, right)
    else:
        np.testing.assert_array_equal(found, expected)


def _zeros(value: Any) -> Any:
    return [np.zeros_like(piece) for piece in value] if isinstance(value, list) else np.zeros_like(value)


def _check(one: Fleet, kind: OpKind, how: str, root: int, peer: int) -> None:
    """Runs one operation and compares what each rank then has; `how`: outputs are made, given, or it is a call."""
    rng = np.random.default_rng(root + 1)
    gives = gives_of(kind, one.world, lambda n: rng.integers(0, 50, n), _uneven, root)
    before = copy.deepcopy(gives)
    op = ReduceOp.SUM if kind in REDUCTIONS else None
    expected = meaning(kind, before, root=root, peer=peer, op=op)
    given = how != "made" or kind is OpKind.BROADCAST
    takes = {rank: _zeros(expected[rank]) for rank in takers(kind, one.world, root, peer) if given}
    arguments = {"root": root, "peer": peer, "op": op, "inplace": how != "made"}
    if how == "call":
        outcomes = one.call(kind, gives, takes, **arguments)
    else:
        keys = {rank: one.keep(rank, value) for rank, value in enumerate(gives) if value is not None}
        outcomes = one.must(kind, keys, {rank: one.keep(rank, value) for rank, value in takes.items()}, **arguments)
    ranks = sorted((root, peer)) if kind is OpKind.SEND else range(one.world)
    for rank, outcome in zip(ranks, outcomes, strict=True):
        assert outcome.error is None
        in_place = kind in (OpKind.ALLREDUCE, OpKind.SCAN, OpKind.EXSCAN) or (kind is OpKind.REDUCE and rank == root)
        makes = how == "made" and (in_place or rank in takers(kind, one.world, root, peer)) and rank not in takes
        assert len(outcome.outputs) == makes, "what the user gets, and no scratch"
        if expected[rank] is not None:
            _same(outcome.outputs[0].value if makes else takes.get(rank, gives[rank]), expected[rank])
        if gives[rank] is not None and (makes or not in_place):
            _same(gives[rank], before[rank])


@pytest.mark.parametrize("kind", [OpKind.ALLGATHER, OpKind.GATHER, OpKind.SCATTER, OpKind.ALLTOALL, OpKind.SEND])
def test_ranks_meet_twice_only_where_one_learns_its_output(kind: OpKind, fleet: MakeFleet) -> None:
    one = fleet(2)
    root, peer = roots_of(kind, 2)[0]
    for how, checks in (("made", 2), ("given", 1), ("call", 1)):
        _check(one, kind, how, root, peer)
        assert [one.story(rank).count("check") for rank in range(2)] == [checks, checks]


@pytest.mark.parametrize("kind", [OpKind.ALLGATHER, OpKind.SCATTER, OpKind.REDUCESCATTER, OpKind.ALLTOALL])
def test_kernels_are_told_the_largest_piece_of_all_ranks(kind: OpKind, fleet: MakeFleet) -> None:
    """Even those whose own pieces are small, or empty."""
    one = fleet(3)
    seen: list[int] = []
    for rank in range(3):
        inner = one.communicators[rank]
        spied = launched(inner, lambda kernel: seen.append(kernel.most))
        one.communicators[rank] = spied
    _check(one, kind, "given", 0, -1)
    gives = gives_of(kind, 3, lambda n: n, _uneven, 0)
    sizes = [n for give in gives if give is not None for n in (give if isinstance(give, list) else [give])]
    assert seen == [max(sizes)] * 3
