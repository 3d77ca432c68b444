"""Ranks in threads that run programs as they come off the wire, over the backend `local`; faults, and a false clock."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np

from raycollect.backends import arrays
from raycollect.core.model import GroupSpec, Kernel, Key, Launch, OpKind, ReduceOp, task_key
from raycollect.core.protocols import Communicator, Faults
from raycollect.engine.fusion_buffer import FusionPool
from raycollect.engine.instruments import POINTS, Instruments
from raycollect.engine.run import Keep, Outcome, Run
from raycollect.engine.run_cache import RunCache
from raycollect.errors import KernelError, RefusedError
from raycollect.observe import Counters, Recorder, Tracer
from raycollect.planner import Membership, Plan, Request, decode_program, encode_program, plan
from raycollect.pos import Container, Store
from tests.pure.local_world import LocalCommunicator, LocalWorld
from tests.pure.meaning import REDUCTIONS
from tests.support.values import replace

WAIT_S = 20.0
"""How long a test waits for what must happen."""

_ids = itertools.count(1)


class FailAt:
    """Raises once, at one point of one rank, the nth time it comes there; `consumed` tells that it did."""

    def __init__(
        self, *, point: str, rank: int, error: Callable[[], BaseException] | None = None, nth: int = 1
    ) -> None:
        assert point in POINTS
        self.consumed = 0
        self._left = nth
        self._where = (point, rank)
        self._error = error or (lambda: KernelError(detail="injected"))

    def at(self, point: str, seq: int, rank: int) -> None:
        if (point, rank) == self._where and not self.consumed:
            self._left -= 1
            if not self._left:
                self.consumed += 1
                raise self._error()


class HoldAt:
    """Holds one rank at a point until it is let go."""

    def __init__(self, *, point: str, rank: int) -> None:
        assert point in POINTS
        self._where = (point, rank)
        self.came = threading.Event()
        self.go = threading.Event()

    def at(self, point: str, seq: int, rank: int) -> None:
        if (point, rank) == self._where:
            self.came.set()
            assert self.go.wait(WAIT_S)


class Ticks:
    """A clock that goes on by one each time it is read."""

    def __init__(self) -> None:
        self._count = itertools.count(1)

    def __call__(self) -> float:
        return float(next(self._count))


def contain(value: Any) -> Container:
    """What the store keeps of a value."""
    container = Container.of(value, arrays.is_tensor)
    assert container is not None
    return container


def numbers(seed: int, world: int, shape: Any = (5,), dtype: str = "float64") -> list[Any]:
    """For each rank an array of small whole numbers."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 50, shape).astype(dtype) for _ in range(world)]


_By = Mapping[int, Any] | Sequence[Any]
"""By rank; None: nothing."""


def _by_rank(values: _By | None) -> dict[int, Any]:
    return dict(values if isinstance(values, Mapping) else enumerate(values or ()))


class Fleet:
    """Ranks in threads, each with a store, a recorder and a communicator of its own.

    Operands are given by rank, as a list or a dict: what each gives, then what each takes. A BROADCAST or SEND has one
    operand per rank, of which only the root's is given.
    """

    def __init__(self, world: int) -> None:
        self.world = world
        self.spec = GroupSpec(name="fleet", group_id="0123", backend="local", world_size=world)
        shared = LocalWorld(world, "fleet")
        self.communicators: list[Communicator] = [LocalCommunicator(shared, rank) for rank in range(world)]
        self.stores = [Store() for _ in range(world)]
        self.recorders = [Recorder(Ticks()) for _ in range(world)]
        self.caches = [RunCache() for _ in range(world)]
        self.tracers = [Tracer() for _ in range(world)]
        self.counters = [Counters() for _ in range(world)]
        self.aborts: list[dict[int, str]] = [{} for _ in range(world)]
        self.waiting: list[Callable[[Key], None] | None] = [None] * world
        self.takes: list[Keep | None] = [None] * world
        self.faults: Faults | None = None
        self.allocate = arrays.empty
        self.seq = 0
        self._threads = ThreadPoolExecutor(world)

    def close(self) -> None:
        for communicator in self.communicators:
            communicator.close()
        self._threads.shutdown()

    # ---------------------------------------------------------------------------------------- operands

    def new_key(self) -> Key:
        return task_key(next(_ids).to_bytes(24, "little"), 1)

    def keep(self, rank: int, value: Any) -> Key:
        key = self.new_key()
        self.stores[rank].put(key, contain(value))
        return key

    def keep_all(self, values: Sequence[Any]) -> list[Key]:
        return [self.keep(rank, value) for rank, value in enumerate(values)]

    # ---------------------------------------------------------------------------------------- running

    def plan(self, kind: OpKind, src: _By, dst: _By | None = None, **arguments: Any) -> Plan:
        """Plans a request over keys."""
        gives, takes, root = _by_rank(src), _by_rank(dst), arguments.get("root", -1)
        if kind in (OpKind.BROADCAST, OpKind.SEND) and dst is None:
            gives, takes = {root: gives.get(root)}, {rank: key for rank, key in gives.items() if rank != root}
        ranks = {root, arguments["peer"]} if kind is OpKind.SEND else set(range(self.world))
        operands = tuple((rank, gives.get(rank), takes.get(rank)) for rank in sorted(ranks))
        if kind in REDUCTIONS:
            arguments.setdefault("op", ReduceOp.SUM)
        arguments.setdefault("timeout_s", WAIT_S)
        return plan([Request(kind=kind, group=self.spec, operands=operands, **arguments)])

    def start(self, kind: OpKind, src: _By, dst: _By | None = None, **arguments: Any) -> list[Future[Outcome]]:
        """Plans a request over keys and starts its programs, as they come off the wire."""
        planned = self.plan(kind, src, dst, **arguments)
        self.seq += 1
        return [self._threads.submit(self.run_one, planned, rank, self.seq) for rank in planned.parts[0].ranks]

    def run_one(self, planned: Plan, rank: int, seq: int, operands: Sequence[Container] | None = None) -> Outcome:
        """Runs one rank's half in the caller's thread."""
        position = planned.parts[0].places[rank]
        run = Run(
            decode_program(encode_program(planned.program(position))),
            seq,
            lambda group_id: self.communicators[rank],
            Instruments(
                store=self.stores[rank],
                recorder=self.recorders[rank],
                clock=Ticks(),
                faults=self.faults,
                allocate=self.allocate,
                cache=self.caches[rank],
                tracer=self.tracers[rank],
                counters=self.counters[rank],
            ),
            operands=operands,
            keys=planned.sources(position),  # type: ignore[arg-type]
            is_call=operands is not None,
            aborted=lambda: self.aborts[rank].get(seq),
            waiting=self.waiting[rank],
            keep=self.takes[rank],
        )
        return run.run()

    def run(self, kind: OpKind, src: _By, dst: _By | None = None, **arguments: Any) -> list[Outcome]:
        return [future.result(WAIT_S) for future in self.start(kind, src, dst, **arguments)]

    def must(self, kind: OpKind, src: _By, dst: _By | None = None, **arguments: Any) -> list[Outcome]:
        """Like `run`; raises the first error."""
        return _raised(self.run(kind, src, dst, **arguments))

    def call(self, kind: OpKind, src: _By, dst: _By | None = None, **arguments: Any) -> list[Outcome]:
        """Runs an operation over values that each rank gives itself, as an imperative call does."""
        gives, takes = _by_rank(src), _by_rank(dst)
        keys = [{rank: self.new_key() for rank in side if side[rank] is not None} for side in (gives, takes)]
        planned = self.plan(kind, *keys, **arguments)
        self.seq += 1
        futures = []
        for rank in planned.parts[0].ranks:
            given = [contain(side[rank]) for side in (gives, takes) if side.get(rank) is not None]
            futures.append(self._threads.submit(self.run_one, planned, rank, self.seq, given))
        return [future.result(WAIT_S) for future in futures]

    def story(self, rank: int, seq: int | None = None) -> list[str]:
        plan = self.seq if seq is None else seq
        return [event.what for event in self.recorders[rank].story() if event.seq == plan]

    @property
    def dirty(self) -> list[int]:
        """How many memory ranges are half-written, by rank."""
        return [store.statistics().dirty for store in self.stores]

    def works_on(self) -> None:
        """The next collective of the group succeeds."""
        values = [np.full(3, rank + 1.0) for rank in range(self.world)]
        self.faults = None
        self.must(OpKind.ALLREDUCE, self.keep_all(values))
        for value in values:
            np.testing.assert_array_equal(value, np.full(3, self.world * (self.world + 1) / 2))


class Star:
    """The exchange that a controller carries, among the participants of a team."""

    def __init__(self, world: LocalWorld, rank: int) -> None:
        self._communicator = LocalCommunicator(world, rank)
        self.seqs: list[int] = []
        self.abort = self._communicator.abort

    def __call__(self, launch: Launch, arrival: bytes) -> Sequence[bytes]:
        self.seqs.append(launch.seq)
        return self._communicator.agree(launch, arrival)


class Convoy:
    """Participants in threads that are members of several groups, and run the programs of whole batches.

    As a controller does, it aborts what is still under way when a program has failed after the check.

    Args:
        groups: For each group the participants, by rank.
        make: Makes the communicators of a group, by rank.
        coalesces: Whether their backend runs several kernels at once.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[int]],
        make: Callable[[int], Sequence[Communicator]] | None = None,
        *,
        coalesces: bool = False,
    ) -> None:
        self.count = 1 + max(one for group in groups for one in group)
        self.memberships: list[Membership] = []
        self.communicators: list[dict[str, Communicator]] = [{} for _ in range(self.count)]
        for at, group in enumerate(groups):
            spec = GroupSpec(
                name=f"group-{at}", group_id=f"id-{at}", backend="local", world_size=len(group), coalesces=coalesces
            )
            participants = tuple(f"actor-{one}" for one in group)
            self.memberships.append(replace(Membership.alone(spec), participants=participants))
            for one, communicator in zip(group, (make or _local)(len(group)), strict=True):
                self.communicators[one][spec.group_id] = communicator
        self.stores = [Store() for _ in range(self.count)]
        self.recorders = [Recorder(Ticks()) for _ in range(self.count)]
        self.faults: Faults | None = None
        self.staging = [FusionPool() for _ in range(self.count)]
        self.caches = [RunCache() for _ in range(self.count)]
        self.tracers = [Tracer() for _ in range(self.count)]
        self.counters = [Counters() for _ in range(self.count)]
        self.allocate: Callable[[Any], Any] = arrays.empty
        self.waiting: Callable[[Key], None] | None = None
        self.seq = 1
        self.runs: dict[int, Run] = {}
        self._aborts: dict[int, str] = {}  # by participant
        self._threads = ThreadPoolExecutor(self.count)

    def close(self) -> None:
        for communicators in self.communicators:
            for communicator in communicators.values():
                communicator.close()
        self._threads.shutdown()

    def keep(self, participant: int, value: Any) -> Key:
        key = task_key(next(_ids).to_bytes(24, "little"), 1)
        self.stores[participant].put(key, contain(value))
        return key

    def start(self, planned: Plan) -> dict[int, Future[Outcome]]:
        """Starts the programs of a plan, as they come off the wire; by participant."""
        star = LocalWorld(len(planned.participants), "star")
        self.runs = {}
        aborts = self._aborts = {}
        for position, name in enumerate(planned.participants):
            one = int(name.removeprefix("actor-"))
            communicators = self.communicators[one]
            self.runs[one] = Run(
                decode_program(encode_program(planned.program(position))),
                self.seq,
                communicators.__getitem__,
                Instruments(
                    store=self.stores[one],
                    recorder=self.recorders[one],
                    clock=time.monotonic,
                    faults=self.faults,
                    allocate=self.allocate,
                    staging=self.staging[one],
                    cache=self.caches[one],
                    tracer=self.tracers[one],
                    counters=self.counters[one],
                ),
                keys=planned.sources(position),  # type: ignore[arg-type]
                aborted=partial(aborts.get, one),
                waiting=self.waiting,
                exchange=Star(star, position),
            )
        self.seq += planned.width
        return {one: self._threads.submit(self._run_one, one) for one in self.runs}

    def run(
        self, requests: Sequence[Request], memberships: Sequence[Membership], staging: int = 32 << 20
    ) -> dict[int, Outcome]:
        """Plans and runs requests; by participant."""
        futures = self.start(plan(requests, memberships, staging=staging))
        return {one: future.result(WAIT_S) for one, future in futures.items()}

    def abort(self, one: int) -> None:
        """Aborts the plan under way on a participant."""
        self._aborts[one] = "the plan was aborted"
        self.runs[one].abort()

    def _run_one(self, one: int) -> Outcome:
        runs = self.runs
        outcome = runs[one].run()
        if outcome.error is not None and not isinstance(outcome.error, RefusedError):
            for other in runs:
                if other != one:
                    self.abort(other)
        return outcome


def _local(world_size: int) -> list[Communicator]:
    world = LocalWorld(world_size, "convoy")
    return [LocalCommunicator(world, rank) for rank in range(world_size)]


class _Launched:
    """A communicator that tells of each kernel before it runs them."""

    def __init__(self, inner: Communicator, tell: Callable[[Kernel], None]) -> None:
        self._inner = inner
        self._tell = tell

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def launch(self, launch: Launch, kernels: Sequence[Kernel]) -> None:
        for kernel in kernels:
            self._tell(kernel)
        self._inner.launch(launch, kernels)


def launched(inner: Communicator, tell: Callable[[Kernel], None]) -> Communicator:
    """The communicator, with an ear to what it launches."""
    return _Launched(inner, tell)


MakeFleet = Callable[[int], Fleet]


def _raised(outcomes: list[Outcome]) -> list[Outcome]:
    for outcome in outcomes:
        if outcome.error is not None:
            raise outcome.error
    return outcomes


def refused_alike(outcomes: Any) -> RefusedError:
    """The one error that all ranks have."""
    (text,) = {str(outcome.error) for outcome in outcomes}
    error = outcomes[0].error
    assert isinstance(error, RefusedError), text
    assert all(outcome.outputs == () for outcome in outcomes)
    return error
