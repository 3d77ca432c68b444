"""The ranks of a side: actors, by refs of their tensors, or the calling process, by its tensors."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayTaskError

from raycollect.backends import arrays
from raycollect.core.model import TENSOR, Key
from raycollect.driver import held_values
from raycollect.driver.side_layouts import SideLayouts, held_tensors
from raycollect.errors import SelfDrivenError, Violation, refusal, wrong_argument
from raycollect.errors.text import a_type, not_a_name, shown
from raycollect.member.participant import own_participant
from raycollect.planner.layout import Layout, Regions, layout
from raycollect.planner.layout_arguments import dtype_name
from raycollect.planner.reshard.matching import CONVERTED
from raycollect.pos import Container
from raycollect.pos.handle import Handle
from raycollect.ray_bridge import ray_actors
from raycollect.weights import agent
from raycollect.weights.atoms import Layouts
from raycollect.weights.exclusion import OwnProcess, running_loop
from raycollect.weights.ranks import Ranks


class ActorRanks(Ranks):
    """Ranks that are actors, by one ref of each; the refs are held as long as this object."""

    def __init__(self, op: str, refs: Sequence[Any], handles: Sequence[Handle], *args: Any) -> None:
        super().__init__(op, handles, *args)
        self._refs = list(refs)
        self._actors = [self._actor(rank, handle) for rank, handle in enumerate(handles)]

    def _actor(self, rank: int, handle: Handle) -> Any:
        if handle.actor_id == ray_actors.current_actor_id():
            raise SelfDrivenError(actor=handle.actor)
        actor = ray_actors.actor_handle(handle.actor_id)
        if actor is None:
            expected = "one of whose actor this process has a handle"
            violation = Violation(
                kind="foreign", rank=rank, field="ref", found="of an actor unknown here", expected=expected
            )
            raise refusal(self.op, "", (violation,))
        return actor

    def call(self, rank: int, function: Callable[..., Any], *args: Any) -> Any:
        """See `Ranks`."""
        if rank in self._overlapping:
            method = self._actors[rank]._raycollect_result
            return method.options(max_task_retries=0).remote(agent.one_at_a_time, function, *args)
        return self._actors[rank].__ray_call__.options(max_task_retries=0).remote(function, *args)

    def items(self, rank: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """See `Ranks`."""
        if rank in self._overlapping or self._lock is not None:
            expected = "put(), or part(): an actor whose methods overlap, or with a lock, streams no methods"
            violation = Violation(kind="unsupported", rank=rank, field="stream.call", found="called", expected=expected)
            raise refusal(self.op, "", (violation,))
        method = self._actors[rank]._raycollect_items
        return method.options(num_returns="streaming", max_task_retries=0).remote(function, *args, **kwargs)


class OwnRank(Ranks):
    """The only rank of a side, which is the calling process; calls run in the calling thread, one at a time."""

    def __init__(self, op: str, handle: Handle, *args: Any) -> None:
        super().__init__(op, [handle], *args)
        self._process = OwnProcess(running_loop(), op)

    def call(self, rank: int, function: Callable[..., Any], *args: Any) -> Any:
        """See `Ranks`."""
        try:
            result = agent.in_own_process(self._process, function, *args)
        except Exception as exc:  # noqa: BLE001 - raised where the ref is read, as by a task
            result = RayTaskError(function.__name__, "", exc)
        return ray.put(result)

    def items(self, rank: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """See `Ranks`."""
        expected = "put(), or part(): a process streams no methods of its own"
        raise refusal(
            self.op, "", (Violation(kind="unsupported", field="stream.call", found="called", expected=expected),)
        )


def ranks_of(
    op: str,
    given: Any,
    layouts: Any,
    *,
    timeout_s: float,
    lock: Any = None,
    dtype: Any = None,
    rank: int | None = None,
) -> Ranks:
    """Returns the ranks of a side.

    Args:
        op: The operation, for messages.
        given: One ref per rank, or tensors of the calling process, which is then the only rank.
        layouts: The layouts by name or pattern, or the layout of a tensor; None: DTensors have their own layouts, and
            other tensors are replicated.
        timeout_s: How long the methods that return the refs may take.
        lock: The name of a lock of each actor, or a lock of the calling process; None for none.
        dtype: The dtype as which floats are put, or to which a receiver converts them; ``"auto"``: in a receiver, that
            of each tensor; None: its own.
        rank: The rank of the layouts that the calling process has, if `given` are tensors; None: the only one.

    Raises:
        RefusedError: Invalid refs, tensors, layouts or arguments.
        CollectiveTimeoutError: The methods are late.
    """
    if not isinstance(given, (list, tuple)) or not any(isinstance(ref, ray.ObjectRef) for ref in given):
        container = Container.of(given, arrays.is_tensor)
        if container is not None:
            handle = own_participant().keep(Key(secrets.token_bytes(28)), container)
            own = _layouts(op, [handle], layouts if rank is None else _of_rank(op, layouts, rank))
            return OwnRank(op, handle, *_with_dtype(op, own, dtype, lock))
    if rank is not None:
        raise refusal(op, "", (wrong_argument("rank", shown(rank), "None: refs are given, one per rank"),))
    if not isinstance(given, (list, tuple)) or not given or not all(isinstance(ref, ray.ObjectRef) for ref in given):
        expected = "one ObjectRef per rank, or tensors of this process"
        raise refusal(op, "", (wrong_argument("list of refs", _describe(given), expected),))
    if lock is not None and (wrong := not_a_name(lock)):
        raise refusal(op, "", (wrong_argument("lock", wrong, "the name of an attribute of the actors"),))
    by_rank, violations = held_values.handles_of(dict(enumerate(given)), timeout_s, op, "")
    if violations:
        raise refusal(op, "", tuple(violations))
    handles = [by_rank[rank] for rank in range(len(given))]
    return ActorRanks(op, given, handles, *_with_dtype(op, _layouts(op, handles, layouts), dtype, lock))


def _of_rank(op: str, given: Any, rank: int) -> Any:
    """Returns layouts with the regions of one rank only, which becomes the only rank."""
    named = {"": given} if isinstance(given, Layout) else given
    if not isinstance(named, Mapping) or not all(isinstance(value, Layout) for value in named.values()):
        raise refusal(op, "", (wrong_argument("layout", a_type(given), "the layouts of all ranks, as rank is given"),))
    most = min((value.world_size for value in named.values()), default=0)
    if type(rank) is not int or not 0 <= rank < most:
        raise refusal(op, "", (wrong_argument("rank", shown(rank), f"a rank of the layouts, below {most}"),))
    mine = {
        name: (value, tuple(replace(region, rank=0) for region in value.regions.of_rank.get(rank, ())))
        for name, value in named.items()
    }
    return {
        name: replace(value, regions=Regions(1, value.regions.parts, rows))
        for name, (value, rows) in mine.items()
        if rows
    }


def _with_dtype(op: str, layouts: Layouts, dtype: Any, lock: Any) -> tuple[Layouts, Any, str]:
    """Returns the last arguments of `Ranks`: a receiver's layouts ask for the dtype, a publisher puts its floats so."""
    name = "" if dtype is None else dtype_name(dtype)
    is_auto = name == "auto" and op == "subscribe"
    if name and not is_auto and name not in CONVERTED:
        names = [*CONVERTED, "auto"] if op == "subscribe" else CONVERTED
        raise refusal(op, "", (wrong_argument("dtype", shown(dtype), f"one of {', '.join(names)}"),))
    if op == "publish" or not name:
        return layouts, lock, name
    converting = {
        key: replace(layout, converts=True, dtype=layout.dtype if is_auto else name)
        if layout.dtype in CONVERTED
        else layout
        for key, layout in layouts.items()
    }
    return converting, lock, ""


def _describe(refs: object) -> str:
    if not isinstance(refs, (list, tuple)):
        return a_type(refs)
    other = next((ref for ref in refs if not isinstance(ref, ray.ObjectRef)), None)
    return "empty" if not refs else f"a list with {a_type(other)}"


def _layouts(op: str, handles: Sequence[Handle], given: Any) -> Layouts:
    named = {"": given} if isinstance(given, Layout) else given
    if named is None:
        plain = _replicated(handles)
        if plain is not None:
            return plain
    elif not isinstance(named, Mapping) or not all(isinstance(value, Layout) for value in named.values()):
        expected = "a Layout (see raycollect.layout), or a dict of Layouts by name or pattern"
        raise refusal(op, "", (wrong_argument("layout", type(given).__name__, expected),))
    side = SideLayouts("layout", named)
    if side.is_open:
        side.resolve_held([held_tensors(handle) for handle in handles], ())
    violations = list(side.violations)
    for name, resolved in side.layouts.items():
        if resolved.world_size > len(handles):
            expected = f"at most the {len(handles)} of the refs"
            violations.append(wrong_argument(f"layout of {name!r}", f"of {resolved.world_size} ranks", expected))
    if violations:
        raise refusal(op, "", tuple(violations))
    return dict(sorted(side.layouts.items()))


def _replicated(handles: Sequence[Handle]) -> Layouts | None:
    """Returns layouts of replicated tensors; None if some are DTensors, or it is no dict of tensors."""
    first = handles[0]
    names = ("",) if first.structure == TENSOR else tuple(map(str, first.structure.names))
    if any(handle.placements for handle in handles) or len(names) != len(first.infos):
        return None
    mesh = {"rank": len(handles)}
    return {
        name: replace(layout(info.shape, mesh=mesh, dtype=info.dtype), converts=False)  # conversion was not requested
        for name, info in sorted(zip(names, first.infos, strict=True))
    }
