"""From recorded calls to participants that are ready to run them: each is given its routine, and says so."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any

import msgpack
import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from raycollect import ray_internals
from raycollect.agenda import CaptureAgenda, MethodCall, Ref, StepWords
from raycollect.channel.messages import Forget
from raycollect.controller import Controller
from raycollect.course import Course
from raycollect.doorbell import Doorbell
from raycollect.draft import Draft, together
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
from raycollect.model import Member
from raycollect.peer import Peer
from raycollect.planner import Source
from raycollect.routine import encode_routine
from raycollect.runs import Runs
from raycollect.work import look_into

__all__ = ["Installed", "install"]

GRACE_S = 1.0
"""How long the other participants may take to say what is wrong, once one has said it, in seconds."""


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


class _Installation:
    """Gives each participant its routine.

    Args:
        controller: This process's controller.
        capture: The capture's id.
        draft: What was written for the participants.
        course: The plans.
        memberships: The groups of all participants; see `Draft.course`.
        words: How errors speak of the step.
        deadline_s: When all have to be ready, by `time.monotonic`.
        timeout_s: How many seconds that are.
    """

    def __init__(
        self,
        controller: Controller,
        capture: bytes,
        *,
        draft: Draft,
        course: Course,
        memberships: Sequence[Membership],
        words: StepWords,
        deadline_s: float,
        timeout_s: float,
    ) -> None:
        self._controller = controller
        self._capture = capture
        self._draft = draft
        self._course = course
        self._memberships = memberships
        self._words = words
        self._deadline_s = deadline_s
        self._timeout_s = timeout_s

    def send(self) -> Runs:
        """Gives each participant its routine, and waits until all have it.

        Raises:
            RaycollectError: Not all are ready; those that are have been told to forget it.
        """
        draft, course = self._draft, self._course
        peers = self._controller.crew(self._memberships, draft.participants)
        doorbell, seats = self._doorbell()
        tasks: list[Any] = []
        try:
            for at, peer in enumerate(peers):
                tasks.append(self._submit(at, peer, doorbell, seats[at]))
            opened = self._hear(tasks)
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
            draft.keys,
            {key: ref for at in range(len(peers)) for key, ref in draft.refs(at).items()},
            doorbell=doorbell,
            seats=[seat if is_open else -1 for seat, is_open in zip(seats, opened, strict=True)],
            peers=peers,
            told=self._words.tell,
        )

    def _doorbell(self) -> tuple[Doorbell | None, list[int]]:
        """A doorbell for those on this machine, and their seats at it; -1: none."""
        here = ray_internals.machine_id()
        seats, count = [], 0
        for _, member in self._course.homes:
            seats.append(count if member.machine == here else -1)
            count += member.machine == here
        try:
            return (Doorbell(count), seats) if count else (None, seats)
        except OSError:
            return None, [-1] * len(seats)

    def _submit(self, at: int, peer: Peer, doorbell: Doorbell | None, seat: int) -> Any:
        """Submits the task that takes a participant's routine."""
        segment = None
        if doorbell is not None and seat >= 0:
            one = doorbell.segment
            segment = (one.pid, one.fd, one.token, one.nbytes)
        payload = msgpack.packb((encode_routine(self._draft.routine(at)), segment, seat))
        method = peer.actor._raycollect_capture
        method = method.options(num_returns=1, max_task_retries=0, enable_task_events=False)
        try:
            return method.remote(payload, *self._draft.refs(at).values())
        except Exception as exc:
            error = DispatchError(op="capture", actor=peer.info["actor"], detail=f"{type(exc).__name__}: {exc}")
            raise error from exc

    def _hear(self, tasks: list[Any]) -> list[bool]:
        """Whether each participant could open the doorbell.

        Raises:
            RaycollectError: One is not ready.
        """
        homes = self._course.homes
        opened, late, until_s = {}, list(tasks), self._deadline_s
        errors: list[RaycollectError] = []
        while late:
            done, late = ray.wait(late, timeout=max(until_s - monotonic(), 0))
            for task in done:
                try:
                    opened[task] = bool(ray.get(task))
                except RayError as exc:
                    error = self._failed(tasks.index(task), exc)
                    error.__cause__ = exc
                    errors.append(error)
                    until_s = min(until_s, monotonic() + GRACE_S)
            if not done:
                break
        if errors:
            raise self._words.tell(_worst(errors), is_of_calls=False)
        if late:
            raise self._words.tell(self._late([homes[tasks.index(task)] for task in late]))
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

    def _failed(self, at: int, exc: RayError) -> RaycollectError:
        """Why a participant could not take its routine."""
        group, member = self._course.homes[at]
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
        for key, ref in self._draft.refs(at).items():
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
    deadline_s = monotonic() + timeout_s
    names = [one.spec.name for one in agenda.memberships]
    words = StepWords(capture, agenda, [name for name in names if controller.is_declared(name)])
    draft = Draft(capture, agenda, staging, words)
    memberships = list(agenda.memberships)
    if draft.idle:  # they are leased as a group, of which plans make no use
        membership = controller.derive(draft.idle, max(deadline_s - monotonic(), 0.1))
        hold(controller, membership)
        memberships.append(membership)
    course = draft.course(memberships)
    places = draft.write(returned)
    _check_refs(agenda.calls, deadline_s, timeout_s)
    installation = _Installation(
        controller,
        capture,
        draft=draft,
        course=course,
        memberships=memberships,
        words=words,
        deadline_s=deadline_s,
        timeout_s=timeout_s,
    )
    return Installed(
        runs=installation.send(),
        calls=tuple(agenda.calls),
        places=places,
        names=draft.names,
        operands=draft.operands(),
    )


def _check_refs(calls: Iterable[MethodCall], deadline_s: float, timeout_s: float) -> None:
    """Refuses tensors of other actors as arguments, whose refs say where they are.

    Raises:
        RefusedError: With every reason.
        CollectiveTimeoutError: A method has not returned in time.
    """
    strangers = [
        (call, one)
        for call in calls
        for one in call.arguments
        if type(one) is Ref and one.maker not in ("", call.made.actor_id)
    ]
    violations, cause = [], None
    for call, one in strangers:
        try:
            value: Any = ray_internals.get(one.ref, max(deadline_s - monotonic(), 0))
        except ray.exceptions.GetTimeoutError:
            detail = f"{one.where}: its method has not returned within {timeout_s:g} s"
            raise CollectiveTimeoutError(op="capture", detail=detail, timeout_s=timeout_s) from None
        except RayError as exc:
            violation, cause = look_into(_absent(one), one.ref)
            violations.append(violation)
            cause = cause or exc
            continue
        if isinstance(value, Handle) and value.actor_id != call.made.actor_id:
            violations.append(_foreign(one, value.actor))
    if violations:
        raise refusal("capture", "", tuple(violations)) from cause


def _worst(errors: Sequence[RaycollectError]) -> RaycollectError:
    """What to say of several participants that are not ready: all refusals as one, or the first failure."""
    refused = [error for error in errors if isinstance(error, RefusedError)]
    return together(refused) if refused else errors[0]


def _absent(one: Ref) -> Violation:
    return Violation(kind="lost", rank=-1, field=one.where, found="", ref=one.key.hex())


def _foreign(one: Ref, actor: str) -> Violation:
    expected = "a tensor of the actor whose method it is given to, or a value: send_ref it first"
    return Violation(
        kind="not_member", rank=-1, field=one.where, found=f"a tensor of {actor}", expected=expected, ref=one.key.hex()
    )
