"""Plans behind a call whose end can't be told."""

from __future__ import annotations

from raycollect.group.membership import PROGRAM
from tests.pure.channel.test_message_faults import WAIT_S, crew_of
from tests.pure.driver.test_order_model import without_ray
from tests.pure.member.test_lease import premises
from tests.pure.sites import Method

__all__ = ["premises", "without_ray"]  # fixtures


def test_plans_behind_one_call_ask_once_whether_it_is_over() -> None:
    """Ray may still pickle what it returned."""
    with crew_of(PROGRAM) as crew:
        before = crew.sites[0].fences
        crew.sites[0].call(Method(buffer=0, factor=2, summand=1, takes_back=False, end="unsure"))
        for _ in range(3):
            tracker = crew.sum()
            assert tracker.wait(WAIT_S)
            assert tracker.error is None
        assert crew.sites[0].fences == before + 1
