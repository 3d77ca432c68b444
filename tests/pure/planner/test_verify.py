"""Verification: what algorithms must not do, and that it is caught in each of a part's ways."""

from __future__ import annotations

from typing import Any

import pytest

from raycollect.core.model import OpKind
from raycollect.errors import InternalError
from raycollect.planner import Link, Local, plan_part
from raycollect.planner.ir import Part
from raycollect.planner.verify import verify
from tests.pure.memberships import MADE, built, membership, names, request
from tests.pure.planner.test_operations import with_steps
from tests.support.values import replace


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
