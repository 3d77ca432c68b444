"""The participant's process: its store, its control endpoint, and who has its lease. One per process."""

from __future__ import annotations

import os
import secrets
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any

import ray

from raycollect import fetch, ray_internals
from raycollect.backends import arrays, streams
from raycollect.channel import DataLink, Link, Server
from raycollect.channel.messages import Bye, Message, Refused, Welcome
from raycollect.errors import (
    ChannelError,
    ConnectionLostError,
    ControllerConflictError,
    GroupBrokenError,
    ProtocolError,
    to_wire,
)
from raycollect.executor import Instruments
from raycollect.handle import Handle
from raycollect.lease import Lease
from raycollect.model import Key
from raycollect.observe import Recorder
from raycollect.planner import decode_order
from raycollect.pos import Container, Store
from raycollect.replay import Invoke
from raycollect.seats import Seats
from raycollect.tokens import TokenPool
from raycollect.watch import Watch

STORE_LIMIT_WITHOUT_TOKENS = 1024
"""How many values a store holds where Ray can't tell when a ref is gone."""

MOST_WAITING = 64
"""How many programs of an async actor that make outputs may wait for their predecessors and operands.

Ray may bring these later, where their arguments are long: so they must not wait for the same thread. Programs without
outputs take one of other threads when their predecessors have ended.
"""

STREAMED_KEPT = 64
"""How many of the newest values that generators yielded are kept whatever Ray says of their refs.

Ray 2.60 can lose the count of what is nested in a streamed item, when the item is yielded before its consumer asks for
it (docs/adr/0002-ray-internals.md); without this, an item could be freed before it is first used.
"""


_OVERLAP: AbstractContextManager[None] = nullcontext()
"""Held where methods may overlap."""


class Runtime:
    """What a participant's process holds. Made on first use, by `Runtime.current()`."""

    _current: Runtime | None = None
    _making = threading.Lock()

    @classmethod
    def current(cls) -> Runtime:
        """The runtime of this process; any thread."""
        if cls._current is None:
            with cls._making:
                if cls._current is None:
                    cls._current = cls()
        return cls._current

    @classmethod
    def turn_of_methods(cls) -> AbstractContextManager[Any]:
        """What a method that Ray calls holds while it runs: the turn, where methods come in order.

        A process that is no participant yet has nothing that could meet one: what makes it one is a method itself.
        """
        here = cls._current
        return here.turn if here is not None and here.is_ordered else _OVERLAP

    @classmethod
    def exits(cls) -> None:
        """This process is about to end, as what Ray calls asks for it (`sys.exit`, `ray.actor.exit_actor`).

        The controller is told now. It would notice the end itself, but Ray may take ten seconds for it.
        """
        here = cls._current
        lease = None if here is None else here._lease
        if lease is not None:
            lease.link.close()

    def __init__(self) -> None:
        self._tokens = TokenPool(self._forget)
        self.seats: Seats = Seats.current()
        self.instruments: Instruments = self.seats.instruments
        self.store: Store = self.instruments.store
        self.store.limit(None if self._tokens.supported else STORE_LIMIT_WITHOUT_TOKENS)
        self.recorder: Recorder = self.instruments.recorder
        self.kernel_threads: ThreadPoolExecutor = ThreadPoolExecutor(
            MOST_WAITING, thread_name_prefix="raycollect-kernel"
        )
        # Of their own: plans that make outputs may take all of the others, and wait for one of these.
        self.turn_threads: ThreadPoolExecutor = ThreadPoolExecutor(MOST_WAITING, thread_name_prefix="raycollect-turn")
        self.actor_id: str = ray_internals.current_actor_id()
        self.actor: str = ray_internals.short_actor(ray_internals.current_class(), self.actor_id)
        self._streamed: deque[Any] = deque(maxlen=STREAMED_KEPT)
        self.is_ordered: bool = False  # whether methods of this actor come one by one; known when it is described
        # Held, on ordered participants, by a method of Ray's or by what must not meet one.
        self.turn: threading.Lock = threading.Lock()
        self.watch: Watch = Watch()
        self._lease: Lease | None = None
        self._lock = threading.Lock()  # guards it
        secret = secrets.token_bytes(32)
        self._server = Server(ray_internals.node_address(), secret, self)
        fetch.register_local(secret, self.store)

    @cached_property
    def incarnation(self) -> str:
        """Which start of the actor this is."""
        return str(ray.get_runtime_context().get_worker_id())

    # ------------------------------------------------------------------------------------------ values

    def describe(self, *, ordered: bool) -> dict[str, Any]:
        """Who this participant is, and where it listens: what `Member` holds, less the rank.

        Args:
            ordered: False where the class itself says that its methods overlap.
        """
        context = ray.get_runtime_context()
        self.is_ordered = ordered and ray_internals.is_ordered()
        return {
            "actor_id": self.actor_id,
            "actor": self.actor,
            "address": self._server.address,
            "machine": ray_internals.machine_id(),
            "node_id": context.get_node_id(),
            "pid": os.getpid(),
            "incarnation": self.incarnation,
            "ordered": self.is_ordered,
            "participant": False,
            "accelerators": tuple((kind, tuple(ids)) for kind, ids in context.get_accelerator_ids().items() if ids),
        }

    def keep(self, key: Key, container: Container, *, streamed: bool = False) -> Handle:
        """Keeps a value under a key and makes the handle that stands for it; `streamed`: a generator yielded it."""
        infos = tuple(map(arrays.describe, container.tensors))
        streams.settle(infos)  # what the method has left to a GPU comes before what plans do
        handle = Handle(
            key=key,
            actor_id=self.actor_id,
            actor=self.actor,
            address=self._server.address,
            structure=container.structure,
            infos=infos,
            incarnation=self.incarnation,
            token=self._tokens.take(key),
        )
        self.store.put(key, container)
        if streamed:
            self._streamed.append(handle.token)
        return handle

    def _forget(self, key: Key) -> None:
        self.store.free([key])

    # ------------------------------------------------------------------------------------------ actor tasks

    def run_task(self, payload: bytes, task: bytes | None) -> Any:
        """Does what `run_program` does, for an actor task that Ray runs in a thread of its own.

        Where methods overlap, Ray has few threads, and starts tasks in any order: plans that came early would keep all
        of them from the methods and the plans for which they wait. So these wait in threads of ours, and the controller
        hears of their end all the same. One takes a thread when its turn has come. Outputs are the returns of the task,
        which therefore has to stay.
        """
        return None if self.hand_over(payload) else self.run_program(payload, task)

    def hand_over(self, payload: bytes) -> bool:
        """Lets a thread of ours run a plan, where `run_task` does; see `Lease.hand_over`."""
        lease = self._lease
        return lease is not None and lease.hand_over(payload, self._in_thread)

    def _in_thread(self, do: Callable[..., object], *args: Any) -> None:
        self.turn_threads.submit(self._until_exit, do, *args)

    def _until_exit(self, do: Callable[..., Any], *args: Any) -> Any:
        try:
            return do(*args)
        except SystemExit:
            self.exits()
            raise

    def run_program(self, payload: bytes, task: bytes | None) -> Any:
        """Runs this participant's half of a plan; see `Lease.run_program`.

        Raises:
            GroupBrokenError: Its controller is gone.
        """
        lease = self._lease
        if lease is None:
            (group_id, *_) = (share.group_id for share in decode_order(payload)[2].shares)
            raise GroupBrokenError(group_name=group_id, detail="its controller is gone")
        return self._until_exit(lease.run_program, payload, task)

    def capture(self, payload: bytes, values: Sequence[Any], invoker: Callable[[Sequence[str]], Invoke]) -> bool:
        """Takes in a captured step; see `Lease.capture`.

        Raises:
            ConnectionLostError: Its controller is gone.
        """
        return self._leased().capture(payload, values, invoker)

    def run_fenced(self, payload: bytes) -> None:
        """Does a run of a captured step; see `Lease.run_fenced`.

        Raises:
            ConnectionLostError: Its controller is gone.
        """
        lease = self._leased()
        if not lease.hand_over_fenced(payload, self._in_thread):
            lease.run_fenced(payload)

    def look(self, capture: bytes) -> list[Any]:
        """How the tensors of a captured step look, slot by slot; see `Replay.look`.

        Raises:
            ConnectionLostError: Its controller is gone.
        """
        return self._leased().look(capture)

    def _leased(self) -> Lease:
        lease = self._lease
        if lease is None:
            raise ConnectionLostError(detail="the controller is gone")
        return lease

    # ------------------------------------------------------------------------------------------ channel

    def opened(self, link: Link, hello: dict[str, Any]) -> None:
        """A controller connected: it gets the lease, or hears who has it (P10)."""
        controller, description = str(hello.get("controller")), str(hello.get("description"))
        with self._lock:
            if self._lease is not None and self._lease.controller != controller:
                error = ControllerConflictError(actor=self.actor, holder=self._lease.description)
                link.send(Refused(error=to_wire(error)))
                return
            before, self._lease = self._lease, Lease(controller, description, link, self)
        if before is not None:
            before.end("its controller came anew")
        link.send(Welcome(participant={"actor": self.actor}))

    def received(self, link: Link, message: Message) -> None:
        """A message of the controller; on the channel's thread, so nothing here may wait."""
        lease = self._lease
        if lease is None or lease.link is not link:
            raise ProtocolError(detail=f"{type(message).__name__} from a controller without the lease")
        if isinstance(message, Bye):
            self._end_lease(lease, "the controller said goodbye")
        else:
            lease.received(message)

    def closed(self, link: Link, reason: ChannelError) -> None:
        """A controller is gone: what it drove ends, and another may come."""
        lease = self._lease
        if lease is not None and lease.link is link:
            self._end_lease(lease, f"the controller is gone ({reason.detail})")

    def serve_data(self, link: DataLink) -> None:
        """Serves fetches, on a thread per connection."""
        fetch.serve(link, self.store)

    def _end_lease(self, lease: Lease, reason: str) -> None:
        lease.end(reason)
        with self._lock:
            self._lease = None


def mark_written(tensor: Any) -> None:
    """Says that a tensor which a failed collective left half-written is whole again. Inside its actor.

    Args:
        tensor: An array, or a list, tuple or dict of arrays, that the caller has overwritten.
    """
    container = Container.of(tensor, arrays.is_tensor)
    if container is not None:
        Seats.current().instruments.store.mark_written([arrays.byte_range(arrays.memory(t)) for t in container.tensors])
