"""A plan whose caller has claimed the controller's bell ends by it when all went well, and else as any other."""

from __future__ import annotations

import threading

import pytest

from raycollect.channel import CompletionBell, CompletionBellClient
from raycollect.driver.plan_tracker import PlanTracker
from raycollect.errors import KernelError
from tests.pure.driver.tracked_plans import SEQ, tracked

WAIT_S = 20.0
WORLD = 3


@pytest.fixture
def tracker(bell: CompletionBell) -> PlanTracker:
    assert bell.claim()
    made = tracked(WORLD)
    made.bell, made.bell_slots = bell, tuple(bell.take_slot() for _ in range(WORLD))
    return made


def _client(tracker: PlanTracker, position: int) -> CompletionBellClient:
    assert tracker.bell is not None
    return CompletionBellClient(tracker.bell.segment, tracker.bell_slots[position])


def test_a_ring_ends_it_everywhere(tracker: PlanTracker) -> None:
    _client(tracker, 2).ring(SEQ - 1)
    assert not tracker.wait(0), "that was an earlier one"
    _client(tracker, 1).ring(SEQ)
    assert not tracker.resolved, "nobody has looked"
    assert tracker.wait(WAIT_S)
    assert tracker.has_ended
    assert tracker.error is None
    assert not tracker.refs


def test_a_failure_wakes_the_caller(tracker: PlanTracker) -> None:
    failing = threading.Timer(0.01, tracker.done, (1, KernelError(detail="broken"), ()))
    failing.start()
    assert tracker.wait(WAIT_S)
    failing.join()
    assert isinstance(tracker.error, KernelError)


def test_who_dies_after_it_has_rung_has_not_failed(tracker: PlanTracker) -> None:
    _client(tracker, 1).ring(SEQ)
    lost = threading.Thread(target=tracker.lost, args=(1, "killed"))  # as the hub's does, before the caller looks
    lost.start()
    lost.join(WAIT_S)
    assert tracker.resolved
    assert tracker.error is None
