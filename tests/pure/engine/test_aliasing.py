"""Memory that operands share, by storage range (P6): refused where the result is undefined, right where it is not.

What two views share is told here by brute force: by the set of the elements of each.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from raycollect.core.model import OpKind, ReduceOp
from raycollect.errors import AliasError
from raycollect.planner import Request
from tests.pure.engine.convoys import allreduces, convoy_of
from tests.pure.fleet import WAIT_S, Convoy, MakeFleet
from tests.pure.meaning import ROOTED
from tests.support.values import replace

torch = pytest.importorskip("torch")

SIZE = 24
"""The elements of the memory that is shared."""

Cut = Callable[[Any], Any]
"""Makes a view of an array [SIZE] of numpy."""


def memory(seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(1, 9, SIZE).astype("float32")


def elements(cut: Cut) -> list[int]:
    """Which elements of the memory a view has, one after the other."""
    return [int(at) for at in np.asarray(cut(np.arange(SIZE))).ravel()]


# ---------------------------------------------------------------------------------------------- what may be written


REPEATED: dict[str, Cut] = {
    "rows": lambda a: np.lib.stride_tricks.as_strided(a, (3, 4), (0, a.itemsize)),
    "one element": lambda a: np.lib.stride_tricks.as_strided(a[2:], (5,), (0,)),
    "windows": lambda a: np.lib.stride_tricks.sliding_window_view(a, 4, writeable=True),
}
"""Arrays of which several elements lie at one address."""


def numpy_view(array: Any) -> Any:
    return array


def torch_view(array: Any) -> Any:
    return torch.from_numpy(array) if min(array.strides, default=0) >= 0 else array


MIXES: dict[str, Sequence[Callable[[Any], Any]]] = {
    "numpy": (numpy_view,),
    "torch": (torch_view,),
    "numpy and torch": (numpy_view, torch_view),
}


def seen_by(mix: str, views: Sequence[Any]) -> list[Any]:
    makers = MIXES[mix]
    return [makers[at % len(makers)](view) for at, view in enumerate(views)]


def summed(cuts: Sequence[Cut], values: Sequence[Any]) -> list[Any]:
    """What an allreduce in place of these views leaves in each rank's memory, computed element by element."""
    flat = [elements(cut) for cut in cuts]
    touched = {at for of_view in flat for at in of_view}
    total = sum(values)
    return [np.where([at in touched for at in range(SIZE)], total, value) for value in values]


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("seed", range(30))
def test_views_by_chance(seed: int, mix: str, fleet: MakeFleet) -> None:
    """The check agrees with the sets of elements. Rank 1 shares memory, rank 0 does not; both keep their values."""
    chance = random.Random(seed)
    one, cuts = fleet(2), [_cut(chance) for _ in range(chance.randint(1, 4))]
    shared, other = memory(seed), memory(seed + 1)
    mine = [np.array(cut(other)) for cut in cuts]
    was, given = shared.copy(), [view.copy() for view in mine]
    keys = [one.keep(0, mine), one.keep(1, seen_by(mix, [cut(shared) for cut in cuts]))]
    for outcome in one.must(OpKind.ALLREDUCE, keys, inplace=False):
        for made, cut in zip(outcome.outputs[0].tensors, cuts, strict=True):
            np.testing.assert_array_equal(np.asarray(made), cut(was) + cut(other))
    outcomes = one.run(OpKind.ALLREDUCE, keys)
    flat = [at for cut in cuts for at in elements(cut)]
    if len(flat) == len(set(flat)):
        assert [outcome.error for outcome in outcomes] == [None, None]
        np.testing.assert_array_equal(shared, summed(cuts, [was, other])[0])
        for view, cut in zip(mine, cuts, strict=True):
            np.testing.assert_array_equal(view, cut(was) + cut(other))
    else:
        for outcome in outcomes:
            assert type(outcome.error) is AliasError
            assert [(v.rank, v.ref) for v in outcome.error.violations] == [(1, keys[1].hex())]
        np.testing.assert_array_equal(shared, was)
        for view, value in zip(mine, given, strict=True):
            np.testing.assert_array_equal(view, value)


def _cut(chance: random.Random) -> Cut:
    rows = chance.choice([1, 2, 3, 4, 6])
    ends = [sorted(chance.choices(range(SIZE // rows + 1), k=2)), sorted(chance.choices(range(rows + 1), k=2))]
    steps = [chance.choice([1, 1, 2, 3, -1]) for _ in range(2)]
    turned = chance.random() < 0.3

    def cut(array: Any) -> Any:
        grid = array.reshape(rows, SIZE // rows)
        part = grid[ends[1][0] : ends[1][1], ends[0][0] : ends[0][1]][:: steps[0], :: steps[1]]
        return part.T if turned else part

    return cut


# ---------------------------------------------------------------------------------------------- stride 0, read-only


@pytest.mark.parametrize("mix", ["numpy", "torch"])
@pytest.mark.parametrize("name", REPEATED)
def test_elements_at_one_address_are_read_but_never_written(name: str, mix: str, fleet: MakeFleet) -> None:
    one, cut = fleet(2), REPEATED[name]
    values = [memory(rank) for rank in range(2)]
    was = [value.copy() for value in values]
    keys = [one.keep(rank, seen_by(mix, [cut(value)])[0]) for rank, value in enumerate(values)]
    for outcome in one.must(OpKind.ALLREDUCE, keys, inplace=False):
        np.testing.assert_array_equal(np.asarray(outcome.outputs[0].value), sum(cut(value) for value in was))
    for outcome in one.run(OpKind.ALLREDUCE, keys):
        assert type(outcome.error) is AliasError
        assert {v.rank for v in outcome.error.violations} == {0, 1}
    np.testing.assert_array_equal(values, was)
    apart = np.array(cut(was[0]))
    keys[0] = one.keep(0, apart)
    outcomes = one.run(OpKind.BROADCAST, keys, root=1)  # what the root has is only read
    assert [outcome.error for outcome in outcomes] == [None, None]
    np.testing.assert_array_equal(apart, cut(was[1]))


# ---------------------------------------------------------------------------------------------- what is given and taken


def _own(kind: OpKind) -> tuple[list[Any], dict[int, Any]]:
    """What each rank gives and takes: its own piece lies where it belongs."""
    ranks = range(3)
    if kind in (OpKind.ALLGATHER, OpKind.GATHER):
        takes = {rank: [np.full(2, rank + 1.0) for _ in ranks] for rank in ranks}
        gives = [takes[rank][rank] for rank in ranks]
        return gives, takes if kind is OpKind.ALLGATHER else {1: takes[1]}
    gives = [list(np.arange(6.0).reshape(3, 2) * (rank + 1)) for rank in ranks]
    if kind is OpKind.ALLTOALL:
        return gives, {rank: [piece[:] for piece in give] for rank, give in enumerate(gives)}
    if kind is OpKind.SCATTER:
        return [None, gives[1], None], {0: np.zeros(2), 1: gives[1][1], 2: np.zeros(2)}
    return gives, {rank: give[rank] for rank, give in enumerate(gives)}


def _spoiled(kind: OpKind, how: str) -> tuple[list[Any], dict[int, Any]]:
    """Rank 1's own piece lies where another's belongs, overlaps its place, or is read from the other end of it."""
    gives, takes = _own(kind)
    given, taken, memory = gives[1], takes[1], np.zeros(3)
    many_given, many_taken = isinstance(given, list), isinstance(taken, list)
    place = taken[1] if many_taken else taken
    if how == "another's":
        piece = taken[0] if many_taken and not many_given else given[0]
    else:
        piece = memory[:2] if how == "shifted" else place[::-1]
    if how == "another's" and many_given and many_taken:
        takes[1] = [given[1], given[0], given[2]]
        return gives, takes
    if how == "shifted" and many_taken:
        taken[1] = memory[1:]
    elif how == "shifted":
        takes[1] = memory[1:]
    if many_given and how != "another's":
        given[1] = piece
    elif many_given:
        takes[1] = piece
    else:
        gives[1] = piece
    return gives, takes


@pytest.mark.parametrize("call", [False, True], ids=["plan", "call"])
@pytest.mark.parametrize("how", ["another's", "shifted", "backwards"])
@pytest.mark.parametrize(
    "kind", [OpKind.ALLGATHER, OpKind.GATHER, OpKind.REDUCESCATTER, OpKind.SCATTER, OpKind.ALLTOALL]
)
def test_ones_own_piece_may_lie_in_its_place_and_nowhere_else(
    kind: OpKind, how: str, call: bool, fleet: MakeFleet
) -> None:
    one = fleet(3)
    gives, takes = _spoiled(kind, how)
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
    one = fleet(3)
    gives, takes = _own(OpKind.ALLTOALL)
    expected = [np.stack([give[rank] for give in gives]) for rank in range(3)]
    kept = takes[2][0]
    takes[2][0] = np.zeros(2)
    for outcome in one.run(OpKind.ALLTOALL, one.keep_all(gives), {r: one.keep(r, take) for r, take in takes.items()}):
        assert type(outcome.error) is AliasError
        assert [v.rank for v in outcome.error.violations] == [2]
    takes[2][0] = kept
    keys = one.keep_all(gives)
    one.must(OpKind.ALLTOALL, keys, keys)  # under one key
    np.testing.assert_array_equal([np.stack(give) for give in gives], expected)


def test_empty_pieces_are_in_place_wherever_they_are(fleet: MakeFleet) -> None:
    """Rank 0 gives rank 1 something and gets nothing; the rest of it is in place."""
    one = fleet(2)
    gives = [[np.arange(3.0), np.arange(2.0)], [np.zeros(0), np.full(3, 5.0)]]
    takes = [[gives[0][0], gives[0][1][:0]], [np.zeros(2), gives[1][1]]]
    one.must(OpKind.ALLTOALL, one.keep_all(gives), one.keep_all(takes))
    assert [[piece.tolist() for piece in take] for take in takes] == [[[0, 1, 2], []], [[0, 1], [5, 5, 5]]]


# ---------------------------------------------------------------------------------------------- plans of many calls


@pytest.fixture
def convoy() -> Iterator[Convoy]:
    with convoy_of(2) as made:
        yield made


def _calls(chance: random.Random, count: int) -> list[tuple[OpKind, Cut]]:
    """Calls whose views do not meet themselves; those of different calls may."""
    calls: list[tuple[OpKind, Cut]] = []
    while len(calls) < count:
        cut = _cut(chance)
        if elements(cut):
            calls.append((chance.choice([OpKind.ALLREDUCE, OpKind.ALLREDUCE, OpKind.BROADCAST]), cut))
    return calls


def _meant(calls: Sequence[tuple[OpKind, Cut]], values: Sequence[Any]) -> list[Any]:
    """What calls leave in the ranks' memory, one after the other."""
    found = [value.copy() for value in values]
    for kind, cut in calls:
        right = cut(found[0]).copy()
        if kind is OpKind.ALLREDUCE:
            right = right + cut(found[1])
        for value in found:
            cut(value)[...] = right
    return found


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("seed", range(12))
def test_calls_of_a_batch_that_meet_in_memory_keep_their_order(seed: int, mix: str, convoy: Convoy) -> None:
    """Refs of their own, one memory behind them: the planner can't know, those who hold it do."""
    calls = _calls(random.Random(seed), 5)
    values = [memory(seed), memory(seed + 1)]
    expected = _meant(calls, values)
    views = [seen_by(mix, [cut(value) for _, cut in calls]) for value in values]
    requests = [
        _request(kind, convoy, [convoy.keep(rank, views[rank][at]) for rank in range(2)])
        for at, (kind, _) in enumerate(calls)
    ]
    outcomes = convoy.run(requests, convoy.memberships * len(requests))
    assert {outcome.error for outcome in outcomes.values()} == {None}
    np.testing.assert_array_equal(values, expected)


@pytest.mark.parametrize("at", [0, 2])
def test_a_call_that_reads_what_a_fused_one_writes_keeps_its_place(at: int, convoy: Convoy) -> None:
    """Two sums could run as one kernel, before or after the product between them, if they met it in no memory."""
    ranks = range(convoy.count)
    values = [[np.full(3, rank + 2.0) for rank in ranks] for _ in range(3)]
    values[1][0] = values[at][0]  # under two keys
    first, middle, last = allreduces(convoy, values)
    middle = replace(middle, op=ReduceOp.PRODUCT, inplace=False)
    given = [value.copy() for value in values[1]]
    if at == 0:
        given[0] = sum(values[0])
    outcomes = convoy.run([first, middle, last], convoy.memberships * 3)
    for rank in ranks:
        assert outcomes[rank].error is None
        np.testing.assert_array_equal(outcomes[rank].outputs[0].value, np.prod(given, axis=0))


def _request(kind: OpKind, convoy: Convoy, keys: Sequence[Any]) -> Request:
    spec = convoy.memberships[0].spec
    if kind is OpKind.BROADCAST:
        operands: Any = ((0, keys[0], None), (1, None, keys[1]))
        return Request(kind=kind, group=spec, operands=operands, root=0, timeout_s=WAIT_S)
    operands = tuple((rank, key, None) for rank, key in enumerate(keys))
    return Request(kind=kind, group=spec, operands=operands, op=ReduceOp.SUM, timeout_s=WAIT_S)
