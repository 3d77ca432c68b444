"""Refs of methods with a `tensor_transport`: Ray keeps their tensors in the actor that made them."""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import time
from collections.abc import Callable, Collection
from typing import Any

import ray
from ray import cloudpickle
from ray.exceptions import GetTimeoutError, RayError

from raycollect.core import signals, threads
from raycollect.errors import RaycollectError, Violation, refusal
from raycollect.ray_bridge.ray_session import core_worker, global_worker


class Returned:
    """A stored value on its way to Ray, which gets its handle.

    Where the method has a `tensor_transport`, Ray takes the tensors themselves, not copies of them, into a store of its
    own, and moves them when another actor gets the ref. The handle travels with what is left: it says where the tensors
    lie, and its token is counted with the ref as ever. `types` are the types of the value's tensors.
    """

    __slots__ = ("_handle", "_types", "_value")

    def __init__(self, handle: Any, value: Any, types: Collection[type]) -> None:
        self._handle = handle
        self._value = value
        self._types = types

    def __reduce__(self) -> tuple[Any, ...]:
        taken = _taken_types()
        if taken and all(kind in taken for kind in self._types):
            # Pickled by itself: Ray counts the token, and only a reader of the handle unpickles it. If the actor
            # that owns the token did, as it gets its own tensors back, Ray 2.60 would count it for ever.
            return _arrived, (self._value, cloudpickle.dumps(self._handle))
        return _arrived, (self._handle, b"")

    def form(self) -> Any:
        """Its short form for Ray: the handle's; None where Ray takes tensors."""
        return None if _taken_types() else self._handle.form()


def _taken_types() -> Collection[type]:
    """The types of tensors that Ray takes without a copy as this thread pickles; empty if it copies all."""
    context = global_worker.get_serialization_context()
    if not getattr(getattr(context, "_thread_local", None), "use_external_transport", False):
        return ()
    registered = getattr(context, "_rdt_custom_serializer_registered", {})
    return [kind for kind, is_registered in registered.items() if is_registered]


class _Peek(threading.local):
    """Whether this thread wants the handles of the values that it unpickles, and the last handle."""

    wanted = False
    handle: Any = None


_peek = _Peek()


def _arrived(value: Any, handle: bytes) -> Any:
    """Unpickles a `Returned`: its value, or its handle where Ray has not taken the tensors."""
    if _peek.wanted:
        _peek.handle = cloudpickle.loads(handle) if handle else value
    return value


class _Untouched:
    """Stands for the tensors of an object that is only inspected: any number of Nones."""

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: int) -> None:
        return None


def is_direct(ref: Any) -> bool:
    """True for the ref of a method with a `tensor_transport`: Ray keeps its tensors in the actor that made them."""
    transport = getattr(ref, "tensor_transport", None)
    return callable(transport) and transport() is not None


def get(ref: Any, timeout_s: float | None = None) -> Any:
    """As `ray.get`, but returns the handle of stored tensors that Ray would move by a `tensor_transport`.

    An exception of a signal handler is raised unchanged: Ray, which would make a RaySystemError of it, unpickles the
    value while signals are deferred.

    Raises:
        UnsupportedError: This Ray does not let one look into such an object.
    """
    try:
        if not signals.runs_handlers():
            return _get(ref, timeout_s)
        with signals.Deferred():
            try:
                return _get(ref, 0)
            except GetTimeoutError:
                if timeout_s == 0:
                    raise
            until_s = time.monotonic() + (timeout_s or 0)
            refs = list(dict.fromkeys(ref if isinstance(ref, list) else [ref]))
            with signals.Allowed():
                ray.wait(refs, num_returns=len(refs), timeout=timeout_s)
            return _get(ref, None if timeout_s is None else max(until_s - time.monotonic(), 0))
    except RayError as exc:
        raise exc.with_traceback(None) from exc.__cause__  # Ray's frames hold it, and its callers' frames


def _get(ref: Any, timeout_s: float | None) -> Any:
    if not is_direct(ref):
        return ray.get(ref, timeout=timeout_s)
    if "rdt_objects" not in inspect.signature(global_worker.deserialize_objects).parameters:
        actual = f"that of Ray {ray.__version__}"
        expected = "that of Ray 2.57 to 2.60, or a method without tensor_transport"
        wrong = Violation(kind="unsupported", rank=-1, field="tensor_transport", found=actual, expected=expected)
        raise refusal("get", "", (wrong,))
    timeout_ms = -1 if timeout_s is None else int(timeout_s * 1000)
    serialized = core_worker().get_objects([ref], timeout_ms)
    _peek.wanted, _peek.handle = True, None
    try:
        global_worker.deserialize_objects(serialized, [ref], rdt_objects={ref.hex(): _Untouched()})
        handle = _peek.handle
    finally:
        _peek.wanted, _peek.handle = False, None
    if handle is not None:
        return handle
    of_any: Any = ray.get  # its types lack this argument; not every transport reaches this process
    return of_any(ref, timeout=timeout_s, _use_object_store=True)


def on_completed(ref: Any, callback: Callable[[Any], object]) -> None:
    """Calls back on another thread with the value of `get`, or with its exception."""
    if not is_direct(ref):
        ref._on_completed(functools.partial(threads.survives, callback))
        return

    def wait() -> None:  # Ray's own callback would wait for the tensors, which never arrive
        try:
            value = get(ref)
        except (RayError, RaycollectError) as exc:
            value = exc
        except Exception as exc:  # noqa: BLE001 - the waiter gets it
            value = threads.failed("waiting for a ref", exc)
        callback(value)

    threads.call_in_helper(threads.survives, wait)
