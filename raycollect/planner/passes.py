"""The passes of the planner: validate -> lower -> route -> verify per form of a request, then the schedule of all.

Each pass is a function from value to value. The form of a request is the request without the identity of its operands;
its part is computed once and cached.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from raycollect.errors import RefusedError
from raycollect.planner.algorithms import route
from raycollect.planner.ir import Part, Plan, Request
from raycollect.planner.lower import committed, lower
from raycollect.planner.lower_reshard import resharded
from raycollect.planner.membership import Membership
from raycollect.planner.plan_cache import PlanCache
from raycollect.planner.program import STAGING_NBYTES
from raycollect.planner.schedule import schedule
from raycollect.planner.validate import validate
from raycollect.planner.verify import verify
from raycollect.planner.verify_order import verify_order

_TIMEOUT_S = 60.0
"""The time limit of forms, which do not depend on it."""

_STEP_NBYTES = 250
"""The size of a step, or a buffer, of a template."""

_alone = lru_cache(maxsize=256)(Membership.alone)


def plan(requests: Sequence[Request], memberships: Sequence[Membership] = (), *, staging: int = STAGING_NBYTES) -> Plan:
    """Plans the requests of one call, or of a batch.

    Args:
        requests: The requests, bound to ranks, in program order.
        memberships: The group of each; by default that of `Membership.alone`.
        staging: The bytes of staging in which tensors may travel packed; 0: none does.

    Returns:
        A plan; each part is verified against the postcondition of its operation, and the order against the requests.

    Raises:
        RefusedError: A request is invalid, or its backend can't run it; has all reasons.
        InternalError: The plan would be wrong (a bug of ours).
    """
    given = tuple(memberships) or tuple(_alone(request.group) for request in requests)
    parts = [plan_part(request, membership) for request, membership in zip(requests, given, strict=True)]
    planned = schedule(requests, parts, given, staging)
    verify_order(planned)
    return planned


def plan_part(request: Request, membership: Membership | None = None) -> Part:
    """Plans one request by itself; returns the same object for all requests of one form.

    Raises:
        RefusedError: The request is invalid, or the backend can't run it; has all reasons.
        InternalError: The plan would be wrong (a bug of ours).
    """
    operands = tuple(
        (rank, None if src is None else 0, None if dst is None else 0) for rank, src, dst in request.operands
    )
    form = replace(request, operands=operands, timeout_s=_TIMEOUT_S if 0 < request.timeout_s < math.inf else -1.0)
    group = membership or _alone(request.group)
    part = _parts.find((form, group))
    if part is not None:
        return part
    try:
        part = _planned(form, group)
        _parts.add((form, group), [group], part)
        return part
    except RefusedError:
        validate(request)  # raises the error of the request itself
        raise


def _nbytes_of(part: Part) -> int:
    reshard = part.request.reshard
    names = 0 if reshard is None else len(reshard.src) + len(reshard.dst)
    return _STEP_NBYTES * (names + len(part.request.operands)) + sum(
        len(template.boxes) + _STEP_NBYTES * (len(template.buffers) + sum(map(len, template.ways)))
        for template in part.templates
    )


_parts: PlanCache[Part] = PlanCache(1024, 64 << 20, _nbytes_of)


def _planned(form: Request, membership: Membership) -> Part:
    validate(form)
    if form.reshard is not None:  # which proves itself
        return resharded(form, form.reshard, membership)
    part = route(lower(replace(form, inplace=form.inplace and not form.snapshot), membership), membership)
    part = committed(part, form) if form.snapshot else part
    verify(part, bitwise=membership.bitwise)
    return part
