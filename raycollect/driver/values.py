"""Fetching and freeing what refs stand for, in the order of this process's collectives."""

from __future__ import annotations

import math
import time
from typing import Any, TypeVar, overload

import ray
from ray import ObjectRef
from ray.exceptions import GetTimeoutError, ObjectLostError, RayActorError

from raycollect.core import direct_transport, ray_internals
from raycollect.core.model import Key
from raycollect.driver import stall_report
from raycollect.driver.controller import Controller
from raycollect.driver.pending import plain
from raycollect.errors import (
    NotATensorError,
    TensorLostError,
    Violation,
    refusal,
    refuse,
    wrong_argument,
    wrong_flags,
    wrong_wait,
)
from raycollect.errors.text import a_type
from raycollect.group.membership import is_participant
from raycollect.pos import fetch
from raycollect.pos.handle import Handle

_T = TypeVar("_T")

_COPY_S = 5.0  # the least time for a copy, in seconds: the caller's limit is for what is still on its way


@overload
def get(refs: list[ObjectRef[_T]], timeout_s: float | None = ..., *, ordered: bool = ...) -> list[_T]: ...


@overload
def get(refs: ObjectRef[_T], timeout_s: float | None = ..., *, ordered: bool = ...) -> _T: ...


@overload
def get(refs: list[Any], timeout_s: float | None = ..., *, ordered: bool = ...) -> list[Any]: ...


@overload
def get(refs: Any, timeout_s: float | None = ..., *, ordered: bool = ...) -> Any: ...


def get(refs: Any, timeout_s: float | None = None, *, ordered: bool = False) -> Any:
    """Like `ray.get`, and fetches tensors: a copy, as the participant holds them now.

    Waits for collectives of this process that write the tensor, not for methods of the actor.

    Args:
        refs: An ObjectRef, what a batch returned for one, or the handle that `ray.get` returned; or a list of them.
        timeout_s: How long to wait in all until there is something to copy, in seconds; None: no limit.
        ordered: True: goes through the actor's queue, after all methods submitted before.

    Returns:
        The value, or the list of values.

    Raises:
        TensorFreedError, TensorLostError, TensorDirtyError: The tensor is gone, or half written.
        HolderUnreachableError: The process that holds it could not be reached in time.
        GetTimeoutError: Ray's own: the method, or a collective that writes the tensor, has not ended in time.
        BatchError: A ref is still to be made by a batch that has not ended.
        InvalidArgumentError: An argument makes no sense; `ordered` in a process that never had a handle of the actor.
    """
    if timeout_s is not None or ordered is not False:
        refuse("get", [*wrong_wait(timeout_s), *wrong_flags(ordered=ordered)])
    ray_internals.ensure_ray()
    return _get(refs, math.inf if timeout_s is None else time.monotonic() + timeout_s, ordered)


def _get(refs: Any, until_s: float, ordered: bool) -> Any:
    if isinstance(refs, list):
        return [_get(ref, until_s, ordered) for ref in refs]
    ref = plain(refs)
    _wait_for_writers(ref, until_s)
    value = _found(ref, until_s)
    if not isinstance(value, Handle):
        return value
    if ordered:
        actor = ray_internals.actor_handle(value.actor_id)
        if actor is None:
            found, expected = f"True, and this process never had a handle of {value.actor}", "False without one"
            raise refusal("get", "", (wrong_argument("ordered", found, expected),))
        _found(actor._raycollect_fence.remote(), until_s)
    left_s = _left_s(until_s)
    return value.fetch() if left_s is None else value.fetch(max(left_s, _COPY_S))


def free(refs: Any, *, timeout_s: float | None = None) -> int:
    """Frees tensors now, though refs to them exist; using them afterwards raises TensorFreedError.

    Args:
        refs: An ObjectRef, what a batch gave for one, or the handle that `ray.get` gave; or a list of them.
            Collectives of this process that use them are waited for.
        timeout_s: How long to wait for these, and for the methods that make the tensors, in seconds; None: no limit.

    Returns:
        How many were held.

    Raises:
        GetTimeoutError: Ray's own: they have not ended in time; tensors before them in the list are freed.
        InvalidArgumentError: `timeout_s` makes no sense.
        NotATensorError: A ref does not stand for a kept tensor.
        TensorLostError: The participant is gone.
        HolderUnreachableError: It could not be reached in time.
        BatchError: A ref is still to be made by a batch that has not ended.
    """
    refuse("free", wrong_wait(timeout_s))
    ray_internals.ensure_ray()
    count, until_s = 0, math.inf if timeout_s is None else time.monotonic() + timeout_s
    for ref in map(plain, refs if isinstance(refs, (list, tuple)) else [refs]):
        _wait_for_writers(ref, until_s, readers=True)
        value = _found(ref, until_s)
        if not isinstance(value, Handle):
            found = f"one of {a_type(value)}, which is not kept"
            violation = Violation(kind="not_tensor", field="ref", found=found, ref=ref.hex())
            raise NotATensorError(op="free", group_name="", violations=(violation,))
        count += fetch.free(value.address, [value.key], actor=value.actor, incarnation=value.incarnation)
    return count


def _found(ref: Any, until_s: float) -> Any:
    if isinstance(ref, Handle):
        return ref
    try:
        return direct_transport.get(ref, _left_s(until_s))
    except (RayActorError, ObjectLostError) as exc:
        key, actor_id = ray_internals.read_ref(ref)
        actor = ray_internals.actor_handle(actor_id) if actor_id else None
        if not actor_id or (actor is not None and not is_participant(actor)):
            raise
        who = "" if actor is None else ray_internals.describe_actor(actor)
        found = f"lost with its actor ({type(exc).__name__})"
        lost = Violation(kind="lost", field="tensor", found=found, actor=who, ref=key.hex())
        raise TensorLostError(op="get", group_name="", violations=(lost,)) from exc


def _left_s(until_s: float) -> float | None:
    return None if until_s == math.inf else max(until_s - time.monotonic(), 0.0)


def _wait_for_writers(ref: Any, until_s: float, *, readers: bool = False) -> None:
    if not isinstance(ref, (ray.ObjectRef, Handle)):
        return
    key = ref.key if isinstance(ref, Handle) else Key(ref.binary())
    controller = Controller.current()
    for tracker in controller.trackers():
        written = tracker.writes.get(key)
        if not written and not (readers and written is not None):
            continue
        controller.dispatching.refuse_inside()  # the plan may be one that this thread is about to send
        if not stall_report.wait(controller, tracker, _left_s(until_s)):
            raise GetTimeoutError(f"{tracker.plan.name}, which writes the tensor, has not ended in time; it goes on")
