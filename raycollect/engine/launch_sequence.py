"""The launches of one program under way: which one is open, what runs in it, and how an abort reaches it.

A program begins its launches in ascending order; the first is that of the agreement. One is open at a time: it is ended
when the next one begins, or when the program ends, whatever happened. A failure among the kernels leaves exactly the
tensors being written dirty (P4).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from raycollect.backends import arrays
from raycollect.core.boxes import BoxExchange
from raycollect.core.kernel_progress import KernelProgress
from raycollect.core.model import Kernel, Launch
from raycollect.core.protocols import Communicator, Exchange, Reaching
from raycollect.engine.device_staging import Patience, transfer
from raycollect.engine.instruments import Instruments
from raycollect.engine.kernel_schedule import KernelSchedule, LaunchStep, ScheduledBundle
from raycollect.engine.progress import NOWHERE, ByteMap, BytesDone
from raycollect.engine.spans import Timed
from raycollect.errors import GroupBrokenError, PlanAbortedError
from raycollect.observe.run_steps import RunStep, calls
from raycollect.planner import Program

_Open = tuple[Communicator, Launch]


@dataclass(slots=True, eq=False)
class LaunchSequence:
    """The launches of one run of a program. Any thread may call `abort` and `bytes_done`."""

    program: Program
    communicators: Callable[[str], Communicator]  # group id -> this participant's end of that group
    exchange: Exchange | None  # how the participants meet where they have no group in common
    seq: int  # the number of the first launch
    aborted: Callable[[], str | None]  # why the plan was aborted, or None
    instruments: Instruments
    spans: Timed  # the timeline of the run
    opened: _Open | None = None  # the communicator and its launch; None: the controller carries the agreement
    schedule: KernelSchedule | None = None  # once all have agreed
    bundle: ScheduledBundle | None = None  # that is under way
    is_loaded: bool = False  # whether the stand-ins of the first kernel hold what it reads
    packs: bool = False  # whether a kernel has worked in the staging
    kernel_progress: KernelProgress | None = None  # of the thread that runs it
    _move: LaunchStep | None = None  # the latest that was begun
    _left: int = 0  # how many of its kernels have not ended
    _writes: bool = False  # whether it may have changed what it writes
    _byte_map: ByteMap | None = None  # once somebody has asked how far it is
    _number: int = 0  # of the latest launch, counted from the first
    _wake: Callable[[], None] | None = None  # ends a wait in what is open
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self) -> None:
        """Opens the launch of the agreement; raises GroupBrokenError where this participant has no such group."""
        agreement = self.program.agreement
        if agreement.group_id:
            communicator = self.communicators(agreement.group_id)
            with self._lock:
                self.opened, self._wake = (communicator, self._launch()), partial(communicator.abort, self.seq)
        elif self.exchange is None:
            raise GroupBrokenError(group_name="", detail="the participants have no group in common, and no controller")
        else:
            with self._lock:
                self._wake = partial(self.exchange.abort, self.seq)

    def meet(
        self, arrival: bytes, kernel: Kernel | None = None, expected: tuple[bytes, ...] | None = None
    ) -> tuple[bytes, ...]:
        """Brings an arrival to the agreement, and waits for those of all; see `Communicator.agree`.

        Returns:
            What all have brought; the very object `expected` where it is that.

        Raises:
            RefusedError: The kernel can't be prepared; nothing was brought.
            PlanAbortedError: The plan was aborted.
            CollectiveTimeoutError: Not all came in time.
        """
        self._check()
        if self.opened is not None:
            communicator, agreement = self.opened
            blobs = communicator.agree(agreement, arrival, kernel, expected)
        else:
            assert self.exchange is not None  # `begin` has checked it
            blobs = self.exchange(self._launch(), arrival)
        brought = tuple(map(bytes, blobs))
        return expected if expected is not None and brought == expected else brought

    def run(self, schedule: KernelSchedule, step: RunStep) -> None:
        """Runs what all have agreed on; `step` is of this thread."""
        step.at = self._where
        with (
            self.spans.calls(schedule),
            self.instruments.store.writing(schedule.ranges, self.aborted, self.program.timeout_s),
        ):
            for scheduled in schedule.bundles:
                self.bundle = scheduled
                if len(schedule.bundles) > 1:
                    self.record("bundle", f"{scheduled.share.op} of {scheduled.tasks}")
                with self.spans.bundle(scheduled):
                    self._run_bundle(scheduled)
                self.bundle = None

    def end(self, *, ok: bool) -> tuple[int, ...]:
        """Ends the open launch.

        Returns:
            The places of those who are known to have run all of their programs; empty where others may have more to do.
        """
        ranks = self._close(() if ok else self._owed(), ok=ok)
        return () if self._number else self.program.places_of(ranks)

    def abort(self) -> None:
        """Wakes this participant if it waits in a launch, once `aborted` says why; any thread may call it."""
        with self._lock:
            wake = self._wake
        if wake is not None:
            wake()

    def bytes_done(self) -> BytesDone:
        """Returns its progress; any thread may call it."""
        schedule, kernel_progress = self.schedule, self.kernel_progress
        if schedule is None or kernel_progress is None:
            return NOWHERE
        if self._byte_map is None:
            self._byte_map = ByteMap(schedule)
        move = self._move  # before how many are left: the other way round, a move would seem done as it begins
        left = self._left
        return self._byte_map.at(move, left, kernel_progress.part)

    def at(self, number: int, group_id: str, ranks: Sequence[int]) -> _Open:
        """Returns the communicator of a launch, after all have begun it.

        `number` is not below that of the open launch.

        Raises:
            PlanAbortedError: The plan was aborted.
            GroupBrokenError: This participant has no such group.
            CollectiveTimeoutError: Not all came in time.
        """
        if number == self._number and self.opened is not None:
            return self.opened
        communicator = self.communicators(group_id)
        program = self.program
        launch = Launch(seq=self.seq + number, ranks=tuple(ranks), timeout_s=program.timeout_s)
        # The others may be busy with all that comes before, each part of which has its own limit: whoever is late there
        # is found there, and the controller ends the plan for all.
        before = number + (len(program.everyone) or len(program.tasks))
        patient = replace(launch, timeout_s=program.timeout_s * (1 + before))
        self._close((), ok=True)
        with self._lock:  # an abort comes either before, and is seen here, or after, and finds the launch
            self._check()
            self._number = number
            opened = self.opened = communicator, launch
            self._wake = partial(communicator.abort, launch.seq)
        communicator.agree(patient, b"")
        return opened

    def commit(self) -> None:
        """Waits until the controller has heard that all have come so far.

        The controller alone decides: once it has told one of them to go on it tells all, and aborts none.

        Raises:
            PlanAbortedError: The plan was aborted; so it is for all.
            CollectiveTimeoutError: Not all came in time.
        """
        exchange, program = self.exchange, self.program
        assert exchange is not None  # whoever runs a program that commits has given it
        ranks = tuple(range(len(program.agreement.ranks)))
        patient = program.timeout_s * (2 + self._number)  # the others may be busy with what comes before
        with self._lock:
            self._check()
            wake, self._wake = self._wake, partial(exchange.abort, self.seq)
        exchange(Launch(seq=self.seq, ranks=ranks, timeout_s=patient), b"")
        with self._lock:
            self._wake = wake

    def patience(self) -> Patience:
        """What ends a wait for a device."""
        return Patience(self.aborted, self.program.timeout_s)

    def record(self, what: str, detail: str = "") -> None:
        """Records an event of the run, for error reports."""
        self.instruments.recorder.add(what, self.seq, detail)

    def reach(self, point: str) -> None:
        """The run has come to a place where tests inject faults."""
        self.instruments.faults.at(point, self.seq, self.program.agreement.rank)

    def _run_bundle(self, scheduled: ScheduledBundle) -> None:
        # If it fails after it has begun, what it writes is dirty, and nothing else.
        store = self.instruments.store
        is_kept = self.program.commits  # by kernels
        self._writes = False
        try:
            for move in scheduled.moves:
                if move.commits:
                    self.reach("before_commit")
                    self.commit()
                    self._writes, is_kept = True, False
                    self.reach("after_commit")
                    continue
                if not move.kernels:
                    self._move_here(move)
                    continue
                communicator, launch = self.at(move.number, move.group_id, move.ranks)
                if move.staging_copies is None:
                    self._writes = not is_kept
                    self._launch_kernels(communicator, launch, move)
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
        # Copies of this rank alone.
        self._writes = self._writes or bool(move.copies)
        with self.spans.staging("copy"):
            patience = self.patience()
            for target, source in move.copies:
                transfer(target, source, patience)

    def _carry(self, communicator: Communicator, launch: Launch, move: LaunchStep, *, is_kept: bool) -> None:
        # On stand-ins: until all kernels have ended, tensors that have one are unchanged.
        staging_copies = move.staging_copies
        assert staging_copies is not None  # as the caller has seen
        self._writes = not is_kept and (self._writes or not staging_copies.is_whole)
        self._left, self._move = len(move.kernels), move
        if not self.is_loaded:
            with self.spans.staging("load stand-ins"):
                staging_copies.load(self.patience())
        self.is_loaded = False
        self._launch_kernels(communicator, launch, move)
        self._writes = not is_kept
        with self.spans.staging("unload stand-ins"):
            staging_copies.unload(self.patience())

    def _launch_kernels(self, communicator: Communicator, launch: Launch, move: LaunchStep) -> None:
        self._left, self._move = len(move.kernels), move
        if move.boxes is not None:
            if not self._has_moved(communicator, launch, move, move.boxes):
                for other in move.instead:
                    self._launch_kernels(communicator, launch, other)
            return
        self.reach("before_kernel")
        if move.packed is not None:
            self.packs = True
            with self.spans.staging("pack"):
                move.packed.load()
        with self.spans.kernels(self.bundle, move):
            communicator.launch(launch, move.kernels)
        self._ended()
        if move.packed is not None:
            with self.spans.staging("unpack"):
                move.packed.unload()
        self.reach("after_kernel")

    def _has_moved(self, communicator: Communicator, launch: Launch, move: LaunchStep, boxes: BoxExchange) -> bool:
        # Whether the backend has moved the boxes without messages: on all ranks, or on none.
        if not isinstance(communicator, Reaching):
            return False
        self.reach("before_kernel")
        self.packs = True
        with self.spans.kernels(self.bundle, move):
            if not communicator.launch_boxes(launch, boxes):
                return False
            self._ended()
        self.reach("after_kernel")
        return True

    def _ended(self) -> None:
        if self.kernel_progress is not None:
            self.kernel_progress.cover()
        self._left = 0

    def _where(self, first: int, is_named: bool) -> str:
        """Where the run is, for a person; `first` is the number of the program's first call."""
        schedule, scheduled, program = self.schedule, self.bundle, self.program
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

    def _owed(self) -> Sequence[Kernel]:
        """The kernels of the open launch on which all have agreed and that this rank has not ended."""
        schedule, latest = self.schedule, self._move
        if schedule is None:
            return ()
        moves = [one for scheduled in schedule.bundles for move in scheduled.moves for one in (move, *move.instead)]
        number = 0 if latest is None else latest.number
        at = next((at for at, move in enumerate(moves) if move is latest), -1)
        begun = () if latest is None else latest.kernels[len(latest.kernels) - self._left :]
        return [*begun, *(kernel for move in moves[at + 1 :] if move.number == number for kernel in move.kernels)]

    def _launch(self) -> Launch:
        return Launch(seq=self.seq, ranks=self.program.agreement.ranks, timeout_s=self.program.timeout_s)

    def _close(self, owed: Sequence[Kernel], *, ok: bool) -> tuple[int, ...]:
        with self._lock:
            opened, self.opened, self._wake = self.opened, None, None
        if opened is None:
            return ()
        communicator, launch = opened
        return communicator.end(launch, ok, owed)

    def _check(self) -> None:
        reason = self.aborted()
        if reason is not None:
            raise PlanAbortedError(detail=reason)
