"""Calls that are recorded for one plan; those of a captured step are in `captured.calls.StepRequests`."""

from __future__ import annotations

from typing import Any, NamedTuple

from raycollect.core.model import Key
from raycollect.driver.controller import Controller
from raycollect.driver.dispatch import RequestKey, Submission, made_by, prepare, send
from raycollect.driver.pending import Pending
from raycollect.driver.plan_tracker import PlanTracker
from raycollect.planner import Made, Source

_UNSENT = "its plan could not be sent"


class RequestList:
    """The recorded calls of one plan; `results` has a `Pending` for each new ref. For one thread."""

    __slots__ = ("_first", "_pending", "_places", "refs", "requests", "results")

    def __init__(self) -> None:
        self._first = 0  # the first call of the plan that is being recorded
        self.clear()

    def clear(self) -> None:
        """Drops all recorded calls; placeholders still name their list."""
        self.requests: list[RequestKey] = []
        self.results: list[Any] = []
        self.refs: dict[Any, Any] = {}
        self._places: dict[Any, int] = {}
        self._pending: list[Pending] = []

    def source(self, key: Any, ref: Any) -> Source:
        """The source of an operand in plans."""
        if key is None:
            return Made(ref.request - self._first)
        if type(ref) is Pending:
            key = ref  # a captured value: several participants have one under its key
        place = self._places.get(key)
        if place is None:
            place = self._places[key] = len(self._places)
            self.refs[key] = ref
        return place

    def promise(self, actor_id: str) -> Pending:
        """A placeholder for the output of the next call on an actor."""
        pending = Pending(self, len(self.requests), actor_id)
        self._pending.append(pending)
        return pending

    def add(self, request: RequestKey, result: Any) -> None:
        """Records a call."""
        self.requests.append(request)
        self.results.append(result)

    def rewind(self, count: int, refs: int, why: str) -> None:
        """Drops all but the first calls and refs."""
        del self.requests[count:], self.results[count:]
        while len(self.refs) > refs:
            key, _ = self.refs.popitem()
            del self._places[key]
        for pending in self._pending:
            if pending.request >= count:
                pending._settle(None, why)
        self._pending = [pending for pending in self._pending if pending.request < count]

    def send(self, controller: Controller, staging: int, *, is_awaited: bool) -> tuple[PlanTracker, Submission]:
        """Sends all calls as one plan and settles their placeholders; only `results` stay (P5).

        `is_awaited` is as in `send`.
        """
        submission = Submission(prepare(tuple(self.requests), staging, tuple(self.refs)), self.refs, self.results)
        tracker, results = send(controller, *submission, is_awaited=is_awaited)
        for pending in self._pending:
            pending._settle(made_by(tracker, pending), _UNSENT)
        self.clear()
        self.results = results
        return tracker, submission


class Ref(NamedTuple):
    """An ObjectRef as an argument of a method."""

    key: Key
    ref: Any
    maker: str
    where: str
