"""The driver's verbs: the whole collective stated once, over ObjectRefs.

All of them may be called by the driver, or by an actor or task that drives participants other than itself; from any
thread. Without ``async_op`` a call returns when the collective is done on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from raycollect import group as groups
from raycollect.controller import Controller
from raycollect.dispatch import send_program
from raycollect.errors import InvalidGroupError, Violation, refusal
from raycollect.group import Declaration, Membership, Operand
from raycollect.model import OpKind, ReduceOp
from raycollect.planner import Request
from raycollect.work import Work

DEFAULT_TIMEOUT_S = 60.0
"""How long ranks wait for each other, in seconds, where a call does not say."""


# ---------------------------------------------------------------------------------------------- groups


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberStatus:
    """One rank, at the moment of asking.

    Attributes:
        rank: Its rank.
        actor: What a person calls it.
        node_id: The Ray node that it runs on.
        pid: Its process.
        ordered: True: collectives run in program order with its methods. False (async and threaded actors): after
            their operands' methods and after earlier collectives, and may overlap other methods.
        plans: The collectives of this controller that it has not ended.
    """

    rank: int
    actor: str
    node_id: str
    pid: int
    ordered: bool
    plans: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStatus:
    """A group, at the moment of asking.

    Attributes:
        state: ``"alive"``, ``"broken"`` or ``"destroyed"``.
        detail: Why it is broken.
        members: By rank.
    """

    state: str
    detail: str
    members: tuple[MemberStatus, ...]


class Group:
    """A declared group, in the process that declared it. Holds its actors' handles."""

    def __init__(self, controller: Controller, membership: Membership, actors: Sequence[Any]) -> None:
        self._controller = controller
        self._membership = membership
        self._actors = tuple(actors)

    @property
    def name(self) -> str:
        """Its name."""
        return self._membership.spec.name

    @property
    def world_size(self) -> int:
        """How many ranks it has."""
        return self._membership.spec.world_size

    @property
    def backend(self) -> str:
        """The backend that it uses, never ``"auto"``."""
        return self._membership.spec.backend

    @property
    def actors(self) -> tuple[Any, ...]:
        """The actor handles by rank."""
        return self._actors

    def status(self) -> GroupStatus:
        """Where it stands."""
        membership, controller = self._membership, self._controller
        flights = [flight for flight in controller.flights() if flight.membership is membership and not flight.landed]
        members = tuple(
            MemberStatus(
                rank=m.rank,
                actor=m.actor,
                node_id=m.node_id,
                pid=m.pid,
                ordered=m.ordered,
                plans=tuple(flight.seq for flight in flights if flight.is_pending(m.rank)),
            )
            for m in membership.members
        )
        detail = controller.why_broken(membership)
        state = groups.BROKEN if detail else groups.ALIVE
        if not controller.exists(membership):
            state, detail = groups.DESTROYED, ""
        return GroupStatus(state=state, detail=detail, members=members)

    def destroy(self) -> None:
        """Ends the group; the actors live on. Collectives of it under way are aborted."""
        self._controller.destroy(self.name)

    def __repr__(self) -> str:
        members = ", ".join(member.actor for member in self._membership.members)
        return f"<Group {self.name!r} of {members}; backend {self.backend}, {self.status().state}>"


def declare_collective_group(
    actors: Sequence[Any],
    world_size: int | None = None,
    ranks: Sequence[int] | None = None,
    backend: str = "auto",
    group_name: str = "default",
    *,
    options: Mapping[str, Any] | None = None,
    ordering: str = "program",
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> Group:
    """Declares actors to be a group; returns when every member has joined.

    Args:
        actors: The actor handles; their classes inherit `CollectiveParticipant`.
        world_size: The number of actors, if given.
        ranks: The rank of each actor, a permutation of 0 to n-1; by default their order.
        backend: ``"auto"`` takes shared memory where all members share a host and gloo otherwise; ``"shm"``,
            ``"gloo"`` and ``"local"`` by name.
        group_name: What to call it; the verbs use ``"default"`` unless told otherwise.
        options: The same arguments as a dict (``rank`` or ``ranks``, ``world_size``, ``backend``, ``group_name``).
        ordering: ``"program"``: collectives take their place in each actor's queue.
        timeout_s: How long to wait for the members, in seconds; an actor that is still pending is named.

    Returns:
        The group.

    Raises:
        InvalidGroupError: The arguments can't form a group; with every reason.
        GroupExistsError: A group of that name is declared.
        UnknownBackendError, BackendNotInstalledError, BackendUnavailableError: The backend can't be used.
        ActorGoneError, ParticipantDiedError, CollectiveTimeoutError: A member did not join.
        ControllerConflictError: Another process drives one of the actors.
        SelfDrivenError: The calling actor is among them.
        RayClientError: This process is connected by ray://.
    """
    asked = {"world_size": world_size, "ranks": ranks, "backend": backend, "group_name": group_name}
    asked.update(_options(options, group_name))
    controller = Controller.current()
    declaration = Declaration.of(actors, **asked, ordering=ordering, timeout_s=timeout_s)  # type: ignore[arg-type]
    membership = controller.declare(declaration)
    return Group(controller, membership, declaration.actors)


create_collective_group = declare_collective_group


def _options(options: Mapping[str, Any] | None, group_name: str) -> dict[str, Any]:
    known = {"rank": "ranks", "ranks": "ranks", "world_size": "world_size", "backend": "backend"}
    known["group_name"] = "group_name"
    given = dict(options or {})
    strange = sorted(set(given) - set(known))
    if strange:
        raise InvalidGroupError(group_name=group_name, detail=f"unknown options {strange}; there are {sorted(known)}")
    return {known[name]: value for name, value in given.items()}


def destroy_collective_group(group_name: str = "default") -> None:
    """Ends a declared group; the actors live on. Collectives of it under way are aborted.

    Raises:
        UnknownGroupError: There is none of that name.
    """
    Controller.current().destroy(group_name)


# ---------------------------------------------------------------------------------------------- collectives


def allreduce_refs(
    tensor_refs: Sequence[Any],
    group_name: str = "default",
    op: ReduceOp | str = ReduceOp.SUM,
    *,
    inplace: bool = True,
    async_op: bool = False,
    timeout_s: float | None = None,
) -> Any:
    """Reduces tensors elementwise over all ranks and gives every rank the result.

    Args:
        tensor_refs: One ref per rank, each to an array (or a list, tuple or dict of arrays) of one shape and dtype. In
            a declared group an actor's rank counts, whatever the order of the list; otherwise the position.
        group_name: A declared group; ``"default"`` is derived from the refs where it was not declared.
        op: SUM, PRODUCT, MIN, MAX or AVG (of floats). SUM of bool is a logical or, PRODUCT a logical and.
        inplace: True: the tensors themselves hold the result afterwards. False: new tensors do.
        async_op: True: returns a `Work` at once.
        timeout_s: How long ranks wait for each other, in seconds; default 60.

    Returns:
        The result refs in rank order: the given ones in place, new ones otherwise; or a `Work` of them.

    Raises:
        RefusedError: Nothing ran and no tensor was touched; the leaf says why, the violations say where.
        GroupError: No such group, or it is broken.
        FaultError: A participant died or came too late, or the plan could not be sent.
    """
    reduce_op = _reduce_op(op, "allreduce", group_name)
    call = _Call("allreduce", group_name, tensor_refs, timeout_s)
    return call.run(OpKind.ALLREDUCE, async_op=async_op, op=reduce_op, inplace=inplace)


def broadcast_refs(
    tensor_refs: Sequence[Any],
    src_rank: int = 0,
    group_name: str = "default",
    *,
    async_op: bool = False,
    timeout_s: float | None = None,
) -> Any:
    """Overwrites every rank's tensor with that of one rank.

    Args:
        tensor_refs: One ref per rank, all of one shape and dtype.
        src_rank: The rank whose tensor all get.
        group_name: See `allreduce_refs`.
        async_op: True: returns a `Work` at once.
        timeout_s: How long ranks wait for each other, in seconds; default 60.

    Returns:
        The given refs in rank order; or a `Work` of them.

    Raises:
        RefusedError, GroupError, FaultError: As `allreduce_refs`.
    """
    return _Call("broadcast", group_name, tensor_refs, timeout_s).run(
        OpKind.BROADCAST, async_op=async_op, root=src_rank
    )


def send_ref(
    src_tensor_ref: Any,
    dst_tensor_ref: Any,
    group_name: str = "default",
    *,
    async_op: bool = False,
    timeout_s: float | None = None,
) -> Any:
    """Sends a tensor from the participant that holds it to another one.

    Args:
        src_tensor_ref: The tensor to send.
        dst_tensor_ref: The tensor to overwrite, of the same shape and dtype; or an actor handle: the tensor is
            allocated there.
        group_name: A declared group that holds both; ``"default"`` is derived where it was not declared.
        async_op: True: returns a `Work` at once.
        timeout_s: How long the two wait for each other, in seconds; default 60.

    Returns:
        The destination's ref; or a `Work` of it.

    Raises:
        RefusedError, GroupError, FaultError: As `allreduce_refs`.
    """
    call = _Call("send", group_name, [src_tensor_ref, dst_tensor_ref], timeout_s)
    return call.send(async_op=async_op)


def recv_ref(
    dst_tensor_ref: Any,
    src_tensor_ref: Any,
    group_name: str = "default",
    *,
    async_op: bool = False,
    timeout_s: float | None = None,
) -> Any:
    """`send_ref`, said from the receiver's side: the same one call does both halves."""
    return send_ref(src_tensor_ref, dst_tensor_ref, group_name, async_op=async_op, timeout_s=timeout_s)


def barrier(group_name: str = "default", *, async_op: bool = False, timeout_s: float | None = None) -> Any:
    """Brings all ranks of a declared group together: each has ended what was submitted to it before.

    Returns:
        None; or a `Work`.

    Raises:
        GroupError, FaultError: As `allreduce_refs`.
    """
    controller = Controller.current()
    membership = controller.named(group_name)
    ranked = [(m.rank, Operand(ref=None, key=None, actor_id=m.actor_id)) for m in membership.members]
    work = _dispatch(controller, membership, OpKind.BARRIER, ranked, timeout_s=timeout_s)
    if async_op:
        return work
    work.wait()
    return None


class _Call:
    """One call of a verb: its refs read, its group found, its operands bound to ranks."""

    def __init__(self, op: str, group_name: str, refs: Any, timeout_s: float | None) -> None:
        self._op = op
        self._group_name = group_name
        self._timeout_s = timeout_s
        self._controller = Controller.current()
        self._operands = self._read(refs)
        self._membership = self._find()
        bound = groups.bind(self._operands, self._membership)
        self._ranked = [pair for pair in bound if isinstance(pair, tuple)]
        self._raise([item for item in bound if isinstance(item, Violation)])

    def run(self, kind: OpKind, *, async_op: bool, **arguments: Any) -> Any:
        """A collective over all ranks."""
        work = _dispatch(self._controller, self._membership, kind, self._ranked, timeout_s=self._timeout_s, **arguments)
        return work if async_op else work.wait()

    def send(self, *, async_op: bool) -> Any:
        """A send from the first operand's rank to the second's."""
        root, peer = (self._membership.rank_of(one.actor_id) for one in self._operands)
        work = self.run(OpKind.SEND, async_op=True, root=root, peer=peer)
        work.refs = work.refs[-1] if root < peer else work.refs[0]
        return work if async_op else work.wait()

    def _read(self, refs: Any) -> list[Operand]:
        if not isinstance(refs, (list, tuple)) or not refs:
            found = "empty" if isinstance(refs, (list, tuple)) else f"a {type(refs).__name__}"
            self._raise(
                [Violation(kind="missing", rank=-1, field="list of refs", found=found, expected="one ref per rank")]
            )
        read = [_destination(ref) if _is_actor(ref) else groups.operand(ref, i) for i, ref in enumerate(refs)]
        self._raise([one for one in read if isinstance(one, Violation)])
        return [one for one in read if isinstance(one, Operand)]

    def _find(self) -> Membership:
        controller, group_name = self._controller, self._group_name
        if controller.is_declared(group_name) or group_name != "default":
            return controller.named(group_name)
        ids = tuple(one.actor_id for one in self._operands)
        self._raise(groups.repeated(self._operands))
        self._raise(groups.strangers(self._operands))
        return controller.derive(ids, self._timeout_s or DEFAULT_TIMEOUT_S)

    def _raise(self, violations: list[Violation]) -> None:
        if violations:
            raise refusal(self._op, self._group_name, tuple(violations))


def _dispatch(
    controller: Controller,
    membership: Membership,
    kind: OpKind,
    ranked: Sequence[tuple[int, Operand]],
    *,
    timeout_s: float | None,
    **arguments: Any,
) -> Work:
    request = Request(
        kind=kind,
        group=membership.spec,
        operands=tuple((rank, one.key) for rank, one in ranked),
        timeout_s=DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s,
        **arguments,
    )
    flight = send_program(controller, request, membership, {rank: one.ref for rank, one in ranked})
    return Work(controller, flight, [flight.results.get(rank) for rank, _ in ranked])


def _is_actor(value: Any) -> bool:
    return isinstance(value, ray.actor.ActorHandle)


def _destination(actor: Any) -> Operand:
    return Operand(ref=None, key=None, actor_id=actor._actor_id.hex())


def _reduce_op(op: Any, verb: str, group_name: str) -> ReduceOp:
    try:
        return ReduceOp.coerce(op)
    except ValueError as exc:
        violation = Violation(kind="unsupported", rank=-1, field="op", found=repr(op), expected=str(exc))
        raise refusal(verb, group_name, (violation,)) from None
