"""A captured step on paper: its plans, who takes part, and what each participant has to do. Nobody is asked here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from raycollect.agenda import CaptureAgenda, MethodCall, Ref, StepWords
from raycollect.course import Course, Stage
from raycollect.dispatch import Prepared, explained, prepare
from raycollect.errors import RefusedError, Violation, refusal
from raycollect.group import Membership
from raycollect.model import Key, Member
from raycollect.pending import Argument, Pending
from raycollect.planner import Source
from raycollect.routine import Collective, Given, Invocation, Routine, captured_key

__all__ = ["Draft", "together"]

_LAST_STEP = (1 << 32) - 1


class _Sheet:
    """The routine of one participant, while it is written: first what its slots hold, then what it does."""

    def __init__(self) -> None:
        self.refs: dict[Key, Any] = {}
        self.names: dict[str, None] = {}
        self.actions: list[Invocation | Collective] = []
        self.returns: list[int] = []
        self._slots: dict[Any, int] = {}

    def take(self, value: Any) -> None:
        """Notes what is there before the first action."""
        if type(value) is Ref:
            self.refs[value.key] = value.ref
        elif type(value) is Argument:
            self.names[value.name] = None

    def settle(self) -> None:
        """All was noted that is there before the first action."""
        self._slots = {one: at for at, one in enumerate((*self.refs, *self.names))}

    def make(self, pending: Pending) -> int:
        """A new slot, for what an action makes."""
        return self._slots.setdefault(pending, len(self._slots))

    def slot(self, value: Any) -> int:
        """The slot of a ref, by its key, or of what was made."""
        return self._slots[value]

    def argument(self, value: Any) -> int | Given:
        """An argument of a method."""
        if type(value) is Given:
            return value
        return self._slots[value.key if type(value) is Ref else value.name if type(value) is Argument else value]

    def routine(self, capture: bytes, *, numbered: bool) -> Routine:
        """The routine."""
        first, names = len(self.refs), list(self.names)
        keys = [
            captured_key(capture, 0, _LAST_STEP - names.index(one)) if type(one) is str else _key_of(one)
            for one in self._slots
        ]
        return Routine(
            capture=capture,
            actions=tuple(self.actions),
            slots=len(self._slots),
            refs=first,
            arguments=tuple(range(first, first + len(names))),
            returns=tuple(self.returns),
            keys=tuple(keys),
            numbered=numbered,
        )


class Draft:
    """The plans of a captured step, and the routine of each participant, from what was recorded.

    Args:
        capture: The capture's id.
        agenda: What was recorded; `write` reads it too.
        staging: See `planner.Program`.
        words: How errors speak of the step.

    Attributes:
        participants: The actors that take part, by position.
        idle: Those of them that only have method calls.
        keys: The key of each operand, by the numbers that stand for them in the plans.

    Raises:
        RefusedError: Calls can't be planned; with the reasons of all.
    """

    def __init__(self, capture: bytes, agenda: CaptureAgenda, staging: int, words: StepWords) -> None:
        self._capture = capture
        self._agenda = agenda
        self._handles = list(agenda.refs)  # a key, or what stands for a captured value
        self.keys: tuple[Key, ...] = tuple(map(_key_of, self._handles))
        self._prepared = self._plan(staging, words)
        found = [one for prepared in self._prepared for one in prepared.plan.participants]
        called = dict.fromkeys(call.made.actor_id for call in agenda.calls)
        self.idle: tuple[str, ...] = tuple(one for one in called if one not in found)
        self.participants: tuple[str, ...] = tuple(dict.fromkeys((*found, *self.idle)))
        self._sheets = {actor_id: _Sheet() for actor_id in self.participants}

    # ------------------------------------------------------------------------------------------ planning

    def _plan(self, staging: int, words: StepWords) -> list[Prepared]:
        agenda, firsts = self._agenda, self._agenda.firsts
        found, errors = [], list[RefusedError]()
        for first, last in zip(firsts, [*firsts, len(agenda.asked)][1:], strict=True):
            asked = tuple(agenda.asked[first:last])
            try:
                found.append(prepare(asked, staging))
            except RefusedError as exc:
                error = explained(exc, asked, agenda.memberships[first:last], self.keys)
                moved = tuple(replace(one, call=max(one.call, 0) + first) for one in error.violations)
                errors.append(refusal(error.op, error.group_name, moved))
        if errors:
            raise words.tell(together(errors)) from None
        return found

    def course(self, memberships: Sequence[Membership]) -> Course:
        """The plans as one, and who is who.

        Args:
            memberships: The group of each verb's call, and after them one of those who are idle, where there are any.
        """
        places = {one: at for at, one in enumerate(self.participants)}
        stages, offset = [], 0
        for first, prepared in zip(self._agenda.firsts, self._prepared, strict=True):
            positions = tuple(places[one] for one in prepared.plan.participants)
            stages.append(Stage(prepared.plan, first, offset, positions))
            offset += prepared.plan.width
        homes = [self._home(memberships, one) for one in self.participants]
        touched = frozenset(one.key for call in self._agenda.calls for one in call.arguments if type(one) is Ref)
        return Course.of(stages, self.participants, homes, touched)

    def _home(self, memberships: Sequence[Membership], actor_id: str) -> tuple[Membership, Member]:
        """The first group that a participant takes part in."""
        group = next(
            membership
            for number, membership in enumerate(memberships)
            if self._takes_part(number, membership, actor_id)
        )
        return group, group.members[group.rank_of(actor_id)]

    def _takes_part(self, number: int, membership: Membership, actor_id: str) -> bool:
        rank = membership.rank_of(actor_id)
        if number >= len(self._agenda.asked):
            return rank >= 0
        return any(rank == one for one, _, _ in self._agenda.asked[number].operands)

    # ------------------------------------------------------------------------------------------ writing

    def write(self, returned: Sequence[Any]) -> tuple[tuple[int, int], ...]:
        """Writes the routines, once; gives (position, place) of each value that is returned.

        Args:
            returned: What each run gives back: `Pending`, or `Ref`.

        Raises:
            RefusedError: A ref that is returned takes no part.
        """
        self._gather()
        agenda, offset = self._agenda, 0
        actions: dict[int, Callable[[], None]] = {}
        for first, prepared in zip(agenda.firsts, self._prepared, strict=True):
            actions[agenda.steps[first]] = self._plan_writer(first, offset, prepared)
            offset += prepared.plan.width
        actions |= {call.step: self._call_writer(call) for call in agenda.calls}
        for step in sorted(actions):
            actions[step]()
        return tuple(map(self._return, returned))

    def _gather(self) -> None:
        """Notes the refs and arguments of all participants."""
        for prepared in self._prepared:
            for actor_id, sources in zip(prepared.plan.participants, prepared.sources, strict=True):
                refs = self._sheets[actor_id].refs
                for handle in (self._handles[place] for place in sources):
                    if type(handle) is not Pending:
                        refs[handle] = self._agenda.refs[handle]
        for call in self._agenda.calls:
            for value in call.arguments:
                self._sheets[call.made.actor_id].take(value)
        for sheet in self._sheets.values():
            sheet.settle()

    def _plan_writer(self, first: int, offset: int, prepared: Prepared) -> Callable[[], None]:
        def write() -> None:
            agenda = self._agenda
            for at, actor_id in enumerate(prepared.plan.participants):
                sheet = self._sheets[actor_id]
                one = Collective(
                    step=agenda.steps[first],
                    offset=offset,
                    first=first,
                    program=prepared.programs[at],
                    inputs=tuple(sheet.slot(self._handles[place]) for place in prepared.sources[at]),
                    outputs=tuple(sheet.make(agenda.made[first + n, actor_id]) for n in prepared.outputs[at]),
                )
                sheet.actions.append(one)

        return write

    def _call_writer(self, call: MethodCall) -> Callable[[], None]:
        def write() -> None:
            sheet = self._sheets[call.made.actor_id]
            args = tuple(map(sheet.argument, call.args))
            kwargs = tuple((name, sheet.argument(value)) for name, value in call.kwargs)
            slot = sheet.make(call.made)
            sheet.actions.append(Invocation(step=call.step, method=call.method, args=args, kwargs=kwargs, slot=slot))

        return write

    def _return(self, value: Any) -> tuple[int, int]:
        """Lets a participant give back a value."""
        if type(value) is Pending:
            actor_id, handle = value.actor_id, value
        else:
            handle = value.key
            owners = [one for one in self.participants if handle in self._sheets[one].refs]
            if not owners:
                found, expected = "used by no call of the step", "one that is: read it with raycollect.get(ref)"
                violation = Violation(
                    kind="argument", rank=-1, field=value.where, found=found, expected=expected, ref=handle.hex()
                )
                raise refusal("returns", "", (violation,))
            actor_id = value.maker if value.maker in owners else owners[0]
        sheet = self._sheets[actor_id]
        sheet.returns.append(sheet.slot(handle))
        return self.participants.index(actor_id), len(sheet.returns) - 1

    # ------------------------------------------------------------------------------------------ what was written

    def routine(self, position: int) -> Routine:
        """What a participant does in each run."""
        requests = sum(len(prepared.plan.requests) for prepared in self._prepared)
        return self._sheets[self.participants[position]].routine(self._capture, numbered=requests > 1)

    def refs(self, position: int) -> Mapping[Key, Any]:
        """The refs whose values a participant needs, by key, in the order of its first slots."""
        return self._sheets[self.participants[position]].refs

    @property
    def names(self) -> tuple[tuple[str, ...], ...]:
        """For each position, the arguments that runs give it, in order."""
        return tuple(tuple(self._sheets[one].names) for one in self.participants)

    def operands(self) -> dict[Source, tuple[int, int]]:
        """For each number that stands for an operand in the plans: (position, slot)."""
        return {
            place: (self.participants.index(actor_id), self._sheets[actor_id].slot(self._handles[place]))
            for prepared in self._prepared
            for actor_id, sources in zip(prepared.plan.participants, prepared.sources, strict=True)
            for place in sources
        }


def together(errors: Sequence[RefusedError]) -> RefusedError:
    """Refusals as one, with all reasons."""
    if len(errors) == 1:
        return errors[0]
    names = dict.fromkeys(error.group_name for error in errors if error.group_name)
    found = tuple(dict.fromkeys(one for error in errors for one in error.violations))
    made = refusal("captured step", ", ".join(names), found)
    made.__cause__ = errors[0].__cause__
    return made


def _key_of(handle: Any) -> Key:
    """The key of what stands for an operand: itself, or that of a captured value."""
    return handle.key if type(handle) is Pending else handle  # type: ignore[return-value]  # set when its plan ended
