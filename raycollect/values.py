"""Fetching and freeing what refs stand for, in the order of this process's collectives."""

from __future__ import annotations

import math
import time
from typing import Any

import ray
from ray.exceptions import GetTimeoutError

from raycollect import diagnosis, fetch, ray_internals
from raycollect.controller import Controller
from raycollect.errors import NotATensorError, Violation
from raycollect.handle import Handle
from raycollect.model import Key
from raycollect.pending import plain
from raycollect.words import a_type

_COPY_S = 5.0
"""How long a holder may take to answer, at least: the caller's limit is for what is still on its way."""


def get(refs: Any, timeout_s: float | None = None, *, ordered: bool = False) -> Any:
    """Like `ray.get`, and fetches tensors: a copy, as the participant holds them now.

    Waits for collectives of this process that write the tensor, not for methods of the actor.

    Args:
        refs: An ObjectRef, what a batch gave for one, or the handle that `ray.get` gave; or a list of them.
        timeout_s: How long to wait in all until there is something to copy, in seconds; None: no limit.
        ordered: True: goes through the actor's queue, after all methods submitted before.

    Returns:
        The value, or the list of values.

    Raises:
        TensorFreedError, TensorLostError, TensorDirtyError: The tensor can't be had.
        GetTimeoutError: Ray's own: the method, or a collective that writes the tensor, has not ended in time.
        BatchError: A ref is still to be made by a batch that has not ended.
    """
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
        ray.get(ray_internals.actor_handle(value.actor_id)._raycollect_fence.remote(), timeout=_left_s(until_s))
    left_s = _left_s(until_s)
    return value.fetch() if left_s is None else value.fetch(max(left_s, _COPY_S))


def free(refs: Any) -> int:
    """Frees tensors now, though refs to them exist; using them afterwards raises TensorFreedError.

    Args:
        refs: An ObjectRef, what a batch gave for one, or the handle that `ray.get` gave; or a list of them.
            Collectives of this process that use them are waited for.

    Returns:
        How many were held.

    Raises:
        NotATensorError: A ref does not stand for a kept tensor.
        TensorLostError: The participant is gone.
        BatchError: A ref is still to be made by a batch that has not ended.
    """
    ray_internals.ensure_ray()
    count = 0
    for ref in map(plain, refs if isinstance(refs, (list, tuple)) else [refs]):
        _wait_for_writers(ref, math.inf, readers=True)
        value = _found(ref, math.inf)
        if not isinstance(value, Handle):
            found = a_type(value)
            violation = Violation(kind="not_tensor", rank=-1, field="ref", found=found, ref=ref.hex())
            raise NotATensorError(op="free", group_name="", violations=(violation,))
        count += fetch.free(value.address, [value.key], actor=value.actor, incarnation=value.incarnation)
    return count


def _found(ref: Any, until_s: float) -> Any:
    """What a ref stands for: the handle, of a kept tensor."""
    return ref if isinstance(ref, Handle) else ray_internals.get(ref, _left_s(until_s))


def _left_s(until_s: float) -> float | None:
    """The time left until then, as Ray takes it."""
    return None if until_s == math.inf else max(until_s - time.monotonic(), 0.0)


def _wait_for_writers(ref: Any, until_s: float, *, readers: bool = False) -> None:
    """Waits for this process's collectives that write (or, on request, use) a ref's tensor.

    Raises:
        GetTimeoutError: One has not ended in time.
    """
    if not isinstance(ref, (ray.ObjectRef, Handle)):
        return
    key = ref.key if isinstance(ref, Handle) else Key(ref.binary())
    controller = Controller.current()
    for flight in controller.flights():
        written = flight.writes(key)
        if (written or (readers and written is not None)) and not diagnosis.wait(controller, flight, _left_s(until_s)):
            raise GetTimeoutError(f"{flight.plan.name}, which writes the tensor, has not ended in time; it goes on")
