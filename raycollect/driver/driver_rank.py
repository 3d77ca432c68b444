"""A driver as a rank of groups that it drives: a participant in the controller's own process.

It is a second participant of the process, with a lease and an order of plans of its own; groups and tensors are the
process's. It is connected to the controller as all others are. What it lacks is an actor: programs are handed over in
this process, and run in the thread in which other participants run those that come past the actor's queue. The order of
the driver's calls is their order.

Its operands are tensors of this process. Each is kept under a key of its own as long as a plan refers to it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import ray

from raycollect.backends import arrays
from raycollect.channel.messages import Leave, Order
from raycollect.core.model import TASK_NBYTES, Key, task_key
from raycollect.driver.operand_binding import Operand
from raycollect.driver.participant_link import ParticipantLink
from raycollect.driver.plan_tracker import PlanTracker
from raycollect.errors import ConnectionLostError, InvalidGroupError
from raycollect.member.participant import Identity, Participant
from raycollect.member.runtime import Runtime
from raycollect.planner import decode_order
from raycollect.pos import Container
from raycollect.pos.handle import Handle
from raycollect.ray_bridge import ray_actors
from raycollect.ray_bridge.driver_handle import DriverHandle

_ID_NBYTES = 16  # of Ray's id of an actor


class DriverResult:
    """Stands in `Work.refs` for an output on the driver until the collective has ended; `Work.wait` returns the output.

    Attributes:
        value: The output; None before.
    """

    __slots__ = ("__weakref__", "value")

    def __init__(self) -> None:
        self.value: Any = None

    def __repr__(self) -> str:
        return "<an output of a collective on the driver: wait() returns it>"


def with_results(result: Any) -> Any:
    """A call's return value, with outputs on the driver in place of each `DriverResult`."""
    if isinstance(result, list):
        return [with_results(item) for item in result]
    return result.value if type(result) is DriverResult and result.value is not None else result


class _Participant(Participant):
    """The participant in the driver's process."""

    def __init__(self, runtime: Runtime, actor_id: str, actor: str) -> None:
        super().__init__(runtime, Identity.of_ray(actor_id, actor))
        self._is_closed = False
        self.results: WeakValueDictionary[Key, DriverResult] = WeakValueDictionary()

    def describe(self, *, ordered: bool = True) -> dict[str, Any]:
        if self._is_closed:
            raise InvalidGroupError(group_name="", detail="this_process() of a Ray that was shut down: call it again")
        # No method runs here: `ordered` is about plans.
        return {**super().describe(ordered=False), "ordered": ordered, "participant": True}

    def task_of(self, seq: int) -> bytes:
        return seq.to_bytes(TASK_NBYTES - _ID_NBYTES, "little") + bytes.fromhex(self.actor_id)

    def keep_output(self, key: Key, container: Container) -> Handle | None:
        result = self.results.pop(key, None)
        if result is not None:  # its `Work` still exists
            result.value = container.value
        return None

    def take(self, order: Order) -> None:
        """Runs a program after earlier ones; ConnectionLostError: the lease has ended."""
        lease = self.leased()
        lease.plan_queue.received(order, lease.run_ordered)

    def close(self) -> None:
        self._is_closed = True
        super().close()


class DriverRank:
    """The driver as a participant. Made on first use; ends with its controller.

    Attributes:
        actor_id: Its id among actors.
        handle: Stands for it in a list of actors.
    """

    def __init__(self, runtime: Runtime) -> None:
        actor_id = ray.ActorID(os.urandom(_ID_NBYTES - 4) + bytes.fromhex(ray.get_runtime_context().get_job_id()))
        me = ray_actors.current_actor_id()
        name = f"the driver {ray_actors.short_actor(ray_actors.current_class(), me)}" if me else "the driver"
        self.actor_id: str = actor_id.hex()
        self.participant: _Participant = _Participant(runtime, self.actor_id, name)
        link = partial(DriverLink, self.participant)
        self.handle: DriverHandle = DriverHandle(actor_id, name, self.participant.describe, link)

    def operand(self, value: Any) -> Operand | None:
        """Tensors of this process as an operand; None for anything else."""
        if type(value) is DriverResult:
            value = value.value
        container = Container.of(value, arrays.is_tensor)
        if container is None:
            return None
        key = task_key(os.urandom(TASK_NBYTES - _ID_NBYTES) + bytes.fromhex(self.actor_id), 1)
        handle = self.participant.keep(key, container)
        return Operand(ref=ray.put(handle), key=key, actor_id=self.actor_id, given=value)

    def close(self) -> None:
        """Closes its servers."""
        self.participant.close()


class DriverLink(ParticipantLink):
    """The controller's end of the driver as a participant: programs do not travel."""

    is_here = True

    def __init__(self, participant: _Participant, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "calls": None})  # there is no actor whose calls could be noted
        self._participant = participant

    def submit(self, payload: bytes, outputs: int, behind: Sequence[Any] = ()) -> list[Any]:
        """Hands over a program; returns a `DriverResult` for each of its outputs."""
        participant, results = self._participant, [DriverResult() for _ in range(outputs)]
        task = participant.task_of(decode_order(payload)[0].seq)
        participant.results.update({task_key(task, at): result for at, result in enumerate(results, 1)})
        self.order(Order(payload=payload, in_order=True, after=b""))
        return results

    def submit_in_order(self, payload: bytes, tracker: PlanTracker, position: int, letters: Any) -> None:
        """Hands over a program without outputs."""
        self.order(Order(payload=payload, in_order=True, after=b""))

    def send(self, message: Any) -> None:
        """Sends a message; a group is left at once, so that this process is no member when `destroy` returns."""
        if type(message) is Leave:
            with suppress(ConnectionLostError):
                self._participant.leased().received(message)
        super().send(message)

    def order(self, message: Order, letters: Any = None) -> None:
        """Hands over a program directly: over the connection, it might overtake others, or be overtaken."""
        self._participant.take(message)
