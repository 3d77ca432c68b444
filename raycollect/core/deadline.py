"""Deadlines of calls: the caller's time limit, counted from the beginning of the call."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Deadline:
    """The end of a call.

    Attributes:
        timeout_s: The limit, in seconds; infinity: no limit.
        until_s: Its end, by `time.monotonic`.
    """

    timeout_s: float = math.inf
    until_s: float = math.inf

    @classmethod
    def after(cls, timeout_s: float | None) -> Deadline:
        """The deadline of a call that begins now."""
        if timeout_s is None or timeout_s == math.inf:
            return NEVER
        return cls(float(timeout_s), time.monotonic() + timeout_s)

    def left_s(self) -> float | None:
        """The remaining seconds; None: no limit."""
        return None if self.until_s == math.inf else max(self.until_s - time.monotonic(), 0.0)

    @property
    def is_over(self) -> bool:
        """Whether no time is left."""
        return self.until_s != math.inf and time.monotonic() >= self.until_s


NEVER = Deadline()
"""The deadline of a call without a limit."""
