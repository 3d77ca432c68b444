"""A program that is run again on the same memory, as in a loop: what its last run found out, done again in one go.

It does what `executor.Execution` would do, in the same order and with the same outcome, for the programs of which loops
are made: one kernel, in the launch of the door. Whatever is not as it was goes to an `Execution`: before the door from
the start, at the door with what all have brought.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from raycollect.errors import PlanAbortedError, RaycollectError
from raycollect.executor import Execution, Instruments, Outcome, located
from raycollect.model import Communicator, Kernel, Key, Launch, NoFaults
from raycollect.planner import Program
from raycollect.pos import Container
from raycollect.prepared import Prepared, places_of
from raycollect.script import Stretch

__all__ = ["Repeat"]


class Repeat:
    """The next runs of a program, one at a time; `abort` by any thread.

    Args:
        program: The program.
        held: Its operands, whose containers are the very same in each run.
        known: What the last run on them found out.
        instruments: See `Instruments`.
        communicators: Gives this participant's end of a group, by the group's id; raises GroupBrokenError.
    """

    def __init__(
        self,
        program: Program,
        held: Sequence[Container],
        known: Prepared,
        instruments: Instruments,
        communicators: Callable[[str], Communicator],
    ) -> None:
        self._program = program
        self._held = tuple(held)
        self._known = known
        self._instruments = instruments
        self._communicators = communicators
        (self._stretch,) = known.script.stretches
        self._kernel: Kernel = self._stretch.moves[0].kernels[0]
        self._seq = 0  # the run under way
        self._aborted: Callable[[], str | None] = lambda: None
        self._full: Execution | None = None

    @staticmethod
    def of(
        program: Program,
        held: Sequence[object],
        instruments: Instruments,
        communicators: Callable[[str], Communicator],
    ) -> Repeat | None:
        """What the last run of a program on these operands was, if it can be done again so."""
        if type(instruments.faults) is not NoFaults or not program.door.group_id:
            return None
        containers = [one for one in held if type(one) is Container]
        known = Prepared.last(program, containers) if len(containers) == len(held) else None
        if known is None or known.block is not None or known.first is None or not _is_simple(program, known):
            return None
        return Repeat(program, containers, known, instruments, communicators)

    def fits(self, held: Sequence[object]) -> bool:
        """Whether these are the operands, and as they were."""
        if len(held) != len(self._held):
            return False
        for one, other in zip(held, self._held, strict=True):
            if one is not other:
                return False
        try:
            same = places_of(self._held) == self._known.places
        except TypeError:  # a tensor has no memory any more
            return False
        return same and not self._instruments.store.is_dirty(self._known.ranges)

    def run(self, seq: int, keys: Sequence[Key], aborted: Callable[[], str | None]) -> Outcome:
        """Runs it on operands that fit; a failure is an outcome, never an exception.

        Args:
            seq: See `Execution`.
            keys: The keys of the operands.
            aborted: See `Execution`.
        """
        program, known, self._aborted, self._full = self._program, self._known, aborted, None
        self._instruments.recorder.add("again", seq, program.name)
        launch = Launch(seq=seq, ranks=program.door.ranks, timeout_s=program.timeout_s)
        communicator, stretch, ok = None, None, False
        self._seq = seq  # from here on an abort finds it: before, `aborted` says so
        try:
            communicator = self._communicators(program.door.group_id)
            reason = aborted()
            if reason is not None:
                raise PlanAbortedError(detail=reason)
            brought = _meet(communicator, launch, known)
            if brought is not None:
                full, communicator = self._in_full(seq, keys, brought), None  # which ends the launch
                return full.run()
            stretch = self._stretch
            self._work(communicator, launch, stretch)
            ok = True
        except RaycollectError as exc:
            return Outcome(error=located(exc, program, stretch, self._instruments.recorder, seq))
        finally:
            self._seq = 0
            if communicator is not None:
                communicator.end(launch, ok)
        return Outcome()

    def abort(self) -> None:
        """Ends its waits; any thread may call it."""
        seq, full = self._seq, self._full
        if full is not None:
            full.abort()
        elif seq:
            self._communicators(self._program.door.group_id).abort(seq)
            self._instruments.store.wake()

    def _work(self, communicator: Communicator, launch: Launch, stretch: Stretch) -> None:
        """Runs the kernel; where it fails, what it writes is dirty."""
        store = self._instruments.store
        with store.writing(stretch.ranges, self._given_up):
            try:
                communicator.launch(launch, self._kernel).wait(launch.timeout_s)
            except BaseException:
                store.mark_dirty(stretch.ranges, stretch.owners)
                raise
            store.mark_written(stretch.dense)

    def _given_up(self) -> RaycollectError | None:
        """What ends the wait for those who read what is written: they only copy, so no more than an abort."""
        reason = self._aborted()
        return None if reason is None else PlanAbortedError(detail=reason)

    def _in_full(self, seq: int, keys: Sequence[Key], brought: tuple[bytes, ...]) -> Execution:
        """Goes on where something is not as it was after all."""
        self._full = Execution(
            self._program,
            keys,
            self._communicators,
            self._instruments,
            seq=seq,
            aborted=self._aborted,
            held=self._held,
            brought=brought,
        )
        return self._full


def _meet(communicator: Communicator, launch: Launch, known: Prepared) -> tuple[bytes, ...] | None:
    """Meets the others; gives what they brought, where it is not what they brought before."""
    assert known.first is not None  # see `Repeat.of`
    again = getattr(communicator, "again", None)  # `isinstance` with a protocol takes longer
    if again is not None:
        found = again(launch, known.first, known.arrival, known.blobs)
        return None if found is None else tuple(map(bytes, found))
    communicator.stage(launch, known.first)
    blobs = tuple(map(bytes, communicator.agree(launch, known.arrival)))
    return None if blobs == known.blobs else blobs


def _is_simple(program: Program, known: Prepared) -> bool:
    """Whether all that is done is one kernel in the launch of the door."""
    if len(known.script.stretches) != 1 or len(known.script.stretches[0].moves) != 1:
        return False
    (move,), door = known.script.stretches[0].moves, program.door
    is_plain = len(move.kernels) == 1 and move.packed is None and not move.copies
    return is_plain and (move.number, move.group_id, tuple(move.ranks)) == (0, door.group_id, tuple(door.ranks))
