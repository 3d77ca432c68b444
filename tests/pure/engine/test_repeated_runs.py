"""Programs that are run again on the same memory do what their first run does."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from raycollect.backends import arrays
from raycollect.core.model import OpKind
from raycollect.errors import MismatchError, ReadOnlyError, TensorDirtyError
from raycollect.pos import tensors
from tests.pure.engine.repeated_loops import Loop, MakeLoop, Rebound, array, fields_of, loop, same

__all__ = ["loop"]  # a fixture


KINDS = (OpKind.ALLREDUCE, OpKind.REDUCE, OpKind.BROADCAST, OpKind.SEND)
SIZES = (1, 7, (64 << 10) + 1, (1 << 20) + 5)
"""In bytes: staged, in place where the arrays lie in shared memory, and more than one chunk."""


def _arguments(kind: OpKind, world: int) -> dict[str, Any]:
    if kind is OpKind.SEND:
        return {"root": 1, "peer": 0}
    return {} if kind is OpKind.ALLREDUCE else {"root": world - 1}


# ---------------------------------------------------------------------------------------------- results


@pytest.mark.parametrize("make", [np.zeros, tensors.zeros], ids=["plain", "shared"])
@pytest.mark.parametrize(
    ("kind", "world"), [(kind, world) for kind in KINDS for world in ((2,) if kind is OpKind.SEND else (1, 3))]
)
def test_every_run_gives_what_is_meant(loop: MakeLoop, kind: OpKind, world: int, make: Callable[..., Any]) -> None:
    for nbytes, backend in itertools.product(SIZES, ("shm", "local")):
        if backend == "shm" or nbytes < 100:
            one = loop(backend, [make(-(-nbytes // 8)) for _ in range(world)], kind, **_arguments(kind, world))
            one.must(5)
            assert one.repeats == 4 * world, "all but the first"
            one.close()


# ---------------------------------------------------------------------------------------------- what changes


def _dirty(one: Loop) -> None:
    tensor = one.values[0]
    one.team.stores[0].mark_dirty([arrays.byte_range(tensor)], [tensor])


Change = Callable[[Loop], object]

CHANGES: dict[str, tuple[Callable[[], Any], Change, Change, type | None]] = {
    "resized": (
        lambda: np.zeros(3),
        lambda one: one.values[0].resize(40, refcheck=False),
        lambda one: one.values[0].resize(3, refcheck=False),
        MismatchError,
    ),
    "replaced": (
        lambda: Rebound(np.zeros(3)),
        lambda one: setattr(one.values[0], "array", np.ones(3)),
        lambda one: setattr(one.values[0], "array", np.ones(3)),
        None,
    ),
    "of another type": (
        lambda: Rebound(np.zeros(3)),
        lambda one: setattr(one.values[0], "array", np.ones(3, np.float32)),
        lambda one: setattr(one.values[0], "array", np.ones(3)),
        MismatchError,
    ),
    "read-only": (
        lambda: np.zeros(3),
        lambda one: one.values[0].setflags(write=False),
        lambda one: one.values[0].setflags(write=True),
        ReadOnlyError,
    ),
    "dirty": (lambda: np.zeros(3), _dirty, Loop.clean, TensorDirtyError),
    "without memory": (
        lambda: pytest.importorskip("torch").zeros(3).double(),
        lambda one: one.values[0].untyped_storage().resize_(0),
        lambda one: (one.values[0].untyped_storage().resize_(24), one.values[0].zero_()),
        Exception,
    ),
}
"""What happens to rank 0's tensor -> how it is made, what is done, what undoes it, and what all ranks then hear."""


@pytest.mark.parametrize("forgotten", [False, True])
@pytest.mark.parametrize(("world", "backend"), [(1, "shm"), (3, "local"), (3, "shm")])
@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_on_one_rank_is_noticed_by_all(
    loop: MakeLoop, name: str, world: int, backend: str, forgotten: bool
) -> None:
    """This holds also where other plans on these tensors have taken the place of what was remembered with them."""
    make, change, undo, error = CHANGES[name]
    if error is MismatchError and world == 1:
        error = None

    def scenario(loop: MakeLoop) -> Any:
        one, trace = loop(backend, [make(), *(np.zeros(3) for _ in range(world - 1))]), []
        for step in (None, None, None, change, undo, None, None):
            if forgotten and step is change:
                for script in one.team.scripts:
                    script.values[0].memo.clear()
            if step is not None:
                step(one)
            trace.append(([fields_of(error) for error in one.run()], [str(array(value)) for value in one.values[1:]]))
        one.close()
        return trace

    trace = same(loop, scenario)
    failed = [[found[0] if found else None for found in errors] for errors, _ in trace]
    assert failed[:3] + failed[4:] == [[None] * world] * 6
    assert all((found is None) if error is None else issubclass(found, error) for found in failed[3])
