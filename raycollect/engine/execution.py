"""Runs one program with what it is given: a store, communicators, a recorder, a clock, faults. It decides nothing.

The order keeps P3 and P4: everything that can fail locally happens before the agreement, and is brought there as a
violation; then kernels run; a failure among them leaves exactly the tensors being written dirty.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from raycollect.backends import arrays
from raycollect.core.kernel_progress import KernelProgress
from raycollect.core.model import Kernel, Key, Launch
from raycollect.core.protocols import Communicator, Exchange, NoFaults, Reaching, Together
from raycollect.engine.batch_agreement import BatchAgreement, is_batch
from raycollect.engine.device_staging import transfer
from raycollect.engine.instruments import Instruments
from raycollect.engine.kernel_schedule import KernelSchedule, LaunchStep, ScheduledBundle, Scheduler
from raycollect.engine.launch_sequence import LaunchSequence
from raycollect.engine.preparation import Preparation
from raycollect.engine.program_operands import MissingOperand
from raycollect.engine.progress import NOWHERE, ByteMap, BytesDone
from raycollect.engine.run_cache import RunCache
from raycollect.engine.spans import timed
from raycollect.errors import (
    FaultError,
    KernelError,
    RaycollectError,
    RefusedError,
    kept,
    refusal,
)
from raycollect.observe import Recorder, run_steps
from raycollect.observe.run_steps import RunStep, calls
from raycollect.planner import Local, Program
from raycollect.pos import Container


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The end of a program on this participant."""

    error: RaycollectError | None = None  # None: it ran to its end
    outputs: tuple[Container, ...] = ()  # that it made, in the order of the requests
    ended: tuple[int, ...] = ()  # places of those known to have run all of the plan; see `Communicator.end`


class Execution:
    """One run of one program.

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
        meeting: The name of a member's own call in timelines; see `Label`.
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
        meeting: str = "",
    ) -> None:
        self.program: Program = program
        self._instruments = instruments
        self._faults = None if type(instruments.faults) is NoFaults else instruments.faults
        self._met = met
        self._seq = seq
        self._timed = timed(instruments.tracer.ring, program, seq, meeting)
        self._launches = LaunchSequence(program, communicators, exchange, seq=seq, aborted=aborted)
        self._preparation = Preparation(
            program,
            keys,
            communicators,
            instruments,
            self._launches,
            self._timed,
            seq=seq,
            waiting=waiting,
            values=held if operands is None else operands,
            given=operands is not None,
            recalled=None if met is None else met[0],
        )
        self._under_way: ScheduledBundle | None = None
        self._schedule: KernelSchedule | None = None  # once all have agreed
        self._move: LaunchStep | None = None  # the latest that was begun
        self._left = 0  # how many of its kernels have not ended
        self._packs = False  # whether a kernel has worked in the staging
        self._writes = False  # whether the step under way may have changed what it writes
        self._kernel_progress: KernelProgress | None = None  # of the thread that runs it
        self._step: RunStep  # of the same
        self._byte_map: ByteMap | None = None  # once somebody has asked how far it is

    def run(self) -> Outcome:
        """Runs it; a failure is an outcome, never an exception."""
        self._timed.begin()
        outcome = self._run_all()
        self._timed.end(outcome.error)
        return outcome

    def _run_all(self) -> Outcome:
        self._record("start", self.program.name)
        self._step = run_steps.here()
        self._kernel_progress = self._step.kernels
        self._kernel_progress.cover()
        ended: tuple[int, ...] = ()
        ok = False
        try:
            self._launches.begin()
            self._at("start")
            self._preparation.run(self._step)
            self._at("before_check")
            with self._timed.check() if self._met is None else nullcontext():  # else `FastPath` has noted it
                schedule = self._schedule = self._agree()
            self._at("after_check")
            with self._timed.calls(schedule):
                self._run(schedule)
            self._at("end")
            ok = True
        except RaycollectError as exc:
            return Outcome(error=self._located(exc))
        except MemoryError as exc:
            return Outcome(error=self._located(KernelError(detail=f"out of memory: {exc}")))
        finally:
            self._step.at = ""  # else it would keep what this object holds
            if not ok:
                self._launches.forsake(self._owed())
            ended = self._launches.end(ok=ok)
            buffer = self._preparation.buffer
            if buffer is not None and (ok or not self._packs):
                buffer.give()
        self._record("done")
        made = self._preparation.operands
        return Outcome(outputs=made.made() if made else (), ended=ended)

    def abort(self) -> None:
        """Ends its waits, once `aborted` says why; any thread may call it."""
        self._launches.abort()
        self._instruments.store.wake()

    def bytes_done(self) -> BytesDone:
        """Returns its progress; any thread may call it."""
        schedule, kernel_progress = self._schedule, self._kernel_progress
        if schedule is None or kernel_progress is None:
            return NOWHERE
        if self._byte_map is None:
            self._byte_map = ByteMap(schedule)
        move = self._move  # before how many are left: the other way round, a move would seem done as it begins
        left = self._left
        return self._byte_map.at(move, left, kernel_progress.part)

    def _agree(self) -> KernelSchedule:
        self._step.at = "in the consistency check"
        clock, program, preparation = self._instruments.clock, self.program, self._preparation
        brought: tuple[bytes, ...] | None = None
        blobs: tuple[bytes, ...] = ()
        came_s = clock()
        known = preparation.recalled
        self._show_boxes(known)
        if known is not None:
            self._record("check")
            arrival, brought = known.arrival, self._meet_again(known)
            if brought is None and preparation.recalled is not None:
                return known.schedule
        agreement = BatchAgreement(program)
        for round_index in range(program.rounds):
            if round_index:
                preparation.make_ready(round_index)
            if brought is None:
                arrival = preparation.current_operands().arrival(round_index)
                self._record("check")
                brought = self._launches.meet(arrival)
            blobs, brought = brought, None
            violations = agreement.meet(blobs)
            if violations:
                raise refusal(program.name, "", violations)
            if round_index + 1 < program.rounds and preparation.operands is not None:
                preparation.operands.learn(round_index, agreement.verdicts)
        self._record("agreed", f"after {clock() - came_s:.6f} s")
        mine = preparation.current_operands()
        scheduler = Scheduler(program, mine.operands, preparation.buffer, preparation.first, mine.staging_buffers)
        schedule = scheduler.write(agreement.verdicts, alone=agreement.conflict)
        preparation.remember(arrival, blobs, schedule)
        return schedule

    def _show_boxes(self, known: RunCache | None) -> None:
        """Tells the others where the boxes of a reshard lie, if the last run has found out."""
        opened, program = self._launches.opened, self.program
        if opened is None or is_batch(program) or not program.shares[0].template.boxes:  # alike on all ranks
            return
        communicator, launch = opened
        if isinstance(communicator, Reaching):
            moves = known.schedule.bundles[0].moves if known is not None and self._met is None else ()
            communicator.show_boxes(launch, next((move.boxes for move in moves if move.boxes is not None), None))

    def _meet_again(self, known: RunCache) -> tuple[bytes, ...] | None:
        """Meets the others; None where all brought what they did in the last run, or nothing was brought yet."""
        if self._met is not None:
            return self._met[1]
        self._record("check")
        try:
            return self._launches.again(known.first, known.arrival, known.blobs)
        except RefusedError as exc:  # before anything was brought
            self._preparation.refuse(exc.violations)
            return None

    def _run(self, schedule: KernelSchedule) -> None:
        self._step.at = self._where
        with self._instruments.store.writing(schedule.ranges, self._launches.aborted, self.program.timeout_s):
            for scheduled in schedule.bundles:
                self._under_way = scheduled
                if len(schedule.bundles) > 1:
                    self._record("bundle", f"{scheduled.share.op} of {scheduled.tasks}")
                with self._timed.bundle(scheduled):
                    self._run_bundle(scheduled)
                self._under_way = None

    def _where(self, first: int, is_named: bool) -> str:
        """Where the run is, for a person; `first` is the number of the program's first call."""
        schedule, scheduled, program = self._schedule, self._under_way, self.program
        if schedule is None or scheduled is None:
            return "waits for readers of what it writes"
        bundles = schedule.bundles
        if len(program.tasks) == 1 and is_named and not program.tasks[0].request:
            return f"in its kernels ({scheduled.share.op})"
        if len(bundles) == 1 and not is_named:
            return "in its kernels"
        at = next(at for at, one in enumerate(bundles) if one is scheduled)
        planned = [one.tasks for one in program.bundles]
        is_planned = (
            len(planned) == len(bundles) and scheduled.share is program.shares[program.tasks[planned[at][0]].share]
        )
        tasks = planned[at] if is_planned else (at,)  # else one after the other
        which = f"bundle {at + 1} of {len(bundles)}: " if len(bundles) > 1 else ""
        return f"in {which}{scheduled.share.op} of {calls([first + program.tasks[one].request for one in tasks])}"

    def _run_bundle(self, scheduled: ScheduledBundle) -> None:
        # If it fails after it has begun, what it writes is dirty, and nothing else.
        store = self._instruments.store
        is_kept = self.program.commits or scheduled.share.template.is_listed  # by kernels
        self._writes = False
        try:
            for move in scheduled.moves:
                if move.commits:
                    self._at("before_commit")
                    self._launches.commit()
                    self._writes, is_kept = True, False
                    self._at("after_commit")
                    continue
                if not move.kernels:
                    self._move_here(move)
                    continue
                communicator, launch = self._launches.at(move.number, move.group_id, move.ranks)
                if move.staging_copies is None:
                    self._writes = not is_kept
                    self._launch(communicator, launch, move)
                else:
                    self._carry(communicator, launch, move, is_kept=is_kept)
        except BaseException:
            if self._writes:
                store.mark_dirty(scheduled.ranges, scheduled.owners)
            raise
        finally:
            if scheduled.versioned and self._writes:
                arrays.raise_versions(scheduled.versioned)
        store.mark_written(scheduled.dense)

    def _move_here(self, move: LaunchStep) -> None:
        # Copies of this rank alone, or work between its GPUs.
        self._writes = self._writes or any(one.kind is Local.SPREAD for one in move.crossings) or bool(move.copies)
        with self._timed.staging(move.crossings[0].kind.value if move.crossings else "copy"):
            patience = self._launches.patience()
            for target, source in move.copies:
                transfer(target, source, patience)
            for crossing in move.crossings:
                crossing.run(patience)

    def _carry(self, communicator: Communicator, launch: Launch, move: LaunchStep, *, is_kept: bool) -> None:
        # On stand-ins: until all kernels have ended, tensors that have one are unchanged.
        staging_copies = move.staging_copies
        assert staging_copies is not None  # as the caller has seen
        self._writes = not is_kept and (self._writes or not staging_copies.is_whole)
        self._left, self._move = len(move.kernels), move
        if not self._preparation.is_loaded:
            with self._timed.staging("load stand-ins"):
                staging_copies.load(self._launches.patience())
        self._preparation.is_loaded = False
        self._launch(communicator, launch, move)
        self._writes = not is_kept
        with self._timed.staging("unload stand-ins"):
            staging_copies.unload(self._launches.patience())

    def _launch(self, communicator: Communicator, launch: Launch, move: LaunchStep) -> None:
        # Together where the backend can, else by `move.instead`, else one by one.
        kernels = move.kernels
        self._left, self._move = len(kernels), move
        if move.boxes is not None:
            if isinstance(communicator, Reaching):
                self._at("before_kernel")
                self._packs = True
                with self._timed.kernels(self._under_way, move):
                    if communicator.launch_boxes(launch, move.boxes):
                        kernels = ()
                        self._ended(0)
        elif len(kernels) > 1 and isinstance(communicator, Together):
            self._at("before_kernel")
            with self._timed.kernels(self._under_way, move):
                while kernels and (count := communicator.launch_together(launch, kernels)):
                    kernels = kernels[count:]
                    self._ended(len(kernels))
        if not kernels:
            self._at("after_kernel")
            return
        if move.instead and len(kernels) == len(move.kernels):
            for other in move.instead:
                self._launch(communicator, launch, other)
            return
        for kernel in kernels:
            self._at("before_kernel")
            if move.packed is not None:
                self._packs = True
                with self._timed.staging("pack"):
                    move.packed.load()
            with self._timed.kernels(self._under_way, move, first=len(move.kernels) - self._left, count=1):
                communicator.launch(launch, kernel).wait(self.program.timeout_s)
            self._ended(self._left - 1)
            if move.packed is not None:
                with self._timed.staging("unpack"):
                    move.packed.unload()
            self._at("after_kernel")

    def _ended(self, left: int) -> None:
        if self._kernel_progress is not None:
            self._kernel_progress.cover()
        self._left = left

    def _owed(self) -> list[Kernel]:
        """The kernels of the open launch that this rank has not ended; others may wait in them."""
        if self._schedule is None:
            return []
        moves = [
            one for scheduled in self._schedule.bundles for move in scheduled.moves for one in (move, *move.instead)
        ]
        latest = self._move
        number = 0 if latest is None else latest.number
        at = next((at for at, move in enumerate(moves) if move is latest), -1)
        begun = () if latest is None else latest.kernels[len(latest.kernels) - self._left :]
        return [*begun, *(kernel for move in moves[at + 1 :] if move.number == number for kernel in move.kernels)]

    def _located(self, error: RaycollectError) -> RaycollectError:
        return located(error, self.program, self._under_way, self._instruments.recorder, self._seq)

    def _record(self, what: str, detail: str = "") -> None:
        self._instruments.recorder.add(what, self._seq, detail)

    def _at(self, point: str) -> None:
        if self._faults is not None:
            self._faults.at(point, self._seq, self.program.agreement.rank)


def located(
    error: RaycollectError, program: Program, under_way: ScheduledBundle | None, recorder: Recorder, seq: int
) -> RaycollectError:
    """Records a failure, and adds where in the program it happened, which only this participant knows."""
    recorder.add("failed", seq, type(error).__name__)
    if isinstance(error, FaultError):
        share = under_way.share if under_way else None
        error.op = error.op or (share.op if share else program.name)
        error.group_name = error.group_name or (share.group_id if share else program.agreement.group_id)
        if share and error.rank < 0 and isinstance(error, KernelError):
            error.rank = share.rank
    return kept(error)  # its frames would keep the tensors alive
