"""One call of a driver's verb, from its refs to the work under way."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import ray

from raycollect import group as groups
from raycollect.controller import Controller
from raycollect.dispatch import send_program
from raycollect.errors import RefusedError, Violation, refusal
from raycollect.group import Membership, Operand
from raycollect.model import Key, OpKind, ReduceOp
from raycollect.planner import Request
from raycollect.work import Work

DEFAULT_TIMEOUT_S = 60.0
"""How long ranks wait for each other, in seconds, where a call does not say."""

_PARTS: dict[OpKind, tuple[str, str]] = {
    OpKind.ALLREDUCE: ("tensor_refs", ""),
    OpKind.REDUCE: ("tensor_refs", ""),
    OpKind.BROADCAST: ("tensor_refs", ""),
    OpKind.ALLGATHER: ("tensor_refs", "tensor_list_refs"),
    OpKind.REDUCESCATTER: ("tensor_list_refs", "tensor_refs"),
    OpKind.GATHER: ("tensor_refs", "tensor_list_ref"),
    OpKind.SCATTER: ("tensor_list_ref", "tensor_refs"),
    OpKind.ALLTOALL: ("tensor_list_in_refs", "tensor_list_out_refs"),
    OpKind.SEND: ("refs", ""),
    OpKind.BARRIER: ("", ""),
}
"""Operation -> the parameter with what ranks give, and the one with what they take it into, which may be None."""

_SINGLE = "tensor_list_ref"
"""The parameter that takes one ref, the root's; the others take a list."""

_AT_ROOT = (OpKind.REDUCE, OpKind.GATHER)
"""The operations whose one result is the root's."""


class Call:
    """One call of a verb: its refs read, its group found, its operands bound to ranks.

    Args:
        kind: The operation.
        group_name: The group asked for.
        timeout_s: How long ranks wait for each other, in seconds; None: the default.
        op: The reduce op as the user gave it.
        refs: Parameter -> what it was given. Where the group is derived, its ranks are the places in the first list.

    Raises:
        RefusedError: The refs can't be bound; with every reason.
        GroupError: There is no such group.
    """

    def __init__(self, kind: OpKind, group_name: str, timeout_s: float | None, *, op: Any = None, **refs: Any) -> None:
        self._kind = kind
        self._group_name = group_name
        self._controller = Controller.current()
        self._violations: list[Violation] = []
        self._timeout_s = DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s
        if not isinstance(self._timeout_s, (int, float)) or not 0 < self._timeout_s < math.inf:
            self._wrong("timeout_s", timeout_s, "a positive, finite number of seconds")
        self._op = None if op is None else self._reduce_op(op)
        operands = {name: self._read(name, value) for name, value in refs.items() if not self._is_left_out(name, value)}
        self._raise()
        self._membership = self._find(operands)
        self._bound = {name: self._bind(name, given, alone=len(refs) == 1) for name, given in operands.items()}
        self._raise()

    def run(self, *, root: Any = -1, async_op: bool, inplace: bool = True) -> Any:
        """Runs a collective over all ranks.

        Args:
            root: The root; -1 where there is none.
            async_op: True: returns a `Work` at once.
            inplace: False: a reduction goes into new tensors.
        """
        root = self._root(root)
        self._raise()
        src, dst = (self._bound.get(name, {}) for name in _PARTS[self._kind])
        if self._kind is OpKind.BROADCAST:  # only the root gives, and the others only take
            src, dst = _split(src, root)
        members = range(self._membership.spec.world_size)
        work = self._dispatch(members, src, dst, root=root, inplace=inplace)
        if self._kind in _AT_ROOT:
            work.refs = work.refs[root]
        if self._kind is OpKind.BARRIER:
            work.refs = None
        return work if async_op else work.wait()

    def send(self, *, async_op: bool) -> Any:
        """Runs a send; its refs are the source and the destination."""
        ((root, src), (peer, dst)) = self._bound["refs"].items()
        work = self._dispatch(sorted((root, peer)), {root: src}, {peer: dst}, root=root, peer=peer)
        work.refs = work.refs[int(root < peer)]
        return work if async_op else work.wait()

    # ------------------------------------------------------------------------------------------ binding

    def _is_left_out(self, name: str, value: Any) -> bool:
        return value is None and name == _PARTS[self._kind][1]

    def _read(self, name: str, value: Any) -> list[Operand]:
        """The operands of one parameter; what is wrong is noted."""
        refs = [value] if name == _SINGLE else value
        if not isinstance(refs, (list, tuple)) or not refs:
            found = "empty" if isinstance(refs, (list, tuple)) else f"a {type(refs).__name__}"
            what, expected = f"list of refs ({name})", "one ref per rank"
            self._violations.append(Violation(kind="missing", rank=-1, field=what, found=found, expected=expected))
            return []
        read = [
            _destination(ref) if self._makes(name, position) and _is_actor(ref) else groups.operand(ref, position)
            for position, ref in enumerate(refs)
        ]
        self._violations += [one for one in read if isinstance(one, Violation)]
        return [one for one in read if isinstance(one, Operand)]

    def _makes(self, name: str, position: int) -> bool:
        """Whether an actor handle may stand there, for an output to be made on that actor."""
        if self._kind is OpKind.SEND:
            return position == 1
        return name == _PARTS[self._kind][1] and name != _SINGLE

    def _find(self, operands: Mapping[str, list[Operand]]) -> Membership:
        controller, group_name = self._controller, self._group_name
        if controller.is_declared(group_name) or group_name != "default" or self._kind is OpKind.BARRIER:
            return controller.named(group_name)
        lists = [given for name, given in operands.items() if name != _SINGLE]
        if not lists:
            expected = "a declared group, or a list of actors where the outputs are to be made"
            self._violations.append(
                Violation(kind="missing", rank=-1, field="tensor_refs", found="None", expected=expected)
            )
        else:
            self._violations += [*groups.repeated(lists[0]), *groups.strangers(lists[0])]
        self._raise()
        return controller.derive(tuple(one.actor_id for one in lists[0]), self._timeout_s)

    def _bind(self, name: str, operands: list[Operand], *, alone: bool) -> dict[int, Operand]:
        whole = name != _SINGLE and self._kind is not OpKind.SEND
        bound = groups.bind(operands, self._membership, whole=whole)
        if isinstance(bound, dict):
            return bound
        self._violations += bound if alone else [replace(one, field=f"{one.field} of {name}") for one in bound]
        return {}

    def _reduce_op(self, op: Any) -> ReduceOp | None:
        try:
            return ReduceOp.coerce(op)
        except ValueError:
            self._wrong("op", op, f"one of {', '.join(ReduceOp.__members__)}")
            return None

    def _root(self, root: Any) -> int:
        try:
            return operator.index(root)
        except TypeError:
            self._wrong("root", root, "a rank")
            return -1

    def _wrong(self, field: str, value: Any, expected: str) -> None:
        violation = Violation(kind="argument", rank=-1, field=field, found=repr(value), expected=expected)
        self._violations.append(violation)

    def _raise(self) -> None:
        if self._violations:
            raise refusal(self._kind.value, self._group_name, tuple(self._violations))

    # ------------------------------------------------------------------------------------------ dispatch

    def _dispatch(
        self, ranks: Iterable[int], src: Mapping[int, Operand], dst: Mapping[int, Operand], **arguments: Any
    ) -> Work:
        keys = [{rank: one.key for rank, one in side.items()} for side in (src, dst)]
        request = Request(
            kind=self._kind,
            group=self._membership.spec,
            operands=tuple((rank, keys[0].get(rank), keys[1].get(rank)) for rank in ranks),
            op=self._op,
            timeout_s=self._timeout_s,
            **arguments,
        )
        refs = {one.key: one.ref for one in (*src.values(), *dst.values()) if one.key is not None}
        try:
            flight = send_program(self._controller, request, self._membership, refs)
        except RefusedError as exc:
            named = tuple(self._named(one, keys[int(one.field == "output")]) for one in exc.violations)
            raise refusal(exc.op, self._group_name, named) from None
        return Work(self._controller, flight, [flight.results.get(rank) for rank in ranks])

    def _named(self, violation: Violation, keys: Mapping[int, Key | None]) -> Violation:
        """Adds what the planner does not know: the rank's actor, and its ref."""
        members, key = self._membership.members, keys.get(violation.rank)
        actor = members[violation.rank].actor if 0 <= violation.rank < len(members) else ""
        return replace(violation, actor=actor, ref=key.hex() if key else "")


def _split(operands: Mapping[int, Operand], root: int) -> tuple[dict[int, Operand], dict[int, Operand]]:
    """The root's operand, and those of the others."""
    others = {rank: one for rank, one in operands.items() if rank != root}
    return {rank: one for rank, one in operands.items() if rank == root}, others


def _is_actor(value: Any) -> bool:
    return isinstance(value, ray.actor.ActorHandle)


def _destination(actor: Any) -> Operand:
    return Operand(ref=None, key=None, actor_id=actor._actor_id.hex())
