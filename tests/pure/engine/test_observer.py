"""The spans that runs leave in a timeline: the same in first and repeated runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from raycollect.core.model import OpKind, ReduceOp
from raycollect.observe.trace import CHECK, COLLECTIVE, KERNEL, PART, STAGING, Ring, Span
from raycollect.planner import plan
from tests.pure.engine.convoys import allreduces, convoy_of
from tests.pure.fleet import WAIT_S, FailAt, MakeFleet, numbers
from tests.support.values import replace


def told(ring: Ring, seq: int) -> list[tuple[Any, ...]]:
    """What the spans of a run say, but for their times, and that they lie in its part."""
    spans = sorted((one for one in ring.read().spans if one.seq == seq), key=lambda one: (one.begin_s, -one.end_s))
    parts: list[Span] = [one for one in spans if one.kind == PART]
    assert len(parts) == 1
    assert all(parts[0].begin_s <= one.begin_s <= one.end_s <= parts[0].end_s for one in spans)
    return sorted((one.kind, one.name, one.label.calls if one.kind != PART else 0, one.error) for one in spans)


@pytest.mark.parametrize("point", [None, "before_kernel", "after_kernel"])
def test_a_run_of_one_kernel(fleet: MakeFleet, point: str | None) -> None:
    one = fleet(2)
    ring = one.tracers[1].begin("test")
    assert ring is not None
    for turn in (1, 2):
        keys = one.keep_all(numbers(turn, 2))
        one.faults = None if point is None else FailAt(point=point, rank=1)
        one.run(OpKind.ALLREDUCE, keys)
        error = "" if point is None else "KernelError"
        check = (CHECK, "consistency check", turn - 1, "")  # a repeated run has one label for all
        assert told(ring, one.seq) == [check, (KERNEL, "allreduce", 1, error), (PART, "allreduce", 0, error)]


@pytest.mark.parametrize("turns", [1, 3])
def test_a_batch(turns: int) -> None:
    """Two packed calls, and one that runs after them."""
    with convoy_of(2) as convoy:
        ring = convoy.tracers[0].begin("test")
        assert ring is not None
        values = [[np.ones(3), np.ones(3)] for _ in range(2)]
        first, second = allreduces(convoy, values)
        requests = [first, second, replace(second, op=ReduceOp.PRODUCT)]
        planned = plan(requests, convoy.memberships * 3)
        for _ in range(turns):
            seq = convoy.seq
            assert all(future.result(WAIT_S).error is None for future in convoy.start(planned).values())
        assert told(ring, seq) == [
            (CHECK, "consistency check", 0, ""),
            (COLLECTIVE, "allreduce", 2, ""),
            (COLLECTIVE, "batch", 1, ""),
            (KERNEL, "allreduce", 0, ""),
            (KERNEL, "allreduce", 1, ""),
            (PART, "batch", 0, ""),
            (STAGING, "pack", 0, ""),
            (STAGING, "unpack", 0, ""),
        ]


def test_a_timeline_holds_no_descriptions_that_change_with_each_run(fleet: MakeFleet) -> None:
    one = fleet(2)
    ring = one.tracers[0].begin("test")
    assert ring is not None
    for size in range(1, 50):
        one.must(OpKind.ALLREDUCE, one.keep_all(numbers(size, 2, (size,))))
    assert len(ring.labelled) < 10
    assert {span.label.nbytes for span in ring.read().spans if span.kind == KERNEL} == {8 * n for n in range(1, 50)}


def test_a_run_that_never_agrees_says_so(fleet: MakeFleet) -> None:
    one = fleet(2)
    ring = one.tracers[0].begin("test")
    assert ring is not None
    one.run(OpKind.ALLREDUCE, [one.keep(0, np.ones(3)), one.keep(1, np.ones(4))])
    failed = "MismatchError"
    assert told(ring, one.seq) == [(CHECK, "consistency check", 0, failed), (PART, "allreduce", 0, failed)]
