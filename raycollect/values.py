"""Fetching and freeing what refs stand for, in the order of this process's collectives."""

from __future__ import annotations

from typing import Any

import ray

from raycollect import diagnosis, fetch, ray_internals
from raycollect.controller import Controller
from raycollect.errors import NotATensorError, Violation
from raycollect.handle import Handle
from raycollect.model import Key
from raycollect.pending import plain
from raycollect.words import a_type


def get(refs: Any, timeout_s: float | None = None, *, ordered: bool = False) -> Any:
    """Like `ray.get`, and fetches tensors: a copy, as the participant holds them now.

    Waits for collectives of this process that write the tensor, not for methods of the actor.

    Args:
        refs: An ObjectRef, or what a batch gave for one, or a list of them.
        timeout_s: How long to wait in all, in seconds; None: no limit.
        ordered: True: goes through the actor's queue, after all methods submitted before.

    Returns:
        The value, or the list of values.

    Raises:
        TensorFreedError, TensorLostError, TensorDirtyError: The tensor can't be had.
        GetTimeoutError: Ray's own: the method has not returned in time.
        BatchError: A ref is still to be made by a batch that has not ended.
    """
    ray_internals.ensure_ray()
    if isinstance(refs, list):
        return [get(ref, timeout_s, ordered=ordered) for ref in refs]
    refs = plain(refs)
    _wait_for_writers(refs, timeout_s)
    value: Any = ray_internals.get(refs, timeout_s)
    if not isinstance(value, Handle):
        return value
    if ordered:
        ray.get(ray_internals.actor_handle(value.actor_id)._raycollect_fence.remote(), timeout=timeout_s)
    return value.fetch(60.0 if timeout_s is None else timeout_s)


def free(refs: Any) -> int:
    """Frees tensors now, though refs to them exist; using them afterwards raises TensorFreedError.

    Args:
        refs: An ObjectRef, or what a batch gave for one, or a list of them. Collectives of this process that use them
            are waited for.

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
        _wait_for_writers(ref, None, readers=True)
        value: Any = ray_internals.get(ref)
        if not isinstance(value, Handle):
            found = a_type(value)
            violation = Violation(kind="not_tensor", rank=-1, field="ref", found=found, ref=ref.hex())
            raise NotATensorError(op="free", group_name="", violations=(violation,))
        count += fetch.free(value.address, [value.key], actor=value.actor, incarnation=value.incarnation)
    return count


def _wait_for_writers(ref: Any, timeout_s: float | None, *, readers: bool = False) -> None:
    """Waits for this process's collectives that write (or, on request, use) a ref's tensor."""
    if not isinstance(ref, ray.ObjectRef):
        return
    key = Key(ref.binary())
    controller = Controller.current()
    for flight in controller.flights():
        written = flight.writes(key)
        if written or (readers and written is not None):
            diagnosis.wait(controller, flight, timeout_s)
