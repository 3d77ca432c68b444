"""Runs of captured steps that begin while members of their groups change."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from time import monotonic
from types import SimpleNamespace
from typing import Any, cast

import pytest

from raycollect.captured.install import _Installation
from raycollect.captured.step import Capture
from raycollect.core import threads
from raycollect.core.deadline import Deadline
from raycollect.driver.step_runs import RunTracker
from raycollect.errors import CollectiveTimeoutError, GroupBrokenError, UnknownGroupError
from tests.pure.captured.run_fleet import WAIT_S, Fleet, controller, drive, fleet
from tests.pure.driver.leased import lease
from tests.pure.driver.tracked_plans import group
from tests.pure.teams import Script

__all__ = ["controller", "fleet"]  # fixtures


class Dispatching:
    """A lock that tells when another thread than that of the test asks for it."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self._lock = threading.Lock()
        self._own = threading.get_ident()

    def __enter__(self) -> None:
        if threading.get_ident() != self._own:
            self.asked.set()
        self._lock.acquire()

    def __exit__(self, *exc: object) -> None:
        self._lock.release()


def retire(fleet: Fleet) -> None:
    """Ends what the group "left" does, as a change of its members has it."""
    fleet.controller.groups._retire(fleet.left, monotonic() + WAIT_S, drains=True)


def test_a_run_that_begins_just_before_its_group_drains_goes_on_though_another_actor_dies(fleet: Fleet) -> None:
    """The change of members waits for it: it would break the step for good where that change fails."""
    begin, controller = fleet.bell.begin, fleet.controller
    controller.plans.dispatching = dispatching = Dispatching()  # type: ignore[assignment]
    (stranger,) = lease(controller, group("other", (20,))).values()

    def begun() -> int:
        pending.append(threads.call_in_helper(retire, fleet))
        assert dispatching.asked.wait(WAIT_S)
        controller.messages.lost(stranger, "killed")
        return begin()

    pending: list[Future[None]] = []
    fleet.bell.begin = begun  # type: ignore[method-assign]
    tracker = fleet.begin()
    assert not pending[0].done()
    for at in range(4):
        fleet.bell.give(at, tracker.number)
    pending[0].result(WAIT_S)
    assert tracker.resolved
    assert tracker.error is None


def test_no_run_begins_while_its_group_drains(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody would wait for it, and it would fail when the group has drained. Where the change fails, runs go on."""
    tracker, refused = fleet.begin(), list[str]()

    def wait(*_: object) -> bool:
        with pytest.raises(GroupBrokenError, match="are changing right now"):
            fleet.begin()
        refused.append("while it drains")
        return False

    with monkeypatch.context() as patch:
        patch.setattr(RunTracker, "wait", wait)
        with pytest.raises(CollectiveTimeoutError, match="its members did not change"):
            retire(fleet)
    assert refused
    fleet.controller.groups.draining.clear()
    for at in range(4):
        fleet.bell.give(at, tracker.number)
    drive(fleet)


def destroying(fleet: Fleet) -> Callable[..., Any]:
    """Gives the participants, whose groups another thread destroys right then."""

    def links(*_: object) -> list[Any]:
        for name in ("left", "right"):
            fleet.controller.groups.destroy(name)
        return fleet.peers

    return links


def test_capturing_a_step_whose_groups_are_destroyed_meanwhile_says_so(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = SimpleNamespace(
        participants=fleet.step_plan.participants, step_program=lambda at: Script(at).step_program, refs=lambda at: {}
    )
    installation = _Installation(
        controller=fleet.controller,
        capture=bytes(16),
        compiler=cast(Any, compiler),
        step_plan=fleet.step_plan,
        memberships=[fleet.left, fleet.right],
        words=cast(Any, None),
        deadline=Deadline.after(WAIT_S),
    )
    monkeypatch.setattr(fleet.controller.groups, "links", destroying(fleet))
    with pytest.raises(UnknownGroupError, match="it was destroyed"):
        installation.send()


def test_explaining_a_step_whose_groups_are_destroyed_meanwhile_says_so(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Capture()
    made._state, made._controller = "", fleet.controller
    made._installed = SimpleNamespace(runs=fleet.runs, operands={}, calls=())  # type: ignore[assignment]
    monkeypatch.setattr(fleet.controller.groups, "links", destroying(fleet))
    with pytest.raises(UnknownGroupError, match="it was destroyed"):
        made.explain()
