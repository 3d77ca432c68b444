"""What a program does after the door: its kernels in order, with their launches, and the tensors packed that can be.

All of it follows from the program and from what all have agreed on, so that every participant writes its part of the
same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from raycollect.backends import folds
from raycollect.door import Spec, Verdict
from raycollect.gpu_operands import Crossing, GpuOperands
from raycollect.model import PIECES, Kernel, OpKind, TensorInfo
from raycollect.operands import Operands
from raycollect.packing import NO_BLOCK, Block, Item, Packed, dtype_of, size_of
from raycollect.planner import CROSSINGS, Bundle, Choice, Local, Program, Share, Step
from raycollect.planner.fusion import buckets, offered
from raycollect.pos import Range
from raycollect.staging import Carriage, StandIns

__all__ = ["Move", "Script", "Stretch", "Writer", "bucketed"]


class Move(NamedTuple):
    """One kernel, several that don't depend on each other, or copies that a rank makes by itself.

    Attributes:
        number: The launch of the plan in which it runs.
        group_id: The group that this launch belongs to.
        ranks: Its ranks.
        kernels: The kernels; none where there are only copies.
        packed: What is done before and after the one kernel, where it works on staging.
        carriage: What is copied before and behind all of it, where it works on stand-ins.
        copies: (to, from).
        crossings: What is done between the GPUs of a rank instead.
        instead: What is done where the backend runs none of several kernels together; nothing: one after the other.
        commits: Whether all are waited for instead, before anything that they gave is overwritten.
    """

    number: int
    group_id: str
    ranks: tuple[int, ...]
    kernels: tuple[Kernel, ...] = ()
    packed: Packed | None = None
    carriage: Carriage | None = None
    copies: tuple[tuple[Any, Any], ...] = ()
    crossings: tuple[Crossing, ...] = ()
    instead: tuple[Move, ...] = ()
    commits: bool = False


class Stretch(NamedTuple):
    """What one bundle does.

    Attributes:
        share: The share of its tasks.
        tasks: How many tasks it has.
        moves: Its kernels, in order.
        ranges: The addresses that it writes.
        owners: For each, the object that lives as long as it.
        dense: Those that it writes whole.
        agreed: What all have agreed on for each task.
        versioned: See `Operands`.
    """

    share: Share
    tasks: int
    moves: tuple[Move, ...]
    ranges: Sequence[Range]
    owners: Sequence[object]
    dense: Sequence[Range]
    agreed: tuple[Verdict, ...] = ()
    versioned: Sequence[object] = ()


class Script(NamedTuple):
    """What a program does after the door.

    Attributes:
        stretches: Its bundles, in the order in which they run.
        ranges: All addresses that it writes.
    """

    stretches: tuple[Stretch, ...]
    ranges: Sequence[Range]


class Writer:
    """Writes scripts for the operands of one run.

    Args:
        program: The program.
        operands: Those of each of its tasks, all made.
        block: The staging; None: this rank has no elements to pack.
        first: The kernel that the backend has prepared, if any.
        stand_ins: What stands for tensors that lie elsewhere than the backends work, if any do.
    """

    def __init__(
        self,
        program: Program,
        operands: Sequence[Operands],
        block: Block | None,
        first: Kernel | None,
        stand_ins: StandIns | None = None,
    ) -> None:
        self._program = program
        self._operands = operands
        self._block = block or NO_BLOCK
        self._first = first
        self._stand_ins = stand_ins

    def write(self, verdicts: Mapping[int, Verdict], *, alone: bool) -> Script:
        """Writes what is to be done.

        Args:
            verdicts: What follows from what all brought, by request.
            alone: Whether nothing may be reordered, as requests overlap in memory.
        """
        program = self._program
        runs: Sequence[Bundle] = program.bundles
        if alone:
            runs = [
                Bundle(tasks=(at,), base=(task.alone,) * len(program.shares[task.share].choices))
                for at, task in enumerate(program.tasks)
            ]
        stretches = tuple([self._stretch(run, verdicts) for run in runs])
        if len(stretches) == 1:
            return Script(stretches, stretches[0].ranges)
        return Script(stretches, [span for stretch in stretches for span in stretch.ranges])

    def _stretch(self, run: Bundle, verdicts: Mapping[int, Verdict]) -> Stretch:
        together = [self._operands[at] for at in run.tasks]
        agreed = [verdicts[self._program.tasks[at].request] for at in run.tasks]
        share = together[0].share
        chosen = _chosen(share.choices, agreed)
        moves: list[Move] = []
        for step in share.template.ways[chosen]:
            moves += self._moves(step, run.base[chosen] + step.at, together, agreed)
        if len(together) == 1:
            (only,) = together
            dense, versioned = only.dense(), only.versioned
            return Stretch(share, 1, tuple(moves), only.ranges, only.owners, dense, tuple(agreed), versioned)
        return Stretch(
            share,
            len(together),
            tuple(moves),
            ranges=[span for operands in together for span in operands.ranges],
            owners=[owner for operands in together for owner in operands.owners],
            dense=[span for operands in together for span in operands.dense()],
            agreed=tuple(agreed),
            versioned=[tensor for operands in together for tensor in operands.versioned],
        )

    def _moves(
        self, step: Step, number: int, together: Sequence[Operands], agreed: Sequence[Verdict]
    ) -> Iterator[Move]:
        """The kernels of one step over all tensors of several tasks."""
        domain = together[0].share.domains[step.level]
        ranks = step.ranks or domain.ranks
        if domain.rank not in ranks:
            return
        place = (number, domain.group_id, ranks)
        if step.kind is Local.COMMIT:
            yield Move(*place, commits=True)
            return
        if step.kind in CROSSINGS:
            yield Move(*place, crossings=tuple(one.crossing(step) for one in together if isinstance(one, GpuOperands)))
            return
        items = []
        for operands, verdict in zip(together, agreed, strict=True):
            most = verdict.most if step.kind in PIECES else ()
            pairs = operands.pairs(step)
            items += [Item(src, dst, most[at] if most else 0) for at, (src, dst) in enumerate(pairs)]
        if isinstance(step.kind, Local):
            yield Move(*place, copies=tuple((item.dst, item.src) for item in items))
            return
        stand_ins = self._stand_ins
        if stand_ins is not None:
            items = [Item(stand_ins.side(src, domain), stand_ins.side(dst, domain), most) for src, dst, most in items]
        large = [] if step.kind in PIECES else offered([size_of(step.kind, item, len(ranks)) for item in items])
        if large:
            some = [items[at] for at in large]
            items = [item for at, item in enumerate(items) if at not in set(large)]
            kernels = tuple(self._kernel(step.kind, step, item) for item in some)
            instead = tuple(self._packed(step.kind, step, some, place, domain.rank, carries=False))
            yield Move(*place, kernels, carriage=self._carriage(some), instead=instead)
        yield from self._packed(step.kind, step, items, place, domain.rank)

    def _packed(
        self,
        kind: OpKind,
        step: Step,
        items: Sequence[Item],
        place: tuple[int, str, tuple[int, ...]],
        rank: int,
        *,
        carries: bool = True,
    ) -> Iterator[Move]:
        """The kernels over some tensors, those packed that can be."""
        ranks = place[2]
        for bucket in bucketed(kind, items, len(ranks), self._program.staging):
            chosen = [items[at] for at in bucket]
            carriage = self._carriage(chosen) if carries else None
            if len(chosen) > 1:
                packed = Packed(kind, step.op, step.peer, items=chosen, me=ranks.index(rank), block=self._block)
                yield Move(*place, (packed.kernel,), packed, carriage)
            else:
                yield Move(*place, (self._kernel(kind, step, chosen[0]),), None, carriage)

    def _carriage(self, items: Sequence[Item]) -> Carriage | None:
        if self._stand_ins is None:
            return None
        return self._stand_ins.carriage([(item.src, item.dst) for item in items])

    def _kernel(self, kind: OpKind, step: Step, item: Item) -> Kernel:
        """A kernel on the operands themselves: the very one that was prepared, for backends that know it again."""
        first = self._first
        if (
            first is not None
            and not item.most
            and (first.kind, first.peer) == (kind, step.peer)
            and first.src is item.src
            and first.dst is item.dst
        ):
            return first
        return Kernel(kind=kind, src=item.src, dst=item.dst, op=step.op, peer=step.peer, most=item.most)


def bucketed(kind: OpKind, items: Sequence[Item], count: int, staging: int) -> list[list[int]]:
    """Which tensors each kernel of a step moves, among so many ranks; see `fusion.buckets`."""
    if len(items) < 2:
        return [[at] for at in range(len(items))]
    return buckets([(dtype_of(item), size_of(kind, item, count)) for item in items], staging)


def _chosen(choices: Sequence[Choice], verdicts: Sequence[Verdict]) -> int:
    """The algorithm that all ranks take, by what all have agreed on."""
    if len(choices) == 1:
        return 0
    nbytes = sum(max(_given_nbytes(spec) for spec in verdict.specs) for verdict in verdicts)
    narrow = any(_is_narrow(info) for verdict in verdicts for spec in verdict.specs for info in _infos(spec))
    possible = [at for at, one in enumerate(choices) if one.at_least <= nbytes and not (one.stepwise and narrow)]
    return possible[-1] if possible else 0


def _infos(spec: Spec) -> tuple[TensorInfo, ...]:
    return spec.gives.tensors if spec.gives is not None else ()


def _given_nbytes(spec: Spec) -> int:
    return sum(info.nbytes for info in _infos(spec))


@lru_cache(maxsize=64)
def _is_narrow(info: TensorInfo) -> bool:
    return folds.is_widened(np.dtype(info.dtype))
