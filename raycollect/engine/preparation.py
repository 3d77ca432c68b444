"""Prepares a program before the agreement: operands, outputs, staging. What is wrong is noted, not raised."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from raycollect.core.model import Kernel, Key
from raycollect.core.protocols import Communicator
from raycollect.engine.device_staging import home_of
from raycollect.engine.fusion_buffer import FusionBuffer
from raycollect.engine.instruments import Instruments
from raycollect.engine.kernel_schedule import KernelSchedule
from raycollect.engine.launch_sequence import LaunchSequence
from raycollect.engine.program_operands import MissingOperand, ProgramOperands
from raycollect.engine.run_cache import RunCache, places_of, single
from raycollect.engine.spans import Timed
from raycollect.errors import KernelError, PlanAbortedError, RaycollectError, RefusedError, Violation
from raycollect.errors.text import too_large
from raycollect.observe.run_steps import RunStep
from raycollect.planner import Domain, Program
from raycollect.pos import Absence, Container, State

# State of the store -> (kind of violation, what was found, what was expected).
_ABSENCES: dict[State, tuple[str, str, str]] = {
    State.ABSENT: (
        "lost",
        "not there: its method never ran here, in this process (a restarted actor has lost what it held)",
        "a value that its method returned",
    ),
    State.FAILED: ("producer_failed", "missing: its method raised {}", "a value"),
    State.BY_VALUE: ("not_tensor", "{}, returned by value", "a tensor, or a list, tuple or dict of tensors"),
    State.FREED: ("freed", "freed", "a tensor that is still held"),
}

_PREPARES = "looks at its operands"


@dataclass(slots=True, eq=False)
class Preparation:
    """The state of one run before the agreement; it never refers to its `Execution`: a cycle would keep tensors."""

    program: Program
    keys: Sequence[Key]  # of its operands
    communicators: Callable[[str], Communicator]  # by the group's id; raises GroupBrokenError
    instruments: Instruments
    launches: LaunchSequence  # of the run
    spans: Timed  # the timeline of the run
    seq: int  # the plan's number in its controller's order
    waiting: Callable[[Key], None] | None  # called when an operand's method has not ended yet; None: it never will
    values: Sequence[Container | MissingOperand] | None  # the operands, in the order of the keys; None: in the store
    given: bool  # whether an imperative call gave them
    recalled: RunCache | None  # what the last run on the same operands found out; None: nothing, or it holds no more
    operands: ProgramOperands | None = None  # buffers and checks of all tasks; None while the last run's results serve
    first: Kernel | None = None  # that the backend prepared before the agreement
    buffer: FusionBuffer | None = None  # reserved
    is_loaded: bool = False  # whether the stand-ins of the first kernel hold what it reads
    _found: Sequence[Container | MissingOperand] = ()  # the operands, once they were looked for
    _places: tuple[Any, ...] = ()  # where the operands lay before the agreement; empty: not remembered
    _step: RunStep = field(init=False)  # of the thread that runs it

    def run(self, step: RunStep) -> None:
        """Finds the operands and prepares the first round of the agreement, or recalls the last run."""
        self._step, step.at = step, _PREPARES
        values = tuple([self._find(key) for key in self.keys]) if self.values is None else self.values
        self._found = values
        if self.recalled is None and MissingOperand not in map(type, values):
            self.recalled = self._recall(values)  # type: ignore[arg-type]
        if self.recalled is None:
            self.make_ready(0)
        else:
            self.buffer, self.first = self.recalled.block, self.recalled.first

    def _recall(self, values: Sequence[Container]) -> RunCache | None:
        program, store = self.program, self.instruments.store
        known = None if self.given else RunCache.recall(program, values, store)
        if known is None:
            known = self.instruments.shapes.recall(program, values, store, given=self.given)
            if known is not None and not self.given:
                known.remember(values)
        return known

    def make_ready(self, round_index: int) -> None:
        """Prepares the tasks that come in a round of the agreement; before the last round, the staging too."""
        operands = self.operands or self._look()
        if round_index:
            operands.ready(round_index, self._found, self.instruments.store)
        if round_index == self.program.rounds - 1 and not operands.has_violations:
            self._allocate_stand_ins(operands)
            self._reserve(operands)
            self.first = None if operands.has_violations else operands.first()
            if self.first is not None:
                self._stage(operands, self.first)

    def current_operands(self) -> ProgramOperands:
        """The operands, looked at anew where something is not as in the last run after all.

        Raises:
            KernelError: An operand has changed since the agreement heard of it.
        """
        if self.operands is not None:
            return self.operands
        operands = self._look()
        if self.recalled is not None and self.recalled.places != self._places:
            raise KernelError(detail="an operand was changed while the plan waited in the consistency check")
        return operands

    def refuse(self, violations: Sequence[Violation]) -> None:
        """Notes for the agreement what is wrong besides the operands."""
        self.recalled = None
        rank = self.program.shares[self.program.tasks[0].share].rank
        self.current_operands().violate([replace(v, rank=rank) if v.rank < 0 else v for v in violations])

    def remember(self, arrival: bytes, blobs: tuple[bytes, ...], schedule: KernelSchedule) -> None:
        """Remembers the run with its operands, if it can be repeated; stand-ins are too large to keep."""
        operands = self.operands
        if self._places and operands is not None and operands.staging_buffers is None:
            cache = RunCache(
                program=self.program,
                places=self._places,
                ranges=operands.ranges,
                arrival=arrival,
                first=self.first,
                blobs=blobs,
                schedule=schedule,
                block=self.buffer,
            )
            containers = self._containers()
            if not self.given:  # else nothing finds them again
                cache.remember(containers)
            self.instruments.shapes.remember(cache, containers, given=self.given)

    def _look(self) -> ProgramOperands:
        home = partial(_home_of, self.communicators)  # a method would keep the tensors as long as this object
        operands = ProgramOperands(self.program, self.instruments.allocate, self.keys, given=self.given, home_of=home)
        containers = self._containers()
        if operands.is_repeatable and (not self.given or single(containers) is not None):
            try:
                self._places = places_of(containers)  # before the agreement: later changes must be noticed
            except TypeError:  # a tensor has no memory any more, which the agreement hears of
                self._places = ()
        operands.ready(0, self._found, self.instruments.store)
        self.operands = operands
        return operands

    def _containers(self) -> list[Container]:
        return [one for one in self._found if isinstance(one, Container)]

    def _reserve(self, operands: ProgramOperands) -> None:
        # Which tensors are packed follows from all ranks' sizes; what this rank stages of them, from its own sizes,
        # which are known before the last round. The others' sizes only bound it.
        nbytes = operands.room()
        if not nbytes or self.buffer is not None:
            return
        try:
            self.buffer = self.instruments.staging.take(nbytes, self.program.staging, self.instruments.allocate)
        except MemoryError as exc:
            self.refuse([_no_memory(exc, f"{nbytes} bytes")])

    def _allocate_stand_ins(self, operands: ProgramOperands) -> None:
        try:
            operands.lift()
        except RaycollectError:
            raise
        except Exception as exc:  # noqa: BLE001 - of the library that makes memory on a device
            self.refuse([_no_memory(exc, "room for tensors that lie elsewhere than the backend works")])

    def _stage(self, operands: ProgramOperands, kernel: Kernel) -> None:
        # What the backend refuses, all ranks hear of in the agreement.
        opened = self.launches.opened
        if opened is None:
            return
        buffers = operands.staging_buffers
        copies = buffers.staging_copies([(kernel.src, kernel.dst)]) if buffers is not None else None
        if copies is not None:
            with self.spans.staging("load stand-ins"):
                copies.load(self.launches.patience())
            self.is_loaded = True
        communicator, launch = opened
        try:
            communicator.stage(launch, kernel)
        except RefusedError as exc:
            self.refuse(exc.violations)

    def _find(self, key: Key) -> Container | MissingOperand:
        store = self.instruments.store
        found = store.look(key)
        if type(found) is Absence and found.state is State.ABSENT and self.waiting:
            self.waiting(key)
            self.instruments.recorder.add("waiting", self.seq, key.hex())
            self._step.at = "waits for an operand's method"
            with self.spans.waiting("an operand"):
                found = store.wait(key, lambda: self.launches.aborted() is not None)
            self._step.at = _PREPARES
            if isinstance(found, Absence) and found.state is State.ABSENT:
                raise PlanAbortedError(detail=self.launches.aborted() or "aborted while waiting for an operand")
        if isinstance(found, Container):
            return found
        return missing(found)


def missing(found: Absence) -> MissingOperand:
    """Why a store has no operand."""
    kind, text, expected = _ABSENCES[found.state]
    return MissingOperand(kind, text.format(found.detail or "a value that is not kept"), expected)


def _no_memory(exc: BaseException, expected: str) -> Violation:
    return Violation(kind="allocation", rank=-1, field="staging", found=too_large(exc), expected=expected)


def _home_of(communicators: Callable[[str], Communicator], domain: Domain) -> str:
    return home_of(domain.memory, communicators(domain.group_id))
