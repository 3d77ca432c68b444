"""Calls on their way into one plan.

The calls of a batch share an `Agenda`; one that has its plan to itself is written into one of its own. The calls of a
captured step, of verbs and of methods, share a `CaptureAgenda`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

from raycollect import ray_internals
from raycollect.controller import Controller
from raycollect.dispatch import Asked
from raycollect.errors import (
    FaultError,
    MethodError,
    RaycollectError,
    RefusedError,
    Violation,
)
from raycollect.flight import Flight
from raycollect.group import Membership, Operand
from raycollect.model import Key
from raycollect.parcel import Parcel, made
from raycollect.pending import Pending
from raycollect.planner import Made, Source
from raycollect.routine import captured_key

__all__ = ["Agenda", "CaptureAgenda", "MethodCall", "Ref", "StepWords"]

_Error = TypeVar("_Error", bound=RaycollectError)

MOST_ACTORS = 4
"""How many actors a message names."""

_UNSENT = "its plan could not be sent"


class Agenda:
    """Calls that go into one plan, as they are recorded. For one thread.

    Attributes:
        asked: The calls.
        memberships: The group of each.
        results: What each gives: refs, and `Pending` where these are still to be made.
        refs: The different operand refs of all calls, by key.
    """

    __slots__ = ("_first", "_pending", "_places", "asked", "memberships", "refs", "results")

    def __init__(self) -> None:
        self.asked: list[Asked] = []
        self.memberships: list[Membership] = []
        self.results: list[Any] = []
        self.refs: dict[Any, Any] = {}
        self._places: dict[Any, int] = {}
        self._pending: list[Pending] = []
        self._first = 0  # the first call of the plan that is being recorded

    def source(self, operand: Operand | None) -> Source | None:
        """What stands for an operand in plans; None for one that is to be made."""
        if operand is None:
            return None
        key: Any = operand.key
        if key is None:
            return None if operand.ref is None else Made(operand.ref.request - self._first)
        if type(operand.ref) is Pending:
            key = operand.ref  # a captured value: several participants have one under its key
        place = self._places.get(key)
        if place is None:
            place = self._places[key] = len(self._places)
            self.refs[key] = operand.ref
        return place

    def promise(self, actor_id: str) -> Pending:
        """Stands for what the next call makes on an actor."""
        pending = Pending(self, len(self.asked), actor_id)
        self._pending.append(pending)
        return pending

    def add(self, asked: Asked, membership: Membership, result: Any) -> None:
        """Records a call."""
        self.asked.append(asked)
        self.memberships.append(membership)
        self.results.append(result)

    def rewind(self, count: int, refs: int, why: str) -> None:
        """Drops all but the first calls and refs."""
        del self.asked[count:], self.memberships[count:], self.results[count:]
        while len(self.refs) > refs:
            key, _ = self.refs.popitem()
            del self._places[key]
        for pending in self._pending:
            if pending.request >= count:
                pending.settle(None, why)
        self._pending = [pending for pending in self._pending if pending.request < count]

    def send(self, controller: Controller, staging: int, *, is_batch: bool) -> tuple[Flight, Parcel]:
        """Sends all calls as one plan; what they make gets its refs. Only `results` are kept (P5).

        Args:
            controller: This process's controller.
            staging: See `planner.Program`.
            is_batch: See `Parcel`.

        Raises:
            RefusedError, GroupError: See `send_plan`.
        """
        parcel = Parcel(
            asked=tuple(self.asked),
            memberships=tuple(self.memberships),
            refs=self.refs,
            results=tuple(self.results),
            staging=staging,
            is_batch=is_batch,
        )
        flight = parcel.send(controller)
        for pending in self._pending:
            pending.settle(made(pending, flight), _UNSENT)
        self.results = parcel.given(flight) if is_batch else [parcel.given(flight)]
        self.asked, self.memberships, self.refs, self._places, self._pending = [], [], {}, {}, []
        return flight, parcel


class Ref(NamedTuple):
    """An ObjectRef as an argument of a method.

    Attributes:
        key: Its key.
        ref: The ref.
        maker: The actor whose method returned it; empty where it was put, or a task returned it.
        where: Which argument it is.
    """

    key: Key
    ref: Any
    maker: str
    where: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MethodCall:
    """A method call of a captured step.

    Attributes:
        step: Its place among all calls of the step.
        before: How many verbs were called before it.
        actor: The actor's handle.
        method: The method's name.
        args: Its arguments.
        kwargs: (name, argument).
        made: What it returns.
    """

    step: int
    before: int
    actor: Any
    method: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    made: Pending

    @property
    def arguments(self) -> tuple[Any, ...]:
        """What the method is given, by place and by name."""
        return (*self.args, *(value for _, value in self.kwargs))


class CaptureAgenda(Agenda):
    """The calls of a captured step. A method call ends the plan that is being recorded: the next verb begins another.

    Args:
        capture: The capture's id.

    Attributes:
        calls: The method calls.
        made: (request, actor) -> what it makes there.
        steps: For each verb's call, its place among all calls.
        firsts: The first request of each plan.
    """

    __slots__ = ("_capture", "calls", "firsts", "made", "steps")

    def __init__(self, capture: bytes) -> None:
        super().__init__()
        self._capture = capture
        self.calls: list[MethodCall] = []
        self.made: dict[tuple[int, str], Pending] = {}
        self.steps: list[int] = []
        self.firsts: list[int] = []

    def promise(self, actor_id: str) -> Pending:
        """Stands for what the next verb makes on an actor, in each run."""
        request = len(self.asked)
        pending = Pending(self, request, actor_id, step=self._count())
        self._pending.append(pending)
        self.made[request, actor_id] = pending
        return pending

    def add(self, asked: Asked, membership: Membership, result: Any) -> None:
        """Records a verb's call."""
        if not self.firsts or self.firsts[-1] != self._first:
            self.firsts.append(self._first)
        self.steps.append(self._count())
        super().add(asked, membership, result)

    def call(
        self, actor: Any, actor_id: str, method: str, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...]
    ) -> Pending:
        """Records a method call; gives what stands for the value that it returns in each run."""
        self.end_plan()
        step = self._count()
        made = Pending(self, -1, actor_id, step=step, key=captured_key(self._capture, 0, step))
        one = MethodCall(
            step=step, before=len(self.asked), actor=actor, method=method, args=args, kwargs=kwargs, made=made
        )
        self.calls.append(one)
        return made

    def end_plan(self) -> None:
        """Ends the plan that is being recorded: what it makes is there for those after it."""
        self._first = len(self.asked)
        for pending in self._pending:
            pending.key = captured_key(self._capture, 0, pending.step)
        self._pending.clear()

    def clear(self) -> None:
        """Lets go of all that was recorded; what stands for values still says whose they are."""
        self.asked: list[Asked] = []
        self.memberships: list[Membership] = []
        self.results: list[Any] = []
        self.refs: dict[Any, Any] = {}
        self._places = {}
        self.calls, self.made, self.steps, self.firsts = [], {}, [], []

    def rewind(self, count: int, refs: int, why: str) -> None:
        """Drops all but the first verbs' calls and refs, back to the last method call at most."""
        super().rewind(count, refs, why)
        del self.steps[count:]
        self.made = {place: one for place, one in self.made.items() if place[0] < count}
        while self.firsts and self.firsts[-1] >= count:
            self.firsts.pop()

    def _count(self) -> int:
        return len(self.steps) + len(self.calls)


class StepWords:
    """How errors speak of a captured step: of its calls by their place in it, of what they gave, of its own groups.

    Args:
        capture: The capture's id.
        agenda: What was recorded.
        declared: The names of the groups that the user has declared.
    """

    def __init__(self, capture: bytes, agenda: CaptureAgenda, declared: Collection[str]) -> None:
        self._capture = capture
        self._steps = tuple(agenda.steps)
        groups = [one.spec.name for one in agenda.memberships]
        self._declared = frozenset(name for name in groups if name in declared)
        kinds = [asked.kind.value for asked in agenda.asked]
        self._values = {step: f"what call {step} ({kind}) gave" for step, kind in zip(agenda.steps, kinds, strict=True)}
        actors = {call.made.actor_id: ray_internals.describe_actor(call.actor) for call in agenda.calls}
        for call in agenda.calls:
            self._values[call.step] = f"what call {call.step} ({call.method}) of {actors[call.made.actor_id]} gave"
        members = {one.actor_id: one.actor for group in agenda.memberships for one in group.members}
        names = list((actors | members).values())
        more = f" and {len(names) - MOST_ACTORS} more" if len(names) > MOST_ACTORS else ""
        self._actors = ", ".join(names[:MOST_ACTORS]) + more

    def tell(self, error: _Error, *, is_of_calls: bool = True) -> _Error:
        """Puts an error in these words.

        Args:
            error: The error; it is changed.
            is_of_calls: Whether what is wrong is so with calls of verbs, numbered as those alone.
        """
        if isinstance(error, RefusedError) and is_of_calls:
            error.violations = tuple(map(self._violation, error.violations))
        if isinstance(error, (RefusedError, FaultError)):
            if error.group_name not in self._declared:
                error.group_name = ", ".join(one for one in error.group_name.split(", ") if one in self._declared)
            if not error.group_name and not isinstance(error, MethodError):
                error.op = f"{error.op or 'captured step'} of {self._actors}"
        return error

    def _violation(self, one: Violation) -> Violation:
        number = max(one.call, 0)
        if number < len(self._steps) and not one.is_step:
            one = replace(one, call=self._steps[number], is_step=True)
        key = bytes.fromhex(one.ref)
        if not key.startswith(self._capture):
            return one
        return replace(
            one, ref="", value=self._values.get(int.from_bytes(key[-4:], "little"), "an argument of the run")
        )
