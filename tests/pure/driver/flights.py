"""A plan under way whose outcome is known after some seconds, by a clock that goes on where somebody waits."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any


class Clock:
    """Time that goes on where somebody waits."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


class Flying:
    """A flight of three participants whose outcome is known after some seconds; it is plan 7."""

    def __init__(self, ends_s: float = math.inf, plan: Any = None, clock: Clock | None = None) -> None:
        self.clock = clock or Clock()
        self.ends_s = self.clock.now_s + ends_s
        self.seq = 7
        self.launches = range(7, 12)
        self.group_name = "g"
        self.error: Any = None
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
        left_s = 0.0 if self.resolved else math.inf if timeout_s is None else timeout_s
        self.clock.now_s = min(self.clock.now_s + left_s, max(self.ends_s, self.clock.now_s))
        return self.resolved

    def fail(self, error: Any) -> list[Any]:
        self.error = error
        return []

    def is_pending(self, position: int) -> bool:
        return position in self.pending

    def member(self, position: int) -> Any:
        return self.groups[0].members[position]
