"""The buffers of one task of a program: their memory, its checks, and the operands of kernels.

All of this happens before any tensor is written. Problems are noted, not raised: the agreement reports them to all
ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from msgspec.structs import replace

from raycollect.backends import arrays, folds
from raycollect.core.model import TENSOR, Key, OpKind, ReduceOp, Structure, TensorInfo
from raycollect.core.operations import PIECES
from raycollect.engine.agreement import Arrival, Side, Spec, encode_arrival, learn, piece_fault
from raycollect.errors import ProtocolError, Violation
from raycollect.errors.text import too_large
from raycollect.planner import Local, Role, Share, TemplateStep
from raycollect.pos import Container, Range, Store
from raycollect.pos.extents import Extents

FEWER_TENSORS = "an operand of fewer tensors, or fewer operands in a call"
"""What is expected instead of descriptions that are too long."""


@dataclass(frozen=True, eq=False)
class Bound:
    """A buffer with its memory."""

    container: Container
    arrays: tuple[Any, ...]  # of the container's tensors, in order
    pieces: tuple[tuple[Any, ...], ...] | None = None  # the arrays of each rank's piece; None: one value
    loose: bool = False  # the pieces are cut from one tensor

    @cached_property
    def side(self) -> Side:
        """The description for the agreement."""
        structure = self.container.structure
        if self.loose:
            structure = Structure("list", (), (TENSOR,) * len(self.leaves))
        elif self.pieces is not None:  # lists and tuples are equivalent here
            structure = Structure("list", (), structure.items)
        libraries = [arrays.library(tensor) for tensor in self.container.tensors]
        if self.loose:
            libraries *= len(self.leaves)
        infos = tuple(arrays.info(leaf, library) for leaf, library in zip(self.leaves, libraries, strict=True))
        return Side(structure=structure, tensors=infos, loose=self.loose)

    @property
    def leaves(self) -> tuple[Any, ...]:
        """All arrays that kernels get: pieces cut from a tensor instead of the tensor."""
        return self.arrays if self.pieces is None else tuple(array for piece in self.pieces for array in piece)

    @property
    def owners(self) -> list[object]:
        """For each of `arrays`, the object that owns its memory."""
        return [arrays.owner(tensor) for tensor in self.container.tensors]


class TaskBuffers:
    """The buffers of one task on one rank, for its `share`; `allocate` is as in `Instruments`.

    `given`: the operands are arguments of an imperative call; otherwise they are from the store, or outputs of earlier
    tasks. `keys` are the keys of the OPERAND buffers, in order, for messages; None for a buffer without a key.
    """

    _takes_dtensors = False

    def __init__(
        self,
        share: Share,
        allocate: Callable[[TensorInfo], Any],
        *,
        given: bool = False,
        keys: Sequence[Key | None] = (),
    ) -> None:
        self.share = share
        self.buffers: list[Bound | None] = [None] * len(share.template.buffers)  # None: missing, or not made yet
        self.violations: list[Violation] = []
        self.written: list[Any] = []  # the arrays that the task writes
        self.ranges: list[Range] = []  # their addresses
        self.owners: list[object] = []  # the owners of their memory
        self.versioned: list[object] = []  # the written tensors whose library counts writes
        self._known_touched: tuple[set[int], set[int]] | None = None
        self._pairs: dict[int, list[tuple[Any, Any]]] = {}
        self._template = share.template
        self._kind = OpKind(share.op)
        self._allocator = allocate
        self._given = given
        self._keys = keys

    def bind(self, index: int, container: Container | None) -> None:
        """Sets the value of a buffer; None: missing, which was noted."""
        self.buffers[index] = None if container is None else self._bound(index, container)

    def make(self, index: int) -> None:
        """Makes an output or scratch buffer whose shape depends on this rank alone."""
        buffer = self._template.buffers[index]
        like = self.buffers[buffer.source] if buffer.role is not Role.LEARNED else None
        if like is None:
            return
        if buffer.role is Role.PIECE:
            side = like.side.item(self.share.ranks.index(self.share.rank))
            self._allocate(index, side.structure, side.tensors)
        else:
            infos = tuple(map(arrays.describe, like.container.tensors))
            self._allocate(index, like.container.structure, infos)

    def learn(self, specs: Sequence[Spec]) -> None:
        """Makes the outputs whose shapes follow from all ranks' arrivals of the first round."""
        share = self.share
        for index, buffer in enumerate(self._template.buffers):
            if buffer.role is not Role.LEARNED:
                continue
            root = share.ranks.index(share.root) if share.root in share.ranks else -1
            side = learn(specs, share.ranks.index(share.rank), root, of_all=buffer.scratch)
            self._allocate(index, side.structure, side.tensors)
            output = self.buffers[index]
            if output is not None:
                self._check_written(index, output)

    def outputs(self) -> tuple[Container, ...]:
        """Returns the outputs, in the order of the buffers."""
        buffers = zip(self.buffers, self._template.buffers, strict=True)
        return tuple(bound.container for bound, buffer in buffers if buffer.is_output and bound is not None)

    def _bound(self, index: int, container: Container) -> Bound | None:
        # In pieces, if the operation takes pieces.
        if container.placements and not self._takes_dtensors:
            expected = "a plain tensor, such as x.to_local(); reshard_refs takes DTensors"
            self.violate("not_tensor", "operand", "a DTensor, which is spread over a mesh", expected, index)
            return None
        try:
            views = tuple(map(arrays.memory, container.tensors))
        except TypeError as exc:
            self.violate("not_tensor", "operand", str(exc), "a tensor", index)
            return None
        structure = container.structure
        if not self._is_in_pieces(index):
            return Bound(container, views)
        count = len(self.share.ranks)
        if structure.kind in ("list", "tuple") and len(structure.items) == count:
            if len({item.count for item in structure.items}) == 1:
                ends = accumulate((item.count for item in structure.items), initial=0)
                return Bound(container, views, tuple(views[lo:hi] for lo, hi in pairwise(ends)))
        elif structure.kind == "tensor" and (cut := arrays.split(views[0], count)) is not None:
            return Bound(container, views, tuple((piece,) for piece in cut), loose=True)
        kind, actual, expected = piece_fault(structure, tuple(map(arrays.describe, container.tensors)), count)
        if structure.kind == "tensor" and views[0].shape and views[0].shape[0] % count == 0:
            actual += ", not contiguous"
        self.violate(kind, "output" if index == self._template.dst else "input", actual, expected, index)
        return None

    def _is_in_pieces(self, index: int) -> bool:
        # An operand in pieces, or a scratch buffer like it, or one for the pieces of all ranks.
        template = self._template
        buffer = template.buffers[index]
        if buffer.scratch and buffer.role is Role.LEARNED:
            return True
        if buffer.scratch and buffer.role is Role.LIKE:
            index = buffer.source
        gives, takes = PIECES[self._kind]
        if index == template.src and gives:
            return True
        return takes and (index == template.dst or buffer.scratch)

    def _allocate(self, index: int, structure: Structure, infos: Sequence[TensorInfo]) -> None:
        try:
            self.bind(index, Container.build(structure, list(map(self._allocator, infos))))
        except MemoryError as exc:
            wanted = sum(info.nbytes for info in infos)
            self.violate("allocation", "output", too_large(exc), f"{wanted} bytes", index)

    def check(self, store: Store, fresh: Extents | None = None) -> None:
        """Checks the buffers that the task reads and writes; `fresh` are addresses that earlier tasks write whole."""
        read, written = self._touched()
        for index, bound in enumerate(self.buffers):
            if bound is None:
                continue
            if index in read and _is_dirty(store, bound, fresh):
                self.violate("dirty", "operand", "half-written by a failed collective", "an intact tensor", index)
            if index in written:
                self._check_written(index, bound)
        self._check_aliases(written)
        for step in self._template.steps:
            if step.op is not None:
                self._check_op(step.op, step.src)

    @property
    def uses(self) -> list[tuple[int, Bound, bool]]:
        """(index, buffer, whether it is written) of the existing buffers."""
        _, written = self._touched()
        return [(index, bound, index in written) for index, bound in enumerate(self.buffers) if bound is not None]

    def _touched(self) -> tuple[set[int], set[int]]:
        """The buffers that are read before a step writes them whole, and the buffers that are written."""
        if self._known_touched is not None:
            return self._known_touched
        steps = self._template.steps
        if len(steps) == 1 and not self._template.others:
            (step,) = steps
            self._known_touched = {step.src}, ({step.dst} if step.dst >= 0 else set())
            return self._known_touched
        read, written = set[int](), set[int]()
        for way in self._template.ways:
            before = set[tuple[int, int]]()
            for step in way:
                if not before.intersection(((step.src, step.src_piece), (step.src, -1))):
                    read.add(step.src)
                before.add((step.dst, step.dst_piece))
            written.update(index for index, _ in before if index >= 0)
        self._known_touched = read, written
        return read, written

    def dense(self) -> list[Range]:
        """The addresses that the plan writes whole, without views that have gaps."""
        spans = zip(self.written, self.ranges, strict=True)
        return [span for array, span in spans if span[1] - span[0] == array.nbytes]

    def _check_written(self, index: int, bound: Bound) -> None:
        self.written += bound.arrays
        self.owners += bound.owners
        self.versioned += [tensor for tensor in bound.container.tensors if arrays.has_version(tensor)]
        self.ranges += ranges_of(bound.arrays)
        for array in bound.arrays:
            if not arrays.is_writeable(array):
                actual = "read-only"
                if arrays.is_lent_by_ray(array):
                    actual += " (Ray's arguments are read-only views of shared objects)"
                self.violate("read_only", "operand", actual, "a writable array, such as np.array(x)", index)
            if arrays.overlaps_itself(array):
                self.violate(
                    "alias", "operand", "overlapping itself (broadcast strides)", "one element per address", index
                )

    def _check_aliases(self, written: set[int]) -> None:
        # Written memory must not overlap any other operand of the plan (P6), except for in-place operations.
        leaves = [
            (*arrays.byte_range(array), index, at, array)
            for index, bound in enumerate(self.buffers)
            if bound
            for at, array in enumerate(bound.leaves)
        ]
        leaves.sort(key=lambda leaf: leaf[:2])
        in_place = 0
        for i, (_, stop, index, at, array) in enumerate(leaves):
            for later in range(i + 1, len(leaves)):
                start, _, other_index, other_at, other = leaves[later]
                if start >= stop:
                    break
                if not (index in written or other_index in written) or not arrays.overlap(array, other):
                    continue
                if arrays.place(array)[:4] == arrays.place(other)[:4] and self._is_in_place(
                    {index: at, other_index: other_at}
                ):
                    in_place += 1
                    continue
                both = max(index, other_index)
                self.violate("alias", "operand", "overlapping another tensor of the plan", "separate memory", both)
                return
        if (
            all(PIECES[self._kind])
            and in_place
            and any(
                arrays.place(a)[:4] != arrays.place(b)[:4]
                for a, b in zip(self._leaves(0), self._leaves(1), strict=False)
                if a.size and b.size
            )
        ):
            self.violate("alias", "operand", "in place for some ranks only", "all pieces in place, or none", 1)

    def _is_in_place(self, leaves: dict[int, int]) -> bool:
        """Whether two leaves, by buffer, may share memory."""
        template = self._template
        src, dst = leaves.get(template.src), leaves.get(template.dst)
        if src is None or dst is None:
            return False
        gives, takes = PIECES[self._kind]
        me = self.share.ranks.index(self.share.rank)
        if gives and takes:
            return src == dst
        if takes:
            return dst == me * len(self._leaves(template.src)) + src
        return gives and src == me * len(self._leaves(template.dst)) + dst

    def _check_op(self, op: ReduceOp, index: int) -> None:
        for dtype in dict.fromkeys([array.dtype for array in self._leaves(index)]):
            reason = _objection(op, dtype)
            if reason:
                self.violate("unsupported", "reduce op", reason, "", index)

    def violate(self, kind: str, name: str, actual: str, expected: str, index: int) -> None:
        """Notes a violation of a buffer."""
        operands = [at for at, buffer in enumerate(self._template.buffers) if buffer.role is Role.OPERAND]
        key = dict(zip(operands, self._keys, strict=False)).get(index)
        ref, rank = "" if key is None else key.hex(), self.share.rank
        self.violations.append(Violation(kind=kind, rank=rank, field=name, found=actual, expected=expected, ref=ref))

    def arrival(self, *, describes: bool = True) -> bytes:
        """Encodes the task's arrival; a description that is too long becomes a violation. `describes`: with tensors."""
        spec = self.spec()
        try:
            return _encoded(spec if describes else replace(spec, gives=None, takes=None), self.violations)
        except ProtocolError as exc:
            if not describes:
                raise
            index = self._template.src if spec.gives else self._template.dst
            self.violate("unsupported", "operand", exc.detail, FEWER_TENSORS, index)
            return self.arrival(describes=False)

    def spec(self) -> Spec:
        """Describes the task for the agreement."""
        share, template = self.share, self._template
        gives, takes = (self._described(index) if index >= 0 else None for index in (template.src, template.dst))
        return Spec(
            op=share.op,
            caller="call" if self._given else "plan",
            reduce_op=share.reduce_op.name if share.reduce_op else "",
            root=share.root,
            gives=gives.side if gives else None,
            takes=takes.side if takes else None,
            one_device=not share.domain.memory,
        )

    def _described(self, index: int) -> Bound | None:
        return self.buffers[index]

    def pairs(self, step: TemplateStep) -> list[tuple[Any, Any]]:
        """Returns (src, dst) of each kernel of a step, when all buffers exist; empty if the task will be refused."""
        cached = self._pairs.get(id(step))
        if cached is not None:
            return cached
        gives, takes = PIECES[step.kind] if isinstance(step.kind, OpKind) else (False, False)
        reads = self._filled(step.src, step.src_piece, gives)
        writes = self._filled(step.dst, step.dst_piece, takes)
        if reads and writes and len(reads) != len(writes):
            pairs = []
        else:
            nothing = (None,) * max(len(reads), len(writes), step.kind is not Local.COPY)
            pairs = list(zip(reads or nothing, writes or nothing, strict=True))
        self._pairs[id(step)] = pairs
        return pairs

    def _filled(self, index: int, piece: int, in_pieces: bool) -> Sequence[Any]:
        if piece >= 0:
            pieces = self._pieces(index)
            return pieces[piece] if pieces else ()
        return list(zip(*self._pieces(index), strict=True)) if in_pieces else self._leaves(index)

    def _pieces(self, index: int) -> tuple[tuple[Any, ...], ...]:
        bound = self.buffers[index] if index >= 0 else None
        return () if bound is None or bound.pieces is None else bound.pieces

    def _leaves(self, index: int) -> tuple[Any, ...]:
        bound = self.buffers[index] if index >= 0 else None
        return bound.leaves if bound else ()


_CACHED_TENSORS = 256


def _encoded(spec: Spec, violations: Sequence[Violation]) -> bytes:
    if violations:
        return encode_arrival(Arrival(spec=spec, violations=tuple(violations)))
    count = sum(len(side.tensors) for side in (spec.gives, spec.takes) if side is not None)
    return _cached_arrival(spec) if count <= _CACHED_TENSORS else encode_arrival(Arrival(spec=spec))


@lru_cache(maxsize=256)
def _cached_arrival(spec: Spec) -> bytes:
    return encode_arrival(Arrival(spec=spec))


@lru_cache(maxsize=256)
def _objection(op: ReduceOp, dtype: np.dtype[Any]) -> str | None:
    return folds.refusal_reason(op, arrays.info(np.empty(0, dtype)).dtype)


def _is_dirty(store: Store, bound: Bound, fresh: Extents | None) -> bool:
    ranges = ranges_of(bound.arrays)
    if not store.is_dirty(ranges):
        return False
    return fresh is None or store.is_dirty([gap for start, stop in ranges for gap in fresh.gaps(start, stop)])


def ranges_of(views: Sequence[Any]) -> list[Range]:
    """The addresses of arrays."""
    return [arrays.byte_range(view) for view in views]
