"""Who the actors of a declaration are: each is asked, by an actor task, and one that Ray restarts is waited for."""

from __future__ import annotations

import time
from time import monotonic
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError

from raycollect import backends, plain, ray_internals
from raycollect.errors import ActorGoneError, CollectiveTimeoutError, GroupBrokenError, SelfDrivenError
from raycollect.group import Declaration, is_participant

__all__ = ["check", "describe", "who_answers"]

_RETRY_S = 0.1  # after which an actor that Ray restarts is asked again


def check(declaration: Declaration) -> None:
    """Refuses what can be refused before anybody is asked.

    Raises:
        SelfDrivenError: The calling actor is among the members.
        UnknownBackendError: There is no such backend.
    """
    me = ray_internals.current_actor_id()
    for actor in declaration.actors:
        if me and actor._actor_id.hex() == me:
            raise SelfDrivenError(actor=ray_internals.describe_actor(actor))
    if declaration.backend != "auto":
        backends.get(declaration.backend, declaration.name)


def describe(declaration: Declaration, deadline_s: float) -> list[dict[str, Any]]:
    """Who every member is, by what it says of itself.

    Raises:
        ActorGoneError: One is dead.
        CollectiveTimeoutError: Some are still pending or busy.
    """
    infos = []
    for rank, info in enumerate(_ask(declaration, deadline_s)):
        if info is None:
            actor = ray_internals.describe_actor(declaration.actors[rank])
            name = declaration.name
            raise ActorGoneError(op="declare", group_name=name, rank=rank, actor=actor, detail="the actor is dead")
        in_order = not getattr(declaration.actors[rank], "_ray_allow_out_of_order_execution", False)
        infos.append({**info, "ordered": info["ordered"] and in_order})
    return infos


def who_answers(declaration: Declaration, deadline_s: float, *, all_must: bool) -> list[Any]:
    """The actors that live, in their order.

    Raises:
        GroupBrokenError: None does.
        SelfDrivenError, ActorGoneError, CollectiveTimeoutError: See `check` and `describe`.
    """
    check(declaration)
    if all_must:
        describe(declaration, deadline_s)
        return list(declaration.actors)
    answers = _ask(declaration, deadline_s)
    alive = [actor for actor, info in zip(declaration.actors, answers, strict=True) if info is not None]
    if not alive:
        raise GroupBrokenError(group_name=declaration.name, detail="no member is alive")
    return alive


def _ask(declaration: Declaration, deadline_s: float) -> list[dict[str, Any] | None]:
    """Asks every member who it is: an actor task each, so a member that is busy or pending is waited for.

    Returns:
        What each says; None for one that is dead.

    Raises:
        CollectiveTimeoutError: Some are still pending or busy.
    """
    answers, late = list[dict[str, Any] | None](), list[int]()
    refs = list(map(_question, declaration.actors))
    for rank, (ref, actor) in enumerate(zip(refs, declaration.actors, strict=True)):
        try:
            answers.append(_answer(ref, actor, deadline_s))
        except GetTimeoutError:
            late.append(rank)
    if late:
        names = [f"rank {rank} ({ray_internals.describe_actor(declaration.actors[rank])})" for rank in late]
        raise CollectiveTimeoutError(
            op="declare",
            group_name=declaration.name,
            detail=f"after {declaration.timeout_s:g} s still pending or busy: {', '.join(names)}",
            missing=tuple(late),
            timeout_s=declaration.timeout_s,
        )
    return answers


def _question(actor: Any) -> Any:
    return actor._raycollect_describe.remote() if is_participant(actor) else actor.__ray_call__.remote(plain.describe)


def _answer(ref: Any, actor: Any, deadline_s: float) -> dict[str, Any] | None:
    """What an actor said; None where it is dead. It is asked again: Ray may not have known yet, or restart it.

    Raises:
        GetTimeoutError: It has not answered in time.
    """
    was_lost = False
    while True:
        try:
            return dict(ray.get(ref, timeout=max(deadline_s - monotonic(), 0)))
        except ActorUnavailableError as exc:
            if monotonic() > deadline_s:
                raise GetTimeoutError from exc
            time.sleep(_RETRY_S)
        except RayActorError:
            if was_lost:
                return None
            was_lost = True
        ref = _question(actor)
