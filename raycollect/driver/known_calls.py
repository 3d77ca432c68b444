"""Collectives that were called before on refs of the same actors, as loops call them on fresh refs.

What such a call found out depends on its arguments and on whose refs it got, not on the refs: the group, the ranks of
the refs, and the plan with its encoded programs. It is remembered for collectives whose results are the refs that they
got. The next call looks whether its arguments still mean the same group, and sends the plan.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ray import ObjectRef

from raycollect.core import ray_internals
from raycollect.core.model import GroupLike, Key, OpKind, ReduceOp, name_of
from raycollect.core.signals import Deferred
from raycollect.driver import batch
from raycollect.driver.call import Call
from raycollect.driver.controller import Controller
from raycollect.driver.dispatch import DispatchPlan, RequestKey, Submission, prepare, send_prepared
from raycollect.driver.work import Work, wait_or_abort
from raycollect.planner import STAGING_NBYTES

MOST = 256
"""How many calls are remembered; then all are forgotten."""

_TIMES = frozenset({type(None), int, float})
_OPS = frozenset({type(None), str, ReduceOp})  # what other libraries have may compare in ways of its own


class _Asked(NamedTuple):
    """A call as its caller wrote it, less its refs."""

    kind: OpKind
    group_name: str
    timeout_s: float | None
    op: str | ReduceOp | None
    root: int
    snapshot: bool
    actors: tuple[str, ...]  # whose refs they are, in the caller's order


class _Known(NamedTuple):
    """What a call found out."""

    asked: RequestKey
    prepared: DispatchPlan
    order: tuple[int, ...]  # rank -> the place of its ref in the caller's list


def run(
    kind: OpKind,
    group_name: GroupLike,
    timeout_s: float | None,
    refs: Any,
    *,
    op: Any = None,
    root: Any = -1,
    snapshot: Any = False,
    async_op: Any,
) -> Any:
    """Calls a collective in place on one list of refs; the arguments are those of `Call` and `Call.run`."""
    keys: list[Key] = []
    asked = None
    if type(async_op) is bool:
        asked = _read(kind, name_of(group_name), timeout_s, op, root, snapshot, refs, keys)
    controller = None if asked is None else Controller.running()
    if controller is not None and asked is not None:
        known = _again(controller, asked, may_derive=isinstance(group_name, str))
        if known is not None:
            return _send(controller, known, keys, refs, async_op=async_op)
    operands = {} if op is None else {"op": op}
    call = Call(kind, group_name, timeout_s, tensor_refs=refs, **operands)
    result = call.run(root=root, async_op=async_op, snapshot=snapshot)
    if asked is not None and call.sent is not None:
        _note(asked, call.controller, call.sent)
    return result


def _read(
    kind: OpKind, name: Any, timeout_s: Any, op: Any, root: Any, snapshot: Any, refs: Any, keys: list[Key]
) -> _Asked | None:
    """Reads a call, and adds the keys of its refs; None: it has to be looked at in full."""
    if type(name) is not str or type(root) is not int or type(snapshot) is not bool or type(timeout_s) not in _TIMES:
        return None
    if type(op) not in _OPS or type(refs) not in (list, tuple) or batch.current() is not None:
        return None
    actors = []
    for ref in refs:
        if type(ref) is not ObjectRef:
            return None
        key, actor = ray_internals.read_ref(ref)
        if not actor:  # its id alone does not say what it stands for
            return None
        actors.append(actor)
        keys.append(key)
    return _Asked(kind, name, timeout_s, op, root, snapshot, tuple(actors))


def _again(controller: Controller, asked: _Asked, *, may_derive: bool) -> _Known | None:
    known: _Known | None = controller.known_calls.get(asked)
    if known is None:
        return None
    now = controller.groups.find(asked.group_name, asked.timeout_s)
    if now is None and may_derive and known.asked.group.is_derived:
        now = controller.groups.derived(asked.actors)
    return known if now is known.asked.group else None


def _send(controller: Controller, known: _Known, keys: list[Key], refs: Any, *, async_op: bool) -> Any:
    results = list(map(refs.__getitem__, known.order))
    operands = dict(zip(map(keys.__getitem__, known.order), results, strict=True))
    with Deferred():
        if async_op:
            tracker = send_prepared(controller, known.prepared, operands)
            submission = Submission(
                asked=(known.asked,),
                refs=operands,
                results=(results,),
                staging=STAGING_NBYTES,
                is_batch=False,
            )
            return Work(controller, tracker, results, submission)
        bell = controller.claim_bell()
        try:
            tracker = send_prepared(controller, known.prepared, operands, bell)
            wait_or_abort(controller, tracker)
        finally:
            if bell is not None:
                bell.release()
        controller.send(tracker, [])  # who rings tells the hub nothing
    return results if tracker.error is None else Work(controller, tracker, results).wait()


def _note(asked: _Asked, controller: Controller, request: RequestKey) -> None:
    membership = request.group
    if not controller.groups.exists(membership):  # it has ended meanwhile, and would be kept
        return
    places = {actor: at for at, actor in enumerate(asked.actors)}
    order = tuple(places[one.actor_id] for one in membership.members)
    known_calls = controller.known_calls
    if len(known_calls) >= MOST:
        known_calls.clear()
    known_calls[asked] = _Known(request, prepare((request,), STAGING_NBYTES), order)
