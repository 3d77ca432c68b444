"""Runs one program with what it is given: a store, communicators, a recorder, a clock, faults. It decides nothing.

The order keeps P3 and P4: everything that can fail locally happens before the agreement, and is brought there as a
violation; then kernels run; a failure among them leaves exactly the tensors being written dirty.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from raycollect.core.model import Kernel, Key
from raycollect.core.protocols import Communicator, Exchange, Reaching
from raycollect.engine.batch_agreement import BatchAgreement, is_batch
from raycollect.engine.device_staging import home_of
from raycollect.engine.fusion_buffer import FusionBuffer
from raycollect.engine.instruments import Instruments
from raycollect.engine.kernel_schedule import KernelSchedule, ScheduledBundle, Scheduler
from raycollect.engine.launch_sequence import LaunchSequence
from raycollect.engine.program_operands import MissingOperand, ProgramOperands, missing
from raycollect.engine.progress import BytesDone
from raycollect.engine.run_cache import RunCache, places_of, single
from raycollect.engine.spans import timed
from raycollect.errors import (
    FaultError,
    KernelError,
    PlanAbortedError,
    RaycollectError,
    RefusedError,
    Violation,
    kept,
    refusal,
)
from raycollect.errors.text import too_large
from raycollect.observe import Recorder, run_steps
from raycollect.observe.run_steps import RunStep
from raycollect.planner import Domain, Program
from raycollect.pos import Absence, Container, State

_PREPARES = "looks at its operands"

Keep = Callable[[Sequence[Container]], None]
"""Takes the outputs of a program, before another participant can report that this one has ended; may raise
RaycollectError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The end of a program on this participant."""

    error: RaycollectError | None = None  # None: it ran to its end
    outputs: tuple[Container, ...] = ()  # that it made, in the order of the requests
    ended: tuple[int, ...] = ()  # places of those known to have run all of the plan; see `Communicator.end`


WELL = Outcome()
"""Of most runs: all went well, and there is nothing to tell."""


class Execution:
    """One run of one program: finds its operands, prepares, agrees, and has its launches run what follows.

    Args:
        communicators: Returns this participant's end of a group, by the group's id; raises GroupBrokenError.
        seq: The plan's number in its controller's order; its launches take the numbers from there on.
        aborted: Why the plan was aborted, or None; asked before each launch, and after `abort` in each wait.
        waiting: Called when an operand's method has not ended yet; None: it never will, since ordered actors run
            methods in order.
        operands: The operands of an imperative call, in the order of the keys; None: they are in the store.
        exchange: How the participants meet where they have no group in common.
        held: The operands of a captured step, which are not in the store.
        met: What an earlier run on these operands found out, and what all have now brought: see `FastPath`.
        keep: What takes its outputs; None: the caller takes them from the outcome.
        meeting: The name of a member's own call in timelines; see `Label`.
        resumes: Whether a `FastPath` has begun the run, up to the agreement.
    """

    def __init__(
        self,
        program: Program,
        keys: Sequence[Key],
        communicators: Callable[[str], Communicator],
        instruments: Instruments,
        *,
        seq: int,
        aborted: Callable[[], str | None],
        waiting: Callable[[Key], None] | None = None,
        operands: Sequence[Container] | None = None,
        exchange: Exchange | None = None,
        held: Sequence[Container | MissingOperand] | None = None,
        met: tuple[RunCache, tuple[bytes, ...]] | None = None,
        keep: Keep | None = None,
        meeting: str = "",
        resumes: bool = False,
    ) -> None:
        self.program: Program = program
        self._keys = keys
        self._communicators = communicators
        self._instruments = instruments
        self._waiting = waiting
        self._values = held if operands is None else operands  # None: they are in the store
        self._given = operands is not None
        self._keep = keep
        self._resumes = resumes
        self._timed = timed(instruments.tracer.ring, program, seq, meeting)
        self._launches = LaunchSequence(
            program, communicators, exchange, seq=seq, aborted=aborted, instruments=instruments, spans=self._timed
        )
        # What the last run on the same operands found out; None: nothing, or it holds no more
        self._recalled: RunCache | None = None if met is None else met[0]
        self._brought: tuple[bytes, ...] | None = None if met is None else met[1]
        self._found: Sequence[Container | MissingOperand] = ()  # the operands, once they were looked for
        self._places: tuple[Any, ...] = ()  # where they lay before the agreement; empty: not remembered
        self._operands: ProgramOperands | None = None  # buffers and checks; None while the last run's results serve
        self._first: Kernel | None = None  # that the backend prepared before the agreement
        self._buffer: FusionBuffer | None = None  # reserved
        self._step: RunStep  # of the thread that runs it

    def run(self) -> Outcome:
        """Runs it. A RaycollectError, or a lack of memory, is an outcome; anything else, a bug, is raised."""
        self._timed.begin()
        outcome = self._run_all()
        self._timed.end(outcome.error)
        return outcome

    def _run_all(self) -> Outcome:
        launches, step = self._launches, run_steps.here()
        launches.record("start", self.program.name)
        launches.kernel_progress, self._step = step.kernels, step
        step.kernels.cover()
        outputs: tuple[Container, ...] = ()
        ended: tuple[int, ...] = ()
        ok = False
        try:
            launches.begin()
            if not self._resumes:
                launches.reach("start")
            self._prepare()
            if not self._resumes:
                launches.reach("before_check")
            with self._timed.check() if self._brought is None else nullcontext():  # else `FastPath` has noted it
                schedule = launches.schedule = self._agree()
            launches.reach("after_check")
            launches.run(schedule, step)
            launches.reach("end")
            outputs = self._operands.made() if self._operands else ()
            if outputs and self._keep is not None:
                step.at = "keeps its outputs"
                self._keep(outputs)
            ok = True
        except RaycollectError as exc:
            return Outcome(error=self._located(exc))
        except MemoryError as exc:
            return Outcome(error=self._located(KernelError(detail=f"out of memory: {exc}")))
        finally:
            step.at = ""  # else it would keep what this object holds
            ended = launches.end(ok=ok)
            if self._buffer is not None and (ok or not launches.packs):
                self._buffer.give()
        launches.record("done")
        return Outcome(outputs=outputs, ended=ended)

    def abort(self) -> None:
        """Ends its waits, once `aborted` says why; any thread may call it."""
        self._launches.abort()
        self._instruments.store.wake()

    def bytes_done(self) -> BytesDone:
        """Returns its progress; any thread may call it."""
        return self._launches.bytes_done()

    def _prepare(self) -> None:
        """Finds the operands and prepares the first round of the agreement, or recalls the last run."""
        self._step.at = _PREPARES
        values = tuple([self._find(key) for key in self._keys]) if self._values is None else self._values
        self._found = values
        if self._recalled is None and MissingOperand not in map(type, values):
            self._recalled = self._recall(values)  # type: ignore[arg-type]
        if self._recalled is None:
            self._make_ready(0)
        else:
            self._buffer, self._first = self._recalled.block, self._recalled.first

    def _recall(self, values: Sequence[Container]) -> RunCache | None:
        program, store = self.program, self._instruments.store
        known = None if self._given else RunCache.recall(program, values, store)
        if known is None:
            known = self._instruments.shapes.recall(program, values, store, given=self._given)
            if known is not None and not self._given:
                known.remember(values)
        return known

    def _make_ready(self, round_index: int) -> None:
        """Prepares the tasks that come in a round of the agreement; before the last round, the staging too."""
        operands = self._operands or self._look()
        if round_index:
            operands.ready(round_index, self._found, self._instruments.store)
        if round_index == self.program.rounds - 1 and not operands.has_violations:
            self._allocate_stand_ins(operands)
            self._reserve(operands)
            self._first = None if operands.has_violations else operands.first()
            if self._first is not None:
                self._load_stand_ins(operands, self._first)

    def _look_again(self, known: RunCache) -> ProgramOperands:
        """Prepares operands after the agreement, to which this rank brought what the last run had found out.

        Raises:
            KernelError: They no longer are what the others have agreed to.
        """
        operands = self._look()
        wrong = [str(violation) for one in operands.operands for violation in one.violations]
        if not wrong and self._places == known.places:
            return operands
        self._launches.schedule = known.schedule  # the others may wait for this rank in its kernels
        found = "; ".join(wrong) or "other memory, or another layout of it"
        detail = f"an operand changed while the plan was in the consistency check: {found}"
        raise KernelError(detail=detail)

    def _refuse(self, violations: Sequence[Violation]) -> None:
        """Notes for the agreement what is wrong besides the operands."""
        self._recalled = None
        rank = self.program.shares[self.program.tasks[0].share].rank
        (self._operands or self._look()).violate([replace(v, rank=rank) if v.rank < 0 else v for v in violations])

    def _remember(self, arrival: bytes, blobs: tuple[bytes, ...], schedule: KernelSchedule) -> None:
        """Remembers the run with its operands, if it can be repeated; stand-ins are too large to keep."""
        operands = self._operands
        if self._places and operands is not None and operands.staging_buffers is None:
            cache = RunCache(
                program=self.program,
                places=self._places,
                ranges=operands.ranges,
                arrival=arrival,
                first=self._first,
                blobs=blobs,
                schedule=schedule,
                block=self._buffer,
            )
            containers = self._containers()
            if not self._given:  # else nothing finds them again
                cache.remember(containers)
            self._instruments.shapes.remember(cache, containers, given=self._given)

    def _look(self) -> ProgramOperands:
        home = partial(_home_of, self._communicators)  # a method would be a cycle, which keeps tensors
        operands = ProgramOperands(
            self.program, self._instruments.allocate, self._keys, given=self._given, home_of=home
        )
        containers = self._containers()
        if operands.is_repeatable and (not self._given or single(containers) is not None):
            try:
                self._places = places_of(containers)  # before the agreement: later changes must be noticed
            except TypeError:  # a tensor has no memory any more, which the agreement hears of
                self._places = ()
        operands.ready(0, self._found, self._instruments.store)
        self._operands = operands
        return operands

    def _containers(self) -> list[Container]:
        return [one for one in self._found if isinstance(one, Container)]

    def _reserve(self, operands: ProgramOperands) -> None:
        # Which tensors are packed follows from all ranks' sizes; what this rank stages of them, from its own sizes,
        # which are known before the last round. The others' sizes only bound it.
        nbytes = operands.room()
        if not nbytes or self._buffer is not None:
            return
        try:
            self._buffer = self._instruments.staging.take(nbytes, self.program.staging, self._instruments.allocate)
        except MemoryError as exc:
            self._refuse([_no_memory(exc, f"{nbytes} bytes")])

    def _allocate_stand_ins(self, operands: ProgramOperands) -> None:
        try:
            operands.lift()
        except RaycollectError:
            raise
        except Exception as exc:  # noqa: BLE001 - of the library that makes memory on a device
            self._refuse([_no_memory(exc, "room for tensors that lie elsewhere than the backend works")])

    def _load_stand_ins(self, operands: ProgramOperands, kernel: Kernel) -> None:
        buffers = operands.staging_buffers
        copies = buffers.staging_copies([(kernel.src, kernel.dst)]) if buffers is not None else None
        if copies is not None and self._launches.opened is not None:
            with self._timed.staging("load stand-ins"):
                copies.load(self._launches.patience())
            self._launches.is_loaded = True

    def _find(self, key: Key) -> Container | MissingOperand:
        store = self._instruments.store
        found = store.current(key)
        if type(found) is Absence and found.state is State.ABSENT and self._waiting:
            self._waiting(key)
            self._instruments.recorder.add("waiting", self._launches.seq, key.hex())
            self._step.at = run_steps.FOR_AN_OPERAND
            with self._timed.waiting():
                found = store.wait(key, lambda: self._launches.aborted() is not None)
            self._step.at = _PREPARES
            if isinstance(found, Absence) and found.state is State.ABSENT:
                raise PlanAbortedError(detail=self._launches.aborted() or "aborted while waiting for an operand")
        if isinstance(found, Container):
            return found
        return missing(found)

    def _agree(self) -> KernelSchedule:
        self._step.at = run_steps.IN_CHECK
        clock, program, launches = self._instruments.clock, self.program, self._launches
        brought: tuple[bytes, ...] | None = None
        blobs: tuple[bytes, ...] = ()
        came_s = clock()
        known = self._recalled
        self._show_boxes(known)
        if known is not None:
            launches.record("check")
            arrival, brought = known.arrival, self._meet_as_before(known)
            if brought is known.blobs:
                return known.schedule
        agreement = BatchAgreement(program)
        for round_index in range(program.rounds):
            if round_index:
                self._make_ready(round_index)
            if brought is None:
                arrival, brought = self._meet(round_index)
            blobs, brought = brought, None
            violations = agreement.meet(blobs)
            if violations:
                raise refusal(program.name, "", violations)
            if round_index + 1 < program.rounds and self._operands is not None:
                self._operands.learn(round_index, agreement.verdicts)
        launches.record("agreed", f"after {clock() - came_s:.6f} s")
        mine = self._operands
        if mine is None:
            assert known is not None  # else they were looked at before the agreement
            mine = self._look_again(known)
        scheduler = Scheduler(program, mine.operands, self._buffer, self._first, mine.staging_buffers)
        schedule = scheduler.write(agreement.verdicts, alone=agreement.conflict)
        self._remember(arrival, blobs, schedule)
        return schedule

    def _show_boxes(self, known: RunCache | None) -> None:
        """Tells the others where the boxes of a reshard lie, if the last run has found out."""
        opened, program = self._launches.opened, self.program
        if opened is None or is_batch(program) or not program.shares[0].template.boxes:  # alike on all ranks
            return
        communicator, launch = opened
        if isinstance(communicator, Reaching):
            moves = known.schedule.bundles[0].moves if known is not None and self._brought is None else ()
            communicator.show_boxes(launch, next((move.boxes for move in moves if move.boxes is not None), None))

    def _meet(self, round_index: int) -> tuple[bytes, tuple[bytes, ...]]:
        """Meets the others in one round; returns what this rank has brought, and what all have."""
        launches, operands = self._launches, self._operands or self._look()
        arrival = operands.arrival(round_index)
        launches.record("check")
        is_last = round_index == self.program.rounds - 1 and not operands.has_violations
        try:
            return arrival, launches.meet(arrival, self._first if is_last else None)
        except RefusedError as exc:  # before anything was brought: all ranks hear why
            self._refuse(exc.violations)
            arrival = operands.arrival(round_index)
            return arrival, launches.meet(arrival)

    def _meet_as_before(self, known: RunCache) -> tuple[bytes, ...] | None:
        """Meets the others; returns `known.blobs` where all brought that, and None where nothing was brought yet."""
        if self._brought is not None:
            return self._brought
        self._launches.record("check")
        try:
            return self._launches.meet(known.arrival, known.first, known.blobs)
        except RefusedError as exc:  # before anything was brought
            self._refuse(exc.violations)
            return None

    def _located(self, error: RaycollectError) -> RaycollectError:
        launches = self._launches
        return located(error, self.program, launches.bundle, self._instruments.recorder, launches.seq)


def located(
    error: RaycollectError, program: Program, under_way: ScheduledBundle | None, recorder: Recorder, seq: int
) -> RaycollectError:
    """Records a failure, and adds where in the program it happened, which only this participant knows."""
    recorder.add("failed", seq, type(error).__name__)
    if isinstance(error, FaultError):
        share = under_way.share if under_way else program.shares[0] if len(program.shares) == 1 else None
        error.op = error.op or (share.op if share else program.name)
        error.group_name = error.group_name or (share.group_id if share else program.agreement.group_id)
        if share and error.rank < 0 and isinstance(error, KernelError):
            error.rank = share.rank
    return kept(error)  # its frames would keep the tensors alive


def _no_memory(exc: BaseException, expected: str) -> Violation:
    return Violation(kind="allocation", rank=-1, field="staging", found=too_large(exc), expected=expected)


def _home_of(communicators: Callable[[str], Communicator], domain: Domain) -> str:
    return home_of(domain.memory, communicators(domain.group_id))
