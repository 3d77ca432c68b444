"""One collective of any kind, by chance, on ranks in threads, and what it has to do by plain numpy."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

from raycollect.backends import arrays, folds
from raycollect.core.model import OpKind, ReduceOp
from raycollect.core.operations import PIECES, PIECEWISE
from tests.pure.fleet import Fleet, contain
from tests.pure.meaning import KINDS, REDUCTIONS, ROOTED, gives_of, meaning, takers, takes_in_place
from tests.pure.planner.requests import COLLECTIVE_SUBSTITUTES
from tests.support.values import replace

DTYPES = ("int8", "uint16", "int64", "float16", "float32", "float64", "bool", "complex64", "bfloat16", "float8_e5m2")
LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda array: array,
    "every other": lambda array: _copied_to(np.zeros(2 * array.size, array.dtype)[::2], array),
    "reversed": lambda array: _copied_to(np.zeros_like(array)[::-1], array),
    "square": lambda array: array.reshape(1, -1, 1),
}
FORMS: dict[str, tuple[int, Callable[[Sequence[Any]], Any]]] = {
    "tensor": (1, lambda tensors: tensors[0]),
    "list": (2, list),
    "nested": (3, lambda tensors: {"a": tensors[0], 7: (tensors[1], [tensors[2]])}),
}


def _copied_to(target: Any, array: Any) -> Any:
    target[...] = array
    return target


def _ops(dtype: str) -> list[ReduceOp]:
    return [op for op in ReduceOp if folds.refusal_reason(op, dtype) is None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """One collective.

    Attributes:
        kind: The operation.
        world: The number of ranks.
        root: The root, or the source of a send.
        peer: The destination of a send.
        op: The reduce op.
        dtype: Of the first tensor; the others are float64.
        form: How many tensors an operand holds, and how; a key of `FORMS`.
        layout: How the tensors that are given lie in memory; a key of `LAYOUTS`.
        outputs: ``"made"``, ``"given"``, ``"contiguous"`` (one tensor for all pieces) or ``"in place"``.
        lacking: The operations that the backend lacks.
        call: Whether the operands are given with the program.
        seed: Of sizes and elements.
    """

    kind: OpKind
    world: int
    root: int
    peer: int
    op: ReduceOp | None
    dtype: str
    form: str
    layout: str
    outputs: str
    lacking: tuple[OpKind, ...]
    call: bool
    seed: int

    @property
    def arguments(self) -> dict[str, Any]:
        return {"root": self.root, "peer": self.peer, "op": self.op, "inplace": self.outputs != "made"}

    @property
    def takers(self) -> list[int]:
        return takers(self.kind, self.world, self.root, self.peer)

    @property
    def ranks(self) -> list[int]:
        return sorted((self.root, self.peer)) if self.kind is OpKind.SEND else list(range(self.world))

    def size(self, giver: int, taker: int) -> int:
        """How many elements; equal ones where all pieces are to be one tensor."""
        if self.outputs == "contiguous" or (self.outputs == "in place" and self.kind is OpKind.ALLTOALL):
            return self.seed % 5
        return (self.seed + 3 * giver + 5 * taker) % 8

    def gives(self) -> list[list[Any]]:
        """What each rank gives: by tensor of the operand, then by rank."""
        count, _ = FORMS[self.form]
        rng = np.random.default_rng(self.seed)
        dtypes = (self.dtype, *["float64"] * (count - 1))
        lay = LAYOUTS[self.layout]
        return [
            gives_of(self.kind, self.world, lambda n, d=d: lay(_array(rng, n, d)), self.size, self.root) for d in dtypes
        ]


def _array(rng: np.random.Generator, size: int, dtype: str) -> Any:
    values = rng.integers(0, 4, size)
    return (values % 2 if dtype == "bool" else values).astype(getattr(ml_dtypes, dtype, dtype))


@st.composite
def scenes(draw: st.DrawFn, kinds: Sequence[OpKind] = KINDS) -> Scene:
    kind = draw(st.sampled_from(kinds))
    world = draw(st.integers(2 if kind is OpKind.SEND else 1, 5))
    root, peer = -1, -1
    if kind is OpKind.SEND:
        root, peer = draw(st.permutations(range(world)))[:2]
    elif kind in ROOTED:
        root = draw(st.integers(0, world - 1))
    form = draw(st.sampled_from(sorted(FORMS)))
    dtype = draw(st.sampled_from(DTYPES))
    ops = [op for op in _ops(dtype) if form == "tensor" or op in _ops("float64")]
    outputs, layout = draw(st.sampled_from(["made", "given", "contiguous", "in place"])), "plain"
    if outputs == "contiguous" and (form != "tensor" or kind not in PIECEWISE):
        outputs = "given"
    if outputs in ("made", "given"):
        layout = draw(st.sampled_from(sorted(LAYOUTS)))
    call = draw(st.booleans()) and outputs != "made"
    return Scene(
        kind=kind,
        world=world,
        root=root,
        peer=peer,
        op=draw(st.sampled_from(ops)) if kind in REDUCTIONS else None,
        dtype=dtype,
        form=form,
        layout=layout,
        outputs=outputs,
        lacking=draw(st.sampled_from([(), (kind,)])) if kind in COLLECTIVE_SUBSTITUTES else (),
        call=call,
        seed=draw(st.integers(0, 200)),
    )


def _built(form: str, tensors: Sequence[Any]) -> Any:
    """Puts one value, or pieces, together of those of each tensor."""
    build = FORMS[form][1]
    if tensors[0] is None:
        return None
    if isinstance(tensors[0], list):
        return [build(piece) for piece in zip(*tensors, strict=True)]
    return build(tensors)


def _zeros(scene: Scene, expected: Any) -> Any:
    """An output; pieces are one contiguous tensor where the scene says so."""
    if scene.outputs == "contiguous" and isinstance(expected, list):
        return np.zeros((len(expected) * expected[0].size,), expected[0].dtype)
    tensors = [np.zeros_like(tensor) for tensor in contain(expected).tensors]
    return contain(expected).structure.build(tensors)


@dataclass(frozen=True, slots=True)
class Stage:
    """The operands of a scene, by rank, and what shall come of them."""

    gives: list[Any]
    takes: dict[int, Any]
    expected: list[Any]

    @classmethod
    def of(cls, scene: Scene) -> Stage:
        by_tensor = scene.gives()
        arguments = {"root": scene.root, "peer": scene.peer, "op": scene.op}
        meant = [meaning(scene.kind, copy.deepcopy(values), **arguments) for values in by_tensor]
        ranks = range(scene.world)
        gives = [_built(scene.form, [values[rank] for values in by_tensor]) for rank in ranks]
        expected = [_built(scene.form, [values[rank] for values in meant]) for rank in ranks]
        if scene.outputs == "made" and scene.kind is not OpKind.BROADCAST:
            return cls(gives, {}, expected)
        takes = {rank: _zeros(scene, expected[rank]) for rank in scene.takers}
        if scene.outputs == "in place":
            _put_in_place(scene.kind, gives, takes)
        return cls(gives, takes, expected)


def _put_in_place(kind: OpKind, gives: list[Any], takes: dict[int, Any]) -> None:
    """Makes each rank's own piece one memory at both ends."""
    in_pieces, out_pieces = PIECES[kind]
    for rank, take in takes.items():
        if in_pieces and out_pieces:
            takes[rank] = gives[rank]
        elif out_pieces:
            for own, given in zip(contain(take[rank]).tensors, contain(gives[rank]).tensors, strict=True):
                own[...] = given
            gives[rank] = take[rank]
        elif in_pieces and gives[rank] is not None:
            takes[rank] = gives[rank][rank]


@contextmanager
def fleet_of(scene: Scene) -> Iterator[Fleet]:
    fleet = Fleet(scene.world)
    ops = tuple(kind.value for kind in OpKind if kind not in scene.lacking)
    fleet.spec = replace(fleet.spec, ops=ops)
    try:
        yield fleet
    finally:
        fleet.close()


def run_on(fleet: Fleet, scene: Scene, stage: Stage, keys: Any = None) -> list[Any]:
    if scene.call:
        return fleet.call(scene.kind, stage.gives, stage.takes, **scene.arguments)
    gives, takes = keys or kept_by(fleet, stage)
    return fleet.run(scene.kind, gives, takes, **scene.arguments)


def kept_by(fleet: Fleet, stage: Stage) -> tuple[dict[int, Any], dict[int, Any]]:
    gives = {rank: fleet.keep(rank, value) for rank, value in enumerate(stage.gives) if value is not None}
    return gives, {rank: fleet.keep(rank, value) for rank, value in stage.takes.items()}


def _flat(value: Any) -> list[Any]:
    return [np.ravel(arrays.view(tensor)) for tensor in contain(value).tensors]


def _same(actual: Any, expected: Any) -> None:
    if isinstance(actual, np.ndarray) and isinstance(expected, list):  # all pieces in one tensor
        actual, expected = [actual.ravel()], [np.concatenate([piece.ravel() for piece in expected])]
    for left, right in zip(_flat(actual), _flat(expected), strict=True):
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(left, right)


def check(scene: Scene, stage: Stage, before: list[Any], outcomes: Sequence[Any]) -> None:
    """Compares what every rank then has with what is meant, and what it gave with what it was."""
    for rank, outcome in zip(scene.ranks, outcomes, strict=True):
        if outcome.error is not None:
            raise outcome.error
        reduced = takes_in_place(scene.kind, rank, scene.root)
        has_output = scene.outputs == "made" and (reduced or rank in scene.takers) and rank not in stage.takes
        assert len(outcome.outputs) == has_output, "no scratch is given back"
        if stage.expected[rank] is not None:
            _same(
                outcome.outputs[0].value if has_output else stage.takes.get(rank, stage.gives[rank]),
                stage.expected[rank],
            )
        if has_output:
            assert contain(outcome.outputs[0].value).structure == contain(stage.expected[rank]).structure
        if stage.gives[rank] is not None and scene.outputs != "in place" and (has_output or not reduced):
            _same(stage.gives[rank], before[rank])
