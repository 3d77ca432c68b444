"""A condition variable that tells when somebody waits: tests of waiting without sleeping."""

from __future__ import annotations

import logging
import threading

import pytest

WAIT_S = 20.0
"""How long a test waits for what must happen."""


class WatchedCondition(threading.Condition):
    """Tells when a wait has begun, so that no test sleeps to see that something waits."""

    def __init__(self) -> None:
        super().__init__()
        self._begun = threading.Semaphore(0)

    def wait(self, timeout: float | None = None) -> bool:
        self._begun.release()
        if super().wait(timeout if timeout is not None else WAIT_S):
            return True
        if timeout is None:
            raise TimeoutError("nobody ended this wait")
        return False

    def someone_waits(self) -> bool:
        """True once one more wait has begun; whoever began it holds the lock until it really waits."""
        return self._begun.acquire(timeout=WAIT_S)

    @property
    def nobody_waited(self) -> bool:
        return not self._begun.acquire(blocking=False)


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was logged that somebody should see."""
    return [record.message for record in caplog.records if record.levelno >= logging.WARNING]
