"""Lowers a reshard to a part of a plan: an all-to-all whose messages are boxes that the ranks pack and unpack."""

from __future__ import annotations

from raycollect.core.model import OpKind
from raycollect.errors import InternalError, Violation, wrong_argument
from raycollect.planner.ir import Operands, Part, Request
from raycollect.planner.membership import Membership
from raycollect.planner.reshard.halves import encode_halves
from raycollect.planner.reshard.matching import faults
from raycollect.planner.reshard.proof import problem_of
from raycollect.planner.reshard.request import Reshard
from raycollect.planner.reshard.rounds import halves_of
from raycollect.planner.reshard.routes import routes
from raycollect.planner.template import Buffer, Local, Role, Template, TemplateStep


def reshard_violations(request: Request, reshard: Reshard) -> tuple[Violation, ...]:
    """All violations of a reshard for any tensors: of its layouts, its ranks and its backend."""
    violations = []
    group = request.group
    if OpKind.ALLTOALL.value not in group.ops:
        backend = f"backend {group.backend!r}, which has no alltoall"
        violations.append(
            Violation(kind="unsupported", field="op", found=f"reshard on {backend}", expected="another one")
        )
    if group.memory not in ("", "cpu"):
        violations.append(
            Violation(
                kind="unsupported",
                field="backend",
                found=f"{group.backend!r}, which works on GPUs",
                expected="a group whose backend works in host memory, such as gloo or shm",
            )
        )
    sources = set(reshard.src_ranks)
    if [rank for rank, _, _ in request.operands] != list(reshard.ranks) or any(
        (src is None) is (rank in sources) for rank, src, _ in request.operands
    ):
        violations.append(
            wrong_argument("operands", "not those of the ranks of the layouts", "one per rank of either side")
        )
    return (*violations, *faults(reshard))


def resharded(request: Request, reshard: Reshard, membership: Membership) -> Part:
    """Plans a reshard without violations.

    Raises:
        InternalError: The plan would be wrong (a bug of ours).
    """
    halves = halves_of(reshard, routes(reshard, membership.topology.hosts))
    problem = problem_of(reshard, halves)
    if problem:
        raise InternalError(detail=f"the plan of a reshard over ranks {reshard.ranks} {problem}")
    packed = encode_halves(halves)
    targets = set(reshard.dst_ranks)
    templates = [
        _template(request, operands, packed[operands[0]], takes=operands[0] in targets) for operands in request.operands
    ]
    return Part(request=request, templates=(), parts=()).over(templates)


def _template(request: Request, operands: Operands, half: bytes, *, takes: bool) -> Template:
    """A new tensor replaces a given target that is not to be written, or only after all ranks have their results."""
    _, src, dst = operands
    buffers = [] if src is None else [Buffer(role=Role.OPERAND)]
    given, held = -1 if src is None else 0, -1 if dst is None else len(buffers)
    if held >= 0:
        buffers.append(Buffer(role=Role.OPERAND))
    if takes and (held < 0 or not request.inplace or request.snapshot):
        buffers.append(Buffer(role=Role.LAID, source=held, scratch=request.snapshot and held >= 0))
    taken = result = len(buffers) - 1 if takes else -1
    steps = [TemplateStep(kind=OpKind.ALLTOALL, src=given, dst=taken)]
    if request.snapshot:
        steps.append(TemplateStep(kind=Local.COMMIT))
        if held >= 0:
            steps.append(TemplateStep(kind=Local.COPY, src=taken, dst=held))
            result = held
    return Template(buffers=tuple(buffers), steps=tuple(steps), src=given, dst=taken, result=result, boxes=half)
