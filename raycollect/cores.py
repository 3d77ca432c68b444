"""Which core a rank waits on, how long it stays awake there, and how it keeps its place.

Ranks that were woken by one process often share its core, and the scheduler leaves them there for milliseconds: they
take turns, and a small kernel takes three times as long as on two cores. So ranks of one machine tell each other where
they are, and one that waits for a rank of its own core moves to a core that has fewer. Where there are more ranks than
cores that spreads them evenly: as none of them sleeps, no core would ever fetch one by itself.

There the scheduler also goes on moving those that stay awake, to make room for whoever they work for: of four ranks on
two cores three share one for most of the time, and a small reduction takes 1.4 times as long as two by two. So in a hot
loop each keeps to its core (`Berth`).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Collection, Sequence
from contextlib import suppress

__all__ = ["SETTLED_S", "YIELD_S", "Berth", "Seeker", "current_core"]

YIELD_S = 500e-6
"""How long a rank that waits offers its core to others, ready to go on, before it sleeps.

Being woken costs the waker a system call and an interrupt to another core, and the sleeper the way back: 40 to 150 us
on a virtual machine, several times a small reduction.
"""

SETTLED_S = 2e-3
"""How long a rank that has looked for a core of its own does not look again, in seconds."""

_sched_getcpu = getattr(ctypes.CDLL(None), "sched_getcpu", lambda: -1)


def current_core() -> int:
    """The core that runs this thread, counted from 1; 0 where that can't be told."""
    return int(_sched_getcpu()) + 1


class Seeker:
    """One rank's search for a core of its own."""

    def __init__(self) -> None:
        self._settled_s = 0.0

    def seek(self, awaited: Collection[int], others: Sequence[int], now_s: float) -> int:
        """Moves this thread, if a rank that it waits for was last seen on its core, and another core has fewer ranks.

        The mask of the thread is the same when this returns.

        Args:
            awaited: The cores of those ranks, counted from 1; 0 where they are not known.
            others: The cores of all other ranks.
            now_s: The time by the monotonic clock.

        Returns:
            The core that it is on now.
        """
        core = current_core()
        if not core or core not in awaited or now_s < self._settled_s:
            return core
        self._settled_s = now_s + SETTLED_S
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


class Berth:
    """A core that a thread keeps to while it stays awake among others that do the same. Used by that thread alone."""

    def __init__(self) -> None:
        self._core = 0  # counted from 1; 0: it may go where it likes
        self._mask: set[int] = set()  # where that is

    def take(self, cores: Sequence[int], me: int) -> int:
        """Keeps this thread where it is, or where it makes the ranks lie evenly.

        All do the same by the same numbers: of those that lie too close it is the last ones who move.

        Args:
            cores: On which core each rank was last, counted from 1; 0 where that is not known. All are of this machine.
            me: Which of them this one is.

        Returns:
            The core that it is on now.
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
        """Lets the thread go where it likes again, as before it kept to a core."""
        kept, self._core = self._core, 0
        if kept and os.sched_getaffinity(0) == {kept - 1}:  # else somebody else has changed it meanwhile
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
