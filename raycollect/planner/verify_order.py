"""Proves, before it is sent, that all participants can keep the order of a plan.

It proves three things. Requests that depend on each other run in program order. No rank waits forever: all participants
begin launches in one ascending order of numbers, and a number belongs to one set of ranks, so that the lowest launch
under way can always go on. And no request is left out or run twice.
"""

from __future__ import annotations

from collections.abc import Sequence

from raycollect.errors import InternalError
from raycollect.planner.ir import Made, Part, Plan, Source
from raycollect.planner.membership import Membership


def verify_order(plan: Plan) -> None:
    """Proves that the order keeps dependencies, and that waits form no cycle.

    It looks at each operand of each request once, and trusts only the order itself of the schedule's results.

    Raises:
        InternalError: The order does not hold.
    """
    problem = (
        _participants_problem(plan)
        or _requests_problem(plan)
        or _dependency_problem(plan)
        or _launch_problem(plan)
        or _rounds_problem(plan)
    )
    if problem:
        raise InternalError(detail=f"the order of a plan of {len(plan.requests)} requests {problem}")


def _participants_problem(plan: Plan) -> str:
    counts = {len(column) for column in (plan.requests, plan.parts, plan.memberships, plan.alone, plan.first_rounds)}
    if len(counts) > 1:
        return f"has columns of {sorted(counts)} rows"
    places = {participant: at for at, participant in enumerate(plan.participants)}
    if len(places) < len(plan.participants):
        return "has a participant twice"
    for part, membership in _distinct(plan):
        strangers = [rank for rank in part.ranks if membership.participants[rank] not in places]
        if strangers:
            return f"lacks the participants of ranks {strangers} of group {membership.spec.name!r}"
    if plan.agreement is not None and any(plan.agreement.rank_of(participant) < 0 for participant in plan.participants):
        return f"has participants that are no members of the consistency check's group {plan.agreement.spec.name!r}"
    return ""


def _distinct(plan: Plan) -> list[tuple[Part, Membership]]:
    distinct = {
        (id(part), id(membership)): (part, membership)
        for part, membership in zip(plan.parts, plan.memberships, strict=True)
    }
    return list(distinct.values())


def _requests_problem(plan: Plan) -> str:
    seen = [number for together in plan.order for number in together.requests]
    if sorted(seen) != list(range(len(plan.requests))):
        return f"has requests {sorted(seen)} where each is meant once"
    for together in plan.order:
        if not together.requests or list(together.requests) != sorted(together.requests):
            return f"has requests {together.requests} together, not in their order"
        if len({(id(plan.parts[number]), id(plan.memberships[number])) for number in together.requests}) > 1:
            return f"has requests {together.requests} of several forms together"
        if len(together.base) != len(plan.parts[together.requests[0]].choices):
            return f"has {len(together.base)} places for the algorithms of request {together.requests[0]}"
    return ""


def _dependency_problem(plan: Plan) -> str:
    place = {number: at for at, together in enumerate(plan.order) for number in together.requests}
    used, written = dict[Source, int](), dict[Source, int]()  # source -> the last place that uses it, or writes it
    for number, (request, part) in enumerate(zip(plan.requests, plan.parts, strict=True)):
        at, touched = place[number], part.touches(request)
        for source, writes in touched:
            if type(source) is Made:
                problem = _made_late(plan, number, source.request, place)
                if problem:
                    return problem
            if at <= (used if writes else written).get(source, -1):
                return f"has request {number} not after those before it that use the same memory"
        for source, writes in touched:
            for last in (used, written) if writes else (used,):
                last[source] = max(last.get(source, -1), at)
    return ""


def _made_late(plan: Plan, number: int, maker: int, place: dict[int, int]) -> str:
    if not 0 <= maker < number:
        return f"has request {number} use what request {maker} makes"
    if place[maker] >= place[number]:
        return f"has request {number} not after request {maker}, whose output it uses"
    if plan.first_rounds[number] < plan.first_rounds[maker] + plan.parts[maker].rounds - 1:
        return f"brings request {number} to the consistency check before the shapes of request {maker} are known"
    return ""


def _launch_problem(plan: Plan) -> str:
    highest, shared = 0, None  # the newest launch, and the ranks that may go on using it
    for together in plan.order:
        part, membership = plan.parts[together.requests[0]], plan.memberships[together.requests[0]]
        who = (part.request.group.group_id, part.ranks) if len(part.choices) == 1 and part.width == 1 else None
        at_agreement = plan.agreement is membership and _is_whole(part, membership, plan.participants)
        for base, choice in zip(together.base, part.choices, strict=True):
            if base == 0 and highest == 0 and at_agreement and choice.width == 1:
                continue
            if base > highest or (base == highest > 0 and who is not None and who == shared):
                continue
            return f"has launch {base} for requests {together.requests} after launch {highest}"
        last = max(base + choice.width - 1 for base, choice in zip(together.base, part.choices, strict=True))
        if last > highest:
            highest, shared = last, who
    if highest >= plan.width:
        return f"has launch {highest} of {plan.width}"
    return _sequential_launch_problem(plan)


def _sequential_launch_problem(plan: Plan) -> str:
    if plan.width == 1 and not any(plan.alone):
        # The checks above have shown that all requests can run in the launch of the agreement, if it is the only one.
        return "" if all(part.width == 1 for part in plan.parts) else "has launches that are not numbered"
    begin = 1
    for number, (base, part) in enumerate(zip(plan.alone, plan.parts, strict=True)):
        if base < begin:
            return f"has launch {base} for request {number} alone, where {begin} is the first one free"
        begin = base + part.width
    return f"has launch {begin - 1} of {plan.width}" if begin > plan.width else ""


def _is_whole(part: Part, membership: Membership, participants: Sequence[str]) -> bool:
    there = {membership.participants[rank] for rank in part.ranks}
    return len(part.ranks) == len(participants) and there == set(participants)


def _rounds_problem(plan: Plan) -> str:
    needed = max((first + part.rounds for first, part in zip(plan.first_rounds, plan.parts, strict=True)), default=1)
    return f"needs {needed} rounds of the consistency check and has {plan.rounds}" if needed > plan.rounds else ""
