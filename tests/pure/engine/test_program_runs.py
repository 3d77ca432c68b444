"""Any program, from the request to the arrays: plan, encode, decode and run on ranks in threads, against plain numpy.

Hypothesis draws the operation, the world, dtypes, uneven sizes, structures, layouts, what is in place, and what the
backend lacks; then the same collective with one thing wrong, which must be refused on all ranks and touch nothing.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raycollect.backends import arrays, folds
from raycollect.core.model import PIECES, OpKind, ReduceOp
from raycollect.errors import MismatchError, ReadOnlyError, RefusedError, TensorDirtyError, TensorFreedError
from raycollect.planner import SUBSTITUTES
from tests.pure.fleet import Fleet, contain
from tests.pure.meaning import KINDS, REDUCTIONS, ROOTED, gives_of, meaning, takers

CALM = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # the machine may be busy
MANY = settings(CALM, max_examples=150)

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
def _scenes(draw: st.DrawFn, kinds: Sequence[OpKind] = KINDS) -> Scene:
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
    if outputs == "contiguous" and (form != "tensor" or kind not in PIECES):
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
        lacking=draw(st.sampled_from([(), (kind,)])) if kind in SUBSTITUTES else (),
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
    in_pieces, out_pieces = PIECES.get(kind, (False, False))
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
def _fleet(scene: Scene) -> Iterator[Fleet]:
    fleet = Fleet(scene.world)
    ops = tuple(kind.value for kind in OpKind if kind not in scene.lacking)
    fleet.spec = replace(fleet.spec, ops=ops)
    try:
        yield fleet
    finally:
        fleet.close()


def _run(fleet: Fleet, scene: Scene, stage: Stage, keys: Any = None) -> list[Any]:
    if scene.call:
        return fleet.call(scene.kind, stage.gives, stage.takes, **scene.arguments)
    gives, takes = keys or _kept(fleet, stage)
    return fleet.run(scene.kind, gives, takes, **scene.arguments)


def _kept(fleet: Fleet, stage: Stage) -> tuple[dict[int, Any], dict[int, Any]]:
    gives = {rank: fleet.keep(rank, value) for rank, value in enumerate(stage.gives) if value is not None}
    return gives, {rank: fleet.keep(rank, value) for rank, value in stage.takes.items()}


def _flat(value: Any) -> list[Any]:
    return [np.ravel(arrays.view(tensor)) for tensor in contain(value).tensors]


def _same(found: Any, expected: Any) -> None:
    if isinstance(found, np.ndarray) and isinstance(expected, list):  # all pieces in one tensor
        found, expected = [found.ravel()], [np.concatenate([piece.ravel() for piece in expected])]
    for one, right in zip(_flat(found), _flat(expected), strict=True):
        assert one.dtype == right.dtype
        np.testing.assert_array_equal(one, right)


def _check(scene: Scene, stage: Stage, before: list[Any], outcomes: Sequence[Any]) -> None:
    """Compares what every rank then has with what is meant, and what it gave with what it was."""
    for rank, outcome in zip(scene.ranks, outcomes, strict=True):
        if outcome.error is not None:
            raise outcome.error
        reduced = scene.kind is OpKind.ALLREDUCE or (scene.kind is OpKind.REDUCE and rank == scene.root)
        made = scene.outputs == "made" and (reduced or rank in scene.takers) and rank not in stage.takes
        assert len(outcome.outputs) == made, "no scratch is given back"
        if stage.expected[rank] is not None:
            _same(outcome.outputs[0].value if made else stage.takes.get(rank, stage.gives[rank]), stage.expected[rank])
        if made:
            assert contain(outcome.outputs[0].value).structure == contain(stage.expected[rank]).structure
        if stage.gives[rank] is not None and scene.outputs != "in place" and (made or not reduced):
            _same(stage.gives[rank], before[rank])


# ---------------------------------------------------------------------------------------------- what is meant


@MANY
@given(_scenes())
def test_any_program_does_what_its_operation_means(scene: Scene) -> None:
    stage = Stage.of(scene)
    before = copy.deepcopy(stage.gives)
    with _fleet(scene) as fleet:
        _check(scene, stage, before, _run(fleet, scene, stage))
        assert fleet.dirty == [0] * scene.world


@CALM
@given(_scenes(), st.integers(2, 4))
def test_the_same_program_again_sees_what_its_operands_then_hold(scene: Scene, times: int) -> None:
    """What is remembered of a program is not what its operands held."""
    stage = Stage.of(replace(scene, call=False))
    with _fleet(scene) as fleet:
        keys = _kept(fleet, stage)
        for turn in range(times):
            fresh = Stage.of(replace(scene, seed=scene.seed + 840 * turn))  # other elements, the same sizes
            for old, new in ((stage.gives, fresh.gives), (stage.takes, fresh.takes)):
                for at in range(len(old)) if isinstance(old, list) else old:
                    if old[at] is not None:  # type: ignore[index]
                        for a, b in zip(contain(old[at]).tensors, contain(new[at]).tensors, strict=True):  # type: ignore[index]
                            a[...] = b
            again = Stage(stage.gives, stage.takes, fresh.expected)
            before = copy.deepcopy(stage.gives)
            _check(scene, again, before, _run(fleet, replace(scene, call=False), again, keys))


# ---------------------------------------------------------------------------------------------- one thing wrong


def _wrong_dtype(array: Any) -> Any:
    """Another one that can be reduced in the same way."""
    other = "uint32" if array.dtype.kind in "biu" else "float32" if array.dtype == np.float64 else "float64"
    return np.zeros(array.shape, other)


def _wrong_shape(array: Any) -> Any:
    return np.zeros(array.size + 1, array.dtype)


def _wrong_structure(array: Any) -> Any:
    return [array.copy(), array.copy()]


WRONG: dict[str, tuple[Callable[[Any], Any], type[RefusedError]]] = {
    "dtype": (_wrong_dtype, MismatchError),
    "shape": (_wrong_shape, MismatchError),
    "structure": (_wrong_structure, MismatchError),
}
_HAS_OTHER_END = (OpKind.ALLREDUCE, OpKind.REDUCE, OpKind.BROADCAST, OpKind.SEND, OpKind.REDUCESCATTER, OpKind.ALLTOALL)


def _spoil(value: Any, rank: int, wrong: Callable[[Any], Any]) -> Any:
    """The value, or the piece of it for one rank, with a wrong first tensor."""
    if isinstance(value, list):
        return [*value[:rank], wrong(value[rank]), *value[rank + 1 :]]
    return wrong(value)


def _bits(stage: Stage) -> list[bytes]:
    values = [value for value in (*stage.gives, *stage.takes.values()) if value is not None]
    return [np.ascontiguousarray(tensor).tobytes() for value in values for tensor in contain(value).tensors]


def _refused(scene: Scene, stage: Stage, cls: type[RefusedError], fleet: Fleet, keys: Any = None) -> RefusedError:
    """Runs a stage that must be refused alike on all ranks, and touch nothing."""
    before = _bits(stage)
    outcomes = _run(fleet, scene, stage, keys)
    (text,) = {str(outcome.error) for outcome in outcomes}
    error = outcomes[0].error
    assert isinstance(error, cls), text
    assert len({error.violations for error in (outcome.error for outcome in outcomes)}) == 1
    assert all(outcome.outputs == () for outcome in outcomes)
    assert _bits(stage) == before, "nothing was written"
    return error


@MANY
@given(_scenes(_HAS_OTHER_END), st.sampled_from(sorted(WRONG)), st.data())
def test_any_mismatch_is_refused_on_all_ranks_and_the_next_run_is_right(
    scene: Scene, name: str, data: st.DataObject
) -> None:
    scene = replace(scene, form="tensor", layout="plain", outputs="given", world=max(scene.world, 2))
    wrong, cls = WRONG[name]
    stage = Stage.of(scene)
    sides = [("takes", rank) for rank in stage.takes]
    sides += [("gives", rank) for rank, value in enumerate(stage.gives) if value is not None]
    side, odd = data.draw(st.sampled_from(sorted(sides)))
    value = getattr(stage, side)[odd]
    piece = data.draw(st.integers(0, scene.world - 1)) if isinstance(value, list) else 0
    spoiled = Stage(list(stage.gives), dict(stage.takes), stage.expected)
    getattr(spoiled, side)[odd] = _spoil(value, piece, wrong)
    with _fleet(scene) as fleet:
        error = _refused(scene, spoiled, cls, fleet)
        assert error.violations
        assert all(0 <= violation.rank < scene.world for violation in error.violations)
        before = copy.deepcopy(stage.gives)
        _check(scene, stage, before, _run(fleet, scene, stage))


@CALM
@given(_scenes([kind for kind in KINDS if kind is not OpKind.BARRIER]), st.sampled_from(["freed", "dirty"]), st.data())
def test_what_one_rank_can_not_give_is_refused_on_all_ranks_and_the_next_run_is_right(
    scene: Scene, how: str, data: st.DataObject
) -> None:
    scene = replace(scene, call=False, outputs="given", seed=5)  # no operand is empty
    stage = Stage.of(scene)
    odd = data.draw(st.sampled_from([rank for rank, value in enumerate(stage.gives) if value is not None]))
    with _fleet(scene) as fleet:
        keys = _kept(fleet, stage)
        ranges = [arrays.byte_range(tensor) for tensor in contain(stage.gives[odd]).tensors]
        if how == "dirty":
            fleet.stores[odd].mark_dirty(ranges, [arrays.owner(t) for t in contain(stage.gives[odd]).tensors])
        else:
            fleet.stores[odd].free([keys[0][odd]])
        cls = TensorDirtyError if how == "dirty" else TensorFreedError
        if all(lo == hi for lo, hi in ranges) and how == "dirty":
            return  # nothing of it can be half-written
        error = _refused(scene, stage, cls, fleet, keys)
        assert [(v.rank, v.ref) for v in error.violations] == [(odd, keys[0][odd].hex())]
        fleet.stores[odd].mark_written(ranges)
        before = copy.deepcopy(stage.gives)
        _check(scene, stage, before, _run(fleet, scene, stage))


@CALM
@given(_scenes([kind for kind in KINDS if kind in PIECES or kind in (OpKind.BROADCAST, OpKind.SEND)]), st.data())
def test_an_output_that_is_read_only_is_refused_on_all_ranks(scene: Scene, data: st.DataObject) -> None:
    scene = replace(scene, layout="plain", outputs="given", world=max(scene.world, 2))
    stage = Stage.of(scene)
    odd = data.draw(st.sampled_from(sorted(stage.takes)))
    frozen = contain(stage.takes[odd]).tensors
    for tensor in frozen:
        tensor.flags.writeable = False
    with _fleet(scene) as fleet:
        error = _refused(scene, stage, ReadOnlyError, fleet)
        assert {v.rank for v in error.violations} == {odd}
        for tensor in frozen:
            tensor.flags.writeable = True
        before = copy.deepcopy(stage.gives)
        _check(scene, stage, before, _run(fleet, scene, stage))


# ---------------------------------------------------------------------------------------------- other operations


@pytest.mark.parametrize(("one", "other"), list(itertools.permutations(KINDS, 2)))
def test_an_operation_against_another_is_refused_naming_both(one: OpKind, other: OpKind) -> None:
    """As where two members call different things: each runs its own half."""
    with _fleet(replace(_PLAIN, world=2)) as fleet:
        parts = [_part(kind) for kind in (one, other)]
        stages = [Stage.of(replace(_PLAIN, kind=kind, root=root, peer=1, op=op)) for kind, root, op in parts]
        before = [_bits(stage) for stage in stages]
        plans = [
            fleet.plan(
                kind,
                {rank: fleet.new_key() for rank, value in enumerate(stage.gives) if value is not None},
                {rank: fleet.new_key() for rank in stage.takes},
                root=root,
                peer=1,
                op=op,
            )
            for (kind, root, op), stage in zip(parts, stages, strict=True)
        ]
        futures = []
        for rank, (planned, stage) in enumerate(zip(plans, stages, strict=True)):
            sides = (stage.gives[rank], stage.takes.get(rank))
            given = [contain(value) for value in sides if value is not None]
            futures.append(fleet._threads.submit(fleet.run_one, planned, rank, 1, given))
        errors = [future.result().error for future in futures]
        for error in errors:
            assert isinstance(error, MismatchError)
            assert (error.violations[0].field, error.violations[0].rank) == ("op", 1)
            assert (error.violations[0].found, error.violations[0].expected) == (other.value, one.value)
            assert error.violations == errors[0].violations
        assert [_bits(stage) for stage in stages] == before
        fleet.seq = 1
        fleet.works_on()


_PLAIN = Scene(
    kind=OpKind.BARRIER,
    world=2,
    root=-1,
    peer=-1,
    op=None,
    dtype="float64",
    form="tensor",
    layout="plain",
    outputs="given",
    lacking=(),
    call=True,
    seed=3,
)


def _part(kind: OpKind) -> tuple[OpKind, int, ReduceOp | None]:
    """The operation with the root and reduce op that it needs."""
    return kind, 0 if kind in ROOTED or kind is OpKind.SEND else -1, ReduceOp.SUM if kind in REDUCTIONS else None
