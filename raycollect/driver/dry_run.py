"""`plan`: explains a call or a batch without running it.

The calls are recorded, not sent. The handles of their refs describe the tensors; from these follows what the ranks
would exchange in the agreement, which is judged by the same rules.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ray.exceptions import RayError

from raycollect.backends import folds
from raycollect.core.model import TENSOR, Key, Structure, TensorInfo
from raycollect.core.operations import PIECES
from raycollect.driver import held_values
from raycollect.driver.batch import record
from raycollect.driver.controller import Controller
from raycollect.driver.dispatch import explained, prepare
from raycollect.engine import agreement
from raycollect.engine.agreement import Arrival, Side, Spec
from raycollect.errors import BatchError, RefusedError, Violation, refusal
from raycollect.planner import Made, Plan, Role, Source
from raycollect.planner.explain import explain
from raycollect.planner.report import Explanation
from raycollect.planner.reshard.halves import decode_half
from raycollect.planner.reshard.request import faults_of, made_of
from raycollect.pos.handle import Handle

Held = tuple[Structure, tuple[TensorInfo, ...]]
"""A value: its structure, and its tensors in order."""


def plan(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Explains a call: the algorithm and the reason for it, coalesced tensors, bytes, memory and estimated time.

    Nothing is sent, and no tensor is touched; a group that has to be derived is formed. Waits for the methods whose
    refs are operands, as long as the call itself would. Calls of threads and asynchronous tasks that the function
    starts are made, not planned.

    Args:
        fn: One of the driver's operations, or a function that calls several, which are planned as one batch.
        args: Its arguments.
        kwargs: Its arguments by name.

    Raises:
        BatchError: The function calls no operation of the driver.
        RefusedError: The call itself would be refused, for its arguments or its tensors' shapes, dtypes or devices.
        GroupError: As by the call itself.
        CollectiveTimeoutError: A method has not returned in time.
    """
    if not callable(fn) or inspect.iscoroutinefunction(fn):
        what = "a coroutine function" if callable(fn) else f"{type(fn).__name__}, which can't be called"
        raise BatchError(
            detail=f"plan() takes an operation and its arguments, or a function that calls operations, not {what}"
        )
    requests, refs, staging = record(fn, args, kwargs)
    if not requests:
        detail = (
            f"{getattr(fn, '__name__', fn)!r} called no operation: plan() takes one and its arguments, or a function"
        )
        raise BatchError(detail=f"{detail} that calls some")
    Controller.current().groups.check([request.group for request in requests])
    planned = prepare(requests, staging, tuple(refs)).plan
    try:
        handles = _handles(refs, planned)
        _Estimated(planned, handles).judge()
    except RefusedError as exc:
        raise explained(exc, requests, tuple(refs)) from exc.__cause__
    return explain(planned, {source: handle.infos for source, handle in handles.items()})


def _numbered(violations: Sequence[Violation], number: int, plan: Plan) -> list[Violation]:
    return [replace(violation, call=number if len(plan.requests) > 1 else -1) for violation in violations]


# ---------------------------------------------------------------------------------------------- what refs hold


def _handles(refs: Mapping[Key, Any], plan: Plan) -> dict[Source, Handle]:
    values, late = held_values.values_of(dict(enumerate(refs.values())), plan.timeout_s)
    if late:
        number, rank = _user(plan, late[0])
        ranks = (rank,) if len(late) == 1 else tuple(_user(plan, source)[1] for source in late)
        name = plan.memberships[number].spec.name
        raise held_values.late_error(plan.name, name, len(late), ranks, plan.timeout_s)
    handles: dict[Source, Handle] = {}
    violations: list[Violation] = []
    causes: list[BaseException] = []
    for source, value in values.items():
        number, rank = _user(plan, source)
        if isinstance(value, Handle):
            handles[source] = value
        else:
            violations += _numbered([held_values.without_tensors(value, rank)], number, plan)
            causes += [value] if isinstance(value, RayError) else []
    if violations:
        raise refusal(plan.name, "", tuple(violations)) from next(iter(causes), None)
    return handles


def _user(plan: Plan, source: Source) -> tuple[int, int]:
    return next(
        (number, rank)
        for number, request in enumerate(plan.requests)
        for rank, *given in request.operands
        if source in given
    )


# ---------------------------------------------------------------------------------------------- the agreement


class _Estimated:
    """The agreement that the ranks would reach."""

    def __init__(self, plan: Plan, handles: Mapping[Source, Handle]) -> None:
        self._plan = plan
        self._handles = handles
        self._outputs: dict[tuple[int, str], Held] = {}
        self._violations: list[Violation] = []

    def judge(self) -> None:
        """Raises RefusedError with all reasons of all requests, up to the first that others build on."""
        needed = {
            source.request
            for request in self._plan.requests
            for _, *given in request.operands
            for source in given
            if isinstance(source, Made)
        }
        for number in range(len(self._plan.requests)):
            self._judge(number)
            if self._violations and number in needed:
                break  # its outputs are unknown
        if self._violations:
            raise refusal(self._plan.name, "", tuple(self._violations))

    def _judge(self, number: int) -> None:
        part = self._plan.parts[number]
        violations: list[Violation] = []
        specs = [self._spec(number, rank, violations) for rank in part.ranks]
        if not violations:
            violations += agreement.decide(part.ranks, [Arrival(spec=spec) for spec in specs])
        self._violations += _numbered(violations, number, self._plan)
        if violations:
            return
        for at, rank in enumerate(part.ranks):
            output = self._output(number, at, specs)
            if output is not None:
                self._outputs[number, self._plan.memberships[number].participants[rank]] = output

    def _spec(self, number: int, rank: int, violations: list[Violation]) -> Spec:
        request, part = self._plan.requests[number], self._plan.parts[number]
        _, src, dst = request.operands[part.places[rank]]
        in_pieces = PIECES[request.kind]
        sides: list[Side | None] = []
        if request.reshard is not None:
            self._check_layouts(number, rank, violations)
            sides = [None, None]
        else:
            for source, cut, name in zip((src, dst), in_pieces, ("input", "output"), strict=True):
                held = None if source is None else self._held(number, rank, source)
                sides.append(held and _side(held, len(part.ranks) if cut else 0, rank, name, violations))
        given = sides[0]
        if request.op is not None and given is not None:
            violations += [
                Violation(kind="unsupported", rank=rank, field="reduce op", found=reason)
                for dtype in dict.fromkeys(tensor.dtype for tensor in given.tensors)
                if (reason := folds.refusal_reason(request.op, dtype))
            ]
        return Spec(
            op=request.kind.value,
            reduce_op=request.op.name if request.op else "",
            root=request.root,
            gives=sides[0],
            takes=sides[1],
            one_device=not self._plan.memberships[number].spec.memory,
        )

    def _check_layouts(self, number: int, rank: int, violations: list[Violation]) -> None:
        request, part = self._plan.requests[number], self._plan.parts[number]
        half = decode_half(part.template(rank).boxes)
        _, src, dst = request.operands[part.places[rank]]
        for side, source, tensors in (("src", src, half.src), ("dst", dst, half.dst)):
            if source is not None:
                for name, actual, expected in faults_of(*self._held(number, rank, source), tensors):
                    field = f"{name} of {side}"
                    violations.append(Violation(kind="layout", rank=rank, field=field, found=actual, expected=expected))

    def _held(self, number: int, rank: int, source: Source) -> Held:
        if isinstance(source, Made):
            return self._outputs[source.request, self._plan.memberships[number].participants[rank]]
        handle = self._handles[source]
        return handle.structure, handle.infos

    def _output(self, number: int, at: int, specs: Sequence[Spec]) -> Held | None:
        part = self._plan.parts[number]
        request, rank, given = part.request, part.ranks[at], specs[at].gives
        role = next((buffer.role for buffer in part.template(rank).buffers if buffer.is_output), None)
        if role is None:
            return None
        if request.reshard is not None:
            return made_of(decode_half(part.template(rank).boxes).dst)
        if role is Role.LEARNED:
            side = agreement.learn(specs, at, part.places.get(request.root, -1))
        elif given is None:
            return None
        else:
            side = given if role is Role.LIKE else given.item(at)
        return side.structure, side.tensors


def _side(held: Held, count: int, rank: int, name: str, violations: list[Violation]) -> Side | None:
    structure, infos = held
    if not count:
        return Side(structure=structure, tensors=infos)
    if structure.kind in ("list", "tuple") and len(structure.items) == count:
        if len({item.count for item in structure.items}) == 1:
            return Side(structure=Structure("list", (), structure.items), tensors=infos)
    elif structure.kind == "tensor" and (piece := infos[0].piece(count)) is not None:
        return Side(structure=Structure("list", (), (TENSOR,) * count), tensors=(piece,) * count, loose=True)
    kind, actual, expected = agreement.piece_fault(structure, infos, count)
    violations.append(Violation(kind=kind, rank=rank, field=name, found=actual, expected=expected))
    return None
