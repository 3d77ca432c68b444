"""Collectives that were called before on refs of the same actors, as loops call them on fresh refs.

What such a call found out depends on its arguments and on whose refs it got, not on the refs: the group, the ranks of
the refs, and the plan with its encoded programs. It is remembered for operations whose results are among the refs that
they got. The next call looks whether its arguments still mean the same group, and sends the plan.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

from ray import ObjectRef

from raycollect.core.model import GroupLike, Key, OpKind, ReduceOp, name_of
from raycollect.core.signals import Deferred
from raycollect.driver import batch
from raycollect.driver.call import Call, Sent
from raycollect.driver.controller import Controller
from raycollect.driver.dispatch import DispatchPlan, RequestKey, Submission, prepare, send_prepared
from raycollect.driver.work import Work, wait_or_abort
from raycollect.planner import STAGING_NBYTES
from raycollect.ray_bridge import ray_refs

MOST = 256
"""How many calls are remembered; then all are forgotten."""

_TIMES = frozenset({type(None), int, float})
_LIST, _ONE = "list", "one"
_OPS = frozenset({type(None), str, ReduceOp})  # what other libraries have may compare in ways of its own


class _Asked(NamedTuple):
    """A call as its caller wrote it, less its refs."""

    kind: OpKind
    group_name: str
    timeout_s: float | None
    op: str | ReduceOp | None
    root: int
    snapshot: bool
    actors: tuple[str, ...]  # whose refs they are, in the caller's order; after each parameter whether it is a list


class _Known(NamedTuple):
    """What a call found out."""

    asked: RequestKey
    prepared: DispatchPlan
    operands: tuple[int, ...]  # the places of the plan's refs among the caller's
    results: tuple[int, ...]  # those of the results
    is_list: bool  # whether these are a list; else there is one


def run(
    kind: OpKind,
    group_name: GroupLike,
    timeout_s: float | None,
    *,
    op: Any = None,
    root: Any = -1,
    snapshot: Any = False,
    async_op: Any,
    wait: Any = None,
    **given: Any,
) -> Any:
    """Calls an operation in place; the arguments are those of `Call`, and of its `run` or `send`."""
    refs: list[Any] = []
    keys: list[Key] = []
    asked = None
    if type(async_op) is bool:
        asked = _read(kind, name_of(group_name), timeout_s, op, root, snapshot, given.values(), refs, keys)
    controller = None if asked is None else Controller.running()
    if controller is not None and asked is not None:
        known = _again(controller, asked, may_derive=isinstance(group_name, str))
        if known is not None:
            return _send(controller, known, keys, refs, async_op=async_op)
    call = Call(kind, group_name, timeout_s, op=op, wait=wait, **given)
    if kind is OpKind.SEND:
        result = call.send(async_op=async_op)
    else:
        result = call.run(root=root, async_op=async_op, snapshot=snapshot)
    if asked is not None and call.sent is not None:
        _note(asked, call.controller, call.sent, keys)
    return result


def _read(
    kind: OpKind,
    name: Any,
    timeout_s: Any,
    op: Any,
    root: Any,
    snapshot: Any,
    given: Collection[Any],
    refs: list[Any],
    keys: list[Key],
) -> _Asked | None:
    """Reads a call, and adds its refs and their keys; None: it has to be looked at in full."""
    if type(name) is not str or type(root) is not int or type(snapshot) is not bool or type(timeout_s) not in _TIMES:
        return None
    if type(op) not in _OPS or batch.current() is not None:
        return None
    actors = []
    for several in given:
        is_list = type(several) is list or type(several) is tuple
        for ref in several if is_list else (several,):
            if type(ref) is not ObjectRef:
                return None
            key, actor = ray_refs.read_ref(ref)
            if not actor:  # its id alone does not say what it stands for
                return None
            actors.append(actor)
            refs.append(ref)
            keys.append(key)
        actors.append(_LIST if is_list else _ONE)
    if len(given) > 1 and len(set(keys)) < len(keys):  # a result may be an operand, too
        return None
    return _Asked(kind, name, timeout_s, op, root, snapshot, tuple(actors))


def _again(controller: Controller, asked: _Asked, *, may_derive: bool) -> _Known | None:
    known: _Known | None = controller.known_calls.get(asked)
    if known is None:
        return None
    now = controller.groups.find(asked.group_name, asked.timeout_s)
    if now is None and may_derive and known.asked.group.is_derived:
        now = controller.groups.derived(known.asked.group.participants)
    return known if now is known.asked.group else None


def _send(controller: Controller, known: _Known, keys: list[Key], refs: list[Any], *, async_op: bool) -> Any:
    operands = {keys[at]: refs[at] for at in known.operands}
    results: Any = [refs[at] for at in known.results]
    if not known.is_list:
        (results,) = results
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
        tracker = send_prepared(controller, known.prepared, operands, is_awaited=True)
        wait_or_abort(controller, tracker)
    return results if tracker.error is None else Work(controller, tracker, results).wait()


def _note(asked: _Asked, controller: Controller, sent: Sent, keys: list[Key]) -> None:
    if not controller.groups.exists(sent.asked.group):  # it has ended meanwhile, and would be kept
        return
    is_list = type(sent.results) is list
    results = [ray_refs.read_ref(one)[0] for one in (sent.results if is_list else [sent.results])]
    known_calls = controller.known_calls
    if len(known_calls) >= MOST:
        known_calls.clear()
    known_calls[asked] = _Known(
        asked=sent.asked,
        prepared=prepare((sent.asked,), STAGING_NBYTES),
        operands=tuple(map(keys.index, sent.keys)),
        results=tuple(map(keys.index, results)),
        is_list=is_list,
    )
