"""The progress of a program in bytes: computed by whoever asks, from what the run notes anyway."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from raycollect.core.kernel_progress import LENT
from raycollect.core.model import Kernel
from raycollect.engine.kernel_schedule import KernelSchedule, LaunchStep
from raycollect.engine.spans import label_of_bundle, nbytes_of


class BytesDone(NamedTuple):
    """The progress of a participant in a plan."""

    done: int = 0
    total: int = 0  # 0: not known before all have agreed
    lent: int = 0  # not done, and others work on them, so only they know the progress


NOWHERE = BytesDone()  # before the agreement


class ByteMap:
    """The bytes of a schedule, kernel by kernel.

    Each bundle counts with the bytes of its collectives, as in timelines; its kernels share these by what they read.
    """

    def __init__(self, schedule: KernelSchedule) -> None:
        self._before: dict[int, float] = {}  # the id of a move -> the bytes before it
        self._scale: dict[int, float] = {}  # the same -> the bytes of the bundle for each that a kernel reads
        self._sizes: dict[int, Sequence[int]] = {}
        done = 0.0
        for scheduled in schedule.bundles:
            moves = [move for move in scheduled.moves if move.kernels]
            read = [sum(map(_nbytes, move.kernels)) for move in moves]
            weight = label_of_bundle(scheduled).nbytes if any(read) else 0
            scale = weight / sum(read) if weight else 0.0
            for move, before in zip(moves, accumulate(read, initial=0), strict=False):
                self._place(move, done + before * scale, scale)
            done += weight
        self._schedule = schedule  # so that nothing else gets an id of its moves
        self.total: int = int(done)

    def _place(self, move: LaunchStep, before: float, scale: float) -> None:
        self._before[id(move)], self._scale[id(move)] = before, scale
        for other in move.instead:
            self._place(other, before, scale)
            before += sum(map(_nbytes, other.kernels)) * scale

    def at(self, move: LaunchStep | None, left: int, part: float) -> BytesDone:
        """Returns the progress, of the latest step begun and those of its kernels that have not ended.

        `part`: how many of these are done, see `KernelProgress.part`.
        """
        if move is None or id(move) not in self._before:
            return BytesDone(0, self.total)
        sizes = self._sizes.get(id(move))
        if sizes is None:
            sizes = self._sizes[id(move)] = [_nbytes(one) for one in move.kernels]
        first = max(len(sizes) - left, 0)
        scale, ended, rest = self._scale[id(move)], sum(sizes[:first]), sizes[first:]
        under_way, lent = 0.0, 0.0
        if part == LENT:
            lent = sum(rest)
        elif rest:
            whole = min(int(part), len(rest) - 1)
            under_way = sum(rest[:whole]) + rest[whole] * min(part - whole, 1.0)
        done = self._before[id(move)] + (ended + under_way) * scale
        return BytesDone(min(int(done), self.total), self.total, int(lent * scale))


def _nbytes(kernel: Kernel) -> int:
    return nbytes_of(kernel.dst if kernel.src is None else kernel.src)
