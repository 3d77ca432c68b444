"""Which core a rank waits on, how long it stays awake there, and how it keeps its place.

Ranks that were woken by one process often share its core, and the scheduler leaves them there for milliseconds: a small
kernel takes three times as long as on two cores. So ranks of one machine publish their cores, and one that waits for a
rank of its own core moves to a core with fewer ranks. With more ranks than cores that spreads them evenly: as none of
them sleeps, no core would ever fetch one by itself.

There the scheduler also keeps moving ranks that stay awake: of four ranks on two cores three share one for most of the
time, and a small reduction takes 1.4 times as long as two by two. So in a hot loop each stays on its core (`CorePin`).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Collection, Sequence
from contextlib import suppress

# How long a rank that waits offers its core to others, ready to go on, before it sleeps.
#
# Being woken costs the waker a system call and an interrupt to another core, and the sleeper the way back: 40 to 150 us
# on a virtual machine, several times a small reduction.
YIELD_S = 500e-6
SETTLED_S = 2e-3  # how long a rank that has looked for a core of its own does not look again, in seconds

_sched_getcpu = getattr(ctypes.CDLL(None), "sched_getcpu", lambda: -1)


def current_core() -> int:
    """The core that runs this thread, counted from 1; 0 where that can't be told."""
    return int(_sched_getcpu()) + 1


class Seeker:
    """One rank's search for a core of its own; before `settled_s` it does not look again."""

    def __init__(self) -> None:
        self.settled_s: float = 0.0

    def seek(self, awaited: Collection[int], others: Sequence[int], now_s: float) -> int:
        """Moves this thread, if a rank that it waits for was last seen on its core, and another core has fewer ranks.

        The thread's affinity mask is unchanged when this returns.

        Args:
            awaited: The cores of those ranks, counted from 1; 0 where they are not known.
            others: The cores of all other ranks.
            now_s: The time by the monotonic clock.

        Returns:
            The core that it is on now.
        """
        core = current_core()
        if not core or core not in awaited or now_s < self.settled_s:
            return core
        self.settled_s = now_s + SETTLED_S
        mine = os.sched_getaffinity(0)
        ranks = {one: others.count(one + 1) for one in mine}
        fewest = min(ranks.values())
        better = {one for one, count in ranks.items() if count == fewest}
        if fewest >= others.count(core):
            return core
        with suppress(OSError):  # the system has just taken one of these cores away
            try:
                os.sched_setaffinity(0, better)
            finally:
                os.sched_setaffinity(0, mine)
        return current_core()


class CorePin:
    """Keeps a thread on one core while it stays awake among others that do the same. For that thread alone."""

    def __init__(self) -> None:
        self._core = 0  # counted from 1; 0: it may go where it likes
        self._mask: set[int] = set()  # where that is

    def take(self, cores: Sequence[int], me: int) -> int:
        """Keeps this thread where it is, or moves it where the ranks lie evenly; returns its core.

        All ranks compute the same from the same numbers: of those that share a core the last ones move.

        `cores` says on which core of this machine each rank was last, counted from 1; 0 where that is not known. This
        one is rank `me` of them.
        """
        here = current_core()
        if not here:
            return 0
        if here != self._core:
            self._mask = os.sched_getaffinity(0)
        counts = {one + 1: 0 for one in self._mask}
        before = at_all = 0
        for rank, core in enumerate(cores):
            core = here if rank == me else core
            if core in counts:
                counts[core] += 1
            if core == here:
                at_all += 1
                before += rank < me
        fewest = min(counts, key=counts.__getitem__)
        if before >= at_all - (at_all - counts[fewest]) // 2:
            here = fewest
        if here != self._core:
            if not _stay(self._mask, {here - 1}):
                return current_core()
            self._core = here
        return here

    def leave(self) -> None:
        """Restores the thread's mask."""
        kept, self._core = self._core, 0
        if kept and os.sched_getaffinity(0) == {kept - 1}:  # else it was changed meanwhile
            _stay({kept - 1}, self._mask)


def _stay(before: set[int], cores: set[int]) -> bool:
    """Restricts this thread to some cores, counted from 0; False where the system refuses."""
    if before == cores:
        return True
    try:
        os.sched_setaffinity(0, cores)
    except OSError:
        return False
    return True
