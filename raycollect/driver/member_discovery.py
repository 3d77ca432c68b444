"""Has the actors of a declaration describe themselves, by actor tasks; waits for actors that Ray restarts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError

from raycollect import backends
from raycollect.backends import Gpu
from raycollect.core.model import Member
from raycollect.errors import ActorGoneError, CollectiveTimeoutError, GroupBrokenError, SelfDrivenError
from raycollect.errors.text import listed
from raycollect.group.declaration import Declaration
from raycollect.group.membership import is_participant
from raycollect.member import participant
from raycollect.ray_bridge import direct_transport, ray_actors, ray_session

_RETRY_S = 0.1  # how long to wait before an actor that Ray restarts is asked again, in seconds
OF_ANOTHER_RAY = "the actors are of a Ray that was shut down"
_PENDING = (
    "still waiting to be made (its process is starting, or `ray status` shows no free CPU for it: an actor with "
    "num_cpus=0 needs none)"
)
_BUSY = "still busy with a method, or being made"


class _StrangerError(RayActorError):
    """Ray knows no such actor."""


def check(declaration: Declaration) -> None:
    """Raises the errors that need no answer of an actor."""
    if not ray_session.is_started():
        raise ActorGoneError(op="declare", group_name=declaration.name, detail=OF_ANOTHER_RAY)
    me = ray_actors.current_actor_id()
    for actor in declaration.actors:
        if me and ray_actors.id_of(actor) == me:
            raise SelfDrivenError(actor=ray_actors.describe_actor(actor))
    if declaration.backend != "auto":
        backends.get(declaration.backend, declaration.name)


def describe(declaration: Declaration, deadline_s: float) -> list[dict[str, Any]]:
    """The description of every member."""
    infos = []
    for rank, info in enumerate(_described(declaration, deadline_s)):
        if isinstance(info, RayActorError):
            actor = ray_actors.describe_actor(declaration.actors[rank])
            name, detail = declaration.name, _fate(info)
            raise ActorGoneError(op="declare", group_name=name, rank=rank, actor=actor, detail=detail) from info
        infos.append(info)
    return infos


def gpus(declaration: Declaration, members: Sequence[Member], deadline_s: float) -> list[Gpu | None]:
    """The GPU of each member, by rank; empty unless Ray gave all of several members one: asking imports cupy."""
    if len(members) < 2 or not all("GPU" in dict(member.accelerators) for member in members):
        return []
    answers = _ask(declaration, deadline_s, lambda actor: actor.__ray_call__.remote(participant.gpu))
    by_actor = {ray_actors.id_of(actor): answer for actor, answer in zip(declaration.actors, answers, strict=True)}
    by_rank = [by_actor[member.actor_id] for member in members]
    return [None if isinstance(answer, RayActorError) else answer for answer in by_rank]


def who_answers(declaration: Declaration, deadline_s: float) -> list[Any]:
    """The actors that live, in order; GroupBrokenError if none does."""
    check(declaration)
    answers = _described(declaration, deadline_s)
    alive = [actor for actor, info in zip(declaration.actors, answers, strict=True) if isinstance(info, dict)]
    if not alive:
        raise GroupBrokenError(group_name=declaration.name, detail="no member is alive: declare other actors")
    return alive


def _described(declaration: Declaration, deadline_s: float) -> list[dict[str, Any] | RayActorError]:
    answers = _ask(declaration, deadline_s, _who)
    return [answer if isinstance(answer, RayActorError) else dict(answer) for answer in answers]


def _ask(declaration: Declaration, deadline_s: float, question: Callable[[Any], Any]) -> list[Any]:
    answers, late = list[Any](), list[int]()
    refs = [_submit(question, actor) for actor in declaration.actors]
    for rank, (ref, actor) in enumerate(zip(refs, declaration.actors, strict=True)):
        try:
            answers.append(_answer(ref, actor, deadline_s, question))
        except GetTimeoutError:
            late.append(rank)
    if late:
        raise CollectiveTimeoutError(
            op="declare",
            group_name=declaration.name,
            detail=f"after {declaration.timeout_s:g} s {_reasons(declaration.actors, late)}",
            missing=tuple(late),
            timeout_s=declaration.timeout_s,
        )
    return answers


def _submit(question: Callable[[Any], Any], actor: Any) -> Any:
    try:
        return question(actor)
    except Exception as exc:
        if type(exc) is Exception:  # Ray has none of its own for this
            return _StrangerError(error_msg=str(exc))
        raise


def _reasons(actors: Sequence[Any], late: Sequence[int]) -> str:
    by_reason: dict[str, list[str]] = {}
    for rank in late:
        what = _PENDING if ray_actors.is_pending(actors[rank]) else _BUSY
        by_reason.setdefault(what, []).append(f"rank {rank} ({ray_actors.describe_actor(actors[rank])})")
    return "; ".join(f"{what}: {listed(names)}" for what, names in by_reason.items())


def _who(actor: Any) -> Any:
    return (
        actor._raycollect_describe.remote()
        if is_participant(actor)
        else actor.__ray_call__.remote(participant.describe)
    )


def _answer(ref: Any, actor: Any, deadline_s: float, question: Callable[[Any], Any]) -> Any:
    """An actor's answer, or Ray's error. A dead actor is asked once more: Ray may restart it."""
    was_lost = False
    while not isinstance(ref, _StrangerError):
        try:
            return direct_transport.get(ref, max(deadline_s - monotonic(), 0))
        except ActorUnavailableError as exc:
            if monotonic() > deadline_s:
                raise GetTimeoutError from exc
            time.sleep(_RETRY_S)
        except RayActorError as exc:
            if was_lost:
                return exc.with_traceback(None)
            was_lost = True
        ref = _submit(question, actor)
    return ref


def _fate(error: RayActorError) -> str:
    if isinstance(error, _StrangerError):
        return "Ray knows no such actor: is it of a Ray that was shut down?"
    if not error.actor_init_failed:
        return "the actor is dead"
    return f"the actor is dead, as it could not be made: {str(error).strip().splitlines()[-1]}"
