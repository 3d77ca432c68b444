"""The buffers of a task whose operands are lists with tensors of each GPU of a rank, and copies between these GPUs.

The rank's tensors are brought to the GPU of the group: for a reduction one after the other, and folded in the order of
the list. There the kernels run; then the result is copied to the GPUs of the list. With `d` GPUs per rank and `n` bytes
per tensor, `d - 1` times `n` bytes go to that GPU and back (for an allgather and a reduce-scatter, as often as there
are ranks times `d`). The memory for that is taken before the agreement, so that all ranks hear where there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

from raycollect.backends import across, arrays
from raycollect.backends.arrays import DeviceArray
from raycollect.backends.device_arrays import device_id
from raycollect.core.model import PIECES, TENSOR, Key, ReduceOp, Structure, TensorInfo
from raycollect.engine.device_staging import Check
from raycollect.engine.operands import Bound, TaskBuffers
from raycollect.errors import KernelError, RaycollectError
from raycollect.errors.text import too_large
from raycollect.planner import Local, Role, Share, Step, gpu_lists
from raycollect.pos import Container

_Row = Sequence[DeviceArray]


class IntraRankCopy(NamedTuple):
    """One copy or fold between the GPUs of a rank, for one task."""

    kind: Local  # FOLD, BRING or SPREAD
    sources: Sequence[_Row]  # FOLD, BRING: by GPU; SPREAD: on the GPU of the group, for each of `targets`
    targets: Sequence[_Row]  # SPREAD: by GPU; else one row on the GPU of the group
    op: ReduceOp | None = None  # of FOLD
    incoming: _Row = ()  # FOLD: memory beside the target, for what arrives

    def run(self, check: Check) -> None:
        """Runs it to its end.

        Raises:
            KernelError: A device has failed.
            Exception: What `check` raises.
        """
        try:
            if self.op is not None:
                across.fold(self.sources, self.op, self.targets[0], self.incoming)
            elif self.kind is Local.BRING:
                across.bring([one for row in self.sources for one in row], self.targets[0])
            else:
                for source, target in zip(self.sources, self.targets, strict=True):
                    across.spread(source, target)
            across.ended([device_id(row[0].device) for row in self.targets if row], check)
        except (RaycollectError, MemoryError):
            raise
        except Exception as exc:
            exc.__traceback__ = None  # its frames would keep the tensors alive
            raise KernelError(detail=f"a {self.kind.value} between GPUs of a rank failed: {exc}") from exc


class GpuTaskBuffers(TaskBuffers):
    """A `TaskBuffers` with a stand-in on the GPU of the group for each list.

    `home` returns the GPU on which the group works, ``"cuda:0"``; it raises GroupBrokenError.
    """

    def __init__(
        self,
        share: Share,
        allocate: Callable[[TensorInfo], Any],
        home: Callable[[], str],
        *,
        given: bool = False,
        keys: Sequence[Key | None] = (),
    ) -> None:
        super().__init__(share, allocate, given=given, keys=keys)
        self._home = home
        buffers = enumerate(share.template.buffers)
        self._stand_in = {one.source: index for index, one in buffers if one.role is Role.HOME}
        self._incoming: dict[int, tuple[DeviceArray, ...]] = {}  # by the buffer of the stand-in
        self._steps = [step for way in share.template.ways for step in way]

    def make(self, index: int) -> None:
        """Makes stand-ins, and lists of outputs, besides."""
        buffer = self._template.buffers[index]
        if buffer.role not in (Role.HOME, Role.LISTS):
            super().make(index)
            return
        held = self.buffers[buffer.source]
        if held is None:
            return
        if buffer.role is Role.HOME:
            self._make_stand_in(index, held)
        else:
            self._allocate(index, *gpu_lists.made(self._kind, _infos(held), len(self.share.ranks)))

    def crossing(self, step: Step) -> IntraRankCopy:
        """Returns what a step between GPUs does, when all buffers are made."""
        if step.kind is Local.SPREAD:
            return self._spread(step)
        targets = (self._leaves(step.dst),)
        if step.kind is Local.BRING:
            return IntraRankCopy(step.kind, [self._chosen(step.src, step.src_piece)], targets)
        return IntraRankCopy(Local.FOLD, self._by_gpu(step.src), targets, step.op, self._incoming.get(step.dst, ()))

    def _spread(self, step: Step) -> IntraRankCopy:
        made, targets = self._leaves(step.src), self._by_gpu(step.dst)
        sources: list[_Row] = [made for _ in targets]
        if len(targets[0]) == 1 and self._kind in PIECES:  # one for each GPU
            sources = [[one] for one in made]
        if step.dst_piece >= 0:
            targets = [self._chosen(step.dst, step.dst_piece)]
            sources = sources[:1]
        elif step.src_piece >= 0:
            targets = [row for at, row in enumerate(targets) if at != step.src_piece]
            sources = sources[1:]
        return IntraRankCopy(Local.SPREAD, sources, targets)

    def _bound(self, index: int, container: Container) -> Bound | None:
        bound = super()._bound(index, container)
        if bound is None or index not in self._stand_in or self._template.buffers[index].role is not Role.OPERAND:
            return bound
        return bound if self._is_right(index, bound) else None

    def _is_right(self, index: int, bound: Bound) -> bool:
        # By itself, and beside what the rank gives; what is wrong is noted.
        template = self._template
        gives = index == template.src
        given = None if gives or template.src < 0 else self.buffers[template.src]
        fault = gpu_lists.fault_of(
            self._kind,
            _held(bound),
            len(self.share.ranks),
            gives=gives,
            named=template.named(index),
            beside=None if given is None else _held(given),
        )
        if fault is not None:
            self.violate(*fault, index)
        return fault is None

    def _make_stand_in(self, index: int, held: Bound) -> None:
        # And as much again where others are folded into it.
        source, world = self._template.buffers[index].source, len(self.share.ranks)
        infos, home = _infos(held), self._home()
        gives = source == self._template.src
        structure, _ = gpu_lists.carried(self._kind, infos, world, gives=gives, home=home)
        folds = any(step.kind is Local.FOLD and step.dst == index for step in self._steps)
        count = structure.count * (2 if folds and gpu_lists.gpus_of(infos) > 1 else 1)
        like = cast("DeviceArray", held.arrays[0])
        try:
            made = across.room(like, device_id(home), count, self._allocator)
        except Exception as exc:  # noqa: BLE001 - there is none; or of the library that makes memory on a device
            expected = f"{count * like.nbytes} bytes on GPU {device_id(home)}, to combine the tensors in"
            self.violate("allocation", "staging", too_large(exc), expected, index)
            return
        self._incoming[index] = made[structure.count :]
        self.bind(index, Container.build(structure, [one.tensor for one in made[: structure.count]]))

    def _by_gpu(self, index: int) -> list[_Row]:
        bound = self.buffers[index]
        if bound is None:
            return []
        structure = bound.container.structure
        found = [bound.arrays[0]] if structure == TENSOR else structure.build(bound.arrays)
        return [one if type(one) in (list, tuple) else [one] for one in found]

    def _chosen(self, index: int, piece: int) -> _Row:
        bound = self.buffers[index]
        if bound is None or piece < 0:
            return self._leaves(index)
        at = gpu_lists.place_of(self._kind, _infos(bound), piece)
        return bound.arrays[at : at + 1]

    def _is_in_pieces(self, index: int) -> bool:
        buffers = self._template.buffers
        while buffers[index].role is Role.LIKE and buffers[index].scratch:
            index = buffers[index].source
        if buffers[index].role is not Role.HOME:
            return False
        return gpu_lists.are_lists(self._kind, gives=buffers[index].source == self._template.src)

    def _read_of(self, index: int, bound: Bound) -> Bound:
        named = [one for one in self._steps if one.kind is Local.BRING and one.src == index and one.src_piece >= 0]
        return _some(bound, self._chosen(index, named[0].src_piece)) if named else bound

    def _written_of(self, index: int, bound: Bound) -> Bound:
        spread = [step for step in self._steps if step.kind is Local.SPREAD and step.dst == index]
        if not spread:
            return bound
        targets = self._spread(spread[0]).targets
        return _some(bound, [one for row in targets for one in row])

    def _check_written(self, index: int, bound: Bound) -> None:
        if self._template.buffers[index].role is not Role.HOME:  # nobody reads what is half-written there
            super()._check_written(index, bound)

    def _is_in_place(self, leaves: dict[int, int]) -> bool:
        # What a rank gives is not what kernels read.
        return False

    def _check_op(self, op: ReduceOp, index: int) -> None:
        if self._template.buffers[index].role is Role.HOME:
            return  # the list for which it stands is looked at
        bound = self.buffers[index]
        if bound is None:
            return
        reason = across.objection(op, bound.arrays[0].dtype, gpu_lists.gpus_of(_infos(bound)))
        if reason is not None:
            self.violate("unsupported", "reduce op", reason, "another reduce op or dtype", index)

    def _told(self, index: int) -> Bound | None:
        return self.buffers[self._stand_in[index]]


def _infos(bound: Bound) -> tuple[TensorInfo, ...]:
    return tuple(map(arrays.describe, bound.container.tensors))


def _held(bound: Bound) -> gpu_lists.Held:
    return bound.container.structure, _infos(bound)


def _some(bound: Bound, some: _Row) -> Bound:
    """A row of only some of its tensors."""
    chosen = {id(one) for one in some}
    places = [at for at, one in enumerate(bound.arrays) if id(one) in chosen]
    tensors = [bound.container.tensors[at] for at in places]
    container = Container.build(Structure("list", (), (TENSOR,) * len(places)), tensors)
    return Bound(container, tuple(bound.arrays[at] for at in places))
