"""Runs one program with what it is given: a store, a communicator, a recorder, a clock, faults. It decides nothing.

The order is what P3 and P4 promise: everything that can fail locally happens before the door and is brought there as a
violation; after the door kernels run; a failure among them leaves exactly the tensors being written dirty.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

from raycollect.backends import arrays
from raycollect.door import Arrival, Side, Spec, Verdict, encode_arrival, judge, learn
from raycollect.errors import (
    FaultError,
    KernelError,
    PlanAbortedError,
    RaycollectError,
    RefusedError,
    Violation,
    refusal,
)
from raycollect.model import (
    PIECES,
    TENSOR,
    Clock,
    Communicator,
    Faults,
    Kernel,
    Key,
    Launch,
    NoFaults,
    OpKind,
    ReduceOp,
    Structure,
    TensorInfo,
)
from raycollect.observe import Recorder
from raycollect.planner import Buffer, Program, Role, Step
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


@dataclass(frozen=True, eq=False)
class _Bound:
    """A buffer with its memory.

    Attributes:
        container: The value.
        arrays: The memory of its tensors, in order.
        pieces: For each rank the memory of the tensors of its piece; None where the buffer is one value.
        loose: Whether the pieces are cut from one tensor.
    """

    container: Container
    arrays: tuple[Any, ...]
    pieces: tuple[tuple[Any, ...], ...] | None = None
    loose: bool = False

    @cached_property
    def side(self) -> Side:
        """What the door hears of it."""
        structure = self.container.structure
        if self.loose:
            structure = Structure("list", (), (TENSOR,) * len(self.leaves))
        elif self.pieces is not None:  # a list or a tuple: that is the same here
            structure = Structure("list", (), structure.items)
        libraries = [arrays.library(tensor) for tensor in self.container.tensors]
        if self.loose:
            libraries *= len(self.leaves)
        infos = tuple(arrays.info(leaf, library) for leaf, library in zip(self.leaves, libraries, strict=True))
        return Side(structure=structure, tensors=infos, loose=self.loose)

    @property
    def leaves(self) -> tuple[Any, ...]:
        """All memory that kernels see: pieces cut from one tensor count, not that tensor."""
        return self.arrays if self.pieces is None else tuple(array for piece in self.pieces for array in piece)

    @property
    def owners(self) -> list[object]:
        """For each of `arrays`, the object that lives as long as its memory."""
        return [arrays.owner(tensor) for tensor in self.container.tensors]


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
        self._kind = OpKind(program.op)
        self._communicator = communicator
        self._instruments = instruments
        self._aborted = aborted
        self._waiting = waiting
        self._operands = operands
        self._seq = seq
        self._launch = Launch(seq=seq, ranks=program.ranks, timeout_s=program.timeout_s)
        self._buffers: list[_Bound | None] = []
        self._violations: list[Violation] = []
        self._kernels: list[Kernel] = []
        self._arrival = b""
        self._written: list[Any] = []
        self._owners: list[object] = []
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
        made = tuple(bound.container for bound, buffer in buffers if buffer.is_output and bound is not None)
        return Outcome(outputs=made, ended=ended)

    # ------------------------------------------------------------------------------------------ before the door

    def _prepare(self) -> None:
        """Finds operands, checks them and makes outputs; what is wrong is noted, not raised."""
        keys = iter(self._program.keys)
        given = iter(self._operands or ())
        for index, buffer in enumerate(self._program.template.buffers):
            if buffer.role is Role.OPERAND:
                container = self._find(next(keys), index) if self._operands is None else next(given)
                self._buffers.append(self._bind(index, container))
            elif buffer.role is Role.LEARNED:
                self._buffers.append(None)
            else:
                self._buffers.append(self._make_like(index, buffer))
        if not self._recall():
            self._check()
            self._arrival = self._write_arrival()
            if not self._violations and self._program.rounds == 1:
                self._kernels = self._lower()
                self._remember()
        if self._kernels and self._fits(self._kernels[0]):
            self._stage()

    def _stage(self) -> None:
        """Lets the backend prepare; what it refuses, all ranks hear of at the door."""
        try:
            self._communicator.stage(self._launch, self._kernels[0])
        except RefusedError as exc:
            rank = self._program.rank
            self._violations += [replace(v, rank=rank) if v.rank < 0 else v for v in exc.violations]
            self._arrival = self._write_arrival()

    def _recall(self) -> bool:
        """Takes over what the last run of this program found, if its one operand is as it was."""
        bound = self._sole()
        known = bound.container.memo.get(self._program) if bound is not None else None
        if bound is None or known is None or known.places != tuple(map(arrays.place, bound.arrays)):
            return False
        if self._instruments.store.is_dirty(known.ranges):
            return False
        self._kernels, self._arrival = known.kernels, known.arrival
        if any(step.dst == 0 for step in self._program.template.steps):
            self._written, self._written_ranges = list(bound.arrays), known.ranges
            self._owners = bound.owners
        return True

    def _sole(self) -> _Bound | None:
        """The one buffer of a program that has no other, and no pieces, whose sizes are other ranks' business too."""
        return self._buffers[0] if len(self._buffers) == 1 and self._kind not in PIECES else None

    def _remember(self) -> None:
        bound = self._sole()
        if bound is None:
            return
        memo = bound.container.memo
        if len(memo) >= _REMEMBERED:
            memo.clear()
        memo[self._program] = _Prepared(
            places=tuple(map(arrays.place, bound.arrays)),
            kernels=self._kernels,
            ranges=_ranges(bound.arrays),
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
        self._violate(kind, "operand", text.format(found.detail or "a value that is not kept"), expected, index)
        return None

    def _bind(self, index: int, container: Container | None) -> _Bound | None:
        """Looks at a value's memory, in pieces where the operation takes it so."""
        if container is None:
            return None
        try:
            views = tuple(map(arrays.memory, container.tensors))
        except TypeError as exc:
            self._violate("not_tensor", "operand", str(exc), "a tensor", index)
            return None
        structure = container.structure
        if not self._is_in_pieces(index):
            return _Bound(container, views)
        count = len(self._program.ranks)
        side = "output" if index == self._program.template.dst else "input"
        if structure.kind in ("list", "tuple") and len(structure.items) == count:
            if len({item.count for item in structure.items}) > 1:
                self._violate("mismatch", side, str(structure), "pieces of equally many tensors", index)
                return None
            ends = accumulate((item.count for item in structure.items), initial=0)
            return _Bound(container, views, tuple(views[lo:hi] for lo, hi in pairwise(ends)))
        cut = arrays.split(views[0], count) if structure.kind == "tensor" else None
        if cut is not None:
            return _Bound(container, views, tuple((piece,) for piece in cut), loose=True)
        found = str(arrays.describe(container.tensors[0])) if structure.kind == "tensor" else str(structure)
        expected = f"a list of {count}, one per rank, or one contiguous tensor that {count} divides"
        self._violate("mismatch", side, found, expected, index)
        return None

    def _is_in_pieces(self, index: int) -> bool:
        """Whether a buffer of the operation, or a scratch like it, holds one piece per rank."""
        if self._kind not in PIECES:
            return False
        template = self._program.template
        buffer = template.buffers[index]
        if buffer.scratch and buffer.role is Role.LIKE:
            index = buffer.source
        gives, takes = PIECES[self._kind]
        if index == template.src and gives:
            return True
        return takes and (index == template.dst or buffer.scratch)

    def _make_like(self, index: int, buffer: Buffer) -> _Bound | None:
        """Makes an output or scratch whose infos this rank knows by itself."""
        like = self._buffers[buffer.source]
        if like is None:
            return None
        if buffer.role is Role.PIECE:
            side = like.side.item(self._program.ranks.index(self._program.rank))
            return self._make(index, side.structure, side.tensors)
        infos = tuple(map(arrays.describe, like.container.tensors))
        return self._make(index, like.container.structure, infos)

    def _make(self, index: int, structure: Structure, infos: Sequence[TensorInfo]) -> _Bound | None:
        try:
            return self._bind(index, Container.build(structure, [arrays.empty(info) for info in infos]))
        except MemoryError as exc:
            wanted = sum(info.nbytes for info in infos)
            self._violate("allocation", "output", str(exc) or "out of memory", f"{wanted} bytes", index)
            return None

    def _check(self) -> None:
        """Checks what the plan reads and writes."""
        steps = self._program.template.steps
        read, written = set[int](), set[int]()
        for step in steps:
            read |= {step.src} - written  # what a step before has written whole need not be intact
            written |= {step.dst} - {-1}
        store = self._instruments.store
        for index, bound in enumerate(self._buffers):
            if bound is None:
                continue
            if index in read and store.is_dirty(_ranges(bound.arrays)):
                self._violate("dirty", "operand", "half-written by a failed collective", "an intact tensor", index)
            if index in written:
                self._check_written(index, bound)
        self._check_aliases(written)
        for step in steps:
            if step.op is not None:
                self._check_op(step.op, step.src)

    def _check_written(self, index: int, bound: _Bound) -> None:
        self._written += bound.arrays
        self._owners += bound.owners
        self._written_ranges += _ranges(bound.arrays)
        for array in bound.arrays:
            if not arrays.is_writeable(array):
                self._violate("read_only", "operand", "read-only", "a writable array", index)
            if arrays.overlaps_itself(array):
                self._violate(
                    "alias", "operand", "overlapping itself (broadcast strides)", "one element per address", index
                )

    def _check_aliases(self, written: set[int]) -> None:
        """Written memory must not overlap anything else of this plan (P6), but for what works in place."""
        found = [
            (*arrays.byte_range(array), index, at, array)
            for index, bound in enumerate(self._buffers)
            if bound
            for at, array in enumerate(bound.leaves)
        ]
        found.sort(key=lambda one: one[:2])
        in_place = 0
        for i, (_, stop, index, at, array) in enumerate(found):
            for start, _, other_index, other_at, other in found[i + 1 :]:
                if start >= stop:
                    break
                if not (index in written or other_index in written) or not arrays.overlap(array, other):
                    continue
                if arrays.place(array)[:4] == arrays.place(other)[:4] and self._is_in_place(
                    {index: at, other_index: other_at}
                ):
                    in_place += 1
                    continue
                both = max(index, other_index)
                self._violate("alias", "operand", "overlapping another tensor of the plan", "separate memory", both)
                return
        if (
            self._kind is OpKind.ALLTOALL
            and in_place
            and any(
                arrays.place(a)[:4] != arrays.place(b)[:4]
                for a, b in zip(self._leaves(0), self._leaves(1), strict=False)
                if a.size
            )
        ):
            self._violate("alias", "operand", "in place for some ranks only", "all pieces in place, or none", 1)

    def _is_in_place(self, leaves: dict[int, int]) -> bool:
        """Whether two tensors may be the same memory: (buffer -> which of its leaves) of both."""
        template = self._program.template
        src, dst = leaves.get(template.src), leaves.get(template.dst)
        if src is None or dst is None:
            return False
        gives, takes = PIECES.get(self._kind, (False, False))
        me = self._program.ranks.index(self._program.rank)
        if gives and takes:
            return src == dst
        if takes:
            return dst == me * len(self._leaves(template.src)) + src
        return gives and src == me * len(self._leaves(template.dst)) + dst

    def _check_op(self, op: ReduceOp, index: int) -> None:
        for dtype in dict.fromkeys(arrays.info(array).dtype for array in self._leaves(index)):
            reason = arrays.refusal_reason(op, dtype)
            if reason:
                self._violate("unsupported", "reduce op", reason, "", index)

    # ------------------------------------------------------------------------------------------ the door

    def _agree(self) -> None:
        """Meets the others, once or twice; raises what all of them raise."""
        clock = self._instruments.clock
        came_s = clock()
        verdict = self._meet()
        if self._program.rounds > 1:
            self._learn(verdict)
            self._arrival = self._write_arrival()
            verdict = self._meet()
        if not self._kernels:
            self._kernels = self._lower()
        if verdict.most:
            self._kernels = self._with_sizes(verdict.most)
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
        return encode_arrival(Arrival(spec=self._spec(), violations=tuple(self._violations)))

    def _spec(self) -> Spec:
        program = self._program
        template = program.template
        gives, takes = (self._buffers[index] if index >= 0 else None for index in (template.src, template.dst))
        return Spec(
            op=program.op,
            caller="plan" if self._operands is None else "call",
            reduce_op=program.reduce_op.name if program.reduce_op else "",
            root=program.root,
            gives=gives.side if gives else None,
            takes=takes.side if takes else None,
        )

    def _learn(self, verdict: Verdict) -> None:
        """Makes the outputs whose shapes follow from what the ranks brought to the first round."""
        program = self._program
        for index, buffer in enumerate(program.template.buffers):
            if buffer.role is not Role.LEARNED:
                continue
            root = program.ranks.index(program.root) if program.root in program.ranks else -1
            side = learn(verdict.specs, program.ranks.index(program.rank), root)
            made = self._make(index, side.structure, side.tensors)
            self._buffers[index] = made
            if made is not None:
                self._check_written(index, made)

    # ------------------------------------------------------------------------------------------ after the door

    def _run_kernels(self) -> None:
        written, ranges = self._written, self._written_ranges
        store = self._instruments.store
        with store.writing(ranges):
            try:
                for kernel in self._kernels:
                    self._at("before_kernel")
                    self._communicator.launch(self._launch, kernel).wait(self._program.timeout_s)
                    self._at("after_kernel")
            except BaseException:
                store.mark_dirty(ranges, self._owners)
                raise
            # A view with gaps is written whole, but its range is not.
            dense = (span for array, span in zip(written, ranges, strict=True) if span[1] - span[0] == array.nbytes)
            store.mark_written(list(dense))

    def _lower(self) -> list[Kernel]:
        """The steps with their arrays filled in: one kernel per step and tensor."""
        kernels = []
        for step in self._program.template.steps:
            reads, writes = self._filled(step)
            if reads and writes and len(reads) != len(writes):
                return []  # the door will refuse it
            for i in range(max(len(reads), len(writes), 1)):
                src = reads[i] if reads else None
                dst = writes[i] if writes else None
                kernels.append(Kernel(kind=step.kind, src=src, dst=dst, op=step.op, peer=step.peer))
        return kernels

    def _fits(self, kernel: Kernel) -> bool:
        """Whether this rank's own arrays fit each other: what does not, the door refuses, and no backend shall see."""
        me = self._program.ranks.index(self._program.rank)
        sides = [side if type(side) is tuple else (side,) for side in (kernel.src, kernel.dst) if side is not None]
        sizes = {side[me if len(side) > 1 else 0].size for side in sides}
        return len(sizes) <= 1 and len({arrays.info(array).dtype for side in sides for array in side}) <= 1

    def _filled(self, step: Step) -> tuple[Sequence[Any], Sequence[Any]]:
        """What each kernel of a step reads and writes: arrays, or tuples of pieces."""
        sides = zip((step.src, step.dst), PIECES.get(step.kind, (False, False)), strict=True)
        reads, writes = (
            list(zip(*self._pieces(index), strict=True)) if in_pieces else self._leaves(index)
            for index, in_pieces in sides
        )
        return reads, writes

    def _with_sizes(self, most: Sequence[int]) -> list[Kernel]:
        """The kernels, told the size of the largest piece of their tensor."""
        each = {step.kind for step in self._program.template.steps if step.kind in PIECES}
        sized, at = [], dict.fromkeys(each, 0)
        for kernel in self._kernels:
            if kernel.kind in each:
                kernel, at[kernel.kind] = replace(kernel, most=most[at[kernel.kind]]), at[kernel.kind] + 1
            sized.append(kernel)
        return sized

    def _pieces(self, index: int) -> tuple[tuple[Any, ...], ...]:
        bound = self._buffers[index] if index >= 0 else None
        return () if bound is None or bound.pieces is None else bound.pieces

    def _leaves(self, index: int) -> tuple[Any, ...]:
        bound = self._buffers[index] if index >= 0 else None
        return bound.leaves if bound else ()

    # ------------------------------------------------------------------------------------------ notes

    def _violate(self, kind: str, name: str, found: str, expected: str, index: int) -> None:
        """Notes what is wrong with a buffer."""
        rank, ref = self._program.rank, self._refs().get(index, "")
        self._violations.append(Violation(kind=kind, rank=rank, field=name, found=found, expected=expected, ref=ref))

    def _refs(self) -> dict[int, str]:
        """The refs of the operands that are in the store, by the index of their buffer."""
        if self._operands is not None:
            return {}
        buffers = enumerate(self._program.template.buffers)
        operands = (index for index, buffer in buffers if buffer.role is Role.OPERAND)
        return {index: key.hex() for index, key in zip(operands, self._program.keys, strict=True)}

    def _located(self, error: RaycollectError) -> RaycollectError:
        self._record("failed", type(error).__name__)
        if isinstance(error, FaultError) and not error.op:
            error.op = self._program.op
        return error.with_traceback(None)  # a value from here on: its frames would keep the tensors alive

    def _record(self, what: str, detail: str = "") -> None:
        self._instruments.recorder.add(what, self._seq, detail)

    def _at(self, point: str) -> None:
        self._instruments.faults.at(point, self._seq, self._program.rank)


def _ranges(views: Sequence[Any]) -> list[Range]:
    return [arrays.byte_range(view) for view in views]
