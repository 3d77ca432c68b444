"""The captured steps of a participant: order, carriers, failures, and the end, in threads and without Ray."""

from __future__ import annotations

import gc
import random
import threading
import time
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import msgpack
import numpy as np
import pytest

from raycollect.channel.doorbell import Doorbell, Entry
from raycollect.channel.messages import Message, Ran, Run
from raycollect.core.model import Segment
from raycollect.engine.instruments import Instruments
from raycollect.engine.step_program import encode_step_program
from raycollect.engine.step_runner import StepRunner
from raycollect.engine.value_codec import pack_values, unpack_values
from raycollect.errors import (
    CaptureError,
    ConnectionLostError,
    InternalError,
    MethodError,
    PlanAbortedError,
    ProtocolError,
    RaycollectError,
)
from raycollect.member import captured_steps
from raycollect.member.captured_steps import (
    CapturedStep,
    CapturedSteps,
    decode_capture,
    decode_fenced,
    open_doorbell,
)
from raycollect.member.sequencer import PlanSequencer
from raycollect.observe import Recorder
from raycollect.pos import Store
from tests.pure.teams import CAPTURE, WAIT_S, Actor, Gate, Script, full, given, pinned
from tests.pure.watched import WatchedCondition


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
        **methods: Callable[..., Any],
    ) -> None:
        self.actor, self.post, self.sequencer, self.turn = Actor(**methods), post, PlanSequencer(), turn
        self.store = Store()
        self.changed = threading.Condition()
        self.ran: dict[int, tuple[Any, ...]] = {}
        self.failed: dict[int, RaycollectError] = {}
        self.order: list[int] = []
        self.lost = False
        instruments = Instruments(store=self.store, recorder=Recorder(time.monotonic), clock=time.monotonic)
        replay = StepRunner(
            script.step_program, script.values, self.actor.invoke, instruments, communicators or _no_group
        )
        self.captured = CapturedStep(replay, cast(Any, post), self.sequencer, turn, self.send, self.fail)
        self.runner = replay

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
        message = Run(capture=CAPTURE, seq=seq, predecessor=predecessor, payload=pack_values(arguments))
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


def _no_group(group_id: str) -> Any:
    raise AssertionError(group_id)


MakeBench = Callable[..., Bench]


@pytest.fixture
def bench() -> Iterator[MakeBench]:
    made: list[Bench] = []

    def make(
        script: Script | None = None,
        *,
        post: FakePost | None = None,
        turn: Any = None,
        **methods: Callable[..., Any],
    ) -> Bench:
        if script is None:
            script = echo()
        made.append(Bench(script, post, turn, **{"note": lambda value: value, **methods}))
        return made[-1]

    yield make
    for one in made:
        one.sequencer.close("the test is over")
        one.captured.close("the test is over")
        assert one.captured.join(WAIT_S)


def echo(method: str = "note") -> Script:
    """A step that gives a method its argument, and gives back what that returns."""
    script = Script(0)
    script.returns.append(script.call(method, script.argument()))
    return script


# ---------------------------------------------------------------------------------------------- order and carriers


def test_runs_over_the_channel_are_answered_there(bench: MakeBench) -> None:
    one = bench()
    for seq in range(1, 6):
        one.run(seq, seq - 1, seq * 10)
    one.heard(*range(1, 6))
    assert one.ran == {seq: (seq * 10,) for seq in range(1, 6)}
    assert one.order == [1, 2, 3, 4, 5]
    assert one.sequencer.begun == 5


def test_runs_by_the_bell_are_answered_there(bench: MakeBench) -> None:
    one = bench(post=FakePost())
    numbers = [one.post.ring(seq, seq - 1, pack_values([seq])) for seq in range(1, 6)]  # type: ignore[union-attr]
    assert [one.answered(number) for number in numbers] == [(seq,) for seq in range(1, 6)]
    assert not one.order, "nothing by the channel"


@pytest.mark.parametrize("rung_first", [True, False])
def test_oversized_arguments_use_the_channel(bench: MakeBench, rung_first: bool) -> None:
    """The bell is rung before the message is sent; the thread may see them in any order."""
    one = bench(post=FakePost())
    assert one.post is not None
    if rung_first:
        number = one.post.ring(1, 0, None)
        one.run(1, 0, "long")
    else:
        with one.post.changed:  # the thread sees both at once
            number = one.post.ring(1, 0, None)
            one.captured._came.append(Run(capture=CAPTURE, seq=1, predecessor=0, payload=pack_values(["long"])))
            with one.captured._changed:
                one.captured._changed.notify_all()
    assert one.answered(number) == ("long",)


def test_results_too_long_for_the_bell_go_by_the_channel(bench: MakeBench) -> None:
    one = bench(post=FakePost(inline=8))
    assert one.post is not None
    one.post.ring(1, 0, pack_values(["x" * 30]))
    one.heard(1)
    assert one.ran == {1: ("x" * 30,)}
    assert one.answered(one.post.ring(2, 1, pack_values([2]))) == (2,)


def test_a_run_that_was_not_rung_for_is_done_all_the_same(bench: MakeBench) -> None:
    one = bench(post=FakePost())
    assert one.post is not None
    assert one.answered(one.post.ring(1, 0, pack_values([1]))) == (1,)
    one.run(2, 1, "by the channel")
    one.heard(2)
    assert one.ran == {2: ("by the channel",)}
    assert one.answered(one.post.ring(3, 2, pack_values([3]))) == (3,)


@pytest.mark.parametrize("seed", range(6))
def test_runs_of_all_ways_share_one_order(bench: MakeBench, seed: int) -> None:
    """By the bell, by the channel, fenced, and plans between them: each after its predecessor."""
    rng = random.Random(seed)
    one = bench(post=FakePost() if seed % 2 else None)
    done: list[int] = []
    note = one.actor.methods["note"] = lambda seq: done.append(seq)
    assert note is not None
    seqs = sorted(rng.sample(range(1, 200), 40))
    threads = []
    for predecessor, seq in zip([0, *seqs], seqs, strict=False):
        way = rng.choice(["bell", "channel", "long", "fence", "plan"])
        if way == "bell" and one.post is not None:
            one.post.ring(seq, predecessor, pack_values([seq]))
        elif way == "long" and one.post is not None:
            one.post.ring(seq, predecessor, None)
            one.run(seq, predecessor, seq)
        elif way == "fence":
            threads.append(threading.Thread(target=one.captured.run_now, args=(seq, predecessor, pack_values([seq]))))
        elif way == "plan":

            def plan(seq: int = seq, predecessor: int = predecessor) -> None:
                assert one.sequencer.start(seq, predecessor) is None
                done.append(seq)
                one.sequencer.end(seq)

            threads.append(threading.Thread(target=plan))
        elif one.post is None:
            one.run(seq, predecessor, seq)
        else:
            one.post.ring(seq, predecessor, pack_values([seq]))
    rng.shuffle(threads)
    for thread in threads:
        thread.start()
    assert one.sequencer.start(1000, seqs[-1]) is None
    one.sequencer.end(1000)
    for thread in threads:
        thread.join(WAIT_S)
    assert done == seqs


def test_a_fenced_run_is_watched_and_answered_over_the_channel(bench: MakeBench) -> None:
    one = bench(post=FakePost())
    entered: list[str] = []

    @contextmanager
    def watched() -> Iterator[None]:
        entered.append("in")
        yield
        entered.append("out")

    one.captured.run_now(1, 0, pack_values([5]), watched)
    assert one.ran == {1: (5,)}
    assert entered == ["in", "out"]
    assert not one.post.answers  # type: ignore[union-attr]


@pytest.mark.parametrize("by_bell", [True, False])
def test_a_run_holds_the_turn_but_not_while_it_waits(bench: MakeBench, by_bell: bool) -> None:
    turn, gate = threading.Lock(), Gate()
    one = bench(post=FakePost() if by_bell else None, turn=turn, note=gate)
    assert one.sequencer.start(1, 0) is None

    def start(seq: int, predecessor: int) -> None:
        if one.post is not None:
            one.post.ring(seq, predecessor, pack_values([seq]))
        else:
            one.run(seq, predecessor, seq)

    start(2, 1)
    assert turn.acquire(timeout=WAIT_S), "the plan before it has not ended"
    one.sequencer.end(1)
    assert not one.actor.calls, "a method of Ray's has the turn"
    turn.release()
    assert gate.came.wait(WAIT_S)
    assert turn.locked()
    gate.go.set()
    assert one.sequencer.start(3, 2) is None
    with turn:
        one.sequencer.end(3)


# ---------------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize("by_bell", [True, False])
def test_after_a_failure_all_later_runs_are_refused_and_ended(bench: MakeBench, by_bell: bool) -> None:
    def note(value: int) -> int:
        if value == 2:
            raise ValueError("bad")
        return value

    one = bench(post=FakePost() if by_bell else None, note=note)
    for seq in range(1, 5):
        if one.post is not None:
            one.post.ring(seq, seq - 1, pack_values([seq]))
        else:
            one.run(seq, seq - 1, seq)
    one.heard(2, 3, 4)
    one.captured.run_now(5, 4, pack_values([5]))
    assert isinstance(one.failed[2], MethodError)
    for seq in (3, 4, 5):
        error = one.failed[seq]
        assert isinstance(error, PlanAbortedError)
        assert error.detail == "run 2 of this captured step failed before"
    assert one.noted == [1, 2]
    if one.post is not None:
        assert set(one.post.answers) == {1}
    assert one.sequencer.start(6, 5) is None, "what comes after goes on"
    one.sequencer.end(6)


@pytest.mark.parametrize("by_bell", [True, False])
def test_a_fenced_run_that_waits_as_one_fails_is_not_done(
    bench: MakeBench, monkeypatch: pytest.MonkeyPatch, by_bell: bool
) -> None:
    """However long the thread of the one that failed is held up before it goes on."""
    hold, calls = Gate(), list[int]()

    def note(value: int) -> int:
        calls.append(value)
        hold()
        raise ValueError("bad")

    one = bench(post=FakePost() if by_bell else None, note=note)
    kept = WatchedCondition()
    one.sequencer._lock = one.sequencer._changed = kept  # type: ignore[assignment]
    fenced = threading.Thread(target=one.captured.run_now, args=(2, 1, pack_values([2])))
    end = one.sequencer.end

    def held_up(seq: int) -> None:
        end(seq)
        if seq == 1:
            fenced.join(WAIT_S)

    monkeypatch.setattr(one.sequencer, "end", held_up)
    if one.post is not None:
        one.post.ring(1, 0, pack_values([1]))
    else:
        one.run(1, 0, 1)
    assert hold.came.wait(WAIT_S)
    fenced.start()
    assert kept.someone_waits()
    hold.go.set()
    one.heard(1, 2)
    assert calls == [1]
    assert isinstance(one.failed[1], MethodError)
    assert isinstance(one.failed[2], PlanAbortedError)
    assert "failed before" in str(one.failed[2])


@pytest.mark.parametrize("way", ["bell", "channel", "fence"])
def test_runs_that_wait_for_the_turn_end_by_abort(bench: MakeBench, way: str) -> None:
    """The method that has it goes on all the while."""
    turn = threading.Lock()
    one = bench(post=FakePost() if way == "bell" else None, turn=turn)
    threads = []
    with turn:
        for seq in (1, 2, 3):
            if one.post is not None:
                one.post.ring(seq, seq - 1, pack_values([seq]))
            elif way == "channel":
                one.run(seq, seq - 1, seq)
            else:
                threads.append(threading.Thread(target=one.captured.run_now, args=(seq, seq - 1, pack_values([seq]))))
                threads[-1].start()
        for seq in (1, 2, 3):
            assert not one.sequencer.abort(seq, f"cancelled {seq}")
            one.captured.runner.abort(seq)
            one.heard(seq)
        assert one.sequencer.start(4, 3) is None, "a plan behind them"
        one.sequencer.end(4)
        assert turn.locked()
    for thread in threads:
        thread.join(WAIT_S)
    assert [one.failed[seq].detail for seq in (1, 2, 3)] == [f"cancelled {seq}" for seq in (1, 2, 3)]  # type: ignore[attr-defined]
    assert not one.actor.calls
    assert turn.acquire(timeout=WAIT_S), "nobody has kept it"


def test_a_run_that_waits_for_the_turn_ends_as_the_step_is_closed(bench: MakeBench) -> None:
    turn = threading.Lock()
    one = bench(turn=turn)
    with turn:
        one.run(1, 0, 1)
        one.captured.close("closed")
        one.heard(1)
        assert one.failed[1].detail == "closed"  # type: ignore[attr-defined]
        assert one.captured.join(WAIT_S)


def test_a_run_that_was_aborted_before_it_came_is_not_done(bench: MakeBench) -> None:
    one = bench()
    assert not one.sequencer.abort(1, "cancelled")
    one.run(1, 0, 1)
    one.heard(1)
    assert one.failed[1].detail == "cancelled"  # type: ignore[attr-defined]
    assert not one.actor.calls


def test_an_abort_reaches_the_run_under_way(bench: MakeBench) -> None:
    gate, script = Gate(), Script(0)
    script.call("hold")
    script.call("after")
    one = bench(script, hold=gate, after=int)
    one.run(1, 0)
    assert gate.came.wait(WAIT_S)
    one.captured.runner.abort(7)
    assert not one.sequencer.abort(1, "timed out")
    one.captured.runner.abort(1)
    gate.go.set()
    one.heard(1)
    assert one.failed[1].detail in ("timed out", "the run was aborted")  # type: ignore[attr-defined]
    assert [name for name, _, _ in one.actor.calls] == ["hold"]


def test_unexpected_failure_becomes_internal_error(bench: MakeBench, monkeypatch: pytest.MonkeyPatch) -> None:
    one = bench()
    monkeypatch.setattr(one.runner, "run", lambda *args, **kwargs: 1 / 0)
    one.run(1, 0, 1)
    one.heard(1)
    assert isinstance(one.failed[1], InternalError)
    assert "ZeroDivisionError" in str(one.failed[1])


def test_malformed_arguments_fail_the_run(bench: MakeBench) -> None:
    one = bench()
    one.captured.received(Run(capture=CAPTURE, seq=1, predecessor=0, payload=b"\xc1"))
    one.heard(1)
    assert isinstance(one.failed[1], ProtocolError)


def test_results_too_long_for_a_message_fail_the_run(bench: MakeBench) -> None:
    one = bench(post=FakePost(), note=lambda value: bytes(value))
    one.run(1, 0, captured_steps.MOST_NBYTES - 10)
    one.heard(1)
    assert len(one.ran[1][0]) == captured_steps.MOST_NBYTES - 10
    one.run(2, 1, captured_steps.MOST_NBYTES)
    one.heard(2)
    assert isinstance(one.failed[2], CaptureError)
    assert "refs" in str(one.failed[2])


def test_lost_controller_does_not_stop_runs(bench: MakeBench) -> None:
    one = bench()
    one.lost = True
    one.run(1, 0, 1)
    one.run(2, 1, 2)
    assert one.sequencer.start(3, 2) is None
    one.sequencer.end(3)
    assert one.noted == [1, 2]


# ---------------------------------------------------------------------------------------------- the end


def _ended(one: Bench) -> None:
    assert one.captured.join(WAIT_S)
    assert one.runner.slots == [None] * len(one.runner.slots)
    if one.post is not None:
        assert one.post.closed


@pytest.mark.parametrize("by_bell", [True, False])
def test_closing_while_it_is_idle(bench: MakeBench, by_bell: bool) -> None:
    one = bench(post=FakePost() if by_bell else None)
    one.captured.close("closed")
    one.captured.close("again")
    _ended(one)
    message = Run(capture=CAPTURE, seq=1, predecessor=0, payload=b"")
    assert not one.captured.received(message), "nobody would do it"
    one.captured.run_now(2, 0, b"")
    assert one.failed[2].detail == "closed"  # type: ignore[attr-defined]


@pytest.mark.parametrize("by_bell", [True, False])
def test_close_ends_runs_in_order(bench: MakeBench, by_bell: bool) -> None:
    """The run under way is aborted, those behind it are refused, and plans after them go on."""
    gate, script = Gate(), Script(0)
    script.call("hold")
    script.call("after")
    one = bench(script, post=FakePost() if by_bell else None, hold=gate, after=int)
    for seq in (1, 2, 3):
        if one.post is not None:
            one.post.ring(seq, seq - 1, b"" if seq < 3 else None)
        if one.post is None or seq == 3:
            one.run(seq, seq - 1)
    assert gate.came.wait(WAIT_S)
    one.captured.close("closed")
    gate.go.set()
    one.heard(1, 2, 3)
    _ended(one)
    assert one.order == [1, 2, 3]
    assert all(isinstance(error, PlanAbortedError) for error in one.failed.values())
    assert [name for name, _, _ in one.actor.calls] == ["hold"]
    assert one.sequencer.start(4, 3) is None
    one.sequencer.end(4)


def test_closing_while_a_run_waits_for_its_message(bench: MakeBench) -> None:
    one = bench(post=FakePost())
    assert one.post is not None
    one.post.ring(1, 0, None)
    one.captured.close("closed")
    one.heard(1)
    _ended(one)
    assert one.failed[1].detail == "closed"  # type: ignore[attr-defined]


def test_closing_while_a_run_waits_for_its_predecessor(bench: MakeBench) -> None:
    one = bench()
    assert one.sequencer.start(1, 0) is None
    one.run(2, 1, 1)
    one.captured.close("closed")
    assert not one.failed
    one.sequencer.end(1)
    one.heard(2)
    _ended(one)
    assert not one.actor.calls


def test_end_of_the_lease_wakes_runs_awaiting_a_predecessor(bench: MakeBench) -> None:
    one = bench()
    one.run(2, 1, 1)
    assert one.sequencer.close("the controller is gone") in ((), (2,))
    one.captured.close("the controller is gone")
    one.heard(2)
    _ended(one)


def test_closing_waits_for_a_fenced_run_before_it_lets_go(bench: MakeBench) -> None:
    gate = Gate()
    one = bench(note=gate)
    thread = threading.Thread(target=one.captured.run_now, args=(1, 0, pack_values(["kept"])))
    thread.start()
    assert gate.came.wait(WAIT_S)
    one.captured.close("closed")
    assert one.runner.slots[0] == "kept"
    gate.go.set()
    thread.join(WAIT_S)
    _ended(one)
    assert isinstance(one.failed.get(1), PlanAbortedError) or one.ran[1] == ("kept",)


def test_values_are_released(bench: MakeBench) -> None:
    array = full(1)
    alive = weakref.ref(array)
    script = Script(0, [pinned(array)])
    script.call("note", 0)
    one = bench(script, note=lambda value: None)
    one.run(1, 0)
    one.heard(1)
    del array, script
    one.actor.calls.clear()
    gc.collect()
    assert alive() is not None
    (infos, _) = one.captured.runner.look()
    assert [info.shape for info in infos] == [(5,)]
    one.captured.close("closed")
    _ended(one)
    gc.collect()
    assert alive() is None


def test_closed_step_releases_its_constants(bench: MakeBench) -> None:
    """Neither what travelled, nor what it became, nor the values of refs; whether it has run or not."""
    nbytes, table = 1 << 20, CapturedSteps()
    for runs in (0, 2):
        script, pin = Script(0, [pinned(np.ones(nbytes // 8))]), bytes([runs]) * nbytes
        script.call("note", given(pin))
        script.call("keep", given((np.zeros(nbytes // 8),)), named=given({"it": pin}))
        one = bench(script, keep=lambda *args, **kwargs: None)
        script.values.clear()
        capture = bytes([runs]) * 16
        table.add(capture, lambda one=one: one.captured)  # type: ignore[misc]
        for seq in range(1, runs + 1):
            one.run(seq, seq - 1)
            one.heard(seq)
        assert _heaviest(one.captured) >= nbytes
        table.forget(capture, "closed")
        _ended(one)
        one.actor.calls.clear()
        late = table.find(capture)
        assert late is one.captured
        assert _heaviest(late) < 1 << 16
        late.run_now(runs + 1, runs, b"")
        assert isinstance(one.failed[runs + 1], PlanAbortedError)


def _heaviest(root: object) -> int:
    """The bytes of the largest constant that an object reaches by what it holds."""
    seen: dict[int, object] = {}
    found, left = 0, [root]
    while left:
        one = left.pop()
        if id(one) in seen or isinstance(one, (type, types.ModuleType, types.FunctionType, types.FrameType)):
            continue
        seen[id(one)] = one
        found = max(found, len(one) if isinstance(one, bytes) else getattr(one, "nbytes", 0))
        left += gc.get_referents(one)
    return found


def test_an_idle_step_sleeps(bench: MakeBench) -> None:
    one = bench(post=FakePost())
    assert one.post is not None
    assert one.answered(one.post.ring(1, 0, pack_values([1]))) == (1,)
    takes = one.post.takes
    with one.post.changed:
        assert not one.post.changed.wait_for(lambda: one.post.takes > takes + 1, 0.05)  # type: ignore[union-attr]


@pytest.mark.parametrize("seed", range(4))
def test_closing_at_any_moment_ends_all_runs(bench: MakeBench, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(25):
        one = bench(post=FakePost() if rng.random() < 0.5 else None)
        count, at = rng.randrange(1, 8), rng.randrange(8)
        for seq in range(1, count + 1):
            if seq == at + 1:
                break
            long = rng.random() < 0.3
            if one.post is not None:
                one.post.ring(seq, seq - 1, None if long else pack_values([seq]))
            if one.post is None or long:
                one.run(seq, seq - 1, seq)
        last = min(count, at)
        one.captured.close("closed")
        assert one.captured.join(WAIT_S)
        assert one.sequencer.start(last + 1, last) is None
        one.sequencer.end(last + 1)
        answered = set() if one.post is None else set(one.post.answers)
        assert {*one.ran, *one.failed, *answered} == set(range(1, last + 1))


# ---------------------------------------------------------------------------------------------- a real doorbell


def test_with_a_real_doorbell() -> None:
    try:
        doorbell = Doorbell(1)
    except OSError as exc:
        pytest.skip(str(exc))
    post = open_doorbell(doorbell.segment, 0, keeps_core=True)
    assert post is not None
    one = Bench(echo(), None, note=lambda value: value)
    one.captured.close("another is made")
    runner = StepRunner(echo().step_program, [], one.actor.invoke, one.runner.instruments, _no_group)
    captured = CapturedStep(runner, post, one.sequencer, None, one.send, one.fail)
    for seq in range(1, 40):
        number, value = doorbell.begin(), "x" * (10_000 if seq % 5 == 0 else seq)
        if not doorbell.ring(0, number, seq, seq - 1, pack_values([value])):
            captured.received(Run(capture=CAPTURE, seq=seq, predecessor=seq - 1, payload=pack_values([value])))
        until_s = time.monotonic() + WAIT_S
        while (found := doorbell.answer(0, number)) is None and seq not in one.ran and time.monotonic() < until_s:
            doorbell.wait(0.05)
        assert (one.ran[seq] if found is None else unpack_values(found)) == (value,)
    assert set(one.ran) == set(range(5, 40, 5)), "the long ones"
    captured.close("closed")
    assert captured.join(WAIT_S)
    doorbell.close()


def test_a_doorbell_out_of_reach_is_none() -> None:
    assert open_doorbell(None, 0, keeps_core=True) is None
    assert open_doorbell(Segment(1 << 22, 3, b"t" * 16, 4096), 0, keeps_core=True) is None


# ---------------------------------------------------------------------------------------------- the table


class Fake:
    """A captured step that only notes what is done to it."""

    def __init__(self) -> None:
        self.closed: list[str] = []
        self.woken: list[int] = []
        self.runner = types.SimpleNamespace(abort=self.woken.append)

    def close(self, reason: str) -> None:
        self.closed.append(reason)

    def exchange(self, seq: int) -> Any:
        return self if seq == 3 else None


def _made(table: CapturedSteps, capture: bytes) -> Any:
    return table.add(capture, Fake)  # type: ignore[arg-type,return-value]


def test_table_finds_live_and_recently_closed_steps() -> None:
    table = CapturedSteps()
    one, other = _made(table, b"1"), _made(table, b"2")
    assert table.find(b"1") is one
    assert table.find(b"3") is None
    table.wake(5)
    assert one.woken == other.woken == [5]
    assert table.exchange(3) in (one, other)
    assert table.exchange(4) is None
    with pytest.raises(CaptureError, match="before"):
        _made(table, b"1")
    table.forget(b"1", "forgotten")
    table.forget(b"1", "again")
    assert one.closed == ["forgotten"]
    assert table.find(b"1") is one, "what is on its way to it"
    with pytest.raises(CaptureError, match="closed while it was captured"):
        _made(table, b"1")
    table.close("over")
    assert other.closed == ["over"]
    with pytest.raises(CaptureError, match="closed"):
        _made(table, b"9")


def test_a_step_that_was_closed_before_it_came_is_not_taken_in() -> None:
    table = CapturedSteps()
    table.forget(b"1", "timed out")
    with pytest.raises(CaptureError):
        _made(table, b"1")
    assert table.find(b"1") is None


def test_few_of_the_closed_are_remembered() -> None:
    table = CapturedSteps()
    made = [_made(table, bytes([at // 256, at % 256])) for at in range(captured_steps.LATE + 10)]
    for at in range(len(made)):
        table.forget(bytes([at // 256, at % 256]), "closed")
    found = [table.find(bytes([at // 256, at % 256])) for at in range(len(made))]
    assert found == [None] * 10 + made[10:]


# ---------------------------------------------------------------------------------------------- payloads


def test_payloads_are_read() -> None:
    step_program = echo().step_program
    segment = Segment(7, 8, b"t" * 16, 4096)
    for brought in (None, segment):
        plain = None if brought is None else (7, 8, b"t" * 16, 4096)
        packed = msgpack.packb((encode_step_program(step_program), plain, 3))
        assert decode_capture(packed) == (step_program, brought, 3)
    assert decode_fenced(msgpack.packb((CAPTURE, 5, 4, b"x"))) == (CAPTURE, 5, 4, b"x")


@pytest.mark.parametrize(
    "payload", [b"", b"\xc1", msgpack.packb(3), msgpack.packb((b"", None)), msgpack.packb([1] * 4)]
)
def test_malformed_payloads(payload: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_capture(payload)
    if len(payload) < 5:
        with pytest.raises(ProtocolError):
            decode_fenced(payload)


def test_sequences_and_arrays_come_back(bench: MakeBench) -> None:
    one = bench(note=lambda value: (value, np.arange(3)))
    one.run(1, 0, [1, (2,)])
    one.heard(1)
    ((value, array),) = one.ran[1]
    assert isinstance(value, Sequence)
    assert value == [1, (2,)]
    np.testing.assert_array_equal(array, np.arange(3))
