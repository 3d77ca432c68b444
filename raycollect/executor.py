"""Runs one program with what it is given: a store, a communicator, a recorder, a clock, faults. It decides nothing.

The order is what P3 and P4 promise: everything that can fail locally happens before the door and is brought there as a
violation; after the door kernels run; a failure among them leaves exactly the tensors being written dirty.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from raycollect.backends import arrays
from raycollect.door import Arrival, Verdict, encode_arrival, judge
from raycollect.errors import (
    CollectiveTimeoutError,
    FaultError,
    KernelError,
    PlanAbortedError,
    RaycollectError,
    RefusedError,
    refusal,
)
from raycollect.model import Clock, Communicator, Faults, Kernel, Key, Launch, NoFaults, TensorInfo
from raycollect.observe import Recorder
from raycollect.operands import Operands, ranges_of
from raycollect.planner import Program, Role
from raycollect.pos import Absence, Container, Range, State, Store

POINTS = ("start", "before_door", "after_door", "before_kernel", "after_kernel", "end")
"""Where faults can be injected."""

_REMEMBERED = 8
"""How many programs a container remembers."""

_ABSENCES: dict[State, tuple[str, str, str]] = {
    State.ABSENT: ("lost", "not there: its method never ran here", "a value that its method returned"),
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
        allocate: Makes an output or a scratch tensor; raises MemoryError where there is no memory.
    """

    store: Store
    recorder: Recorder
    clock: Clock
    faults: Faults = field(default_factory=NoFaults)
    allocate: Callable[[TensorInfo], Any] = arrays.empty


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a program ended on this rank.

    Attributes:
        error: None when it ran to its end.
        outputs: The containers that it made, in the order of its output buffers.
        ended: The ranks that are known to have run all of it; see `Communicator.end`.
    """

    error: RaycollectError | None = None
    outputs: tuple[Container, ...] = ()
    ended: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prepared:
    """What one program found about one container, remembered with it as long as its arrays stay as they are.

    Attributes:
        places: `arrays.place` of each tensor.
        kernels: The steps with their arrays filled in.
        ranges: The memory of all tensors.
        arrival: What this rank brings to the door.
    """

    places: tuple[Any, ...]
    kernels: list[Kernel]
    ranges: list[Range]
    arrival: bytes


class Execution:
    """One run of one program.

    Args:
        program: What to do.
        communicator: This rank's end of the program's group.
        instruments: See `Instruments`.
        seq: The plan's place in its controller's order.
        aborted: Why the plan was aborted, or None; asked while waiting for a producer.
        waiting: Called when an operand's method has not ended yet; None: a method that has not ended never will
            (ordered actors run methods in order, so it never ran).
        operands: The values of the template's OPERAND buffers, where an imperative call gives them itself; None: they
            are in the store, under the program's keys.
    """

    def __init__(
        self,
        program: Program,
        communicator: Communicator,
        instruments: Instruments,
        *,
        seq: int,
        aborted: Callable[[], str | None],
        waiting: Callable[[Key], None] | None = None,
        operands: Sequence[Container] | None = None,
    ) -> None:
        self._program = program
        self._communicator = communicator
        self._instruments = instruments
        self._aborted = aborted
        self._waiting = waiting
        self._given = operands
        self._operands = Operands(program, instruments.allocate, given=operands is not None)
        self._seq = seq
        self._launch = Launch(seq=seq, ranks=program.ranks, timeout_s=program.timeout_s)
        self._kernels: list[Kernel] = []
        self._arrival = b""

    def run(self) -> Outcome:
        """Runs it; a failure is an outcome, never an exception."""
        self._record("start", self._program.op)
        ended: tuple[int, ...] = ()
        ok = False
        try:
            self._at("start")
            self._prepare()
            self._at("before_door")
            self._agree()
            self._at("after_door")
            self._run_kernels()
            self._at("end")
            ok = True
        except RaycollectError as exc:
            return Outcome(error=self._located(exc))
        except MemoryError as exc:
            return Outcome(error=self._located(KernelError(detail=f"out of memory: {exc}")))
        finally:
            ended = self._communicator.end(self._launch, ok)
        self._record("done")
        return Outcome(outputs=self._operands.made(), ended=ended)

    # ------------------------------------------------------------------------------------------ before the door

    def _prepare(self) -> None:
        """Finds operands, checks them and makes outputs; what is wrong is noted, not raised."""
        operands = self._operands
        keys, given = iter(self._program.keys), iter(self._given or ())
        for index, buffer in enumerate(self._program.template.buffers):
            if buffer.role is Role.OPERAND:
                operands.bind(index, self._find(next(keys), index) if self._given is None else next(given))
            else:
                operands.make(index)
        if not self._recall():
            operands.check(self._instruments.store)
            self._arrival = self._write_arrival()
            if not operands.violations and self._program.rounds == 1:
                self._kernels = operands.kernels()
                self._remember()
        if self._kernels and operands.fit(self._kernels[0]):
            self._stage()

    def _stage(self) -> None:
        """Lets the backend prepare; what it refuses, all ranks hear of at the door."""
        try:
            self._communicator.stage(self._launch, self._kernels[0])
        except RefusedError as exc:
            rank = self._program.rank
            self._operands.violations += [replace(v, rank=rank) if v.rank < 0 else v for v in exc.violations]
            self._arrival = self._write_arrival()

    def _recall(self) -> bool:
        """Takes over what the last run of this program found, if its one operand is as it was."""
        bound = self._operands.sole()
        known = bound.container.memo.get(self._program) if bound is not None else None
        if bound is None or known is None or known.places != tuple(map(arrays.place, bound.arrays)):
            return False
        if self._instruments.store.is_dirty(known.ranges):
            return False
        self._kernels, self._arrival = known.kernels, known.arrival
        if any(step.dst == 0 for step in self._program.template.steps):
            self._operands.write(bound, known.ranges)
        return True

    def _remember(self) -> None:
        bound = self._operands.sole()
        if bound is None:
            return
        memo = bound.container.memo
        if len(memo) >= _REMEMBERED:
            memo.clear()
        memo[self._program] = _Prepared(
            places=tuple(map(arrays.place, bound.arrays)),
            kernels=self._kernels,
            ranges=ranges_of(bound.arrays),
            arrival=self._arrival,
        )

    def _find(self, key: Key, index: int) -> Container | None:
        store = self._instruments.store
        found = store.look(key)
        if isinstance(found, Absence) and found.state is State.ABSENT and self._waiting:
            self._waiting(key)
            self._record("waiting", key.hex())
            found = store.wait(key, lambda: self._aborted() is not None)
            if isinstance(found, Absence) and found.state is State.ABSENT:
                raise PlanAbortedError(detail=self._aborted() or "aborted while waiting for an operand")
        if isinstance(found, Container):
            return found
        kind, text, expected = _ABSENCES[found.state]
        text = text.format(found.detail or "a value that is not kept")
        self._operands.violate(kind, "operand", text, expected, index)
        return None

    # ------------------------------------------------------------------------------------------ the door

    def _agree(self) -> None:
        """Meets the others, once or twice; raises what all of them raise."""
        clock = self._instruments.clock
        came_s = clock()
        verdict = self._meet()
        if self._program.rounds > 1:
            self._operands.learn(verdict.specs)
            self._arrival = self._write_arrival()
            verdict = self._meet()
        if not self._kernels:
            self._kernels = self._operands.kernels()
        if verdict.most:
            self._kernels = self._operands.with_sizes(self._kernels, verdict.most)
        self._record("agreed", f"after {clock() - came_s:.6f} s")

    def _meet(self) -> Verdict:
        program = self._program
        self._record("door")
        blobs = self._communicator.agree(self._launch, self._arrival)
        verdict = judge(program.ranks, tuple(map(bytes, blobs)))
        if verdict.violations:
            raise refusal(program.op, "", verdict.violations)
        return verdict

    def _write_arrival(self) -> bytes:
        return encode_arrival(Arrival(spec=self._operands.spec(), violations=tuple(self._operands.violations)))

    # ------------------------------------------------------------------------------------------ after the door

    def _run_kernels(self) -> None:
        operands, store, clock = self._operands, self._instruments.store, self._instruments.clock
        until_s = clock() + self._program.timeout_s

        def given_up() -> RaycollectError | None:
            reason = self._aborted()
            if reason is not None:
                return PlanAbortedError(detail=reason)
            if clock() <= until_s:
                return None
            limit_s = self._program.timeout_s
            detail = f"for {limit_s:g} s others have been reading a tensor that the plan writes"
            return CollectiveTimeoutError(timeout_s=limit_s, detail=detail)

        with store.writing(operands.ranges, given_up):
            try:
                for kernel in self._kernels:
                    self._at("before_kernel")
                    self._communicator.launch(self._launch, kernel).wait(self._program.timeout_s)
                    self._at("after_kernel")
            except BaseException:
                store.mark_dirty(operands.ranges, operands.owners)
                raise
            store.mark_written(operands.dense())

    # ------------------------------------------------------------------------------------------ notes

    def _located(self, error: RaycollectError) -> RaycollectError:
        self._record("failed", type(error).__name__)
        if isinstance(error, FaultError) and not error.op:
            error.op = self._program.op
        return error.with_traceback(None)  # a value from here on: its frames would keep the tensors alive

    def _record(self, what: str, detail: str = "") -> None:
        self._instruments.recorder.add(what, self._seq, detail)

    def _at(self, point: str) -> None:
        self._instruments.faults.at(point, self._seq, self._program.rank)
