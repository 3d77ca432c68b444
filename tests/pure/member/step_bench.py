"""Captured steps of a participant in threads, without Ray."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from raycollect.channel.doorbell import Entry
from raycollect.channel.messages import BeginRun, Message, Ran
from raycollect.core import threads
from raycollect.engine.instruments import Instruments
from raycollect.engine.step_runner import StepRunner
from raycollect.engine.value_codec import pack_values, unpack_values
from raycollect.errors import (
    ConnectionLostError,
    RaycollectError,
)
from raycollect.member.captured_steps import (
    CapturedStep,
)
from raycollect.member.executor import Executor
from raycollect.member.sequencer import PlanSequencer
from raycollect.observe import Recorder
from raycollect.pos import Store
from tests.pure.teams import CAPTURE, WAIT_S, Actor, Script


class FakePost:
    """A doorbell without shared memory."""

    def __init__(self, inline: int = 64) -> None:
        self.changed = threading.Condition()
        self.entries: deque[Entry] = deque()
        self.answers: dict[int, bytes] = {}
        self.inline = inline
        self.woken = self.closed = False
        self.takes = 0
        self._number = 0

    def ring(self, seq: int, predecessor: int, payload: bytes | None) -> int:
        with self.changed:
            self._number += 1
            self.entries.append(Entry(self._number, seq, predecessor, payload))
            self.changed.notify_all()
            return self._number

    def take(self, timeout_s: float) -> Entry | None:
        with self.changed:
            self.takes += 1
            self.changed.wait_for(lambda: self.entries or self.woken, timeout_s)
            if self.entries:
                return self.entries.popleft()
            self.woken = False
            return None

    def answer(self, number: int, payload: bytes) -> bool:
        with self.changed:
            if len(payload) > self.inline:
                return False
            self.answers[number] = payload
            self.changed.notify_all()
            return True

    def wake(self) -> None:
        with self.changed:
            self.woken = True
            self.changed.notify_all()

    def close(self) -> None:
        self.closed = True


class Bench:
    """One participant with one captured step, and what the controller hears of it."""

    def __init__(
        self,
        script: Script,
        post: FakePost | None,
        turn: Any = None,
        communicators: Callable[[str], Any] | None = None,
        sequencer: PlanSequencer | None = None,
        **methods: Callable[..., Any],
    ) -> None:
        self.actor, self.post, self.turn = Actor(**methods), post, turn
        self.sequencer = sequencer or PlanSequencer()
        self.store = Store()
        self.changed = threading.Condition()
        self.ran: dict[int, tuple[Any, ...]] = {}
        self.failed: dict[int, RaycollectError] = {}
        self.order: list[int] = []
        self.lost = False
        self.waited: list[tuple[bytes, int]] = []
        instruments = Instruments(store=self.store, recorder=Recorder(time.monotonic), clock=time.monotonic)
        replay = StepRunner(
            script.step_program, script.values, self.actor.invoke, instruments, communicators or no_group
        )
        reporter = SimpleNamespace(tell_failure=self.fail)
        executor = Executor(self.sequencer, cast(Any, reporter), cast(Any, self))
        shared = threads.pool("raycollect-capture", 1)
        self.captured = CapturedStep(replay, cast(Any, post), executor, turn, self.send, shared)
        self.runner = replay

    def wait_for_call(self, task: bytes, seq: int) -> None:
        self.waited.append((task, seq))

    def send(self, message: Message) -> None:
        if self.lost:
            raise ConnectionLostError(detail="gone")
        assert isinstance(message, Ran)
        with self.changed:
            self.ran[message.seq] = unpack_values(message.payload)
            self.order.append(message.seq)
            self.changed.notify_all()

    def fail(self, seq: int, error: RaycollectError) -> None:
        with self.changed:
            self.failed[seq] = error
            self.order.append(seq)
            self.changed.notify_all()

    def run(self, seq: int, predecessor: int, *arguments: Any) -> None:
        """A run over the channel."""
        message = BeginRun(capture=CAPTURE, seq=seq, predecessor=predecessor, payload=pack_values(arguments), after=b"")
        assert self.captured.received(message)

    def heard(self, *seqs: int) -> None:
        """Waits until the controller has heard of the end of these runs, by the channel."""
        with self.changed:
            assert self.changed.wait_for(lambda: set(seqs) <= {*self.ran, *self.failed}, WAIT_S), (self.order, seqs)

    def answered(self, number: int) -> tuple[Any, ...]:
        assert self.post is not None
        with self.post.changed:
            assert self.post.changed.wait_for(lambda: number in self.post.answers, WAIT_S)  # type: ignore[union-attr]
            return unpack_values(self.post.answers[number])

    @property
    def noted(self) -> list[Any]:
        """What the method `note` was called with, in order."""
        return [args[0] for name, args, _ in self.actor.calls if name == "note"]


def no_group(group_id: str) -> Any:
    raise AssertionError(group_id)


MakeBench = Callable[..., Bench]


@pytest.fixture
def bench() -> Iterator[MakeBench]:
    benches: list[Bench] = []

    def make(
        script: Script | None = None,
        *,
        post: FakePost | None = None,
        turn: Any = None,
        **methods: Callable[..., Any],
    ) -> Bench:
        if script is None:
            script = echo()
        benches.append(Bench(script, post, turn, **{"note": lambda value: value, **methods}))
        return benches[-1]

    yield make
    for bench in benches:
        bench.sequencer.close("the test is over")
        bench.captured.close("the test is over")
        assert bench.captured.join(WAIT_S)


def echo(method: str = "note") -> Script:
    """A step that gives a method its argument, and gives back what that returns."""
    script = Script(0)
    script.returns.append(script.call(method, script.argument()))
    return script
