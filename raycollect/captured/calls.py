"""The calls that the block of a captured step records."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from raycollect.core.user_line import user_line
from raycollect.driver.dispatch import RequestKey
from raycollect.driver.pending import Pending
from raycollect.driver.requests import RequestList
from raycollect.engine.step_program import captured_key
from raycollect.ray_bridge import ray_actors


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MethodCall:
    """A method call of a captured step."""

    step: int
    before: int
    actor: Any
    method: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    value: Pending

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Its arguments, positional ones first."""
        return (*self.args, *(value for _, value in self.kwargs))


def between_plans(calls: Sequence[MethodCall], firsts: Iterable[int]) -> Iterator[Sequence[MethodCall]]:
    """Yields the method calls before each plan, whose first requests these are, and then those behind the last plan."""
    count = 0
    for first in firsts:
        before = [call for call in calls[count:] if call.before <= first]
        count += len(before)
        yield before
    yield calls[count:]


class StepRequests(RequestList):
    """The calls of a captured step. A method call ends the current plan; the next collective begins another."""

    __slots__ = ("_capture", "_is_traced", "calls", "firsts", "outputs", "steps")

    def __init__(self, capture: bytes, *, is_traced: bool = False) -> None:
        self._capture = capture
        self._is_traced = is_traced
        super().__init__()

    def clear(self) -> None:
        """Drops the method calls, too."""
        super().clear()
        self.calls: list[MethodCall] = []
        self.outputs: dict[tuple[int, str], Pending] = {}  # (request, actor) -> its output there
        self.steps: list[int] = []  # the place of each collective among all calls
        self.firsts: list[int] = []  # the first request of each plan

    def promise(self, actor_id: str) -> Pending:
        """A placeholder for the next collective's output on an actor, in each run."""
        pending = self.outputs[len(self.requests), actor_id] = super().promise(actor_id)
        pending.step = self._count()
        if self._is_traced:
            pending._traced = f"what the collective at {user_line()} makes"
        return pending

    def add(self, request: RequestKey, result: Any) -> None:
        """Records a collective."""
        if not self.firsts or self.firsts[-1] != self._first:
            self.firsts.append(self._first)
        self.steps.append(self._count())
        super().add(request, result)

    def call(
        self, actor: Any, actor_id: str, method: str, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...]
    ) -> Pending:
        """Records a method call; returns a placeholder for its value in each run."""
        self.end_plan()
        step = self._count()
        value = Pending(self, -1, actor_id, step=step, key=captured_key(self._capture, step))
        call = MethodCall(
            step=step, before=len(self.requests), actor=actor, method=method, args=args, kwargs=kwargs, value=value
        )
        self.calls.append(call)
        if self._is_traced:
            value._traced = f"what {method} of {ray_actors.describe_actor(actor)} gives, called at {user_line()}"
        return value

    def end_plan(self) -> None:
        """Ends the current plan: later plans may use its outputs."""
        self._first = len(self.requests)
        for pending in self._pending:
            pending.key = captured_key(self._capture, pending.step)
        self._pending.clear()

    def seal(self) -> None:
        """Ends the recording: placeholders drop their references to it."""
        for pending in (*self.outputs.values(), *(call.value for call in self.calls)):
            pending._settle(None, "its captured step has been recorded")

    def rewind(self, count: int, refs: int, why: str) -> None:
        """Drops all but the first collectives and refs, back to the last method call at most."""
        super().rewind(count, refs, why)
        del self.steps[count:]
        self.outputs = {place: pending for place, pending in self.outputs.items() if place[0] < count}
        while self.firsts and self.firsts[-1] >= count:
            self.firsts.pop()

    def _count(self) -> int:
        return len(self.steps) + len(self.calls)
