"""The buffers of a reshard on one rank: local tensors according to the layouts, and the packing of their boxes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from raycollect.backends import arrays
from raycollect.backends.arrays import Array, DeviceArray, box_of
from raycollect.backends.elements import convert
from raycollect.core.boxes import BoxExchange, table_nbytes
from raycollect.engine.device_staging import CPU, StagingBuffers, StagingCopies
from raycollect.engine.fusion_buffer import FusionBuffer
from raycollect.engine.operands import Bound, TaskBuffers
from raycollect.engine.packed_boxes import PackedBoxes, unfold
from raycollect.planner import Local, TemplateStep
from raycollect.planner.reshard.halves import Half, decode_half
from raycollect.planner.reshard.request import Fault, LocalTensor, faults_of, made_of, tensor_indices
from raycollect.pos import Container, Range


class ReshardBuffers(TaskBuffers):
    """`TaskBuffers` whose operands are checked against the layouts, not against the other ranks."""

    _takes_dtensors = True

    @cached_property
    def _staged(self) -> dict[int, tuple[Array, ...]]:
        """By buffer, the arrays of which some are staging buffers; without buffers that are not staged."""
        return {}

    @cached_property
    def _half(self) -> Half:
        return decode_half(self.share.template.boxes)

    @property
    def staging_nbytes(self) -> int:
        """The bytes of staging that its rounds share, and of the table with the addresses of boxes."""
        return self._half.staging_nbytes + self._table_nbytes

    @property
    def _table_nbytes(self) -> int:
        half = self._half
        boxes = [(give.names, len(give.size)) for transfers in half.rounds for give in transfers.gives]
        counts = sum(names for names, _ in boxes), sum(names * dims for names, dims in boxes)
        return table_nbytes(len(half.rounds), len(self.share.ranks), *counts)

    def make(self, index: int) -> None:
        """Makes the tensors of a target by its layout: like the given ones, or with the library of the source."""
        like = self._template.buffers[index].source
        if like >= 0:
            self._make_like(index, like)
            return
        given = self.buffers[self._template.src] if self._template.src >= 0 else None
        first = arrays.describe(given.container.tensors[0]) if given and given.container.tensors else None
        structure, infos = made_of(self._half.dst, first.library if first else "numpy")
        self._allocate(index, structure, [info.beside(first) for info in infos] if first else infos)

    def _make_like(self, index: int, like: int) -> None:
        held = self.buffers[like]
        if held is None:
            return
        self._allocate(index, held.container.structure, [arrays.describe(tensor) for tensor in held.container.tensors])
        output = self.buffers[index]
        if output is not None:
            for to, array, is_whole in zip(output.arrays, held.arrays, self._are_whole(held), strict=True):
                if not is_whole and type(to) is not DeviceArray:  # elements in no region keep their values
                    convert(to, array)

    def _are_whole(self, bound: Bound) -> list[bool]:
        """For each tensor of a target, whether its regions cover the whole tensor."""
        indices = tensor_indices(bound.container.structure, self._half.dst)
        whole = {index for index, tensor in zip(indices, self._half.dst, strict=True) if tensor.is_whole}
        return [index in whole for index in range(len(bound.arrays))]

    def _touched(self) -> tuple[set[int], set[int]]:
        read, written = super()._touched()
        dst = self._template.dst
        like = self._template.buffers[dst].source if dst >= 0 else -1
        held = self.buffers[like] if like >= 0 else None
        return (read | {like}, written) if held is not None and not all(self._are_whole(held)) else (read, written)

    def stage(self, buffers: StagingBuffers) -> None:
        """Makes staging buffers in host memory for tensors on devices; raises MemoryError."""
        for index in {self._template.src, self._template.dst} - {-1}:
            if (bound := self.buffers[index]) is not None:
                self._staged[index] = tuple([buffers.of(array, CPU) for array in bound.arrays])

    def staging_copies(self, buffers: StagingBuffers) -> StagingCopies | None:
        """The copies around its kernels; None if all its tensors are in host memory."""
        src, dst = self._template.src, self._template.dst
        copies = buffers.staging_copies([(self._staged.get(src), self._staged.get(dst))])
        bound = self.buffers[dst] if dst >= 0 else None
        if copies is None or bound is None:
            return copies
        like = self._template.buffers[dst].source
        before = self.buffers[like if like >= 0 else dst]
        assert before is not None  # all have agreed
        rows = zip(self._staged[dst], bound.arrays, before.arrays, self._are_whole(bound), strict=True)
        rest = [(staged, old) for staged, array, old, is_whole in rows if staged is not array and not is_whole]
        return copies._replace(loads=[*copies.loads, *rest])  # elements in no region keep their values

    def copies(self) -> tuple[tuple[Array, Array], ...]:
        """The copies inside this rank: (to, from)."""
        local = self._local
        return tuple(
            (box_of(local(name, True), dst.at, dst.size), box_of(local(name, False), src.at, src.size))
            for src, dst in self._half.copies
            for name in range(src.first, src.first + src.names)
        )

    def rounds(self, ranks: Sequence[int], block: FusionBuffer) -> tuple[list[PackedBoxes], BoxExchange]:
        """The rounds in the staging buffer: one by one, and all as one exchange."""
        half, begin = self._half, self._half.staging_nbytes
        packed = [PackedBoxes(half, at, ranks, block.memory, self._local) for at in range(len(half.rounds))]
        table = block.memory[begin : begin + self._table_nbytes]
        return packed, BoxExchange(rounds=[boxes.round for boxes in packed], table=table)

    def pairs(self, step: TemplateStep) -> list[tuple[Any, Any]]:
        """Empty for kernels, which work only in the staging buffer (`rounds`); a commit copies whole tensors."""
        if step.kind is not Local.COPY:
            return []
        src, dst = self.buffers[step.src], self.buffers[step.dst]
        return [] if src is None or dst is None else list(zip(src.arrays, dst.arrays, strict=True))

    def dense(self) -> list[Range]:
        """The addresses that are written whole, without tensors that have elements in no region."""
        index = self._template.dst
        bound = self.buffers[index] if index >= 0 else None
        if bound is None:
            return []
        if self._template.buffers[index].source >= 0:  # elements in no region were copied
            return super().dense()
        spans = zip(self.written, self.ranges, self._are_whole(bound), strict=True)
        return [span for array, span, is_whole in spans if is_whole and span[1] - span[0] == array.nbytes]

    def _bound(self, index: int, container: Container) -> Bound | None:
        is_dst = index != self._template.src
        bound = super()._bound(index, container)
        if bound is None:
            return None
        infos = tuple(map(arrays.describe, container.tensors))
        faults = faults_of(container.structure, infos, self._half.dst if is_dst else self._half.src)
        faults += [] if faults else self._gaps(bound, is_dst=is_dst)
        for name, what, expected in faults:
            self.violate("layout", f"{name} of {'dst' if is_dst else 'src'}", what, expected, index)
        return None if faults else bound

    def _gaps(self, bound: Bound, *, is_dst: bool) -> Iterator[Fault]:
        """Tensors whose memory has no view with the dimensions of the global tensor."""
        tensors = self._half.dst if is_dst else self._half.src
        for at, tensor in zip(tensor_indices(bound.container.structure, tensors), tensors, strict=True):
            array = bound.arrays[at]
            if type(array) is DeviceArray:  # its staging buffer has no gaps
                continue
            if tensor.axes and array.size and not np.may_share_memory(unfold(array, tensor.axes), array):
                actual = f"with gaps, {array.strides} bytes apart"
                yield (
                    f"tensor {tensor.key!r}",
                    actual,
                    "without gaps, as its layout takes several of its dimensions as one",
                )

    def _is_in_pieces(self, index: int) -> bool:
        return False

    def _is_in_place(self, leaves: dict[int, int]) -> bool:
        return False

    def _described(self, index: int) -> Bound | None:
        return None  # the plan determines it

    def _local(self, name: int, is_dst: bool) -> Array:
        return self._targets[self._half.dst_of[name]] if is_dst else self._sources[self._half.src_of[name]]

    # After the agreement
    @cached_property
    def _sources(self) -> list[Array]:
        return self._unfolded(self._template.src, self._half.src)

    @cached_property
    def _targets(self) -> list[Array]:
        return self._unfolded(self._template.dst, self._half.dst)

    def _unfolded(self, index: int, tensors: tuple[LocalTensor, ...]) -> list[Array]:
        bound = self.buffers[index]
        assert bound is not None  # all have agreed
        indices = tensor_indices(bound.container.structure, tensors)
        held = self._staged.get(index, bound.arrays)
        return [unfold(held[at], tensor.axes) for at, tensor in zip(indices, tensors, strict=True)]
