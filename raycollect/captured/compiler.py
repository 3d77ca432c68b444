"""Compiles a recorded step: its plans, and the step program of each participant. Sends nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from raycollect.captured.calls import MethodCall, StepRequests, between_plans
from raycollect.captured.error_text import StepErrorText
from raycollect.core.model import Key, Member
from raycollect.driver.dispatch import DispatchPlan, prepare
from raycollect.driver.pending import Argument, Pending
from raycollect.driver.requests import Ref
from raycollect.driver.step_plan import Stage, StepPlan
from raycollect.engine.step_program import Collective, Given, Invocation, StepProgram, captured_key
from raycollect.errors import RefusedError, Violation, copy_error, refusal
from raycollect.planner import Membership, Source

_LAST_STEP = (1 << 32) - 1


class _ProgramBuilder:
    """Builds the step program of one participant: first the contents of its slots, then its actions."""

    def __init__(self) -> None:
        self.refs: dict[Key, Any] = {}
        self.names: dict[str, None] = {}
        self.actions: list[Invocation | Collective] = []
        self.returns: list[int] = []
        self.retained: list[int] = []
        self._slots: dict[Any, int] = {}

    def take(self, value: Any) -> None:
        if type(value) is Ref:
            self.refs[value.key] = value.ref
        elif type(value) is Argument:
            self.names[value.name] = None

    def settle(self) -> None:
        self._slots = {slot: at for at, slot in enumerate((*self.refs, *self.names))}

    def make(self, pending: Pending) -> int:
        return self._slots.setdefault(pending, len(self._slots))

    def slot(self, value: Any) -> int:
        return self._slots[value]

    def argument(self, value: Any) -> int | Given:
        if type(value) is Given:
            return value
        return self._slots[value.key if type(value) is Ref else value.name if type(value) is Argument else value]

    def step_program(self, capture: bytes, *, numbered: bool) -> StepProgram:
        first, names = len(self.refs), list(self.names)
        keys = [
            captured_key(capture, _LAST_STEP - names.index(slot)) if type(slot) is str else _key_of(slot)
            for slot in self._slots
        ]
        return StepProgram(
            capture=capture,
            actions=tuple(self.actions),
            slots=len(self._slots),
            refs=first,
            arguments=tuple(range(first, first + len(names))),
            returns=tuple(self.returns),
            keeps=tuple(self.retained),
            keys=tuple(keys),
            numbered=numbered,
        )


class StepCompiler:
    """The plans of a captured step, and the program of each participant."""

    def __init__(self, capture: bytes, request_list: StepRequests, staging: int, words: StepErrorText) -> None:
        self._capture = capture
        self._request_list = request_list
        self._handles = list(request_list.refs)  # a key, or the placeholder of a captured value
        self.keys: tuple[Key, ...] = tuple(map(_key_of, self._handles))
        self._prepared = self._plan(staging, words)
        planned = [actor_id for prepared in self._prepared for actor_id in prepared.plan.participants]
        called = dict.fromkeys(call.value.actor_id for call in request_list.calls)
        self.idle: tuple[str, ...] = tuple(actor_id for actor_id in called if actor_id not in planned)
        self.participants: tuple[str, ...] = tuple(dict.fromkeys((*planned, *self.idle)))
        self._builders = {actor_id: _ProgramBuilder() for actor_id in self.participants}

    # ------------------------------------------------------------------------------------------ planning

    def _plan(self, staging: int, words: StepErrorText) -> list[DispatchPlan]:
        request_list, firsts = self._request_list, self._request_list.firsts
        plans, errors = [], list[RefusedError]()
        for first, last in zip(firsts, [*firsts, len(request_list.requests)][1:], strict=True):
            try:
                plans.append(prepare(tuple(request_list.requests[first:last]), staging, self.keys))
            except RefusedError as error:
                moved = tuple(replace(violation, call=max(violation.call, 0) + first) for violation in error.violations)
                errors.append(refusal(error.op, error.group_name, moved))
        if errors:
            raise copy_error(words.tell(together(errors)))
        return plans

    def step_plan(self, memberships: Sequence[Membership]) -> StepPlan:
        """The plans as one; `memberships` are the groups of the collectives, and last that of `idle` actors."""
        places = {actor_id: at for at, actor_id in enumerate(self.participants)}
        stages, offset = [], 0
        for first, prepared in zip(self._request_list.firsts, self._prepared, strict=True):
            positions = tuple(places[actor_id] for actor_id in prepared.plan.participants)
            stages.append(Stage(prepared.plan, first, offset, positions))
            offset += prepared.plan.width
        homes = [self._home(memberships, actor_id) for actor_id in self.participants]
        arguments = (value for call in self._request_list.calls for value in call.arguments)
        touched = frozenset(value.key for value in arguments if type(value) is Ref)
        return StepPlan.of(stages, self.participants, homes, touched)

    def _home(self, memberships: Sequence[Membership], actor_id: str) -> tuple[Membership, Member]:
        if actor_id in self.idle:
            group = memberships[-1]
        else:
            group = next(
                request.group
                for request in self._request_list.requests
                if request.group.rank_of(actor_id) in [rank for rank, *_ in request.operands]
            )
        return group, group.members[group.rank_of(actor_id)]

    # ------------------------------------------------------------------------------------------ writing

    def write(self, returned: Sequence[Any]) -> tuple[tuple[int, int], ...]:
        """Writes the programs, once; returns (position, place) of each returned value."""
        self._gather()
        firsts, offset = self._request_list.firsts, 0
        *before, last = between_plans(self._request_list.calls, firsts)
        for calls, first, prepared in zip(before, firsts, self._prepared, strict=True):
            for call in calls:
                self._write_call(call)
            self._write_plan(first, offset, prepared)
            offset += prepared.plan.width
        for call in last:
            self._write_call(call)
        return tuple(map(self._return, returned))

    def _gather(self) -> None:
        for prepared in self._prepared:
            for actor_id, sources in zip(prepared.plan.participants, prepared.sources, strict=True):
                refs = self._builders[actor_id].refs
                for handle in (self._handles[place] for place in sources):
                    if type(handle) is not Pending:
                        refs[handle] = self._request_list.refs[handle]
        for call in self._request_list.calls:
            for value in call.arguments:
                self._builders[call.value.actor_id].take(value)
        for builder in self._builders.values():
            builder.settle()

    def _write_plan(self, first: int, offset: int, prepared: DispatchPlan) -> None:
        request_list = self._request_list
        for at, actor_id in enumerate(prepared.plan.participants):
            builder = self._builders[actor_id]
            collective = Collective(
                step=request_list.steps[first],
                offset=offset,
                first=first,
                program=prepared.programs[at],
                inputs=tuple(builder.slot(self._handles[place]) for place in prepared.sources[at]),
                outputs=tuple(builder.make(request_list.outputs[first + n, actor_id]) for n in prepared.outputs[at]),
            )
            builder.actions.append(collective)

    def _write_call(self, call: MethodCall) -> None:
        builder = self._builders[call.value.actor_id]
        args = tuple(map(builder.argument, call.args))
        kwargs = tuple((name, builder.argument(value)) for name, value in call.kwargs)
        slot = builder.make(call.value)
        builder.actions.append(Invocation(step=call.step, method=call.method, args=args, kwargs=kwargs, slot=slot))

    def keep(self, values: Sequence[Pending]) -> tuple[tuple[int, int], ...]:
        """Has participants keep values after each run, for `write` before; returns (position, place) of each."""
        places = []
        for value in values:
            builder = self._builders[value.actor_id]
            builder.retained.append(builder.slot(value))
            places.append((self.participants.index(value.actor_id), len(builder.retained) - 1))
        return tuple(places)

    def _return(self, value: Any) -> tuple[int, int]:
        if type(value) is Pending:
            actor_id, handle = value.actor_id, value
        else:
            handle = value.key
            owners = [actor_id for actor_id in self.participants if handle in self._builders[actor_id].refs]
            if not owners:
                actual, expected = "used by no call of the step", "one that is: read it with raycollect.get(ref)"
                violation = Violation(
                    kind="argument", field=value.where, found=actual, expected=expected, ref=handle.hex()
                )
                raise refusal("returns", "", (violation,))
            actor_id = value.maker if value.maker in owners else owners[0]
        builder = self._builders[actor_id]
        builder.returns.append(builder.slot(handle))
        return self.participants.index(actor_id), len(builder.returns) - 1

    # ------------------------------------------------------------------------------------------ results

    def step_program(self, position: int) -> StepProgram:
        """A participant's step program."""
        requests = sum(len(prepared.plan.requests) for prepared in self._prepared)
        return self._builders[self.participants[position]].step_program(self._capture, numbered=requests > 1)

    def refs(self, position: int) -> Mapping[Key, Any]:
        """The refs whose values a participant needs, by key, in the order of its first slots."""
        return self._builders[self.participants[position]].refs

    @property
    def names(self) -> tuple[tuple[str, ...], ...]:
        """For each position, the arguments that runs pass to it, in order."""
        return tuple(tuple(self._builders[actor_id].names) for actor_id in self.participants)

    def operands(self) -> dict[Source, tuple[int, int]]:
        """Source of an operand -> (position, slot)."""
        return {
            place: (self.participants.index(actor_id), self._builders[actor_id].slot(self._handles[place]))
            for prepared in self._prepared
            for actor_id, sources in zip(prepared.plan.participants, prepared.sources, strict=True)
            for place in sources
        }


def together(errors: Sequence[RefusedError]) -> RefusedError:
    """Combines refusals into one with all reasons."""
    if len(errors) == 1:
        return errors[0]
    names = dict.fromkeys(error.group_name for error in errors if error.group_name)
    violations = tuple(dict.fromkeys(violation for error in errors for violation in error.violations))
    error = refusal("captured step", ", ".join(names), violations)
    error.__cause__ = errors[0].__cause__
    return error


def _key_of(handle: Any) -> Key:
    return handle.key if type(handle) is Pending else handle  # type: ignore[return-value]  # set when its plan ended
