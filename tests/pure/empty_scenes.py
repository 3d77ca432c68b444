"""Scenes of collectives whose tensors may be empty, by chance, and the values of all ranks in numpy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from raycollect.core.model import PIECES, OpKind, ReduceOp
from tests.pure.meaning import KINDS, REDUCTIONS, ROOTED, gives_of, meaning
from tests.pure.mixed import numbers

WORLDS = (1, 2, 3, 5)

EMPTY = ((0,), (0, 3), (2, 0))
FULL = ((), (1,), (3,), (7,), (2, 3), (5, 1, 1), (4_999,), (17_011,))
"""The last but one is large enough for kernels in place, the last one too large to be packed."""
DTYPES = ("float64", "float32", "int8", "int32")
OPS = (ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX)
LAYOUTS = ("own", "one base", "one shared base", "every other", "torch")
"""How the tensors of a rank lie; of those with one base an empty one begins where another one does."""

STRUCTURES: dict[str, Callable[[Sequence[Any]], Any]] = {
    "list": list,
    "dict": lambda row: {f"name {at}": one for at, one in enumerate(row)},
    "nested": lambda row: {"first": row[0], "others": [tuple(row[1:])]} if row[1:] else [[row[0]]],
}

Shape = tuple[int, ...]
Side = list[Any] | None
"""For each tensor of one of a rank's values an array, or a tuple with one for each piece; None: there is no value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One collective.

    Attributes:
        kind: The operation.
        dtypes: Of each tensor of a value.
        shapes: For each tensor, by giver and taker; where only one of them counts, the other is 0.
        structure: How the tensors make a value; empty: there is one, and it is the value.
        op: For reductions.
        root: The root, or the sender.
        peer: The receiver.
        into: Where results go: ``"made"``, ``"given"``, ``"in place"``; or ``"one tensor"`` that is given, of which
            all pieces are cut, as those are that are read.
    """

    kind: OpKind
    dtypes: tuple[str, ...]
    shapes: tuple[dict[tuple[int, int], Shape], ...]
    structure: str
    op: ReduceOp | None
    root: int
    peer: int
    into: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What all ranks do.

    Attributes:
        world: The number of ranks.
        calls: The calls of one plan.
        layout: How tensors lie.
        staging: See `plan`.
        is_call: Whether ranks give the operands of the only call themselves; else a store has them.
        on_host: The ranks whose tensors lie in the host's memory, of a backend that works on GPUs.
        number: Other values.
    """

    world: int
    calls: tuple[Call, ...]
    layout: str
    staging: int
    is_call: bool
    on_host: frozenset[int]
    number: int


@st.composite
def scenes(draw: st.DrawFn, worlds: Sequence[int], lacking: Sequence[OpKind] = ()) -> Scene:
    """Draws scenes of these world sizes, without operations that a backend lacks."""
    world = draw(st.sampled_from(worlds))
    absent = {OpKind.BARRIER, *lacking, *([OpKind.SEND] if world == 1 else [])}
    possible = [kind for kind in KINDS if kind not in absent]
    kinds = draw(st.lists(st.sampled_from(possible), min_size=1, max_size=2))
    if draw(st.booleans()):
        kinds += kinds[:1] * 2
    dtypes = draw(st.lists(st.sampled_from(DTYPES), min_size=1, max_size=2))  # few, so that tensors travel together
    calls = tuple([draw(_calls(kind, world, dtypes)) for kind in kinds])
    return Scene(
        world=world,
        calls=calls,
        layout=draw(st.sampled_from(LAYOUTS)),
        staging=draw(st.sampled_from([32 << 20, 32 << 20, 256, 0])),
        is_call=len(calls) == 1 and draw(st.booleans()),
        on_host=draw(st.frozensets(st.integers(0, world - 1))),
        number=draw(st.integers(0, 99)),
    )


@st.composite
def _calls(draw: st.DrawFn, kind: OpKind, world: int, dtypes: Sequence[str]) -> Call:
    structure = draw(st.sampled_from([*STRUCTURES, ""]))
    count = draw(st.integers(2, 4)) if structure else 1
    root, peer = draw(st.permutations(range(world)))[:2] if world > 1 else (0, -1)
    into = draw(st.sampled_from(_places_of(kind, structure)))
    return Call(
        kind=kind,
        dtypes=tuple(draw(st.lists(st.sampled_from(dtypes), min_size=count, max_size=count))),
        shapes=tuple([draw(_shapes(kind, world, into)) for _ in range(count)]),
        structure=structure,
        op=draw(st.sampled_from(OPS)) if kind in REDUCTIONS else None,
        root=root if kind in (*ROOTED, OpKind.SEND) else -1,
        peer=peer if kind is OpKind.SEND else -1,
        into=into,
    )


def _places_of(kind: OpKind, structure: str) -> list[str]:
    if kind is OpKind.BROADCAST:
        return ["given"]
    if kind in (OpKind.ALLREDUCE, OpKind.REDUCE, OpKind.SCAN, OpKind.EXSCAN):
        return ["in place", "made"]
    if kind is OpKind.SEND:
        return ["given", "made"]
    return ["made", "given", "in place", *([] if structure else ["one tensor"])]


@st.composite
def _shapes(draw: st.DrawFn, kind: OpKind, world: int, into: str) -> dict[tuple[int, int], Shape]:
    gives, takes = PIECES.get(kind, (False, False))
    of_one = (kind is OpKind.ALLTOALL or takes, kind is OpKind.ALLTOALL or gives)  # whether the giver, the taker counts
    places = [(a, b) for a in range(world if of_one[0] else 1) for b in range(world if of_one[1] else 1)]
    one = st.one_of(st.sampled_from(EMPTY), st.sampled_from(FULL))
    if into == "one tensor":
        return dict.fromkeys(places, draw(one))
    found = dict(zip(places, draw(st.lists(one, min_size=len(places), max_size=len(places))), strict=True))
    if kind is OpKind.ALLTOALL and into == "in place":  # what i gives j has the shape of what j gives i
        return {(a, b): found[min(a, b), max(a, b)] for a, b in places}
    return found


def values_of(call: Call, scene: Scene, at: int) -> tuple[list[Side], list[Side]]:
    """By rank what is given, and what is to be taken, in numpy."""
    given, taken = [], []
    for number, (dtype, shapes) in enumerate(zip(call.dtypes, call.shapes, strict=True)):
        make = numbers(np.random.default_rng([scene.number, at, number]), dtype)
        gives = gives_of(call.kind, scene.world, make, lambda a, b, shapes=shapes: shapes[a, b], call.root)
        takes = meaning(call.kind, gives, root=call.root, peer=call.peer, op=call.op)
        given.append([_pieces(one) for one in gives])
        taken.append([_pieces(one) for one in takes])
    return _by_rank(given), _by_rank(taken)


def _pieces(value: Any) -> Any:
    return tuple(map(np.asarray, value)) if isinstance(value, list) else None if value is None else np.asarray(value)


def _by_rank(by_tensor: Sequence[Sequence[Any]]) -> list[Side]:
    rows = [list(row) for row in zip(*by_tensor, strict=True)]
    return [None if row[0] is None else row for row in rows]


def in_order(side: Side) -> list[Any]:
    """The tensors of a side as they are in its value."""
    if side is None or type(side[0]) is not tuple:
        return list(side or ())
    return [one for row in zip(*side, strict=True) for one in row]


def arranged(side: Side, flat: Sequence[Any]) -> Side:
    """Others in the places of a side's tensors; the inverse of `in_order`."""
    if side is None or type(side[0]) is not tuple:
        return list(flat) if side is not None else None
    return [tuple(flat[at :: len(side)]) for at in range(len(side))]


def value_of(side: Side, structure: str) -> Any:
    build = STRUCTURES[structure] if structure else lambda row: row[0]
    assert side is not None
    return [build(row) for row in zip(*side, strict=True)] if type(side[0]) is tuple else build(side)
