"""Explains what each run of a captured step does; see `Capture.explain`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from raycollect.captured.calls import MethodCall
from raycollect.captured.install import Installed
from raycollect.core import html
from raycollect.core.model import TensorInfo
from raycollect.driver.pending import Pending
from raycollect.driver.requests import Ref
from raycollect.driver.step_plan import Stage
from raycollect.errors import CaptureError
from raycollect.planner import Source
from raycollect.planner.explain import Planned, explain_step
from raycollect.planner.report import Explanation, Invoked, Methods, StepExplanation
from raycollect.planner.sizes import Infos
from raycollect.planner.wording import nbytes_words, op_words, seconds_words

_HEAD = ("stage", "what", "calls", "bytes per rank", "estimated")
_RIGHT = frozenset({"stage", "calls", "bytes per rank", "estimated"})


def explain_capture(
    capture: bytes, installed: Installed, infos: Mapping[Source, tuple[TensorInfo, ...] | None]
) -> StepExplanation:
    """Explains a captured step, of this id, whose plans' operands are these."""
    runs, stages = installed.runs, stages_of(installed)
    step_plan = runs.step_plan
    fixed = {source for source in infos if not runs.keys[source].startswith(capture)}  # type: ignore[call-overload]
    actors = {
        actor_id: member.actor for actor_id, (_, member) in zip(step_plan.participants, step_plan.homes, strict=True)
    }
    found: list[Planned | Methods] = []
    first = 0
    for stage in stages:
        if isinstance(stage, Stage):
            found.append(_planned(stage, infos, first, fixed))
            first += len(stage.plan.requests)
        else:
            calls = tuple(_invoked(call, actors[call.made.actor_id]) for call in stage)
            refs = {one.key for call in stage for one in call.arguments if type(one) is Ref}
            found.append(Methods(calls=calls, fixed=len(refs)))
            first += len(stage)
    try:
        return explain_step(found, len(step_plan.participants))
    except ValueError as exc:
        raise CaptureError(detail=f"a run of this captured step would be refused: {exc}") from None


def _planned(stage: Stage, infos: Mapping[Source, Infos | None], first: int, fixed: Collection[Source]) -> Planned:
    given: dict[Source, Infos] = {}
    for source in stage.plan.uses():
        known = infos[source]
        if known is None:
            what = "what its methods return is known only after a run: run it once first"
            raise CaptureError(detail=f"this captured step can't be explained yet: {what}")
        given[source] = known
    return Planned(plan=stage.plan, given=given, first=first, fixed=sum(source in fixed for source in given))


def _invoked(call: MethodCall, actor: str) -> Invoked:
    after = sorted({value.step for value in call.arguments if type(value) is Pending})
    return Invoked(call=call.step, actor=actor, method=call.method, after=tuple(after))


def stages_of(installed: Installed) -> tuple[Stage | tuple[MethodCall, ...], ...]:
    """The plans of a step, and between them its method calls, in order."""
    calls, found = installed.calls, list[Stage | tuple[MethodCall, ...]]()
    known = 0
    for stage in installed.runs.step_plan.stages:
        before = tuple(call for call in calls[known:] if call.before <= stage.first)
        known += len(before)
        found += [before, stage]
    return tuple(one for one in [*found, calls[known:]] if one)


def stages_html(stages: Sequence[Stage | Sequence[MethodCall]], told: Sequence[object]) -> html.Markup | str:
    """The stages of a captured step as a table; `told` are their reports, or nothing."""
    rows = [_row(at, stage, told[at] if told else None) for at, stage in enumerate(stages)]
    return html.table(_HEAD, rows, right=_RIGHT, count=len(rows)) if rows else ""


def _row(at: int, stage: Stage | Sequence[MethodCall], told: object) -> tuple[object, ...]:
    if not isinstance(stage, Stage):
        methods = Counter(call.method for call in stage)
        words = ", ".join(f"{name}{f' (x {count})' if count > 1 else ''}" for name, count in methods.items())
        return at, words, len(stage), "", ""
    kinds = Counter((op_words(one), one.group.name) for one in stage.plan.requests)
    what = ", ".join(f"{op} on group {name!r}{f' (x {n})' if n > 1 else ''}" for (op, name), n in kinds.items())
    if not isinstance(told, Explanation):
        return at, what, len(stage.plan.requests), "", ""
    nbytes = nbytes_words(sum(row.nbytes for row in told.rows))
    return at, what, len(stage.plan.requests), nbytes, seconds_words(told.time_s)
