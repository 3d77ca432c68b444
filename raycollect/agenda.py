"""Calls on their way into one plan, and what stands for their outputs until it is sent.

The calls of a batch share an `Agenda`; one that has its plan to itself is written into one of its own.
"""

from __future__ import annotations

from typing import Any

from raycollect.controller import Controller
from raycollect.dispatch import Asked, send_plan
from raycollect.errors import BatchError
from raycollect.flight import Flight
from raycollect.group import Membership, Operand
from raycollect.model import Key
from raycollect.planner import Made, Source

__all__ = ["Agenda", "Pending", "plain"]

_OPEN = "its batch has not ended: use it after the block, or as an operand of a later call in it"
_UNSENT = "its plan could not be sent"


class Pending:
    """Stands for a ref that a call of a batch will give: the call's output, which the plan makes.

    Inside the block it may be an operand of later calls. After the block, `ref` is the ObjectRef; `get`, `free` and all
    verbs take it as well as that. It can't be passed to a Ray call: give `ref`.

    Attributes:
        actor_id: The participant on which it is made.
        request: The number of its call.
    """

    __slots__ = ("_agenda", "_ref", "_why", "actor_id", "request")

    def __init__(self, agenda: Agenda, request: int, actor_id: str) -> None:
        self.actor_id = actor_id
        self.request = request
        self._agenda: Agenda | None = agenda
        self._ref: Any = None
        self._why = _OPEN

    @property
    def ref(self) -> Any:
        """The ObjectRef.

        Raises:
            BatchError: Its batch has not ended, or failed.
        """
        if self._ref is None:
            raise BatchError(detail=f"{self!r} is no ref: {self._why}")
        return self._ref

    def is_of(self, agenda: Agenda) -> bool:
        """Whether it is made by a call of an agenda that is not sent yet."""
        return self._agenda is agenda

    def settle(self, ref: Any, why: str) -> None:
        """Gives it its ref, or the reason why it has none."""
        self._agenda, self._ref, self._why = None, ref, why

    def __reduce__(self) -> Any:
        raise BatchError(detail=f"{self!r} can't leave the driver: pass its `ref`, after the block has ended")

    def __repr__(self) -> str:
        ref = f"; its ref is {self._ref.hex()}" if self._ref is not None else ""
        return f"<Pending: made by call {self.request} on actor {self.actor_id[:6]}{ref}>"


class Agenda:
    """Calls that go into one plan, as they are recorded. For one thread.

    Attributes:
        asked: The calls.
        memberships: The group of each.
        results: What each gives: refs, and `Pending` where these are still to be made.
        refs: The different operand refs of all calls.
    """

    __slots__ = ("_pending", "_places", "asked", "memberships", "refs", "results")

    def __init__(self) -> None:
        self.asked: list[Asked] = []
        self.memberships: list[Membership] = []
        self.results: list[Any] = []
        self.refs: dict[Key, Any] = {}
        self._places: dict[Key, int] = {}
        self._pending: list[Pending] = []

    def source(self, operand: Operand | None) -> Source | None:
        """What stands for an operand in plans; None for one that is to be made."""
        if operand is None:
            return None
        key = operand.key
        if key is None:
            return None if operand.ref is None else Made(operand.ref.request)
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

    def send(self, controller: Controller, staging: int) -> Flight:
        """Sends all calls as one plan; see `send_plan`. What they make gets its refs; only `results` are kept (P5)."""
        flight = send_plan(controller, tuple(self.asked), self.memberships, self.refs, staging)
        if self._pending:
            positions = flight.plan.positions
            for pending in self._pending:
                pending.settle(flight.made.get((pending.request, positions[pending.actor_id])), _UNSENT)
            self.results = [_settled(result) for result in self.results]
        self.asked, self.memberships, self.refs, self._places, self._pending = [], [], {}, {}, []
        return flight


def _settled(result: Any) -> Any:
    """A result with refs for what was pending; None where its plan could not be sent."""
    if isinstance(result, list):
        return [one._ref if type(one) is Pending else one for one in result]
    return result._ref if type(result) is Pending else result


def plain(value: Any) -> Any:
    """A ref as Ray knows it: a `Pending` becomes its ref.

    Raises:
        BatchError: Its batch has not ended, or failed.
    """
    return value.ref if isinstance(value, Pending) else value
