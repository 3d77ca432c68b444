"""Verification: what plans must not do, whoever wrote them, is caught with its reason, in each of a part's ways."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from raycollect.core.model import OpKind, ReduceOp
from raycollect.core.operations import OPERATIONS, PARTIAL_FOLDS
from raycollect.errors import InternalError
from raycollect.planner import Link, Local, Request, Role, TemplateStep, plan_part
from raycollect.planner.ir import Part
from raycollect.planner.template import Buffer, Template
from raycollect.planner.verify import verify
from tests.pure.meaning import KINDS, ROOTED
from tests.pure.memberships import MADE, built, membership, names, request
from tests.pure.planner.requests import (
    ALL_OPS,
    COLLECTIVE_SUBSTITUTES,
    allreduce,
    barrier,
    broadcast,
    request_of,
    requests_of,
    send,
)
from tests.support.values import replace

# ---------------------------------------------------------------------------------------------- plans of operations


def with_template(made: Part, rank: int, template: Template) -> Part:
    """The plan with another part for one rank."""
    parts = tuple(len(made.templates) if r == rank else p for r, p in zip(made.ranks, made.parts, strict=True))
    return replace(made, templates=(*made.templates, template), parts=parts)


def with_steps(made: Part, rank: int, steps: Sequence[TemplateStep]) -> Part:
    """The plan with other steps for one rank."""
    return with_template(made, rank, replace(made.template(rank), steps=tuple(steps)))


def _everywhere(made: Part, change: Callable[[TemplateStep], tuple[TemplateStep, ...]]) -> Part:
    """The plan with each step replaced."""
    templates = (replace(t, steps=tuple(new for step in t.steps for new in change(step))) for t in made.templates)
    return replace(made, templates=tuple(templates))


def _drop(template: Template, at: int) -> Template:
    return replace(template, steps=template.steps[:at] + template.steps[at + 1 :])


def _change(template: Template, index: int, **fields: Any) -> Template:
    steps = list(template.steps)
    steps[index] = replace(steps[index], **fields)
    return replace(template, steps=tuple(steps))


def _broken_steps(made: Part, rank: int) -> Iterator[tuple[str, Part]]:
    """(what was done to one rank's steps, the plan): wrong for any operation among two ranks or more."""
    template = made.template(rank)
    for at, step in enumerate(template.steps):
        yield f"rank {rank} without step {at}", with_template(made, rank, _drop(template, at))
        yield f"rank {rank} in a launch that there is not", with_template(made, rank, _change(template, at, at=5))
        if step.peer >= 0:
            for peer in {(step.peer + 1) % made.request.group.world_size, -1} - {step.peer}:
                yield f"rank {rank} with peer {peer}", with_template(made, rank, _change(template, at, peer=peer))
        if step.op is not None:
            yield f"rank {rank} reduces otherwise", with_template(made, rank, _change(template, at, op=ReduceOp.MAX))
        if step.src >= 0:
            yield f"rank {rank} reads nothing", with_template(made, rank, _change(template, at, src=-1))
        if step.dst >= 0 and not template.buffers[step.dst].scratch:
            yield f"rank {rank} writes nothing", with_template(made, rank, _change(template, at, dst=-1))
        if step.dst == 1 and template.result == 1:
            yield f"rank {rank} overwrites what it gives", with_template(made, rank, _change(template, at, dst=0))


def _broken_parts(made: Part, rank: int) -> Iterator[tuple[str, Part]]:
    """The same, for one rank's part as a whole."""
    template = made.template(rank)
    if template.result >= 0:
        yield f"rank {rank} without result", with_template(made, rank, replace(template, result=-1))
    if template.result == 1:
        yield f"rank {rank} with what it gave as result", with_template(made, rank, replace(template, result=0))
    yield f"rank {rank} does all twice", with_template(made, rank, replace(template, steps=template.steps * 2))


def _broken_everywhere(made: Part) -> Iterator[tuple[str, Part]]:
    """The same, for all ranks alike, so that none waits for another."""
    steps = [step for template in made.templates for step in template.steps]
    if made.request.kind is not OpKind.BARRIER:
        yield "nobody does anything", _everywhere(made, lambda step: ())
    if any(len(template.steps) > 1 for template in made.templates):
        turned = (replace(template, steps=template.steps[::-1]) for template in made.templates)
        yield "all begin at the end", replace(made, templates=tuple(turned))
    if any(step.op for step in steps):
        yield "all reduce otherwise", _everywhere(made, lambda step: (replace(step, op=step.op and ReduceOp.MAX),))
    if made.request.kind in ROOTED and any(step.peer >= 0 for step in steps):
        world = len(made.ranks)
        yield "all have another root", _everywhere(made, lambda step: (replace(step, peer=(step.peer + 1) % world),))


def _broken(made: Part) -> Iterator[tuple[str, Part]]:
    for rank in made.ranks:
        for what, part in (*_broken_steps(made, rank), *_broken_parts(made, rank)):
            if not _is_harmless(made, rank, what):
                yield what, part
    yield from _broken_everywhere(made)


def _is_harmless(made: Part, rank: int, what: str) -> bool:
    """A rank that takes its own value has its result from the start, and nobody needs a value without a taker."""
    kind, is_inplace = made.request.kind, made.template(rank).src == made.template(rank).result
    if kind not in PARTIAL_FOLDS:
        return False
    taken = [OPERATIONS[kind].sources(at, len(made.ranks)) for at in range(len(made.ranks))]
    if list(taken[rank]) == [rank] and what.endswith("writes nothing" if is_inplace else "with what it gave as result"):
        return True
    return what.endswith("reads nothing") and not any(rank in sources for sources in taken)


@pytest.mark.parametrize("lacking", [False, True], ids=["native", "substitute"])
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_every_broken_plan_is_caught(kind: OpKind, world: int, lacking: bool) -> None:
    ops = tuple(op for op in ALL_OPS if not lacking or op != kind.value)
    if lacking and (kind not in COLLECTIVE_SUBSTITUTES or kind is OpKind.BARRIER):
        return
    for asked in requests_of(kind, world, ops=ops):
        made = plan_part(asked)
        verify(made)
        for what, wrong in _broken(made):
            with pytest.raises(InternalError):
                verify(wrong)
                pytest.fail(f"{asked.kind} with root {asked.root}: {what} was not caught")


def test_only_the_root_has_what_is_reduced_or_gathered() -> None:
    """A kernel may leave anything in what another rank calls its target."""
    asked = request_of(OpKind.ALLREDUCE, 3)
    made = plan_part(asked)
    verify(made)
    with pytest.raises(InternalError, match="on rank 1"):
        verify(_everywhere(made, lambda step: (replace(step, kind=OpKind.REDUCE, peer=0),)))
    made = plan_part(request_of(OpKind.ALLGATHER, 3))
    with pytest.raises(InternalError, match="on rank 0"):
        verify(_everywhere(made, lambda step: (replace(step, kind=OpKind.GATHER, peer=2),)))


def test_one_buffer_is_not_one_value_and_all_pieces_at_once() -> None:
    made = plan_part(request_of(OpKind.ALLGATHER, 3))
    one = replace(made.templates[0], buffers=made.templates[0].buffers[:1], dst=-1, result=0)
    with pytest.raises(InternalError):
        verify(replace(made, templates=(replace(one, steps=(replace(one.steps[0], dst=0),)),)))


def test_a_source_that_is_no_operand_is_caught() -> None:
    made = plan_part(request_of(OpKind.ALLREDUCE, 2, given=False))
    with pytest.raises(InternalError):
        verify(replace(made, templates=(replace(made.templates[0], src=1),)))


# ---------------------------------------------------------------------------------------------- algorithms


def _changed(part: Part, rank: int, at: int, **fields: Any) -> Part:
    """The part with one step of one rank changed."""
    template = part.template(rank)
    steps = list(template.steps)
    steps[at] = replace(steps[at], **fields)
    return with_steps(part, rank, steps)


@pytest.mark.parametrize(("name", "kind"), MADE)
@pytest.mark.parametrize("places", ["aabb", "aaabb"])
def test_every_broken_step_is_caught(name: str, kind: OpKind, places: str) -> None:
    of = membership(places)
    part = built(name, of, request(kind, of, 1))
    verify(part)
    for rank in part.ranks:
        steps = part.template(rank).steps
        for at, step in enumerate(steps):
            broken = [with_steps(part, rank, steps[:at] + steps[at + 1 :])]
            if step.kind is not Local.COPY:
                broken.append(_changed(part, rank, at, ranks=(rank,)))
            if step.kind is not Local.COPY and step.peer >= 0:
                broken.append(_changed(part, rank, at, peer=(step.peer + 1) % len(places)))
            if step.src_piece >= 0:
                broken.append(_changed(part, rank, at, src_piece=(step.src_piece + 1) % len(places)))
            if step.dst_piece >= 0:
                broken.append(_changed(part, rank, at, dst_piece=(step.dst_piece + 1) % len(places)))
                broken.append(_changed(part, rank, at, dst_piece=len(places)))
            for number, wrong in enumerate(broken):
                with pytest.raises(InternalError):
                    verify(wrong)
                    pytest.fail(f"{name} for {kind}, rank {rank}, step {at}: change {number} was not caught")


def test_a_rank_in_two_launches_at_once_is_caught() -> None:
    of = membership("aaaa")
    part = built("tree", of, request(OpKind.BROADCAST, of))
    flat = tuple(
        replace(template, steps=tuple(replace(step, at=0) for step in template.steps)) for template in part.templates
    )
    with pytest.raises(InternalError, match="two launches at once"):
        verify(replace(part, templates=flat))


def test_launches_that_go_back_or_beyond_the_last_are_caught() -> None:
    of = membership("aaaa")
    part = built("tree", of, request(OpKind.BROADCAST, of))
    (choice,) = part.choices
    with pytest.raises(InternalError, match="in launches"):
        verify(replace(part, choices=(replace(choice, width=1),)))
    steps = part.template(0).steps
    with pytest.raises(InternalError, match="in launches"):
        verify(with_steps(part, 0, (replace(steps[0], at=1), replace(steps[1], at=0))))
    with pytest.raises(InternalError, match="1 ways for 2 choices"):
        verify(replace(part, choices=(choice, choice)))


def test_every_way_is_verified() -> None:
    slow = Link(latency_s=1e-3, bandwidth=1e9)
    of = membership("aab", backend="gloo", bitwise=False, inside=slow, between=slow)
    part = plan_part(request(OpKind.BROADCAST, of), of)
    assert names(part) == ["native", "tree", "native"]
    for at, template in enumerate(part.templates):
        other, _ = template.others
        broken = replace(template, others=(other[:-1], other))
        with pytest.raises(InternalError):
            verify(replace(part, templates=(*part.templates[:at], broken, *part.templates[at + 1 :])))


# ---------------------------------------------------------------------------------------------- templates by hand


OPERAND = Buffer(role=Role.OPERAND)


def _bad(request: Request, *templates: Template, parts: tuple[int, ...] | None = None) -> Part:
    chosen = parts if parts is not None else (0,) * len(request.operands)
    return Part(request=request, templates=templates, parts=chosen)


def _template(
    *steps: TemplateStep, buffers: tuple[Buffer, ...] = (OPERAND,), src: int = 0, result: int = 0
) -> Template:
    return Template(buffers=buffers, steps=steps, src=src, result=result)


SUM = TemplateStep(kind=OpKind.ALLREDUCE, src=0, dst=0, op=ReduceOp.SUM)
OUTPUT = Buffer(role=Role.LIKE, source=0)
BAD: dict[str, tuple[Part, str]] = {
    "a step too many on one rank": (
        _bad(allreduce(3), _template(SUM), _template(SUM, TemplateStep(kind=OpKind.BARRIER)), parts=(0, 0, 1)),
        "deadlock",
    ),
    "a reduction where a broadcast is meant": (_bad(broadcast(3), _template(SUM)), "leaves"),
    "the result buffer is never written": (
        _bad(allreduce(3, inplace=False), _template(SUM, buffers=(OPERAND, OUTPUT), result=1)),
        "leaves None",
    ),
    "an output is read before it is written": (
        _bad(
            allreduce(3, inplace=False),
            _template(
                TemplateStep(kind=OpKind.ALLREDUCE, src=1, dst=1, op=ReduceOp.SUM), buffers=(OPERAND, OUTPUT), result=1
            ),
        ),
        r"leaves \(\)",
    ),
    "a barrier claims a result": (_bad(barrier(2), _template(TemplateStep(kind=OpKind.BARRIER))), "leaves"),
    "both ranks send first": (
        _bad(
            send(2, 0, 1),
            _template(TemplateStep(kind=OpKind.SEND, src=0, peer=1), TemplateStep(kind=OpKind.RECV, dst=0, peer=1)),
            _template(TemplateStep(kind=OpKind.SEND, src=0, peer=0), TemplateStep(kind=OpKind.RECV, dst=0, peer=0)),
            parts=(0, 1),
        ),
        "deadlock",
    ),
    "it is sent to a rank that takes no part": (
        _bad(send(3, 0, 1), _template(TemplateStep(kind=OpKind.SEND, src=0, peer=2)), _template(), parts=(0, 1)),
        "deadlock",
    ),
    "it is received from itself": (
        _bad(
            send(2, 0, 1),
            _template(TemplateStep(kind=OpKind.SEND, src=0, peer=1)),
            _template(TemplateStep(kind=OpKind.RECV, dst=0, peer=1), src=-1),
            parts=(0, 1),
        ),
        "deadlock",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_verification_catches(name: str) -> None:
    wrong, why = BAD[name]
    with pytest.raises(InternalError, match=why) as caught:
        verify(wrong)
    assert wrong.request.kind.value in str(caught.value)
    assert str(wrong.ranks) in str(caught.value)


def test_verification_proves_more_than_our_own_templates() -> None:
    """A broadcast made of sends, and an allreduce followed by a broadcast of its result, mean what they should."""
    relay = _bad(
        broadcast(3, 0),
        _template(TemplateStep(kind=OpKind.SEND, src=0, peer=1), TemplateStep(kind=OpKind.SEND, src=0, peer=2)),
        _template(TemplateStep(kind=OpKind.RECV, dst=0, peer=0), src=-1),
        parts=(0, 1, 1),
    )
    verify(relay)
    twice = _bad(allreduce(3), _template(SUM, TemplateStep(kind=OpKind.BROADCAST, src=0, dst=0, peer=2)))
    verify(twice)
