"""Prepares a program before the agreement: operands, outputs, staging. What is wrong is noted, not raised."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from raycollect.core.model import Kernel, Key
from raycollect.core.protocols import Communicator
from raycollect.engine.device_staging import Patience, home_of
from raycollect.engine.fusion_buffer import FusionBuffer
from raycollect.engine.instruments import Instruments
from raycollect.engine.kernel_schedule import KernelSchedule
from raycollect.engine.launch_sequence import LaunchSequence
from raycollect.engine.program_operands import MissingOperand, ProgramOperands
from raycollect.engine.run_cache import RunCache, places_of
from raycollect.engine.spans import Untimed
from raycollect.errors import KernelError, PlanAbortedError, RaycollectError, RefusedError, Violation
from raycollect.errors.text import too_large
from raycollect.observe.run_steps import RunStep
from raycollect.planner import Domain, Program
from raycollect.pos import Absence, Container, State

# State of the store -> (kind of violation, what was found, what was expected).
ABSENCES: dict[State, tuple[str, str, str]] = {
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


class Preparation:
    """The state of one run before the agreement. It never refers to its `Execution`: a cycle would keep tensors alive.

    Args:
        program: What to do.
        keys: The keys of its operands.
        communicators: Returns this participant's end of a group, by the group's id; raises GroupBrokenError.
        instruments: The store, the allocator and so on.
        launches: The launches of the run.
        spans: The timeline of the run.
        seq: The plan's number in its controller's order.
        waiting: Called when an operand's method has not ended yet; None: a missing operand never comes.
        values: The operands where they are not in the store, in the order of the keys.
        given: Whether an imperative call gave them.
        recalled: What an earlier run on these operands found out, where all participants already know of it.

    Attributes:
        operands: Buffers and checks of all tasks; None while the last run's results serve.
        recalled: What the last run on the same operands found out; None: nothing, or it does not hold any more.
        first: The kernel that the backend prepared before the agreement.
        buffer: The reserved fusion buffer.
        is_loaded: Whether the stand-ins of the first kernel hold what it reads.
    """

    __slots__ = (
        "_communicators",
        "_given",
        "_instruments",
        "_keys",
        "_launches",
        "_places",
        "_program",
        "_seq",
        "_spans",
        "_step",
        "_stored",
        "_values",
        "_waiting",
        "buffer",
        "first",
        "is_loaded",
        "operands",
        "recalled",
    )

    def __init__(
        self,
        program: Program,
        keys: Sequence[Key],
        communicators: Callable[[str], Communicator],
        instruments: Instruments,
        launches: LaunchSequence,
        spans: Untimed,
        *,
        seq: int,
        waiting: Callable[[Key], None] | None,
        values: Sequence[Container | MissingOperand] | None,
        given: bool,
        recalled: RunCache | None,
    ) -> None:
        self._program = program
        self._keys = keys
        self._communicators = communicators
        self._instruments = instruments
        self._launches = launches
        self._spans = spans
        self._seq = seq
        self._waiting = waiting
        self._stored = values is None  # the operands, in the store
        self._values: Sequence[Container | MissingOperand] = () if values is None else values
        self._given = given
        self._places: tuple[Any, ...] = ()  # where the operands lay before the agreement; empty: not remembered
        self._step: RunStep  # of the thread that runs it
        self.operands: ProgramOperands | None = None
        self.recalled = recalled
        self.first: Kernel | None = None
        self.buffer: FusionBuffer | None = None
        self.is_loaded: bool = False

    def run(self, step: RunStep) -> None:
        """Finds the operands and prepares the first round of the agreement, or recalls the last run."""
        self._step, step.at = step, _PREPARES
        if self._stored:
            self._values = tuple([self._find(key) for key in self._keys])
        values = self._values
        if self.recalled is None and not self._given and MissingOperand not in map(type, values):
            self.recalled = RunCache.recall(self._program, values, self._instruments.store)  # type: ignore[arg-type]
        if self.recalled is None:
            self.make_ready(0)
        else:
            self.buffer, self.first = self.recalled.block, self.recalled.first

    def make_ready(self, round_index: int) -> None:
        """Prepares the tasks that come in a round of the agreement; before the last round, the staging too."""
        operands = self.operands or self._look()
        if round_index:
            operands.ready(round_index, self._values, self._instruments.store)
        if round_index == self._program.rounds - 1 and not operands.has_violations:
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
            raise KernelError(detail="an operand was changed while the plan waited at the door")
        return operands

    def refuse(self, violations: Sequence[Violation]) -> None:
        """Notes for the agreement what is wrong besides the operands."""
        self.recalled = None
        rank = self._program.shares[self._program.tasks[0].share].rank
        self.current_operands().violate([replace(v, rank=rank) if v.rank < 0 else v for v in violations])

    def remember(self, arrival: bytes, blobs: tuple[bytes, ...], schedule: KernelSchedule) -> None:
        """Remembers the run with its operands, if it can be repeated; stand-ins are too large to keep."""
        operands = self.operands
        if self._places and operands is not None and operands.staging_buffers is None:
            cache = RunCache(
                program=self._program,
                places=self._places,
                ranges=operands.ranges,
                arrival=arrival,
                first=self.first,
                blobs=blobs,
                schedule=schedule,
                block=self.buffer,
            )
            cache.remember(self._containers())

    def _look(self) -> ProgramOperands:
        home = partial(_home_of, self._communicators)  # a method would keep the tensors as long as this object
        operands = ProgramOperands(
            self._program, self._instruments.allocate, self._keys, given=self._given, home_of=home
        )
        if not self._given and operands.is_repeatable:
            try:
                self._places = places_of(self._containers())  # before the agreement: later changes must be noticed
            except TypeError:  # a tensor has no memory any more, which the agreement hears of
                self._places = ()
        operands.ready(0, self._values, self._instruments.store)
        self.operands = operands
        return operands

    def _containers(self) -> list[Container]:
        return [one for one in self._values if isinstance(one, Container)]

    def _reserve(self, operands: ProgramOperands) -> None:
        # Which tensors are packed follows from all ranks' sizes; what this rank stages of them, from its own sizes,
        # which are known before the last round. The others' sizes only bound it.
        nbytes = operands.room()
        if not nbytes or self.buffer is not None:
            return
        try:
            self.buffer = self._instruments.staging.take(nbytes, self._program.staging, self._instruments.allocate)
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
        opened = self._launches.stage()
        if opened is None:
            return
        buffers = operands.staging_buffers
        copies = buffers.staging_copies([(kernel.src, kernel.dst)]) if buffers is not None else None
        if copies is not None:
            with self._spans.staging("load stand-ins"):
                copies.load(Patience(lambda: self._launches.reason, self._program.timeout_s))
            self.is_loaded = True
        communicator, launch = opened
        try:
            communicator.stage(launch, kernel)
        except RefusedError as exc:
            self.refuse(exc.violations)

    def _find(self, key: Key) -> Container | MissingOperand:
        store = self._instruments.store
        found = store.look(key)
        if type(found) is Absence and found.state is State.ABSENT and self._waiting:
            self._waiting(key)
            self._instruments.recorder.add("waiting", self._seq, key.hex())
            self._step.at = "waits for an operand's method"
            with self._spans.waiting("an operand"):
                found = store.wait(key, lambda: self._launches.reason is not None)
            self._step.at = _PREPARES
            if isinstance(found, Absence) and found.state is State.ABSENT:
                raise PlanAbortedError(detail=self._launches.reason or "aborted while waiting for an operand")
        if isinstance(found, Container):
            return found
        kind, text, expected = ABSENCES[found.state]
        return MissingOperand(kind, text.format(found.detail or "a value that is not kept"), expected)


def _no_memory(exc: BaseException, expected: str) -> Violation:
    return Violation(kind="allocation", rank=-1, field="staging", found=too_large(exc), expected=expected)


def _home_of(communicators: Callable[[str], Communicator], domain: Domain) -> str:
    return home_of(domain.memory, communicators(domain.group_id))
