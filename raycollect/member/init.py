"""Groups as their members see them: joining, leaving, and asking about this process's rank."""

from __future__ import annotations

import os
import re
from typing import Any

from raycollect import backends
from raycollect.backends import gpus
from raycollect.core.model import GroupLike, GroupSpec, name_of
from raycollect.errors import (
    BackendNotInstalledError,
    CollectiveTimeoutError,
    InvalidGroupError,
    UnknownBackendError,
    is_time_limit,
)
from raycollect.errors.text import as_name, listed, not_a_name, shown
from raycollect.group import pg_options as options
from raycollect.group.bootstrap import BootstrapRequest, Introduction, follow, lead
from raycollect.group.bootstrap_store import MOST_WHO, BootstrapStore, store_at
from raycollect.group.membership import unknown
from raycollect.group.process_group import ProcessGroup
from raycollect.group.process_groups import ProcessGroups
from raycollect.group.ray_bootstrap_store import RayBootstrapStore
from raycollect.member.runtime import this_runtime
from raycollect.ray_bridge import ray_actors, ray_session

DEFAULT_TIMEOUT_MS = 30_000
"""How long members wait for each other if `init_collective_group` does not say, in milliseconds."""

JOB = "job"
"""The rendezvous of members that several processes of a job created."""

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
    rendezvous: BootstrapStore | str | None = None,
) -> None:
    """Joins a group. Every member calls it; it returns when all members have joined.

    Args:
        world_size: The number of members.
        rank: This member's rank, from 0.
        backend: A backend's name, or ``"auto"``: `nccl` if each of several members has a GPU and cupy, else shared
            memory if all members are on one machine, else sockets.
        group_name: The name of the group.
        gloo_timeout: How long members wait for each other, here and by default in later calls, in milliseconds; for
            every backend.
        pg_options: Options of the backend.
        rendezvous: How members find each other. By default the members are actors that one process of the Ray job
            created; ``"job"``: any actors of the job. Without Ray: ``"file:///path"`` or a `DirectoryBulletin`.

    Raises:
        InvalidGroupError: The arguments are invalid or differ between members; or this process is neither an actor nor
            a task, and `rendezvous` is missing.
        GroupExistsError: This process is already a member of a group of that name.
        UnknownBackendError, BackendNotInstalledError, BackendUnavailableError: The backend can't be used.
        CollectiveTimeoutError: Not all members joined in time; the error names the missing ranks.
        ParticipantDiedError: A member died while the group formed.
    """
    _join(world_size, rank, backend, group_name, gloo_timeout, pg_options, rendezvous)


def init_host_group(
    world_size: int, rank: int, backend: str, group_name: str, timeout_s: float, rendezvous: BootstrapStore | str
) -> None:
    """`init_collective_group` for tensors in host memory: ``"auto"`` never picks `nccl`, whatever the members have."""
    _join(world_size, rank, backend, group_name, int(timeout_s * 1000), None, rendezvous, is_on_host=True)


def _join(
    world_size: int,
    rank: int,
    backend: str,
    group_name: str,
    gloo_timeout: int,
    pg_options: Any,
    rendezvous: BootstrapStore | str | None,
    *,
    is_on_host: bool = False,
) -> None:
    given, strange = options.read(pg_options)
    problems = [*_problems(world_size, rank, group_name, gloo_timeout), *strange]
    if problems:
        raise InvalidGroupError(group_name=as_name(group_name), detail=listed(problems, "; "))
    store = _store(rendezvous, group_name)
    wanted = backends.canonical(str(backend))
    if wanted != "auto":
        backends.get(wanted, group_name)
    runtime = this_runtime()
    request = BootstrapRequest(
        spec=GroupSpec(
            name=group_name,
            group_id="",
            backend=wanted,
            world_size=world_size,
            options=given,
            timeout_s=gloo_timeout / 1000,
        ),
        rank=rank,
        me=Introduction(
            _who()[:MOST_WHO],
            ray_session.machine_id(),
            gpus.here(ray_session.has_gpu()) if wanted == "auto" and world_size > 1 and not is_on_host else None,
        ),
        tracer=runtime.tracer,
    )
    runtime.timelines.begin_from_environment()
    process_groups = runtime.process_groups
    with process_groups.request(group_name):
        if rank > 0:
            process_groups.add(_follow(request, store, process_groups))
        else:
            process_groups.add(lead(request, store, process_groups.notices))


def _follow(request: BootstrapRequest, store: BootstrapStore, process_groups: ProcessGroups) -> ProcessGroup:
    """Calls `follow`; the error names a leader whose members another process created."""
    try:
        return follow(request, store, process_groups.hub)
    except CollectiveTimeoutError as exc:
        leader = store.elsewhere(request.spec.name) if isinstance(store, RayBootstrapStore) else ""
        if exc.missing != (0,) or not leader:
            raise
        detail = (
            f"rank 0 had not arrived after {request.spec.timeout_s:g} s. {leader}, rank 0 of a group of this name, was "
            f"created by another process: members that several processes created all pass rendezvous={JOB!r}"
        )
        raise InvalidGroupError(group_name=request.spec.name, detail=detail) from exc


def _problems(world_size: Any, rank: Any, group_name: Any, gloo_timeout: Any) -> list[str]:
    wrong = not_a_name(group_name)
    problems = [f"group_name is {wrong}"] if wrong else []
    sizes = [type(value) is int for value in (world_size, rank)]
    if not all(sizes):
        problems.append(f"world_size is {shown(world_size)} and rank is {shown(rank)}, not two integers")
    elif world_size < 1:
        problems.append(f"world_size is {shown(world_size)}, not at least 1")
    elif not 0 <= rank < world_size:
        problems.append(f"rank is {shown(rank)}, not one of 0 to {shown(world_size - 1)}")
    if not is_time_limit(gloo_timeout, per_s=1000):
        problems.append(f"gloo_timeout is {shown(gloo_timeout)}, not a positive number of milliseconds")
    return problems


def _store(rendezvous: BootstrapStore | str | None, group_name: str) -> BootstrapStore:
    if isinstance(rendezvous, str):
        if rendezvous != JOB:
            return store_at(rendezvous)
    elif rendezvous is not None:
        if not all(hasattr(rendezvous, name) for name in ("host", "post", "read", "remove", "where")):
            detail = f"rendezvous is {shown(rendezvous)}, not of the form 'file:///path', nor a DirectoryBulletin"
            raise InvalidGroupError(group_name=group_name, detail=detail)
        return rendezvous
    if not ray_session.is_worker():
        detail = (
            "this process is neither a Ray actor nor a task. Call init_collective_group inside the members (or "
            "declare_collective_group(actors) on the driver); outside Ray pass rendezvous='file:///path'"
        )
        raise InvalidGroupError(group_name=group_name, detail=detail)
    return RayBootstrapStore("" if rendezvous == JOB else ray_actors.owner_id())


def _who() -> str:
    if not ray_session.is_worker():
        return f"process {os.getpid()}"
    actor_id = ray_actors.current_actor_id()
    if actor_id:
        return ray_actors.short_actor(ray_actors.current_class(), actor_id)
    return f"task {ray_actors.current_method()} in process {os.getpid()}"


def destroy_collective_group(group_name: GroupLike = "default") -> None:
    """Leaves a group; the next call of a member or the driver that involves this rank fails.

    Raises:
        UnknownGroupError: This process is not a member of a group of that name.
    """
    process_group = _find(group_name)
    if process_group is None:
        raise unknown(name_of(group_name), "this process is not a member of it")
    this_runtime().process_groups.remove(process_group)
    process_group.part()


destroy_group = destroy_collective_group


def is_group_initialized(group_name: GroupLike = "default") -> bool:
    """Whether this process is a member of a group of that name."""
    return _find(group_name) is not None


def get_rank(group_name: GroupLike = "default") -> int:
    """The rank of this process; -1 if it is not a member."""
    process_group = _find(group_name)
    return -1 if process_group is None else process_group.rank


def get_collective_group_size(group_name: GroupLike = "default") -> int:
    """The number of members; -1 if this process is not a member."""
    process_group = _find(group_name)
    return -1 if process_group is None else process_group.world_size


def get_group_handle(group_name: Any = "default") -> ProcessGroup:
    """The `ProcessGroup` of this process in a group.

    It doesn't wait, unless only the environment names the group (`collective_group_name`, `collective_rank`,
    `collective_world_size`, `collective_backend`): then this process joins it now.

    Raises:
        UnknownGroupError: This process is not a member of the group.
    """
    process_group = _find(group_name)
    if process_group is not None:
        return process_group
    name = name_of(group_name)
    if isinstance(name, str) and os.environ.get(_NAME) == name:
        _init_from_environment(name)
        process_group = _find(name)
        if process_group is not None:
            return process_group
    detail = "this process is not a member of it"
    if isinstance(name, str) and this_runtime().process_groups.drives(name):
        detail = (
            "this process drives it and is not a member: the driver's operations take refs, as allreduce_refs(refs)"
        )
    raise unknown(name, detail)


def _find(group: Any) -> ProcessGroup | None:
    name = name_of(group)
    return this_runtime().process_groups.find(name) if isinstance(name, str) else None


def _init_from_environment(group_name: str) -> None:
    given = {_TIMEOUT_MS: str(DEFAULT_TIMEOUT_MS), **os.environ}
    numbers = []
    for name in (_WORLD_SIZE, _RANK, _TIMEOUT_MS):
        text = given.get(name, "").strip()
        if not re.fullmatch("[0-9]{1,18}", text):
            detail = f"the environment names it, and {name} is {shown(text)}, not a whole number"
            raise InvalidGroupError(group_name=group_name, detail=detail)
        numbers.append(int(text))
    world_size, rank, timeout_ms = numbers
    init_collective_group(world_size, rank, given.get(_BACKEND, "auto"), group_name, timeout_ms)


# ---------------------------------------------------------------------------------------------- backends


def is_backend_available(backend: str) -> bool:
    """Whether a backend is known and its library can be imported in this process."""
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
