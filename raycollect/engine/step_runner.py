"""Runs a captured step again and again on one participant. It needs no Ray.

What can be looked up once is looked up at capture, since a run of a small collective takes no longer than a few
look-ups.

Values stay in their slots until the next run replaces them, so that `look` can show them. A value is released before
its replacement is made, so that it needs no memory twice. What a method returns repeatedly, as the same tensors, is
recognised, with all that the last run found out about it (`raycollect.engine.run_cache`).
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from msgspec.structs import replace

from raycollect.backends import arrays
from raycollect.core.model import TENSOR, TensorInfo
from raycollect.core.protocols import Communicator
from raycollect.engine.instruments import Instruments
from raycollect.engine.missing_operand import MissingOperand, missing
from raycollect.engine.progress import NOWHERE, BytesDone
from raycollect.engine.run import Run
from raycollect.engine.step_actions import Exchanges, Invoke, MethodCall, PlanCall, value_of
from raycollect.engine.step_program import Invocation, StepProgram
from raycollect.engine.value_codec import pack_values, unpack_values
from raycollect.errors import CaptureError, MethodError, PlanAbortedError, ProtocolError, RaycollectError
from raycollect.observe import Tracer, run_steps
from raycollect.observe.run_steps import RunStep
from raycollect.pos import Absence, Container, State, unkept
from raycollect.pos.store import weak

_ABORTED = "the run was aborted"

MOST_KEPT = 64
"""Of how many runs values are kept that nobody has taken."""

_READ_IT = "let it return plain values and arrays, and read other things with an ordinary method"


class StepRunner:
    """Runs one step program, one run at a time; any thread may call `abort` and `look`.

    Args:
        step_program: What to do.
        refs: The values of its refs, in the order of their slots: containers, or what went by value.
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
            raise ProtocolError(detail=f"{len(refs)} values for a routine of {step_program.refs} refs")
        self.step_program: StepProgram = step_program
        self.slots: list[Any] = [*refs, *[None] * (step_program.slots - step_program.refs)]
        self.invoke: Invoke = invoke
        self.instruments = instruments
        self.communicators = communicators
        self.run8: bytes = b""  # the run's number, as keys have it
        self.step: RunStep | None = None  # the slot of the thread that does the run
        self.tracer: Tracer = instruments.tracer
        self._known = _Known(step_program.slots)
        self._kept: dict[int, list[Any]] = {}  # by the run's number
        self._runs = 0
        self._lock = threading.Lock()  # guards what follows
        self._seq = 0  # the run under way; 0: none
        self._aborted: dict[int, str] = {}  # why runs were aborted, by their numbers
        self._is_over = False  # whether all that come are aborted
        self._plan: Run | None = None  # the plan under way
        self._at = 0  # which action is under way
        self._actions: list[MethodCall | PlanCall] = [
            MethodCall(one, self) if isinstance(one, Invocation) else PlanCall(one, self)
            for one in step_program.actions
        ]
        self._final = self._actions[-1] if self._actions else None
        # Whether a run is one plan, and nothing else
        self.is_single: bool = len(self._actions) == 1 and type(self._final) is PlanCall

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
        """Runs it once, and returns what `pack_values` makes of its results.

        Args:
            seq: The run's number in its controller's order.
            arguments: What `pack_values` made of the run's arguments.
            aborted: Why runs were aborted, by their numbers; looked at before each method, and by plans before each
                launch. `abort` notes the run there.
            exchange: See `Exchanges`.
            succeeded: Called where there are no results, as soon as all visible work is done; or not at all.
            step: The slot of this thread, if the caller has it at hand.

        Raises:
            RaycollectError: It failed; later actions did not run.
        """
        step_program = self.step_program
        with self._lock:
            self._seq, self._aborted = seq, aborted
            if self._is_over:
                aborted.setdefault(seq, _ABORTED)
        self._runs += 1
        self.run8 = self._runs.to_bytes(8, "little")
        if step_program.returns or step_program.kept:
            succeeded = None
        if step is None:
            step = run_steps.here()
        self.step = step
        why = partial(aborted.get, seq)
        try:
            if step_program.arguments or arguments:
                self._take(arguments)
            for at, action in enumerate(self._actions):
                self._plan = None  # the last one may keep tensors
                self._at, step.action, step.at = at, action, ""
                action.do(seq, why, exchange, succeeded if action is self._final else None)
            if step_program.kept:
                self._keep(seq, step_program.kept)
            return self._results() if step_program.returns else b""
        finally:
            step.action = None  # else it would keep the values
            with self._lock:
                self._seq, self._plan = 0, None

    def _keep(self, seq: int, slots: Sequence[int]) -> None:
        with self._lock:
            self._kept[seq] = [value_of(self.slots[slot]) for slot in slots]
            while len(self._kept) > MOST_KEPT:
                self._kept.pop(next(iter(self._kept)))

    def take_kept(self, seq: int) -> Any:
        """Gives away the value that a run has kept, or the list of them; CaptureError: there is none, or no more."""
        with self._lock:
            found = self._kept.pop(seq, None)
        if found is None:
            raise CaptureError(detail=f"run {seq} of this captured step keeps no values, or no more")
        return found if len(found) > 1 else found[0]

    def abort(self, seq: int = 0) -> None:
        """Ends the waits of run `seq`, or of any (0), and lets it begin no other action; any thread may call it."""
        with self._lock:
            if not self._seq or seq not in (0, self._seq):
                return
            self._aborted.setdefault(self._seq, _ABORTED)  # who aborts the run has said why, who ends all has not
            plan = self._plan
        if plan is not None:
            plan.abort()

    def seq_with(self, group_id: str) -> int:
        """The run under way, if it is at a plan that uses a group; else 0. Any thread may call it."""
        with self._lock:
            plan = self._plan
            return self._seq if plan is not None and group_id in plan.program.group_ids else 0

    def stop(self) -> None:
        """Does the same to the run under way and all that come; any thread may call it."""
        self._is_over = True  # first: a run that begins now sees it, or is under way when the lock is taken
        self.abort()

    def look(self) -> list[tuple[TensorInfo, ...] | None]:
        """Describes the tensors of each slot, as the last run left them; None where there are none."""
        return [_infos(value) for value in self.slots]

    def bytes_done(self, seq: int) -> BytesDone | None:
        """Returns the progress of a run, less plans that no run has reached yet; None: it is not under way."""
        with self._lock:
            if not seq or seq != self._seq:
                return None
            at, plan, actions = self._at, self._plan, self._actions
        now = NOWHERE if plan is None else plan.bytes_done()
        plans = [(place, one.nbytes or 0) for place, one in enumerate(actions) if type(one) is PlanCall]
        before = sum(nbytes for place, nbytes in plans if place < at)
        after = sum(nbytes for place, nbytes in plans if place > at)
        mine = now.total or sum(nbytes for place, nbytes in plans if place == at)
        return BytesDone(before + now.done, before + mine + after, now.lent)

    def close(self) -> None:
        """Releases all values; no run may follow."""
        self.slots = [None] * len(self.slots)
        self.step_program = replace(self.step_program, actions=())  # they have what is constant
        self.invoke = _gone
        self._known = _Known(0)
        self._actions, self._final = [], None

    def begin(self, plan: Run) -> None:
        """Notes which plan is under way; raises PlanAbortedError where the run was aborted."""
        with self._lock:  # an abort comes either before, and is seen here, or after, and finds the plan
            reason = self._aborted.get(self._seq)
            if reason is not None:
                raise PlanAbortedError(detail=reason)
            self._plan = plan

    def operand(self, slot: int) -> Container | MissingOperand:
        """The value of a slot as collectives take it."""
        value = self.slots[slot]
        if type(value) is Container:
            now = value.current()
            if isinstance(now, str):
                return missing(Absence(State.REPLACED, now))
            self.slots[slot] = now
            return now
        found = None if slot < self.step_program.refs else self._known.container(slot, value)
        if found is None:
            expected = "a tensor, or a list, tuple or dict of tensors"
            return MissingOperand(
                "not_tensor", f"{unkept(value, arrays.is_tensor, arrays.told)}, which goes by value", expected
            )
        self.slots[slot] = found
        return found

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
                made = (one for one in self.step_program.actions if isinstance(one, Invocation) and one.slot == slot)
                call = next(made, None)
                if call is None:
                    return CaptureError(detail=f"what the step should give back can't be: {exc}; {_READ_IT}")
                detail = f"{exc}, so that it can't be given back"
                return MethodError(op=call.method, call=call.step, detail=detail)
        return CaptureError(detail=f"what the step should give back can't be: {detail}; {_READ_IT}")


class _Known:
    """The containers of what methods return again and again, by slot.

    One is kept from the second time on, so that what is new in each run is freed when the next run replaces it.
    """

    __slots__ = ("_kept", "_last")

    def __init__(self, slots: int) -> None:
        self._kept: list[Container | None] = [None] * slots
        self._last: list[Callable[[], object]] = [_nothing] * slots

    def container(self, slot: int, value: object) -> Container | None:
        """Returns the container of a value, with what is known of the same tensors; None for what is no operand."""
        kept = self._kept[slot]
        if kept is not None and kept.value is value and kept.structure is TENSOR:
            return kept
        made = Container.of(value, arrays.is_tensor)
        if made is None:
            self._kept[slot] = None
            return None
        if kept is not None and _is_same(kept, made):
            made = dataclasses.replace(made, memo=kept.memo)
        elif self._last[slot]() is not made.tensors[0]:
            self._kept[slot], self._last[slot] = None, weak(made.tensors[0])
            return made
        self._kept[slot] = made
        return made


def _gone(method: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    raise CaptureError(detail="this captured step is closed")


def _nothing() -> object:
    return None


def _is_same(one: Container, other: Container) -> bool:
    return (
        len(one.tensors) == len(other.tensors)
        and all(a is b for a, b in zip(one.tensors, other.tensors, strict=True))
        and one.structure == other.structure
    )


def _infos(value: Any) -> tuple[TensorInfo, ...] | None:
    container = value if type(value) is Container else Container.of(value, arrays.is_tensor)
    if container is None:
        return None
    try:
        return tuple(map(arrays.describe, container.tensors))
    except TypeError:  # one has no memory any more
        return None
