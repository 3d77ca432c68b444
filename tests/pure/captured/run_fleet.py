"""A controller of captured runs, and participants that answer it."""

from __future__ import annotations

import threading
from collections.abc import Collection
from typing import Any

import pytest

from raycollect.channel.doorbell import IN_FLIGHT
from raycollect.channel.messages import Done
from raycollect.core.signals import Deferred
from raycollect.driver.controller import Controller
from raycollect.driver.step_plan import Stage, StepPlan
from raycollect.driver.step_runs import RunTracker, StepRuns
from raycollect.errors import (
    PlanAbortedError,
    to_wire,
)
from raycollect.planner import plan
from tests.pure.driver.leased import controller, declared, lease
from tests.pure.driver.tracked_plans import asked, group, key_of

__all__ = ["controller"]  # a fixture

CAPTURE = bytes(range(16))


WAIT_S = 20.0


SHORT = 100
"""The longest message of the fake doorbell."""


SLOTS = 4


class Ring:
    """The cells of one slot for runs."""

    def __init__(self, bell: Bell, slot: int) -> None:
        self._bell = bell
        self._slot = slot

    def write(self, number: int, seq: int, predecessor: int, payload: bytes, after: bytes) -> bool:
        self._bell.rung[self._slot, number] = seq, predecessor, payload
        self._bell.after[self._slot, number] = after
        return len(payload) <= SHORT


class Bell:
    """A doorbell within a process: what is rung is kept, answers are given by tests."""

    def __init__(self) -> None:
        self.number = 0
        self.rung: dict[tuple[int, int], tuple[int, int, bytes]] = {}
        self.after: dict[tuple[int, int], bytes] = {}
        self.given: dict[tuple[int, int], bytes] = {}
        self.runs = [Ring(self, slot) for slot in range(SLOTS)]
        self.woken: list[tuple[int, int]] = []  # for which run, and how many had it by then
        self.rings = threading.Semaphore(0)
        self.is_closed = False

    def begin(self) -> int:
        self.number += 1
        return self.number

    def ring(self, number: int) -> None:
        self.woken.append((number, sum(one == number for _, one in self.rung)))

    def answers(self, number: int, slots: Collection[int]) -> list[bytes | None]:
        return [self.given.get((slot, number)) for slot in slots]

    def give(self, slot: int, number: int, payload: bytes = b"") -> None:
        self.given[slot, number] = payload
        self.rings.release()

    def wait(self, timeout_s: float, number: int, slots: Collection[int]) -> None:
        self.rings.acquire(timeout=timeout_s)

    def wake(self) -> None:
        self.rings.release()

    def close(self) -> None:
        self.is_closed = True


class Fleet:
    """A controller that has leased actors 5, 6, 7 in the group "left", and 8, 7 in "right", and runs on them.

    The first stage is an allreduce of "left", the second a plan over both groups, whose check the controller keeps.
    """

    def __init__(
        self, controller: Controller, slots: tuple[int, ...] = (0, 1, 2, 3), beside: Fleet | None = None
    ) -> None:
        self.controller = controller
        groups = (beside.left, beside.right) if beside else (group("left", (5, 6, 7)), group("right", (8, 7)))
        left, right = self.left, self.right = groups
        found = lease(controller, left, right)
        for membership in (left, right):
            controller.groups.add(declared(membership))
            controller.groups.coordinators.open(membership)
            for member in membership.members:
                found[member.actor].group_ids.add(membership.spec.group_id)
        first = plan([asked(left, (0, 1, 2)).request()], [left])
        second = plan([asked(right, (4, 3)).request(), asked(left, (0, 1, 2)).request()], [right, left])
        assert second.agreement is None
        participants = (*first.participants, right.members[0].actor_id)
        places = {one: at for at, one in enumerate(participants)}
        self.stages = [
            Stage(made, at, offset, tuple(places[one] for one in made.participants))
            for made, at, offset in ((first, 0, 0), (second, 1, first.width))
        ]
        homes = [(left, member) for member in left.members] + [(right, right.members[0])]
        self.step_plan = StepPlan.of(self.stages, participants, homes, frozenset([key_of(9)]))
        self.peers = [controller.participants.leased(one, groups) for one in participants]
        self.bell = Bell()
        keys = [key_of(at) for at in range(5)]
        self.runs = StepRuns(
            controller,
            CAPTURE,
            self.step_plan,
            [left, right, left],
            keys,
            dict.fromkeys(keys),
            doorbell=self.bell,  # type: ignore[arg-type]
            slots=slots,
            peers=self.peers,
        )

    def begin(self, *payloads: bytes, **options: Any) -> RunTracker:
        with Deferred():
            return self.runs.begin(payloads or (b"",) * 4, **options)

    def tell(self, at: int, message: Any) -> None:
        self.controller.messages.received(self.peers[at], message)

    def fail(self, at: int, tracker: RunTracker, error: Any) -> None:
        self.tell(at, Done(seq=tracker.seq, ranks=[], error=to_wire(error), story=["check"]))

    def land(self, tracker: RunTracker) -> None:
        """Those who were told to abort say that they have ended."""
        for at in sorted(tracker._pending):
            self.fail(at, tracker, PlanAbortedError(detail="aborted"))
        assert tracker.has_ended
        assert tracker.seq not in [one.seq for one in self.controller.plans.trackers()]


def drive(fleet: Fleet, runs: int = IN_FLIGHT + 3) -> None:
    """Begins runs, and answers each."""
    for _ in range(runs):
        tracker = fleet.begin()
        for at in range(4):
            fleet.bell.give(at, tracker.number)
        assert tracker.wait(WAIT_S)
        assert tracker.error is None


@pytest.fixture
def fleet(controller: Controller) -> Fleet:
    return Fleet(controller)
