"""Puts the requests of a batch into one order that all participants keep, and bundles equal ones.

Requests are taken in program order. A request runs after its dependencies: requests whose output it takes, and requests
that share an operand with it which one of the two writes. It joins an earlier bundle of its own form if its
dependencies allow that; their tensors may then travel packed. The order is one list for the whole plan, and every
participant runs its share of it from the front. So waits form no cycle: of all launches that have not ended, the first
one can always go on.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from raycollect.planner.ir import Made, Part, Plan, Request, Source, Together
from raycollect.planner.membership import Membership
from raycollect.planner.template import NATIVE


def schedule(
    requests: Sequence[Request], parts: Sequence[Part], memberships: Sequence[Membership], staging: int
) -> Plan:
    """Makes the plan of a batch; parts of one form must be the same object."""
    participants, agreement = _participants(parts, memberships)
    order = _bundled(requests, parts)
    at_agreement = [
        agreement is membership and len(part.ranks) == len(participants)
        for part, membership in zip(parts, memberships, strict=True)
    ]
    together, width = _numbered(order, parts, at_agreement)
    alone = [0] * len(parts)
    if width > 1:
        *alone, width = accumulate((part.width for part in parts), initial=width)
    first_rounds = _rounds(requests, parts)
    return Plan(
        requests=tuple(requests),
        parts=tuple(parts),
        memberships=tuple(memberships),
        participants=participants,
        order=together,
        alone=tuple(alone),
        first_rounds=first_rounds,
        rounds=max((first + part.rounds for first, part in zip(first_rounds, parts, strict=True)), default=1),
        agreement=agreement,
        width=width,
        staging=staging,
    )


def _participants(
    parts: Sequence[Part], memberships: Sequence[Membership]
) -> tuple[tuple[str, ...], Membership | None]:
    """All participants, and a group that has all of them; in its order of ranks, else in that of the requests."""
    names: dict[str, None] = {}
    seen = set[tuple[int, int]]()
    for part, membership in zip(parts, memberships, strict=True):
        if (id(part), id(membership)) not in seen:
            seen.add((id(part), id(membership)))
            names.update(dict.fromkeys(membership.participants[rank] for rank in part.ranks))
    for membership in dict.fromkeys(memberships):
        ranks = [membership.rank_of(name) for name in names]
        if min(ranks) >= 0:
            return tuple(membership.participants[rank] for rank in sorted(ranks)), membership
    return tuple(names), None


def dependencies(requests: Sequence[Request], parts: Sequence[Part]) -> list[set[int]]:
    """For each request, the earlier requests on which it depends directly."""
    written: dict[Source, int] = {}  # source -> the last request that writes it
    read: dict[Source, list[int]] = {}  # source -> the requests that have read it since
    before: list[set[int]] = []
    for number, (request, part) in enumerate(zip(requests, parts, strict=True)):
        touched = part.touches(request)
        after = set[int]()
        for source, writes in touched:
            if isinstance(source, Made):
                after.add(source.request)
            if source in written:
                after.add(written[source])
            if writes and source in read:
                after.update(read[source])
        for source, writes in touched:
            if writes:
                written[source], read[source] = number, []
            else:
                read.setdefault(source, []).append(number)
        before.append(after)
    return before


def _bundled(requests: Sequence[Request], parts: Sequence[Part]) -> list[list[int]]:
    order: list[list[int]] = []
    bundle_of: list[int] = []  # for each request
    latest: dict[int, list[int]] = {}  # form -> its bundles
    for number, (part, before) in enumerate(zip(parts, dependencies(requests, parts), strict=True)):
        after = max((bundle_of[earlier] for earlier in before), default=-1)
        at = next((bundle for bundle in latest.get(id(part), ()) if bundle > after), len(order))
        if at == len(order):
            order.append([])
            latest.setdefault(id(part), []).append(at)
        order[at].append(number)
        bundle_of.append(at)
    return order


def _numbered(
    order: Sequence[Sequence[int]], parts: Sequence[Part], at_agreement: Sequence[bool]
) -> tuple[tuple[Together, ...], int]:
    """Numbers the launches; consecutive ones over the same ranks of the same group become one."""
    together = []
    width = 1
    open_: tuple[object, int] | None = None  # the ranks of the newest launch, and its number
    begun = False  # whether a launch after that of the agreement was begun
    for requests in order:
        part = parts[requests[0]]
        who = (part.request.group.group_id, part.ranks)
        if len(part.choices) == 1 and part.width == 1:
            if at_agreement[requests[0]] and not begun:
                base = 0
            elif open_ is not None and open_[0] == who:
                base = open_[1]
            else:
                base, width, begun = width, width + 1, True
                open_ = (who, base)
            together.append(Together(requests=tuple(requests), base=(base,)))
            continue
        is_open = at_agreement[requests[0]] and not begun
        bases = [0 if is_open and choice.name == NATIVE.name else width for choice in part.choices]
        together.append(Together(requests=tuple(requests), base=tuple(bases)))
        width, begun, open_ = width + part.width, True, None
    return tuple(together), width


def _rounds(requests: Sequence[Request], parts: Sequence[Part]) -> tuple[int, ...]:
    """The first round of agreement of each request: when the shapes of all that it uses are known."""
    learned: list[int] = []  # for each request, the last round that its output's shapes need
    first_rounds = []
    for request, part in zip(requests, parts, strict=True):
        sources = [source for _, src, dst in request.operands for source in (src, dst) if isinstance(source, Made)]
        first = max((learned[source.request] for source in sources), default=0)
        first_rounds.append(first)
        learned.append(first + part.rounds - 1)
    return tuple(first_rounds)
