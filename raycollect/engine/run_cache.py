"""Finds what the last run of a program has prepared, for the next one, as in a loop.

It is kept with the operands, as long as they are unchanged. Of a run on one tensor all but the memory is kept by the
tensor's layout, too: it serves fresh tensors of that layout, as iterations have them. That the other ranks bring the
same as last time is seen at the agreement.
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
from raycollect.engine.steps import Direct, Kernels
from raycollect.planner import Program
from raycollect.pos import Container, Store

MOST_PROGRAMS = 8
"""How many programs a container remembers."""

MOST_LAYOUTS = 256
"""How many runs are known by layout."""


class _Holder:
    """Keeps what was prepared, until one of the other containers is gone."""

    __slots__ = ("__weakref__", "prepared", "ties")

    def __init__(self, prepared: Prepared) -> None:
        self.prepared: Prepared | None = prepared
        self.ties: list[weakref.ref[Tie]] = []

    def is_of(self, name: int, containers: Sequence[Any]) -> bool:
        """Whether these are the containers, after the first."""
        if len(containers) != 1 + len(self.ties):
            return False
        for one, tie in zip(containers[1:], self.ties, strict=True):
            found = tie()
            if found is None or type(one) is not Container or found is not one.memo.get(name):
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


class _Layout(NamedTuple):
    """A run of one kernel on a whole tensor, without its memory."""

    prepared: Prepared  # which has the program, so that its id is no other's
    bundle: Direct
    step: Kernels
    kernel: Kernel
    reads: bool
    writes: bool
    is_first: bool  # whether the backend prepares the kernel before the agreement


class RunCache:
    """What the last runs in one process have prepared. Any thread may call it."""

    def __init__(self) -> None:
        self._layouts: dict[tuple[Any, ...], _Layout] = {}

    def find(self, program: Program, operands: Sequence[Any], store: Store, *, is_call: bool) -> Prepared | None:
        """Returns what a run of a program on these operands needs, and takes its fusion buffer.

        `is_call`: a member's call gave the operands, so that nothing finds their containers again.

        Returns:
            None where there was no such run, an operand is missing, has changed or is half-written, or the buffer is in
            use.
        """
        if is_call:
            return self._of_layout(program, operands, store, is_call=True)
        if operands and type(operands[0]) is Container:
            name = id(program)  # the same object for the same bytes; comparing programs would take longer
            holder = operands[0].memo.get(name)
            if type(holder) is _Holder and (len(operands) == 1 or holder.is_of(name, operands)):
                known = holder.prepared
                if known is not None and known.program is program and known.holds(operands, store):
                    return known if known.buffer is None or known.buffer.take() else None
        found = self._of_layout(program, operands, store, is_call=False)
        if found is not None:
            _remember(found, operands)
        return found

    def keep(self, prepared: Prepared, operands: Sequence[Container], *, is_call: bool) -> None:
        """Keeps what a run has prepared for the next one on these operands, or on a tensor of this layout."""
        if not is_call:
            _remember(prepared, operands)
        tensor, bundle = single(operands), prepared.bundles[0]
        if tensor is None or type(bundle) is not Direct:
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
        """Forgets the runs of a group that has ended."""
        for name, known in tuple(self._layouts.items()):
            if known.prepared.program.agreement.group_id == group_id:
                self._layouts.pop(name, None)

    def _of_layout(self, program: Program, operands: Sequence[Any], store: Store, *, is_call: bool) -> Prepared | None:
        """What a run on these operands would prepare; None where it is not known, or they can't run so."""
        tensor = single(operands)
        if tensor is None:
            return None
        found = self._layouts.get((id(program), is_call, type(tensor), tensor.shape, tensor.dtype))
        if found is None:
            return None
        try:
            array = tensor if type(tensor) is np.ndarray else arrays.memory(tensor)
            places = (arrays.place_of(tensor),)
        except TypeError:  # it has no memory any more
            return None
        if not _is_plain(array):
            return None
        known, bundle, step, like, reads, writes, is_first = found
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
            arrival=known.arrival,
            first=kernel if is_first else None,
            blobs=known.blobs,
            bundles=(Direct(bundle.share, 1, steps, written, owners, written, bundle.verdicts, versioned),),
            counts=known.counts,
            writes=written,
        )


def _remember(prepared: Prepared, operands: Sequence[Container]) -> None:
    # With the first container, tied to the others.
    name, holder = id(prepared.program), _Holder(prepared)
    for one in operands:
        if len(one.memo) >= MOST_PROGRAMS and name not in one.memo:
            one.memo.clear()
    for one in operands[1:]:
        tie = one.memo[name] = Tie()
        holder.tie_to(tie)
    if operands:
        operands[0].memo[name] = holder


def single(operands: Sequence[Any]) -> Any:
    """The one tensor, of numpy or torch; None where there are several, none, a DTensor, or one of another library."""
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
