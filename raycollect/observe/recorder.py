"""A bounded log of small events, never tensors; errors show its end."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

_TAIL = 12  # how many events errors show


@dataclass(frozen=True, slots=True)
class Event:
    """One event: when (by the recorder's clock), a short name such as ``"launched"``, the plan or 0, and details."""

    at_s: float
    what: str
    seq: int
    detail: str

    def __str__(self) -> str:
        plan = f" plan {self.seq}" if self.seq else ""
        return f"{self.at_s:.6f}{plan} {self.what} {self.detail}".rstrip()


class Recorder:
    """Stores the last events of this process. Any thread may call it."""

    def __init__(self, clock: Callable[[], float], *, limit: int = 512) -> None:
        self._clock = clock
        self._events: deque[tuple[float, str, int, str]] = deque(maxlen=limit)  # `story` makes them `Event` values

    def add(self, what: str, seq: int = 0, detail: str = "") -> None:
        """Notes an event."""
        self._events.append((self._clock(), what, seq, detail))

    def story(self) -> tuple[Event, ...]:
        """Returns the stored events, oldest first."""
        return tuple(Event(*event) for event in self._events.copy())

    def tail(self) -> list[str]:
        """Returns the last events as text, oldest first."""
        return list(map(str, self.story()[-_TAIL:]))
