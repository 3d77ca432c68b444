"""Verification of templates that are written by hand: what goes wrong in them is caught, with its reason."""

from __future__ import annotations

import pytest

from raycollect.core.model import OpKind, ReduceOp
from raycollect.errors import InternalError
from raycollect.planner import Request, Role, Step
from raycollect.planner.ir import Part
from raycollect.planner.template import Buffer, Template
from raycollect.planner.verify import verify
from tests.pure.planner.requests import allreduce, barrier, broadcast, send
from tests.support.values import replace

OPERAND = Buffer(role=Role.OPERAND)


def _bad(request: Request, *templates: Template, parts: tuple[int, ...] | None = None) -> Part:
    chosen = parts if parts is not None else (0,) * len(request.operands)
    return Part(request=request, templates=templates, parts=chosen)


def _template(*steps: Step, buffers: tuple[Buffer, ...] = (OPERAND,), src: int = 0, result: int = 0) -> Template:
    return Template(buffers=buffers, steps=steps, src=src, result=result)


SUM = Step(kind=OpKind.ALLREDUCE, src=0, dst=0, op=ReduceOp.SUM)
OUTPUT = Buffer(role=Role.LIKE, source=0)
BAD: dict[str, tuple[Part, str]] = {
    "a step is missing on one rank": (
        _bad(allreduce(3), _template(SUM), _template(), parts=(0, 1, 0)),
        "deadlock",
    ),
    "a step too many on one rank": (
        _bad(allreduce(3), _template(SUM), _template(SUM, Step(kind=OpKind.BARRIER)), parts=(0, 0, 1)),
        "deadlock",
    ),
    "ranks reduce with different ops": (
        _bad(allreduce(2), _template(SUM), _template(replace(SUM, op=ReduceOp.MAX)), parts=(0, 1)),
        "deadlock",
    ),
    "ranks have different roots": (
        _bad(
            broadcast(2),
            _template(Step(kind=OpKind.BROADCAST, src=0, dst=0, peer=0)),
            _template(Step(kind=OpKind.BROADCAST, src=0, dst=0, peer=1)),
            parts=(0, 1),
        ),
        "deadlock",
    ),
    "ranks run different kernels": (
        _bad(barrier(2), _template(Step(kind=OpKind.BARRIER)), _template(SUM), parts=(0, 1)),
        "deadlock",
    ),
    "all agree on the wrong root": (
        _bad(broadcast(3, 2), _template(Step(kind=OpKind.BROADCAST, src=0, dst=0, peer=1))),
        "leaves",
    ),
    "nothing is reduced": (_bad(allreduce(3), _template()), "leaves"),
    "it is reduced twice": (_bad(allreduce(3), _template(SUM, SUM)), "leaves"),
    "a reduction where a broadcast is meant": (_bad(broadcast(3), _template(SUM)), "leaves"),
    "the result buffer is never written": (
        _bad(allreduce(3, inplace=False), _template(SUM, buffers=(OPERAND, OUTPUT), result=1)),
        "leaves None",
    ),
    "an output is read before it is written": (
        _bad(
            allreduce(3, inplace=False),
            _template(Step(kind=OpKind.ALLREDUCE, src=1, dst=1, op=ReduceOp.SUM), buffers=(OPERAND, OUTPUT), result=1),
        ),
        r"leaves \(\)",
    ),
    "one rank's result is the wrong buffer": (
        _bad(
            allreduce(2, inplace=False),
            _template(replace(SUM, dst=1), buffers=(OPERAND, OUTPUT), result=1),
            _template(replace(SUM, dst=1), buffers=(OPERAND, OUTPUT), result=0),
            parts=(0, 1),
        ),
        "on rank 1",
    ),
    "a barrier claims a result": (_bad(barrier(2), _template(Step(kind=OpKind.BARRIER))), "leaves"),
    "a send without a receive": (
        _bad(send(2, 0, 1), _template(Step(kind=OpKind.SEND, src=0, peer=1)), _template(), parts=(0, 1)),
        "deadlock",
    ),
    "a receive without a send": (
        _bad(send(2, 0, 1), _template(), _template(Step(kind=OpKind.RECV, dst=0, peer=0), src=-1), parts=(0, 1)),
        "deadlock",
    ),
    "both ranks send first": (
        _bad(
            send(2, 0, 1),
            _template(Step(kind=OpKind.SEND, src=0, peer=1), Step(kind=OpKind.RECV, dst=0, peer=1)),
            _template(Step(kind=OpKind.SEND, src=0, peer=0), Step(kind=OpKind.RECV, dst=0, peer=0)),
            parts=(0, 1),
        ),
        "deadlock",
    ),
    "it is sent the wrong way": (
        _bad(
            send(2, 0, 1),
            _template(Step(kind=OpKind.RECV, dst=0, peer=1), src=-1),
            _template(Step(kind=OpKind.SEND, src=0, peer=0)),
            parts=(0, 1),
        ),
        "leaves",
    ),
    "it is sent to a rank that takes no part": (
        _bad(send(3, 0, 1), _template(Step(kind=OpKind.SEND, src=0, peer=2)), _template(), parts=(0, 1)),
        "deadlock",
    ),
    "it is received from itself": (
        _bad(
            send(2, 0, 1),
            _template(Step(kind=OpKind.SEND, src=0, peer=1)),
            _template(Step(kind=OpKind.RECV, dst=0, peer=1), src=-1),
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
        _template(Step(kind=OpKind.SEND, src=0, peer=1), Step(kind=OpKind.SEND, src=0, peer=2)),
        _template(Step(kind=OpKind.RECV, dst=0, peer=0), src=-1),
        parts=(0, 1, 1),
    )
    verify(relay)
    twice = _bad(allreduce(3), _template(SUM, Step(kind=OpKind.BROADCAST, src=0, dst=0, peer=2)))
    verify(twice)
