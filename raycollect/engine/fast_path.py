"""A program that runs again: it repeats what its last run found out, whoever asks.

That is a plan of the driver, a captured step, or a member's own call. It does what `execution.Execution` would do, in
the same order and with the same outcome, for the programs that loops are made of: one kernel, in the launch of the
agreement. Where anything differs from the last run, an `Execution` takes over: from the start before the agreement,
with what all have brought after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import get_ident
from typing import Any

from raycollect.backends import arrays
from raycollect.core.kernel_progress import KernelProgress
from raycollect.core.model import Kernel, Key, Launch
from raycollect.core.protocols import Communicator
from raycollect.engine.execution import WELL, Execution, Outcome, located
from raycollect.engine.instruments import Instruments
from raycollect.engine.kernel_schedule import ScheduledBundle
from raycollect.engine.progress import ByteMap, BytesDone
from raycollect.engine.run_cache import RunCache
from raycollect.engine.spans import number_of_bundle
from raycollect.errors import KernelError, PlanAbortedError, RaycollectError, RefusedError
from raycollect.observe import Ring, run_steps
from raycollect.observe.run_steps import RunStep
from raycollect.observe.trace import AGAIN, CHECK
from raycollect.planner import Program
from raycollect.pos import Container


@dataclass(slots=True, eq=False)
class FastPath:
    """The next runs of a program, one at a time; any thread may call `abort` meanwhile.

    Before each, the caller sets what is that run's own: setting fields takes no call.
    """

    program: Program
    held: Sequence[Container]  # its operands; the containers are the very same objects in each run
    known: RunCache  # what the last run on them found out
    first: Kernel  # that the backend prepares before the agreement
    instruments: Instruments
    communicators: Callable[[str], Communicator]  # by the group's id; raises GroupBrokenError
    given: bool = False  # whether a member's call gave the operands
    meeting: str = ""  # the name of that call in timelines; see `Label`
    seq: int = 0  # the number of the run
    keys: Sequence[Key] = ()  # of its operands
    aborted: Callable[[], str | None] | None = None  # why it was aborted, or None; None: it never is
    landed: Callable[[], None] | None = None  # called when all has gone well, and it has not left the launch yet
    step: RunStep | None = None  # the slot of the thread that runs it, if the caller has it at hand
    _communicator: Communicator | None = None  # while a run is under way
    _full: Execution | None = None
    _owed: Sequence[Kernel] = ()  # the kernel, from the agreement to its end
    _ring: Ring | None = None  # that has seen a run
    _label: int = 0  # the number of the label there
    _kernel_progress: KernelProgress | None = None  # of the thread that runs it
    _byte_map: ByteMap | None = None  # once somebody has asked how far it is

    @staticmethod
    def of(
        program: Program,
        operands: Sequence[Any],
        instruments: Instruments,
        communicators: Callable[[str], Communicator],
        *,
        given: bool = False,
        is_kept: bool = False,
        meeting: str = "",
    ) -> FastPath | None:
        """Returns the fast path of a program on these operands; None where no run is known that can be repeated.

        `given`: a member's call gave the operands, whose name in timelines is `meeting`. `is_kept`: it is for all runs
        on these very operands, whose memory it keeps; else for one run on any of their shapes.
        """
        for one in operands:
            if type(one) is not Container:
                return None
        store = instruments.store
        known = None if given else RunCache.last(program, operands)
        if known is not None and not known.holds(operands, store):
            known = None
        if known is None and not is_kept:
            known = instruments.shapes.recall(program, operands, store, given=given)
        if known is None or known.first is None:
            return None
        move, agreement = known.move, program.agreement
        met = 0, agreement.group_id, tuple(agreement.ranks)
        if move is None or (move.number, move.group_id, tuple(move.ranks)) != met:
            return None
        return FastPath(program, operands, known, known.first, instruments, communicators, given, meeting)

    def fits(self, operands: Sequence[object]) -> bool:
        """Whether these are the operands, and unchanged."""
        if len(operands) != len(self.held):
            return False
        for one, other in zip(operands, self.held, strict=True):
            if one is not other:
                return False
        return self.known.holds(self.held, self.instruments.store)

    def run(self) -> Outcome:
        """Runs it on operands that fit; see `Execution.run`."""
        program, seq, landed = self.program, self.seq, self.landed
        self.instruments.recorder.add("again", seq, program.name)
        launch = Launch(seq=seq, ranks=program.agreement.ranks, timeout_s=program.timeout_s)
        step = run_steps.here() if self.step is None else self.step
        self._kernel_progress = step.kernels
        step.kernels.cover()
        communicator, scheduled, ok = None, None, False
        reach, me = self.instruments.faults.at, program.agreement.rank
        error: RaycollectError | None = None
        ended: tuple[int, ...] = ()
        ring = self.instruments.tracer.ring
        began_s = agreed_s = ended_s = 0.0
        if ring is not None:
            began_s = ring.clock()
        try:
            communicator = self._communicator = self.communicators(program.agreement.group_id)
            # An abort from here on finds the communicator.
            if self.aborted is not None and (reason := self.aborted()) is not None:
                raise PlanAbortedError(detail=reason)
            reach("start", seq, me)
            reach("before_check", seq, me)
            step.at = run_steps.IN_CHECK
            try:
                expected = self.known.blobs
                brought = communicator.agree(launch, self.known.arrival, self.first, expected)
                full = None if brought is expected else self._in_full(tuple(map(bytes, brought)))
            except RefusedError:  # nothing was brought: it brings why
                full = self._in_full(None)
            if ring is not None:
                agreed_s = ring.clock()
            if full is not None:
                communicator = None  # it ends the launch
                return full.run()
            scheduled, step.at = self.known.schedule.bundles[0], "in its kernels"
            self._owed = scheduled.moves[0].kernels
            reach("after_check", seq, me)
            self._work(communicator, launch, scheduled)
            reach("end", seq, me)
            if ring is not None:
                ended_s = ring.clock()
            ok = True
            if landed is not None:
                landed()
        except (RaycollectError, MemoryError) as exc:
            error = exc if isinstance(exc, RaycollectError) else KernelError(detail=f"out of memory: {exc}")
            return Outcome(error=located(error, program, scheduled, self.instruments.recorder, seq))
        finally:
            owed, self._owed, self._communicator, self._full = self._owed, (), None, None
            if communicator is not None:
                ended = communicator.end(launch, ok, owed)
            if ring is not None:
                label = self._label if ring is self._ring else self._met_ring(ring)
                kind = CHECK if agreed_s and scheduled is None else AGAIN  # what goes on in full notes the rest itself
                at, thread, failed = next(ring.numbers), get_ident(), "" if error is None else type(error).__name__
                until_s = (ended_s or ring.clock()) if kind is AGAIN else agreed_s
                ring.entries.append((at, kind, program.name, began_s, until_s, thread, seq, label, failed, agreed_s))
        # Where this participant answers for itself, nobody asks who else has ended.
        return Outcome(ended=program.places_of(ended)) if ended and landed is None else WELL

    def abort(self) -> None:
        """Ends the waits of the run that is ready or under way, once `aborted` says why.

        Any thread may call it, until the next run is ready.
        """
        full, communicator = self._full, self._communicator
        if full is not None:
            full.abort()
        if communicator is not None:  # besides: `full` may not have begun
            communicator.abort(self.seq)
            self.instruments.store.wake()

    def bytes_done(self) -> BytesDone:
        """Returns the progress of the run under way; any thread may call it."""
        full, kernel_progress = self._full, self._kernel_progress
        if full is not None:
            return full.bytes_done()
        return self._bytes().at(
            self.known.schedule.bundles[0].moves[0], 1, 0.0 if kernel_progress is None else kernel_progress.part
        )

    @property
    def nbytes(self) -> int:
        """The bytes of a run."""
        return self._bytes().total

    def _bytes(self) -> ByteMap:
        if self._byte_map is None:
            self._byte_map = ByteMap(self.known.schedule)
        return self._byte_map

    def _met_ring(self, ring: Ring) -> int:
        # The first run that a timeline sees: names the thread, and gets the number of the label.
        ring.meet()
        self._ring, self._label = ring, number_of_bundle(ring, self.known.schedule.bundles[0], self.meeting)
        return self._label

    def _work(self, communicator: Communicator, launch: Launch, scheduled: ScheduledBundle) -> None:
        store, reach, me = self.instruments.store, self.instruments.faults.at, self.program.agreement.rank
        with store.writing(scheduled.ranges, self.aborted or _never, launch.timeout_s):
            try:
                reach("before_kernel", launch.seq, me)
                communicator.launch(launch, scheduled.moves[0].kernels)
                self._owed = ()
                reach("after_kernel", launch.seq, me)
            except BaseException:
                store.mark_dirty(scheduled.ranges, scheduled.owners)
                raise
            finally:
                if scheduled.versioned:
                    arrays.raise_versions(scheduled.versioned)
            if store.dirty:
                store.mark_written(scheduled.dense)

    def _in_full(self, brought: tuple[bytes, ...] | None) -> Execution:
        program, communicator = self.program, self._communicator  # which is ended even if the group has gone meanwhile
        self._full = Execution(
            program,
            self.keys,
            lambda group_id: (
                communicator
                if communicator and group_id == program.agreement.group_id
                else self.communicators(group_id)
            ),
            self.instruments,
            seq=self.seq,
            aborted=self.aborted or _never,
            operands=self.held if self.given else None,
            held=None if self.given else self.held,
            met=None if brought is None else (self.known, brought),
            meeting=self.meeting,
            resumes=True,
        )
        return self._full


def _never() -> None:
    """Says of a run that nobody aborts it."""
