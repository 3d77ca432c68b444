"""The planner: requests become a verified `Plan`. Pure: no ray, numpy, clock or environment.

`plan(requests, rosters)` validates, lowers, routes and verifies the form of each request, then schedules all of them.
"""

from __future__ import annotations

from raycollect.planner.algorithms import ALGORITHMS, STAND_INS
from raycollect.planner.cost import Cost, Layout, Line, native
from raycollect.planner.ir import GpuLists, Made, Part, Plan, Request, Source, Together
from raycollect.planner.listed import BACKEND as LISTS_BACKEND
from raycollect.planner.lower import SUBSTITUTES
from raycollect.planner.passes import plan, plan_part
from raycollect.planner.predict import Cluster, Prediction, predict
from raycollect.planner.program import STAGING_NBYTES, Bundle, Domain, Program, Share, Task, Ticket
from raycollect.planner.reshard.request import Reshard
from raycollect.planner.template import CROSSINGS, Buffer, Choice, Local, Role, Step, Template
from raycollect.planner.topology import BETWEEN, INSIDE, Inner, Link, Roster, Topology
from raycollect.planner.validate import brought, root_parameter
from raycollect.planner.wire import decode_order, decode_program, encode_order, encode_program

__all__ = [
    "ALGORITHMS",
    "BETWEEN",
    "CROSSINGS",
    "INSIDE",
    "LISTS_BACKEND",
    "STAGING_NBYTES",
    "STAND_INS",
    "SUBSTITUTES",
    "Buffer",
    "Bundle",
    "Choice",
    "Cluster",
    "Cost",
    "Domain",
    "GpuLists",
    "Inner",
    "Layout",
    "Line",
    "Link",
    "Local",
    "Made",
    "Part",
    "Plan",
    "Prediction",
    "Program",
    "Request",
    "Reshard",
    "Role",
    "Roster",
    "Share",
    "Source",
    "Step",
    "Task",
    "Template",
    "Ticket",
    "Together",
    "Topology",
    "brought",
    "decode_order",
    "decode_program",
    "encode_order",
    "encode_program",
    "native",
    "plan",
    "root_parameter",
    "plan_part",
    "predict",
]
