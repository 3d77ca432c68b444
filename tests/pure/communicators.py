"""Groups of ranks for tests, without Ray: in threads of this process, or in worker processes.

`Team.run(body, *args)` calls ``body(communicator, *args)`` on every rank at once, and gives what each
returned or raised.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any

from raycollect import backends
from raycollect.core.model import GroupSpec, Launch
from raycollect.core.protocols import Communicator, Joining, SegmentSource
from raycollect.errors import CollectiveTimeoutError, PlanAbortedError, RaycollectError
from raycollect.pos.segments import Segments
from tests.pure.local_world import LocalCommunicator, LocalWorld

FORKS = multiprocessing.get_context("forkserver")
"""Forks processes from one that has imported this: a process that imports torch itself takes 1.5 s of a core."""
FORKS.set_forkserver_preload(
    [
        "torch",
        "pytest",
        __name__,
        "raycollect.member.operations",
        "raycollect.member.init",
        "tests.pure.processes",
        "tests.pure.frozen",
    ]
)

_ids = itertools.count(1)

for module in os.environ.get("RAYCOLLECT_TEST_MODULES", "").split():
    import_module(module)  # it registers a backend


class MemoryRendezvous:
    """A `Rendezvous` between threads."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def put(self, name: str, value: bytes) -> None:
        with self._changed:
            assert name not in self._values, f"{name} was put twice"
            self._values[name] = bytes(value)
            self._changed.notify_all()

    def get(self, name: str, timeout_s: float) -> bytes:
        with self._changed:
            if not self._changed.wait_for(lambda: name in self._values, timeout_s):
                raise CollectiveTimeoutError(detail=f"nobody published {name}", timeout_s=timeout_s)
            return self._values[name]


class MemoryStar:
    """What the `MemoryExchange` of all ranks share."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.given: dict[tuple[int, int], dict[int, bytes]] = {}


class MemoryExchange:
    """An `Exchange` between threads, one per rank."""

    def __init__(self, star: MemoryStar, rank: int) -> None:
        self._server = star
        self._rank = rank
        self._rounds: dict[int, int] = {}
        self._aborted: set[int] = set()

    def __call__(self, launch: Launch, arrival: bytes) -> Sequence[bytes]:
        star, turn = self._server, self._rounds.get(launch.seq, 0)
        self._rounds[launch.seq] = turn + 1
        with star.changed:
            given = star.given.setdefault((launch.seq, turn), {})
            given[self._rank] = bytes(arrival)
            star.changed.notify_all()
            star.changed.wait_for(
                lambda: launch.seq in self._aborted or all(r in given for r in launch.ranks), launch.timeout_s
            )
            if launch.seq in self._aborted:
                raise PlanAbortedError(detail="aborted in the consistency check")
            missing = tuple(r for r in launch.ranks if r not in given)
            if missing:
                raise CollectiveTimeoutError(missing=missing, timeout_s=launch.timeout_s)
            return [given[r] for r in launch.ranks]

    def abort(self, seq: int) -> None:
        with self._server.changed:
            self._aborted.add(seq)
            self._server.changed.notify_all()


def _is_echo(error: BaseException) -> bool:
    """Whether it says no more than that another rank has failed."""
    return any(isinstance(one, PlanAbortedError) for one in (error, error.__cause__))


class Team:
    """A group; subclasses say where its ranks live.

    Attributes:
        backend: The backend's name.
        world_size: The number of ranks.
        everyone: All ranks.
    """

    def __init__(self, backend: str, world_size: int, **more: Any) -> None:
        self.backend = backend
        self.world_size = world_size
        self.everyone = tuple(range(world_size))
        group_id = f"team-{next(_ids)}"
        self.spec = GroupSpec(name="team", group_id=group_id, backend=backend, world_size=world_size, **more)
        self.rendezvous = MemoryRendezvous()
        self.server = MemoryStar()
        self._threads = ThreadPoolExecutor(world_size)
        self._seqs = itertools.count(next(_ids) * 1000)

    def launch(self, ranks: Sequence[int] | None = None, timeout_s: float = 20.0) -> Launch:
        """The next launch of the group."""
        return Launch(seq=next(self._seqs), ranks=tuple(ranks or self.everyone), timeout_s=timeout_s)

    def run(self, body: Callable[..., Any], *args: Any, ranks: Sequence[int] | None = None) -> list[Any]:
        """Runs the body on ranks at once; what one raises is in the list like what it returns."""
        chosen = self.everyone if ranks is None else ranks
        return [future.result() for future in [self._threads.submit(self._on, r, body, args) for r in chosen]]

    def start(self, rank: int, body: Callable[..., Any], *args: Any) -> Any:
        """Starts the body on one rank and gives its future."""
        return self._threads.submit(self._on, rank, body, args)

    def must(self, body: Callable[..., Any], *args: Any, ranks: Sequence[int] | None = None) -> list[Any]:
        """Like `run`; raises the first error, but no echo of another rank's."""
        results = self.run(body, *args, ranks=ranks)
        errors = [result for result in results if isinstance(result, BaseException)]
        if errors:
            raise min(errors, key=_is_echo)
        return results

    def _on(self, rank: int, body: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        raise NotImplementedError

    def close(self) -> None:
        """Ends the group."""
        self._threads.shutdown()


class ThreadTeam(Team):
    """Ranks in threads of this process, each with a communicator of its own.

    Attributes:
        communicators: One per rank.
    """

    def __init__(
        self,
        backend: str,
        world_size: int,
        segments: Callable[[int], SegmentSource] = lambda _: Segments.current(),
        **more: Any,
    ) -> None:
        super().__init__(backend, world_size, **more)
        self._segments = segments
        self.communicators: list[Communicator] = []
        if backend == "local" and world_size > 1:
            world = LocalWorld(world_size, "team")
            self.communicators = [LocalCommunicator(world, rank) for rank in self.everyone]
        else:
            self.communicators = list(self._threads.map(self._create, self.everyone))

    def _create(self, rank: int) -> Communicator:
        create = backends.load(self.backend, self.spec.name)
        exchange = MemoryExchange(self.server, rank)
        return create(Joining(self.spec, rank, self.rendezvous, exchange, segments=self._segments(rank)))

    def _on(self, rank: int, body: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        try:
            return body(self.communicators[rank], *args)
        except Exception as exc:
            return exc

    def close(self) -> None:
        for communicator in self.communicators:
            communicator.close()
        super().close()


class ProcessTeam(Team):
    """Ranks in worker processes; rendezvous and exchange stay here and are reached over the workers' pipes.

    `addresses` are those of the hosts of the ranks; by default, or empty, the backend's own default.
    """

    def __init__(
        self,
        backend: str,
        world_size: int,
        workers: Sequence[Worker],
        hosts: tuple[int, ...] = (),
        addresses: Sequence[str] = (),
    ) -> None:
        super().__init__(backend, world_size, hosts=hosts)
        self.workers = workers[:world_size]
        self.exchanges = [MemoryExchange(self.server, rank) for rank in self.everyone]
        self.must(_join, self.spec, addresses)

    def _on(self, rank: int, body: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        serve = {"put": self.rendezvous.put, "get": self.rendezvous.get, "exchange": self.exchanges[rank]}
        group = (self.spec.group_id, rank)
        return self.workers[rank].call((group, body, args), serve)

    def close(self) -> None:
        self.run(_leave)
        super().close()


class Worker:
    """A process that holds one rank of any number of teams."""

    def __init__(self) -> None:
        self._pipe, theirs = FORKS.Pipe()
        self.process = FORKS.Process(target=_work, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        self._lock = threading.Lock()

    def call(self, job: Any, serve: dict[str, Callable[..., Any]]) -> Any:
        """Gives the worker a job and serves what it asks for until it is done."""
        with self._lock:
            try:
                self._pipe.send(job)
                while True:
                    what, args = self._pipe.recv()
                    if what == "done":
                        return args
                    self._pipe.send(_attempt(serve[what], args))
            except (EOFError, OSError) as exc:
                return exc

    def close(self) -> None:
        """Ends the process."""
        self._pipe.close()
        self.process.join(5)
        self.process.kill()
        self.process.join()


class Workers:
    """As many workers as a team asks for, kept for the next one."""

    def __init__(self) -> None:
        self._made: list[Worker] = []

    def __call__(self, count: int) -> list[Worker]:
        self._made += [Worker() for _ in range(count - len(self._made))]
        return self._made[:count]

    def close(self) -> None:
        """Ends them: at the end of the tests nobody looks at how they do it, which takes seconds."""
        for worker in self._made:
            worker.process.kill()
        for worker in self._made:
            worker.close()


class _Line:
    """In the worker: rendezvous and exchange over the pipe."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def put(self, name: str, value: bytes) -> None:
        self._ask("put", name, value)

    def get(self, name: str, timeout_s: float) -> bytes:
        return self._ask("get", name, timeout_s)

    def __call__(self, launch: Launch, arrival: bytes) -> Sequence[bytes]:
        return self._ask("exchange", launch, arrival)

    def abort(self, seq: int) -> None:
        """Nothing: the parent's exchange is aborted there."""

    def _ask(self, what: str, *args: Any) -> Any:
        self._pipe.send((what, args))
        answer = self._pipe.recv()
        if isinstance(answer, BaseException):
            raise answer
        return answer


def _attempt(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    try:
        return function(*args)
    except RaycollectError as exc:
        return exc
    except Exception:
        return AssertionError(traceback.format_exc())


def _join(communicator: _Seat, spec: GroupSpec, addresses: Sequence[str]) -> None:
    create = backends.load(spec.backend, spec.name)
    rank, line = communicator.rank, communicator.line
    host = {"host": addresses[rank]} if any(addresses) else {}
    communicator.taken = create(Joining(spec, rank, line, line, segments=Segments.current(), **host))


def _leave(communicator: Communicator) -> None:
    communicator.close()


class _Seat:
    """What a body gets before the worker has joined the group."""

    def __init__(self, rank: int, line: _Line) -> None:
        self.rank = rank
        self.line = line
        self.taken: Communicator | None = None


def _work(pipe: Connection) -> None:
    """The worker's life: jobs until the pipe closes."""
    line = _Line(pipe)
    process_groups: dict[tuple[str, int], _Seat] = {}
    while True:
        try:
            group, body, args = pipe.recv()
        except EOFError:
            return
        process_group = process_groups.setdefault(group, _Seat(group[1], line))
        result = _attempt(body, (process_group.taken or process_group, *args))
        if body is _leave:
            del process_groups[group]
        pipe.send(("done", result))
