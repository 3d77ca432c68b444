"""The arguments of a declared group, checked."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

from raycollect import backends
from raycollect.core.model import GroupSpec, Member
from raycollect.errors import MOST_S, InvalidGroupError, is_time_limit
from raycollect.errors.text import as_name, listed, not_a_name, shown
from raycollect.group import pg_options as options
from raycollect.group.membership import DEFAULT_TIMEOUT_S, MEMBERS_TIMEOUT_S, on_backend
from raycollect.group.rank_table import ENVIRONMENT_VARIABLE, ActorPlacement, RankTable, assign
from raycollect.ray_bridge import ray_actors
from raycollect.ray_bridge.driver_handle import is_handle


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """The checked arguments of `declare_collective_group`."""

    name: str
    backend: str  # the canonical name of a backend, or "auto"
    actors: tuple[Any, ...]  # the actor handles by rank; in the given order if not `is_by_rank`
    timeout_s: float = DEFAULT_TIMEOUT_S  # how long to wait for all members, in seconds
    # How long ranks wait for each other in the driver's calls by default, in seconds
    plan_timeout_s: float = DEFAULT_TIMEOUT_S
    call_timeout_s: float = MEMBERS_TIMEOUT_S  # the same for the members' own calls
    options: tuple[tuple[str, Any], ...] = ()  # `GroupSpec.options`
    rank_table: RankTable | None = None
    rank_table_from: str = ""  # the origin of the rank table, for a message
    is_by_rank: bool = True  # whether `actors` is by rank; otherwise the rank table assigns the ranks

    @classmethod
    def of(
        cls,
        actors: Any,
        world_size: Any,
        ranks: Any,
        backend: Any,
        group_name: Any,
        *,
        timeout_s: float | None = None,
        gloo_timeout: float | None = None,
        pg_options: Any = None,
        rank_table: Any = None,
        environ: Mapping[str, str] = os.environ,
    ) -> Declaration:
        """Checks the arguments; InvalidGroupError lists every problem."""
        problems = [*_actor_problems(actors), *_rank_problems(actors, world_size, ranks, backend)]
        for what, value in (("group_name", group_name), ("backend", backend)):
            if wrong := not_a_name(value):
                problems.append(f"{what} is {wrong}")
        for what, unit, number in (("timeout_s", "seconds", timeout_s), ("gloo_timeout", "milliseconds", gloo_timeout)):
            per_s = 1000 if unit == "milliseconds" else 1
            if number is not None and not is_time_limit(number, per_s):
                problems.append(
                    f"{what} is {shown(number)}, not a positive number of {unit}, at most {MOST_S * per_s:g}"
                )
        given, strange = options.read(pg_options)
        problems += strange
        table, source = _rank_table(actors, ranks, rank_table, environ, problems)
        if problems:
            raise InvalidGroupError(group_name=as_name(group_name), detail=listed(problems, "; "))
        order = list(range(len(actors))) if ranks is None else list(ranks)
        limit_s = DEFAULT_TIMEOUT_S if timeout_s is None else float(timeout_s)
        members_s = MEMBERS_TIMEOUT_S if timeout_s is None else limit_s
        return cls(
            name=group_name,
            backend=backends.canonical(backend),
            actors=tuple(actors[order.index(rank)] for rank in range(len(actors))),
            timeout_s=limit_s,
            plan_timeout_s=limit_s,
            call_timeout_s=members_s if gloo_timeout is None else gloo_timeout / 1000,
            options=given,
            rank_table=table,
            rank_table_from=source,
            is_by_rank=table is None,
        )

    def over(self, actors: Sequence[Any] | None, timeout_s: float) -> Declaration:
        """The same group over other actors, by rank; None: over the same actors. Raises InvalidGroupError as `of`."""
        problems = [] if actors is None else _actor_problems(actors)
        if not is_time_limit(timeout_s):
            problems.append(f"timeout_s is {shown(timeout_s)}, not a positive number of seconds, at most {MOST_S:g}")
        if problems:
            raise InvalidGroupError(group_name=self.name, detail=listed(problems, "; "))
        handles = self.actors if actors is None else tuple(actors)
        table = self.rank_table if handles == self.actors else None  # the table describes the devices of the old actors
        return replace(self, actors=handles, timeout_s=float(timeout_s), rank_table=table)

    def ranked(self, infos: Sequence[dict[str, Any]]) -> tuple[Member, ...]:
        """Makes the members, by rank, from the fields of `Member` that each actor returned.

        Raises:
            InvalidGroupError: The rank table does not fit the nodes and devices of the actors.
        """
        ranks: Sequence[int] = range(len(infos))
        if self.rank_table is not None and not self.is_by_rank:
            places = [ActorPlacement.of(info["node_id"], dict(info["accelerators"]), info["actor"]) for info in infos]
            try:
                ranks = assign(self.rank_table, places, group_name=self.name)
            except InvalidGroupError as exc:
                detail = f"{exc.detail}\nThe table is from {self.rank_table_from}"
                raise InvalidGroupError(group_name=self.name, detail=detail) from exc
        members = [Member(rank=rank, **info) for rank, info in zip(ranks, infos, strict=True)]
        return tuple(sorted(members, key=lambda member: member.rank))

    def spec(self, group_id: str, backend: str) -> GroupSpec:
        """The spec of the group, with the chosen backend."""
        given = dict(self.options)
        if self.rank_table is not None and backends.get(backend).chip_map:
            given.setdefault("chip_map", self.rank_table.chip_map)
        spec = GroupSpec(
            name=self.name,
            group_id=group_id,
            backend=backend,
            world_size=len(self.actors),
            options=tuple(sorted(given.items())),
            timeout_s=self.call_timeout_s,
        )
        return on_backend(spec, backend)


def _actor_problems(actors: Any) -> list[str]:
    if not isinstance(actors, (list, tuple)):
        return ["actors is not a list"]
    problems = [] if actors else ["the list of actors is empty"]
    strangers = [type(a).__name__ for a in actors if not is_handle(a)]
    if strangers:
        return [f"not an actor handle: {listed(strangers)} (call Class.remote(...) first)"]
    ids = [ray_actors.id_of(actor) for actor in actors]
    doubled = sorted({ray_actors.describe_actor(a) for a, i in zip(actors, ids, strict=True) if ids.count(i) > 1})
    if doubled:
        problems.append(f"{listed(doubled)} more than once")
    return problems


def _rank_problems(actors: Any, world_size: Any, ranks: Any, backend: Any) -> list[str]:
    if not isinstance(actors, (list, tuple)):
        return []
    if isinstance(world_size, str) and ranks is None and not backends.is_known(world_size):
        said = "as in ray.util.collective, this argument is the world size"
        return [f"world_size is {world_size!r}: {said}; a name is given as group_name={world_size!r}"]
    if isinstance(world_size, str):
        name = f", group_name={ranks!r}" if isinstance(ranks, str) else ""
        said = "the second argument of ray.experimental.collective.create_collective_group is the backend"
        here = "here, as in ray.util.collective, it is the world size"
        call = f"create_collective_group(actors, backend={world_size!r}{name})"
        return [f"world_size is {world_size!r}: {said}; {here}. Call {call}"]
    problems = []
    is_number = isinstance(world_size, Integral) and not isinstance(world_size, bool)  # also numpy's integers
    if world_size is not None and not (is_number and world_size == len(actors)):
        problems.append(f"world_size is {shown(world_size)}, but there are {len(actors)} actors")
    if ranks is not None and not _is_permutation(ranks, len(actors)):
        problems.append(f"ranks are {shown(ranks)}, not a permutation of 0 to {len(actors) - 1}")
    return problems


def _is_permutation(ranks: Any, count: int) -> bool:
    try:
        return not isinstance(ranks, (str, bytes)) and sorted(ranks) == list(range(count))
    except TypeError:
        return False


def _rank_table(
    actors: Any, ranks: Any, rank_table: Any, environ: Mapping[str, str], problems: list[str]
) -> tuple[RankTable | None, str]:
    """The rank table and its origin; the environment may name a table."""
    source = "the argument rank_table"
    try:
        if rank_table is not None:
            table: RankTable | None = RankTable.coerce(rank_table)
        elif ranks is None:
            table = RankTable.from_environment(environ)
            source = f"{ENVIRONMENT_VARIABLE}={environ.get(ENVIRONMENT_VARIABLE, '')} (pass ranks to go without it)"
        else:
            return None, ""
    except InvalidGroupError as exc:
        problems.append(exc.detail)
        return None, ""
    if table is None:
        return None, ""
    if ranks is not None:
        problems.append("ranks and rank_table both specify the ranks: pass one of them")
    if isinstance(actors, (list, tuple)) and actors and table.world_size != len(actors):
        problems.append(f"the rank table is of {table}, but there are {len(actors)} actors; it is from {source}")
    return table, source
