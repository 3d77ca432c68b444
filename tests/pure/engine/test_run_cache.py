"""What the runs of an iteration, each on fresh tensors, know from those before, and what they must notice."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from raycollect.backends import arrays
from raycollect.core.model import OpKind, ReduceOp
from raycollect.engine.run import Outcome
from raycollect.errors import MismatchError, ReadOnlyError, TensorDirtyError
from tests.pure.engine.convoys import allreduces, convoy_of
from tests.pure.fleet import Fleet
from tests.support.values import replace

WORLD = 3

Run = Callable[..., list[Outcome]]


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    made = Fleet(WORLD)
    yield made
    made.close()


@pytest.fixture(params=["refs", "a member's call"])
def run(fleet: Fleet, request: pytest.FixtureRequest) -> Run:
    """Runs an operation on one tensor per rank."""
    if request.param == "refs":
        return lambda kind, values, **given: fleet.run(kind, fleet.keep_all(values), **given)
    return fleet.call


def looks(fleet: Fleet) -> int:
    """How many runs had to look at their operands."""
    return sum(event.what == "agreed" for recorder in fleet.recorders for event in recorder.story())


def fresh(seed: int, shape: Any = (7,), dtype: str = "float32") -> list[Any]:
    rng = np.random.default_rng(seed)
    return [rng.integers(-9, 9, shape).astype(dtype) for _ in range(WORLD)]


def ran(outcomes: list[Outcome]) -> None:
    assert [one.error for one in outcomes] == [None] * WORLD


@pytest.mark.parametrize("shape", [(1,), (3, 5), (1025,)])
@pytest.mark.parametrize("dtype", ["float32", "int8", "complex128", ">f8"])
def test_fresh_tensors_of_a_known_shape_are_not_looked_at_again(fleet: Fleet, run: Run, shape: Any, dtype: str):
    for seed in range(4):
        values = fresh(seed, shape, dtype)
        expected = values[0] + values[1] + values[2]
        ran(run(OpKind.ALLREDUCE, values))
        for value in values:
            np.testing.assert_array_equal(value, expected)
    assert looks(fleet) == WORLD, "each rank looks in the first run"


def test_each_root_has_its_own(fleet: Fleet):
    for seed in range(3):
        for root in range(WORLD):
            values = fresh(seed)
            expected = values[root].copy()
            ran(fleet.run(OpKind.BROADCAST, fleet.keep_all(values), root=root))
            for value in values:
                np.testing.assert_array_equal(value, expected)
    assert looks(fleet) == WORLD * WORLD


@pytest.mark.parametrize("shape", [(8,), ()])
def test_what_lies_otherwise_is_looked_at(run: Run, shape: Any):
    ran(run(OpKind.ALLREDUCE, fresh(0, shape)))
    wide = [np.zeros((*shape, 2), np.float32)[..., 0] for _ in range(WORLD)]
    for rank, one in enumerate(wide):
        one[...] = rank
    ran(run(OpKind.ALLREDUCE, wide))
    for one in wide:
        np.testing.assert_array_equal(one, np.full(shape, 3, np.float32))
        np.testing.assert_array_equal(one.base[..., 1], np.zeros(shape, np.float32))


def _other_shape(fleet: Fleet, values: list[Any]) -> None:
    values[1] = np.ones(8, np.float32)


def _read_only(fleet: Fleet, values: list[Any]) -> None:
    values[1].setflags(write=False)


def _dirty(fleet: Fleet, values: list[Any]) -> None:
    fleet.stores[1].mark_dirty([arrays.byte_range(values[1])], [values[1]])


@pytest.mark.parametrize(
    ("spoil", "error"), [(_other_shape, MismatchError), (_read_only, ReadOnlyError), (_dirty, TensorDirtyError)]
)
def test_what_is_wrong_with_one_ranks_fresh_tensor_is_refused_by_all(fleet: Fleet, run: Run, spoil: Any, error: Any):
    ran(run(OpKind.ALLREDUCE, fresh(0)))
    values = fresh(1)
    spoil(fleet, values)
    before = [value.copy() for value in values]
    for one in run(OpKind.ALLREDUCE, values):
        assert isinstance(one.error, error)
        assert {violation.rank for violation in one.error.violations} == {1}
    for value, kept in zip(values, before, strict=True):
        np.testing.assert_array_equal(value, kept)
    ran(run(OpKind.ALLREDUCE, fresh(2)))


def test_other_operands_behind_the_same_first_one_are_other_memory(fleet: Fleet):
    """Rows of an array say nothing of where they lie: they are known by their containers."""
    values = fresh(0)
    gives = fleet.keep_all(values)
    for _ in range(3):
        takes = [list(np.zeros((WORLD, 7), np.float32)) for _ in range(WORLD)]
        for _ in range(2):
            ran(fleet.run(OpKind.ALLGATHER, gives, fleet.keep_all(takes)))
            for rows in takes:
                np.testing.assert_array_equal(rows, values)


def test_pieces_of_a_fresh_tensor_are_not_taken_for_the_whole(fleet: Fleet):
    for seed in range(3):
        values = fresh(seed, (WORLD, 2))
        expected = [np.stack([value[rank] for value in values]) for rank in range(WORLD)]
        keys = fleet.keep_all(values)
        ran(fleet.run(OpKind.ALLTOALL, keys, keys))
        for value, right in zip(values, expected, strict=True):
            np.testing.assert_array_equal(value, right)


def test_two_calls_on_one_fresh_tensor_are_both_repeated():
    with convoy_of(2) as convoy:
        for seed in range(3):
            values = fresh(seed)[:2]
            expected = (values[0] + values[1]) ** 2
            (first,) = allreduces(convoy, [values])
            requests = [first, replace(first, op=ReduceOp.PRODUCT)]
            outcomes = convoy.run(requests, convoy.memberships * 2)
            assert [outcome.error for outcome in outcomes.values()] == [None] * 2
            for value in values:
                np.testing.assert_array_equal(value, expected)


def test_no_memory_is_kept(fleet: Fleet):
    values = fresh(0)
    known = [weakref.ref(value) for value in values]
    ran(fleet.call(OpKind.ALLREDUCE, values))
    del values
    gc.collect()
    assert [one() for one in known] == [None] * WORLD


def test_a_group_that_has_ended_is_forgotten(fleet: Fleet):
    ran(fleet.call(OpKind.ALLREDUCE, fresh(0)))
    for cache in fleet.caches:
        cache.forget("another")
    ran(fleet.call(OpKind.ALLREDUCE, fresh(1)))
    assert looks(fleet) == WORLD
    for cache in fleet.caches:
        cache.forget(fleet.spec.group_id)
    ran(fleet.call(OpKind.ALLREDUCE, fresh(2)))
    assert looks(fleet) == 2 * WORLD
