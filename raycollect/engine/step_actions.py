"""The prepared actions of a captured step: method calls, and this participant's part of plans."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Protocol

from raycollect.core.model import Key
from raycollect.core.protocols import Communicator, Exchange
from raycollect.core.threads import message_of
from raycollect.engine.instruments import Instruments
from raycollect.engine.missing_operand import MissingOperand
from raycollect.engine.run import Run
from raycollect.engine.step_program import CAPTURE_NBYTES, Collective, Given, Invocation, StepProgram
from raycollect.engine.value_codec import unpack_value
from raycollect.errors import MethodError, PlanAbortedError, ProtocolError, RaycollectError, RefusedError, copy_error
from raycollect.observe import Tracer
from raycollect.observe.run_steps import RunStep, calls
from raycollect.observe.stacks import is_on_the_way
from raycollect.observe.trace import METHOD
from raycollect.planner import Program, decode_program
from raycollect.pos import Container

# Calls a method: its name, its arguments by place and by name.
Invoke = Callable[[str, Sequence[Any], dict[str, Any]], Any]

# (program, number of its first launch) -> the controller's exchange, for participants without a common group.
Exchanges = Callable[[Program, int], Exchange | None]

# The part of a method's exception that is sent: characters of the message, lines of the traceback, characters of each.
DETAIL_LENGTH, TRACE_LINES, LINE_LENGTH = 2000, 30, 300

_CONSTANT = (type(None), bool, int, float, str, bytes)


class Runner(Protocol):
    """What actions use of the `StepRunner` that does them."""

    step_program: StepProgram
    slots: list[Any]
    invoke: Invoke
    instruments: Instruments
    communicators: Callable[[str], Communicator]
    tracer: Tracer
    run8: bytes
    step: RunStep | None

    def begin(self, plan: Run) -> None:
        """Notes which plan is under way; raises PlanAbortedError where the run was aborted."""

    def operand(self, slot: int) -> Container | MissingOperand:
        """The value of a slot as collectives take it."""


class MethodAction:
    """A prepared method call. Arguments are in slots; constants have additional slots."""

    is_method = True

    def __init__(self, invocation: Invocation, runner: Runner) -> None:
        self._runner = runner
        self.step: int = invocation.step
        self._method = invocation.method
        self._slot = invocation.slot
        self._fresh: list[tuple[int, bytes]] = []  # mutable constants, unpacked again for each run
        self._args = [self._place(value) for value in invocation.args]
        self._kwargs = [(name, self._place(value)) for name, value in invocation.kwargs]

    def words(self) -> str:
        """Describes the call to a person."""
        return f"call {self.step} of the step, method {self._method}"

    def _place(self, argument: int | Given) -> int:
        if not isinstance(argument, Given):
            return argument
        slots, value = self._runner.slots, unpack_value(argument.packed)
        if not _is_constant(value):
            self._fresh.append((len(slots), argument.packed))
            value = None
        slots.append(value)
        return len(slots) - 1

    def do(
        self, seq: int, aborted: Callable[[], str | None], exchange: Exchanges, succeeded: Callable[[], None] | None
    ) -> None:
        """Calls the method, and puts its return value into its slot."""
        runner = self._runner
        if (reason := aborted()) is not None:
            raise PlanAbortedError(detail=reason)
        slots = runner.slots
        for slot, packed in self._fresh:
            slots[slot] = unpack_value(packed)
        args = [value_of(slots[slot]) for slot in self._args]
        kwargs = {name: value_of(slots[slot]) for name, slot in self._kwargs}
        slots[self._slot] = None
        ring = runner.tracer.ring
        began_s = 0.0 if ring is None else ring.clock()
        try:
            slots[self._slot] = runner.invoke(self._method, args, kwargs)
            return
        except BaseException as exc:  # noqa: BLE001 - any exception ends the run, and not this thread
            error = _method_error(self._method, self.step, exc)
        finally:
            if ring is not None:
                ring.ended(METHOD, self._method, began_s, seq)
        raise copy_error(error)  # outside of the handler, without the exception and its frames


class PlanAction:
    """This participant's prepared part of a plan."""

    is_method = False

    def __init__(self, collective: Collective, runner: Runner) -> None:
        step_program = runner.step_program
        self._runner = runner
        self.step: int = collective.step
        self._offset = collective.offset
        self._first = collective.first if step_program.numbered else -1
        self._program = decode_program(collective.program)
        self._by_controller = not self._program.agreement.group_id  # by the controller
        self._inputs = collective.inputs
        self._outputs = collective.outputs
        self.nbytes: int | None = None  # of a run; None: not run yet
        if self._program.keys != len(collective.inputs):
            raise ProtocolError(detail=f"{len(collective.inputs)} operands for a program of {self._program.keys}")
        keys = [step_program.keys[slot] for slot in collective.inputs]
        before, after = CAPTURE_NBYTES, CAPTURE_NBYTES + 8  # of the run's number in a key
        varies = [key.startswith(step_program.capture) and not any(key[before:after]) for key in keys]
        self._same = None if any(varies) else tuple(keys)
        self._keys = [
            (key[:before], key[after:]) if other else (key, None) for key, other in zip(keys, varies, strict=True)
        ]

    def words(self) -> str:
        """Describes its collectives to a person."""
        program = self._program
        return f"{calls([self.step + task.request for task in program.tasks])} of the step, {program.name}"

    def do(
        self, seq: int, aborted: Callable[[], str | None], exchange: Exchanges, succeeded: Callable[[], None] | None
    ) -> None:
        """Runs the plan on the values of its slots."""
        runner, seq = self._runner, seq + self._offset
        slots, held = runner.slots, []
        for slot in self._inputs:
            value = slots[slot]
            if type(value) is not Container or value.leaves is not None:
                value = runner.operand(slot)
            held.append(value)
        for slot in self._outputs:
            slots[slot] = None
        run = Run(
            self._program,
            seq,
            runner.communicators,
            runner.instruments,
            aborted=aborted,
            operands=held,
            keys=self._same or self._keys_now(),
            exchange=exchange(self._program, seq) if self._by_controller else None,
            succeeded=None if self._outputs else succeeded,  # outputs have to be in their slots first
            slot=runner.step,
        )
        runner.begin(run)
        outcome = run.run()
        if self.nbytes is None:
            self.nbytes = run.bytes_done().total or None
        if outcome.error is not None:
            raise copy_error(self._moved(outcome.error))
        for slot, container in zip(self._outputs, outcome.outputs, strict=True):
            slots[slot] = container

    def _keys_now(self) -> tuple[Key, ...]:
        run8 = self._runner.run8
        return tuple([Key(head if tail is None else head + run8 + tail) for head, tail in self._keys])

    def _moved(self, error: RaycollectError) -> RaycollectError:
        # Numbers the violations' calls within the whole capture.
        if self._first < 0 or not isinstance(error, RefusedError):
            return error
        moved = tuple(replace(violation, call=max(violation.call, 0) + self._first) for violation in error.violations)
        return type(error)(op=error.op, group_name=error.group_name, violations=moved)


def value_of(value: Any) -> Any:
    """The user's value of a slot."""
    return value.value if type(value) is Container else value


def _is_constant(value: object) -> bool:
    return type(value) in _CONSTANT or (type(value) is tuple and all(map(_is_constant, value)))


def _method_error(method: str, step: int, exc: BaseException) -> MethodError:
    """Makes the error of a method's exception, without the exception or its frames, which would keep tensors alive."""
    detail, trace = message_of(exc)[:DETAIL_LENGTH], _trace(exc)
    return MethodError(op=method, call=step, raised=type(exc).__name__, detail=detail, trace=trace)


def _trace(exc: BaseException) -> str:
    try:
        text = "".join(traceback.format_exception(type(exc), exc, _from_method(exc.__traceback__)))
    except Exception:  # noqa: BLE001 - raised by the exception's own `__str__`
        text = "".join(traceback.format_tb(_from_method(exc.__traceback__)))
    return "\n".join(line[:LINE_LENGTH] for line in text.splitlines()[-TRACE_LINES:])


def _from_method(trace: TracebackType | None) -> TracebackType | None:
    # Skips the frames before the method.
    while trace is not None and is_on_the_way(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    return trace
