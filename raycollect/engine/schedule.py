"""The steps of a program after the agreement: its kernels in order, with their launches and fused tensors.

The steps follow from the program and the agreement alone, so all participants derive matching steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from raycollect.core.model import Kernel, OpKind
from raycollect.core.operations import PIECEWISE
from raycollect.engine.agreement import Verdict
from raycollect.engine.device_staging import StagingBuffers
from raycollect.engine.fusion_buffer import NO_BUFFER, FusedKernel, FusionBuffer, Item, dtype_of, size_of
from raycollect.engine.operands import TaskBuffers
from raycollect.engine.reshard_operands import ReshardBuffers
from raycollect.engine.steps import (
    Commit,
    Copies,
    Kernels,
    Packed,
    PreparedBundle,
    ReshardKernels,
    SingleKernelBundle,
    StagedStep,
)
from raycollect.engine.steps import Step as PreparedStep
from raycollect.planner import Bundle as PlannedBundle
from raycollect.planner import Choice, Local, Program, TemplateStep
from raycollect.planner.fusion import buckets, coalesced

_Launch = tuple[int, str, tuple[int, ...]]
"""The number of a launch, its group and its ranks."""


@dataclass(slots=True, eq=False)
class Scheduler:
    """Makes the steps of one run."""

    program: Program
    operands: Sequence[TaskBuffers]  # the buffers of each task, completely made
    block: FusionBuffer | None  # None: this rank has no elements to pack
    first: Kernel | None  # the kernel that the backend has prepared, if any
    staging_buffers: StagingBuffers | None = None

    def bundles(self, verdicts: Mapping[int, Verdict], *, alone: bool) -> tuple[PreparedBundle, ...]:
        """Makes the bundles from the verdicts, by request; `alone`: requests overlap in memory, so order is kept."""
        program = self.program
        planned: Sequence[PlannedBundle] = program.bundles
        if alone:
            planned = [
                PlannedBundle(tasks=(at,), base=(task.alone,) * len(program.shares[task.share].choices))
                for at, task in enumerate(program.tasks)
            ]
        return tuple([self._bundle(bundle, verdicts) for bundle in planned])

    def _bundle(self, planned: PlannedBundle, verdicts: Mapping[int, Verdict]) -> PreparedBundle:
        together = [self.operands[at] for at in planned.tasks]
        agreed = [verdicts[self.program.tasks[at].request] for at in planned.tasks]
        share = together[0].share
        chosen = _chosen(share.choices, agreed)
        steps: list[PreparedStep] = []
        for step in share.template.ways[chosen]:
            steps += self._steps(step, planned.base[chosen] + step.at, together, agreed)
        kind = SingleKernelBundle if len(together) == 1 and self._is_direct(steps) else PreparedBundle
        return kind(
            share,
            len(together),
            tuple(steps),
            ranges=[span for operands in together for span in operands.ranges],
            owners=[owner for operands in together for owner in operands.owners],
            dense=[span for operands in together for span in operands.dense()],
            verdicts=tuple(agreed),
            versioned=[tensor for operands in together for tensor in operands.versioned],
        )

    def _is_direct(self, steps: Sequence[PreparedStep]) -> bool:
        # Whether the program is one kernel in the launch of the agreement.
        program, agreement = self.program, self.program.agreement
        if len(program.tasks) != 1 or program.commits or len(steps) != 1:
            return False
        (step,) = steps
        if type(step) is not Kernels or len(step.kernels) != 1:
            return False
        return (step.number, step.group_id, step.ranks) == (0, agreement.group_id, agreement.ranks)

    def _steps(
        self, step: TemplateStep, number: int, together: Sequence[TaskBuffers], agreed: Sequence[Verdict]
    ) -> Iterator[PreparedStep]:
        domain = together[0].share.domain
        ranks = step.ranks or domain.ranks
        if domain.rank not in ranks:
            return
        launch = (number, domain.group_id, ranks)
        if step.kind is Local.COMMIT:
            yield Commit()
            return
        boxes = [task for task in together if isinstance(task, ReshardBuffers)]
        if boxes and step.kind is not Local.COPY:
            for task in boxes:
                yield from self._boxes(task, launch)
            return
        items = []
        for operands, verdict in zip(together, agreed, strict=True):
            most = verdict.most if step.kind in PIECEWISE else ()
            pairs = operands.pairs(step)
            items += [Item(src, dst, most[at] if most else 0) for at, (src, dst) in enumerate(pairs)]
        if isinstance(step.kind, Local):
            yield Copies(tuple([(item.dst, item.src) for item in items]))
            return
        staging_buffers = self.staging_buffers
        if staging_buffers is not None:
            items = [
                Item(staging_buffers.side(src, domain), staging_buffers.side(dst, domain), most)
                for src, dst, most in items
            ]
        sizes = [size_of(step.kind, item, len(ranks)) for item in items]
        groups = coalesced(step.kind, sizes, coalesces=domain.coalesces)
        for group in groups:
            some = [items[at] for at in group]
            yield self._staged(some, Kernels(*launch, tuple([self._kernel(step.kind, step, item) for item in some])))
        items = [items[at] for at in sorted(set(range(len(items))).difference(*groups))]
        yield from self._packed(step.kind, step, items, launch, domain.rank)

    def _boxes(self, operands: ReshardBuffers, launch: _Launch) -> Iterator[PreparedStep]:
        copies = operands.copies()
        staged = None if self.staging_buffers is None else operands.staging_copies(self.staging_buffers)
        if copies and staged is None:
            yield Copies(copies)
        packed, exchange = operands.rounds(launch[2], self.block or NO_BUFFER)
        kernels = None
        if packed:
            kernels = ReshardKernels(
                *launch,
                tuple([boxes.kernel for boxes in packed]),
                tuple([Packed(*launch, (boxes.kernel,), boxes) for boxes in packed]),
                exchange,
            )
        if staged is not None:
            yield StagedStep(kernels, staged._replace(loads=[*staged.loads, *copies]))
        elif kernels is not None:
            yield kernels

    def _packed(
        self, kind: OpKind, step: TemplateStep, items: Sequence[Item], launch: _Launch, rank: int
    ) -> Iterator[PreparedStep]:
        ranks = launch[2]
        sizes = [(dtype_of(item), size_of(kind, item, len(ranks))) for item in items] if len(items) > 1 else []
        for bucket in buckets(sizes, self.program.staging) if sizes else [[0]] * len(items):
            chosen = [items[at] for at in bucket]
            if len(chosen) > 1:
                packed = FusedKernel(
                    kind, step.op, step.peer, items=chosen, me=ranks.index(rank), block=self.block or NO_BUFFER
                )
                yield self._staged(chosen, Packed(*launch, (packed.kernel,), packed))
            else:
                yield self._staged(chosen, Kernels(*launch, (self._kernel(kind, step, chosen[0]),)))

    def _staged(self, items: Sequence[Item], step: Kernels) -> PreparedStep:
        buffers = self.staging_buffers
        copies = None if buffers is None else buffers.staging_copies([(item.src, item.dst) for item in items])
        return step if copies is None else StagedStep(step, copies)

    def _kernel(self, kind: OpKind, step: TemplateStep, item: Item) -> Kernel:
        # Returns the prepared kernel itself, for backends that compare identities.
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
    """The algorithm for all ranks, from the verdicts."""
    if len(choices) == 1:
        return 0
    gives = [[() if spec.gives is None else spec.gives.tensors for spec in verdict.specs] for verdict in verdicts]
    nbytes = sum(max(sum(info.nbytes for info in infos) for infos in some) for some in gives)
    possible = [at for at, choice in enumerate(choices) if choice.at_least <= nbytes]
    return possible[-1] if possible else 0
