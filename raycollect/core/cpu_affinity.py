"""The core on which a rank waits, how long it stays awake, and how it keeps its core.

Ranks that were woken by one process often share its core, and the scheduler leaves them there for milliseconds: a small
kernel takes three times as long as on two cores. So ranks of one machine publish their cores, and a rank that waits for
a rank on its own core moves to a core with fewer ranks. With more ranks than cores this spreads them evenly: as
no rank sleeps, no core becomes idle and pulls one.

With more ranks than cores the scheduler also moves awake ranks unevenly: of four ranks on two cores three share one
most of the time, and a small reduction takes 1.4 times as long as with two per core. So in a hot loop each rank stays
on its core (`CorePin`).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Collection, Sequence
from contextlib import suppress

# How long a waiting rank yields its core to others, still runnable, before it sleeps.
#
# A wake-up costs a system call, an interrupt to another core, and the switch back: 40 to 150 us on a virtual machine,
# several times a small reduction.
YIELD_S = 500e-6
SETTLED_S = 2e-3  # the least time between two searches of a rank for its own core, in seconds

_sched_getcpu = getattr(ctypes.CDLL(None), "sched_getcpu", lambda: -1)


def current_core() -> int:
    """The core that runs this thread, counted from 1; 0 if unknown."""
    return int(_sched_getcpu()) + 1


class Seeker:
    """One rank's search for its own core; before `settled_s` it does not search again."""

    def __init__(self) -> None:
        self.settled_s: float = 0.0

    def seek(self, awaited: Collection[int], others: Sequence[int], now_s: float) -> int:
        """Moves this thread, if a rank that it waits for was last seen on its core, and another core has fewer ranks.

        The thread's affinity mask is unchanged when this returns.

        Args:
            awaited: The cores of the awaited ranks, counted from 1; 0 if unknown.
            others: The cores of all other ranks.
            now_s: The time by the monotonic clock.

        Returns:
            The current core of this thread.
        """
        core = current_core()
        if not core or core not in awaited or now_s < self.settled_s:
            return core
        self.settled_s = now_s + SETTLED_S
        mine = os.sched_getaffinity(0)
        ranks = {candidate: others.count(candidate + 1) for candidate in mine}
        fewest = min(ranks.values())
        better = {candidate for candidate, count in ranks.items() if count == fewest}
        if fewest >= others.count(core):
            return core
        with suppress(OSError):  # a core may have become unavailable
            try:
                os.sched_setaffinity(0, better)
            finally:
                os.sched_setaffinity(0, mine)
        return current_core()


class CorePin:
    """Keeps a thread on one core while it stays awake among others that do the same. For that thread alone."""

    def __init__(self) -> None:
        self._core = 0  # counted from 1; 0: not pinned
        self._mask: set[int] = set()  # the affinity mask without the pin

    def take(self, cores: Sequence[int], me: int) -> int:
        """Pins this thread to its core, or to another one that evens out the load; returns its core.

        All ranks compute the same from the same numbers: of the ranks that share a core the last ones move.

        `cores` has the last known core of each rank of this machine, counted from 1; 0 if unknown. `me` is the index
        of this rank.
        """
        here = current_core()
        if not here:
            return 0
        if here != self._core:
            self._mask = os.sched_getaffinity(0)
        counts = {candidate + 1: 0 for candidate in self._mask}
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
        core, self._core = self._core, 0
        if core and os.sched_getaffinity(0) == {core - 1}:  # else the mask was changed by others
            _stay({core - 1}, self._mask)


def _stay(before: set[int], cores: set[int]) -> bool:
    """Restricts this thread to some cores, counted from 0; False if the system refuses."""
    if before == cores:
        return True
    try:
        os.sched_setaffinity(0, cores)
    except OSError:
        return False
    return True
