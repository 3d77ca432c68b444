"""The preparation of a run without a cached earlier run: its operands, their checks, the arrival for the agreement.

Everything that can fail on one participant alone happens here, before the agreement, and is reported there as a
violation (P3).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from raycollect.backends import arrays
from raycollect.backends.arrays import DeviceArray
from raycollect.core.model import Kernel, Key, OpKind
from raycollect.core.operations import PIECES
from raycollect.engine import long_arrivals
from raycollect.engine.agreement import (
    Agreement,
    Side,
    Spec,
    Verdict,
    encode_arrivals,
    is_batch,
)
from raycollect.engine.device_staging import CUDA, StagingBuffers
from raycollect.engine.fusion_buffer import FusionBuffer, Item, room, size_of
from raycollect.engine.instruments import Instruments
from raycollect.engine.missing_operand import MissingOperand
from raycollect.engine.operands import FEWER_TENSORS, TaskBuffers
from raycollect.engine.prepared import Count, Prepared, operand_places
from raycollect.engine.progress import nbytes_of_bundle
from raycollect.engine.reshard_operands import ReshardBuffers
from raycollect.engine.run_cache import single
from raycollect.engine.schedule import Scheduler
from raycollect.engine.steps import PreparedBundle
from raycollect.errors import KernelError, ProtocolError, RaycollectError, Violation
from raycollect.errors.text import too_large
from raycollect.planner import Domain, Program, Role
from raycollect.planner.fusion import coalesced
from raycollect.pos import Container, Range
from raycollect.pos.extents import Extents

_EVERYWHERE = [(0, 1 << 64)]


class Preparation:
    """All tasks of one run of a program, from their operands to the steps of the run.

    Args:
        program: The program.
        operands: The operand of each of its keys, in order.
        keys: The keys, for messages; empty for the operands of a member's call.
        home_of: Returns the device of a group, see `device_staging.home_of`.
    """

    def __init__(
        self,
        program: Program,
        operands: Sequence[Container | MissingOperand],
        keys: Sequence[Key],
        instruments: Instruments,
        home_of: Callable[[Domain], str],
        *,
        is_call: bool,
    ) -> None:
        self.program = program
        self.arrival: bytes = b""  # of the latest round
        self.first: Kernel | None = None  # the kernel that the backend may prepare before the agreement
        self.buffer: FusionBuffer | None = None  # the taken fusion buffer
        self.staging_buffers: StagingBuffers | None = None  # None: not needed
        self.tasks: list[TaskBuffers] = []  # the buffers of each task
        self._operands = operands
        self._instruments = instruments
        self._home_of = home_of
        self._is_batch = is_batch(program)
        self._whole: dict[int, list[Range]] = {}  # task -> addresses that it writes whole; only if any are dirty
        for task in program.tasks:
            refs = () if is_call else tuple(keys[n] if n >= 0 else None for n in task.inputs)
            share = program.shares[task.share]
            of_task = ReshardBuffers if share.template.boxes else TaskBuffers
            self.tasks.append(of_task(share, instruments.allocate, given=is_call, keys=refs))
        # Before the agreement, so that later changes are detected
        self.places: tuple[Any, ...] = self._places(is_call=is_call)
        self._bind(0)

    def complete(self) -> None:
        """Makes the staging and fusion buffers, before the last round, unless the run is refused."""
        if self.has_violations:
            return
        self._make_staging_buffers()
        self._take_buffer()
        self.first = None if self.has_violations else self._first()

    def refuse(self, violations: Sequence[Violation]) -> None:
        """Adds violations that are not of operands, for the agreement."""
        rank = self.program.shares[self.program.tasks[0].share].rank
        self.tasks[0].violations += [dataclasses.replace(v, rank=rank) if v.rank < 0 else v for v in violations]

    def go_on(self, round_index: int, verdicts: Mapping[int, Verdict]) -> None:
        """Makes the outputs that follow from a round of the agreement, and prepares the next round."""
        for task, operands in zip(self.program.tasks, self.tasks, strict=True):
            if task.round == round_index and operands.share.template.is_learned:
                _learn(operands, verdicts[task.request].specs)
        self._bind(round_index + 1)

    def prepared(self, agreement: Agreement, blobs: Sequence[bytes]) -> Prepared:
        """Makes the steps of the run from the agreement; `blobs` are the arrivals of the last round."""
        scheduler = Scheduler(self.program, self.tasks, self.buffer, self.first, self.staging_buffers)
        bundles = scheduler.bundles(agreement.verdicts, alone=agreement.conflict)
        messages = long_arrivals.messages_of(blobs)
        return Prepared(
            program=self.program,
            places=() if self.staging_buffers is not None else self.places,  # staging buffers are too large to keep
            ranges=self.ranges,
            arrival=self.arrival,
            message=messages[self.program.agreement.ranks.index(self.program.agreement.rank)],
            first=self.first,
            messages=messages,
            bundles=bundles,
            counts=tuple(map(self._count, bundles)),
            writes=[span for bundle in bundles for span in bundle.ranges],
            buffer=self.buffer,
        )

    def _count(self, bundle: PreparedBundle) -> Count:
        share, calls = bundle.share, bundle.tasks
        tally = self._instruments.counters.of(share.group_id, share.op)
        return tally, calls, nbytes_of_bundle(bundle), calls / len(self.program.tasks)

    def check_unchanged(self, cached: Prepared) -> None:
        """Checks, after an agreement on a cached arrival, that the operands are unchanged.

        Raises:
            KernelError: An operand has changed.
        """
        wrong = [str(violation) for operands in self.tasks for violation in operands.violations]
        if wrong or self.places != cached.places:
            reason = "; ".join(wrong) or "other memory, or another layout of it"
            raise KernelError(detail=f"an operand changed while the plan was in the consistency check: {reason}")
        self.first, self.buffer, self.arrival = cached.first, cached.buffer, cached.arrival

    def _places(self, *, is_call: bool) -> tuple[Any, ...]:
        operands = [operand for operand in self._operands if isinstance(operand, Container)]
        if len(operands) < len(self._operands) or not self._is_repeatable or (is_call and single(operands) is None):
            return ()
        try:
            return operand_places(operands)
        except TypeError:  # a tensor has no memory any more, which becomes a violation
            return ()

    @property
    def has_violations(self) -> bool:
        """Whether any task has a violation."""
        return any(operands.violations for operands in self.tasks)

    def outputs(self) -> tuple[Container, ...]:
        """Returns the outputs, in the order of the tasks."""
        return tuple([container for operands in self.tasks for container in operands.outputs()])

    def _bind(self, round_index: int) -> None:
        # Binds, makes and checks the buffers of the tasks of one round of the agreement.
        containers, store = self._operands, self._instruments.store
        dirt = self._is_batch and store.is_dirty(_EVERYWHERE)
        for at, (task, operands) in enumerate(zip(self.program.tasks, self.tasks, strict=True)):
            if task.round != round_index:
                continue
            inputs = iter(task.inputs)
            for index, buffer in enumerate(operands.share.template.buffers):
                if buffer.role is not Role.OPERAND:
                    operands.make(index)
                    continue
                n = next(inputs)
                operand = containers[n] if n >= 0 else next(iter(self.tasks[-1 - n].outputs()), None)
                if isinstance(operand, MissingOperand):
                    operands.violate(operand.kind, "operand", operand.actual, operand.expected, index)
                    operand = None
                operands.bind(index, operand)
            operands.check(store, self._written_before(at) if dirt else None)
            if 0 < self.program.staging < _LARGEST_ELEMENT:
                _check_staging(operands, self.program.staging)
            if dirt:
                self._whole[at] = operands.dense()

    def _written_before(self, at: int) -> Extents:
        # In the order of calls, not of rounds.
        return Extents(*(span for other, spans in self._whole.items() if other < at for span in spans))

    def arrival_for(self, round_index: int) -> bytes:
        """Returns the arrival of this participant for a round; descriptions that are too long become violations."""
        try:
            self.arrival = self._encoded(round_index)
        except ProtocolError as exc:  # all tasks together
            self.refuse([Violation(kind="unsupported", field="operand", found=exc.detail, expected=FEWER_TENSORS)])
            self.arrival = self._encoded(round_index, describes=False)
        if self.has_violations:
            self.first = None
        return self.arrival

    def _encoded(self, round_index: int, *, describes: bool = True) -> bytes:
        arrivals = {
            task.request: operands.arrival(describes=describes)
            for task, operands in zip(self.program.tasks, self.tasks, strict=True)
            if task.round == round_index
            or (task.round == round_index - 1 and operands.share.template.is_learned)
            or operands.violations  # noted between the rounds
        }
        return encode_arrivals(arrivals, conflict=self._conflict())

    def _conflict(self) -> bool:
        """Whether keys that the plan assumes to be separate overlap in memory, and their tasks could be reordered."""
        if len(self.tasks) < 2:
            return False
        users: dict[int, list[tuple[int, bool]]] = {}  # key -> (task, whether the task writes it)
        spans = []
        for number, (task, operands) in enumerate(zip(self.program.tasks, self.tasks, strict=True)):
            inputs = iter(task.inputs)
            for index, bound, written in operands.uses:
                if operands.share.template.buffers[index].role is not Role.OPERAND:
                    continue  # only this plan uses it
                key = next(inputs)
                if key not in users:
                    spans += [(*arrays.byte_range(array), key, array) for array in bound.arrays]
                users.setdefault(key, []).append((number, written))
        spans.sort(key=lambda span: span[:2])
        for at, (_, stop, key, array) in enumerate(spans):
            for later in range(at + 1, len(spans)):
                start, _, other, overlapping = spans[later]
                if start >= stop:
                    break
                if key != other and self._may_swap(users[key], users[other]) and arrays.overlap(array, overlapping):
                    return True
        return False

    def _may_swap(self, some: Sequence[tuple[int, bool]], others: Sequence[tuple[int, bool]]) -> bool:
        # Whether one of the two tasks writes, and the plan does not order them.
        return any(
            task != other and (writes or also_writes) and not self._are_ordered(*sorted((task, other)))
            for task, writes in some
            for other, also_writes in others
        )

    def _are_ordered(self, first: int, second: int) -> bool:
        tasks = self.program.tasks
        if -1 - first in tasks[second].inputs:
            return True
        shared = set(tasks[first].inputs) & set(tasks[second].inputs)
        return any(key in shared for at in (first, second) for key in self._written_by(at))

    def _written_by(self, at: int) -> list[int]:
        operands, buffers = self.tasks[at], self.program.shares[self.program.tasks[at].share].template.buffers
        indices = [index for index, buffer in enumerate(buffers) if buffer.role is Role.OPERAND]
        written = {index for index, _, is_written in operands.uses if is_written}
        return [n for n, index in zip(self.program.tasks[at].inputs, indices, strict=True) if index in written]

    def _make_staging_buffers(self) -> None:
        try:
            self._make_buffers()
        except RaycollectError:
            raise
        except Exception as exc:  # noqa: BLE001 - of the library that makes memory on a device
            self.refuse([_no_memory(exc, "memory for staging buffers")])

    def _take_buffer(self) -> None:
        # The choice of packed tensors follows from all ranks' sizes; this rank's staging of them follows from its own
        # sizes, which are known before the last round, and bounded by the other ranks' sizes.
        nbytes, instruments = self._room(), self._instruments
        if not nbytes:
            return
        try:
            self.buffer = instruments.staging.take(nbytes, self.program.staging, instruments.allocate)
        except MemoryError as exc:
            self.refuse([_no_memory(exc, f"{nbytes} bytes")])

    def _make_buffers(self) -> None:
        # Makes staging buffers for tensors on other devices than the backends'; raises MemoryError.
        if not any(map(_may_be_elsewhere, self.tasks)):
            return
        domains = {share.domain for share in self.program.shares if share.domain.memory}
        staging_buffers = StagingBuffers({domain: self._home_of(domain) for domain in domains})
        for operands in self.tasks:
            share = operands.share
            if isinstance(operands, ReshardBuffers):
                operands.stage(staging_buffers)
            for step in (step for way in share.template.ways for step in way):
                domain = share.domain
                if isinstance(step.kind, OpKind) and domain.rank in (step.ranks or domain.ranks):
                    for src, dst in operands.pairs(step):
                        staging_buffers.side(src, domain)
                        staging_buffers.side(dst, domain)
        self.staging_buffers = staging_buffers if len(staging_buffers) else None

    def _first(self) -> Kernel | None:
        # The kernel that runs first for any arrivals of the other ranks; None: unknown.
        program = self.program
        if self._is_batch or program.rounds > 1 or len(program.bundles[0].base) > 1 or program.bundles[0].base[0]:
            return None
        (operands,) = self.tasks
        steps = operands.share.template.steps
        if not steps or steps[0].at:
            return None
        step, pairs = steps[0], operands.pairs(steps[0])
        if len(pairs) != 1:  # several are packed, or run together
            return None
        src, dst = pairs[0]
        if not isinstance(step.kind, OpKind) or not _fit(operands, src, dst):
            return None
        if self.staging_buffers is not None:
            domain = operands.share.domain
            src, dst = self.staging_buffers.side(src, domain), self.staging_buffers.side(dst, domain)
        return Kernel(kind=step.kind, src=src, dst=dst, op=step.op, peer=step.peer)

    def _room(self) -> int:
        # The maximum bytes of fusion buffer for the tasks at a time, by this rank's sizes; 0: nothing is packed.
        # Boxes of a reshard are always packed; their rounds have a separate bound.
        boxes = max((task.staging_nbytes for task in self.tasks if isinstance(task, ReshardBuffers)), default=0)
        if not self.program.staging or (
            not self._is_batch and all(bound is None or len(bound.leaves) == 1 for bound in self.tasks[0].buffers)
        ):
            return boxes
        most = 0
        for bundle in self.program.bundles:
            tasks = [self.tasks[at] for at in bundle.tasks]
            for step in (step for way in tasks[0].share.template.ways for step in way):
                kind, pairs = step.kind, [pair for operands in tasks for pair in operands.pairs(step)]
                if len(pairs) < 2 or not isinstance(kind, OpKind):
                    continue
                domain = tasks[0].share.domain
                if self.staging_buffers is not None:
                    side = self.staging_buffers.side
                    pairs = [(side(src, domain), side(dst, domain)) for src, dst in pairs]
                items = [Item(src, dst) for src, dst in pairs]
                packed = set(range(len(items)))
                if domain.coalesces and len(tasks) == 1:  # tasks that turn out to overlap run one by one
                    sizes = [size_of(kind, item, len(domain.ranks)) for item in items]
                    packed.difference_update(*coalesced(kind, sizes, coalesces=True))
                most = max(most, sum(room(kind, items[at]) for at in packed))
        return max(boxes, min(most, self.program.staging))

    @property
    def ranges(self) -> list[Range]:
        """The addresses of all buffers of the tasks."""
        bounds = [bound for operands in self.tasks for _, bound, _ in operands.uses]
        return [arrays.byte_range(array) for bound in bounds for array in bound.arrays]

    @property
    def _is_repeatable(self) -> bool:
        # Whether the run makes no buffers, so that a run on the same operands repeats it.
        shares = self.program.shares
        return self.program.rounds == 1 and all(
            buffer.role is Role.OPERAND for share in shares for buffer in share.template.buffers
        )


_LARGEST_ELEMENT = 16  # the bytes of the widest element, a complex128


def _check_staging(operands: TaskBuffers, staging: int) -> None:
    for index, bound in enumerate(operands.buffers):
        largest = max((array.dtype.itemsize for array in bound.arrays), default=0) if bound else 0
        if largest > staging:
            operands.violate("argument", "staging_nbytes", str(staging), f"0, or at least {largest} bytes", index)
            return


def _fit(operands: TaskBuffers, src: Any, dst: Any) -> bool:
    """Whether this rank's own arrays fit each other: the agreement refuses others, which no backend may get."""
    if src is dst or ((src is None or dst is None) and type(src) is not tuple and type(dst) is not tuple):
        return True
    me = operands.share.ranks.index(operands.share.rank)
    sides = [side if type(side) is tuple else (side,) for side in (src, dst) if side is not None]
    sizes = {side[me if len(side) > 1 else 0].size for side in sides}
    return len(sizes) <= 1 and len({arrays.info(array).dtype for side in sides for array in side}) <= 1


def _no_memory(exc: BaseException, expected: str) -> Violation:
    return Violation(kind="allocation", rank=-1, field="staging", found=too_large(exc), expected=expected)


def _may_be_elsewhere(operands: TaskBuffers) -> bool:
    if operands.share.domain.memory == CUDA:
        return True
    for bound in operands.buffers:
        if bound is not None:
            for array in bound.arrays:
                if type(array) is DeviceArray:
                    return True
    return False


def _learn(operands: TaskBuffers, specs: Sequence[Spec]) -> None:
    # Learned outputs are on the devices of this rank's inputs, if it has any.
    mine = operands.spec().gives
    try:
        operands.learn([_on_devices_of(spec, mine) for spec in specs] if mine is not None else specs)
    except RaycollectError:
        raise
    except Exception as exc:  # noqa: BLE001 - from the library that makes the tensor, as for a missing device
        index = next(at for at, buffer in enumerate(operands.share.template.buffers) if buffer.role is Role.LEARNED)
        expected = "the sender's kind of device on this rank, or an existing output"
        operands.violate("allocation", "output", too_large(exc), expected, index)


def _on_devices_of(spec: Spec, mine: Side) -> Spec:
    # The spec with each tensor on the device of this rank's tensor at the same position.
    gives = spec.gives
    if gives is None or len({info.device for side in (gives, mine) for info in side.tensors}) < 2:
        return spec
    pieces = len(mine.structure.items) if PIECES[OpKind(spec.op)][0] else 1
    row = mine.tensors[: len(mine.tensors) // pieces]
    infos = tuple([info.beside(row[at % len(row)]) for at, info in enumerate(gives.tensors)])
    return replace(spec, gives=replace(gives, tensors=infos))
