"""Rewords errors in terms of a captured step."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import TypeVar

from raycollect.captured.calls import StepRequests
from raycollect.errors import (
    FaultError,
    MethodError,
    RaycollectError,
    RefusedError,
    Violation,
)
from raycollect.ray_bridge import ray_actors

_Error = TypeVar("_Error", bound=RaycollectError)

MOST_ACTORS = 4  # how many actors a message names


class StepErrorText:
    """Names calls by their place in the step, values by their call, and only groups that the user declared."""

    def __init__(self, capture: bytes, request_list: StepRequests, declared: Collection[str]) -> None:
        self._capture = capture
        self._steps = tuple(request_list.steps)
        self._declared = declared
        kinds = [request.name for request in request_list.requests]
        self._values = {
            step: f"what call {step} ({kind}) gave" for step, kind in zip(request_list.steps, kinds, strict=True)
        }
        actors = {call.value.actor_id: ray_actors.describe_actor(call.actor) for call in request_list.calls}
        for call in request_list.calls:
            self._values[call.step] = f"what call {call.step} ({call.method}) of {actors[call.value.actor_id]} gave"
        groups = dict.fromkeys(request.group for request in request_list.requests)
        members = {member.actor_id: member.actor for group in groups for member in group.members}
        names = list((actors | members).values())
        more = f" and {len(names) - MOST_ACTORS} more" if len(names) > MOST_ACTORS else ""
        self._actors = ", ".join(names[:MOST_ACTORS]) + more

    def tell(self, error: _Error, *, is_of_calls: bool = True) -> _Error:
        """Rewords an error in place."""
        if isinstance(error, RefusedError) and is_of_calls:
            error.violations = tuple(map(self._violation, error.violations))
        if isinstance(error, (RefusedError, FaultError)):
            if error.group_name not in self._declared:
                error.group_name = ", ".join(name for name in error.group_name.split(", ") if name in self._declared)
            if not error.group_name and not isinstance(error, MethodError):
                error.op = f"{error.op or 'captured step'} of {self._actors}"
        return error

    def _violation(self, violation: Violation) -> Violation:
        number = max(violation.call, 0)
        if number < len(self._steps) and not violation.is_step:
            violation = replace(violation, call=self._steps[number], is_step=True)
        key = bytes.fromhex(violation.ref)
        if not key.startswith(self._capture):
            return violation
        return replace(
            violation, ref="", value=self._values.get(int.from_bytes(key[-4:], "little"), "an argument of the run")
        )
