"""Tensors that no participant holds, as sources: those of the calling process, and of refs of `ray.put` or of tasks.

One participant takes such a value in, by an actor task: it gets it from Ray's object store, and returns a handle as any
method does that returns tensors. From then on it is an operand like others. It is freed with the plan that reads it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ray

from raycollect.backends import arrays
from raycollect.core.model import GroupLike, OpKind
from raycollect.driver import operand_binding
from raycollect.driver.call import Call
from raycollect.driver.driver_rank import DriverRank
from raycollect.driver.operand_binding import Operand, TaskWait
from raycollect.driver.pending import Pending
from raycollect.errors import Violation, refusal
from raycollect.pos import Container
from raycollect.pos.handle import Handle
from raycollect.ray_bridge import ray_actors, ray_refs
from raycollect.ray_bridge.driver_handle import is_handle

MOST_LOOKED_AT_NBYTES = 100 << 10
"""The largest value that Ray sends to the owner of a ref outside the object store."""


def is_own(value: Any, wait: TaskWait) -> bool:
    """Whether a value, or that of a ref, is tensors that no participant holds; waits for the task that makes it.

    A large value is not fetched to look at it: it is no handle, and the participant that
    takes it in checks whether it is tensors.
    """
    if isinstance(value, Pending) or is_handle(value):
        return False
    if isinstance(value, ray.ObjectRef):
        if ray_refs.read_ref(value)[1]:
            return False
        if wait.nbytes(value) > MOST_LOOKED_AT_NBYTES:
            return True
        value = wait.value(value)
    return not isinstance(value, Handle) and Container.of(value, arrays.is_tensor) is not None


def taken_in(value: Any, actor_id: str, copies: int = 0) -> Operand:
    """Such a value on a participant; a list that has it so many times, where `copies` are asked for."""
    source = value if isinstance(value, ray.ObjectRef) else ray.put(value)
    ref = ray_actors.actor_handle(actor_id).__raycollect_take_in__.remote(source, copies)
    key, actor_id = ray_refs.read_ref(ref)
    return Operand(ref=ref, key=key, actor_id=actor_id)


class OwnSource(Call):
    """A scatter of such a value from a rank that takes it in; or a broadcast, which is one of equal pieces."""

    def __init__(
        self, kind: OpKind, group_name: GroupLike, timeout_s: float | None, tensor_refs: Any, *, wait: TaskWait
    ) -> None:
        self.name = kind.value
        super().__init__(OpKind.SCATTER, group_name, timeout_s, wait=wait, tensor_refs=tensor_refs)

    def start(self, value: Any, root: Any, *, async_op: bool) -> Any:
        """Sends the call, or records it; `root` is the rank that takes the value in."""
        spec, members = self._membership.spec, self._membership.members
        rank = self._number("src_rank", root, f"a rank from 0 to {spec.world_size - 1}")
        self._check_async(async_op)
        self._raise()
        if 0 <= rank < spec.world_size:
            self._bind("tensor_list_ref", [Operand(ref=None, key=None, actor_id=members[rank].actor_id)], alone=True)
            self._raise()
            copies = spec.world_size if self.name == OpKind.BROADCAST.value else 0
            self._bound["tensor_list_ref"] = {rank: self._taken_in(value, members[rank].actor_id, copies)}
        return self.carry_out(self.compile(root=rank, async_op=async_op), async_op=async_op)

    def _taken_in(self, value: Any, actor_id: str, copies: int) -> Operand:
        driver_rank = self._driver_rank
        if driver_rank is None or driver_rank.actor_id != actor_id:
            return taken_in(value, actor_id, copies)
        value = self._wait.value(value) if isinstance(value, ray.ObjectRef) else value
        return driver_rank.operand([value] * copies if copies else value) or taken_in(value, actor_id, copies)


def sources_on(targets: Any, sources: Any, driver_rank: DriverRank | None, wait: TaskWait) -> Any:
    """The sources of a reshard, of which such values are taken in by actors of the targets that give nothing else.

    Where this process is a rank, as `driver_rank`, its own tensors stay: it gives them.
    """
    if not isinstance(sources, (list, tuple)) or not isinstance(targets, (list, tuple)):
        return sources  # the call refuses them
    mine = "" if driver_rank is None else driver_rank.actor_id
    own = [
        at
        for at, source in enumerate(sources)
        if is_own(source, wait) and (not mine or isinstance(source, ray.ObjectRef))
    ]
    if not own:
        return sources
    taken = {actor_id for at, source in enumerate(sources) if at not in own and (actor_id := _actor_of(source, wait))}
    free = [actor_id for target in targets if (actor_id := _actor_of(target, wait)) and actor_id not in taken]
    free.sort(key=lambda actor_id: actor_id == mine)  # the driver is the last choice
    if len(free) < len(own):
        actual, expected = f"{len(own)} tensors of this process", f"at most one for each target's actor: {len(free)}"
        raise refusal("reshard", "", (Violation(kind="argument", field="src_refs", found=actual, expected=expected),))
    taker = dict(zip(own, free, strict=False))
    takers = [Operand(ref=None, key=None, actor_id=actor_id) for actor_id in taker.values() if actor_id != mine]
    if wrong := operand_binding.strangers(takers):
        raise refusal("reshard", "", tuple(replace(violation, rank=-1) for violation in wrong))

    def operand(at: int, source: Any) -> Any:
        if at not in taker:
            return source
        return wait.value(source) if taker[at] == mine else taken_in(source, taker[at]).ref

    return [operand(at, source) for at, source in enumerate(sources)]


def _actor_of(target: Any, wait: TaskWait) -> str:
    if is_handle(target):
        return ray_actors.id_of(target)
    if isinstance(target, Pending):
        return target.actor_id
    read = operand_binding.operand(target, 0, wait)
    return read.actor_id if isinstance(read, Operand) else ""
