"""Counters of collectives, by group and operation. They are always on.

Each rank counts its own part. `observe.metrics` publishes the totals.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

MOST_PAIRS = 256
"""How many pairs of group and operation are told apart, `OTHER` included."""

OTHER = "other"
"""The group and the operation under which all further pairs are summed."""

_MOST_CACHED = 1024


@dataclass(slots=True, eq=False)
class Tally:
    """The totals of one operation in one group.

    Runs add to the fields without a lock: between the load and the store of ``tally.calls += 1`` the interpreter makes
    no call and no jump backwards, and only there does it switch threads.
    """

    group: str
    operation: str
    calls: int = 0  # calls whose kernels have all succeeded
    nbytes: int = 0  # the bytes of these calls, as nccl-tests count them
    seconds: float = 0.0  # the time of these calls, from the end of the agreement to the end of the kernels
    wait_seconds: float = 0.0  # the time of their agreement, which is mostly waiting for other ranks
    failures: int = 0


class Counters:
    """The totals of a process. Any thread may call it.

    Attributes:
        clock: In seconds; never goes back.
        name_of: Returns the name of a group, by its id.
        publish: Called when totals change and no look at them is scheduled.
        is_idle: Whether the next run has to call `wake`, because no look is scheduled.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.name_of: Callable[[str], str] = str
        self.publish: Callable[[], None] = lambda: None
        self.is_idle: bool = True
        self._tallies: dict[tuple[str, str], Tally] = {}
        self._by_id: dict[tuple[str, str], Tally] = {}  # by the group's id and the operation
        self._lock = threading.Lock()

    def of(self, group_id: str, operation: str) -> Tally:
        """Returns the totals to which the calls of an operation are added."""
        tally = self._by_id.get((group_id, operation))
        if tally is None:
            pair = self.name_of(group_id), operation
            with self._lock:
                if pair not in self._tallies and len(self._tallies) >= MOST_PAIRS - 1:
                    pair = OTHER, OTHER
                tally = self._tallies.setdefault(pair, Tally(*pair))
                if len(self._by_id) >= _MOST_CACHED:
                    self._by_id.clear()
                self._by_id[group_id, operation] = tally
            self.is_idle = True  # the process may have joined Ray since the last look
        return tally

    def wake(self) -> None:
        """Has the totals published."""
        self.is_idle = False
        self.publish()

    def tallies(self) -> tuple[Tally, ...]:
        """Returns all totals."""
        with self._lock:
            return tuple(self._tallies.values())
