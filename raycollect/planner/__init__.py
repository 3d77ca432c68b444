"""The planner: a request becomes a verified `Plan`. Pure: no ray, numpy, clock or environment.

`plan(request)` runs the passes in order: validate -> lower -> verify.
"""

from __future__ import annotations

from raycollect.planner.ir import Buffer, Plan, Program, Request, Role, Step, Template, Ticket
from raycollect.planner.passes import SUBSTITUTES, brought, plan
from raycollect.planner.wire import decode_order, decode_program, encode_order, encode_program

__all__ = [
    "SUBSTITUTES",
    "Buffer",
    "Plan",
    "Program",
    "Request",
    "Role",
    "Step",
    "Template",
    "Ticket",
    "brought",
    "decode_order",
    "decode_program",
    "encode_order",
    "encode_program",
    "plan",
]
