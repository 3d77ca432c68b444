"""Runs a captured step repeatedly on one participant. It needs no Ray.

Look-ups happen at capture where possible, since a run of a small collective takes no longer than a few look-ups.

Values stay in their slots until the next run replaces them, so that `look` can show them. A value is released before
its replacement is made, to save memory. Tensors that a method returns repeatedly are recognised, with their cached run
(`raycollect.engine.run_cache`).
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from msgspec.structs import replace

from raycollect.backends import arrays
from raycollect.core.model import TensorInfo
from raycollect.core.protocols import Communicator
from raycollect.engine.instruments import Instruments
from raycollect.engine.missing_operand import MissingOperand, missing
from raycollect.engine.progress import NOWHERE, BytesDone
from raycollect.engine.run import Run
from raycollect.engine.step_actions import Exchanges, Invoke, MethodAction, PlanAction, value_of
from raycollect.engine.step_program import Invocation, StepProgram
from raycollect.engine.value_codec import pack_values, unpack_values
from raycollect.errors import CaptureError, MethodError, PlanAbortedError, ProtocolError, RaycollectError
from raycollect.observe import Tracer, run_steps
from raycollect.observe.run_steps import RunStep
from raycollect.pos import Absence, Container, State, unkept
from raycollect.pos.store import weak

_ABORTED = "the run was aborted"

MOST_KEPT = 64
"""The number of runs whose kept values wait for `take_kept`."""

_READ_IT = "let it return plain values and arrays, and read other things with an ordinary method"


class StepRunner:
    """Runs one step program, one run at a time; any thread may call `abort` and `look`.

    Args:
        step_program: The program.
        refs: The values of its refs, in the order of their slots: containers, or plain values.
        invoke: Calls a method of the actor.
        communicators: Returns this participant's end of a group, by the group's id; raises GroupBrokenError.
    """

    def __init__(
        self,
        step_program: StepProgram,
        refs: Sequence[Any],
        invoke: Invoke,
        instruments: Instruments,
        communicators: Callable[[str], Communicator],
    ) -> None:
        if len(refs) != step_program.refs:
            raise ProtocolError(detail=f"{len(refs)} values for a step program of {step_program.refs} refs")
        self.step_program: StepProgram = step_program
        self.slots: list[Any] = [*refs, *[None] * (step_program.slots - step_program.refs)]
        self.invoke: Invoke = invoke
        self.instruments = instruments
        self.communicators = communicators
        self.run8: bytes = b""  # the run's number, in the form of keys
        self.step: RunStep | None = None  # the slot of the run's thread
        self.tracer: Tracer = instruments.tracer
        self._containers = _ReturnedContainers(step_program.slots)
        self._kept_values: dict[int, list[Any]] = {}  # by the run's number
        self._runs = 0
        self._lock = threading.Lock()  # guards what follows
        self._seq = 0  # the run in progress; 0: none
        self._aborted: dict[int, str] = {}  # the reasons of aborted runs, by number
        self._is_over = False  # whether later runs are aborted
        self._plan: Run | None = None  # the plan in progress
        self._at = 0  # the index of the current action
        self._actions: list[MethodAction | PlanAction] = [
            MethodAction(action, self) if isinstance(action, Invocation) else PlanAction(action, self)
            for action in step_program.actions
        ]
        self._final = self._actions[-1] if self._actions else None
        # Whether a run consists of one plan
        self.is_single: bool = len(self._actions) == 1 and type(self._final) is PlanAction

    def run(
        self,
        seq: int,
        arguments: bytes,
        *,
        aborted: dict[int, str],
        exchange: Exchanges = lambda program, seq: None,
        succeeded: Callable[[], None] | None = None,
        step: RunStep | None = None,
    ) -> bytes:
        """Runs the step once, and returns its results, packed by `pack_values`.

        Args:
            seq: The run's number in its controller's order.
            arguments: The run's arguments, packed by `pack_values`.
            aborted: The reasons of aborted runs, by number; checked before each method, and by plans before each
                launch. `abort` adds the run.
            exchange: See `Exchanges`.
            succeeded: For runs without results: may be called as soon as all visible work is done.
            step: The slot of this thread, if the caller has it.

        Raises:
            RaycollectError: The run failed; later actions did not run.
        """
        step_program = self.step_program
        with self._lock:
            self._seq, self._aborted = seq, aborted
            if self._is_over:
                aborted.setdefault(seq, _ABORTED)
        self._runs += 1
        self.run8 = self._runs.to_bytes(8, "little")
        if step_program.returns or step_program.keeps:
            succeeded = None
        if step is None:
            step = run_steps.here()
        self.step = step
        why = partial(aborted.get, seq)
        try:
            if step_program.arguments or arguments:
                self._take(arguments)
            for at, action in enumerate(self._actions):
                self._plan = None  # the previous plan may keep tensors alive
                self._at, step.action, step.at = at, action, ""
                action.do(seq, why, exchange, succeeded if action is self._final else None)
            if step_program.keeps:
                self._keep(seq, step_program.keeps)
            return self._results() if step_program.returns else b""
        finally:
            step.action = None  # otherwise the slot would keep values alive
            with self._lock:
                self._seq, self._plan = 0, None

    def _keep(self, seq: int, slots: Sequence[int]) -> None:
        with self._lock:
            self._kept_values[seq] = [value_of(self.slots[slot]) for slot in slots]
            while len(self._kept_values) > MOST_KEPT:
                self._kept_values.pop(next(iter(self._kept_values)))

    def take_kept(self, seq: int) -> Any:
        """Returns and forgets the kept value of a run, or the list of values; CaptureError: no value, or no longer."""
        with self._lock:
            values = self._kept_values.pop(seq, None)
        if values is None:
            raise CaptureError(detail=f"run {seq} of this captured step has no kept values, or no longer")
        return values if len(values) > 1 else values[0]

    def abort(self, seq: int = 0) -> None:
        """Ends the waits of run `seq`, or of any run (0), and prevents further actions; any thread may call it."""
        with self._lock:
            if not self._seq or seq not in (0, self._seq):
                return
            self._aborted.setdefault(self._seq, _ABORTED)  # the abort of one run has set a reason, `stop` has not
            plan = self._plan
        if plan is not None:
            plan.abort()

    def seq_with(self, group_id: str) -> int:
        """The run in progress, if its current plan uses a group; otherwise 0. Any thread may call it."""
        with self._lock:
            plan = self._plan
            return self._seq if plan is not None and group_id in plan.program.group_ids else 0

    def stop(self) -> None:
        """Aborts the run in progress and all later runs; any thread may call it."""
        self._is_over = True  # first: a run that begins now sees it, or is in progress when `abort` takes the lock
        self.abort()

    def look(self) -> list[tuple[TensorInfo, ...] | None]:
        """Describes the tensors of each slot after the last run; None for slots without tensors."""
        return [_infos(value) for value in self.slots]

    def bytes_done(self, seq: int) -> BytesDone | None:
        """Returns the progress of a run, without plans that no run has reached; None: the run is not in progress."""
        with self._lock:
            if not seq or seq != self._seq:
                return None
            at, plan, actions = self._at, self._plan, self._actions
        now = NOWHERE if plan is None else plan.bytes_done()
        plans = [(place, action.nbytes or 0) for place, action in enumerate(actions) if type(action) is PlanAction]
        before = sum(nbytes for place, nbytes in plans if place < at)
        after = sum(nbytes for place, nbytes in plans if place > at)
        mine = now.total or sum(nbytes for place, nbytes in plans if place == at)
        return BytesDone(before + now.done, before + mine + after, now.lent)

    def close(self) -> None:
        """Releases all values; no run may follow."""
        self.slots = [None] * len(self.slots)
        self.step_program = replace(self.step_program, actions=())  # actions hold constants
        self.invoke = _raise_closed
        self._containers = _ReturnedContainers(0)
        self._actions, self._final = [], None

    def begin(self, plan: Run) -> None:
        """Notes the plan in progress; raises PlanAbortedError if the run was aborted."""
        with self._lock:  # an earlier abort is seen here; a later abort finds the plan
            reason = self._aborted.get(self._seq)
            if reason is not None:
                raise PlanAbortedError(detail=reason)
            self._plan = plan

    def operand(self, slot: int) -> Container | MissingOperand:
        """The value of a slot as an operand."""
        value = self.slots[slot]
        if type(value) is Container:
            now = value.current()
            if isinstance(now, str):
                return missing(Absence(State.REPLACED, now))
            self.slots[slot] = now
            return now
        container = None if slot < self.step_program.refs else self._containers.container(slot, value)
        if container is None:
            expected = "a tensor, or a list, tuple or dict of tensors"
            return MissingOperand(
                "not_tensor", f"{unkept(value, arrays.is_tensor, arrays.describe_value)}, which goes by value", expected
            )
        self.slots[slot] = container
        return container

    def _take(self, arguments: bytes) -> None:
        values, slots = unpack_values(arguments), self.step_program.arguments
        if len(values) != len(slots):
            raise ProtocolError(detail=f"{len(values)} arguments for a captured step that takes {len(slots)}")
        for slot, value in zip(slots, values, strict=True):
            self.slots[slot] = value

    def _results(self) -> bytes:
        values = [value_of(self.slots[slot]) for slot in self.step_program.returns]
        try:
            return pack_values(values)
        except TypeError as exc:
            raise self._unpackable(values, str(exc)) from None

    def _unpackable(self, values: Sequence[Any], detail: str) -> RaycollectError:
        for slot, value in zip(self.step_program.returns, values, strict=True):
            try:
                pack_values((value,))
            except TypeError as exc:
                producers = (
                    action
                    for action in self.step_program.actions
                    if isinstance(action, Invocation) and action.slot == slot
                )
                call = next(producers, None)
                if call is None:
                    return CaptureError(detail=f"the step's results can't be returned: {exc}; {_READ_IT}")
                detail = f"{exc}, so the result can't be returned"
                return MethodError(op=call.method, call=call.step, detail=detail)
        return CaptureError(detail=f"the step's results can't be returned: {detail}; {_READ_IT}")


class _ReturnedContainers:
    """The containers of tensors that methods return repeatedly, by slot.

    A container is kept from the second time on, so that tensors that are new in each run are freed by the next run.
    """

    __slots__ = ("_last", "_repeated")

    def __init__(self, slots: int) -> None:
        self._repeated: list[Container | None] = [None] * slots
        self._last: list[Callable[[], object]] = [_nothing] * slots

    def container(self, slot: int, value: object) -> Container | None:
        """Returns the container of a value, with the cached runs of its tensors; None if the value is no operand."""
        repeated = self._repeated[slot]
        if repeated is not None and repeated.value is value and repeated.leaves is None:
            return repeated
        container = Container.of(value, arrays.is_tensor)
        if container is None:
            self._repeated[slot] = None
            return None
        if repeated is not None and _is_same(repeated, container):
            container = dataclasses.replace(container, memo=repeated.memo)
        elif self._last[slot]() is not container.tensors[0]:
            self._repeated[slot], self._last[slot] = None, weak(container.tensors[0])
            return container
        self._repeated[slot] = container
        return container


def _raise_closed(method: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    raise CaptureError(detail="this captured step is closed")


def _nothing() -> object:
    return None


def _is_same(container: Container, other: Container) -> bool:
    return (
        len(container.tensors) == len(other.tensors)
        and all(a is b for a, b in zip(container.tensors, other.tensors, strict=True))
        and container.structure == other.structure
    )


def _infos(value: Any) -> tuple[TensorInfo, ...] | None:
    container = value if type(value) is Container else Container.of(value, arrays.is_tensor)
    if container is None:
        return None
    try:
        return tuple(map(arrays.describe, container.tensors))
    except TypeError:  # one has no memory any more
        return None
