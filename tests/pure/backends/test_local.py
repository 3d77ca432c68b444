"""A group of one rank: what is given is what is received."""

from __future__ import annotations

import numpy as np
import pytest

from raycollect.core.model import Kernel, Launch, OpKind, ReduceOp
from raycollect.errors import PlanAbortedError
from tests.pure.communicators import ThreadTeam
from tests.support.values import replace

LAUNCH = Launch(seq=1, ranks=(0,), timeout_s=5.0)


def team() -> ThreadTeam:
    return ThreadTeam("local", 1)


def test_an_aborted_launch_runs_nothing_and_the_next_one_works() -> None:
    (only,) = team().communicators
    only.abort(1)
    src, dst = np.ones(3), np.zeros(3)
    kernel = Kernel(kind=OpKind.ALLREDUCE, src=src, dst=dst, op=ReduceOp.SUM)
    for run in (lambda: only.agree(LAUNCH, b"me"), lambda: only.launch(LAUNCH, (kernel,))):
        with pytest.raises(PlanAbortedError):
            run()
    only.end(LAUNCH, False)
    assert not dst.any()
    second = replace(LAUNCH, seq=2)
    assert only.agree(second, b"me") == [b"me"]
    only.launch(second, (kernel,))
    only.end(second, True)
    assert dst.all()
