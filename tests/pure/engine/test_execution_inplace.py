"""The executor and memory that operands share: what works in place, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from raycollect.backends import arrays
from raycollect.core.model import OpKind, ReduceOp
from raycollect.errors import (
    AliasError,
)
from raycollect.planner.lower import SUBSTITUTES
from raycollect.pos import Container
from tests.pure.fleet import Fleet, MakeFleet
from tests.pure.meaning import ROOTED, meaning
from tests.support.values import replace


@pytest.mark.parametrize(
    "make",
    [
        lambda a: [a, a],
        lambda a: [a[:3], a[2:5]],
        lambda a: {"x": a[2:5], "y": a[:3]},
        lambda a: (a[:3], a[2::-1]),
    ],
    ids=["the same tensor twice", "overlapping views", "a dict of views", "a view backwards"],
)
def test_operands_that_overlap_are_refused(make: Callable[[Any], Any], fleet: MakeFleet) -> None:
    one = fleet(2)
    memory = np.arange(5.0)
    value = make(memory)
    apart = Container.of(value, arrays.is_tensor)
    assert apart is not None
    other = Container.build(apart.structure, [t.copy() for t in apart.tensors])
    copies = [t.copy() for t in other.tensors]
    for outcome in one.run(OpKind.ALLREDUCE, [one.keep(0, other.value), one.keep(1, value)]):
        assert type(outcome.error) is AliasError
        assert {v.rank for v in outcome.error.violations} == {1}
    np.testing.assert_array_equal(memory, np.arange(5.0))
    for tensor, was in zip(other.tensors, copies, strict=True):
        np.testing.assert_array_equal(tensor, was)
    one.works_on()


def test_operands_that_are_only_read_may_overlap(fleet: MakeFleet) -> None:
    one = fleet(2)
    memory = np.arange(5.0)
    keys = [one.keep(rank, [memory, memory[:]]) for rank in range(2)]
    outcomes = one.must(OpKind.ALLREDUCE, keys, inplace=False)
    for outcome in outcomes:
        np.testing.assert_array_equal(outcome.outputs[0].tensors[1], 2 * np.arange(5.0))
    np.testing.assert_array_equal(memory, np.arange(5.0))


def test_neighbours_in_one_memory_do_not_overlap(fleet: MakeFleet) -> None:
    one = fleet(2)
    memory = np.arange(6.0)
    one.must(OpKind.ALLREDUCE, [one.keep(0, [memory[::2], memory[1::2]]), one.keep(1, [np.ones(3), np.zeros(3)])])
    np.testing.assert_array_equal(memory, [1, 1, 3, 3, 5, 5])


# ---------------------------------------------------------------------------------------------- what works in place

WORLD = 3
_Operands = tuple[list[Any], dict[int, Any]]
"""What each rank gives, and takes by rank."""


def _allgather(contiguous: bool) -> _Operands:
    takes = {rank: np.zeros((WORLD, 2)) if contiguous else [np.zeros(2) for _ in range(WORLD)] for rank in range(WORLD)}
    gives = [takes[rank][rank] for rank in range(WORLD)]
    for rank, give in enumerate(gives):
        give[:] = rank + 1
    return gives, takes


def _gather(contiguous: bool) -> _Operands:
    gives, takes = _allgather(contiguous)
    return gives, {1: takes[1]}


def _reducescatter(contiguous: bool) -> _Operands:
    gives = [np.arange(6.0).reshape(WORLD, 2) * (rank + 1) for rank in range(WORLD)]
    values = gives if contiguous else [list(give) for give in gives]
    return values, {rank: give[rank] for rank, give in enumerate(values)}


def _scatter(contiguous: bool) -> _Operands:
    gives, takes = _reducescatter(contiguous)
    return [None, gives[1], None], {0: np.zeros(2), 1: takes[1], 2: np.zeros(2)}


def _alltoall(contiguous: bool) -> _Operands:
    gives, _ = _reducescatter(contiguous)
    return gives, {rank: give if contiguous else [piece[:] for piece in give] for rank, give in enumerate(gives)}


IN_PLACE: dict[OpKind, Callable[[bool], _Operands]] = {
    OpKind.ALLGATHER: _allgather,
    OpKind.GATHER: _gather,
    OpKind.REDUCESCATTER: _reducescatter,
    OpKind.SCATTER: _scatter,
    OpKind.ALLTOALL: _alltoall,
}


def _lacking(one: Fleet, kind: OpKind) -> None:
    """Takes an operation from the backend."""
    one.spec = replace(one.spec, ops=tuple(other.value for other in OpKind if other is not kind))


def _expected(kind: OpKind, gives: list[Any]) -> list[Any]:
    return meaning(kind, copy.deepcopy(gives), root=1, op=ReduceOp.SUM)


@pytest.mark.parametrize("lacking", [False, True], ids=["native", "substitute"])
@pytest.mark.parametrize("call", [False, True], ids=["plan", "call"])
@pytest.mark.parametrize("contiguous", [False, True], ids=["list", "tensor"])
@pytest.mark.parametrize("kind", IN_PLACE)
def test_ones_own_piece_may_stay_where_it_is(
    kind: OpKind, contiguous: bool, call: bool, lacking: bool, fleet: MakeFleet
) -> None:
    one = fleet(WORLD)
    if lacking and kind in SUBSTITUTES:
        _lacking(one, kind)
    gives, takes = IN_PLACE[kind](contiguous)
    expected = _expected(kind, gives)
    root = {"root": 1} if kind in ROOTED else {}
    if call:
        outcomes = one.call(kind, gives, takes, **root)
    else:
        keys = {rank: one.keep(rank, value) for rank, value in enumerate(gives) if value is not None}
        outcomes = one.run(kind, keys, {rank: one.keep(rank, value) for rank, value in takes.items()}, **root)
    assert [outcome.error for outcome in outcomes] == [None] * WORLD
    for rank, take in takes.items():
        np.testing.assert_array_equal(np.stack(list(take)), np.stack(list(expected[rank])))


def test_a_list_may_be_both_ends_of_an_alltoall_under_one_key(fleet: MakeFleet) -> None:
    one = fleet(WORLD)
    gives, _ = _alltoall(contiguous=False)
    expected = _expected(OpKind.ALLTOALL, gives)
    keys = one.keep_all(gives)
    one.must(OpKind.ALLTOALL, keys, keys)
    for give, right in zip(gives, expected, strict=True):
        np.testing.assert_array_equal(np.stack(give), np.stack(right))


def test_empty_pieces_are_in_place_wherever_they_are(fleet: MakeFleet) -> None:
    one = fleet(2)
    gives = [[np.ones(2), np.ones(0)], [np.ones(0), np.full(3, 2.0)]]
    takes = [[gives[0][0], np.zeros(0)], [np.zeros(0), gives[1][1]]]
    one.must(OpKind.ALLTOALL, one.keep_all(gives), one.keep_all(takes))
    np.testing.assert_array_equal(gives[1][1], np.full(3, 2.0))


# ---------------------------------------------------------------------------------------------- what does not


def _others_piece(kind: OpKind) -> _Operands:
    """Rank 1's own piece lies where another's belongs."""
    gives, takes = IN_PLACE[kind](False)
    if kind in (OpKind.ALLGATHER, OpKind.GATHER):
        gives[1] = takes[1][0]
    elif kind is OpKind.ALLTOALL:
        takes[1] = [gives[1][1], gives[1][0], gives[1][2]]
    else:
        takes[1] = gives[1][0]
    return gives, takes


def _shifted(kind: OpKind) -> _Operands:
    """Rank 1's own piece overlaps its place, but is not it."""
    gives, takes = IN_PLACE[kind](False)
    memory = np.zeros(3)
    if kind in (OpKind.ALLGATHER, OpKind.GATHER):
        gives[1], takes[1][1] = memory[:2], memory[1:]
    elif kind is OpKind.ALLTOALL:
        gives[1][1], takes[1][1] = memory[:2], memory[1:]
    else:
        gives[1][1], takes[1] = memory[:2], memory[1:]
    return gives, takes


def _backwards(kind: OpKind) -> _Operands:
    """Rank 1's own piece is its place, read from the other end."""
    gives, takes = IN_PLACE[kind](False)
    if kind in (OpKind.ALLGATHER, OpKind.GATHER):
        gives[1] = takes[1][1][::-1]
    elif kind is OpKind.ALLTOALL:
        takes[1][1] = gives[1][1][::-1]
    else:
        takes[1] = gives[1][1][::-1]
    return gives, takes


@pytest.mark.parametrize("call", [False, True], ids=["plan", "call"])
@pytest.mark.parametrize("make", [_others_piece, _shifted, _backwards])
@pytest.mark.parametrize("kind", IN_PLACE)
def test_any_other_overlap_of_what_is_given_and_taken_is_refused(
    kind: OpKind, make: Callable[[OpKind], _Operands], call: bool, fleet: MakeFleet
) -> None:
    one = fleet(WORLD)
    gives, takes = make(kind)
    before = copy.deepcopy((gives, takes))
    root = {"root": 1} if kind in ROOTED else {}
    keys = {rank: one.keep(rank, value) for rank, value in enumerate(gives) if value is not None}
    taken = {rank: one.keep(rank, value) for rank, value in takes.items()}
    for outcome in one.call(kind, gives, takes, **root) if call else one.run(kind, keys, taken, **root):
        assert type(outcome.error) is AliasError
        (violation,) = outcome.error.violations
        assert (violation.rank, violation.ref) == (1, "" if call else taken[1].hex())
    for value, was in zip((*gives, *takes.values()), (*before[0], *before[1].values()), strict=True):
        if value is not None:
            np.testing.assert_array_equal(np.stack(list(value)), np.stack(list(was)))
    one.works_on()


def test_an_alltoall_is_in_place_for_all_ranks_or_for_none(fleet: MakeFleet) -> None:
    one = fleet(WORLD)
    gives, takes = _alltoall(contiguous=False)
    takes[2][0] = np.zeros(2)
    for outcome in one.run(OpKind.ALLTOALL, one.keep_all(gives), one.keep_all([takes[rank] for rank in range(WORLD)])):
        assert type(outcome.error) is AliasError
        assert [v.rank for v in outcome.error.violations] == [2]
        assert "all pieces in place, or none" in str(outcome.error)
    one.works_on()


@pytest.mark.parametrize("kind", [OpKind.ALLGATHER, OpKind.ALLTOALL])
def test_one_tensor_can_not_take_what_two_ranks_give(kind: OpKind, fleet: MakeFleet) -> None:
    """As in ``allgather([zeros] * 2, tensor)``."""
    one = fleet(2)
    gives = [[np.ones(2), np.ones(2)] if kind is OpKind.ALLTOALL else np.ones(2) for _ in range(2)]
    twice = np.zeros(2)
    takes = [[np.zeros(2), np.zeros(2)], [twice, twice]]
    for outcome in one.run(kind, one.keep_all(gives), one.keep_all(takes)):
        assert type(outcome.error) is AliasError
        assert [v.rank for v in outcome.error.violations] == [1]
    np.testing.assert_array_equal(twice, np.zeros(2))


def test_pieces_that_are_only_read_may_be_one_tensor(fleet: MakeFleet) -> None:
    one = fleet(2)
    values = [np.full(2, rank + 1.0) for rank in range(2)]
    outcomes = one.must(OpKind.REDUCESCATTER, one.keep_all([[value, value] for value in values]))
    for outcome in outcomes:
        np.testing.assert_array_equal(outcome.outputs[0].value, np.full(2, 3.0))


def test_an_operand_that_is_a_result_of_the_last_plan_may_be_used_again(fleet: MakeFleet) -> None:
    one = fleet(2)
    outcomes = one.must(OpKind.ALLGATHER, one.keep_all([np.ones(1), np.full(1, 2.0)]))
    kept = [one.keep(rank, outcome.outputs[0].value) for rank, outcome in enumerate(outcomes)]
    one.must(OpKind.ALLTOALL, kept, kept)
    for rank, outcome in enumerate(outcomes):
        np.testing.assert_array_equal(np.concatenate(outcome.outputs[0].value), np.full(2, rank + 1.0))
