"""What timelines note of a plan that is run: its spans, and their labels, from programs and from what ranks agreed on.

Whoever runs a plan says where each part of it begins and ends, to a `Timed`, or to an `Untimed` where nothing is
recorded. Neither holds a tensor.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from raycollect.backends import arrays
from raycollect.door import Verdict
from raycollect.errors import RaycollectError
from raycollect.model import OpKind
from raycollect.observe import Label, Ring
from raycollect.observe.trace import COLLECTIVE, DOOR, KERNEL, NO_LABEL, PART, STAGING
from raycollect.planner import Program
from raycollect.script import Move, Script, Stretch

__all__ = ["Timed", "Untimed", "label_of_stretch", "nbytes_of", "timed"]

_NOTHING: AbstractContextManager[None] = nullcontext()

_SUMMED = frozenset({OpKind.ALLGATHER.value, OpKind.GATHER.value})
"""The operations whose bytes are those that all ranks give together; of others what one rank holds in full."""


class Untimed:
    """Where no timeline is recorded. All but `begin` and `end` are contexts around what they name."""

    __slots__ = ()

    def begin(self) -> None:
        """The run begins."""

    def end(self, error: RaycollectError | None) -> None:
        """The run has ended."""

    def waiting(self, what: str) -> AbstractContextManager[None]:
        """A wait for something before the door."""
        return _NOTHING

    def door(self) -> AbstractContextManager[None]:
        """The agreement of all ranks."""
        return _NOTHING

    def calls(self, script: Script) -> AbstractContextManager[None]:
        """All that is done behind the door."""
        return _NOTHING

    def bundle(self, stretch: Stretch) -> AbstractContextManager[None]:
        """One bundle of that."""
        return _NOTHING

    def staging(self, what: str) -> AbstractContextManager[None]:
        """Copies before and behind kernels."""
        return _NOTHING

    def kernels(
        self, stretch: Stretch | None, move: Move, *, first: int = 0, count: int = 0
    ) -> AbstractContextManager[None]:
        """Kernels of a move that run as one, from one on; `count` 0: all."""
        return _NOTHING


_UNTIMED = Untimed()


def timed(ring: Ring | None, program: Program, seq: int, meeting: str) -> Untimed:
    """What notes a run of a program.

    Args:
        ring: The timeline; None: none is recorded.
        program: The program.
        seq: See `Execution`.
        meeting: See `Label`.
    """
    return _UNTIMED if ring is None else Timed(ring, program, seq, meeting)


class Timed(Untimed):
    """Where a timeline is recorded; see `timed`."""

    __slots__ = ("_began_s", "_meeting", "_program", "_ring", "_seq")

    def __init__(self, ring: Ring, program: Program, seq: int, meeting: str) -> None:
        self._ring = ring
        self._program = program
        self._seq = seq
        self._meeting = meeting
        self._began_s = 0.0

    def begin(self) -> None:
        """Notes when."""
        self._began_s = self._ring.clock()

    def end(self, error: RaycollectError | None) -> None:
        """Notes the whole run."""
        ring, failed = self._ring, "" if error is None else type(error).__name__
        ring.put(PART, self._program.name, self._began_s, ring.clock(), self._seq, self._number(), failed)

    def waiting(self, what: str) -> AbstractContextManager[None]:
        """Notes a wait, if it lasts."""
        return _Wait(self._ring, what, self._seq)

    def door(self) -> AbstractContextManager[None]:
        """Notes it."""
        return _Noted(self._ring, DOOR, "door", self._seq, self._number())

    def calls(self, script: Script) -> AbstractContextManager[None]:
        """Notes it, where there are several."""
        program = self._program
        if len(program.tasks) == 1:
            return _NOTHING
        return self._span(COLLECTIVE, program.name, _label_of_script(program, script, self._meeting))

    def bundle(self, stretch: Stretch) -> AbstractContextManager[None]:
        """Notes it, unless it is the same as its one kernel."""
        if _is_only_kernel(stretch):
            return _NOTHING
        return self._span(COLLECTIVE, stretch.share.op, label_of_stretch(stretch, self._meeting))

    def staging(self, what: str) -> AbstractContextManager[None]:
        """Notes it."""
        return self._span(STAGING, what)

    def kernels(
        self, stretch: Stretch | None, move: Move, *, first: int = 0, count: int = 0
    ) -> AbstractContextManager[None]:
        """Notes it."""
        if stretch is None:
            return _NOTHING
        if _is_only_kernel(stretch):
            share, meeting = stretch.share, self._meeting
            known = (share, meeting, *stretch.agreed)  # which tell all of the label, and hold no tensor
            number = self._ring.label_of(lambda: label_of_stretch(stretch, meeting), *known)
            return _Noted(self._ring, KERNEL, share.op, self._seq, number)
        some = move._replace(kernels=move.kernels[first : first + count]) if count else move
        label = _label_of_move(some, self._rank_in(move), self._meeting)
        return self._span(KERNEL, label.op, label)

    def _number(self) -> int:
        """That of the label of the program."""
        program, meeting = self._program, self._meeting
        return self._ring.label_of(lambda: _label_of_program(program, meeting), program, meeting)

    def _span(self, kind: str, name: str, label: Label = NO_LABEL) -> AbstractContextManager[None]:
        return _Noted(self._ring, kind, name, self._seq, self._ring.label(label))

    def _rank_in(self, move: Move) -> int:
        """This process's rank in the group of a move."""
        domains = [one for share in self._program.shares for one in share.domains]
        return next((one.rank for one in domains if one.group_id == move.group_id), -1)


class _Noted:
    """A context that is noted as a span; a class, since a generator takes twice as long."""

    __slots__ = ("_began_s", "_kind", "_label", "_name", "_ring", "_seq")

    def __init__(self, ring: Ring, kind: str, name: str, seq: int, label: int) -> None:
        self._ring = ring
        self._kind = kind
        self._name = name
        self._seq = seq
        self._label = label
        self._began_s = 0.0

    def __enter__(self) -> None:
        self._began_s = self._ring.clock()

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        ring, failed = self._ring, "" if kind is None else kind.__name__
        ring.put(self._kind, self._name, self._began_s, ring.clock(), self._seq, self._label, failed)


class _Wait:
    """A context that is noted as a wait, if it is one."""

    __slots__ = ("_began_s", "_ring", "_seq", "_what")

    def __init__(self, ring: Ring, what: str, seq: int) -> None:
        self._ring = ring
        self._what = what
        self._seq = seq
        self._began_s = 0.0

    def __enter__(self) -> None:
        self._began_s = self._ring.clock()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            self._ring.waited(self._what, self._began_s, self._seq)


def _label_of_program(program: Program, meeting: str = "") -> Label:
    """Of all that a program does; of one call, of that."""
    if len(program.tasks) == 1:
        share = program.shares[program.tasks[0].share]
        return Label(share.op, share.group_id, share.rank, len(share.ranks), 0, 0, meeting)
    return _label_of_door(program, meeting)


def _label_of_door(program: Program, meeting: str = "") -> Label:
    """Of a program with several calls, and of its door."""
    groups = dict.fromkeys(share.group_id for share in program.shares)
    door = program.door
    return Label(program.name, door.group_id or ",".join(groups), door.rank, len(door.ranks), 0, 0, meeting)


def label_of_stretch(stretch: Stretch, meeting: str = "") -> Label:
    """Of what one bundle does."""
    share = stretch.share
    nbytes = sum(_agreed_nbytes(share.op, one) for one in stretch.agreed)
    return Label(share.op, share.group_id, share.rank, len(share.ranks), nbytes, stretch.tasks, meeting)


def _label_of_script(program: Program, script: Script, meeting: str = "") -> Label:
    """Of all bundles of a program with several calls, as one batch."""
    nbytes = sum(_agreed_nbytes(one.share.op, verdict) for one in script.stretches for verdict in one.agreed)
    return _label_of_door(program, meeting)._replace(nbytes=nbytes, calls=1)


def _label_of_move(move: Move, rank: int, meeting: str = "") -> Label:
    """Of kernels inside a bundle: a piece of a collective, and what it reads."""
    nbytes = sum(nbytes_of(one.dst if one.src is None else one.src) for one in move.kernels)
    return Label(move.kernels[0].kind.value, move.group_id, rank, len(move.ranks), nbytes, 0, meeting)


def _is_only_kernel(stretch: Stretch) -> bool:
    """Whether a bundle is one kernel on one call's tensors, so that it and the kernel are the same."""
    if stretch.tasks != 1 or len(stretch.moves) != 1:
        return False
    (move,) = stretch.moves
    return len(move.kernels) == 1 and move.packed is None and move.carriage is None


def nbytes_of(side: Any) -> int:
    """The bytes of an array, or of pieces."""
    if side is None:
        return 0
    if type(side) is tuple:
        return sum(map(nbytes_of, side))
    nbytes = getattr(side, "nbytes", None)
    return int(nbytes) if isinstance(nbytes, int) else arrays.describe(side).nbytes


def _agreed_nbytes(op: str, verdict: Verdict) -> int:
    """The bytes of a collective; see `observe.summary`."""
    given = [0 if one.gives is None else sum(info.nbytes for info in one.gives.tensors) for one in verdict.specs]
    return sum(given) if op in _SUMMED else max(given, default=0)
