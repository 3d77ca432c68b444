"""Groups as their members see them: joining, leaving, and asking about one's place."""

from __future__ import annotations

import math
import os
from typing import Any

from raycollect import backends, options, ray_internals
from raycollect.backends import gpus
from raycollect.bulletin import Bulletin, bulletin_at
from raycollect.controller import Controller
from raycollect.errors import BackendNotInstalledError, InvalidGroupError, UnknownBackendError, UnknownGroupError
from raycollect.joining import Claim, follow, lead
from raycollect.ray_bulletin import RayBulletin
from raycollect.seat import Seat
from raycollect.seats import Seats
from raycollect.tracing import begin_from_environment
from raycollect.words import a_type

__all__ = [
    "destroy_collective_group",
    "destroy_group",
    "get_collective_group_size",
    "get_group_handle",
    "get_rank",
    "gloo_available",
    "init_collective_group",
    "is_backend_available",
    "is_group_initialized",
    "nccl_available",
]

DEFAULT_TIMEOUT_MS = 30_000
"""How long members wait for each other where `init_collective_group` does not say, in milliseconds."""

# Ray's names for what `options()` puts into the environment of an actor.
_NAME, _RANK, _WORLD_SIZE = "collective_group_name", "collective_rank", "collective_world_size"
_BACKEND, _TIMEOUT_MS = "collective_backend", "collective_gloo_timeout"


def init_collective_group(
    world_size: int,
    rank: int,
    backend: str = "auto",
    group_name: str = "default",
    gloo_timeout: int = DEFAULT_TIMEOUT_MS,
    *,
    pg_options: Any = None,
    rendezvous: Bulletin | str | None = None,
) -> None:
    """Joins a group; every member calls it, and it returns when all have joined.

    Args:
        world_size: The number of members.
        rank: This member's rank, from 0.
        backend: ``"auto"`` takes `nccl` where each of several members has a GPU and cupy, else shared memory where all
            members share a machine and sockets otherwise; or a name.
        group_name: What to call it.
        gloo_timeout: How long members wait for each other, here and in every later call that does not say, in
            milliseconds; on every backend.
        pg_options: What is passed through to the backend.
        rendezvous: How members find each other without Ray: ``"file:///path"`` or a `DirectoryBulletin`.

    Raises:
        InvalidGroupError: The arguments make no sense, or the members disagree about them; or this process is neither
            an actor nor a task and no rendezvous is given.
        GroupExistsError: This process is a member of a group of that name.
        UnknownBackendError, BackendNotInstalledError, BackendUnavailableError: The backend can't be used.
        CollectiveTimeoutError: Not all members came in time; it names who is missing.
        ParticipantDiedError: One died meanwhile.
    """
    given, strange = options.read(pg_options)
    problems = [*_problems(world_size, rank, group_name, gloo_timeout), *strange]
    if problems:
        raise InvalidGroupError(group_name=str(group_name), detail="; ".join(problems))
    bulletin = _bulletin(rendezvous, group_name)
    wanted = backends.canonical(str(backend))
    if wanted != "auto":
        backends.get(wanted, group_name)
    claim = Claim(
        name=group_name,
        world_size=world_size,
        rank=rank,
        backend=wanted,
        who=_who(),
        machine=ray_internals.machine_id(),
        timeout_s=gloo_timeout / 1000,
        options=given,
        gpu=gpus.here(ray_internals.has_gpu()) if wanted == "auto" and world_size > 1 else None,
    )
    begin_from_environment()
    seats = Seats.current()
    with seats.claim(group_name):
        if rank > 0:
            seats.add(follow(claim, bulletin, seats.hub))
            return
        seat, error, fading = lead(claim, bulletin, seats.hub)
        if seat is not None:
            seats.add(seat)
        elif fading is not None:
            seats.fading[group_name] = fading
        if error is not None:
            raise error


def _problems(world_size: Any, rank: Any, group_name: Any, gloo_timeout: Any) -> list[str]:
    problems = []
    if not isinstance(group_name, str) or not group_name:
        problems.append(f"group_name is {group_name!r}, not a non-empty string")
    sizes = [type(value) is int for value in (world_size, rank)]
    if not all(sizes):
        problems.append(f"world_size is {world_size!r} and rank is {rank!r}, not two integers")
    elif world_size < 1:
        problems.append(f"world_size is {world_size}, not at least 1")
    elif not 0 <= rank < world_size:
        problems.append(f"rank is {rank}, not one of 0 to {world_size - 1}")
    if not isinstance(gloo_timeout, (int, float)) or not 0 < gloo_timeout < math.inf:
        problems.append(f"gloo_timeout is {gloo_timeout!r}, not a positive number of milliseconds")
    return problems


def _bulletin(rendezvous: Bulletin | str | None, group_name: str) -> Bulletin:
    if isinstance(rendezvous, str):
        return bulletin_at(rendezvous)
    if rendezvous is not None:
        return rendezvous
    if not ray_internals.is_worker():
        detail = (
            "this process is neither a Ray actor nor a task. Call init_collective_group inside the members (or "
            "declare_collective_group(actors) on the driver); outside Ray pass rendezvous='file:///path'"
        )
        raise InvalidGroupError(group_name=group_name, detail=detail)
    return RayBulletin()


def _who() -> str:
    if not ray_internals.is_worker():
        return f"process {os.getpid()}"
    actor_id = ray_internals.current_actor_id()
    if actor_id:
        return ray_internals.short_actor(ray_internals.current_class(), actor_id)
    return f"task {ray_internals.current_method()} in process {os.getpid()}"


def destroy_collective_group(group_name: str = "default") -> None:
    """Leaves a group; the others hear of it when they next call this rank, and so does the driver that declared it.

    Raises:
        UnknownGroupError: This process is no member of a group of that name.
    """
    seats = Seats.current()
    seat = seats.find(group_name)
    if seat is None:
        raise UnknownGroupError(group_name=group_name, detail="this process is no member of it")
    seats.remove(seat)
    seat.part()


destroy_group = destroy_collective_group


def is_group_initialized(group_name: str = "default") -> bool:
    """Whether this process is a member of a group of that name."""
    return Seats.current().find(group_name) is not None


def get_rank(group_name: str = "default") -> int:
    """This process's rank; -1 where it is no member."""
    seat = Seats.current().find(group_name)
    return -1 if seat is None else seat.rank


def get_collective_group_size(group_name: str = "default") -> int:
    """The number of members; -1 where this process is none."""
    seat = Seats.current().find(group_name)
    return -1 if seat is None else seat.world_size


def get_group_handle(group_name: Any = "default") -> Seat:
    """This process's place in a group.

    It waits for nobody, but for a group that only the environment names (`collective_group_name`, `collective_rank`,
    `collective_world_size`, `collective_backend`): that is joined now.

    Raises:
        UnknownGroupError: This process is no member of it.
    """
    seat = Seats.current().find(group_name)
    if seat is not None:
        return seat
    if os.environ.get(_NAME) == group_name:
        _init_from_environment(group_name)
        seat = Seats.current().find(group_name)
        if seat is not None:
            return seat
    detail = "this process is no member of it"
    if not isinstance(group_name, str):
        detail = f"{a_type(group_name)} is no group's name; look at the order of the arguments, or name them"
    elif Controller.drives(group_name):
        detail = "this process drives it and is no member of it: the driver's verbs take refs, as allreduce_refs(refs)"
    raise UnknownGroupError(group_name=str(group_name), detail=detail)


def _init_from_environment(group_name: str) -> None:
    given = os.environ
    try:
        world_size, rank = int(given[_WORLD_SIZE]), int(given[_RANK])
        timeout_ms = int(given.get(_TIMEOUT_MS, DEFAULT_TIMEOUT_MS))
    except (KeyError, ValueError) as exc:
        detail = f"the environment names it, and lacks the rest: {type(exc).__name__}: {exc}"
        raise InvalidGroupError(group_name=group_name, detail=detail) from None
    init_collective_group(world_size, rank, given.get(_BACKEND, "auto"), group_name, timeout_ms)


# ---------------------------------------------------------------------------------------------- what there is


def is_backend_available(backend: str) -> bool:
    """Whether a backend is there and its library can be imported here."""
    try:
        return backends.is_available(backend)
    except (UnknownBackendError, BackendNotInstalledError):
        return False


def nccl_available() -> bool:
    """Whether NCCL can be used here."""
    return is_backend_available("nccl")


def gloo_available() -> bool:
    """Whether gloo can be used here."""
    return is_backend_available("gloo")
