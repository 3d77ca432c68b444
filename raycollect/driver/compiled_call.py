"""Compiled calls: the group, the ranks of the refs, and the plan with its encoded programs. And how they are sent.

A compiled call depends only on the call's arguments and on the actors whose refs it is given, not on the refs. It is
cached, so that a loop compiles it once, also for fresh refs. It is valid as long as the arguments name the same group.
A call whose operands are not all refs of actors' methods, or handles of actors, is compiled each time.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from ray import ObjectRef
from ray.actor import ActorHandle

from raycollect.core.deadline import NEVER, Deadline
from raycollect.core.model import Key, OpKind, ReduceOp
from raycollect.core.signals import Deferred
from raycollect.driver.batch import Batch
from raycollect.driver.controller import Controller
from raycollect.driver.dispatch import DispatchPlan, RequestKey, Submission, send
from raycollect.driver.driver_rank import with_results
from raycollect.driver.pending import Pending
from raycollect.driver.work import Work, wait_or_abort
from raycollect.planner import Source
from raycollect.planner.plan_cache import PlanCache
from raycollect.ray_bridge import ray_actors, ray_refs

_TIMES = frozenset({type(None), int, float})
_OPS = frozenset({type(None), str, ReduceOp})
_LIST, _SINGLE, _NONE, _MADE = "list", "single", "none", "made on"


Arguments = tuple[OpKind, Any, Any, Any, Any, Any, Any, bool]
"""Those of a call but its refs: kind, group name, time limit, reduce op, root, in place, snapshot, and whether it is a
plan by itself, in no batch or captured step. A tuple, as each call makes one."""

CallKey = tuple[Arguments, tuple[Any, ...]]
"""The arguments of a call, and the actors of its refs, in the caller's order, with the structure of its lists."""


class CompiledCall(NamedTuple):
    """A call without its refs.

    Attributes:
        request: The call as the only one of a plan; its sources are indices into `operands`.
        operands: The indices of the plan's refs among the refs that the call is given.
        results: For each result the index of the given ref that holds it, or the actor that makes it.
        is_list: Whether the call returns a list; otherwise it returns its only result, or None.
        prepared: Its plan; None in a batch or captured step.
    """

    request: RequestKey
    operands: tuple[int, ...]
    results: tuple[int | str, ...]
    is_list: bool
    prepared: DispatchPlan | None

    def returned(self, results: list[Any]) -> Any:
        """The call's return value."""
        return results if self.is_list else results[0] if results else None


def key_of(arguments: Arguments, given: Collection[Any], refs: list[Any], keys: list[Key]) -> CallKey | None:
    """Reads a call, and appends its refs and their keys; None: the call can't be cached."""
    _, name, timeout_s, op, root, inplace, snapshot, is_alone = arguments
    if type(name) is not str or type(root) is not int or type(inplace) is not bool or type(snapshot) is not bool:
        return None
    if type(timeout_s) not in _TIMES or type(op) not in _OPS or (snapshot and not is_alone):
        return None
    actors: list[Any] = []
    for several in given:
        is_list = type(several) is list or type(several) is tuple
        for ref in several if is_list else (several,):
            if type(ref) is ObjectRef:
                key, actor = ray_refs.read_ref(ref)
                if not actor:  # only its value names the participant
                    return None
                actors.append(actor)
                refs.append(ref)
                keys.append(key)
            elif type(ref) is ActorHandle:
                actors += _MADE, ray_actors.id_of(ref)
            elif ref is None and not is_list:
                actors.append(_NONE)
            else:
                return None
        actors.append(_LIST if is_list else _SINGLE)
    if len(given) > 1 and len(set(keys)) < len(keys):  # a result is an operand, too
        actors.append(tuple(map(keys.index, keys)))
    return arguments, tuple(actors)


def find(controller: Controller, key: CallKey, *, may_derive: bool) -> CompiledCall | None:
    """The cached call, if its arguments still name the same group."""
    compiled = _compiled.find(key)
    if compiled is None:
        return None
    group, (_, name, timeout_s, *_) = compiled.request.group, key[0]
    if group.spec.group_id in controller.groups.draining:
        return None  # the call is compiled again, and waits for the change within its own time limit
    now = controller.groups.find(name, timeout_s)
    if now is None and may_derive and group.is_derived:
        now = controller.groups.derived(group.participants)
    return compiled if now is group else None


def remember(
    controller: Controller, key: CallKey, compiled: CompiledCall, used: Sequence[Key | None], keys: list[Key]
) -> None:
    """Caches a call that was compiled over the refs `used`; `keys` are those of the caller's refs, in their order."""
    group = compiled.request.group
    if controller.groups.exists(group):  # an entry of a destroyed group would never be removed
        places = tuple([keys.index(operand) for operand in used if operand is not None])
        results = tuple([holder if isinstance(holder, str) else places[holder] for holder in compiled.results])
        _compiled.add(key, (group,), compiled._replace(operands=places, results=results))


def carry_out(
    controller: Controller,
    compiled: CompiledCall,
    keys: Sequence[Any],
    refs: Sequence[Any],
    around: Batch | None,
    *,
    async_op: bool,
    values: Sequence[Any] | None = None,
    deadline: Deadline = NEVER,
) -> Any:
    """Sends a call over these refs, or records it in the batch `around` it; returns the operation's return value.

    `keys` are those of the refs. `values` are returned in place of the refs, by default the refs themselves. The
    deadline is that of a call that began before; by default its time limit counts from now.
    """
    values = refs if values is None else values
    if around is not None:
        return _record(controller, compiled, keys, refs, around, values)
    prepared: DispatchPlan = compiled.prepared  # type: ignore[assignment]  # it is in no batch
    operands = {keys[at]: refs[at] for at in compiled.operands}
    returned = compiled.returned(
        [values[at] if type(at) is int else Pending(None, 0, str(at)) for at in compiled.results]
    )
    with Deferred():
        tracker, result = send(controller, prepared, operands, returned, is_awaited=not async_op, deadline=deadline)
        if async_op:
            return Work(controller, tracker, result, Submission(prepared, operands, returned))
        wait_or_abort(controller, tracker)
    if tracker.error is not None:
        return Work(controller, tracker, result).wait()
    return with_results(result) if prepared.makes else result


def _record(
    controller: Controller,
    compiled: CompiledCall,
    keys: Sequence[Any],
    refs: Sequence[Any],
    around: Batch,
    values: Sequence[Any],
) -> Any:
    request, request_list = compiled.request, around.request_list
    around._outermost._hold(controller, request.group)
    sources = [request_list.source(keys[at], refs[at]) for at in compiled.operands]
    places: dict[Any, Source | None] = {None: None, **dict(enumerate(sources))}
    operands = tuple([(rank, places[src], places[dst]) for rank, src, dst in request.operands])
    results = [values[at] if type(at) is int else request_list.promise(str(at)) for at in compiled.results]
    request_list.add(request._replace(operands=operands), compiled.returned(results))
    return compiled.returned([*results])  # the caller may change it


_compiled: PlanCache[CompiledCall] = PlanCache(
    256, 64 << 20, lambda compiled: 0 if compiled.prepared is None else compiled.prepared.nbytes
)
