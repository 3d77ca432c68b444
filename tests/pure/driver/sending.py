"""Sends a plan as a call, a batch or a retry does."""

from __future__ import annotations

from typing import Any

from raycollect.core.signals import Deferred
from raycollect.driver.controller import Controller
from raycollect.driver.dispatch import RequestKey, prepare, send
from raycollect.driver.plan_tracker import PlanTracker


def send_plan(
    controller: Controller, requests: tuple[RequestKey, ...], refs: dict[Any, Any], *, is_awaited: bool = False
) -> PlanTracker:
    """Sends calls over these refs as one plan, which may pack small tensors."""
    prepared = prepare(requests, 1 << 20, tuple(refs))
    with Deferred():
        return send(controller, prepared, refs, is_awaited=is_awaited)[0]
