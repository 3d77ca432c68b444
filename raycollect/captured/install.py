"""Installs a captured step on its participants: each gets its step program by one actor task, and acknowledges it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import monotonic
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from raycollect.captured.calls import MethodCall
from raycollect.captured.compiler import StepCompiler, together
from raycollect.captured.error_text import StepErrorText
from raycollect.captured.recording import Recording
from raycollect.channel.doorbell import Doorbell
from raycollect.channel.messages import Forget
from raycollect.core.deadline import Deadline
from raycollect.core.model import Member
from raycollect.core.signals import Allowed
from raycollect.driver.controller import Controller
from raycollect.driver.participant_link import ParticipantLink
from raycollect.driver.plan_tracker import retrieve_errors
from raycollect.driver.requests import Ref
from raycollect.driver.step_plan import StepPlan
from raycollect.driver.step_runs import StepRuns
from raycollect.driver.work import LOOK_INTO_S, look_into
from raycollect.engine.step_program import CAPTURES
from raycollect.errors import (
    ActorGoneError,
    CollectiveTimeoutError,
    DispatchError,
    RaycollectError,
    RefusedError,
    Violation,
    copy_error,
    located,
    refusal,
    strip_traceback,
)
from raycollect.errors.text import listed
from raycollect.group.membership import DEFAULT_TIMEOUT_S
from raycollect.planner import Membership, Source
from raycollect.pos.handle import Handle
from raycollect.ray_bridge import direct_transport, ray_session

GRACE_S = 1.0  # how long to wait for further errors after the first one, in seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """A captured step that is ready to run.

    Attributes:
        places: For each returned value: (position, its place among what that participant returns).
        retained: For each value that stays in its actor: (position, its place among what that participant keeps).
        names: For each position, the arguments that runs pass to it, in order.
        operands: Source of an operand -> (position, slot).
    """

    runs: StepRuns
    calls: tuple[MethodCall, ...]
    places: tuple[tuple[int, int], ...]
    retained: tuple[tuple[int, int], ...]
    names: tuple[tuple[str, ...], ...]
    operands: Mapping[Source, tuple[int, int]]

    def kept_refs(self, capture: bytes, seq: int) -> list[Any]:
        """Refs of the values that a run retains, the last one first: each actor returns its values like a method."""
        by_position: dict[int, list[Any]] = {}
        for position in dict.fromkeys(at for at, _ in self.retained):
            count = sum(at == position for at, _ in self.retained)
            refs = self.runs.read(position, partial(_give_kept, capture, seq, count))
            by_position[position] = refs if count > 1 else [refs]
        return [by_position[position][place] for position, place in reversed(self.retained)]


def _give_kept(capture: bytes, seq: int, count: int, actor: Any) -> Any:
    return actor.__raycollect_give_kept__.options(num_returns=count, max_task_retries=0).remote(capture, seq)


@dataclass(frozen=True, slots=True, eq=False)
class _Installation:
    """Sends each participant its step program."""

    controller: Controller
    capture: bytes
    compiler: StepCompiler
    step_plan: StepPlan
    memberships: Sequence[Membership]
    words: StepErrorText
    deadline: Deadline

    def send(self) -> StepRuns:
        """Sends the programs and waits until all have acknowledged them; on failure all forget the step."""
        compiler, step_plan = self.compiler, self.step_plan
        peers = self.controller.groups.links(self.memberships, compiler.participants)
        doorbell, slots = self._doorbell()
        tasks: list[Any] = []
        try:
            for at, peer in enumerate(peers):
                tasks.append(self._submit(at, peer, doorbell, slots[at]))
            with Allowed():
                opened = self._hear(tasks)
        except BaseException:
            retrieve_errors(tasks)
            for peer in peers:
                peer.send(Forget(capture=self.capture))
            if doorbell is not None:
                doorbell.close()
            raise
        return StepRuns(
            self.controller,
            self.capture,
            step_plan,
            self.memberships,
            compiler.keys,
            {key: ref for at in range(len(peers)) for key, ref in compiler.refs(at).items()},
            doorbell=doorbell,
            slots=[slot if is_open else -1 for slot, is_open in zip(slots, opened, strict=True)],
            peers=peers,
            reword=self.words.tell,
        )

    def _doorbell(self) -> tuple[Doorbell | None, list[int]]:
        """A doorbell for the participants of this machine, and their slots at it; -1: none."""
        here = ray_session.machine_id()
        slots, count = [], 0
        for _, member in self.step_plan.homes:
            slots.append(count if member.machine == here else -1)
            count += member.machine == here
        try:
            return (Doorbell(count), slots) if count else (None, slots)
        except OSError:
            return None, [-1] * len(slots)

    def _submit(self, at: int, peer: ParticipantLink, doorbell: Doorbell | None, slot: int) -> Any:
        segment = doorbell.segment if doorbell is not None and slot >= 0 else None
        payload = CAPTURES.encode((self.compiler.step_program(at), segment, slot))
        try:
            return peer.task("_raycollect_capture", 1).remote(payload, *self.compiler.refs(at).values())
        except Exception as exc:  # whatever Ray raises
            self.controller.groups.check(self.memberships)  # another thread may have destroyed the group meanwhile
            detail = f"{type(exc).__name__}: {exc}"
            raise DispatchError(op="capture", actor=peer.info["actor"], detail=detail) from exc

    def _hear(self, tasks: list[Any]) -> list[bool]:
        homes = self.step_plan.homes
        opened, late, until_s = {}, list(tasks), self.deadline.until_s
        errors: list[RaycollectError] = []
        while late:
            done, late = ray.wait(late, timeout=max(until_s - monotonic(), 0))
            for task in done:
                try:
                    opened[task] = bool(direct_transport.get(task))
                except RayError as exc:
                    error = self._failed(tasks.index(task), exc)
                    error.__cause__ = exc
                    errors.append(strip_traceback(error))
                    until_s = min(until_s, monotonic() + GRACE_S)
            if not done:
                break
        if errors:
            refused = [error for error in errors if isinstance(error, RefusedError)]
            raise copy_error(self.words.tell(together(refused) if refused else errors[0], is_of_calls=False))
        if late:
            raise self.words.tell(self._late([homes[tasks.index(task)] for task in late]))
        return [opened[task] for task in tasks]

    def _late(self, missing: Sequence[tuple[Membership, Member]]) -> RaycollectError:
        group, timeout_s = missing[0][0], self.deadline.timeout_s
        names = listed(member.actor for _, member in missing)
        return CollectiveTimeoutError(
            op="capture",
            group_name=group.spec.name,
            detail=f"after {timeout_s:g} s these were not ready, or the methods whose refs they use: {names}",
            missing=tuple(member.rank for other, member in missing if other is group),
            timeout_s=timeout_s,
        )

    def _failed(self, at: int, exc: RayError) -> RaycollectError:
        group, member = self.step_plan.homes[at]
        cause = exc.cause if isinstance(exc, RayTaskError) else None
        if isinstance(cause, RefusedError):
            violations = tuple([replace(wrong, actor=wrong.actor or member.actor) for wrong in cause.violations])
            return refusal(cause.op or "capture", cause.group_name or group.spec.name, violations)
        if isinstance(cause, RaycollectError):
            return located(cause, member.rank, member.actor)
        if isinstance(exc, RayActorError):
            return ActorGoneError(
                op="capture", group_name=group.spec.name, rank=member.rank, actor=member.actor, detail="it ended"
            )
        deadline = Deadline.after(LOOK_INTO_S)
        for key, ref in self.compiler.refs(at).items():
            absent = Violation(kind="lost", rank=member.rank, field="ref", found="", actor=member.actor, ref=key.hex())
            found_out, why = look_into(absent, ref, deadline)
            if why is not None:
                return refusal("capture", group.spec.name, (found_out,))
        return DispatchError(op="capture", group_name=group.spec.name, actor=member.actor, detail=str(exc))


def install(controller: Controller, capture: bytes, block: Recording) -> Installed:
    """Plans the calls that a block has recorded, and prepares all participants to run them."""
    deadline = Deadline.after(DEFAULT_TIMEOUT_S if block.timeout_s is None else block.timeout_s)
    request_list = block.request_list
    memberships = [request.group for request in request_list.requests]
    declared = {membership.spec.name for membership in memberships if controller.groups.find(membership.spec.name)}
    words = StepErrorText(capture, request_list, declared)
    compiler = StepCompiler(capture, request_list, block.staging_nbytes, words)
    if compiler.idle:  # a group that no plan uses has their leases
        with Allowed():
            membership = controller.groups.derive(compiler.idle, max(deadline.until_s - monotonic(), 0.1))
        block._hold(controller, membership)
        memberships.append(membership)
    with Allowed():
        step_plan = compiler.step_plan(memberships)
        places, retained = compiler.write(block.leaves), compiler.keep(block.retained)
        _check_refs(request_list.calls, deadline)
    return Installed(
        runs=_Installation(controller, capture, compiler, step_plan, memberships, words, deadline).send(),
        calls=tuple(request_list.calls),
        places=places,
        retained=retained,
        names=compiler.names,
        operands=compiler.operands(),
    )


def _check_refs(calls: Iterable[MethodCall], deadline: Deadline) -> None:
    strangers = [
        (call, argument)
        for call in calls
        for argument in call.arguments
        if type(argument) is Ref and argument.maker not in ("", call.value.actor_id)
    ]
    violations, cause = [], None
    for call, argument in strangers:
        try:
            value: Any = direct_transport.get(argument.ref, deadline.left_s())
        except ray.exceptions.GetTimeoutError:
            detail = f"{argument.where}: its method has not returned within {deadline.timeout_s:g} s"
            raise CollectiveTimeoutError(op="capture", detail=detail, timeout_s=deadline.timeout_s) from None
        except RayError as exc:
            absent = Violation(kind="lost", field=argument.where, found="", ref=argument.key.hex())
            violation, cause = look_into(absent, argument.ref, Deadline.after(LOOK_INTO_S))  # its method has failed
            violations.append(violation)
            cause = cause or exc
            continue
        if isinstance(value, Handle) and value.actor_id != call.value.actor_id:
            violations.append(_foreign(argument, value.actor))
    try:
        if violations:
            raise refusal("capture", "", tuple(violations)) from cause
    finally:
        del cause  # whose traceback holds this frame


def _foreign(ref: Ref, actor: str) -> Violation:
    expected = "a tensor of the actor whose method gets it, or a value: send it there first, by send_ref"
    return Violation(
        kind="not_member", field=ref.where, found=f"a tensor of {actor}", expected=expected, ref=ref.key.hex()
    )
