"""The planner: requests become a verified `Plan`. Pure: no ray, numpy, clock or environment.

`plan(requests, memberships)` validates, lowers, routes and verifies the form of each request, then schedules them.

Names are loaded on first use: a participant runs programs, and needs no algorithm, cost or proof for it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raycollect.planner.ir import Made as Made
    from raycollect.planner.ir import Plan as Plan
    from raycollect.planner.ir import Request as Request
    from raycollect.planner.ir import Source as Source
    from raycollect.planner.membership import Membership as Membership
    from raycollect.planner.passes import plan as plan
    from raycollect.planner.passes import plan_part as plan_part
    from raycollect.planner.prediction import Cluster as Cluster
    from raycollect.planner.prediction import Prediction as Prediction
    from raycollect.planner.prediction import predict as predict
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
    from raycollect.planner.validate import brought as brought
    from raycollect.planner.wire import decode_order as decode_order
    from raycollect.planner.wire import decode_program as decode_program
    from raycollect.planner.wire import encode_order as encode_order
    from raycollect.planner.wire import encode_program as encode_program

_NAMES = {
    "ir": "Made Plan Request Source",
    "membership": "Membership",
    "passes": "plan plan_part",
    "prediction": "Cluster Prediction predict",
    "program": "STAGING_NBYTES Bundle Domain Program Share Ticket",
    "reshard.request": "Reshard",
    "template": "Choice Local Role TemplateStep",
    "topology": "Link Topology",
    "validate": "brought",
    "wire": "decode_order decode_program encode_order encode_program",
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}
"""Name -> the module it lives in."""

if not TYPE_CHECKING:  # else it would hide names that are not there from type checkers

    def __getattr__(name: str) -> Any:
        home = _HOMES.get(name)
        if home is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(f"{__name__}.{home}"), name)
        return value
