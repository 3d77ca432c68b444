"""The calls of one plan with all that they need, ready to be sent: once, and again where that did not go well."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from raycollect.controller import Controller
from raycollect.dispatch import Asked, send_plan
from raycollect.errors import DispatchError, RefusedError, RetryError
from raycollect.flight import Flight
from raycollect.group import Membership
from raycollect.model import Key
from raycollect.pending import Pending

__all__ = ["Parcel", "made"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Parcel:
    """Calls that go into one plan.

    Attributes:
        asked: The calls, in program order.
        memberships: The group of each.
        refs: The different operand refs of all calls, by key.
        results: What each call gives: refs, and `Pending` where these are made by the plan.
        staging: See `planner.Program`.
        is_batch: Whether the caller gets the results of all calls, or that of the only one.
    """

    asked: tuple[Asked, ...]
    memberships: tuple[Membership, ...]
    refs: Mapping[Key, Any]
    results: tuple[Any, ...]
    staging: int
    is_batch: bool

    def send(self, controller: Controller) -> Flight:
        """Sends it; see `send_plan`."""
        return send_plan(controller, self.asked, self.memberships, dict(self.refs), self.staging)

    def given(self, flight: Flight) -> Any:
        """What the caller gets of a flight, with refs for what is made; None where its plan could not be sent."""
        found = [_settled(one, flight) for one in self.results]
        return found if self.is_batch else found[0]

    def again(self, controller: Controller, flight: Flight) -> Parcel:
        """The same calls, over the same tensors and the groups as they are now.

        Args:
            controller: This process's controller.
            flight: How they were sent, and failed.

        Raises:
            RetryError: Tensors that they read may hold results already; or a group has other members now.
            UnknownGroupError: A group was destroyed.
            GroupError, FaultError: A derived group can't be formed again.
        """
        name = flight.plan.name
        if flight.is_committed:
            raise RetryError(op=name, detail="all ranks that live hold its result: it failed after that")
        nothing_ran = isinstance(flight.error, (RefusedError, DispatchError))
        if self.is_batch and not nothing_ran and not flight.plan.is_idempotent:
            detail = "some of its calls may have ended well, and have overwritten what they, or calls before them, read"
            raise RetryError(op=name, detail=detail)
        now = {one: controller.as_it_is(one, flight.plan.timeout_s) for one in dict.fromkeys(self.memberships)}
        for before, after in now.items():
            if [one.actor_id for one in before.members] != [one.actor_id for one in after.members]:
                detail = f"group {before.spec.name!r} has other members now: make the calls anew, with their refs"
                raise RetryError(op=name, detail=detail)
        memberships = tuple(now[one] for one in self.memberships)
        asked = [one._replace(roster=group.roster) for one, group in zip(self.asked, memberships, strict=True)]
        return replace(self, asked=tuple(asked), memberships=memberships)


def _settled(result: Any, flight: Flight) -> Any:
    if isinstance(result, list):
        return [made(one, flight) for one in result]
    return made(result, flight)


def made(one: Any, flight: Flight) -> Any:
    """The ref of what a flight makes, for what stands for it; None where its plan was not sent. A ref is itself."""
    if type(one) is not Pending:
        return one
    return flight.made.get((one.request, flight.plan.positions[one.actor_id]))
