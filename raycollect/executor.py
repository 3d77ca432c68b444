"""Runs one program with what it is given: a store, communicators, a recorder, a clock, faults. It decides nothing.

The order is what P3 and P4 promise: everything that can fail locally happens before the door and is brought there as a
violation; after the door kernels run; a failure among them leaves exactly the tensors being written dirty.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from raycollect.agreement import Agreement
from raycollect.backends import arrays
from raycollect.contracts import Clock, Communicator, Exchange, Faults, NoFaults, Together
from raycollect.errors import (
    CollectiveTimeoutError,
    FaultError,
    KernelError,
    PlanAbortedError,
    RaycollectError,
    RefusedError,
    Violation,
    refusal,
)
from raycollect.launches import Launches
from raycollect.meters import Meter, here
from raycollect.model import Kernel, Key, Launch, TensorInfo
from raycollect.observe import Recorder, Tracer
from raycollect.packing import Block, Pool
from raycollect.planner import Domain, Local, Program
from raycollect.pos import Absence, Container, State, Store
from raycollect.prepared import Prepared, places_of
from raycollect.reach import NOWHERE, Extent, Reach
from raycollect.script import Move, Script, Stretch, Writer
from raycollect.staging import Patience, home_of, transfer
from raycollect.tasks import Missing, Tasks
from raycollect.timing import timed

POINTS = ("start", "before_door", "after_door", "before_kernel", "after_kernel", "before_commit", "after_commit", "end")
"""Where faults can be injected."""

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
"""State of the store -> (kind of violation, what was found, what was expected)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruments:
    """What a program runs with.

    Attributes:
        store: The process's tensors.
        recorder: The story.
        clock: Time, for the story.
        faults: Where tests make things go wrong.
        allocate: Makes an output, a scratch tensor or staging; raises MemoryError where there is no memory.
        staging: Where small tensors are packed.
        tracer: Whether a timeline is recorded.
    """

    store: Store
    recorder: Recorder
    clock: Clock
    faults: Faults = field(default_factory=NoFaults)
    allocate: Callable[[TensorInfo], Any] = arrays.empty
    staging: Pool = field(default_factory=Pool)
    tracer: Tracer = field(default_factory=Tracer.current)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a program ended on this participant.

    Attributes:
        error: None when it ran to its end.
        outputs: The containers that it made, in the order of the requests.
        ended: The places at the door of those who are known to have run all of the plan; see `Communicator.end`.
    """

    error: RaycollectError | None = None
    outputs: tuple[Container, ...] = ()
    ended: tuple[int, ...] = ()


class Execution:
    """One run of one program.

    Args:
        program: What to do.
        keys: The keys of its operands.
        communicators: Gives this participant's end of a group, by the group's id; raises GroupBrokenError.
        instruments: See `Instruments`.
        seq: The plan's place in its controller's order; its launches take the numbers from there on.
        aborted: Why the plan was aborted, or None; asked before each launch, and while waiting for a producer.
        waiting: Called when an operand's method has not ended yet; None: a method that has not ended never will
            (ordered actors run methods in order, so it never ran).
        operands: The values of the operands, in the order of the keys, where an imperative call gives them itself;
            None: they are in the store, under the keys.
        exchange: How the participants meet at the door where they have no group in common.
        held: What is under the keys, where that is not in the store: the values of a captured step, as long as it has
            them.
        met: What an earlier run on these operands found out, and what all have now brought to the door: see `Repeat`.
        meeting: Of a member's own call, what its launches are known by in timelines; see `Label`.
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
        held: Sequence[Container | Missing] | None = None,
        met: tuple[Prepared, tuple[bytes, ...]] | None = None,
        meeting: str = "",
    ) -> None:
        self._program = program
        self._keys = keys
        self._communicators = communicators
        self._instruments = instruments
        self._faults = None if type(instruments.faults) is NoFaults else instruments.faults
        self._waiting = waiting
        self._given = operands
        self._held = held
        self._met = met
        self._timed = timed(instruments.tracer.ring, program, seq, meeting)
        self._seq = seq
        self._launches = Launches(program, communicators, exchange, seq=seq, aborted=aborted)
        self._operands: Sequence[Container | Missing] = ()
        self._tasks: Tasks | None = None  # None: as in the last run
        self._known: Prepared | None = None
        self._places: tuple[Any, ...] = ()  # where the operands lay before the door; none where that is not remembered
        self._block: Block | None = None
        self._first: Kernel | None = None  # what the backend may prepare before the door
        self._under_way: Stretch | None = None
        self._script: Script | None = None  # once all have agreed
        self._move: Move | None = None  # the latest that was begun
        self._left = 0  # how many of its kernels have not ended
        self._until_s = 0.0  # when to give up waiting for readers
        self._packs = False  # whether a kernel has worked in the staging
        self._is_loaded = False  # whether the stand-ins of the first kernel hold what it reads
        self._writes = False  # whether what the stretch under way writes may not be as it was
        self._meter: Meter | None = None  # of the thread that runs it
        self._extent: Extent | None = None  # once somebody has asked how far it is

    def run(self) -> Outcome:
        """Runs it; a failure is an outcome, never an exception."""
        self._timed.begin()
        outcome = self._run_all()
        self._timed.end(outcome.error)
        return outcome

    def _run_all(self) -> Outcome:
        self._record("start", self._program.name)
        self._meter = here()
        self._meter.clear()
        ended: tuple[int, ...] = ()
        ok = False
        try:
            self._launches.begin()
            self._at("start")
            self._prepare()
            self._at("before_door")
            with self._timed.door():
                script = self._script = self._agree()
            self._at("after_door")
            with self._timed.calls(script):
                self._run(script)
            self._at("end")
            ok = True
        except RaycollectError as exc:
            return Outcome(error=self._located(exc))
        except MemoryError as exc:
            return Outcome(error=self._located(KernelError(detail=f"out of memory: {exc}")))
        finally:
            if not ok and self._is_owing():
                self._launches.forsake()
            ended = self._launches.end(ok=ok)
            if self._block is not None and (ok or not self._packs):
                self._block.give()
        self._record("done")
        return Outcome(outputs=self._tasks.made() if self._tasks else (), ended=ended)

    def abort(self) -> None:
        """Ends its waits, now and from now on; any thread may call it."""
        self._launches.abort()
        self._instruments.store.wake()

    def reach(self) -> Reach:
        """How far it is; any thread may call it."""
        script, meter = self._script, self._meter
        if script is None or meter is None:
            return NOWHERE
        if self._extent is None:
            self._extent = Extent(script)
        move = self._move  # before how many are left: the other way round, a move would seem done as it begins
        left = self._left
        return self._extent.at(move, left, meter.part)

    # ------------------------------------------------------------------------------------------ before the door

    def _prepare(self) -> None:
        """Finds operands, checks them and makes outputs; what is wrong is noted, not raised."""
        held = self._given if self._given is not None else self._held
        self._operands = held if held is not None else tuple([self._find(key) for key in self._keys])
        self._known = self._recall()
        if self._known is None:
            self._make_ready(0)
            return
        self._block, self._first = self._known.block, self._known.first

    def _recall(self) -> Prepared | None:
        """What the last run on the same operands found out."""
        found = self._operands
        if self._met is not None:  # all have been told of that, whatever is remembered by now
            return self._met[0]
        if self._given is not None or Missing in map(type, found):
            return None
        return Prepared.recall(self._program, found, self._instruments.store)  # type: ignore[arg-type]

    def _make_ready(self, turn: int) -> None:
        """Prepares what is first brought in a round of the door; before the last round, the staging too."""
        tasks = self._tasks or self._look()
        if turn:
            tasks.ready(turn, self._operands, self._instruments.store)
        if turn == self._program.rounds - 1 and not tasks.has_violations:
            self._lift(tasks)
            self._reserve(tasks)
            self._first = None if tasks.has_violations else tasks.first()
            if self._first is not None:
                self._stage(self._first)

    def _look(self) -> Tasks:
        """Looks at the operands, as they are now, for the first round of the door."""
        home = partial(_home_of, self._communicators)  # a method would keep the tensors as long as this object
        is_given = self._given is not None
        tasks = Tasks(self._program, self._instruments.allocate, self._keys, given=is_given, home_of=home)
        if self._given is None and tasks.is_repeatable:
            self._places = self._placed()  # before the door: what changes later must be noticed
        tasks.ready(0, self._operands, self._instruments.store)
        self._tasks = tasks
        return tasks

    def _containers(self) -> list[Container]:
        """The operands that there are."""
        return [one for one in self._operands if isinstance(one, Container)]

    def _placed(self) -> tuple[Any, ...]:
        """Where the operands lie; nothing where one has no memory any more, which is for the door to hear."""
        try:
            return places_of(self._containers())
        except TypeError:
            return ()

    def _reserve(self, tasks: Tasks) -> None:
        """Takes what staging may be needed, while all can yet be told that there is none.

        Which tensors are packed follows from all ranks' sizes, but what this rank stages of them from its own: these
        are known before the last round, and those that the others have only bound them.
        """
        nbytes = tasks.room()
        if not nbytes or self._block is not None:
            return
        pool, limit = self._instruments.staging, self._program.staging
        try:
            self._block = pool.take(nbytes, limit, self._instruments.allocate)
        except MemoryError as exc:
            found, expected = str(exc) or "out of memory", f"{nbytes} bytes"
            self._object([Violation(kind="allocation", rank=-1, field="staging", found=found, expected=expected)])

    def _lift(self, tasks: Tasks) -> None:
        """Makes stand-ins, while all can yet be told that there is no memory for them."""
        try:
            tasks.lift()
        except MemoryError as exc:
            found = str(exc) or "out of memory"
        except RaycollectError:
            raise
        except Exception as exc:  # noqa: BLE001 - of the library that makes memory on a device
            found = f"{type(exc).__name__}: {exc}"
        else:
            return
        expected = "room for tensors that lie elsewhere than the backend works"
        self._object([Violation(kind="allocation", rank=-1, field="staging", found=found, expected=expected)])

    def _stage(self, kernel: Kernel) -> None:
        """Lets the backend prepare; what it refuses, all ranks hear of at the door."""
        opened = self._launches.stage()
        if opened is None:
            return
        stand_ins = self._tasks.stand_ins if self._tasks is not None else None
        carriage = stand_ins.carriage([(kernel.src, kernel.dst)]) if stand_ins is not None else None
        if carriage is not None:
            with self._timed.staging("load stand-ins"):
                carriage.load(self._patience())
            self._is_loaded = True
        communicator, launch = opened
        try:
            communicator.stage(launch, kernel)
        except RefusedError as exc:
            self._object(exc.violations)

    def _object(self, violations: Sequence[Violation]) -> None:
        """Notes for the door what is wrong besides the operands."""
        self._known = None
        rank = self._program.shares[self._program.tasks[0].share].rank
        self._tasks_here().violate([replace(v, rank=rank) if v.rank < 0 else v for v in violations])

    def _find(self, key: Key) -> Container | Missing:
        store = self._instruments.store
        found = store.look(key)
        if type(found) is Absence and found.state is State.ABSENT and self._waiting:
            self._waiting(key)
            self._record("waiting", key.hex())
            with self._timed.waiting("an operand"):
                found = store.wait(key, lambda: self._launches.reason is not None)
            if isinstance(found, Absence) and found.state is State.ABSENT:
                raise PlanAbortedError(detail=self._launches.reason or "aborted while waiting for an operand")
        if isinstance(found, Container):
            return found
        kind, text, expected = ABSENCES[found.state]
        return Missing(kind, text.format(found.detail or "a value that is not kept"), expected)

    # ------------------------------------------------------------------------------------------ the door

    def _agree(self) -> Script:
        """Meets the others, as often as the plan says; raises what all of them raise."""
        clock, program = self._instruments.clock, self._program
        brought: tuple[bytes, ...] | None = None
        blobs: tuple[bytes, ...] = ()
        came_s = clock()
        if self._known is not None:
            self._record("door")
            arrival, brought = self._known.arrival, self._again(self._known)
            if brought is None and self._known is not None:
                return self._known.script
        agreement = Agreement(program)
        for turn in range(program.rounds):
            if turn:
                self._make_ready(turn)
            if brought is None:
                arrival = self._tasks_here().arrival(turn)
                self._record("door")
                brought = self._launches.meet(arrival)
            blobs, brought = brought, None
            violations = agreement.meet(blobs)
            if violations:
                raise refusal(program.name, "", violations)
            if turn + 1 < program.rounds and self._tasks is not None:
                self._tasks.learn(turn, agreement.verdicts)
        self._record("agreed", f"after {clock() - came_s:.6f} s")
        tasks = self._tasks_here()
        writer = Writer(program, tasks.operands, self._block, self._first, tasks.stand_ins)
        script = writer.write(agreement.verdicts, alone=agreement.conflict)
        if self._places and tasks.stand_ins is None:  # which are large, and not kept from run to run
            prepared = Prepared(
                program=program,
                places=self._places,
                ranges=tasks.ranges,
                arrival=arrival,
                first=self._first,
                blobs=blobs,
                script=script,
                block=self._block,
            )
            prepared.remember(self._containers())
        return script

    def _again(self, known: Prepared) -> tuple[bytes, ...] | None:
        """Meets the others, who should bring what they did in the last run; else gives what they brought."""
        if self._met is not None:
            return self._met[1]
        self._record("door")
        try:
            return self._launches.again(known.first, known.arrival, known.blobs)
        except RefusedError as exc:  # before anything was brought
            self._object(exc.violations)
            return None

    def _tasks_here(self) -> Tasks:
        """The tasks, looked at anew where something is not as in the last run after all.

        Raises:
            KernelError: An operand has changed since it was told of at the door.
        """
        if self._tasks is not None:
            return self._tasks
        tasks = self._look()
        if self._known is not None and self._known.places != self._places:
            raise KernelError(detail="an operand was changed while the plan waited at the door")
        return tasks

    # ------------------------------------------------------------------------------------------ after the door

    def _run(self, script: Script) -> None:
        with self._instruments.store.writing(script.ranges, self._given_up):
            for stretch in script.stretches:
                self._under_way = stretch
                if len(script.stretches) > 1:
                    self._record("bundle", f"{stretch.share.op} of {stretch.tasks}")
                with self._timed.bundle(stretch):
                    self._run_stretch(stretch)
                self._under_way = None

    def _run_stretch(self, stretch: Stretch) -> None:
        """Runs one bundle; if it fails after it has begun, what it writes is dirty, and nothing else."""
        store = self._instruments.store
        is_kept = self._program.commits or stretch.share.template.is_listed  # by kernels
        self._writes = False
        try:
            for move in stretch.moves:
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
                if move.carriage is None:
                    self._writes = not is_kept
                    self._launch(communicator, launch, move)
                else:
                    self._carry(communicator, launch, move, is_kept=is_kept)
        except BaseException:
            if self._writes:
                store.mark_dirty(stretch.ranges, stretch.owners)
            raise
        finally:
            if stretch.versioned and self._writes:
                arrays.raise_versions(stretch.versioned)
        store.mark_written(stretch.dense)

    def _move_here(self, move: Move) -> None:
        """Makes the copies of a move, or what it has to do between the GPUs of this rank."""
        self._writes = self._writes or any(one.kind is Local.SPREAD for one in move.crossings) or bool(move.copies)
        with self._timed.staging(move.crossings[0].kind.value if move.crossings else "copy"):
            patience = self._patience()
            for target, source in move.copies:
                transfer(target, source, patience)
            for crossing in move.crossings:
                crossing.run(patience)

    def _carry(self, communicator: Communicator, launch: Launch, move: Move, *, is_kept: bool) -> None:
        """Runs the kernels of a move on stand-ins; tensors that have one are as they were until all have ended."""
        carriage = move.carriage
        assert carriage is not None  # as the caller has seen
        self._writes = not is_kept and (self._writes or not carriage.is_whole)
        self._left, self._move = len(move.kernels), move
        if not self._is_loaded:
            with self._timed.staging("load stand-ins"):
                carriage.load(self._patience())
        self._is_loaded = False
        self._launch(communicator, launch, move)
        self._writes = not is_kept
        with self._timed.staging("unload stand-ins"):
            carriage.unload(self._patience())

    def _patience(self) -> Patience:
        return Patience(lambda: self._launches.reason, self._program.timeout_s)

    def _launch(self, communicator: Communicator, launch: Launch, move: Move) -> None:
        """Runs the kernels of a move: together where the backend can, else by what is to be done instead."""
        kernels = move.kernels
        self._left, self._move = len(kernels), move
        if len(kernels) > 1 and isinstance(communicator, Together):
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
                communicator.launch(launch, kernel).wait(self._program.timeout_s)
            self._ended(self._left - 1)
            if move.packed is not None:
                with self._timed.staging("unpack"):
                    move.packed.unload()
            self._at("after_kernel")

    def _ended(self, left: int) -> None:
        """Notes that kernels have ended, and how many of the move are left."""
        if self._meter is not None:
            self._meter.clear()
        self._left = left

    def _is_owing(self) -> bool:
        """Whether others may wait in a kernel of the launch that is open, for one that is not run here."""
        if self._script is None:
            return False
        moves = [one for stretch in self._script.stretches for move in stretch.moves for one in (move, *move.instead)]
        number = 0 if self._move is None else self._move.number
        at = next((at for at, move in enumerate(moves) if move is self._move), -1)
        return self._left > 0 or any(move.kernels and move.number == number for move in moves[at + 1 :])

    def _given_up(self) -> RaycollectError | None:
        """What ends the wait for those who read what the plan writes."""
        now_s, limit_s = self._instruments.clock(), self._program.timeout_s
        self._until_s = self._until_s or now_s + limit_s  # from when it is first asked
        return given_up(self._launches.reason, now_s > self._until_s, limit_s)

    # ------------------------------------------------------------------------------------------ notes

    def _located(self, error: RaycollectError) -> RaycollectError:
        return located(error, self._program, self._under_way, self._instruments.recorder, self._seq)

    def _record(self, what: str, detail: str = "") -> None:
        self._instruments.recorder.add(what, self._seq, detail)

    def _at(self, point: str) -> None:
        if self._faults is not None:
            self._faults.at(point, self._seq, self._program.door.rank)


def _home_of(communicators: Callable[[str], Communicator], domain: Domain) -> str:
    return home_of(domain.memory, communicators(domain.group_id))


def given_up(reason: str | None, is_late: bool, limit_s: float) -> RaycollectError | None:
    """What ends a wait for those who read what a plan writes: an abort, or the plan's time limit."""
    if reason is not None:
        return PlanAbortedError(detail=reason)
    if not is_late:
        return None
    detail = f"for {limit_s:g} s others have been reading a tensor that the plan writes"
    return CollectiveTimeoutError(timeout_s=limit_s, detail=detail)


def located(
    error: RaycollectError, program: Program, under_way: Stretch | None, recorder: Recorder, seq: int
) -> RaycollectError:
    """Notes a failure, and adds to it what only its participant knows: where in the program it happened."""
    recorder.add("failed", seq, type(error).__name__)
    if isinstance(error, FaultError):
        share = under_way.share if under_way else None
        error.op = error.op or (share.op if share else program.name)
        error.group_name = error.group_name or (share.group_id if share else program.door.group_id)
        if share and error.rank < 0 and isinstance(error, KernelError):
            error.rank = share.rank
    return error.with_traceback(None)  # a value from here on: its frames would keep the tensors alive
