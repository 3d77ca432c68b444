"""A participant's process and captured steps: how methods are called, the turn, what comes over the channel."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any, cast

import numpy as np
import pytest
import ray

from raycollect.channel.messages import Abort, Arrivals, BeginRun, Done, Forget, Ran
from raycollect.core.model import TENSOR, Address, Key, task_key
from raycollect.engine.step_program import CAPTURES
from raycollect.engine.value_codec import pack_values, unpack_values
from raycollect.errors import (
    CaptureError,
    InvalidArgumentError,
    NotAMemberError,
    RaycollectError,
    TensorDirtyError,
    TensorFreedError,
    UnsupportedError,
    from_wire,
)
from raycollect.member import mixin
from raycollect.member.lease import Lease
from raycollect.member.methods import Methods
from raycollect.member.mixin import CollectiveParticipant, by_value
from raycollect.member.participant import this_participant
from raycollect.observe import Tracer
from raycollect.observe.trace import WAIT
from raycollect.pos.handle import Handle
from tests.pure.participants import entered, participant
from tests.pure.teams import CAPTURE, WAIT_S, Gate, Script, full, pinned


class Plain(CollectiveParticipant):
    """What runs call."""

    def add(self, one: int, *, other: int = 1) -> int:
        return one + other

    def outer(self) -> Any:
        return self.tensor()

    def tensor(self) -> Any:
        return full(1)

    @by_value
    def valued(self) -> str:
        return threading.current_thread().name

    def items(self) -> Iterator[int]:
        yield 1

    def broken(self) -> None:
        raise ValueError("bad")

    @property
    def odd(self) -> int:
        raise AssertionError("nobody asks for it")

    _hidden = 3


class Loops(CollectiveParticipant):
    """The same with a loop."""

    async def add(self, one: int) -> tuple[int, str]:
        await asyncio.sleep(0)
        return one + await self.more(), threading.current_thread().name

    async def more(self) -> int:
        return 1

    def plain(self) -> str:
        return threading.current_thread().name

    async def items(self) -> Any:
        yield 1

    async def broken(self) -> None:
        raise ValueError("bad")


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    thread = threading.Thread(target=made.run_forever, name="the loop")
    thread.start()
    yield made
    made.call_soon_threadsafe(made.stop)
    thread.join(WAIT_S)
    made.close()


# ---------------------------------------------------------------------------------------------- methods


def test_methods_are_called_as_by_the_actor_itself(
    monkeypatch: pytest.MonkeyPatch, loop: asyncio.AbstractEventLoop
) -> None:
    """In the caller's thread, or in the actor's loop. Ray is not asked whose call it is, and nothing is kept."""
    plain, loops = Plain(), Loops()
    with monkeypatch.context() as patched:
        patched.delattr("ray._private.worker.Worker.connected")
        invoke = mixin._invoker(Methods(), plain, None, ["add", "outer", "valued"])
        assert invoke("add", [1], {}) == 2
        assert invoke("add", [1], {"other": 5}) == 6
        assert invoke("outer", [], {}).tolist() == full(1).tolist()
        assert invoke("valued", [], {}) == threading.current_thread().name
        assert not mixin._inside.get()
        invoke = mixin._invoker(Methods(), loops, loop, ["add", "plain", "broken"])
        assert invoke("add", [1], {}) == (2, "the loop")
        assert invoke("plain", [], {}) == "the loop"
        with pytest.raises(ValueError, match="bad"):
            invoke("broken", [], {})


def test_what_keeps_methods_from_running_keeps_those_of_a_step() -> None:
    methods = Methods()
    invoke = mixin._invoker(methods, Plain(), None, ["add"])
    methods.refusals["an update in place"] = TensorDirtyError(op="add", group_name="", violations=())
    with pytest.raises(TensorDirtyError):
        invoke("add", [1], {})
    methods.refusals.clear()
    assert invoke("add", [1], {}) == 2


@pytest.mark.parametrize("name", ["nope", "_hidden", "odd", ""])
def test_an_unknown_method_is_refused_with_those_there_are(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match="add, broken, items, outer, tensor, valued") as caught:
        mixin._invoker(Methods(), Plain() if name != "odd" else _Odd(), None, ["add", name])
    assert name in str(caught.value)


class _Odd(Plain):
    odd = 3  # type: ignore[assignment]


@pytest.mark.parametrize("cls", [Plain, Loops])
def test_generators_are_refused(cls: Any) -> None:
    with pytest.raises(UnsupportedError, match="generator"):
        mixin._invoker(Methods(), cls(), None, ["items"])


# ---------------------------------------------------------------------------------------------- the turn


@pytest.fixture
def ordered(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bool], threading.Lock]]:
    """Lets methods be called as if by Ray, in a process that is an ordered participant, or another."""
    with ExitStack() as stack:

        def make(is_ordered: bool) -> threading.Lock:
            here = stack.enter_context(closing(participant(is_ordered=is_ordered)))
            stack.enter_context(entered(here))
            monkeypatch.setattr(mixin, "_outermost", lambda name: bytes(24))
            return here.methods.lock

        yield make


class Turning(CollectiveParticipant):
    """Tells whether the turn is held."""

    turn: threading.Lock
    expected: Any = None

    def plain(self) -> bool:
        return self.turn.locked()

    def broken(self) -> None:
        assert self.turn.locked()
        raise ValueError("bad")

    def items(self, count: int) -> Iterator[bool]:
        for _ in range(count):
            yield self.turn.locked()

    def same(self, value: Any) -> Any:
        assert value is self.expected
        return 3

    async def later(self, value: Any) -> Any:
        return self.same(value)

    @ray.method(num_returns=2)  # type: ignore[untyped-decorator]
    def two(self) -> Iterator[Any]:
        yield full(1)
        yield full(2)

    def some(self) -> Iterator[Any]:
        yield full(1)


def called_by_ray(one: Turning, name: str, *args: Any) -> Any:
    """Calls a method as Ray does, which makes a class of its own and reads the methods from that."""
    of_ray = type("Turning", (type(one),), {"__ray_actor_class__": type(one)})
    return dict(inspect.getmembers(of_ray, inspect.isfunction))[name](one, *args)


@pytest.mark.parametrize("is_ordered", [True, False])
def test_methods_that_ray_calls_hold_the_turn_where_they_are_ordered(ordered: Any, is_ordered: bool) -> None:
    one = Turning()
    one.turn = ordered(is_ordered)
    assert called_by_ray(one, "plain") is is_ordered
    assert not one.turn.locked()
    if is_ordered:
        with pytest.raises(ValueError, match="bad"):
            called_by_ray(one, "broken")
        assert not one.turn.locked()


@pytest.mark.parametrize("taken", [0, 1, 2, 5])
def test_a_generator_holds_it_from_its_first_item_to_its_end(ordered: Any, taken: int) -> None:
    one = Turning()
    one.turn = ordered(True)
    items = called_by_ray(one, "items", 3)
    for at, item in zip(range(taken), items, strict=False):
        assert item
        assert one.turn.locked() or at == 3
    items.close()
    assert not one.turn.locked()


@pytest.mark.parametrize("name", ["same", "later"])
def test_a_method_gets_the_tensor_itself_for_a_ref_of_this_process(ordered: Any, name: str) -> None:
    one = Turning()
    one.turn, one.expected = ordered(True), full(1)
    handle = this_participant().keep(task_key(bytes([1]) * 24, 1), pinned(one.expected))
    for argument in (handle, one.expected):
        found = called_by_ray(one, name, argument)
        assert (asyncio.run(found) if name == "later" else found) == 3


def test_items_of_a_generator_are_kept_under_the_refs_that_their_number_tells(ordered: Any) -> None:
    """Where only the caller knows how many refs there are, they go by value."""
    one = Turning()
    one.turn = ordered(True)
    assert len(list(called_by_ray(one, "two"))) == 2
    store = this_participant().store
    for index in (1, 2):
        np.testing.assert_array_equal(store.look(task_key(bytes(24), index)).value, full(index))
    assert [type(item) for item in called_by_ray(one, "some")] == [np.ndarray]


def test_a_plan_that_waits_for_a_method_has_that_in_its_timeline() -> None:
    tracer = Tracer()
    ring, methods = tracer.begin("a test"), Methods("W", tracer)
    assert ring is not None
    methods.lock.acquire()
    looks = iter([None, None])

    def aborted() -> str | None:
        if next(looks, "twice") == "twice":
            methods.lock.release()
        return None

    with methods.without(5, aborted):
        assert methods.lock.locked()
    (span,) = ring.read().spans
    assert (span.kind, span.name, span.seq) == (WAIT, "a method", 5)


# ---------------------------------------------------------------------------------------------- the process


class Controller:
    """What a participant's process says to its controller."""

    peer = "the controller"

    def __init__(self) -> None:
        self.hello = {"controller": "me", "description": "a test"}
        self.changed = threading.Condition()
        self.heard: list[Any] = []

    def send(self, message: Any) -> None:
        with self.changed:
            self.heard.append(message)
            self.changed.notify_all()

    def wait_for(self, seq: int) -> Any:
        def found() -> Any:
            return next((one for one in self.heard if getattr(one, "seq", 0) == seq), None)

        with self.changed:
            assert self.changed.wait_for(found, WAIT_S), self.heard
            return found()

    def error(self, seq: int) -> RaycollectError:
        message = self.wait_for(seq)
        assert isinstance(message, Done)
        assert message.error is not None
        return from_wire(message.error)


@pytest.fixture
def here() -> Iterator[Lease]:
    """A lease of a participant without Ray."""
    made = participant()
    made.opened(cast(Any, Controller()))
    yield made.leased()
    made.close()


def _said(here: Lease) -> Controller:
    return cast(Controller, here.link)


def _capture(here: Lease, script: Script, *values: Any, **methods: Callable[..., Any]) -> bool:
    def invoker(names: Any) -> Any:
        assert set(names) <= set(methods)
        return lambda name, args, kwargs: methods[name](*args, **kwargs)

    return here.capture(CAPTURES.encode((script.step_program, None, 0)), values, invoker)


def _echo() -> Script:
    script = Script(0)
    script.returns.append(script.call("note", script.argument()))
    return script


def _run(seq: int, predecessor: int, *arguments: Any) -> BeginRun:
    return BeginRun(capture=CAPTURE, seq=seq, predecessor=predecessor, payload=pack_values(arguments), after=b"")


def _result(message: Any) -> tuple[Any, ...]:
    assert isinstance(message, Ran)
    return unpack_values(message.payload)


@pytest.mark.parametrize("is_ordered", [True, False])
def test_runs_by_the_channel_hold_the_turn_of_ordered_participants(here: Lease, is_ordered: bool) -> None:
    here._methods.is_ordered = is_ordered
    held: list[bool] = []

    def note(value: int) -> int:
        held.append(here._methods.lock.locked())
        return value

    assert not _capture(here, _echo(), note=note), "there is no doorbell"
    here._receive_run(_run(1, 0, 5))
    here._receive_run(_run(2, 1, 6))
    said = _said(here)
    assert _result(said.wait_for(1)) == (5,)
    assert _result(said.wait_for(2)) == (6,)
    assert held == [is_ordered] * 2
    assert here._sequencer.begun == 2
    assert here.captured_step(CAPTURE).runner.look() == [None, None]


@pytest.mark.parametrize("known", [True, False])
def test_runs_of_a_closed_step_are_refused_and_ended(here: Lease, known: bool) -> None:
    """Also of one that is forgotten before it came, which is not taken in."""
    if known:
        _capture(here, _echo(), note=int)
    here.received(Forget(capture=CAPTURE))
    if not known:
        with pytest.raises(CaptureError, match="closed"):
            _capture(here, _echo(), note=int)
    here._receive_run(_run(1, 0))
    assert "closed" in str(_said(here).error(1))
    assert here._sequencer.start(2, 1) is None
    here._sequencer.end(2)


def test_an_abort_reaches_a_run(here: Lease, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, script = Gate(), Script(0)
    script.call("hold")
    script.call("after")
    _capture(here, script, hold=gate, after=lambda: pytest.fail("it was aborted"))
    here._receive_run(_run(1, 0))
    assert gate.came.wait(WAIT_S)
    woken, runner = list[int](), here.captured_step(CAPTURE).runner
    monkeypatch.setattr(runner, "abort", woken.append)
    here._abort(Abort(seq=1, reason="timed out"))
    assert woken == [1], "it would go on in a consistency check"
    gate.go.set()
    assert "aborted" in str(_said(here).error(1)) or "timed out" in str(_said(here).error(1))
    here._abort(Abort(seq=1, reason="again"))
    assert _said(here).heard[-1] == Done(seq=1, ranks=[], error=None, story=[]), "it has ended"


def test_arrivals_at_no_check_are_of_no_use(here: Lease) -> None:
    _capture(here, _echo(), note=int)
    here._arrivals(Arrivals(group_id="", seq=1, round=0, blobs=[b""], more=False))
    here._receive_run(_run(1, 0, 3))
    assert _result(_said(here).wait_for(1)) == (3,)


# ---------------------------------------------------------------------------------------------- values of refs


def _handle(key: Key, actor_id: str) -> Handle:
    return Handle(
        key=key,
        actor_id=actor_id,
        actor=f"Worker({actor_id})",
        address=Address(host="127.0.0.1", port=1, secret=b"s" * 32),
        structure=TENSOR,
        infos=(),
    )


def test_refs_are_pinned_or_go_by_value(here: Lease) -> None:
    key, shared, seen = Key(bytes(28)), object(), []
    container = pinned(full(3))
    here._store.put(key, container)
    script = Script(0, [None, None])
    script.call("note", 0, 1)
    _capture(here, script, _handle(key, here._participant.actor_id), shared, note=lambda *args: seen.append(args))
    here._store.free([key])
    here._receive_run(_run(1, 0))
    _said(here).wait_for(1)
    ((tensor, other),) = seen
    assert tensor is container.value, "the very tensor, though its ref is gone"
    assert other is shared


def test_foreign_and_missing_tensors_are_refused(here: Lease) -> None:
    script = Script(0, [None])
    key = Key(bytes(28))
    with pytest.raises(NotAMemberError, match="by send_ref"):
        _capture(here, script, _handle(key, "cd"))
    here._store.put(key, pinned(full(1)))
    here._store.free([key])
    with pytest.raises(TensorFreedError) as caught:
        _capture(here, script, _handle(key, here._participant.actor_id))
    assert caught.value.violations[0].ref == key.hex()
    with pytest.raises(CaptureError, match="not here"):
        here.captured_step(CAPTURE).runner.look()
