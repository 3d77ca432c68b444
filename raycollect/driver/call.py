"""One call of a driver's operation: it is compiled, unless it is cached, and carried out."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from raycollect.core.deadline import Deadline
from raycollect.core.model import GroupLike, OpKind, ReduceOp, name_of
from raycollect.core.operations import OPERATIONS
from raycollect.core.placeholder import Placeholder
from raycollect.driver import batch, compiled_call, operand_binding
from raycollect.driver.compiled_call import CompiledCall
from raycollect.driver.controller import Controller
from raycollect.driver.dispatch import RequestKey, prepare
from raycollect.driver.operand_binding import Operand, TaskWait
from raycollect.driver.pending import Pending
from raycollect.errors import Violation, refusal, wrong_argument, wrong_flags, wrong_time_limit
from raycollect.errors.text import a_type, shown
from raycollect.group import membership as groups
from raycollect.planner import STAGING_NBYTES, Membership, Reshard
from raycollect.ray_bridge import ray_actors, ray_session
from raycollect.ray_bridge.driver_handle import is_handle

_MOST_NUMBER = 1 << 63  # ranks, and numbers of GPUs, are far below
_SINGLE = "tensor_list_ref"  # the parameter that takes one ref, the root's; the others take lists

_NO_STEP = "one of actors: runs of a captured step run in actors. Make the calls in a batch(), or outside of the step"


def task_wait(op: str, group_name: GroupLike, timeout_s: Any) -> TaskWait:
    """How long a call that begins now waits for tasks: its own time limit, or that of the block around it."""
    limit_s = batch.limit_s(timeout_s)
    return TaskWait(op, name_of(group_name), Deadline.after(None if wrong_time_limit(limit_s) else limit_s))


def run(
    kind: OpKind,
    group_name: GroupLike,
    timeout_s: float | None,
    *,
    op: Any = None,
    root: Any = -1,
    inplace: Any = True,
    snapshot: Any = False,
    async_op: Any,
    wait: Any = None,
    **given: Any,
) -> Any:
    """Calls an operation, or records the call in the caller's batch or captured step.

    `given` are the refs by the names of the operation's parameters, `root` is the rank that the operation names, -1 if
    it names none, and `wait` is the wait for tasks of a call that began before. See `allreduce_refs` for the others.
    """
    refs: list[Any] = []
    keys: list[Any] = []
    around, key = batch.current(), None
    if type(async_op) is bool and (around is None or not async_op):
        limit_s = timeout_s if around is None or timeout_s is not None else around.timeout_s
        arguments = kind, name_of(group_name), limit_s, op, root, inplace, snapshot, around is None
        key = compiled_call.key_of(arguments, given.values(), refs, keys)
    if key is not None and (controller := Controller.running()) is not None:
        compiled = compiled_call.find(controller, key, may_derive=isinstance(group_name, str))
        if compiled is not None:
            return compiled_call.carry_out(controller, compiled, keys, refs, around, async_op=async_op)
    call = Call(kind, group_name, timeout_s, op=op, wait=wait, **given)
    compiled = call.compile(root=root, inplace=inplace, snapshot=snapshot, async_op=async_op)
    if key is not None and not call.has_driver:
        compiled_call.remember(call.controller, key, compiled, [operand.key for operand in call.used], keys)
    return call.carry_out(compiled, async_op=async_op)


class Call:
    """Compiles a call: reads its refs, finds its group, and binds the operands to ranks.

    Attributes:
        name: The operation in messages; empty: that of its kind.
        is_of_all: Whether a list of refs has one of each rank.
        used: The operands of the compiled call, in the order of its plan's refs.
    """

    name = ""
    is_of_all = True

    def __init__(
        self,
        kind: OpKind,
        group_name: GroupLike,
        timeout_s: float | None,
        *,
        op: Any = None,
        wait: Any = None,
        **refs: Any,
    ) -> None:
        self._kind = kind
        self._operation = OPERATIONS[kind]
        self._group_name = name_of(group_name)
        self._is_name = isinstance(group_name, str)
        was_started = ray_session.is_started()
        if was_started:
            self.controller: Controller = Controller.current()
        self._batch = batch.current()
        self.used: list[Operand] = []
        self._violations: list[Violation] = []
        timeout_s = self._timeout_s = batch.limit_s(timeout_s)
        self._violations += wrong_time_limit(timeout_s)
        self._wait: TaskWait = wait or task_wait(self.name or kind.value, group_name, timeout_s)
        self._op = None if op is None else self._reduce_op(op)
        left_s = self._wait.deadline.left_s()
        self._driver_rank = self.controller.takes_part(self._group_name, left_s) if was_started else None
        operands = {name: self._read(name, value) for name, value in refs.items() if not self._is_left_out(name, value)}
        self._raise()
        if not was_started:  # Ray is not started for a call that would be refused
            raise groups.unknown(self._group_name, "no Ray runs in this process, so no group is declared")
        self._membership = self._find(operands)
        if self._driver_rank is not None and self._batch is not None and not self._batch._outermost._takes_driver:
            self._wrong("group", f"{self._group_name!r}, with the driver as a rank", _NO_STEP)
            self._raise()
        self._bound = {name: self._bind(name, given, alone=len(refs) == 1) for name, given in operands.items()}
        self._raise()

    @property
    def has_driver(self) -> bool:
        """Whether this process is a rank of its group."""
        return self._driver_rank is not None

    def compile(
        self, *, root: Any = -1, inplace: bool = True, snapshot: bool = False, async_op: bool = False
    ) -> CompiledCall:
        """Compiles the operation; `root` is -1 for an operation without one."""
        kind, takes, size = self._kind, self._operation.takes, self._membership.spec.world_size
        is_list = takes in ("all", "others")
        self._violations += wrong_flags(inplace=inplace)
        self._check_snapshot(snapshot)
        if kind is not OpKind.SEND:
            root = self._number(self._operation.root, root, f"a rank from 0 to {size - 1}")
        self._check_async(async_op)
        self._raise()
        peer = -1
        if kind is OpKind.SEND:
            ((root, source), (peer, target)) = self._bound["refs"].items()
            src, dst, ranks, with_result = {root: source}, {peer: target}, sorted((root, peer)), [peer]
        else:
            src, dst = (self._bound.get(name, {}) for name in self._operation.refs)
            if takes == "others":  # the root only sends, and the others only receive
                dst = {rank: operand for rank, operand in src.items() if rank != root}
                src = {rank: operand for rank, operand in src.items() if rank == root}
            ranks = list(range(size))
            with_result = [rank for rank in ranks if is_list or (takes == "root" and rank == root)]
        keeps = takes == "others" or (inplace and self._operation.in_place)
        return self._compiled(
            [(rank, src.get(rank), dst.get(rank)) for rank in ranks],
            [(rank, dst.get(rank) or (src.get(rank) if keeps else None)) for rank in with_result],
            is_list=is_list,
            root=root,
            peer=peer,
            inplace=inplace,
            snapshot=snapshot and inplace,
        )

    def carry_out(self, compiled: CompiledCall, *, async_op: bool) -> Any:
        """Sends the call, or records it."""
        used = self.used
        return compiled_call.carry_out(
            self.controller,
            compiled,
            [operand.key for operand in used],
            [operand.ref for operand in used],
            self._batch,
            async_op=async_op,
            values=[operand.ref if operand.given is None else operand.given for operand in used],
            deadline=self._wait.deadline,
        )

    # ------------------------------------------------------------------------------------------ binding

    def _is_left_out(self, name: str, value: Any) -> bool:
        return value is None and name == self._operation.refs[1]

    def _read(self, name: str, value: Any) -> list[Operand]:
        refs = [value] if name == _SINGLE else value
        if not isinstance(refs, (list, tuple)) or not refs:
            actual = "empty" if isinstance(refs, (list, tuple)) else a_type(refs)
            what, expected = f"list of refs ({name})", "one ref per rank"
            self._violations.append(Violation(kind="missing", field=what, found=actual, expected=expected))
            return []
        read: list[Operand] = []
        for position, given in enumerate(refs):
            ref = given if self._batch is None else self._batch._stand_in(given)
            if isinstance(ref, Placeholder) and type(ref) is not Pending:
                ref._passed_to("a collective")
            operand: Operand | Violation
            if type(ref) is Pending and self._batch is not None and ref._is_of(self._batch.request_list):
                operand = Operand(ref=ref, key=ref.key, actor_id=ref.actor_id)
            elif type(ref) is Pending:
                operand = operand_binding.operand(ref.ref, position, self._wait)
            elif is_handle(ref) and self._makes(name, position):
                operand = Operand(ref=None, key=None, actor_id=ray_actors.id_of(ref))
            elif self._driver_rank is not None and (mine := self._driver_rank.operand(ref)) is not None:
                operand = mine
            else:
                operand = operand_binding.operand(ref, position, self._wait)
            if isinstance(operand, Operand):
                read.append(operand)
            else:
                self._violations.append(operand)
        return read

    def _makes(self, name: str, position: int) -> bool:
        """Whether an actor handle is allowed in this position, to allocate the output on that actor."""
        if self._kind is OpKind.SEND:
            return position == 1
        return name == self._operation.refs[1] and name != _SINGLE

    def _find(self, operands: Mapping[str, list[Operand]]) -> Membership:
        controller, group_name = self.controller, self._group_name
        may_derive = self._is_name and group_name == "default" and self._kind is not OpKind.BARRIER
        membership = controller.groups.find(group_name, self._wait.deadline.left_s())
        if membership is not None or not may_derive:  # a Group of that name was destroyed
            return membership or controller.groups.named(group_name)
        lists = [given for name, given in operands.items() if name != _SINGLE]
        actor_ids = tuple([operand.actor_id for operand in lists[0]]) if lists else ()
        if derived := controller.groups.derived(actor_ids):
            return derived
        if not lists:
            expected = "a declared group, or a list of actors where the outputs are to be made"
            self._violations.append(Violation(kind="missing", field="tensor_refs", found="None", expected=expected))
        else:
            self._violations += [*operand_binding.repeated(lists[0]), *operand_binding.strangers(lists[0])]
        self._raise()
        left_s = self._wait.deadline.left_s()
        return controller.groups.derive(actor_ids, groups.DEFAULT_TIMEOUT_S if left_s is None else left_s)

    def _bind(self, name: str, operands: list[Operand], *, alone: bool) -> dict[int, Operand]:
        whole = self.is_of_all and name != _SINGLE and self._kind is not OpKind.SEND
        bound = operand_binding.bind(operands, self._membership, whole=whole)
        if isinstance(bound, dict):
            return bound
        self._violations += bound if alone else [replace(wrong, field=f"{wrong.field} of {name}") for wrong in bound]
        return {}

    def _reduce_op(self, op: Any) -> ReduceOp | None:
        try:
            return ReduceOp.coerce(op)
        except ValueError:
            self._wrong("op", op, ReduceOp.expected(op))
            return None

    def _number(self, field: str, value: Any, expected: str) -> int:
        try:
            number = operator.index(value)
        except TypeError:
            number = _MOST_NUMBER
        if -_MOST_NUMBER < number < _MOST_NUMBER:
            return number
        self._wrong(field, value, expected)
        return -1

    def _wrong(self, field: str, value: Any, expected: str) -> None:
        self._violations.append(wrong_argument(field, shown(value), expected))

    def _raise(self) -> None:
        if self._violations:
            around = self._batch
            number = -1 if around is None else len(around.request_list.requests)
            if around is not None and around.is_rehearsal and not number:  # so far, a plan of one call
                number = -1
            violations = tuple(replace(self._to_itself(violation), call=number) for violation in self._violations)
            raise refusal(self.name or self._kind.value, self._group_name, violations)

    def _to_itself(self, violation: Violation) -> Violation:
        if self._kind is not OpKind.SEND or violation.kind != "duplicate":
            return violation
        return replace(violation, found="of the actor that sends", expected="of another actor than the source")

    def _check_snapshot(self, snapshot: bool) -> None:
        if violations := wrong_flags(snapshot=snapshot):
            self._violations += violations
        elif snapshot and self._batch is not None:
            self._wrong("snapshot", snapshot, "False in a batch and in a captured step: make the call by itself")

    def _check_async(self, async_op: Any) -> None:
        if violations := wrong_flags(async_op=async_op):
            self._violations += violations
        elif async_op and self._batch is not None and self._batch._async_advice:
            self._wrong("async_op", async_op, self._batch._async_advice)

    # ------------------------------------------------------------------------------------------ compiling

    def _compiled(
        self,
        parts: Iterable[tuple[int, Operand | None, Operand | None]],
        results: Iterable[tuple[int, Operand | None]],
        *,
        is_list: bool,
        root: int = -1,
        peer: int = -1,
        inplace: bool,
        snapshot: bool,
        reshard: Reshard | None = None,
    ) -> CompiledCall:
        """Compiles `parts`, (rank, input, output), and `results`, (rank, operand that holds it; None: a new tensor)."""
        places: dict[Any, int] = {}

        def place(operand: Operand | None) -> int | None:
            if operand is None or operand.ref is None:
                return None
            # A captured value: several participants have one under its key
            identity = operand.ref if type(operand.ref) is Pending else operand.key
            if identity not in places:
                places[identity] = len(places)
                self.used.append(operand)
            return places[identity]

        membership, limit_s = self._membership, self._limit_s
        operands = tuple([(rank, place(src), place(dst)) for rank, src, dst in parts])
        call = (membership, self._kind, operands, self._op, root, peer, bool(inplace), limit_s, bool(snapshot), reshard)
        request = RequestKey(*call, is_limited=self._timeout_s is not None)
        holders = [(membership.members[rank].actor_id, place(holder)) for rank, holder in results]
        prepared = prepare((request,), STAGING_NBYTES, tuple(places)) if self._batch is None else None
        held = tuple([actor_id if at is None else at for actor_id, at in holders])
        return CompiledCall(request, tuple(range(len(places))), held, is_list, prepared)

    @property
    def _limit_s(self) -> float:
        return float(self._membership.timeout_s if self._timeout_s is None else self._timeout_s)
