"""Runs one program with what it is given: a store, a communicator, a recorder, a clock, faults. It decides nothing.

The order is what P3 and P4 promise: everything that can fail locally happens before the door and is brought there as a
violation; after the door kernels run; a failure among them leaves exactly the tensors being written dirty.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from raycollect.backends import arrays
from raycollect.door import Arrival, Spec, decide, decode_arrival, encode_arrival
from raycollect.errors import (
    FaultError,
    InternalError,
    KernelError,
    PlanAbortedError,
    RaycollectError,
    Violation,
    refusal,
)
from raycollect.model import Clock, Communicator, Faults, Kernel, Key, Launch, NoFaults, ReduceOp, TensorInfo
from raycollect.observe import Recorder
from raycollect.planner import Program, Role
from raycollect.pos import Absence, Container, Range, State, Store, Structure

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
    """

    store: Store
    recorder: Recorder
    clock: Clock
    faults: Faults = field(default_factory=NoFaults)


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
    ) -> None:
        self._program = program
        self._communicator = communicator
        self._instruments = instruments
        self._aborted = aborted
        self._waiting = waiting
        self._seq = seq
        self._launch = Launch(seq=seq, ranks=program.ranks, timeout_s=program.timeout_s)
        self._buffers: list[Container | None] = []
        self._violations: list[Violation] = []
        self._kernels: list[Kernel] = []
        self._arrival = b""
        self._written: list[Any] = []
        self._written_ranges: list[Range] = []

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
        buffers = zip(self._buffers, self._program.template.buffers, strict=True)
        made = tuple(container for container, buffer in buffers if buffer.is_output and container is not None)
        return Outcome(outputs=made, ended=ended)

    # ------------------------------------------------------------------------------------------ before the door

    def _prepare(self) -> None:
        """Finds operands, checks them and makes outputs; what is wrong is noted, not raised."""
        keys = iter(self._program.keys)
        for buffer in self._program.template.buffers:
            if buffer.role is Role.OPERAND:
                self._buffers.append(self._operand(next(keys)))
            elif buffer.role is Role.OUTPUT_LIKE:
                like = self._buffers[buffer.source]
                infos = [arrays.info(tensor) for tensor in like.tensors] if like else []
                self._buffers.append(self._allocate(like.structure, infos) if like else None)
            else:
                self._buffers.append(None)
        if not self._recall():
            self._check()
            self._arrival = self._write_arrival()
            if not self._violations and self._program.rounds == 1:
                self._kernels = self._lower()
                self._remember()
        if self._kernels:
            self._communicator.stage(self._launch, self._kernels[0])

    def _recall(self) -> bool:
        """Takes over what the last run of this program found, if its one operand is as it was."""
        container = self._sole()
        known = container.memo.get(self._program) if container is not None else None
        if container is None or known is None or known.places != tuple(map(arrays.place, container.tensors)):
            return False
        if self._instruments.store.is_dirty(known.ranges):
            return False
        self._kernels, self._arrival = known.kernels, known.arrival
        self._written, self._written_ranges = list(container.tensors), known.ranges
        return True

    def _sole(self) -> Container | None:
        return self._buffers[0] if len(self._buffers) == 1 else None

    def _remember(self) -> None:
        container = self._sole()
        if container is None or len(self._written) != len(container.tensors):
            return
        if len(container.memo) >= _REMEMBERED:
            container.memo.clear()
        container.memo[self._program] = _Prepared(
            places=tuple(map(arrays.place, container.tensors)),
            kernels=self._kernels,
            ranges=self._written_ranges,
            arrival=self._arrival,
        )

    def _operand(self, key: Key) -> Container | None:
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
        self._violate(kind, "operand", text.format(found.detail or "a value that is not kept"), expected, key)
        return None

    def _allocate(self, structure: Structure, infos: Sequence[TensorInfo]) -> Container | None:
        try:
            return Container.build(structure, [arrays.empty_like(info) for info in infos])
        except MemoryError as exc:
            wanted = sum(info.nbytes for info in infos)
            self._violate("allocation", "output", str(exc) or "out of memory", f"{wanted} bytes")
            return None

    def _check(self) -> None:
        """Checks what the plan reads and writes."""
        steps = self._program.template.steps
        read = {step.src for step in steps if step.src >= 0}
        written = {step.dst for step in steps if step.dst >= 0}
        store = self._instruments.store
        for index, container in enumerate(self._buffers):
            if container is None:
                continue
            ranges = _ranges(container.tensors)
            if index in read and store.is_dirty(ranges):
                self._violate("dirty", "operand", "half-written by a failed collective", "an intact tensor")
            if index in written:
                self._check_written(container, ranges)
        self._check_aliases(written)
        for step in steps:
            if step.op is not None:
                self._check_op(step.op, self._tensors(step.src))

    def _check_written(self, container: Container, ranges: Sequence[Range]) -> None:
        self._written += container.tensors
        self._written_ranges += ranges
        for tensor in container.tensors:
            if not tensor.flags.writeable:
                self._violate("read_only", "operand", "read-only", "a writable array")
            if arrays.overlaps_itself(tensor):
                self._violate("alias", "operand", "overlapping itself (broadcast strides)", "one element per address")

    def _check_aliases(self, written: set[int]) -> None:
        """Written memory must not overlap anything else of this plan (P6)."""
        named = [(index, tensor) for index, c in enumerate(self._buffers) if c for tensor in c.tensors]
        for i, (index, tensor) in enumerate(named):
            for other_index, other in named[i + 1 :]:
                if (index in written or other_index in written) and arrays.overlap(tensor, other):
                    self._violate("alias", "operand", "overlapping another tensor of the plan", "separate memory")
                    return

    def _check_op(self, op: ReduceOp, tensors: Sequence[Any]) -> None:
        for dtype in dict.fromkeys(arrays.info(tensor).dtype for tensor in tensors):
            reason = arrays.refusal_reason(op, dtype)
            if reason:
                self._violate("unsupported", "reduce op", reason, "")

    # ------------------------------------------------------------------------------------------ the door

    def _agree(self) -> None:
        """Meets the others, once or twice; raises what all of them raise."""
        clock = self._instruments.clock
        came_s = clock()
        arrivals = self._meet()
        if self._program.rounds > 1:
            self._learn(arrivals)
            self._arrival = self._write_arrival()
            self._meet()
        self._record("agreed", f"after {clock() - came_s:.6f} s")

    def _meet(self) -> list[Arrival]:
        program = self._program
        self._record("door")
        blobs = self._communicator.agree(self._launch, self._arrival)
        if not self._violations and all(blob == self._arrival for blob in blobs):
            return []  # the same bytes from all: nothing to compare
        arrivals = [decode_arrival(bytes(blob)) for blob in blobs]
        violations = decide(program.ranks, arrivals)
        if violations:
            raise refusal(program.op, "", violations)
        return arrivals

    def _write_arrival(self) -> bytes:
        return encode_arrival(Arrival(spec=self._spec(), violations=tuple(self._violations)))

    def _spec(self) -> Spec:
        program = self._program
        container = self._buffers[0] if self._buffers else None
        structure = container.structure if container else Structure("")
        return Spec(
            op=program.op,
            reduce_op=program.reduce_op.name if program.reduce_op else "",
            root=program.root,
            structure=structure.kind,
            names=structure.names,
            tensors=tuple(arrays.info(tensor) for tensor in container.tensors) if container else None,
        )

    def _learn(self, arrivals: Sequence[Arrival]) -> None:
        """Makes the outputs whose shape another rank brought to the first round."""
        for index, buffer in enumerate(self._program.template.buffers):
            if buffer.role is not Role.OUTPUT_LEARNED:
                continue
            spec = arrivals[self._program.ranks.index(buffer.source)].spec
            if spec.tensors is None:
                raise InternalError(detail=f"rank {buffer.source} said nothing about its tensor")
            made = self._allocate(Structure(spec.structure, spec.names), spec.tensors)
            self._buffers[index] = made
            if made is not None:
                self._check_written(made, _ranges(made.tensors))

    # ------------------------------------------------------------------------------------------ after the door

    def _run_kernels(self) -> None:
        written, ranges = self._written, self._written_ranges
        store = self._instruments.store
        with store.writing(ranges):
            try:
                for kernel in self._kernels or self._lower():
                    self._at("before_kernel")
                    self._communicator.launch(self._launch, kernel).wait(self._program.timeout_s)
                    self._at("after_kernel")
            except BaseException:
                store.mark_dirty(ranges, [arrays.owner(tensor) for tensor in written])
                raise
            # A view with gaps is written whole, but its range is not.
            dense = (span for tensor, span in zip(written, ranges, strict=True) if span[1] - span[0] == tensor.nbytes)
            store.mark_written(list(dense))

    def _lower(self) -> list[Kernel]:
        """The steps with their arrays filled in: one kernel per step and tensor."""
        kernels = []
        for step in self._program.template.steps:
            reads = self._tensors(step.src)
            writes = self._tensors(step.dst)
            for i in range(max(len(reads), len(writes), 1)):
                src = reads[i] if reads else None
                dst = writes[i] if writes else None
                kernels.append(Kernel(kind=step.kind, src=src, dst=dst, op=step.op, peer=step.peer))
        return kernels

    def _tensors(self, index: int) -> tuple[Any, ...]:
        container = self._buffers[index] if index >= 0 else None
        return container.tensors if container else ()

    # ------------------------------------------------------------------------------------------ notes

    def _violate(self, kind: str, name: str, found: str, expected: str, key: Key | None = None) -> None:
        ref = key.hex() if key else (self._program.keys[0].hex() if self._program.keys else "")
        rank = self._program.rank
        self._violations.append(Violation(kind=kind, rank=rank, field=name, found=found, expected=expected, ref=ref))

    def _located(self, error: RaycollectError) -> RaycollectError:
        self._record("failed", type(error).__name__)
        if isinstance(error, FaultError) and not error.op:
            error.op = self._program.op
        return error.with_traceback(None)  # a value from here on: its frames would keep the tensors alive

    def _record(self, what: str, detail: str = "") -> None:
        self._instruments.recorder.add(what, self._seq, detail)

    def _at(self, point: str) -> None:
        self._instruments.faults.at(point, self._seq, self._program.rank)


def _ranges(tensors: Sequence[Any]) -> list[Range]:
    return [arrays.byte_range(tensor) for tensor in tensors]
