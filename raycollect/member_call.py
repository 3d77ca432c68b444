"""One call of a member's verb, from its arguments to its run on a lane."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from numbers import Integral
from typing import Any

from raycollect.backends import arrays, streams
from raycollect.contracts import Communicator
from raycollect.door import Arrival, Spec, encode_arrival, judge
from raycollect.errors import RaycollectError, RefusedError, Violation, refusal
from raycollect.executor import Execution, Outcome
from raycollect.gate import ALL, lane_of, ranks_of
from raycollect.lane import Attempt
from raycollect.member_work import MemberWork
from raycollect.members import get_group_handle
from raycollect.model import TENSOR, GroupSpec, Launch, OpKind, ReduceOp, TensorInfo
from raycollect.planner import Program, Request, brought, plan
from raycollect.pos import Container, obstacle
from raycollect.seats import Seats
from raycollect.words import a_type

__all__ = ["MemberCall"]

_SRC, _DST = 0, 1
"""Stand in requests for what each rank gives with its call, and what it takes into."""


class MemberCall:
    """One call of a verb: its group found, its arguments checked, its program made."""

    def __init__(self, kind: OpKind, group_name: str, *, op: Any = None, root: Any = -1, peer: Any = -1) -> None:
        self._kind = kind
        self._seat = get_group_handle(group_name)
        self._root = int(root) if isinstance(root, Integral) else root
        self._peer = int(peer) if isinstance(peer, Integral) else peer
        self._op: ReduceOp | None = None
        self._violations: list[Violation] = []
        if op is not None:
            try:
                self._op = ReduceOp.coerce(op)
            except ValueError:
                self._violate("argument", "op", repr(op), f"one of {', '.join(ReduceOp.__members__)}")
        for name, value in (("root", self._root), ("peer", self._peer)):
            if type(value) is not int:
                self._violate("argument", name, repr(value), "a rank")

    @property
    def is_root(self) -> bool:
        """Whether this rank is the root."""
        return bool(self._root == self._seat.rank)

    def run(self, values: Sequence[tuple[str, Any]], *, async_op: bool, timeout_s: float | None) -> MemberWork | None:
        """Runs it with what this rank gives, and then what it takes into, each with its name."""
        seat, kind = self._seat, self._kind
        op = kind.value if kind is not OpKind.SEND or self.is_root else OpKind.RECV.value
        limit_s = seat.timeout_s if timeout_s is None else timeout_s
        containers = tuple(self._container(name, value) for name, value in values)
        program = None
        if not self._violations:
            try:
                program = _program(seat.planned, kind, seat.rank, self._op, self._root, self._peer, limit_s)
            except RefusedError as exc:
                self._violations += [replace(v, rank=seat.rank if v.rank < 0 else v.rank) for v in exc.violations]
        lane, mark = self._lane(), streams.mark(_described(containers))
        if self._violations and (not lane or not 0 < limit_s < math.inf):
            raise refusal(op, seat.name, tuple(self._violations))
        attempt = self._objection(lane, limit_s) if program is None else self._execution(program, containers, mark)
        if async_op:
            return MemberWork(seat, op, seat.start(lane, op, attempt, limit_s))
        seat.run(lane, op, attempt, limit_s)
        return None

    def _lane(self) -> str:
        """Where the others of this call are; empty where its arguments name nobody."""
        if self._kind is not OpKind.SEND:
            return ALL
        ends = {rank for rank in (self._root, self._peer) if type(rank) is int and 0 <= rank < self._seat.world_size}
        return lane_of(self._root, self._peer) if len(ends) == 2 else ""

    def _container(self, name: str, value: Any) -> Container:
        found = Container.of(value, arrays.is_tensor)
        if found is not None:
            return found
        what = "missing" if value is None else a_type(value)
        if isinstance(value, (list, tuple, dict)):
            what += f" ({obstacle(value, arrays.is_tensor)})"
        self._violate("not_tensor", name, what, "a tensor, or a list, tuple or dict of tensors")
        return _NOTHING

    def _execution(self, program: Program, operands: Sequence[Container], mark: streams.Mark | None) -> Attempt:
        instruments = Seats.current().instruments

        def attempt(communicator: Communicator, seq: int) -> Outcome:
            execution = Execution(
                program,
                (),
                lambda group_id: communicator,
                instruments,
                seq=seq,
                aborted=lambda: None,
                operands=tuple(operands),
                meeting=getattr(communicator, "meeting", "") or "-",
            )
            with streams.after(mark):  # another thread may run it
                return execution.run()

        return attempt

    def _objection(self, lane: str, limit_s: float) -> Attempt:
        """Goes to the door only to say there what is wrong here, so that nobody waits for this rank."""
        spec = Spec(
            op=self._kind.value,
            caller="call",
            reduce_op=self._op.name if self._op else "",
            root=self._root if type(self._root) is int else -1,
        )
        blob = encode_arrival(Arrival(spec=spec, violations=tuple(self._violations)))
        ranks = ranks_of(lane, self._seat.world_size)

        def attempt(communicator: Communicator, seq: int) -> Outcome:
            launch = Launch(seq=seq, ranks=ranks, timeout_s=limit_s)
            try:
                blobs = communicator.agree(launch, blob)
                verdict = judge(launch.ranks, tuple(map(bytes, blobs)))
                return Outcome(error=refusal(spec.op, self._seat.name, verdict.violations))
            except RaycollectError as exc:
                return Outcome(error=exc)
            finally:
                communicator.end(launch, False)

        return attempt

    def _violate(self, kind: str, name: str, found: str, expected: str) -> None:
        violation = Violation(kind=kind, rank=self._seat.rank, field=name, found=found, expected=expected)
        self._violations.append(violation)


_NOTHING = Container(TENSOR, (None,), None)
"""Stands for an operand that is none; no program gets it."""


def _described(containers: Sequence[Container]) -> Iterator[TensorInfo]:
    """The infos of their tensors; looked at only by who asks for them."""
    tensors = (one for container in containers for one in container.tensors)
    return (arrays.describe(one) for one in tensors if arrays.is_tensor(one))


@lru_cache(maxsize=1024)
def _program(
    spec: GroupSpec, kind: OpKind, rank: int, op: ReduceOp | None, root: int, peer: int, timeout_s: float
) -> Program:
    """This rank's half of a collective; remembered, for loops.

    Raises:
        RefusedError: The arguments make no sense.
    """
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
        (one, None if src is None else _SRC, None if dst is None else _DST) for one, src, dst in brought(request, _SRC)
    )
    planned = plan([replace(request, operands=operands)])
    if planned.width > 1:  # the lanes of members count one launch per call
        found = f"{kind.value}, which backend {spec.backend!r} does not have inside the members"
        raise refusal(kind.value, spec.name, (Violation(kind="unsupported", rank=-1, field="op", found=found),))
    return planned.program(planned.parts[0].places[rank])
