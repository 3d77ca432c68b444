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
from raycollect.engine.agreement import Arrival, Spec, alone, encode_arrival, judge, of_alone
from raycollect.engine.run import Outcome, Run
from raycollect.errors import RaycollectError, RefusedError, Violation, kept, refusal, wrong_flags, wrong_time_limit
from raycollect.group.coordinator import ALL, name_of_ranks, ranks_of
from raycollect.group.member_communicator import Attempt
from raycollect.group.process_group import ProcessGroup
from raycollect.member.init import get_group_handle
from raycollect.member.runtime import this_runtime
from raycollect.member.work import MemberWork
from raycollect.planner import Program, Request, brought, plan
from raycollect.pos import Container, obstacle

__all__ = ["ME", "MemberCall"]

_SRC, _DST = 0, 1
"""Placeholders in requests for what each rank gives with its call, and what it takes into."""

_MOST = 256  # How many calls with different arguments a group knows

ME = object()
"""Stands for the rank of this process, as a root or a peer."""


class MemberCall:
    """An operation with its arguments but tensors and time; any calls that give the same are one `MemberCall`."""

    @staticmethod
    def of(kind: OpKind, group_name: GroupLike, *, op: Any = None, root: Any = -1, peer: Any = -1) -> MemberCall:
        """The call with these arguments; what is wrong with them is for the agreement.

        Raises:
            UnknownGroupError: This process is no member.
        """
        process_group = get_group_handle(group_name)
        calls = process_group.calls
        key = kind, op, type(op), root, type(root), peer, type(peer)  # 1.0 equals 1, and is no rank
        try:
            known: MemberCall | None = calls.get(key)
        except TypeError:  # what can't be a key is wrong
            return MemberCall(process_group, kind, op, root, peer)
        if known is None:
            known = MemberCall(process_group, kind, op, root, peer)
            if not known._violations and len(calls) < _MOST:
                calls[key] = known
        return known

    @staticmethod
    def refused(process_group: ProcessGroup, kind: OpKind, violations: Iterable[Violation]) -> MemberCall:
        """A call without a root in which this rank only tells the others what is wrong here; all raise that."""
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
                expected = f"one of {', '.join(ReduceOp.__members__)}"
                self._violate("argument", "op", repr(op), expected)
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
        """Runs it with (name, value) of what this rank gives, and then of what it takes into."""
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
            found = wrong_flags(async_op=async_op)
            wrong, async_op = wrong + self._here(found), not found and bool(async_op)
        program = None if wrong else self._planned(limit_s, wrong)
        if program is None:
            if found := wrong_time_limit(limit_s):
                wrong += self._here(found)
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
        """The program within a time limit; None: that is none, or the arguments make no sense, which is noted."""
        known = self._program
        if known is not None and type(known[0]) is type(limit_s) and known[0] == limit_s:
            return known[1]
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
        """The communicator of this call; empty: its arguments name no rank."""
        if self._kind is not OpKind.SEND:
            return ALL
        ends = {
            rank
            for rank in (self._root, self._peer)
            if type(rank) is int and 0 <= rank < self._process_group.world_size
        }
        return name_of_ranks(self._root, self._peer) if len(ends) == 2 else ""

    def _no_tensor(self, name: str, value: Any) -> Violation:
        what = "missing" if value is None else arrays.told(value)
        if type(value) in (list, tuple) or isinstance(value, Mapping):
            what += f" ({obstacle(value, arrays.is_tensor, arrays.told)})"
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
        with _OWN if mark is None else streams.after(mark):  # another thread may run it
            run = Run(program, seq, lambda _: communicator, instruments, operands=operands, is_call=True, label=label)
            return run.run()

    def _objection(self, name: str, limit_s: float, *violations: Violation) -> Attempt:
        """Takes part in the agreement only to tell what is wrong here, so that nobody waits for this rank."""
        spec = Spec(
            op=self._kind.value,
            caller="call",
            reduce_op=self._op.name if self._op else "",
            root=self._root if type(self._root) is int and self._root in range(self._process_group.world_size) else -1,
        )
        blob = alone(encode_arrival(Arrival(spec=spec, violations=violations)))
        ranks = ranks_of(name, self._process_group.world_size)

        def attempt(communicator: Communicator, seq: int) -> Outcome:
            launch = Launch(seq=seq, ranks=ranks, timeout_s=limit_s)
            try:
                blobs = communicator.agree(launch, blob)
                verdict = judge(launch.ranks, tuple(map(of_alone, launch.ranks, blobs)))
                return Outcome(error=refusal(spec.op, self._process_group.name, verdict.violations))
            except RaycollectError as exc:
                return Outcome(error=kept(exc))
            finally:
                communicator.end(launch, False)

        return attempt

    def _here(self, violations: Iterable[Violation]) -> list[Violation]:
        rank = self._process_group.rank
        return [replace(one, rank=rank if one.rank < 0 else one.rank) for one in violations]

    def _violate(self, kind: str, name: str, found: str, expected: str) -> None:
        self._violations.append(self._violation(kind, name, found, expected))

    def _violation(self, kind: str, name: str, found: str, expected: str) -> Violation:
        return Violation(kind=kind, rank=self._process_group.rank, field=name, found=found, expected=expected)


_OWN = nullcontext()
_NOTHING = Container(TENSOR, (None,), None)
"""Stands for an operand that is none; no program gets it."""


def _mark(containers: Sequence[Container]) -> streams.Mark | None:
    """Records how far the caller's streams are on the devices of tensors; None where they are numpy's."""
    told: list[TensorInfo] = []
    for container in containers:
        if type(container.tensors[0]) is not np.ndarray or len(container.tensors) > 1:
            told += map(arrays.describe, filter(arrays.is_tensor, container.tensors))
    return streams.mark(told) if told else None


@lru_cache(maxsize=1024)
def _program(
    spec: GroupSpec, kind: OpKind, rank: int, op: ReduceOp | None, root: int, peer: int, timeout_s: float
) -> Program:
    """This rank's part in a collective, cached for loops; RefusedError: the arguments make no sense."""
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
    if planned.width > 1:  # members count one launch per call
        found = f"{kind.value}, which members of a group of backend {spec.backend!r} can't call"
        raise refusal(kind.value, spec.name, (Violation(kind="unsupported", field="op", found=found),))
    return planned.program(planned.parts[0].places[rank])
