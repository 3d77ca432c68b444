"""What a run's preparation and agreement found out, kept for the next run of the program, as in a loop.

It is kept with the operands, as long as they are unchanged. Of a run on one tensor all but the addresses is kept
without its memory, too: it serves fresh tensors of the same shape, as iterations have them. That the other ranks bring
the same again is seen at the agreement.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from raycollect.backends import arrays
from raycollect.backends.arrays import Tie
from raycollect.core.model import TENSOR, Kernel
from raycollect.engine.fusion_buffer import FusionBuffer
from raycollect.engine.kernel_schedule import KernelSchedule, LaunchStep, ScheduledBundle
from raycollect.planner import Program
from raycollect.pos import Container, Range, Store

_REMEMBERED = 8  # how many programs a container remembers
_MOST_SHAPES = 256  # how many runs are known by shape


class _Holder:
    """Keeps what was found, until one of the other containers is gone."""

    __slots__ = ("__weakref__", "prepared", "ties")

    def __init__(self, prepared: RunCache) -> None:
        self.prepared: RunCache | None = prepared
        self.ties: list[weakref.ref[Tie]] = []

    def is_of(self, name: int, containers: Sequence[Container]) -> bool:
        if len(containers) != 1 + len(self.ties):
            return False
        for at, tie in enumerate(self.ties, 1):
            found = tie()
            if found is None or found is not containers[at].memo.get(name):
                return False
        return True

    def tie_to(self, tie: Tie) -> None:
        """Lets go of the memory of all operands when one of them is gone."""
        known = weakref.ref(self)

        def forget(_: object) -> None:
            holder = known()
            if holder is not None:
                holder.prepared = None

        self.ties.append(weakref.ref(tie, forget))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCache:
    """The results of one program's last run, valid as long as its operands are unchanged.

    It keeps their memory but none of the containers, so that these can go.
    """

    program: Program
    places: tuple[Any, ...]  # `arrays.place` of each tensor
    ranges: list[Range]  # addresses of all tensors
    arrival: bytes  # that this participant brings
    first: Kernel | None  # that the backend may prepare before the agreement
    blobs: tuple[bytes, ...]  # that all brought
    schedule: KernelSchedule  # that followed from them
    block: FusionBuffer | None
    # All that it does, where that is one kernel on the operands themselves
    move: LaunchStep | None = field(init=False, compare=False)

    def __post_init__(self) -> None:
        move = None
        if self.block is None and len(self.schedule.bundles) == 1 and len(self.schedule.bundles[0].moves) == 1:
            (one,) = self.schedule.bundles[0].moves
            move = one if len(one.kernels) == 1 and one == LaunchStep(*one[:4]) else None
        object.__setattr__(self, "move", move)

    @staticmethod
    def recall(program: Program, containers: Sequence[Container], store: Store) -> RunCache | None:
        """Finds what the last run of a program found out, and takes its fusion buffer.

        Returns:
            None where there was none, an operand has changed, or the buffer is in use.
        """
        known = RunCache.last(program, containers)
        if known is None or not known.holds(containers, store):
            return None
        return known if known.block is None or known.block.take() else None

    @staticmethod
    def last(program: Program, containers: Sequence[Container]) -> RunCache | None:
        """Returns the cache of a program's last run on these containers, even if they have changed since."""
        name = id(program)  # the same object for the same bytes; comparing programs would take longer
        holder = containers[0].memo.get(name) if containers else None
        if type(holder) is not _Holder:
            return None
        known = holder.prepared
        if known is None or known.program is not program or not holder.is_of(name, containers):
            return None
        return known

    def holds(self, containers: Sequence[Container], store: Store) -> bool:
        """Whether the operands, which are in these containers, are unchanged and not half-written."""
        places = iter(self.places)
        try:
            for one in containers:
                for tensor in one.tensors:
                    if arrays.place_of(tensor) != next(places, None):
                        return False
        except TypeError:  # a tensor has no memory any more
            return False
        return not (store.dirty and store.is_dirty(self.ranges))

    def remember(self, containers: Sequence[Container]) -> None:
        """Remembers it with the first container, tied to the others."""
        name, holder = id(self.program), _Holder(self)
        for container in containers:
            if len(container.memo) >= _REMEMBERED and name not in container.memo:
                container.memo.clear()
        for container in containers[1:]:
            tie = container.memo[name] = Tie()
            holder.tie_to(tie)
        if containers:
            containers[0].memo[name] = holder


class _ShapedRun(NamedTuple):
    """A run of one kernel on a whole tensor; the arrays, and all that the others say of memory, are left out."""

    run: RunCache  # which has the program, so that its id is no other's
    bundle: ScheduledBundle
    move: LaunchStep
    kernel: Kernel
    reads: bool
    writes: bool
    is_first: bool  # whether the backend prepared the kernel before the agreement


class RunShapes:
    """What is known of single tensors by their shapes, in one process. Any thread may call it."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], _ShapedRun] = {}

    def remember(self, run: RunCache, containers: Sequence[Container], *, given: bool) -> None:
        """Remembers a run without its memory, if it is one kernel on one contiguous tensor.

        `given`: a member's call gave the operands, which the other ranks hear of.
        """
        tensor, move = single(containers), run.move
        if tensor is None or move is None:
            return
        (bundle,), (kernel,), array = run.schedule.bundles, move.kernels, arrays.memory(tensor)
        sides = [side for side in (kernel.src, kernel.dst) if side is not None]
        if not _is_plain(array) or not all(_is_whole(side, array) for side in sides):
            return
        if len(self._known) >= _MOST_SHAPES:
            self._known.clear()
        self._known[id(run.program), given, type(tensor), tensor.shape, tensor.dtype] = _ShapedRun(
            run=replace(run, places=(), ranges=[], first=None, schedule=KernelSchedule((), ())),
            bundle=bundle._replace(moves=(), ranges=(), owners=(), dense=(), versioned=()),
            move=move._replace(kernels=()),
            kernel=replace(kernel, src=None, dst=None),
            reads=kernel.src is not None,
            writes=kernel.dst is not None,
            is_first=run.first is not None,
        )

    def forget(self, group_id: str) -> None:
        """Forgets the runs of a group that has ended."""
        for name, known in tuple(self._known.items()):
            if known.run.program.agreement.group_id == group_id:
                self._known.pop(name, None)

    def recall(
        self, program: Program, containers: Sequence[Container], store: Store, *, given: bool
    ) -> RunCache | None:
        """What a run on these operands would find out; None where it is not known, or they can't run so."""
        tensor = single(containers)
        if tensor is None:
            return None
        found = self._known.get((id(program), given, type(tensor), tensor.shape, tensor.dtype))
        if found is None:
            return None
        try:
            array = tensor if type(tensor) is np.ndarray else arrays.memory(tensor)
            places = (arrays.place_of(tensor),)
        except TypeError:  # it has no memory any more
            return None
        if not _is_plain(array):
            return None
        known, bundle, step, like = found.run, found.bundle, found.move, found.kernel
        address = array.ctypes.data if tensor is array else tensor.data_ptr()
        spans = [(address, address + array.nbytes)]
        if store.is_dirty(spans):
            return None
        # Written out: `replace` takes several times as long.
        kernel = Kernel(
            kind=like.kind,
            src=array if found.reads else None,
            dst=array if found.writes else None,
            op=like.op,
            peer=like.peer,
            most=like.most,
            form=like.form,
        )
        moves = (LaunchStep(step.number, step.group_id, step.ranks, (kernel,)),)
        written, owners = (spans, (arrays.owner(tensor),)) if found.writes else ((), ())
        versioned = (tensor,) if found.writes and tensor is not array and arrays.has_version(tensor) else ()
        bundle = ScheduledBundle(bundle.share, 1, moves, written, owners, written, bundle.agreed, versioned)
        return RunCache(
            program=program,
            places=places,
            ranges=spans,
            arrival=known.arrival,
            first=kernel if found.is_first else None,
            blobs=known.blobs,
            schedule=KernelSchedule((bundle,), written),
            block=None,
        )


def places_of(containers: Sequence[Container]) -> tuple[Any, ...]:
    """Where and how all tensors lie; raises TypeError where one has no memory any more."""
    found: list[Any] = []
    for one in containers:
        found += map(arrays.place_of, one.tensors)
    return tuple(found)


def single(containers: Sequence[Container]) -> Any:
    """The one tensor, of numpy or torch; None where there are several, a DTensor, or one of another library."""
    if len(containers) != 1 or containers[0].structure is not TENSOR or containers[0].placements:
        return None
    (tensor,) = containers[0].tensors
    return tensor if type(tensor) is np.ndarray or arrays.is_plain_torch(tensor) else None


def _is_plain(array: Any) -> bool:
    return type(array) is np.ndarray and array.flags.carray and array.size > 0


def _is_whole(side: Any, array: Any) -> bool:
    return type(side) is np.ndarray and arrays.place(side) == arrays.place(array)
