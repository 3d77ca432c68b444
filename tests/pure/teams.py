"""Captured steps as tests need them: a team of participants in threads, and the routines that make them a step."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from raycollect.core.model import GroupSpec, Key, OpKind, ReduceOp
from raycollect.core.protocols import Faults
from raycollect.engine.instruments import Instruments
from raycollect.engine.run_cache import RunCache
from raycollect.engine.step_program import (
    CAPTURES,
    Collective,
    Given,
    Invocation,
    StepProgram,
    captured_key,
)
from raycollect.engine.step_runner import StepRunner
from raycollect.engine.value_codec import pack_value, pack_values, unpack_values
from raycollect.observe import Recorder
from raycollect.planner import Plan, Program, Request, encode_program, plan
from raycollect.pos import Container, Store
from tests.pure.fleet import WAIT_S, contain
from tests.pure.local_world import LocalCommunicator, LocalWorld
from tests.pure.meaning import REDUCTIONS

CAPTURE = bytes(range(16))

Argument = int | Given


def given(value: Any) -> Given:
    return Given(pack_value(value))


class Script:
    """Writes the routine of one participant, action by action; slots are counted as they come."""

    def __init__(self, rank: int, refs: Sequence[Any] = ()) -> None:
        self.rank = rank
        self.values = list(refs)
        self.keys = [Key(bytes((rank, at)) + bytes(26)) for at in range(len(refs))]
        self.actions: list[Invocation | Collective] = []
        self.arguments: list[int] = []
        self.returns: list[int] = []
        self.kept: list[int] = []
        self.numbered = False
        self.step = 0

    def slot(self) -> int:
        self.keys.append(captured_key(CAPTURE, len(self.keys)))
        return len(self.keys) - 1

    def argument(self) -> int:
        self.arguments.append(self.slot())
        return self.arguments[-1]

    def call(self, method: str, *args: Argument, **kwargs: Argument) -> int:
        slot = self.slot()
        one = Invocation(step=self.step, method=method, args=args, kwargs=tuple(kwargs.items()), slot=slot)
        self.actions.append(one)
        self.step += 1
        return slot

    @property
    def step_program(self) -> StepProgram:
        made = StepProgram(
            capture=CAPTURE,
            actions=tuple(self.actions),
            slots=len(self.keys),
            refs=len(self.values),
            arguments=tuple(self.arguments),
            returns=tuple(self.returns),
            keeps=tuple(self.kept),
            keys=tuple(self.keys),
            numbered=self.numbered,
        )
        return CAPTURES.decode(CAPTURES.encode((made, None, 0)))[0]


class Actor:
    """Calls plain functions as methods, and notes who was called with what."""

    def __init__(self, **methods: Callable[..., Any]) -> None:
        self.methods = methods
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def invoke(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        self.calls.append((name, tuple(args), kwargs))
        return self.methods[name](*args, **kwargs)


class Injected:
    """The faults of a team, which may change from run to run."""

    def __init__(self) -> None:
        self.now: Faults | None = None

    def at(self, point: str, seq: int, rank: int) -> None:
        if self.now is not None:
            self.now.at(point, seq, rank)


class Team:
    """Participants in threads, with a group of all of them, that run captured steps."""

    def __init__(self, world: int, scripts: Sequence[Script] | None = None, *, group_id: str = "0123") -> None:
        self.world = world
        self.spec = GroupSpec(name="team", group_id=group_id, backend="local", world_size=world)
        shared = LocalWorld(world, "team")
        self.communicators = [LocalCommunicator(shared, rank) for rank in range(world)]
        self.stores = [Store() for _ in range(world)]
        self.recorders = [Recorder(time.monotonic) for _ in range(world)]
        self.caches = [RunCache() for _ in range(world)]
        self.scripts = list(scripts or (Script(rank) for rank in range(world)))
        self.actors = [Actor() for _ in range(world)]
        self.width = 0
        self.requests = 0
        self.aborts: list[dict[int, str]] = [{} for _ in range(world)]
        self.replays: list[StepRunner] = []
        self.exchanges: Callable[[int, Program, int], Any] = lambda rank, program, seq: None
        self.faults = Injected()
        self._threads = ThreadPoolExecutor(world)
        self._seq = 1

    def close(self) -> None:
        for communicator in self.communicators:
            communicator.close()
        self._threads.shutdown()

    # ---------------------------------------------------------------------------------------- writing

    def collective(
        self, kind: OpKind, src: Mapping[int, int], dst: Mapping[int, int] | None = None, **arguments: Any
    ) -> list[list[int]]:
        """Adds a collective over slots by rank; gives the slots that it fills, by rank."""
        return self.batch([(kind, src, dst or {}, arguments)])

    def batch(self, calls: Sequence[tuple[OpKind, Mapping[int, int], Mapping[int, int], dict[str, Any]]]) -> list[Any]:
        requests = []
        for kind, src, dst, arguments in calls:
            if kind in REDUCTIONS:
                arguments.setdefault("op", ReduceOp.SUM)
            operands = tuple(
                (rank, self._source(rank, src.get(rank)), self._source(rank, dst.get(rank)))
                for rank in range(self.world)
            )
            arguments.setdefault("timeout_s", WAIT_S)
            requests.append(Request(kind=kind, group=self.spec, operands=operands, **arguments))
        return self.add(plan(requests))

    def add(self, planned: Plan) -> list[list[int]]:
        outputs = []
        for rank, script in enumerate(self.scripts):
            position = planned.parts[0].places[rank]
            program = planned.program(position)
            inputs = tuple(int(str(source).split("/")[1]) for source in planned.sources(position))
            makes = [buffer for task in program.tasks for buffer in program.shares[task.share].template.buffers]
            made = tuple(script.slot() for buffer in makes if buffer.is_output)
            one = Collective(
                step=script.step,
                offset=self.width,
                first=self.requests,
                program=encode_program(program),
                inputs=inputs,
                outputs=made,
            )
            script.actions.append(one)
            script.step += len(planned.requests)
            outputs.append(list(made))
        self.width += planned.width
        self.requests += len(planned.requests)
        return outputs

    @staticmethod
    def _source(rank: int, slot: int | None) -> Any:
        return None if slot is None else f"{rank}/{slot}"

    # ---------------------------------------------------------------------------------------- running

    def capture(self) -> list[StepRunner]:
        for script in self.scripts:
            script.numbered = self.requests > 1
        self.replays = [
            StepRunner(
                script.step_program,
                script.values,
                self.actors[rank].invoke,
                Instruments(
                    store=self.stores[rank],
                    recorder=self.recorders[rank],
                    clock=time.monotonic,
                    faults=self.faults,
                    cache=self.caches[rank],
                ),
                lambda group_id, rank=rank: self.communicators[rank],
            )
            for rank, script in enumerate(self.scripts)
        ]
        return self.replays

    def start(self, *arguments: Any) -> tuple[int, list[Future[Any]]]:
        """Starts a run of all; gives its number and, by rank, what comes back."""
        if not self.replays:
            self.capture()
        seq = self._seq
        self._seq += max(self.width, 1)
        return seq, [self._threads.submit(self.run_one, rank, seq, arguments) for rank in range(self.world)]

    def run_one(self, rank: int, seq: int, arguments: Sequence[Any] = ()) -> tuple[Any, ...]:
        results = self.replays[rank].run(
            seq,
            pack_values(arguments),
            aborted=self.aborts[rank],
            exchange=lambda program, at: self.exchanges(rank, program, at),
        )
        return unpack_values(results)

    def run(self, *arguments: Any) -> list[Any]:
        _, futures = self.start(*arguments)
        return [future.result(WAIT_S) for future in futures]

    def repeated(self, rank: int) -> list[bool]:
        """For each plan that a rank has run to its end, whether an earlier run had prepared it."""
        story = self.recorders[rank].story()
        anew = {event.seq for event in story if event.what == "agreed"}
        return [event.seq not in anew for event in story if event.what == "check"]

    def fail(self, *arguments: Any) -> list[BaseException | None]:
        _, futures = self.start(*arguments)
        return [future.exception(WAIT_S) for future in futures]


class Gate:
    """A method that says that it has come, and goes on when it is let."""

    def __init__(self) -> None:
        self.came, self.go = threading.Event(), threading.Event()

    def __call__(self, *args: Any) -> Any:
        self.came.set()
        assert self.go.wait(WAIT_S)
        return args[0] if args else None


def pinned(value: Any) -> Container:
    return contain(value)


def full(value: float, shape: Any = (5,)) -> Any:
    return np.full(shape, float(value))
