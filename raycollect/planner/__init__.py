"""The planner: requests become a verified `Plan`. Pure: no ray, numpy, clock or environment.

`plan(requests, memberships)` validates, lowers, routes and verifies the form of each request, then schedules them.

The functions that plan are loaded on first use: a participant runs programs, and needs no algorithm, cost or proof.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from raycollect.planner.ir import Made as Made
from raycollect.planner.ir import Plan as Plan
from raycollect.planner.ir import Request as Request
from raycollect.planner.ir import Source as Source
from raycollect.planner.membership import Membership as Membership
from raycollect.planner.program import STAGING_NBYTES as STAGING_NBYTES
from raycollect.planner.program import Bundle as Bundle
from raycollect.planner.program import Domain as Domain
from raycollect.planner.program import Program as Program
from raycollect.planner.program import Share as Share
from raycollect.planner.program import Ticket as Ticket
from raycollect.planner.reshard.request import Reshard as Reshard
from raycollect.planner.template import Choice as Choice
from raycollect.planner.template import Local as Local
from raycollect.planner.template import Role as Role
from raycollect.planner.template import TemplateStep as TemplateStep
from raycollect.planner.topology import Link as Link
from raycollect.planner.topology import Topology as Topology
from raycollect.planner.wire import decode_order as decode_order
from raycollect.planner.wire import decode_program as decode_program
from raycollect.planner.wire import encode_order as encode_order
from raycollect.planner.wire import encode_program as encode_program

if TYPE_CHECKING:
    from raycollect.planner.passes import plan as plan
    from raycollect.planner.passes import plan_part as plan_part
    from raycollect.planner.prediction import Cluster as Cluster
    from raycollect.planner.prediction import Prediction as Prediction
    from raycollect.planner.prediction import predict as predict
    from raycollect.planner.validate import complete_operands as complete_operands
else:  # otherwise type checkers would accept any name
    _HOMES = {
        **dict.fromkeys(("plan", "plan_part"), "passes"),
        **dict.fromkeys(("Cluster", "Prediction", "predict"), "prediction"),
        "complete_operands": "validate",
    }

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
        return value
