"""A controller and three leases without sockets, which work before a test, and are looked at after it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from raycollect.core.model import OpKind, ReduceOp
from raycollect.driver.dispatch import RequestKey
from raycollect.driver.plan_tracker import PlanTracker
from raycollect.pos import Container
from tests.pure.driver.order_model import Fleet
from tests.pure.driver.sending import send_plan
from tests.pure.sites import Ref

WAIT_S = 20.0


class Crew(Fleet):
    """Three participants in two groups, of which none has all: the controller keeps the check of what takes both."""

    def __init__(self) -> None:
        super().__init__(3, [(0, 1), (1, 2)])

    def sum(self, first: Ref | None = None) -> PlanTracker:
        """Starts two sums of new arrays as one plan; the array of participant 0 may be another one."""
        made = [one if one is not None else self.sites[at].hold(np.arange(3)) for at, one in ((0, first), (1, None))]
        pairs = [made, [self.sites[at].hold(np.arange(3)) for at in (1, 2)]]
        refs = {one.key: one for pair in pairs for one in pair}
        places = list(refs)
        asked = []
        for group, pair in zip(self.memberships, pairs, strict=True):
            operands = tuple((rank, places.index(one.key), None) for rank, one in enumerate(pair))
            asked.append(RequestKey(group, OpKind.ALLREDUCE, operands, ReduceOp.SUM, -1, -1, True, WAIT_S))
        return send_plan(self.controller, tuple(asked), dict(refs))

    def assert_works(self) -> None:
        """What is new has no trace of what failed before: a tensor in whose midst a plan was aborted is dirty."""
        first = self.sites[0].hold(np.arange(3))
        tracker = self.sum(first)
        assert tracker.wait(WAIT_S)
        assert tracker.error is None
        found = self.sites[0].store.look(first.key)
        assert isinstance(found, Container)
        np.testing.assert_array_equal(found.tensors[0], 2 * np.arange(3))


@contextmanager
def crew_of() -> Iterator[Crew]:
    made = Crew()
    try:
        made.assert_works()
        yield made
    finally:
        made.close()
