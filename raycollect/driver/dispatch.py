"""Plans calls and sends each participant its part of the plan in one message.

One lock spans all submits of a plan, so every participant's queue has the plans of this controller in the same order
(P2). A submit that fails in the middle aborts the plan on those that have it. No signal handler runs before all have
their part (`core.signals`): an exception of a handler comes up where there is no plan yet, or where it was sent to all.

The message is a letter in the controller's mailbox, or an `Order` by the channel. It says behind which call of the
actor the plan is; where that can't be known, or the actor's methods overlap, the plan is an actor task, which takes its
place in the actor's queue. So is a plan that makes something, as its refs are the task's returns. So is one whose
operand's method Ray may run again, after an exception: that ref is an argument of the task, so that Ray begins it, and
what is behind it, after the last try.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, NamedTuple

from raycollect.channel.mailbox import Letters
from raycollect.channel.protocol import MAX_FRAME_NBYTES
from raycollect.core.deadline import NEVER, Deadline
from raycollect.core.model import KEY_NBYTES, Key, OpKind, ReduceOp
from raycollect.core.signals import Allowed, Deferred
from raycollect.driver.controller import Controller
from raycollect.driver.error_location import add_operand
from raycollect.driver.participant_link import ParticipantLink
from raycollect.driver.pending import Pending
from raycollect.driver.plan_tracker import PlanTracker
from raycollect.errors import (
    DispatchError,
    RefusedError,
    RetryError,
    Violation,
    refusal,
    strip_traceback,
)
from raycollect.planner import (
    Membership,
    Plan,
    Request,
    Reshard,
    Ticket,
    encode_order,
    encode_program,
    plan,
    plan_part,
)
from raycollect.planner.ir import Operands
from raycollect.planner.plan_cache import PlanCache
from raycollect.ray_bridge.submitted_calls import AllHeld, unsettled_retries

_CALLS = attrgetter("calls")

ORDER_NBYTES = MAX_FRAME_NBYTES - 256  # the longest program, with its keys, that goes by the channel


class RequestKey(NamedTuple):
    """One call, as far as its plan depends on it: a `Request` that is cheap to make and to look up.

    A source in `operands` is the place of a ref among the distinct refs of all calls, or a `Made`.
    """

    group: Membership
    kind: OpKind
    operands: tuple[Operands, ...]
    op: ReduceOp | None
    root: int
    peer: int
    inplace: bool
    timeout_s: float
    snapshot: bool = False
    reshard: Reshard | None = None
    is_limited: bool = False  # whether the caller gave `timeout_s`, which then bounds the whole call

    @property
    def name(self) -> str:
        """The operation, for messages."""
        return self.kind.value if self.reshard is None else "reshard"

    def request(self) -> Request:
        """The same as a `Request`."""
        fields = {**self._asdict(), "group": self.group.spec}
        del fields["is_limited"]
        return Request(**fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchPlan:
    """A plan with all that dispatching needs, by position.

    Attributes:
        groups: The group of each call.
        programs: What each participant gets, encoded.
        sources: The places of the refs whose keys are sent along.
        outputs: The requests that make something there, in the order of the task's returns.
        fits_channel: Whether it may go by the channel: it makes nothing, and fits into a frame.
        limit_s: How long the plan may take from now on, waits for methods included; None: its callers did not say.
    """

    plan: Plan
    groups: tuple[Membership, ...]
    programs: tuple[bytes, ...]
    sources: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    fits_channel: bool
    limit_s: float | None = None

    @property
    def nbytes(self) -> int:
        """About the bytes of memory that it takes: several times those of its programs."""
        return 8 * sum(map(len, self.programs))


def prepare(asked: tuple[RequestKey, ...], staging: int) -> DispatchPlan:
    """Plans calls and encodes the programs; cached for loops that repeat the same calls, over any refs."""
    key = asked, staging
    found = _prepared.find(key)
    if found is None:
        found = _prepare(asked, staging)
        _prepared.add(key, found.groups, found)
    return found


_prepared: PlanCache[DispatchPlan] = PlanCache(256, 64 << 20, lambda one: one.nbytes)


def _prepare(asked: tuple[RequestKey, ...], staging: int) -> DispatchPlan:
    try:
        planned = plan([one.request() for one in asked], [one.group for one in asked], staging=staging)
    except RefusedError:
        raise _refusal(asked) from None
    positions = range(len(planned.participants))
    programs = tuple(encode_program(planned.program(at)) for at in positions)
    sources: Any = tuple(planned.sources(at) for at in positions)  # places of refs, as in `RequestKey`
    outputs = tuple(planned.outputs(at) for at in positions)
    nbytes = max(len(one) + len(keys) * KEY_NBYTES for one, keys in zip(programs, sources, strict=True))
    return DispatchPlan(
        plan=planned,
        groups=tuple([one.group for one in asked]),
        programs=programs,
        sources=sources,
        outputs=outputs,
        fits_channel=nbytes <= ORDER_NBYTES and not any(outputs),
        limit_s=max(one.timeout_s for one in asked) if all(one.is_limited for one in asked) else None,
    )


def _refusal(asked: Sequence[RequestKey]) -> RefusedError:
    found: list[Violation] = []
    for number, one in enumerate(asked):
        try:
            plan_part(one.request(), one.group)
        except RefusedError as exc:
            if len(asked) == 1:
                return strip_traceback(exc)
            found += [replace(wrong, call=number) for wrong in exc.violations]
    return refusal("batch", "", tuple(found))


def send_plan(
    controller: Controller,
    asked: tuple[RequestKey, ...],
    refs: dict[Key, Any],
    staging: int,
    deadline: Deadline = NEVER,
    *,
    is_awaited: bool = False,
) -> PlanTracker:
    """Plans calls and sends each participant its part, in one message each; `deadline` is that of a single call."""
    try:
        with Allowed():  # it may take long, and nothing has begun
            prepared = prepare(asked, staging)
    except RefusedError as exc:
        raise explained(exc, asked, tuple(refs)) from None
    with Deferred():
        return send_prepared(controller, prepared, refs, deadline=deadline, is_awaited=is_awaited)


def send_prepared(
    controller: Controller,
    prepared: DispatchPlan,
    refs: dict[Key, Any],
    *,
    is_awaited: bool = False,
    deadline: Deadline = NEVER,
) -> PlanTracker:
    """Sends each participant its part of a plan over these refs, inside of `Deferred`.

    Args:
        controller: The controller.
        prepared: The plan.
        refs: The operands, by the places that the programs name.
        is_awaited: Whether the calling thread waits for the plan now, and so looks at its letters itself.
        deadline: That of a call that began before; by default the calls' own limits count from now.
    """
    planned, plans = prepared.plan, controller.plans
    if deadline is NEVER and prepared.limit_s is not None:
        deadline = Deadline.after(prepared.limit_s)
    while True:
        revision, peers = plans.revision, controller.groups.links(prepared.groups, planned.participants)
        # All at once: another thread's call, of which one more may need the result, would else come behind the plan
        # on one actor, and that call before it on another. First: who has one of them may make a call of ours, in a
        # finalizer, and wait for the other lock.
        with AllHeld(list(filter(None, map(_CALLS, peers)))), plans.dispatching:
            tracker = PlanTracker(next(plans.numbers), planned, prepared.groups, refs, deadline)
            plans.register(tracker)
            if plans.revision is not revision:  # who ended a group meanwhile has not seen this plan
                plans.remove(tracker)
                continue
            _send_parts(controller, prepared, tracker, peers, is_awaited=is_awaited)
            return tracker


def _send_parts(
    controller: Controller,
    prepared: DispatchPlan,
    tracker: PlanTracker,
    peers: Sequence[ParticipantLink],
    *,
    is_awaited: bool,
) -> None:
    """Sends each participant its part; if one can't be sent, the plan ends for all."""
    keys, mailbox = tuple(tracker.refs), controller.mailbox
    letters = None if mailbox is None else Letters(mailbox, tracker.look if is_awaited else None)
    if is_awaited:
        tracker.letters = letters
    retried = unsettled_retries(tracker.refs)
    for at, peer in enumerate(peers):
        outputs = prepared.outputs[at]
        ticket = Ticket(tracker.seq, peer.last_seq)
        own = list(map(keys.__getitem__, prepared.sources[at]))
        order = encode_order(ticket, own, prepared.programs[at])
        behind = [retried[key] for key in own if key in retried] if retried else []
        made: Sequence[Any] = ()
        try:
            if behind:
                made = peer.submit_behind(order, len(outputs), behind)
            elif prepared.fits_channel:
                peer.submit_in_order(order, tracker, at, letters)
            else:
                made = peer.submit(order, len(outputs))
        except Exception as exc:  # noqa: BLE001 - whatever Ray raises: too many pending calls, a dead actor, its own bugs
            error = peer.unsent(exc, tracker.member(at).rank)
            controller.plans.send(tracker, tracker.fail(error, unsent=range(at, len(peers))))
            break
        peer.last_seq = tracker.seq
        if outputs:
            tracker.made.update(zip(((number, at) for number in outputs), made, strict=True))


def explained(error: RefusedError, asked: Sequence[RequestKey], keys: Sequence[Key]) -> RefusedError:
    """Adds what the planner does not know: group names, actors and refs."""
    found = []
    for one in error.violations:
        call = asked[max(one.call, 0)]
        found.append(add_operand(one, call.group, call.operands, keys))
    names = dict.fromkeys(call.group.spec.name for call in asked)
    return refusal(error.op, ", ".join(names), tuple(found))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Submission:
    """Calls that go into one plan; `results` has a `Pending` for each ref that the plan makes."""

    asked: tuple[RequestKey, ...]
    refs: Mapping[Key, Any]
    results: tuple[Any, ...]
    staging: int
    is_batch: bool

    def send(self, controller: Controller, deadline: Deadline = NEVER, *, is_awaited: bool = False) -> PlanTracker:
        """Sends it (`send_plan`)."""
        return send_plan(controller, self.asked, dict(self.refs), self.staging, deadline, is_awaited=is_awaited)

    def given(self, tracker: PlanTracker) -> Any:
        """What the caller gets, with refs for what is made; None for those where the plan could not be sent."""
        found = [all_made(result, tracker) for result in self.results]
        return found if self.is_batch else found[0]

    def again(self, controller: Controller, tracker: PlanTracker) -> Submission:
        """The same calls, over the same tensors and the groups as they are now, after `tracker` failed."""
        name = tracker.plan.name
        if tracker.is_committed:
            raise RetryError(op=name, detail="all ranks that live hold its result: use that")
        nothing_ran = isinstance(tracker.error, (RefusedError, DispatchError))
        if self.is_batch and not nothing_ran and not tracker.plan.is_idempotent:
            detail = "some of its calls may have ended well, and have overwritten what they, or calls before them, read"
            raise RetryError(op=name, detail=detail)
        now = {one: controller.groups.as_it_is(one, tracker.plan.timeout_s) for one in tracker.groups}
        for before, after in now.items():
            if [one.actor_id for one in before.members] != [one.actor_id for one in after.members]:
                detail = f"group {before.spec.name!r} has other members now: make the calls again, with their refs"
                raise RetryError(op=name, detail=detail)
        return replace(self, asked=tuple([one._replace(group=now[one.group]) for one in self.asked]))


def all_made(result: Any, tracker: PlanTracker) -> Any:
    """What a call returns, with the refs of what its plan makes."""
    return [made(one, tracker) for one in result] if isinstance(result, list) else made(result, tracker)


def made(one: Any, tracker: PlanTracker) -> Any:
    """The ref of what a plan makes, for its placeholder; None where the plan was not sent. A ref is itself."""
    if type(one) is not Pending:
        return one
    return tracker.made.get((one.request, tracker.plan.positions[one.actor_id]))
