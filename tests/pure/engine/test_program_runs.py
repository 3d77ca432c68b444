"""Any program, from the request to the arrays: plan, encode, decode and run on ranks in threads, against plain numpy.

Hypothesis draws the operation, the world, dtypes, uneven sizes, structures, layouts, what is in place, and what the
backend lacks; then the same collective with one thing wrong, which must be refused on all ranks and touch nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from raycollect.backends import arrays
from raycollect.core.model import OpKind
from raycollect.core.operations import PIECEWISE
from raycollect.errors import MismatchError, RefusedError, TensorDirtyError, TensorFreedError
from tests.pure.engine.program_scenes import Scene, Stage, check, fleet_of, kept_by, run_on, scenes
from tests.pure.fleet import Fleet, contain, launched
from tests.pure.meaning import KINDS
from tests.support.values import replace

LEARNED = (OpKind.ALLGATHER, OpKind.GATHER, OpKind.SCATTER, OpKind.ALLTOALL, OpKind.SEND)
"""The operations whose outputs take their shape from other ranks: these meet twice where an output is made."""

MANY = settings(max_examples=150)


# ---------------------------------------------------------------------------------------------- what is meant


@MANY
@given(scenes())
def test_any_program_does_what_its_operation_means(scene: Scene) -> None:
    stage = Stage.of(scene)
    before = copy.deepcopy(stage.gives)
    with fleet_of(scene) as fleet:
        seen: list[int] = []
        for rank, inner in enumerate(fleet.communicators):
            fleet.communicators[rank] = launched(inner, lambda kernel: seen.append(kernel.most))
        check(scene, stage, before, run_on(fleet, scene, stage))
        assert fleet.dirty == [0] * scene.world
        if scene.lacking or scene.world == 1:
            return
        is_learned = scene.outputs == "made" and scene.kind in LEARNED
        assert {fleet.story(rank).count("check") for rank in scene.ranks} == {1 + is_learned}
        if scene.kind in PIECEWISE and scene.form == "tensor":
            given = [piece for give in stage.gives for piece in (give if isinstance(give, list) else [give])]
            most = max(piece.size for piece in given if piece is not None)
            assert set(seen) == {most}, "also where a rank's own pieces are smaller"


@given(scenes(), st.integers(2, 4))
def test_the_same_program_again_sees_what_its_operands_then_hold(scene: Scene, times: int) -> None:
    """What is remembered of a program is not what its operands held."""
    stage = Stage.of(replace(scene, call=False))
    with fleet_of(scene) as fleet:
        keys = kept_by(fleet, stage)
        for turn in range(times):
            fresh = Stage.of(replace(scene, seed=scene.seed + 840 * turn))  # other elements, the same sizes
            for old, new in ((stage.gives, fresh.gives), (stage.takes, fresh.takes)):
                for at in range(len(old)) if isinstance(old, list) else old:
                    if old[at] is not None:  # type: ignore[index]
                        for a, b in zip(contain(old[at]).tensors, contain(new[at]).tensors, strict=True):  # type: ignore[index]
                            a[...] = b
            again = Stage(stage.gives, stage.takes, fresh.expected)
            before = copy.deepcopy(stage.gives)
            check(scene, again, before, run_on(fleet, replace(scene, call=False), again, keys))


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
    outcomes = run_on(fleet, scene, stage, keys)
    (text,) = {str(outcome.error) for outcome in outcomes}
    error = outcomes[0].error
    assert isinstance(error, cls), text
    assert len({error.violations for error in (outcome.error for outcome in outcomes)}) == 1
    assert all(outcome.outputs == () for outcome in outcomes)
    assert _bits(stage) == before, "nothing was written"
    return error


@MANY
@given(scenes(_HAS_OTHER_END), st.sampled_from(sorted(WRONG)), st.data())
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
    with fleet_of(scene) as fleet:
        error = _refused(scene, spoiled, cls, fleet)
        assert error.violations
        assert all(0 <= violation.rank < scene.world for violation in error.violations)
        before = copy.deepcopy(stage.gives)
        check(scene, stage, before, run_on(fleet, scene, stage))


@given(scenes([kind for kind in KINDS if kind is not OpKind.BARRIER]), st.sampled_from(["freed", "dirty"]), st.data())
def test_what_one_rank_can_not_give_is_refused_on_all_ranks_and_the_next_run_is_right(
    scene: Scene, how: str, data: st.DataObject
) -> None:
    scene = replace(scene, call=False, outputs="given", seed=5)  # no operand is empty
    stage = Stage.of(scene)
    odd = data.draw(st.sampled_from([rank for rank, value in enumerate(stage.gives) if value is not None]))
    with fleet_of(scene) as fleet:
        keys = kept_by(fleet, stage)
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
        check(scene, stage, before, run_on(fleet, scene, stage))
