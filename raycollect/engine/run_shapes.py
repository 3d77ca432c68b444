"""What the last runs on single tensors found out, without their memory: it serves fresh tensors of the same shape.

Programs of iterations get other tensors each time, which are like those before. All but the addresses follows from
the program, the shape, and what the other ranks bring; that they bring the same again is seen at the agreement, as
with `run_cache`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import numpy as np

from raycollect.backends import arrays
from raycollect.backends.arrays import Array
from raycollect.core.model import TENSOR, Kernel
from raycollect.engine.kernel_schedule import KernelSchedule, LaunchStep, ScheduledBundle
from raycollect.engine.run_cache import RunCache
from raycollect.planner import Program
from raycollect.pos import Container, Store

_MOST = 256  # how many runs are known

_Name = tuple[int, bool, type, Any, Any]  # a program, who calls, and what its run depends on of a tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class _ShapedRun:
    """One kernel of a whole tensor, in the launch of the agreement."""

    program: Program  # so that its id is no other's
    arrival: bytes
    blobs: tuple[bytes, ...]
    bundle: ScheduledBundle  # its moves and memory are left out
    move: LaunchStep  # its kernel is left out
    kernel: Kernel  # its arrays are left out
    reads: bool
    writes: bool
    is_staged: bool  # whether the backend prepared the kernel before the agreement


class RunShapes:
    """The shapes of a process. Any thread may call it."""

    def __init__(self) -> None:
        self._known: dict[_Name, _ShapedRun] = {}

    def remember(self, run: RunCache, containers: Sequence[Container], *, given: bool) -> None:
        """Remembers a run without its memory, if it is of one contiguous tensor, by one kernel that is not packed.

        `given`: a member's call gave the operands, which the other ranks hear of.
        """
        tensor = single(containers)
        bundles = run.schedule.bundles
        if tensor is None or len(bundles) != 1 or len(bundles[0].moves) != 1 or run.block is not None:
            return
        (bundle,) = bundles
        (move,) = bundle.moves
        if len(move.kernels) != 1 or move != LaunchStep(move.number, move.group_id, move.ranks, move.kernels):
            return
        (kernel,), array = move.kernels, arrays.memory(tensor)
        sides = [side for side in (kernel.src, kernel.dst) if side is not None]
        if not _is_plain(array) or not all(_is_whole(side, array) for side in sides):
            return
        if len(self._known) >= _MOST:
            self._known.clear()
        self._known[_name(run.program, given, tensor)] = _ShapedRun(
            program=run.program,
            arrival=run.arrival,
            blobs=run.blobs,
            bundle=bundle._replace(moves=(), ranges=(), owners=(), dense=(), versioned=()),
            move=move._replace(kernels=()),
            kernel=replace(kernel, src=None, dst=None),
            reads=kernel.src is not None,
            writes=kernel.dst is not None,
            is_staged=run.first is not None,
        )

    def forget(self, group_id: str) -> None:
        """Forgets the runs of a group that has ended."""
        for name, run in tuple(self._known.items()):
            if run.program.agreement.group_id == group_id:
                self._known.pop(name, None)

    def recall(
        self, program: Program, containers: Sequence[Container], store: Store, *, given: bool
    ) -> RunCache | None:
        """What a run on these operands would find out; None where it is not known, or they can't run so."""
        tensor = single(containers)
        known = None if tensor is None else self._known.get(_name(program, given, tensor))
        if known is None:
            return None
        try:
            array, places = arrays.memory(tensor), (arrays.place_of(tensor),)
        except TypeError:  # it has no memory any more
            return None
        if not _is_plain(array):
            return None
        address = array.ctypes.data if tensor is array else tensor.data_ptr()
        span = address, address + array.nbytes
        if store.is_dirty([span]):
            return None
        # Written out: `replace` takes several times as long.
        like, step, bundle = known.kernel, known.move, known.bundle
        kernel = Kernel(
            kind=like.kind,
            src=array if known.reads else None,
            dst=array if known.writes else None,
            op=like.op,
            peer=like.peer,
            most=like.most,
        )
        moves = (LaunchStep(step.number, step.group_id, step.ranks, (kernel,)),)
        spans, owners = ((span,), (arrays.owner(tensor),)) if known.writes else ((), ())
        versioned = (tensor,) if known.writes and arrays.has_version(tensor) else ()
        bundle = ScheduledBundle(bundle.share, bundle.tasks, moves, spans, owners, spans, bundle.agreed, versioned)
        return RunCache(
            program=program,
            places=places,
            ranges=[span],
            arrival=known.arrival,
            first=kernel if known.is_staged else None,
            blobs=known.blobs,
            schedule=KernelSchedule((bundle,), bundle.ranges),
            block=None,
        )


def single(containers: Sequence[Container]) -> Any:
    """The one tensor, of numpy or torch; None where there are several, a DTensor, or one of another library."""
    if len(containers) != 1 or containers[0].structure is not TENSOR or containers[0].placements:
        return None
    (tensor,) = containers[0].tensors
    return tensor if type(tensor) is np.ndarray or arrays.is_plain_torch(tensor) else None


def _name(program: Program, given: bool, tensor: Any) -> _Name:
    return id(program), given, type(tensor), tensor.shape, tensor.dtype


def _is_plain(array: object) -> TypeGuard[Array]:
    return type(array) is np.ndarray and array.flags.carray and array.size > 0


def _is_whole(side: Any, array: Any) -> bool:
    return type(side) is np.ndarray and arrays.place(side) == arrays.place(array)
