"""What becomes of a recorded step when the members of its groups change: what it loses, or its calls as they are then.

A call is planned anew over the ranks of now, from what was recorded. Only an actor that another one has replaced is
exchanged: a call that names one who left has lost it, and so has one that lacks an operand of a rank that came.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from raycollect.captured.calls import StepRequests
from raycollect.captured.recording import Recording
from raycollect.core import ray_internals
from raycollect.core.model import OpKind
from raycollect.core.signals import Allowed
from raycollect.driver.controller import Controller
from raycollect.driver.dispatch import RequestKey
from raycollect.driver.groups import Groups
from raycollect.driver.pending import Pending
from raycollect.driver.requests import Ref
from raycollect.engine.step_program import CAPTURE_NBYTES, captured_key
from raycollect.errors import CaptureMembersError
from raycollect.planner import Membership


def follow(block: Recording, controller: Controller) -> bytes:
    """Changes a recorded step to the members of its groups of now; returns its new id, empty where nothing has changed.

    Raises:
        CaptureMembersError: It needs what is not there any more; it is as it was.
    """
    request_list = block.request_list
    with Allowed():  # a change of members may take long
        succession = Succession.of([one.group for one in request_list.asked], controller.groups)
    if not succession.now and not block.is_moved:
        return b""
    lost = succession.lost(request_list)
    if lost:
        raise CaptureMembersError(
            detail="the members of its groups have changed, and this captured step lacks", lost=lost
        )
    capture = secrets.token_bytes(CAPTURE_NBYTES)
    succession.apply(request_list, capture)
    held, block.held, block.is_moved = block.held, {}, True
    for asked in request_list.asked:
        block._hold(controller, asked.group)
    for membership in held:
        controller.groups.held.release(membership)
    return capture


@dataclass(frozen=True, slots=True, kw_only=True)
class Succession:
    """The groups in the place of those of a step, and the actors in the place of others, by their ids."""

    now: Mapping[Membership, Membership]
    heirs: Mapping[str, str]

    @classmethod
    def of(cls, memberships: Iterable[Membership], groups: Groups) -> Succession:
        """What has become of groups that are held."""
        found = {one: made for one in dict.fromkeys(memberships) if (made := groups.held.successor(one)) is not None}
        heirs = {old: new for _, replaced in found.values() for old, new in replaced.items()}
        return cls(now={one: made for one, (made, _) in found.items()}, heirs=heirs)

    def rank(self, group: Membership, rank: int) -> int:
        """The rank now of what had this rank in a group; -1 where it has left."""
        actor_id = group.members[rank].actor_id
        return self.now.get(group, group).rank_of(self.heirs.get(actor_id, actor_id))

    def lost(self, request_list: StepRequests) -> tuple[str, ...]:
        """What the calls of a step name, or need, that is not there; empty where all of them go on."""
        handles = list(request_list.refs)
        found: list[str] = []
        for step, asked in zip(request_list.steps, request_list.asked, strict=True):
            found += [f"call {step} ({asked.name}): {one}" for one in self._lost_by(asked, handles)]
        for call in request_list.calls:
            found += [f"call {call.step} ({call.method}): {one}" for one in self._lost_of(call.made.actor_id)]
            strange = [one for one in call.arguments if type(one) is Ref and one.maker in self.heirs]
            found += [f"call {call.step} ({call.method}): {one.where}, a ref of an actor that died" for one in strange]
        return tuple(found)

    def _lost_by(self, asked: RequestKey, handles: Sequence[Any]) -> Iterator[str]:
        group = asked.group
        now = self.now.get(group, group)
        if asked.kind is OpKind.BARRIER:  # of whoever is there
            return
        named = set()
        for rank, *sources in asked.operands:
            member = group.members[rank]
            named.add(self.rank(group, rank))
            if self.rank(group, rank) < 0:
                yield f"rank {rank} of group {now.spec.name!r}, {member.actor}"
            elif member.actor_id in self.heirs:
                refs = [handles[source] for source in sources if type(source) is int]
                yield from (f"ref {one.hex()} of {member.actor}" for one in refs if type(one) is not Pending)
        if asked.kind is not OpKind.SEND and asked.reshard is None:
            came = [one for one in now.members if one.rank not in named]
            yield from (f"an operand of rank {one.rank} of group {now.spec.name!r}, {one.actor}" for one in came)

    def _lost_of(self, actor_id: str) -> Iterator[str]:
        if actor_id in self.heirs:
            return
        for before, now in self.now.items():
            if before.rank_of(actor_id) >= 0 > now.rank_of(actor_id):
                yield f"{before.members[before.rank_of(actor_id)].actor}, which has left group {now.spec.name!r}"
                return

    def apply(self, request_list: StepRequests, capture: bytes) -> None:
        """Changes the calls of a step, which loses nothing, to what they are now; `capture` is its id from now on."""
        placeholders = dict.fromkeys([*request_list.made.values(), *(call.made for call in request_list.calls)])
        for pending in placeholders:
            pending.actor_id = self.heirs.get(pending.actor_id, pending.actor_id)
            pending.key = captured_key(capture, pending.step)
        request_list.asked = list(map(self._moved, request_list.asked))
        request_list.made = {(number, one.actor_id): one for (number, _), one in request_list.made.items()}
        request_list.calls = [
            call
            if call.actor._actor_id.hex() == call.made.actor_id
            else replace(call, actor=ray_internals.actor_handle(call.made.actor_id))
            for call in request_list.calls
        ]

    def _moved(self, asked: RequestKey) -> RequestKey:
        group = asked.group
        now = self.now.get(group, group)
        operands = [(self.rank(group, rank), src, dst) for rank, src, dst in asked.operands]
        if asked.kind is OpKind.BARRIER:
            operands = [(rank, None, None) for rank in range(now.spec.world_size)]
        reshard = asked.reshard
        if reshard is not None:
            src, dst = ([self.rank(group, rank) for rank in ranks] for ranks in (reshard.src_ranks, reshard.dst_ranks))
            reshard = replace(reshard, src_ranks=tuple(src), dst_ranks=tuple(dst))
        return asked._replace(
            group=now,
            operands=tuple(sorted(operands, key=lambda one: one[0])),
            root=asked.root if asked.root < 0 else self.rank(group, asked.root),
            peer=asked.peer if asked.peer < 0 else self.rank(group, asked.peer),
            reshard=reshard,
        )
