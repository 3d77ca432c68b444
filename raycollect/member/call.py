"""One call of a member's operation, from its arguments to its run on a communicator."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache, partial
from numbers import Integral, Number
from typing import Any

import numpy as np

from raycollect.backends import arrays, streams
from raycollect.core.model import TENSOR, GroupLike, GroupSpec, Launch, OpKind, ReduceOp, TensorInfo
from raycollect.core.operations import OPERATIONS
from raycollect.core.protocols import Communicator
from raycollect.engine.agreement import Arrival, Spec, decode_single, encode_arrival, encode_single, judge
from raycollect.engine.long_arrivals import exchange
from raycollect.engine.run import Outcome, Run
from raycollect.errors import (
    RaycollectError,
    RefusedError,
    Violation,
    refusal,
    strip_traceback,
    wrong_flags,
    wrong_time_limit,
)
from raycollect.group.coordinator import ALL, name_of_ranks, ranks_of
from raycollect.group.member_communicator import Attempt
from raycollect.group.process_group import ProcessGroup
from raycollect.member.init import get_group_handle
from raycollect.member.runtime import this_runtime
from raycollect.member.work import MemberWork
from raycollect.planner import Program, Request, complete_operands, plan
from raycollect.pos import Container, obstacle

__all__ = ["ME", "MemberCall"]

_SRC, _DST = 0, 1
"""Placeholders in requests for the inputs and the outputs of a rank's call."""

_MOST = 256  # the number of compiled calls per group

ME = object()
"""A placeholder for the rank of this process, as a root or a peer."""


class MemberCall:
    """An operation with its arguments, except tensors and timeout; equal calls share one `MemberCall`."""

    @staticmethod
    def of(kind: OpKind, group_name: GroupLike, *, op: Any = None, root: Any = -1, peer: Any = -1) -> MemberCall:
        """The call with these arguments; the agreement reports invalid arguments.

        Raises:
            UnknownGroupError: This process is not a member.
        """
        process_group = get_group_handle(group_name)
        calls = process_group.calls
        key = kind, op, type(op), root, type(root), peer, type(peer)  # 1.0 equals 1, but is not a rank
        try:
            call: MemberCall | None = calls.get(key)
        except TypeError:  # unhashable arguments are invalid
            return MemberCall(process_group, kind, op, root, peer)
        if call is None:
            call = MemberCall(process_group, kind, op, root, peer)
            if not call._violations and len(calls) < _MOST:
                calls[key] = call
        return call

    @staticmethod
    def refused(process_group: ProcessGroup, kind: OpKind, violations: Iterable[Violation]) -> MemberCall:
        """A call without a root that only reports this rank's violations to all ranks, which raise them."""
        call = MemberCall(process_group, kind, None, -1, -1)
        call._violations += call._here(violations)
        return call

    def __init__(self, process_group: ProcessGroup, kind: OpKind, op: Any, root: Any, peer: Any) -> None:
        self._kind = kind
        self._process_group = process_group
        self._program: tuple[float, Program] | None = None  # with its time limit
        rank = process_group.rank
        root, peer = rank if root is ME else root, rank if peer is ME else peer
        self._root = int(root) if isinstance(root, Integral) else root
        self._peer = int(peer) if isinstance(peer, Integral) else peer
        self._op: ReduceOp | None = None
        self._violations: list[Violation] = []
        if op is not None:
            try:
                self._op = ReduceOp.coerce(op)
            except ValueError:
                self._violate("argument", "op", repr(op), ReduceOp.expected(op))
        for name, value in ((OPERATIONS[kind].root, self._root), ("destination rank", self._peer)):
            if type(value) is not int:
                expected = f"a rank from 0 to {process_group.world_size - 1}"
                self._violate("argument", name, repr(value), expected)
        self._communicator = self._name_of_communicator()
        self._runtime = this_runtime()

    @property
    def is_root(self) -> bool:
        """Whether this rank is the root."""
        return type(self._root) is int and self._root == self._process_group.rank

    def run(self, values: Sequence[tuple[str, Any]], *, async_op: Any, timeout_s: float | None) -> MemberWork | None:
        """Runs the call with (name, value) of this rank's inputs, followed by its outputs."""
        process_group, kind, communicator = self._process_group, self._kind, self._communicator
        op = kind.value if kind is not OpKind.SEND or self.is_root else OpKind.RECV.value
        limit_s = process_group.timeout_s if timeout_s is None else timeout_s
        containers, wrong = [], list(self._violations)
        for name, value in values:
            container = Container.of(value, arrays.is_tensor)
            containers.append(_NOTHING if container is None else container)
            if container is None:
                wrong.append(self._no_tensor(name, value))
        if async_op is not True and async_op is not False:
            violations = wrong_flags(async_op=async_op)
            wrong, async_op = wrong + self._here(violations), not violations and bool(async_op)
        program = None if wrong else self._planned(limit_s, wrong)
        if program is None:
            if violations := wrong_time_limit(limit_s):
                wrong += self._here(violations)
                limit_s = process_group.timeout_s
            if not communicator:
                raise refusal(op, process_group.name, tuple(wrong))
        object_to = partial(self._objection, communicator, limit_s)
        mark = _mark(containers)
        attempt = object_to(*wrong) if program is None else partial(self._attempt, program, containers, mark)
        there = process_group.communicator(communicator)
        if async_op:
            return MemberWork(process_group, op, there.start(op, attempt, limit_s, object_to))
        there.run(op, attempt, limit_s, object_to)
        return None

    def _planned(self, limit_s: float, wrong: list[Violation]) -> Program | None:
        """The program with a time limit; None: the limit or the arguments are invalid. `wrong` gets the latter."""
        cached = self._program
        if cached is not None and type(cached[0]) is type(limit_s) and cached[0] == limit_s:
            return cached[1]
        if wrong_time_limit(limit_s):
            return None
        process_group = self._process_group
        rank = process_group.rank
        try:
            program = _program(process_group.planned, self._kind, rank, self._op, self._root, self._peer, limit_s)
        except RefusedError as exc:
            wrong += self._here(exc.violations)
            return None
        self._program = limit_s, program
        return program

    def _name_of_communicator(self) -> str:
        """The communicator of this call; empty: the arguments name no pair of ranks."""
        if self._kind is not OpKind.SEND:
            return ALL
        ends = {
            rank
            for rank in (self._root, self._peer)
            if type(rank) is int and 0 <= rank < self._process_group.world_size
        }
        return name_of_ranks(self._root, self._peer) if len(ends) == 2 else ""

    def _no_tensor(self, name: str, value: Any) -> Violation:
        what = "missing" if value is None else arrays.describe_value(value)
        if type(value) in (list, tuple) or isinstance(value, Mapping):
            what += f" ({obstacle(value, arrays.is_tensor, arrays.describe_value)})"
        elif isinstance(value, Number):
            what += " (give numpy.array(x), which can be written)"
        return self._violation("not_tensor", name, what, "a tensor, or a list, tuple or dict of tensors")

    def _attempt(
        self,
        program: Program,
        operands: Sequence[Container],
        mark: streams.Mark | None,
        communicator: Communicator,
        seq: int,
    ) -> Outcome:
        instruments = self._runtime.instruments
        label = getattr(communicator, "meeting", "") or "-"
        with _OWN if mark is None else streams.after(mark):  # another thread may run the attempt
            run = Run(program, seq, lambda _: communicator, instruments, operands=operands, is_call=True, label=label)
            return run.run()

    def _objection(self, name: str, limit_s: float, *violations: Violation) -> Attempt:
        """Makes an attempt that only reports violations in the agreement, so that no rank waits for this one."""
        spec = Spec(
            op=self._kind.value,
            caller="call",
            reduce_op=self._op.name if self._op else "",
            root=self._root if type(self._root) is int and self._root in range(self._process_group.world_size) else -1,
        )
        blob = encode_single(encode_arrival(Arrival(spec=spec, violations=violations)))
        ranks = ranks_of(name, self._process_group.world_size)

        def attempt(communicator: Communicator, seq: int) -> Outcome:
            launch = Launch(seq=seq, ranks=ranks, timeout_s=limit_s)
            try:
                blobs = exchange(partial(communicator.agree, launch), blob, ranks=len(ranks))
                verdict = judge(launch.ranks, tuple(map(decode_single, launch.ranks, blobs)))
                return Outcome(error=refusal(spec.op, self._process_group.name, verdict.violations))
            except RaycollectError as exc:
                return Outcome(error=strip_traceback(exc))
            finally:
                communicator.end(launch, False)

        return attempt

    def _here(self, violations: Iterable[Violation]) -> list[Violation]:
        rank = self._process_group.rank
        return [replace(violation, rank=rank if violation.rank < 0 else violation.rank) for violation in violations]

    def _violate(self, kind: str, name: str, actual: str, expected: str) -> None:
        self._violations.append(self._violation(kind, name, actual, expected))

    def _violation(self, kind: str, name: str, actual: str, expected: str) -> Violation:
        return Violation(kind=kind, rank=self._process_group.rank, field=name, found=actual, expected=expected)


_OWN = nullcontext()
_NOTHING = Container(TENSOR, (None,), None)
"""A placeholder for an invalid operand; never part of a program."""


def _mark(containers: Sequence[Container]) -> streams.Mark | None:
    """Records the position of the caller's streams on the devices of tensors; None for numpy's tensors."""
    infos: list[TensorInfo] = []
    for container in containers:
        if type(container.tensors[0]) is not np.ndarray or len(container.tensors) > 1:
            infos += map(arrays.describe, filter(arrays.is_tensor, container.tensors))
    return streams.mark(infos) if infos else None


@lru_cache(maxsize=1024)
def _program(
    spec: GroupSpec, kind: OpKind, rank: int, op: ReduceOp | None, root: int, peer: int, timeout_s: float
) -> Program:
    """This rank's program of a collective, cached for loops; RefusedError: the arguments are invalid."""
    request = Request(
        kind=kind,
        group=spec,
        operands=(),
        op=op,
        root=root,
        peer=peer,
        timeout_s=timeout_s,
    )
    operands = tuple(
        (owner, None if src is None else _SRC, None if dst is None else _DST)
        for owner, src, dst in complete_operands(request, _SRC)
    )
    planned = plan([replace(request, operands=operands)])
    if planned.width > 1:  # members count one launch per call
        actual = f"{kind.value}, which members of a group of backend {spec.backend!r} can't call"
        raise refusal(kind.value, spec.name, (Violation(kind="unsupported", field="op", found=actual),))
    return planned.program(planned.parts[0].places[rank])
