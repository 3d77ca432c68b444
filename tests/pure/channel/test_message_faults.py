"""A message that can't be taken in ends the connection that brought it, and no other: leases and a controller."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from raycollect.channel.messages import (
    Seen,
)
from raycollect.core.model import OpKind, ReduceOp
from raycollect.driver import dispatch
from raycollect.driver.dispatch import RequestKey
from raycollect.driver.plan_tracker import PlanTracker
from raycollect.errors import (
    ParticipantDiedError,
)
from raycollect.group.channel_exchange import ChannelExchange
from raycollect.member.plan_queue import PlanQueue
from raycollect.pos import Container
from tests.faults.thread_failures import fail_at
from tests.pure.driver.order_model import Fleet
from tests.pure.member.leases import premises
from tests.pure.sites import Ref
from tests.support.waiting import wait_until

__all__ = ["premises"]  # fixtures

WAIT_S = 20.0
BOOM = "TypeError: injected on"


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
        return dispatch.send_plan(self.controller, tuple(asked), dict(refs), 1 << 20)

    def look(self) -> Sequence[Seen | None]:
        return self.controller.participants.look(self.memberships[0].members, WAIT_S)

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


@pytest.mark.parametrize(
    ("holder", "name"),
    [
        (ChannelExchange, "arrived"),
        (PlanTracker, "arrive"),
        (PlanTracker, "done"),
        (PlanQueue, "received"),
    ],
)
def test_a_message_that_can_not_be_taken_in_ends_its_connection_and_no_other(holder: Any, name: str) -> None:
    with crew_of() as crew:
        with fail_at(holder, name):
            tracker = crew.sum()
            assert tracker.wait(WAIT_S), "it hangs"
        assert isinstance(tracker.error, ParticipantDiedError)
        assert BOOM in tracker.error.detail
        assert [site.peer.is_lost for site in crew.sites].count(True) == 1
        for site in crew.sites:
            assert site.peer.is_lost or wait_until(lambda site=site: site.lease._sequencer.has_ended(tracker.seq))


# ---------------------------------------------------------------------------------------------- questions
