"""The progress of a program in bytes, computed on request from the notes of the run."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from raycollect.backends import arrays
from raycollect.core.kernel_progress import LENT
from raycollect.core.model import Kernel
from raycollect.core.operations import PIECES
from raycollect.engine.agreement import Verdict
from raycollect.engine.steps import Kernels, PreparedBundle, ReshardKernels

# Operations that count the input bytes of all ranks; others count the bytes of the largest input.
_SUMMED = frozenset(kind.value for kind, (gives, takes) in PIECES.items() if takes and not gives)


class BytesDone(NamedTuple):
    """The progress of a participant in a plan."""

    done: int = 0
    total: int = 0  # 0: unknown, before all ranks have agreed
    lent: int = 0  # not done; other ranks work on these bytes, so only they know the progress


NOWHERE = BytesDone()  # before the agreement


class ByteMap:
    """The bytes of a run, by kernel.

    Each bundle has the bytes of its collectives, as in timelines; these are divided among its kernels by bytes read.
    """

    def __init__(self, bundles: Sequence[PreparedBundle]) -> None:
        self._before: dict[int, float] = {}  # the id of a step -> the bytes before it
        self._scale: dict[int, float] = {}  # the id of a step -> bytes of the bundle per byte that a kernel reads
        self._sizes: dict[int, Sequence[int]] = {}
        done = 0.0
        for bundle in bundles:
            steps = bundle.launched
            read = [sum(map(nbytes_read, step.kernels)) for step in steps]
            weight = nbytes_of_bundle(bundle) if any(read) else 0
            scale = weight / sum(read) if weight else 0.0
            for step, before in zip(steps, accumulate(read, initial=0), strict=False):
                self._place(step, done + before * scale, scale)
            done += weight
        self._bundles = bundles  # keeps the ids of its steps unique
        self.total: int = int(done)

    def _place(self, step: Kernels, before: float, scale: float) -> None:
        self._before[id(step)], self._scale[id(step)] = before, scale
        if isinstance(step, ReshardKernels):
            for other in step.otherwise:
                self._place(other, before, scale)
                before += sum(map(nbytes_read, other.kernels)) * scale

    def at(self, step: Kernels | None, left: int, part: float) -> BytesDone:
        """Returns the progress, from the latest step and the number of its kernels that have not ended.

        `part`: how many of these kernels are done, see `KernelProgress.part`.
        """
        if step is None or id(step) not in self._before:
            return BytesDone(0, self.total)
        sizes = self._sizes.get(id(step))
        if sizes is None:
            sizes = self._sizes[id(step)] = list(map(nbytes_read, step.kernels))
        first = max(len(sizes) - left, 0)
        scale, ended, rest = self._scale[id(step)], sum(sizes[:first]), sizes[first:]
        under_way, lent = 0.0, 0.0
        if part == LENT:
            lent = sum(rest)
        elif rest:
            whole = min(int(part), len(rest) - 1)
            under_way = sum(rest[:whole]) + rest[whole] * min(part - whole, 1.0)
        done = self._before[id(step)] + (ended + under_way) * scale
        return BytesDone(min(int(done), self.total), self.total, int(lent * scale))


def nbytes_of_bundle(bundle: PreparedBundle) -> int:
    """The bytes of the collectives of a bundle, as timelines count them."""
    nbytes = sum(agreed_nbytes(bundle.share.op, verdict) for verdict in bundle.verdicts)
    if not nbytes:  # a reshard, whose bytes are unknown to the agreement: the bytes that this rank sends
        nbytes = sum(_nbytes(kernel.src) for step in bundle.launched for kernel in step.kernels)
    return nbytes


def agreed_nbytes(op: str, verdict: Verdict) -> int:
    """The bytes of a collective, from its verdict."""
    given = [0 if spec.gives is None else sum(info.nbytes for info in spec.gives.tensors) for spec in verdict.specs]
    return sum(given) if op in _SUMMED else max(given, default=0)


def nbytes_read(kernel: Kernel) -> int:
    """The bytes that a kernel reads, or writes if it reads none."""
    return _nbytes(kernel.dst if kernel.src is None else kernel.src)


def _nbytes(side: Any) -> int:
    if side is None:
        return 0
    if type(side) is tuple:
        return sum(map(_nbytes, side))
    nbytes = getattr(side, "nbytes", None)
    return int(nbytes) if isinstance(nbytes, int) else arrays.describe(side).nbytes
