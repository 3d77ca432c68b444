"""Fetches and frees the values of refs, in the order of this process's collectives."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any, TypeVar, overload

import ray
from ray import ObjectRef
from ray.exceptions import GetTimeoutError, ObjectLostError, RayActorError, RayError

from raycollect.core import threads
from raycollect.core.model import Address, Key
from raycollect.core.signals import hide_frames
from raycollect.driver import stall_report
from raycollect.driver.controller import Controller
from raycollect.driver.operand_binding import ensure_ray, stale
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
from raycollect.ray_bridge import direct_transport, ray_actors, ray_refs

_T = TypeVar("_T")

_HELD = (ray.ObjectRef, Handle)

_COPY_S = 5.0  # the least time for all copies, in seconds: the caller's limit is for methods and collectives


_AT_ONCE = 8  # from how many holders values are fetched at once
_AT_ONCE_FROM_NBYTES = 2 << 20  # of all values; below, starting threads takes longer


@overload
def get(refs: list[ObjectRef[_T]], timeout_s: float | None = ..., *, ordered: bool = ...) -> list[_T]: ...


@overload
def get(refs: ObjectRef[_T], timeout_s: float | None = ..., *, ordered: bool = ...) -> _T: ...


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
        TensorFreedError, TensorLostError, TensorDirtyError: The tensor was freed, lost, or is half written.
        HolderUnreachableError: The process that holds it could not be reached in time.
        GetTimeoutError: Ray's own: the method, or a collective that writes the tensor, has not ended in time.
        BatchError: A ref is an output of a batch that has not ended.
        InvalidArgumentError: An argument makes no sense; `ordered` in a process that never had a handle of the actor.
    """
    if timeout_s is not None or ordered is not False:
        refuse("get", [*wrong_wait(timeout_s), *wrong_flags(ordered=ordered)])
    ensure_ray("get", refs)
    try:
        return _get(refs, math.inf if timeout_s is None else time.monotonic() + timeout_s, ordered)
    except KeyboardInterrupt as exc:
        hide_frames(exc)
        raise


def _get(refs: Any, until_s: float, ordered: bool) -> Any:
    leaves = list(map(plain, _leaves(refs)))
    _wait_for_writers(leaves, until_s)
    values = _values(leaves, until_s)
    if ordered:
        _pass_fences([value for value in values if isinstance(value, Handle)], until_s)
    return _filled(refs, iter(_fetched(values, until_s)))


def _leaves(refs: Any) -> Iterator[Any]:
    if isinstance(refs, list):
        for ref in refs:
            yield from _leaves(ref)
    else:
        yield refs


def _filled(refs: Any, values: Iterator[Any]) -> Any:
    return [_filled(ref, values) for ref in refs] if isinstance(refs, list) else next(values)


def _pass_fences(handles: Sequence[Handle], until_s: float) -> None:
    """Waits until the actors have done all methods that were submitted before."""
    actors = {handle.actor_id: ray_actors.actor_handle(handle.actor_id) for handle in handles}
    for handle in handles:
        if actors[handle.actor_id] is None:
            actual, expected = f"True, and this process never had a handle of {handle.actor}", "False without one"
            raise refusal("get", "", (wrong_argument("ordered", actual, expected),))
    for fence in [actor._raycollect_fence.remote() for actor in actors.values()]:
        _value(fence, until_s)


def _fetched(values: Iterable[Any], until_s: float) -> list[Any]:
    """Values, with those of handles fetched: from several holders at once, unless threads would take longer."""
    fetched = list(values)
    ends_s = max(until_s, time.monotonic() + _COPY_S)
    of_holders: dict[Address, list[int]] = {}
    nbytes = 0
    for at, value in enumerate(fetched):
        if isinstance(value, Handle):
            of_holders.setdefault(value.address, []).append(at)
            nbytes += sum(info.nbytes for info in value.infos)

    def fetch_some(places: Sequence[int]) -> None:
        for at in places:
            handle = fetched[at]
            fetched[at] = handle.fetch() if ends_s == math.inf else handle.fetch(ends_s - time.monotonic())

    groups, at_once = list(of_holders.values()), _AT_ONCE if nbytes >= _AT_ONCE_FROM_NBYTES else 1
    mine, *others = [[*chain.from_iterable(groups[first::at_once])] for first in range(at_once)]
    fetching = []
    for places in filter(None, others):
        try:
            fetching.append(threads.call_in_helper(fetch_some, places))
        except RuntimeError:  # no thread can be started
            fetch_some(places)
    fetch_some(mine)
    for value in fetching:
        value.result()
    return fetched


def free(refs: Any, *, timeout_s: float | None = None) -> int:
    """Frees tensors now, though refs to them exist; using them afterwards raises TensorFreedError.

    Args:
        refs: An ObjectRef, what a batch gave for one, or the handle that `ray.get` gave; or a list of them.
            Collectives of this process that use them are waited for.
        timeout_s: How long to wait for these, and for the methods that make the tensors, in seconds; None: no limit.

    Returns:
        The number of freed tensors.

    Raises:
        GetTimeoutError: Ray's own: they have not ended in time; nothing was freed.
        InvalidArgumentError: `timeout_s` makes no sense.
        NotATensorError: A ref does not stand for a kept tensor.
        TensorLostError: The participant has ended.
        HolderUnreachableError: It could not be reached in time.
        BatchError: A ref is an output of a batch that has not ended.
    """
    refuse("free", wrong_wait(timeout_s))
    ensure_ray("free", refs)
    count, until_s = 0, math.inf if timeout_s is None else time.monotonic() + timeout_s
    leaves = list(map(plain, refs if isinstance(refs, (list, tuple)) else [refs]))
    _wait_for_writers(leaves, until_s, readers=True)
    held: dict[Address, list[Handle]] = {}
    for ref, value in zip(leaves, _values(leaves, until_s), strict=True):
        if not isinstance(value, Handle):
            actual = f"one of {a_type(value)}, which is not kept"
            violation = Violation(kind="not_tensor", field="ref", found=actual, ref=ref.hex())
            raise NotATensorError(op="free", group_name="", violations=(violation,))
        held.setdefault(value.address, []).append(value)
    for address, handles in held.items():
        first, keys = handles[0], list(dict.fromkeys(handle.key for handle in handles))
        count += fetch.free(address, keys, actor=first.actor, incarnation=first.incarnation)
    return count


def _values(refs: Sequence[Any], until_s: float) -> list[Any]:
    """The values of refs; Ray fetches all of them at once."""
    awaited = list(dict.fromkeys(ref for ref in refs if isinstance(ref, ray.ObjectRef)))
    if len(awaited) > 1 and not any(map(direct_transport.is_direct, awaited)):
        with suppress(ValueError):  # Ray knows no owner of one of them: `_value` names it
            ray.wait(awaited, num_returns=len(awaited), timeout=_left_s(until_s))
    return [_value(ref, until_s) for ref in refs]


def _value(ref: Any, until_s: float) -> Any:
    if isinstance(ref, Handle):
        return ref
    try:
        return direct_transport.get(ref, _left_s(until_s))
    except ValueError as exc:
        if isinstance(exc, RayError):  # a method's own
            raise
        raise refusal("get", "", (stale(ref.hex()),)) from exc  # Ray knows no owner of it
    except (RayActorError, ObjectLostError) as exc:
        key, actor_id = ray_refs.read_ref(ref)
        actor = ray_actors.actor_handle(actor_id) if actor_id else None
        if not actor_id or (actor is not None and not is_participant(actor)):
            raise
        who = "" if actor is None else ray_actors.describe_actor(actor)
        actual = f"lost with its actor ({type(exc).__name__})"
        lost = Violation(kind="lost", field="tensor", found=actual, actor=who, ref=key.hex())
        raise TensorLostError(op="get", group_name="", violations=(lost,)) from exc


def _left_s(until_s: float) -> float | None:
    return None if until_s == math.inf else max(until_s - time.monotonic(), 0.0)


def _wait_for_writers(refs: Iterable[Any], until_s: float, *, readers: bool = False) -> None:
    keys = [ref.key if isinstance(ref, Handle) else Key(ref.binary()) for ref in refs if isinstance(ref, _HELD)]
    controller = Controller.current()
    for tracker in controller.plans.trackers():
        written = [tracker.writes[key] for key in keys if key in tracker.writes]
        if not any(written) and not (readers and written):
            continue
        controller.plans.dispatching.refuse_inside()  # this thread may be about to send the plan
        if not stall_report.wait(controller, tracker, _left_s(until_s)):
            raise GetTimeoutError(f"{tracker.plan.name}, which writes the tensor, has not ended in time; it goes on")
