"""Ranks of a group in threads, whose messages to the coordinator can be held back."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from raycollect.backends.exchanged import Exchanged
from raycollect.channel.messages import Gone, Message
from raycollect.core.model import GroupSpec, Launch
from raycollect.core.protocols import Joining
from raycollect.engine.run import Outcome
from raycollect.errors import RaycollectError
from raycollect.group.coordinator import Coordinator
from raycollect.group.group_member import GroupMember
from raycollect.group.process_group import ProcessGroup
from tests.pure.watched import WAIT_S

WORLD = 3


class Plain(Exchanged):
    """A communicator that has its consistency checks at the coordinator; it notes what it is told."""

    def __init__(self, joining: Joining) -> None:
        super().__init__(joining)
        self.events: list[Any] = []
        self.on_close: Callable[[], None] = lambda: None

    def abort(self, seq: int) -> None:
        self.events.append(("abort", seq))
        super().abort(seq)

    def close(self) -> None:
        self.events.append("close")
        self.on_close()


class Seeing(Plain):
    """One that sees by itself how far others came."""

    sees_departures = True

    def lost(self, rank: int) -> bool:
        self.events.append(("lost", rank))
        return True


class Table:
    """The seats of a group, and its coordinator; what that says to a rank can be held back."""

    def __init__(self, kind: type[Plain] = Plain) -> None:
        self.coordinator = Coordinator("id", WORLD, "g")
        self.communicators: dict[int, Plain] = {}
        self.closed = [threading.Event() for _ in range(WORLD)]
        self.before_made: Callable[[int], None] = lambda rank: None
        self.heard: Callable[[int, Message], None] = lambda rank, message: None
        self.holds: Callable[[int, Message], bool] = lambda rank, message: False
        self.held: list[tuple[int, Message]] = []
        self.threads = ThreadPoolExecutor(WORLD + 2)
        self._kind = kind
        self._lock = threading.RLock()
        backend = "shm" if issubclass(kind, Seeing) else "local"  # for what the table of capabilities says
        spec = GroupSpec(name="g", group_id="id", backend=backend, world_size=WORLD, timeout_s=WAIT_S)
        self.process_groups = [
            ProcessGroup(
                GroupMember(spec, rank, self._sender(rank), members=[f"W{at}" for at in range(WORLD)]),
                leave=self._leaver(rank),
            )
            for rank in range(WORLD)
        ]

    def create(self, joining: Joining) -> Plain:
        rank = joining.rank
        self.before_made(rank)
        self.communicators[rank] = self._kind(joining)
        self.communicators[rank].on_close = self.closed[rank].set
        return self.communicators[rank]

    def deliver(self, orders: list[tuple[int, Message]]) -> None:
        with self._lock:
            for rank, message in orders:
                if (self.held and self.held[0][0] == rank) or self.holds(rank, message):
                    self.held.append((rank, message))
                else:
                    self.process_groups[rank].received(message)

    def release(self) -> None:
        """Lets a rank hear what was held back."""
        with self._lock:
            held, self.held, self.holds = self.held, [], lambda rank, message: False
            for rank, message in held:
                self.process_groups[rank].received(message)

    def kill(self, rank: int) -> None:
        """The coordinator hears that a process has ended."""
        with self._lock:
            self.deliver(self.coordinator.lost(rank, "closed by the peer"))

    def start(self, what: Callable[..., Any], *args: Any) -> Future[Any]:
        return self.threads.submit(what, *args)

    def form(self) -> None:
        for future in [self.start(process_group.form) for process_group in self.process_groups]:
            future.result(WAIT_S)

    def close(self) -> None:
        for process_group in self.process_groups:
            process_group.close()
        self.threads.shutdown()

    def _sender(self, rank: int) -> Callable[[Message], None]:
        def send(message: Message) -> None:
            with self._lock:
                self.deliver(self.coordinator.receive(rank, message))
            self.heard(rank, message)

        return send

    def _leaver(self, rank: int) -> Callable[[], None]:
        return lambda: self._sender(rank)(Gone(group_id="id", rank=rank, died=False, detail=""))


class Call:
    """A call of one rank: it goes through the consistency check, and then waits to be let go on."""

    def __init__(
        self, process_group: ProcessGroup, ends: Callable[[], Outcome] = Outcome, timeout_s: float = WAIT_S
    ) -> None:
        self.seq = 0
        self.passed = threading.Event()
        self.go = threading.Event()
        self.process_group = process_group
        self._ends = ends
        self._timeout_s = timeout_s

    def __call__(self) -> None:
        self.process_group.communicator("all").run("allreduce", self._attempt, self._timeout_s)

    def begin(self) -> Future[Outcome]:
        """Starts it as an asynchronous call."""
        return self.process_group.communicator("all").start("allreduce", self._attempt, self._timeout_s)

    def _attempt(self, communicator: Any, seq: int) -> Outcome:
        self.seq = seq
        launch = Launch(seq=seq, ranks=tuple(range(WORLD)), timeout_s=self._timeout_s)
        try:
            communicator.agree(launch, b"")
        except RaycollectError as exc:
            return Outcome(error=exc)
        self.passed.set()
        assert_set(self.go)
        return self._ends()


def start_calls(here: Table, ends: Callable[[], Outcome] = Outcome) -> list[tuple[Call, Future[Any]]]:
    here.form()
    calls = [Call(process_group, ends) for process_group in here.process_groups]
    return [(call, here.start(call)) for call in calls]


def agreed_calls(here: Table, ends: Callable[[], Outcome] = Outcome) -> list[tuple[Call, Future[Any]]]:
    """Calls whose ranks have all agreed, and that wait for `go`."""
    calls = start_calls(here, ends)
    for call, _ in calls:
        assert_set(call.passed)
    return calls


def error_of(future: Future[Any]) -> RaycollectError:
    error = future.exception(WAIT_S)
    assert isinstance(error, RaycollectError), error
    return error


def assert_set(event: threading.Event) -> None:
    assert event.wait(WAIT_S)
