"""Runs a routine again and again: what a participant does in each run of a captured step. It needs no Ray.

All that can be looked up once is looked up when the step is captured, since a run of a small collective takes no longer
than a few look-ups.

What a run gives stays in its slots until the next run gives it anew, for who asks how it looks. A value is let go of
before what replaces it is made, so that it needs no memory twice; what a method returns again and again, as the same
tensors, is recognised, and with it all that the last run found out about it (`raycollect.prepared`).
"""

from __future__ import annotations

import threading
import traceback
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any

from raycollect.backends import arrays
from raycollect.contracts import Communicator, Exchange
from raycollect.errors import (
    CaptureError,
    MethodError,
    PlanAbortedError,
    ProtocolError,
    RaycollectError,
    RefusedError,
)
from raycollect.executor import Execution, Instruments, Outcome
from raycollect.model import TENSOR, Key, TensorInfo
from raycollect.observe import Tracer
from raycollect.observe.trace import METHOD
from raycollect.payload import pack_values, unpack_value, unpack_values
from raycollect.planner import Program, decode_program
from raycollect.pos import Container
from raycollect.reach import NOWHERE, Reach
from raycollect.repeat import Repeat
from raycollect.routine import CAPTURE_NBYTES, Collective, Given, Invocation, Routine
from raycollect.stacks import is_on_the_way
from raycollect.tasks import Missing
from raycollect.words import a_type

__all__ = ["Exchanges", "Invoke", "Replay"]

Invoke = Callable[[str, Sequence[Any], dict[str, Any]], Any]
"""Calls a method: its name, its arguments by place and by name."""

Exchanges = Callable[[Program, int], Exchange | None]
"""Gives the door that the controller keeps for a plan whose participants share no group; also takes its launch."""

DETAIL_LENGTH, TRACE_LINES, LINE_LENGTH = 2000, 30, 300
"""How much of what a method raised is told: letters of its message, last lines of its traceback, letters of each."""

_READ_IT = "let it return plain values and arrays, and read other things with an ordinary method"

_RUN_AT = CAPTURE_NBYTES, CAPTURE_NBYTES + 8
_CONSTANT = (type(None), bool, int, float, str, bytes)


class Replay:
    """The runs of one routine, one at a time; `abort` and `look` by any thread.

    Args:
        routine: What to do.
        refs: The values of its refs, in the order of their slots: containers, or what went by value.
        invoke: Calls a method of the actor.
        instruments: See `Instruments`.
        communicators: Gives this participant's end of a group, by the group's id; raises GroupBrokenError.

    Attributes:
        is_single: Whether a run is one plan, and nothing else.
    """

    def __init__(
        self,
        routine: Routine,
        refs: Sequence[Any],
        invoke: Invoke,
        instruments: Instruments,
        communicators: Callable[[str], Communicator],
    ) -> None:
        if len(refs) != routine.refs:
            raise ProtocolError(detail=f"{len(refs)} values for a routine of {routine.refs} refs")
        self.routine: Routine = routine
        self.slots: list[Any] = [*refs, *[None] * (routine.slots - routine.refs)]
        self.invoke: Invoke = invoke
        self.instruments = instruments
        self.communicators = communicators
        self.run8: bytes = b""  # the run's number, as keys have it
        self.tracer: Tracer = Tracer.current()
        self._known = _Known(routine.slots)
        self._runs = 0
        self._lock = threading.Lock()  # guards what follows
        self._seq = 0  # the run under way; 0: none
        self._stopped = False
        self._execution: Execution | Repeat | None = None
        self._at = 0  # which action is under way
        self._actions: list[_Call | _Plan] = [
            _Call(one, self) if isinstance(one, Invocation) else _Plan(one, self) for one in routine.actions
        ]
        self._final = self._actions[-1] if self._actions else None
        self.is_single: bool = len(self._actions) == 1 and type(self._final) is _Plan

    def run(
        self,
        seq: int,
        arguments: bytes,
        *,
        aborted: Callable[[], str | None],
        exchange: Exchanges = lambda program, seq: None,
        answer: Callable[[bytes], None] | None = None,
    ) -> bytes:
        """Runs it once.

        Args:
            seq: The run's place in its controller's order.
            arguments: What `pack_values` made of the run's arguments.
            aborted: Why the run was aborted, or None; asked before each action, and by plans before each launch.
            exchange: See `Exchanges`.
            answer: Told early what is given back, where that is nothing, and all is done that anybody can see.

        Returns:
            What `pack_values` makes of what is given back.

        Raises:
            RaycollectError: It failed; what was to be done after that was not.
        """
        routine = self.routine
        with self._lock:
            self._seq, self._stopped = seq, False
        self._runs += 1
        self.run8 = self._runs.to_bytes(8, "little")
        landed = None if answer is None or routine.returns else partial(answer, b"")
        try:
            if routine.arguments or arguments:
                self._take(arguments)
            for at, action in enumerate(self._actions):
                self._at = at
                reason = aborted()
                if reason is not None or self._stopped:
                    raise PlanAbortedError(detail=reason or "the run was aborted")
                action.do(seq, aborted, exchange, landed if action is self._final else None)
            return self._results() if routine.returns else b""
        finally:
            with self._lock:
                self._seq, self._execution = 0, None

    def abort(self, seq: int = 0) -> None:
        """Ends the waits of a run under way, and lets it begin no other action; any thread may call it.

        Args:
            seq: Which run; 0: whichever is under way.
        """
        with self._lock:
            if not self._seq or seq not in (0, self._seq):
                return
            self._stopped = True
            if self._execution is not None:  # under the lock: a `Repeat` is the next run's, too
                self._execution.abort()

    def look(self) -> list[tuple[TensorInfo, ...] | None]:
        """How the tensors of each slot look, as the last run left them; None where there are none."""
        return [_infos(value) for value in self.slots]

    def reach(self, seq: int) -> Reach | None:
        """How far a run is, less the plans that no run has come to yet; None: it is not under way."""
        with self._lock:
            if not seq or seq != self._seq:
                return None
            at, execution, actions = self._at, self._execution, self._actions
        now = NOWHERE if execution is None else execution.reach()
        plans = [(place, one.nbytes) for place, one in enumerate(actions) if type(one) is _Plan]
        before = sum(nbytes for place, nbytes in plans if place < at)
        after = sum(nbytes for place, nbytes in plans if place > at)
        mine = now.total or sum(nbytes for place, nbytes in plans if place == at)
        return Reach(before + now.done, before + mine + after, now.lent)

    def close(self) -> None:
        """Lets go of all values; no run may follow."""
        self.slots = [None] * len(self.slots)
        self.routine = replace(self.routine, actions=())  # they have what is constant
        self.invoke = _gone
        self._known = _Known(0)
        self._actions, self._final = [], None

    # ------------------------------------------------------------------------------------------ for the actions

    def begin(self, execution: Execution | Repeat) -> None:
        """Notes which plan is under way.

        Raises:
            PlanAbortedError: The run was aborted.
        """
        with self._lock:  # an abort comes either before, and is seen here, or after, and finds the plan
            if self._stopped:
                raise PlanAbortedError(detail="the run was aborted")
            self._execution = execution

    def end(self) -> None:
        """Notes that none is."""
        with self._lock:
            self._execution = None

    def operand(self, slot: int) -> Container | Missing:
        """The value of a slot as collectives take it."""
        value = self.slots[slot]
        if type(value) is Container:
            return value
        found = None if slot < self.routine.refs else self._known.container(slot, value)
        if found is None:
            expected = "a tensor, or a list, tuple or dict of tensors"
            return Missing("not_tensor", f"{a_type(value, in_full=True)}, which goes by value", expected)
        self.slots[slot] = found
        return found

    # ------------------------------------------------------------------------------------------ values

    def _take(self, arguments: bytes) -> None:
        values, slots = unpack_values(arguments), self.routine.arguments
        if len(values) != len(slots):
            raise ProtocolError(detail=f"{len(values)} arguments for a captured step that takes {len(slots)}")
        for slot, value in zip(slots, values, strict=True):
            self.slots[slot] = value

    def _results(self) -> bytes:
        values = [value_of(self.slots[slot]) for slot in self.routine.returns]
        try:
            return pack_values(values)
        except TypeError as exc:
            raise self._unpackable(values, str(exc)) from None

    def _unpackable(self, values: Sequence[Any], detail: str) -> RaycollectError:
        """Says which result can't be given back."""
        for slot, value in zip(self.routine.returns, values, strict=True):
            try:
                pack_values((value,))
            except TypeError as exc:
                made = (one for one in self.routine.actions if isinstance(one, Invocation) and one.slot == slot)
                call = next(made, None)
                if call is None:
                    return CaptureError(detail=f"what the step should give back can't be: {exc}; {_READ_IT}")
                detail = f"{exc}, so that it can't be given back"
                return MethodError(op=call.method, call=call.step, detail=detail)
        return CaptureError(detail=f"what the step should give back can't be: {detail}; {_READ_IT}")


# ---------------------------------------------------------------------------------------------- actions


class _Call:
    """A method call, made ready. What it is given in each run lies in slots; what is constant in some of their own."""

    __slots__ = ("_args", "_fresh", "_kwargs", "_method", "_replay", "_slot", "_step")

    def __init__(self, one: Invocation, replay: Replay) -> None:
        self._replay = replay
        self._step = one.step
        self._method = one.method
        self._slot = one.slot
        self._fresh: list[tuple[int, bytes]] = []  # what a method may change, made anew for each run
        self._args = [self._place(value) for value in one.args]
        self._kwargs = [(name, self._place(value)) for name, value in one.kwargs]

    def _place(self, argument: int | Given) -> int:
        if not isinstance(argument, Given):
            return argument
        slots, value = self._replay.slots, unpack_value(argument.packed)
        if not _is_constant(value):
            self._fresh.append((len(slots), argument.packed))
            value = None
        slots.append(value)
        return len(slots) - 1

    def do(
        self, seq: int, aborted: Callable[[], str | None], exchange: Exchanges, landed: Callable[[], None] | None
    ) -> None:
        replay = self._replay
        slots = replay.slots
        for slot, packed in self._fresh:
            slots[slot] = unpack_value(packed)
        args = [value_of(slots[slot]) for slot in self._args]
        kwargs = {name: value_of(slots[slot]) for name, slot in self._kwargs}
        slots[self._slot] = None
        ring = replay.tracer.ring
        began_s = 0.0 if ring is None else ring.clock()
        try:
            slots[self._slot] = replay.invoke(self._method, args, kwargs)
            return
        except BaseException as exc:  # noqa: BLE001 - whatever it is, it ends the run, and not this thread
            error = _method_error(self._method, self._step, exc)
        finally:
            if ring is not None:
                ring.ended(METHOD, self._method, began_s, seq)
        raise error  # here, where the exception and with it the method's frames are gone


class _Plan:
    """This participant's half of a plan, made ready."""

    __slots__ = (
        "_first",
        "_inputs",
        "_kept_door",
        "_keys",
        "_last",
        "_offset",
        "_outputs",
        "_program",
        "_repeat",
        "_replay",
        "_same",
        "nbytes",
    )

    def __init__(self, one: Collective, replay: Replay) -> None:
        routine = replay.routine
        self._replay = replay
        self._offset = one.offset
        self._first = one.first if routine.numbered else -1
        self._program = decode_program(one.program)
        self._kept_door = not self._program.door.group_id  # by the controller
        self._inputs = one.inputs
        self._outputs = one.outputs
        self._last: tuple[int, ...] = ()  # the operands of the last run, by identity
        self._repeat: Repeat | None = None
        self.nbytes = 0  # in its first run; 0: it had none
        if self._program.keys != len(one.inputs):
            raise ProtocolError(detail=f"{len(one.inputs)} operands for a program of {self._program.keys}")
        keys = [routine.keys[slot] for slot in one.inputs]
        before, after = _RUN_AT
        varies = [key.startswith(routine.capture) and not any(key[before:after]) for key in keys]
        self._same = None if any(varies) else tuple(keys)
        self._keys = [
            (key[:before], key[after:]) if other else (key, None) for key, other in zip(keys, varies, strict=True)
        ]

    def do(
        self, seq: int, aborted: Callable[[], str | None], exchange: Exchanges, landed: Callable[[], None] | None
    ) -> None:
        replay, seq = self._replay, seq + self._offset
        slots, held = replay.slots, []
        for slot in self._inputs:
            value = slots[slot]
            held.append(value if type(value) is Container else replay.operand(slot))
        for slot in self._outputs:
            slots[slot] = None
        repeat = self._repeated(held)
        if repeat is not None:
            repeat.ready(seq)
            replay.begin(repeat)
            try:
                outcome = repeat.run(self._same or self._keys_now(), aborted, landed)
            finally:
                replay.end()
        else:
            outcome = self._in_full(seq, held, aborted, exchange)
        if outcome.error is not None:
            raise self._moved(outcome.error)
        for slot, made in zip(self._outputs, outcome.outputs, strict=True):
            slots[slot] = made

    def _repeated(self, held: Sequence[Container | Missing]) -> Repeat | None:
        """The last run, where it can be done again as it was: from the third in a row on, on the same operands."""
        if self._outputs:
            return None
        repeat = self._repeat
        if repeat is not None and repeat.fits(held):
            return repeat
        self._repeat, now = None, tuple(map(id, held))
        if now == self._last:
            replay = self._replay
            made = Repeat.of(self._program, held, replay.instruments, replay.communicators)
            self._repeat = made if made is not None and made.fits(held) else None
        self._last = now
        return self._repeat

    def _in_full(
        self, seq: int, held: Sequence[Container | Missing], aborted: Callable[[], str | None], exchange: Exchanges
    ) -> Outcome:
        replay, program = self._replay, self._program
        execution = Execution(
            program,
            self._same or self._keys_now(),
            replay.communicators,
            replay.instruments,
            seq=seq,
            aborted=aborted,
            held=held,
            exchange=exchange(program, seq) if self._kept_door else None,
        )
        replay.begin(execution)
        try:
            outcome = execution.run()
        finally:
            replay.end()
        self.nbytes = self.nbytes or execution.reach().total
        return outcome

    def _keys_now(self) -> tuple[Key, ...]:
        run8 = self._replay.run8
        return tuple([Key(head if tail is None else head + run8 + tail) for head, tail in self._keys])

    def _moved(self, error: RaycollectError) -> RaycollectError:
        """The error, with its calls counted as those of the whole capture."""
        if self._first < 0 or not isinstance(error, RefusedError):
            return error
        moved = tuple(replace(one, call=max(one.call, 0) + self._first) for one in error.violations)
        return type(error)(op=error.op, group_name=error.group_name, violations=moved)


class _Known:
    """The containers of what methods return again and again, by slot.

    One is kept from the second time on, so that what is new in each run goes when the run's next one is made.
    """

    __slots__ = ("_kept", "_last")

    def __init__(self, slots: int) -> None:
        self._kept: list[Container | None] = [None] * slots
        self._last: list[Callable[[], object]] = [_nothing] * slots

    def container(self, slot: int, value: object) -> Container | None:
        """Takes a value apart; what is known of the same tensors comes with it. None for what is no operand."""
        kept = self._kept[slot]
        if kept is not None and kept.value is value and kept.structure is TENSOR:
            return kept
        made = Container.of(value, arrays.is_tensor)
        if made is None:
            self._kept[slot] = None
            return None
        if kept is not None and _is_same(kept, made):
            made = Container(made.structure, made.tensors, value, kept.memo)
        elif self._last[slot]() is not made.tensors[0]:
            self._kept[slot], self._last[slot] = None, _weak(made.tensors[0])
            return made
        self._kept[slot] = made
        return made


def value_of(value: Any) -> Any:
    """What a method gets, or the driver, for what is in a slot."""
    return value.value if type(value) is Container else value


def _gone(method: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    raise CaptureError(detail="this captured step is closed")


def _nothing() -> object:
    return None


def _weak(tensor: object) -> Callable[[], object]:
    """A way to ask for a tensor as long as it lives; one that can't be asked for is kept alive."""
    try:
        return weakref.ref(tensor)
    except TypeError:
        return lambda: tensor


def _is_same(one: Container, other: Container) -> bool:
    """Whether two values are made of the very same tensors in the same way."""
    return (
        len(one.tensors) == len(other.tensors)
        and all(a is b for a, b in zip(one.tensors, other.tensors, strict=True))
        and one.structure == other.structure
    )


def _is_constant(value: object) -> bool:
    """Whether nobody can change a value."""
    return type(value) in _CONSTANT or (type(value) is tuple and all(map(_is_constant, value)))


def _infos(value: Any) -> tuple[TensorInfo, ...] | None:
    container = value if type(value) is Container else Container.of(value, arrays.is_tensor)
    if container is None:
        return None
    try:
        return tuple(map(arrays.describe, container.tensors))
    except TypeError:  # one has no memory any more
        return None


# ---------------------------------------------------------------------------------------------- what methods raise


def _method_error(method: str, step: int, exc: BaseException) -> MethodError:
    """What becomes of an exception of a method: it keeps neither the exception nor its frames, and so no tensor."""
    try:
        detail = str(exc)
    except Exception as broken:  # noqa: BLE001 - anyone's code
        detail = f"(its message can't be made: {type(broken).__name__})"
    trace = _trace(exc)
    return MethodError(op=method, call=step, raised=type(exc).__name__, detail=detail[:DETAIL_LENGTH], trace=trace)


def _trace(exc: BaseException) -> str:
    """The end of a traceback, from the method on."""
    try:
        text = "".join(traceback.format_exception(type(exc), exc, _from_method(exc.__traceback__)))
    except Exception:  # noqa: BLE001 - it shows the exception too
        text = "".join(traceback.format_tb(_from_method(exc.__traceback__)))
    return "\n".join(line[:LINE_LENGTH] for line in text.splitlines()[-TRACE_LINES:])


def _from_method(trace: TracebackType | None) -> TracebackType | None:
    """A traceback without the frames on the way to the method."""
    while trace is not None and is_on_the_way(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    return trace
