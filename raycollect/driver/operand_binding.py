"""Binds operands to ranks by the ids of their refs, and says why that can't be done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import ray
from ray.exceptions import GetTimeoutError, RayError

from raycollect.core.deadline import Deadline
from raycollect.core.model import Key
from raycollect.driver.pending import plain
from raycollect.errors import CollectiveTimeoutError, Violation, refusal
from raycollect.errors.text import a_type, listed
from raycollect.group.membership import is_participant
from raycollect.planner import Membership
from raycollect.pos.handle import Handle
from raycollect.ray_bridge import direct_transport, ray_actors, ray_refs, ray_session


@dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """A ref, and its key and actor."""

    ref: Any
    key: Key | None
    actor_id: str
    given: Any = None  # the driver's own tensors, which results have in place of the ref


_NEARLY: dict[type, str] = {
    ray.actor.ActorHandle: "an actor handle",
    ray.actor.ActorMethod: "a method that was not called (call it as actor.method.remote())",
}
"""Types that users mistake for refs -> their names in messages."""


class TaskWait(NamedTuple):
    """How long a call waits for the tasks that make its refs, and the fields of its error."""

    op: str
    group_name: str
    deadline: Deadline

    def value(self, ref: Any) -> Any:
        """The value of a ref of `ray.put` or of a task; CollectiveTimeoutError: the task has not ended in time."""
        try:
            return direct_transport.get(ref, self.deadline.left_s())
        except GetTimeoutError:
            raise self._late(ref) from None
        except ValueError as exc:
            if isinstance(exc, RayError):  # a task's own
                raise
            raise refusal(self.op, self.group_name, (stale(ref.hex()),)) from exc  # Ray knows no owner of it

    def nbytes(self, ref: Any) -> int:
        """The size of that, without fetching it; raises as `value`."""
        if not ray.wait([ref], timeout=self.deadline.left_s(), fetch_local=False)[0]:
            raise self._late(ref)
        return ray_refs.nbytes_of(ref)

    def _late(self, ref: Any) -> CollectiveTimeoutError:
        timeout_s = self.deadline.timeout_s
        detail = f"after {timeout_s:g} s the task that makes ref {ref.hex()} has not returned; no rank was reached"
        return CollectiveTimeoutError(op=self.op, group_name=self.group_name, detail=detail, timeout_s=timeout_s)


def operand(ref: Any, position: int, wait: TaskWait) -> Operand | Violation:
    """Reads a ref. The id alone names the participant (P1); one of ray.put or a task may hold a handle."""
    if not isinstance(ref, ray.ObjectRef):
        return _foreign(
            position, next((what for kind, what in _NEARLY.items() if isinstance(ref, kind)), a_type(ref)), ""
        )
    if not ray_session.is_started():
        return stale(ref.hex(), position)
    key, actor_id = ray_refs.read_ref(ref)
    if actor_id:
        return Operand(ref=ref, key=key, actor_id=actor_id)
    value = wait.value(ref)
    if isinstance(value, Handle):
        return Operand(ref=ref, key=value.key, actor_id=value.actor_id)
    origin = "made by ray.put" if ray_refs.is_put(ref) else "returned by a task"
    return _foreign(position, f"{a_type(value)} {origin}", ref.hex())


def ensure_ray(op: str, refs: Any) -> None:
    """Starts Ray if it does not run; TensorLostError: a ref is given, so its Ray was shut down."""
    if not ray_session.is_started():
        for ref in refs if isinstance(refs, (list, tuple)) else [refs]:
            if isinstance(ref, (list, tuple)):
                ensure_ray(op, ref)
            elif isinstance(ref := plain(ref), (ray.ObjectRef, Handle)):
                raise refusal(op, "", (stale((ref.key if isinstance(ref, Handle) else ref).hex()),))
    ray_session.ensure_ray()


def stale(ref: str, position: int = -1) -> Violation:
    """The violation of a ref, or handle, that is used while no Ray runs; `ref` is in hexadecimal."""
    actual, expected = "of a Ray that was shut down", "a ref of the Ray that runs"
    return Violation(kind="lost", rank=position, field="ref", found=actual, expected=expected, ref=ref)


def _foreign(position: int, actual: str, ref: str) -> Violation:
    expected = "an ObjectRef that a method of a participant returned"
    return Violation(kind="foreign", rank=position, field="ref", found=actual, expected=expected, ref=ref)


def bind(
    operands: Sequence[Operand], membership: Membership, *, whole: bool = False
) -> dict[int, Operand] | list[Violation]:
    """Gives each operand its rank."""
    ranked: dict[int, Operand] = {}
    violations: list[Violation] = []
    for operand in operands:
        rank = membership.rank_of(operand.actor_id)
        if rank < 0:
            violations.append(_outsider(operand, membership))
        elif not membership.members[rank].participant:
            violations.append(_no_participant(operand, rank, membership.members[rank].actor))
        elif rank in ranked:
            violations.append(_second_ref(operand, rank, membership.members[rank].actor))
        else:
            ranked[rank] = operand
    if whole and not violations:
        violations = [
            Violation(
                kind="missing", rank=rank, field="operand", found="missing", expected="one ref", actor=member.actor
            )
            for rank, member in enumerate(membership.members)
            if rank not in ranked
        ]
    return violations or ranked


def repeated(operands: Sequence[Operand]) -> list[Violation]:
    """Violations of operands whose actor has one already, for groups whose ranks are positions."""
    ids = [operand.actor_id for operand in operands]
    return [_second_ref(operand, rank) for rank, operand in enumerate(operands) if operand.actor_id in ids[:rank]]


def _second_ref(operand: Operand, rank: int, actor: str = "") -> Violation:
    actual = "a second ref of the same actor"
    return Violation(
        kind="duplicate", rank=rank, field="ref", found=actual, expected="one per actor", actor=actor, ref=_hex(operand)
    )


def _outsider(operand: Operand, membership: Membership) -> Violation:
    stranger = strangers([operand])
    if stranger:
        return replace(stranger[0], rank=-1)  # it has no rank in this group
    actor = ray_actors.describe_actor(ray_actors.actor_handle(operand.actor_id))
    expected = f"one of {listed(member.actor for member in membership.members)}"
    return Violation(kind="not_member", field="actor", found=actor, expected=expected, ref=_hex(operand))


def strangers(operands: Sequence[Operand]) -> list[Violation]:
    """Violations of operands whose actors can't take part in any plan: no mixin, or unknown to this process."""
    violations = []
    for position, operand in enumerate(operands):
        handle = ray_actors.actor_handle(operand.actor_id)
        if handle is None:
            what = f"{operand.actor_id[:6]}, of which this process has no handle (is it of a Ray that was shut down?)"
            expected, ref = "a participant", _hex(operand)
            violations.append(
                Violation(kind="not_member", rank=position, field="actor", found=what, expected=expected, ref=ref)
            )
        elif not is_participant(handle):
            violations.append(_no_participant(operand, position, ray_actors.describe_actor(handle)))
    return violations


def _no_participant(operand: Operand, rank: int, actor: str) -> Violation:
    actual = f"{actor}, without the mixin"
    return Violation(
        kind="not_participant", rank=rank, field="actor", found=actual, expected="a participant", ref=_hex(operand)
    )


def _hex(operand: Operand) -> str:
    return operand.key.hex() if operand.key else ""
