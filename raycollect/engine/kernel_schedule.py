"""The schedule of a program after the agreement: its kernels in order, with their launches and fused tensors.

All of it follows from the program and from what all have agreed on, so every participant derives its part of the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from raycollect.core.boxes import BoxExchange
from raycollect.core.model import PIECES, Kernel, OpKind
from raycollect.engine.agreement import Verdict
from raycollect.engine.device_staging import StagingBuffers, StagingCopies
from raycollect.engine.fusion_buffer import NO_BUFFER, FusedKernel, FusionBuffer, Item, dtype_of, size_of
from raycollect.engine.operands import TaskBuffers
from raycollect.engine.packed_boxes import PackedBoxes
from raycollect.engine.reshard_operands import ReshardBuffers
from raycollect.planner import Bundle, Choice, Local, Program, Share, Step
from raycollect.planner.fusion import buckets, coalesced
from raycollect.pos import Range


class LaunchStep(NamedTuple):
    """One kernel, several that don't depend on each other, or copies that a rank makes by itself."""

    number: int  # the launch of the plan
    group_id: str  # of the launch, as `ranks`
    ranks: tuple[int, ...]
    kernels: tuple[Kernel, ...] = ()  # none: only copies
    packed: FusedKernel | PackedBoxes | None = None  # the one kernel works on a fusion buffer
    staging_copies: StagingCopies | None = None  # around kernels on stand-ins
    copies: tuple[tuple[Any, Any], ...] = ()  # (to, from)
    boxes: BoxExchange | None = None  # the kernels' boxes, for backends that need no messages; else `instead`
    instead: tuple[LaunchStep, ...] = ()  # one per kernel
    commits: bool = False  # instead, all wait for each other before anything that they gave is overwritten


class ScheduledBundle(NamedTuple):
    """The kernels of one bundle, and what they write."""

    share: Share
    tasks: int  # how many
    moves: tuple[LaunchStep, ...]
    ranges: Sequence[Range]  # addresses that it writes
    owners: Sequence[object]  # of each range, the object that lives as long as its memory
    dense: Sequence[Range]  # ranges that it writes whole
    agreed: tuple[Verdict, ...] = ()  # for each task
    versioned: Sequence[object] = ()  # see `TaskBuffers`


class KernelSchedule(NamedTuple):
    """The bundles of a program in order, and all addresses that they write."""

    bundles: tuple[ScheduledBundle, ...]
    ranges: Sequence[Range]


@dataclass(slots=True, eq=False)
class Scheduler:
    """Makes the schedule of one run."""

    program: Program
    operands: Sequence[TaskBuffers]  # the buffers of each of its tasks, all made
    block: FusionBuffer | None  # None: this rank has no elements to pack
    first: Kernel | None  # that the backend has prepared, if any
    staging_buffers: StagingBuffers | None = None  # the stand-ins, if there are any

    def write(self, verdicts: Mapping[int, Verdict], *, alone: bool) -> KernelSchedule:
        """Makes the schedule from the verdicts, by request; `alone`: requests overlap in memory, so order is kept."""
        program = self.program
        runs: Sequence[Bundle] = program.bundles
        if alone:
            runs = [
                Bundle(tasks=(at,), base=(task.alone,) * len(program.shares[task.share].choices))
                for at, task in enumerate(program.tasks)
            ]
        bundles = tuple([self._scheduled(run, verdicts) for run in runs])
        if len(bundles) == 1:
            return KernelSchedule(bundles, bundles[0].ranges)
        return KernelSchedule(bundles, [span for scheduled in bundles for span in scheduled.ranges])

    def _scheduled(self, run: Bundle, verdicts: Mapping[int, Verdict]) -> ScheduledBundle:
        together = [self.operands[at] for at in run.tasks]
        agreed = [verdicts[self.program.tasks[at].request] for at in run.tasks]
        share = together[0].share
        chosen = _chosen(share.choices, agreed)
        moves: list[LaunchStep] = []
        for step in share.template.ways[chosen]:
            moves += self._moves(step, run.base[chosen] + step.at, together, agreed)
        if len(together) == 1:
            (only,) = together
            dense, versioned = only.dense(), only.versioned
            return ScheduledBundle(share, 1, tuple(moves), only.ranges, only.owners, dense, tuple(agreed), versioned)
        return ScheduledBundle(
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
        self, step: Step, number: int, together: Sequence[TaskBuffers], agreed: Sequence[Verdict]
    ) -> Iterator[LaunchStep]:
        domain = together[0].share.domain
        ranks = step.ranks or domain.ranks
        if domain.rank not in ranks:
            return
        place = (number, domain.group_id, ranks)
        if step.kind is Local.COMMIT:
            yield LaunchStep(*place, commits=True)
            return
        boxes = [one for one in together if isinstance(one, ReshardBuffers)]
        if boxes and step.kind is not Local.COPY:
            for one in boxes:
                yield from self._boxes(one, place)
            return
        items = []
        for operands, verdict in zip(together, agreed, strict=True):
            most = verdict.most if step.kind in PIECES else ()
            pairs = operands.pairs(step)
            items += [Item(src, dst, most[at] if most else 0) for at, (src, dst) in enumerate(pairs)]
        if isinstance(step.kind, Local):
            yield LaunchStep(*place, copies=tuple((item.dst, item.src) for item in items))
            return
        staging_buffers = self.staging_buffers
        if staging_buffers is not None:
            items = [
                Item(staging_buffers.side(src, domain), staging_buffers.side(dst, domain), most)
                for src, dst, most in items
            ]
        sizes = [size_of(step.kind, item, len(ranks)) for item in items] if domain.coalesces else []
        large = coalesced(step.kind, sizes, coalesces=domain.coalesces)
        if large:
            some = [items[at] for at in large]
            items = [item for at, item in enumerate(items) if at not in set(large)]
            kernels = tuple(self._kernel(step.kind, step, item) for item in some)
            yield LaunchStep(*place, kernels, staging_copies=self._staging_copies(some))
        yield from self._packed(step.kind, step, items, place, domain.rank)

    def _boxes(self, operands: ReshardBuffers, place: tuple[int, str, tuple[int, ...]]) -> Iterator[LaunchStep]:
        copies = operands.copies()
        if copies:
            yield LaunchStep(*place, copies=copies)
        packed, exchange = operands.rounds(place[2], self.block or NO_BUFFER)
        if packed:
            kernels = tuple(one.kernel for one in packed)
            instead = tuple(LaunchStep(*place, (one.kernel,), one) for one in packed)
            yield LaunchStep(*place, kernels, instead=instead, boxes=exchange)

    def _packed(
        self,
        kind: OpKind,
        step: Step,
        items: Sequence[Item],
        place: tuple[int, str, tuple[int, ...]],
        rank: int,
    ) -> Iterator[LaunchStep]:
        ranks = place[2]
        sizes = [(dtype_of(item), size_of(kind, item, len(ranks))) for item in items] if len(items) > 1 else []
        for bucket in buckets(sizes, self.program.staging) if sizes else [[0]] * len(items):
            chosen = [items[at] for at in bucket]
            staging_copies = self._staging_copies(chosen)
            if len(chosen) > 1:
                packed = FusedKernel(
                    kind, step.op, step.peer, items=chosen, me=ranks.index(rank), block=self.block or NO_BUFFER
                )
                yield LaunchStep(*place, (packed.kernel,), packed, staging_copies)
            else:
                yield LaunchStep(*place, (self._kernel(kind, step, chosen[0]),), None, staging_copies)

    def _staging_copies(self, items: Sequence[Item]) -> StagingCopies | None:
        if self.staging_buffers is None:
            return None
        return self.staging_buffers.staging_copies([(item.src, item.dst) for item in items])

    def _kernel(self, kind: OpKind, step: Step, item: Item) -> Kernel:
        # The very kernel that was prepared, for backends that recognise it.
        first = self.first
        if (
            first is not None
            and not item.most
            and (first.kind, first.peer) == (kind, step.peer)
            and first.src is item.src
            and first.dst is item.dst
        ):
            return first
        return Kernel(kind=kind, src=item.src, dst=item.dst, op=step.op, peer=step.peer, most=item.most)


def _chosen(choices: Sequence[Choice], verdicts: Sequence[Verdict]) -> int:
    """The algorithm that all ranks take, by what all have agreed on."""
    if len(choices) == 1:
        return 0
    gives = [[() if spec.gives is None else spec.gives.tensors for spec in one.specs] for one in verdicts]
    nbytes = sum(max(sum(info.nbytes for info in infos) for infos in some) for some in gives)
    possible = [at for at, one in enumerate(choices) if one.at_least <= nbytes]
    return possible[-1] if possible else 0
