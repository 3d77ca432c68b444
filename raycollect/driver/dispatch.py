"""Plans calls and sends each participant its part of the plan in one message.

One lock spans all submits of a plan, so every participant's queue has the plans of this controller in the same order
(P2). A submit that fails in the middle aborts the plan on those that have it. No signal handler runs before all have
their part (`core.signals`): an exception of a handler comes up where there is no plan yet, or where it was sent to all.

The message is a letter in the controller's mailbox, or an `Order` by the channel. It says behind which call of the
actor the plan is; where that can't be known, or the actor's methods overlap, the plan is an actor task, which takes its
place in the actor's queue. So is a plan that makes something, as its refs are the task's returns. So is one whose
operand's method Ray may run again, after an exception or in a new process of the actor: that ref is an argument of the
task, so that Ray begins the task, and the calls behind it, after the last try.
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
from raycollect.core.signals import Allowed
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
        requests: The calls.
        staging: As for `prepare`.
        groups: The group of each call.
        programs: The encoded program of each participant.
        sources: The places of the refs whose keys are sent along.
        outputs: The requests with an output there, in the order of the task's returns.
        makes: Whether there are outputs.
        fits_channel: Whether it may go by the channel: it has no outputs, and fits into a frame.
        limit_s: How long the plan may take, waits for methods included; None: its callers gave no limit.
    """

    plan: Plan
    requests: tuple[RequestKey, ...]
    staging: int
    groups: tuple[Membership, ...]
    programs: tuple[bytes, ...]
    sources: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    makes: bool
    fits_channel: bool
    limit_s: float | None = None

    @property
    def nbytes(self) -> int:
        """About the bytes of memory that it takes: several times those of its programs."""
        return 8 * sum(map(len, self.programs))


def prepare(requests: tuple[RequestKey, ...], staging: int, keys: Sequence[Key]) -> DispatchPlan:
    """Plans calls and encodes the programs; cached for loops that repeat the same calls, over any refs.

    Args:
        requests: The calls.
        staging: How many bytes a participant may use for packing small tensors.
        keys: Those of the refs, by place, for errors.

    Raises:
        RefusedError: The calls can't be planned; with every reason.
    """
    form = requests, staging
    prepared = _prepared.find(form)
    if prepared is None:
        try:
            with Allowed():  # it may take long, and nothing has begun
                prepared = _prepare(requests, staging)
        except RefusedError as exc:
            raise explained(exc, requests, keys) from None
        _prepared.add(form, prepared.groups, prepared)
    return prepared


_prepared: PlanCache[DispatchPlan] = PlanCache(256, 64 << 20, lambda prepared: prepared.nbytes)


def _prepare(requests: tuple[RequestKey, ...], staging: int) -> DispatchPlan:
    groups = tuple([request.group for request in requests])
    try:
        planned = plan([request.request() for request in requests], groups, staging=staging)
    except RefusedError:
        raise _refusal(requests) from None
    positions = range(len(planned.participants))
    programs = tuple(encode_program(planned.program(at)) for at in positions)
    sources: Any = tuple(planned.sources(at) for at in positions)  # places of refs, as in `RequestKey`
    outputs = tuple(planned.outputs(at) for at in positions)
    nbytes = max(len(program) + len(keys) * KEY_NBYTES for program, keys in zip(programs, sources, strict=True))
    is_limited = all(request.is_limited for request in requests)
    return DispatchPlan(
        plan=planned,
        requests=requests,
        staging=staging,
        groups=groups,
        programs=programs,
        sources=sources,
        outputs=outputs,
        makes=any(outputs),
        fits_channel=nbytes <= ORDER_NBYTES and not any(outputs),
        limit_s=max(request.timeout_s for request in requests) if is_limited else None,
    )


def _refusal(requests: Sequence[RequestKey]) -> RefusedError:
    violations: list[Violation] = []
    for number, request in enumerate(requests):
        try:
            plan_part(request.request(), request.group)
        except RefusedError as exc:
            if len(requests) == 1:
                return strip_traceback(exc)
            violations += [replace(violation, call=number) for violation in exc.violations]
    return refusal("batch", "", tuple(violations))


def explained(error: RefusedError, requests: Sequence[RequestKey], keys: Sequence[Key]) -> RefusedError:
    """Adds what the planner does not know: group names, actors and refs."""
    violations = []
    for violation in error.violations:
        request = requests[max(violation.call, 0)]
        violations.append(add_operand(violation, request.group, request.operands, keys))
    names = dict.fromkeys(request.group.spec.name for request in requests)
    return refusal(error.op, ", ".join(names), tuple(violations))


class Submission(NamedTuple):
    """Calls that go into one plan: a call, a batch, or one of these again.

    Attributes:
        prepared: The plan.
        refs: The operands, by the places that the programs name.
        results: The return value of its calls, with a `Pending` for each ref that the plan makes.
    """

    prepared: DispatchPlan
    refs: Mapping[Key, Any]
    results: Any = None

    def again(self, controller: Controller, tracker: PlanTracker) -> Submission:
        """The same calls, over the same tensors and the groups as they are now, after `tracker` failed."""
        name, before = tracker.plan.name, self.prepared
        if tracker.is_committed:
            raise RetryError(op=name, detail="all ranks that live hold its result: use that")
        nothing_ran = isinstance(tracker.error, (RefusedError, DispatchError))
        if len(before.requests) > 1 and not nothing_ran and not tracker.plan.is_idempotent:
            detail = "some of its calls may have ended well, and have overwritten what they, or calls before them, read"
            raise RetryError(op=name, detail=detail)
        now = {group: controller.groups.as_it_is(group, tracker.plan.timeout_s) for group in tracker.groups}
        for group, current in now.items():
            if group.participants != current.participants:
                detail = f"group {group.spec.name!r} has other members now: make the calls again, with their refs"
                raise RetryError(op=name, detail=detail)
        requests = tuple([request._replace(group=now[request.group]) for request in before.requests])
        return self._replace(prepared=prepare(requests, before.staging, tuple(self.refs)))


def made_by(tracker: PlanTracker, result: Any) -> Any:
    """A return value with refs in place of each `Pending`; None for those of an unsent part of the plan."""
    if isinstance(result, list):
        return [made_by(tracker, item) for item in result]
    if type(result) is not Pending:
        return result
    return tracker.outputs.get((result.request, tracker.plan.positions[result.actor_id]))


def send(
    controller: Controller,
    prepared: DispatchPlan,
    refs: Mapping[Key, Any],
    results: Any = None,
    *,
    is_awaited: bool = False,
    deadline: Deadline = NEVER,
) -> tuple[PlanTracker, Any]:
    """Sends each participant its part of a `Submission`'s plan, inside of `Deferred`.

    Args:
        controller: The controller.
        prepared: The plan.
        refs: The operands.
        results: The return value of its calls.
        is_awaited: Whether the calling thread waits for the plan now, and so looks at its letters itself.
        deadline: That of a call that began before; by default the calls' own limits count from now.

    Returns:
        The plan under way, and the results with refs in place of each `Pending`.
    """
    planned, plans = prepared.plan, controller.plans
    if deadline is NEVER and prepared.limit_s is not None:
        deadline = Deadline.after(prepared.limit_s)
    while True:
        revision, peers = plans.revision, controller.groups.links(prepared.groups, planned.participants)
        # All locks at once: otherwise two calls of another thread, of which the second needs the result of the first,
        # could come behind the plan on one actor and before it on another. Before `dispatching`: a thread that holds
        # one of them may make a call of the driver, in a finalizer, which waits for `dispatching`.
        with AllHeld(list(filter(None, map(_CALLS, peers)))), plans.dispatching:
            tracker = PlanTracker(next(plans.numbers), planned, prepared.groups, refs, deadline)
            plans.register(tracker)
            if plans.revision is not revision:  # the thread that ended a group meanwhile has not seen this plan
                plans.remove(tracker)
                continue
            _send_parts(controller, prepared, tracker, peers, is_awaited=is_awaited)
            return tracker, made_by(tracker, results) if prepared.makes else results


def _send_parts(
    controller: Controller,
    prepared: DispatchPlan,
    tracker: PlanTracker,
    peers: Sequence[ParticipantLink],
    *,
    is_awaited: bool,
) -> None:
    """Sends each participant its part; if one can't be sent, the plan ends for all."""
    keys, mailbox = tracker.keys, controller.mailbox
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
        refs: Sequence[Any] = ()
        try:
            if behind:
                refs = peer.submit_behind(order, len(outputs), behind)
            elif prepared.fits_channel:
                peer.submit_in_order(order, tracker, at, letters)
            else:
                refs = peer.submit(order, len(outputs))
        except Exception as exc:  # noqa: BLE001 - any of Ray's: too many pending calls, a dead actor, a bug
            error = peer.unsent(exc, tracker.member(at).rank)
            controller.plans.fail(tracker, error, unsent=range(at, len(peers)))
            break
        peer.last_seq = tracker.seq
        if outputs:
            tracker.outputs.update(zip(((number, at) for number in outputs), refs, strict=True))
