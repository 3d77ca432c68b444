"""The spans and labels that timelines record of a plan.

Whoever runs a plan marks where each part begins and ends, on what `timed` returns, which holds no tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

from raycollect.backends import arrays
from raycollect.core.model import OpKind
from raycollect.engine.agreement import Verdict
from raycollect.engine.kernel_schedule import KernelSchedule, LaunchStep, ScheduledBundle
from raycollect.errors import RaycollectError
from raycollect.observe import Label, Ring
from raycollect.observe.trace import CHECK, COLLECTIVE, KERNEL, NO_LABEL, PART, STAGING
from raycollect.planner import Program

_NOTHING: AbstractContextManager[None] = nullcontext()

# The operations whose bytes are those that all ranks give together; of others what one rank holds in full.
_SUMMED = frozenset({OpKind.ALLGATHER.value, OpKind.GATHER.value})


@dataclass(slots=True, eq=False)
class Timed:
    """Records spans in a timeline. All but `begin` and `end` return contexts around what they name."""

    _ring: Ring
    _program: Program
    _seq: int
    _meeting: str
    _began_s: float = 0.0

    def begin(self) -> None:
        """The run begins."""
        self._began_s = self._ring.clock()

    def end(self, error: RaycollectError | None) -> None:
        """The run has ended."""
        ring, failed = self._ring, "" if error is None else type(error).__name__
        ring.put(PART, self._program.name, self._began_s, ring.clock(), self._seq, self._number(), failed)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """A wait for an operand, recorded if it lasts."""
        began_s = self._ring.clock()
        yield
        self._ring.waited("an operand", began_s, self._seq)

    def check(self) -> AbstractContextManager[None]:
        """The agreement of all ranks."""
        return _Noted(self._ring, CHECK, "consistency check", self._seq, self._number())

    def calls(self, schedule: KernelSchedule) -> AbstractContextManager[None]:
        """All that is done after the agreement, recorded where there are several calls."""
        program = self._program
        if len(program.tasks) == 1:
            return _NOTHING
        nbytes = sum(_agreed_nbytes(one.share.op, verdict) for one in schedule.bundles for verdict in one.agreed)
        label = _label_of_check(program, self._meeting)._replace(nbytes=nbytes, calls=1)  # as one batch
        return self._span(COLLECTIVE, program.name, label)

    def bundle(self, scheduled: ScheduledBundle) -> AbstractContextManager[None]:
        """One bundle of that, recorded unless it is the same as its one kernel."""
        if _is_only_kernel(scheduled):
            return _NOTHING
        return self._span(COLLECTIVE, scheduled.share.op, label_of_bundle(scheduled, self._meeting))

    def staging(self, what: str) -> AbstractContextManager[None]:
        """Copies before and behind kernels."""
        return self._span(STAGING, what)

    def kernels(
        self, scheduled: ScheduledBundle | None, move: LaunchStep, *, first: int = 0, count: int = 0
    ) -> AbstractContextManager[None]:
        """Kernels of a step that run as one, from the `first` on; `count` 0: all."""
        if scheduled is None:
            return _NOTHING
        if _is_only_kernel(scheduled):
            number = number_of_bundle(self._ring, scheduled, self._meeting)
            return _Noted(self._ring, KERNEL, scheduled.share.op, self._seq, number)
        rank = next((share.rank for share in self._program.shares if share.group_id == move.group_id), -1)
        some = move._replace(kernels=move.kernels[first : first + count]) if count else move
        label = _label_of_move(some, rank, self._meeting)
        return self._span(KERNEL, label.op, label)

    def _number(self) -> int:
        program, meeting = self._program, self._meeting
        return self._ring.label_of(lambda: _label_of_program(program, meeting), program, meeting)

    def _span(self, kind: str, name: str, label: Label = NO_LABEL) -> AbstractContextManager[None]:
        return _Noted(self._ring, kind, name, self._seq, self._ring.label(label))


class _Untimed:
    """In place of a `Timed`, records nothing."""

    def _ignore(self, *what: Any, **which: Any) -> AbstractContextManager[None]:
        return _NOTHING

    begin = end = waiting = check = calls = bundle = staging = kernels = _ignore


_UNTIMED = cast("Timed", _Untimed())


def timed(ring: Ring | None, program: Program, seq: int, meeting: str) -> Timed:
    """Returns the recorder of a run's spans; `ring` is the timeline, if one is recorded."""
    return _UNTIMED if ring is None else Timed(ring, program, seq, meeting)


@dataclass(slots=True, eq=False)
class _Noted:
    # A class: as a generator it takes twice as long.

    _ring: Ring
    _kind: str
    _name: str
    _seq: int
    _label: int
    _began_s: float = 0.0

    def __enter__(self) -> None:
        self._began_s = self._ring.clock()

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        ring, failed = self._ring, "" if kind is None else kind.__name__
        ring.put(self._kind, self._name, self._began_s, ring.clock(), self._seq, self._label, failed)


def _label_of_program(program: Program, meeting: str) -> Label:
    if len(program.tasks) == 1:
        share = program.shares[program.tasks[0].share]
        return Label(share.op, share.group_id, share.rank, len(share.ranks), 0, 0, meeting)
    return _label_of_check(program, meeting)


def _label_of_check(program: Program, meeting: str) -> Label:
    groups = dict.fromkeys(share.group_id for share in program.shares)
    agreement = program.agreement
    return Label(
        program.name, agreement.group_id or ",".join(groups), agreement.rank, len(agreement.ranks), 0, 0, meeting
    )


def label_of_bundle(scheduled: ScheduledBundle, meeting: str = "") -> Label:
    """Returns the label of one bundle."""
    share = scheduled.share
    nbytes = sum(_agreed_nbytes(share.op, one) for one in scheduled.agreed)
    if not nbytes:  # a reshard, of whose bytes the agreement does not hear: what this rank sends
        nbytes = sum(nbytes_of(one.src) for move in scheduled.moves for one in move.kernels)
    return Label(share.op, share.group_id, share.rank, len(share.ranks), nbytes, scheduled.tasks, meeting)


def number_of_bundle(ring: Ring, scheduled: ScheduledBundle, meeting: str) -> int:
    """Returns the number of the label of one bundle, of which later runs have the same share and verdicts."""
    known = (scheduled.share, meeting, *scheduled.agreed)  # which tell all of the label, and hold no tensor
    return ring.label_of(lambda: label_of_bundle(scheduled, meeting), *known)


def _label_of_move(move: LaunchStep, rank: int, meeting: str) -> Label:
    # A part of a collective, with the bytes that it reads.
    nbytes = sum(nbytes_of(one.dst if one.src is None else one.src) for one in move.kernels)
    return Label(move.kernels[0].kind.value, move.group_id, rank, len(move.ranks), nbytes, 0, meeting)


def _is_only_kernel(scheduled: ScheduledBundle) -> bool:
    # On one call's tensors, so that the bundle and its kernel are the same.
    if scheduled.tasks != 1 or len(scheduled.moves) != 1:
        return False
    (move,) = scheduled.moves
    return len(move.kernels) == 1 and move.packed is None and move.staging_copies is None


def nbytes_of(side: Any) -> int:
    """The bytes of an array, or of pieces."""
    if side is None:
        return 0
    if type(side) is tuple:
        return sum(map(nbytes_of, side))
    nbytes = getattr(side, "nbytes", None)
    return int(nbytes) if isinstance(nbytes, int) else arrays.describe(side).nbytes


def _agreed_nbytes(op: str, verdict: Verdict) -> int:
    given = [0 if one.gives is None else sum(info.nbytes for info in one.gives.tensors) for one in verdict.specs]
    return sum(given) if op in _SUMMED else max(given, default=0)
