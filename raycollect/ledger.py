"""Which plans this participant has ended, so that each starts after its predecessor (P2). Pure but for one lock."""

from __future__ import annotations

import threading


class Ledger:
    """The plans of one controller on one participant. Any thread may call it.

    Plans carry increasing numbers, and each names the one before it on this participant. A plan that was aborted
    before it came is a tombstone: it counts as ended, and does nothing when it comes.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._settled = 0  # every plan up to here has ended
        self._ended: set[int] = set()
        self._running: set[int] = set()
        self._aborted: dict[int, str] = {}

    def start(self, seq: int, predecessor: int) -> str | None:
        """Waits for the predecessor's end, then notes that the plan runs.

        Returns:
            None; or, for an aborted plan, the reason why it must not run.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._may_start(seq, predecessor) or seq in self._aborted)
            if seq in self._aborted:
                return self._aborted[seq]
            self._settled = max(self._settled, predecessor)
            self._ended = {other for other in self._ended if other > self._settled}
            self._running.add(seq)
            return None

    def end(self, seq: int) -> None:
        """Notes that a plan has ended, however."""
        with self._changed:
            self._running.discard(seq)
            self._aborted.pop(seq, None)
            if seq > self._settled:
                self._ended.add(seq)
            self._changed.notify_all()

    def abort(self, seq: int, reason: str) -> bool:
        """Notes that a plan is aborted.

        Returns:
            True where it runs now and has to be woken; False where it has ended or has not come.
        """
        with self._changed:
            if self._has_ended(seq):
                return False
            self._aborted[seq] = reason
            if seq not in self._running:
                self._ended.add(seq)
            self._changed.notify_all()
            return seq in self._running

    def has_run(self, seq: int) -> bool:
        """True for a plan that came here and has ended."""
        with self._changed:
            return self._has_ended(seq) and seq not in self._aborted

    def reason(self, seq: int) -> str | None:
        """Why a plan was aborted; None where it was not."""
        return self._aborted.get(seq)

    def running(self) -> tuple[int, ...]:
        """The plans that run now."""
        with self._changed:
            return tuple(sorted(self._running))

    def _may_start(self, seq: int, predecessor: int) -> bool:
        """True once the predecessor has ended; where that is a tombstone, an earlier plan may still run."""
        return self._has_ended(predecessor) and not any(other < seq for other in self._running)

    def _has_ended(self, seq: int) -> bool:
        return seq <= self._settled or seq in self._ended
