"""A plan under way whose outcome is known after some seconds, by a clock that goes on where somebody waits."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from raycollect.core import threads, timers
from raycollect.core.deadline import NEVER
from raycollect.driver import stall_report


class Clock:
    """Time that goes on where somebody waits; `due` are the watchers that look then, with when they do."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.due: list[tuple[float, timers.Watcher]] = []

    def monotonic(self) -> float:
        return self.now_s

    def look(self) -> None:
        """Goes on to the next look of a watcher."""
        at_s, watcher = self.due.pop(0)
        self.now_s = max(self.now_s, at_s)
        if not watcher._is_over:
            watcher.look_after(watcher.look())


def watch_by(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has `stall_report` and its watchers go by a clock, in the thread that waits."""

    def look_after(watcher: timers.Watcher, delay_s: float) -> None:
        clock.due = sorted([*clock.due, (clock.now_s + delay_s, watcher)], key=lambda one: one[0])

    monkeypatch.setattr(stall_report, "time", clock)
    monkeypatch.setattr(timers.Watcher, "look_after", look_after)
    monkeypatch.setattr(threads, "call_in_helper", lambda call, *args: call(*args))


class Flying:
    """A flight of three participants whose outcome is known after some seconds; it is plan 7."""

    def __init__(self, ends_s: float = math.inf, plan: Any = None, clock: Clock | None = None) -> None:
        self.clock = clock or Clock()
        self.ends_s = self.clock.now_s + ends_s
        self.seq = 7
        self.deadline = NEVER
        self.launches = range(7, 12)
        self.group_name = "g"
        self.error: Any = None
        self.overdue = None
        self.pending = {0, 1}
        members = [SimpleNamespace(rank=rank, actor=f"W({rank})", actor_id="abc"[rank]) for rank in range(3)]
        self.groups = (SimpleNamespace(spec=SimpleNamespace(name="g"), members=members),)
        self.plan = plan or SimpleNamespace(
            name="allreduce",
            participants=("a", "b", "c"),
            positions={"a": 0, "b": 1, "c": 2},
            timeout_s=60.0,
            places_at=lambda launch: range(3),
        )

    @property
    def resolved(self) -> bool:
        return self.error is not None or self.clock.now_s >= self.ends_s

    def wait(self, timeout_s: float | None) -> bool:
        clock = self.clock
        left_s = 0.0 if self.resolved else math.inf if timeout_s is None else timeout_s
        until_s = min(clock.now_s + left_s, max(self.ends_s, clock.now_s))
        while not self.resolved and clock.due and clock.due[0][0] < until_s:
            clock.look()
        if not self.resolved:
            clock.now_s = until_s
        return self.resolved

    def fail(self, error: Any) -> list[Any]:
        self.error = error
        return []

    def is_pending(self, position: int) -> bool:
        return position in self.pending

    def member(self, position: int) -> Any:
        return self.groups[0].members[position]
