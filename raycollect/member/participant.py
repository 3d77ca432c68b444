"""The participant: the server of a process for controllers and other participants, its lease, and its tensors.

The controller runs `describe`, `gpu` and `run_program` through `__ray_call__` on actors without the mixin.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import ray
from msgspec import ValidationError, convert

from raycollect.backends import Gpu, arrays, gpus, streams
from raycollect.channel import ControlLink, DataLink, MailboxClient, Server
from raycollect.channel.messages import Bye, Keeps, Message, Refused, Unused, Welcome
from raycollect.core import threads
from raycollect.core.model import Address, Key, Segment
from raycollect.errors import (
    ChannelError,
    ConnectionLostError,
    ControllerConflictError,
    GroupBrokenError,
    ProtocolError,
    Violation,
    refusal,
    to_wire,
)
from raycollect.member import introspection
from raycollect.member.lease import Lease
from raycollect.member.methods import Methods
from raycollect.member.runtime import Runtime, this_runtime
from raycollect.member.token_lenders import TokenLenders
from raycollect.member.wait_monitor import WaitMonitor
from raycollect.planner import decode_order
from raycollect.pos import Container, Store, fetch, obstacle
from raycollect.pos.handle import Handle
from raycollect.pos.ref_tokens import RefTokenPool
from raycollect.ray_bridge import ray_actors, ray_cluster, ray_session
from raycollect.ray_bridge.call_tokens import LentToken
from raycollect.ray_bridge.direct_transport import Returned
from raycollect.ray_bridge.serialization import take_over

STORE_LIMIT_WITHOUT_TOKENS = 1024
"""How many values a store holds if Ray can't report the end of a ref."""

MOST_FETCHING = 64
"""How many coroutines may fetch tensors of other participants at the same time."""

STREAMED_KEPT = 64
"""How many of the newest values that generators yielded are kept, whatever Ray reports of their refs.

Ray 2.60 can lose the reference count of a value nested in a streamed item, if the item is yielded before its consumer
asks for it (docs/adr/0001-ray-internals.md). Without this, an item could be freed before its first use.
"""


class Tokens(Protocol):
    """Detects the end of a value's last reference; see `RefTokenPool`."""

    supported: bool

    def take(self, key: Key) -> Any:
        """A token for a key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """The identity and the location of a participant.

    Attributes:
        actor_id: Ray's id of the actor, in hexadecimal.
        actor: The name of the actor for a person.
        host: The address on which it listens.
        incarnation: The id of this start of the actor.
        machine: The id of the host.
        node_id: Ray's id of the node.
        accelerators: Ray's ids of its accelerators, by kind.
    """

    actor_id: str
    actor: str
    host: str
    incarnation: str
    machine: str
    node_id: str = ""
    accelerators: tuple[tuple[str, tuple[str, ...]], ...] = ()

    @classmethod
    def of_ray(cls, actor_id: str, actor: str) -> Identity:
        """The identity of an actor in this process; Ray provides the other fields."""
        context = ray.get_runtime_context()
        return cls(
            actor_id=actor_id,
            actor=actor,
            host=ray_session.node_address(),
            incarnation=ray_session.worker_id(),
            machine=ray_session.machine_id(),
            node_id=context.get_node_id(),
            accelerators=tuple((kind, tuple(ids)) for kind, ids in context.get_accelerator_ids().items() if ids),
        )


class Participant:
    """A process as a participant. A process that drives groups of which it is a rank has a second participant.

    Args:
        runtime: The groups and tensors of the process.
        identity: The identity of the participant.
        make_tokens: Makes the tokens of values, from a function that frees a value.

    Attributes:
        methods: The methods of the actor.
        watch: The waits that block methods.
        store: The tensors of the process.
        at_close: Called as it closes, by name: they end what refers to this participant.
    """

    def __init__(
        self,
        runtime: Runtime,
        identity: Identity,
        make_tokens: Callable[[Callable[[Key], None]], Tokens] = RefTokenPool,
    ) -> None:
        take_over(Handle, Handle.form)
        take_over(Returned, Returned.form)
        self.runtime = runtime
        self.identity = identity
        self.actor_id: str = identity.actor_id
        self.actor: str = identity.actor
        self.host: str = identity.host
        self.store: Store = runtime.instruments.store
        self.at_close: dict[str, Callable[[], None]] = {}
        self._tokens = make_tokens(self._forget)
        self.store.limit(None if self._tokens.supported else STORE_LIMIT_WITHOUT_TOKENS)
        self.fetch_threads: ThreadPoolExecutor = threads.pool("raycollect-fetch", MOST_FETCHING)
        self.methods: Methods = Methods(identity.actor, runtime.tracer)
        self.watch: WaitMonitor = WaitMonitor()
        self._streamed: deque[Any] = deque(maxlen=STREAMED_KEPT)
        self._lenders = TokenLenders(self.store)
        self._keeping: set[str] = set()  # the methods that have returned tensors
        self._lease: Lease | None = None
        self._lock = threading.Lock()  # guards the last two
        self._secret = secrets.token_bytes(32)
        self._server = Server(identity.host, self._secret, self)
        fetch.register_local(self._secret, self.store)

    @classmethod
    def of_actor(cls, runtime: Runtime) -> Participant:
        """The participant of this process's actor, called in one of its methods, or of a driver or task."""
        actor_id = ray_actors.current_actor_id()
        actor = ray_actors.short_actor(ray_actors.current_class(), actor_id) if actor_id else "the driver"
        return cls(runtime, Identity.of_ray(actor_id, actor))

    @property
    def address(self) -> Address:
        """Where other processes reach it."""
        return self._server.address

    def close(self) -> None:
        """Closes the server, which ends the lease; threads end after their current work."""
        while self.at_close:
            self.at_close.popitem()[1]()
        self._server.close()
        fetch.forget_local(self._secret)
        self.fetch_threads.shutdown(wait=False)

    def exits(self) -> None:
        """Tells the controller that this process is about to exit (`sys.exit`, `ray.actor.exit_actor`).

        Otherwise the controller would notice it with the end of the process, for which Ray may take ten seconds.
        """
        lease = self._lease
        if lease is not None:
            lease.link.close()

    # ------------------------------------------------------------------------------------------ values

    def describe(self, *, ordered: bool) -> dict[str, Any]:
        """The fields of `Member` without the rank; `ordered`: methods run one by one, in the calling thread."""
        self.methods.described(is_ordered=ordered)
        identity = self.identity
        return {
            "actor_id": identity.actor_id,
            "actor": identity.actor,
            "address": self.address,
            "machine": identity.machine,
            "node_id": identity.node_id,
            "pid": os.getpid(),
            "incarnation": identity.incarnation,
            "ordered": ordered,
            "participant": False,
            "accelerators": identity.accelerators,
        }

    def keep(self, key: Key, container: Container, lent: LentToken | None = None, *, streamed: bool = False) -> Handle:
        """Stores a value under a key and makes its handle.

        Args:
            key: The key.
            container: The value.
            lent: A token of the caller.
            streamed: Whether a generator yielded the value.
        """
        infos = tuple(map(arrays.describe, container.tensors))
        streams.settle(infos)  # plans run after the GPU work that the method has enqueued
        is_lent = lent is not None and self._lenders.note(lent.owner, key)
        handle = Handle(
            key=key,
            actor_id=self.actor_id,
            actor=self.actor,
            address=self.address,
            structure=container.structure,
            infos=infos,
            incarnation=self.identity.incarnation,
            placements=container.placements,
            token=lent.token if lent is not None and is_lent else self._tokens.take(key),
            packed=lent.packed if lent is not None and is_lent else None,
        )
        self.store.put(key, container)
        if streamed:
            self._streamed.append(handle.token)
        return handle

    def keep_output(self, key: Key, container: Container) -> Handle | None:
        """Stores an output of a plan; returns its handle if a task of Ray returns the handle."""
        return self.keep(key, container)

    def task_of(self, seq: int) -> bytes | None:
        """The task whose return ids are the keys of a plan's outputs, for a plan without an actor task."""
        return None

    def keeps(self, method: str) -> None:
        """Notes a method that returned tensors without a lent token: the controller lends tokens to its next calls."""
        with self._lock:
            is_new, lease = method not in self._keeping, self._lease
            self._keeping.add(method)
        if is_new and lease is not None:
            with suppress(ConnectionLostError):
                lease.link.send(Keeps(method=method))

    def _forget(self, key: Key) -> None:
        self.store.free([key])

    # ------------------------------------------------------------------------------------------ actor tasks

    def run_task(self, payload: bytes, task: bytes | None) -> Any:
        """Runs a program as `run_program` does, for an actor task in a thread of Ray."""
        result = self.hand_over(payload, task)
        return self.run_program(payload, task) if result is None else result.result()

    def hand_over(self, payload: bytes, task: bytes | None) -> Future[Any] | None:
        """Calls `Lease.hand_over`; None without a lease."""
        lease = self._lease
        return None if lease is None else lease.hand_over(payload, task)

    def run_program(self, payload: bytes, task: bytes | None) -> Any:
        """Calls `Lease.run_program`; GroupBrokenError: the controller has ended."""
        lease = self._lease
        if lease is None:
            group_id = next(iter(decode_order(payload)[2].group_ids))
            raise GroupBrokenError(group_name=group_id, detail="its driver has ended: declare the group again")
        return lease.run_program(payload, task)

    def pass_fence(self, controller: str, seq: int) -> None:
        """Calls `PlanQueue.pass_fence`, if that controller holds the lease."""
        lease = self._lease
        if lease is not None and lease.controller == controller:
            lease.plan_queue.pass_fence(seq)

    def leased(self) -> Lease:
        """The lease; ConnectionLostError: the controller has ended."""
        lease = self._lease
        if lease is None:
            raise ConnectionLostError(detail="the driver has ended")
        return lease

    # ------------------------------------------------------------------------------------------ channel

    def opened(self, link: ControlLink) -> None:
        """Handles a connection of a controller: grants the lease, or refuses and names its holder (P10)."""
        hello = link.hello
        controller, description = str(hello.get("controller")), str(hello.get("description"))
        mailbox = _mailbox(hello)
        with self._lock:
            if self._lease is not None and self._lease.controller != controller:
                error = ControllerConflictError(actor=self.actor, holder=self._lease.description)
                link.send(Refused(error=to_wire(error)))
                return
            before = self._lease
        if before is not None:  # first, as this ends all groups of the controller
            before.end("its controller has reconnected")
        with self._lock:
            self._lease = lease = Lease(controller, description, link, self, mailbox)
            self._lenders.open(_lender(link))
            keeping = sorted(self._keeping)
        link.send(Welcome(has_mailbox=mailbox is not None and lease.listen(), group_id=""))
        for method in keeping:
            link.send(Keeps(method=method))

    def received(self, link: ControlLink, message: Message) -> None:
        """Handles a message of the controller, on the channel's thread, so this must not wait."""
        lease, owner = self._lease, _lender(link)
        if not self._lenders.is_connected(owner):
            raise ProtocolError(detail=f"{type(message).__name__} from a controller that never had the lease")
        if isinstance(message, Unused):
            self._lenders.unused(owner, message.keys)
        elif lease is None or lease.link is not link:
            return  # the lease has ended, and the message was under way
        elif isinstance(message, Bye):
            self._end_lease(lease, "the controller said goodbye")
        else:
            lease.received(message)

    def closed(self, link: ControlLink, reason: ChannelError) -> None:
        """Handles the end of a controller's connection: its lease ends, and another controller may get the lease."""
        worker = str(link.hello.get("worker"))
        self._lenders.close(_lender(link), lambda: worker in ray_cluster.living_workers())
        lease = self._lease
        if lease is not None and lease.link is link:
            self._end_lease(lease, f"the controller is gone ({reason.detail})")

    def serve_data(self, link: DataLink) -> None:
        """Serves fetches, in a thread per connection."""
        fetch.serve(link, self.store, introspection.look_at_process, self._lenders.unused)

    def _end_lease(self, lease: Lease, reason: str) -> None:
        lease.end(reason)
        with self._lock:
            self._lease = None


def _mailbox(hello: dict[str, Any]) -> MailboxClient | None:
    """This participant's end of the controller's mailbox; None if it is missing or unreachable."""
    try:
        return MailboxClient(*convert(hello["mailbox"], tuple[Segment, int]))
    except (ValidationError, OSError, ValueError, TypeError, LookupError):
        return None


def _lender(link: ControlLink) -> bytes:
    """The name under which the peer lends tokens."""
    name = link.hello.get("owner")
    return name if isinstance(name, bytes) else link.peer.encode()


def this_participant() -> Participant:
    """The participant of this process's actor, made on first use; called in one of its methods."""
    return this_runtime().part(Participant, Participant.of_actor)


def own_participant() -> Participant:
    """The participant of this process, which need be no actor, in the Ray that runs."""
    here = this_participant()
    if here.identity.incarnation != ray_session.worker_id():  # Ray was shut down, and begun again
        here.close()
        this_runtime().forget(Participant)
        here = this_participant()
    return here


def describe(actor: Any) -> dict[str, Any]:
    """Describes this actor, for the controller that forms a group. Runs inside the actor."""
    return this_participant().describe(ordered=ray_actors.is_ordered(type(actor)))


def gpu(actor: Any) -> Gpu | None:
    """Returns the GPU of this actor for a group. Runs inside the actor."""
    return gpus.here()


def run_program(actor: Any, payload: bytes) -> None:
    """Runs this rank's part of a plan without outputs here. Runs inside the actor.

    On an async actor this function runs on the event loop, which must not wait. Methods overlap there, so another
    thread runs the plan, and reports its end over the channel.
    """
    this_participant().run_task(payload, ray_actors.current_task())


def mark_written(tensor: Any) -> None:
    """Marks a tensor that a failed collective has left half-written as whole again. Call it inside the actor.

    Args:
        tensor: An array, or a list, tuple or dict of arrays, that the caller has overwritten.

    Raises:
        NotATensorError: The argument is another type, such as a ref.
    """
    container = Container.of(tensor, arrays.is_tensor)
    if container is None:
        expected = "tensors of this process: call it in a method of the actor that has them"
        actual = obstacle(tensor, arrays.is_tensor).removeprefix("it is ")
        wrong = Violation(kind="not_tensor", field="tensor", found=actual, expected=expected)
        raise refusal("mark_written", "", (wrong,))
    store = this_runtime().instruments.store
    store.mark_written([arrays.byte_range(arrays.memory(t)) for t in container.tensors])
