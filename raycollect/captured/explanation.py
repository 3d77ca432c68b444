"""Explains the runs of a captured step; see `Capture.explain`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest

from raycollect.captured.calls import MethodCall, between_plans
from raycollect.captured.install import Installed
from raycollect.core.model import TensorInfo
from raycollect.driver.pending import Pending
from raycollect.driver.requests import Ref
from raycollect.driver.step_plan import Stage
from raycollect.errors import CaptureError
from raycollect.planner import Source
from raycollect.planner.explain import explain
from raycollect.planner.report import Explanation, Invoked, MethodCalls, StepExplanation


def explain_capture(
    capture: bytes, installed: Installed, infos: Mapping[Source, tuple[TensorInfo, ...] | None]
) -> StepExplanation:
    """Explains a captured step, of this id, whose plans' operands are these."""
    runs = installed.runs
    step_plan = runs.step_plan
    fixed = {source for source in infos if not runs.location.keys[source].startswith(capture)}  # type: ignore[call-overload]
    actors = {
        actor_id: member.actor for actor_id, (_, member) in zip(step_plan.participants, step_plan.homes, strict=True)
    }
    parts: list[tuple[Explanation | MethodCalls, int]] = []
    first = 0
    try:
        for stage in _stages(installed):
            if isinstance(stage, Stage):
                given = {source: _known_infos(infos[source]) for source in stage.plan.uses()}
                parts.append((explain(stage.plan, given, first), sum(source in fixed for source in given)))
                first += len(stage.plan.requests)
            else:
                calls = tuple(_invoked(call, actors[call.value.actor_id]) for call in stage)
                refs = {value.key for call in stage for value in call.arguments if type(value) is Ref}
                parts.append((MethodCalls(calls=calls), len(refs)))
                first += len(stage)
    except ValueError as exc:
        raise CaptureError(detail=f"a run of this captured step would be refused: {exc}") from None
    stages, counts = tuple(stage for stage, _ in parts), tuple(count for _, count in parts)
    return StepExplanation(participants=len(step_plan.participants), stages=stages, fixed=counts)


def _known_infos(infos: tuple[TensorInfo, ...] | None) -> tuple[TensorInfo, ...]:
    if infos is None:
        what = "what its methods return is known only after a run: run it once first"
        raise CaptureError(detail=f"this captured step can't be explained yet: {what}")
    return infos


def _invoked(call: MethodCall, actor: str) -> Invoked:
    after = sorted({value.step for value in call.arguments if type(value) is Pending})
    return Invoked(call=call.step, actor=actor, method=call.method, after=tuple(after))


def _stages(installed: Installed) -> Iterator[Stage | Sequence[MethodCall]]:
    """The plans of a step, and between them its method calls, in order."""
    plans = installed.runs.step_plan.stages
    for calls, plan in zip_longest(between_plans(installed.calls, (stage.first for stage in plans)), plans):
        if calls:
            yield calls
        if plan is not None:
            yield plan
