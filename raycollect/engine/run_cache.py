"""Caches the preparation of a program's last run for the next run, as in a loop.

The cache entry belongs to the operands, as long as they are unchanged. A run on one tensor is also cached by the
tensor's layout, without its memory, for new tensors of that layout. The agreement checks that the other ranks' arrivals
are unchanged.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from raycollect.backends import arrays
from raycollect.backends.arrays import Tie
from raycollect.core.model import TENSOR, Kernel
from raycollect.engine.prepared import Prepared
from raycollect.engine.steps import Kernels, SingleKernelBundle
from raycollect.planner import Program
from raycollect.pos import Container, Store

MOST_PROGRAMS = 8
"""The number of cached programs per container."""

MOST_LAYOUTS = 256
"""The number of runs cached by layout."""


class _Holder:
    """Holds a prepared run as long as the other containers live."""

    __slots__ = ("__weakref__", "prepared", "ties")

    def __init__(self, prepared: Prepared) -> None:
        self.prepared: Prepared | None = prepared
        self.ties: list[weakref.ref[Tie]] = []

    def is_of(self, name: int, containers: Sequence[Any]) -> bool:
        """Whether the other containers are the same, for a program's cache key."""
        if len(containers) != 1 + len(self.ties):
            return False
        for container, tie in zip(containers[1:], self.ties, strict=True):
            target = tie()
            if target is None or type(container) is not Container or target is not container.memo.get(name):
                return False
        return True

    def tie_to(self, tie: Tie) -> None:
        """Releases the memory of all operands when the tied container is freed."""
        reference = weakref.ref(self)

        def forget(_: object) -> None:
            holder = reference()
            if holder is not None:
                holder.prepared = None

        self.ties.append(weakref.ref(tie, forget))


class _Layout(NamedTuple):
    """A run of one kernel on a whole tensor, without its memory."""

    prepared: Prepared  # refers to the program, so that the program's id stays unique
    bundle: SingleKernelBundle
    step: Kernels
    kernel: Kernel
    reads: bool
    writes: bool
    is_first: bool  # whether the backend prepares the kernel before the agreement


class RunCache:
    """The cached runs of one process. Any thread may call it."""

    def __init__(self) -> None:
        self._layouts: dict[tuple[Any, ...], _Layout] = {}

    def find(self, program: Program, operands: Sequence[Any], store: Store, *, is_call: bool) -> Prepared | None:
        """Finds the prepared run of a program on these operands, and takes its fusion buffer.

        `is_call`: the operands are those of a member's call, whose containers are never used again.

        Returns:
            None if no run is cached, an operand is missing, has changed or is half-written, or the buffer is in use.
        """
        if is_call:
            return self._of_layout(program, operands, store, is_call=True)
        if operands and type(operands[0]) is Container:
            name = id(program)  # the same object for the same bytes; comparing programs would take longer
            holder = operands[0].memo.get(name)
            if type(holder) is _Holder and (len(operands) == 1 or holder.is_of(name, operands)):
                prepared = holder.prepared
                if prepared is not None and prepared.program is program and prepared.holds(operands, store):
                    return prepared if prepared.buffer is None or prepared.buffer.take() else None
        prepared = self._of_layout(program, operands, store, is_call=False)
        if prepared is not None:
            _remember(prepared, operands)
        return prepared

    def keep(self, prepared: Prepared, operands: Sequence[Container], *, is_call: bool) -> None:
        """Caches a prepared run for the next run on these operands, or on a tensor of this layout."""
        if not is_call:
            _remember(prepared, operands)
        tensor, bundle = single(operands), prepared.bundles[0]
        if tensor is None or type(bundle) is not SingleKernelBundle:
            return
        (step,) = bundle.steps
        assert type(step) is Kernels  # as a direct bundle has it
        (kernel,), array = step.kernels, arrays.memory(tensor)
        sides = [side for side in (kernel.src, kernel.dst) if side is not None]
        if not _is_plain(array) or not all(_is_whole(side, array) for side in sides):
            return
        if len(self._layouts) >= MOST_LAYOUTS:
            self._layouts.clear()
        self._layouts[id(prepared.program), is_call, type(tensor), tensor.shape, tensor.dtype] = _Layout(
            prepared=replace(prepared, places=(), ranges=(), first=None, bundles=(), writes=()),
            bundle=bundle._replace(steps=(), ranges=(), owners=(), dense=(), versioned=()),
            step=replace(step, kernels=()),
            kernel=replace(kernel, src=None, dst=None),
            reads=kernel.src is not None,
            writes=kernel.dst is not None,
            is_first=prepared.first is not None,
        )

    def forget(self, group_id: str) -> None:
        """Removes the runs of a group that has ended."""
        for name, layout in tuple(self._layouts.items()):
            if layout.prepared.program.agreement.group_id == group_id:
                self._layouts.pop(name, None)

    def _of_layout(self, program: Program, operands: Sequence[Any], store: Store, *, is_call: bool) -> Prepared | None:
        """The prepared run on a tensor of a cached layout; None: no such layout, or the tensor is unsuited."""
        tensor = single(operands)
        if tensor is None:
            return None
        layout = self._layouts.get((id(program), is_call, type(tensor), tensor.shape, tensor.dtype))
        if layout is None:
            return None
        try:
            array = tensor if type(tensor) is np.ndarray else arrays.memory(tensor)
            places = (arrays.place_of(tensor),)
        except TypeError:  # it has no memory any more
            return None
        if not _is_plain(array):
            return None
        prepared, bundle, step, like, reads, writes, is_first = layout
        address = array.ctypes.data if tensor is array else tensor.data_ptr()
        spans = ((address, address + array.nbytes),)
        if store.dirty and store.is_dirty(spans):
            return None
        # Written out: `replace` takes several times as long.
        kernel = Kernel(
            kind=like.kind,
            src=array if reads else None,
            dst=array if writes else None,
            op=like.op,
            peer=like.peer,
            most=like.most,
            form=like.form,
        )
        written, owners = (spans, (arrays.owner(tensor),)) if writes else ((), ())
        versioned = (tensor,) if writes and tensor is not array and arrays.has_version(tensor) else ()
        steps = (Kernels(step.number, step.group_id, step.ranks, (kernel,)),)
        return Prepared(
            program=program,
            places=places,
            ranges=spans,
            arrival=prepared.arrival,
            message=prepared.message,
            first=kernel if is_first else None,
            messages=prepared.messages,
            bundles=(SingleKernelBundle(bundle.share, 1, steps, written, owners, written, bundle.verdicts, versioned),),
            counts=prepared.counts,
            writes=written,
        )


def _remember(prepared: Prepared, operands: Sequence[Container]) -> None:
    # The entry is in the first container, tied to the others.
    name, holder = id(prepared.program), _Holder(prepared)
    for container in operands:
        if len(container.memo) >= MOST_PROGRAMS and name not in container.memo:
            container.memo.clear()
    for container in operands[1:]:
        tie = container.memo[name] = Tie()
        holder.tie_to(tie)
    if operands:
        operands[0].memo[name] = holder


def single(operands: Sequence[Any]) -> Any:
    """The single tensor, of numpy or torch; None if there is not exactly one, or for a DTensor or another library."""
    if len(operands) != 1 or type(operands[0]) is not Container:
        return None
    (container,) = operands
    if container.structure is not TENSOR or container.placements:
        return None
    (tensor,) = container.tensors
    return tensor if type(tensor) is np.ndarray or arrays.is_plain_torch(tensor) else None


def _is_plain(array: Any) -> bool:
    return type(array) is np.ndarray and array.flags.carray and array.size > 0


def _is_whole(side: Any, array: Any) -> bool:
    return type(side) is np.ndarray and arrays.place(side) == arrays.place(array)
