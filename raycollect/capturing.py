"""From recorded calls to participants that are ready to run them: the plans of a captured step, and its routines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any

import msgpack
import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from raycollect import ray_internals
from raycollect.agenda import Argument, CaptureAgenda, MethodCall, Pending, Ref, StepWords
from raycollect.channel.messages import Forget
from raycollect.controller import Controller
from raycollect.course import Course, Stage
from raycollect.dispatch import Prepared, explained, prepare
from raycollect.doorbell import Doorbell
from raycollect.errors import (
    ActorGoneError,
    CollectiveTimeoutError,
    DispatchError,
    RaycollectError,
    RefusedError,
    Violation,
    refusal,
)
from raycollect.group import Membership
from raycollect.handle import Handle
from raycollect.model import Key, Member
from raycollect.peer import Peer
from raycollect.planner import Source
from raycollect.routine import Collective, Given, Invocation, Routine, captured_key, encode_routine
from raycollect.runs import Runs
from raycollect.work import look_into

__all__ = ["Installed", "install"]

GRACE_S = 1.0
"""How long the other participants may take to say what is wrong, once one has said it, in seconds."""

_LAST_STEP = (1 << 32) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """A captured step that is ready to run.

    Attributes:
        runs: Its runs.
        calls: The method calls.
        places: For each value that it returns: (position, its place among what that participant returns).
        names: For each position, the arguments that runs give it, in order.
        operands: For each number that stands for an operand in the plans: (position, slot).
    """

    runs: Runs
    calls: tuple[MethodCall, ...]
    places: tuple[tuple[int, int], ...]
    names: tuple[tuple[str, ...], ...]
    operands: Mapping[Source, tuple[int, int]]


class _Seat:
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


class _Installer:
    """Plans a captured step, and gives each participant its routine.

    Args:
        controller: This process's controller.
        capture: The capture's id.
        agenda: What was recorded.
        staging: See `planner.Program`.
        deadline_s: When all have to be ready, by `time.monotonic`.
        timeout_s: How many seconds that are.
    """

    def __init__(
        self,
        controller: Controller,
        capture: bytes,
        agenda: CaptureAgenda,
        staging: int,
        deadline_s: float,
        timeout_s: float,
    ) -> None:
        self._controller = controller
        self._capture = capture
        self._agenda = agenda
        self._deadline_s = deadline_s
        self._timeout_s = timeout_s
        self._handles = list(agenda.refs)  # a key, or what stands for a captured value
        self._keys = list(map(_key_of, self._handles))
        names = [one.spec.name for one in agenda.memberships]
        self._words = StepWords(capture, agenda, [name for name in names if controller.is_declared(name)])
        self._prepared = self._plan(staging)
        found = [one for prepared in self._prepared for one in prepared.plan.participants]
        self._memberships = list(agenda.memberships)
        self._idle = [one for one in dict.fromkeys(call.made.actor_id for call in agenda.calls) if one not in found]
        self.participants = tuple(dict.fromkeys((*found, *self._idle)))
        self._seats = {actor_id: _Seat() for actor_id in self.participants}

    # ------------------------------------------------------------------------------------------ planning

    def _plan(self, staging: int) -> list[Prepared]:
        agenda, firsts = self._agenda, self._agenda.firsts
        found, errors = [], list[RefusedError]()
        for first, last in zip(firsts, [*firsts, len(agenda.asked)][1:], strict=True):
            asked = tuple(agenda.asked[first:last])
            try:
                found.append(prepare(asked, staging))
            except RefusedError as exc:
                error = explained(exc, asked, agenda.memberships[first:last], self._keys)
                moved = tuple(replace(one, call=max(one.call, 0) + first) for one in error.violations)
                errors.append(refusal(error.op, error.group_name, moved))
        if errors:
            raise self._words.tell(_together(errors)) from None
        return found

    def lease(self, hold: Callable[[Controller, Membership], None]) -> None:
        """Leases participants that only have method calls: as a group, of which plans make no use."""
        if self._idle:
            left_s = max(self._deadline_s - monotonic(), 0.1)
            membership = self._controller.derive(tuple(self._idle), left_s)
            hold(self._controller, membership)
            self._memberships.append(membership)

    def course(self) -> Course:
        """The plans, and who is who."""
        places = {one: at for at, one in enumerate(self.participants)}
        stages, offset = [], 0
        for first, prepared in zip(self._agenda.firsts, self._prepared, strict=True):
            positions = tuple(places[one] for one in prepared.plan.participants)
            stages.append(Stage(prepared.plan, first, offset, positions))
            offset += prepared.plan.width
        touched = frozenset(one.key for call in self._agenda.calls for one in _arguments(call) if type(one) is Ref)
        return Course.of(stages, self.participants, [self._home(one) for one in self.participants], touched)

    def _home(self, actor_id: str) -> tuple[Membership, Member]:
        """The first group that a participant takes part in."""
        group = next(
            membership
            for number, membership in enumerate(self._memberships)
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
        """Writes the routines; gives (position, place) of each value that is returned.

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
                refs = self._seats[actor_id].refs
                for handle in (self._handles[place] for place in sources):
                    if type(handle) is not Pending:
                        refs[handle] = self._agenda.refs[handle]
        for call in self._agenda.calls:
            for value in _arguments(call):
                self._seats[call.made.actor_id].take(value)
        for seat in self._seats.values():
            seat.settle()

    def _plan_writer(self, first: int, offset: int, prepared: Prepared) -> Callable[[], None]:
        def write() -> None:
            agenda = self._agenda
            for at, actor_id in enumerate(prepared.plan.participants):
                seat = self._seats[actor_id]
                one = Collective(
                    step=agenda.steps[first],
                    offset=offset,
                    first=first,
                    program=prepared.programs[at],
                    inputs=tuple(seat.slot(self._handles[place]) for place in prepared.sources[at]),
                    outputs=tuple(seat.make(agenda.made[first + n, actor_id]) for n in prepared.outputs[at]),
                )
                seat.actions.append(one)

        return write

    def _call_writer(self, call: MethodCall) -> Callable[[], None]:
        def write() -> None:
            seat = self._seats[call.made.actor_id]
            args = tuple(map(seat.argument, call.args))
            kwargs = tuple((name, seat.argument(value)) for name, value in call.kwargs)
            slot = seat.make(call.made)
            seat.actions.append(Invocation(step=call.step, method=call.method, args=args, kwargs=kwargs, slot=slot))

        return write

    def _return(self, value: Any) -> tuple[int, int]:
        """Lets a participant give back a value."""
        if type(value) is Pending:
            actor_id, handle = value.actor_id, value
        else:
            handle = value.key
            owners = [one for one in self.participants if handle in self._seats[one].refs]
            if not owners:
                found, expected = "used by no call of the step", "one that is: read it with raycollect.get(ref)"
                violation = Violation(
                    kind="argument", rank=-1, field=value.where, found=found, expected=expected, ref=handle.hex()
                )
                raise refusal("returns", "", (violation,))
            actor_id = value.maker if value.maker in owners else owners[0]
        seat = self._seats[actor_id]
        seat.returns.append(seat.slot(handle))
        return self.participants.index(actor_id), len(seat.returns) - 1

    @property
    def names(self) -> tuple[tuple[str, ...], ...]:
        """For each position, the arguments that runs give it, in order."""
        return tuple(tuple(self._seats[one].names) for one in self.participants)

    def operands(self) -> dict[Source, tuple[int, int]]:
        """For each number that stands for an operand in the plans: (position, slot)."""
        return {
            place: (self.participants.index(actor_id), self._seats[actor_id].slot(self._handles[place]))
            for prepared in self._prepared
            for actor_id, sources in zip(prepared.plan.participants, prepared.sources, strict=True)
            for place in sources
        }

    # ------------------------------------------------------------------------------------------ sending

    def check_refs(self) -> None:
        """Refuses tensors of other actors as arguments, whose refs say where they are.

        Raises:
            RefusedError: With every reason.
            CollectiveTimeoutError: A method has not returned in time.
        """
        strangers = [
            (call, one)
            for call in self._agenda.calls
            for one in _arguments(call)
            if type(one) is Ref and one.maker not in ("", call.made.actor_id)
        ]
        violations, cause = [], None
        for call, one in strangers:
            try:
                value: Any = ray.get(one.ref, timeout=max(self._deadline_s - monotonic(), 0))
            except ray.exceptions.GetTimeoutError:
                detail = f"{one.where}: its method has not returned within {self._timeout_s:g} s"
                raise CollectiveTimeoutError(op="capture", detail=detail, timeout_s=self._timeout_s) from None
            except RayError as exc:
                violation, cause = look_into(_absent(one), one.ref)
                violations.append(violation)
                cause = cause or exc
                continue
            if isinstance(value, Handle) and value.actor_id != call.made.actor_id:
                violations.append(_foreign(one, value.actor))
        if violations:
            raise refusal("capture", "", tuple(violations)) from cause

    def send(self, course: Course) -> Runs:
        """Gives each participant its routine, and waits until all have it.

        Raises:
            RaycollectError: Not all are ready; those that are have been told to forget it.
        """
        peers = self._controller.crew(self._memberships, self.participants)
        doorbell, seats = self._doorbell(course)
        numbered = len(course.requests) > 1
        tasks: list[Any] = []
        try:
            for at, (actor_id, peer) in enumerate(zip(self.participants, peers, strict=True)):
                tasks.append(self._submit(peer, self._seats[actor_id], seats[at], doorbell, numbered=numbered))
            opened = self._hear(tasks, course)
        except BaseException:
            for task in tasks:
                task.future()  # one that fails later: as nobody else asks for it, Ray would log it as unhandled
            for peer in peers:
                peer.send(Forget(capture=self._capture))
            if doorbell is not None:
                doorbell.close()
            raise
        return Runs(
            self._controller,
            self._capture,
            course,
            self._memberships,
            self._keys,
            {key: ref for seat in self._seats.values() for key, ref in seat.refs.items()},
            doorbell=doorbell,
            seats=[seat if is_open else -1 for seat, is_open in zip(seats, opened, strict=True)],
            peers=peers,
            told=self._words.tell,
        )

    def _doorbell(self, course: Course) -> tuple[Doorbell | None, list[int]]:
        """A doorbell for those on this machine, and their seats at it; -1: none."""
        here = ray_internals.machine_id()
        seats, count = [], 0
        for _, member in course.homes:
            seats.append(count if member.machine == here else -1)
            count += member.machine == here
        try:
            return (Doorbell(count), seats) if count else (None, seats)
        except OSError:
            return None, [-1] * len(seats)

    def _submit(self, peer: Peer, seat: _Seat, number: int, doorbell: Doorbell | None, *, numbered: bool) -> Any:
        segment = None
        if doorbell is not None and number >= 0:
            one = doorbell.segment
            segment = (one.pid, one.fd, one.token, one.nbytes)
        routine = encode_routine(seat.routine(self._capture, numbered=numbered))
        payload = msgpack.packb((routine, segment, number))
        method = peer.actor._raycollect_capture
        method = method.options(num_returns=1, max_task_retries=0, enable_task_events=False)
        try:
            return method.remote(payload, *seat.refs.values())
        except Exception as exc:
            error = DispatchError(op="capture", actor=peer.info["actor"], detail=f"{type(exc).__name__}: {exc}")
            raise error from exc

    def _hear(self, tasks: list[Any], course: Course) -> list[bool]:
        """Whether each participant could open the doorbell.

        Raises:
            RaycollectError: One is not ready.
        """
        opened, late, until_s = {}, list(tasks), self._deadline_s
        errors: list[RaycollectError] = []
        while late:
            done, late = ray.wait(late, timeout=max(until_s - monotonic(), 0))
            for task in done:
                group, member = course.homes[tasks.index(task)]
                try:
                    opened[task] = bool(ray.get(task))
                except RayError as exc:
                    error = self._failed(self._seats[member.actor_id], group, member, exc)
                    error.__cause__ = exc
                    errors.append(error)
                    until_s = min(until_s, monotonic() + GRACE_S)
            if not done:
                break
        if errors:
            raise self._words.tell(_worst(errors), is_of_calls=False)
        if late:
            raise self._words.tell(self._late([course.homes[tasks.index(task)] for task in late]))
        return [opened[task] for task in tasks]

    def _late(self, missing: Sequence[tuple[Membership, Member]]) -> RaycollectError:
        group = missing[0][0]
        names = ", ".join(member.actor for _, member in missing)
        return CollectiveTimeoutError(
            op="capture",
            group_name=group.spec.name,
            detail=f"after {self._timeout_s:g} s these were not ready, or the methods whose refs they use: {names}",
            missing=tuple(member.rank for one, member in missing if one is group),
            timeout_s=self._timeout_s,
        )

    def _failed(self, seat: _Seat, group: Membership, member: Member, exc: RayError) -> RaycollectError:
        """Why a participant could not take its routine."""
        cause = exc.cause if isinstance(exc, RayTaskError) else None
        if isinstance(cause, RefusedError):
            found = tuple(replace(one, actor=one.actor or member.actor) for one in cause.violations)
            return refusal(cause.op or "capture", cause.group_name or group.spec.name, found)
        if isinstance(cause, RaycollectError):
            return cause
        if isinstance(exc, RayActorError):
            return ActorGoneError(
                op="capture", group_name=group.spec.name, rank=member.rank, actor=member.actor, detail="it ended"
            )
        for key, ref in seat.refs.items():
            one = Violation(kind="lost", rank=member.rank, field="ref", found="", actor=member.actor, ref=key.hex())
            found_out, why = look_into(one, ref)
            if why is not None:
                return refusal("capture", group.spec.name, (found_out,))
        return DispatchError(op="capture", group_name=group.spec.name, actor=member.actor, detail=str(exc))


def install(
    controller: Controller,
    capture: bytes,
    agenda: CaptureAgenda,
    returned: Sequence[Any],
    hold: Callable[[Controller, Membership], None],
    *,
    staging: int,
    timeout_s: float,
) -> Installed:
    """Plans what was recorded, and makes all participants ready to run it.

    Args:
        controller: This process's controller.
        capture: The capture's id.
        agenda: What was recorded.
        returned: What each run gives back: `Pending`, or `Ref`.
        hold: Keeps a derived group.
        staging: See `planner.Program`.
        timeout_s: How long all may take to be ready, in seconds.

    Raises:
        RefusedError: A call, an operand or an argument makes no sense.
        GroupError, FaultError: A group or a participant is gone, or not ready in time.
    """
    made = _Installer(controller, capture, agenda, staging, monotonic() + timeout_s, timeout_s)
    made.lease(hold)
    course = made.course()
    places = made.write(returned)
    made.check_refs()
    return Installed(
        runs=made.send(course),
        calls=tuple(agenda.calls),
        places=places,
        names=made.names,
        operands=made.operands(),
    )


def _together(errors: Sequence[RefusedError]) -> RefusedError:
    """Refusals as one, with all reasons."""
    if len(errors) == 1:
        return errors[0]
    names = dict.fromkeys(error.group_name for error in errors if error.group_name)
    found = tuple(dict.fromkeys(one for error in errors for one in error.violations))
    made = refusal("captured step", ", ".join(names), found)
    made.__cause__ = errors[0].__cause__
    return made


def _worst(errors: Sequence[RaycollectError]) -> RaycollectError:
    """What to say of several participants that are not ready: all refusals as one, or the first failure."""
    refused = [error for error in errors if isinstance(error, RefusedError)]
    return _together(refused) if refused else errors[0]


def _key_of(handle: Any) -> Key:
    """The key of what stands for an operand: itself, or that of a captured value."""
    return handle.key if type(handle) is Pending else handle  # type: ignore[return-value]  # set when its plan ended


def _arguments(call: MethodCall) -> tuple[Any, ...]:
    return (*call.args, *(value for _, value in call.kwargs))


def _absent(one: Ref) -> Violation:
    return Violation(kind="lost", rank=-1, field=one.where, found="", ref=one.key.hex())


def _foreign(one: Ref, actor: str) -> Violation:
    expected = "a tensor of the actor whose method it is given to, or a value: send_ref it first"
    return Violation(
        kind="not_member", rank=-1, field=one.where, found=f"a tensor of {actor}", expected=expected, ref=one.key.hex()
    )
