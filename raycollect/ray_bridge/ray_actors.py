"""Actors: the one that this process is, and handles of others."""

from __future__ import annotations

import gc
import inspect
import os
import threading
from types import FrameType
from typing import Any

import ray
from ray import ActorID, _raylet
from ray.actor import ActorHandle, ActorMethod

from raycollect.ray_bridge.driver_handle import DriverHandle
from raycollect.ray_bridge.ray_session import core_worker, global_worker, is_worker, node_address

UNMADE = 0, 1  # DEPENDENCIES_UNREADY and PENDING_CREATION in Ray's ActorTableData
TRACE_ARGUMENT = "_ray_trace_ctx"  # which Ray adds to each method

_NO_METHODS = "__", "_raycollect_"  # prefixes of methods that the actor's author did not write

# ------------------------------------------------------------------------------------------------ this process


def current_actor_id() -> str:
    """The id of the actor that this process is, in hexadecimal; empty in a driver or task."""
    if not ray.is_initialized():
        return ""
    actor_id = core_worker().get_actor_id()
    return "" if actor_id.is_nil() else actor_id.hex()


def current_task() -> bytes | None:
    """Returns the id of the actor task that this thread or coroutine runs.

    None outside an actor, and in a thread of the user's own: Ray gives such a thread a random task id, whose tail is
    not the id of the actor.
    """
    if not global_worker.connected:
        return None
    worker = core_worker()
    actor_id = worker.get_actor_id().binary()
    task: bytes = worker.get_current_task_id().binary()
    return task if task[8:] == actor_id and any(byte != 0xFF for byte in actor_id) else None


def current_method() -> str:
    """The name of the method that Ray called in this thread or coroutine."""
    name: str = core_worker().get_current_task_function_name()
    return name.rpartition(".")[2]


def current_class() -> str:
    """The class of the actor that this process is, as its creator named it."""
    name: str = core_worker().get_current_task_function_name()
    return name.rpartition(".")[0].rpartition(".")[2] or "Actor"


def describe_process() -> str:
    """Describes this process to a person elsewhere."""
    kind = "actor" if current_actor_id() else "task" if is_worker() else "driver"
    return f"{kind} process {os.getpid()} on {node_address()} (job {ray.get_runtime_context().get_job_id()})"


def owner_id() -> str:
    """The `worker_id` of the process that created this actor; empty if this process is no actor."""
    from ray.core.generated import core_worker_pb2

    messages: Any = core_worker_pb2  # their names are made when it is imported
    if not current_actor_id():
        return ""
    serialized, _ = core_worker().serialize_actor_handle(core_worker().get_actor_id())
    return str(messages.ActorHandle.FromString(serialized).owner_address.worker_id.hex())


def is_ordered(cls: type) -> bool:
    """Whether this actor runs its methods one by one, in submission order (P2); called by one of its methods.

    Ray runs the methods of an actor with concurrency groups in pools of threads, and those of other synchronous actors
    in the main thread. An actor with tensor transport has groups too, those of Ray itself.
    """
    methods = (inspect.getattr_static(cls, name) for name in dir(cls))
    if any(hasattr(method, "__ray_concurrency_group__") for method in methods):
        return False
    worker = core_worker()
    if worker.current_actor_is_asyncio() or worker.current_actor_max_concurrency() > 1:
        return False
    handle = worker.get_actor_handle(worker.get_actor_id())
    if getattr(handle, "_ray_allow_out_of_order_execution", False):
        return False
    is_main = threading.current_thread() is threading.main_thread()
    return is_main or bool(getattr(handle, "_ray_enable_tensor_transport", False))


def is_ray_class(cls: type) -> bool:
    """Whether Ray derived a class from that of an actor's author."""
    return "__ray_actor_class__" in vars(cls)


def is_of_ray(cls: type) -> bool:
    """Whether a class is one that Ray derived, or made of such a one, as the class of an `ActorClass` object is."""
    return hasattr(cls, "__ray_actor_class__")


def declares_count(method: Any) -> bool:
    """Whether a method was declared with a number of returns."""
    return isinstance(getattr(method, "__ray_num_returns__", None), int)


def is_streamed(frame: FrameType) -> bool | None:
    """Whether Ray streams a generator that has just begun; None if this Ray can't tell.

    Only Ray's execution context knows. It is new, so it is nearly always among the youngest objects; the
    others are searched if it is not.
    """
    kind = getattr(_raylet, "StreamingGeneratorExecutionContext", None)
    if kind is None:
        return None
    return any(
        type(context) is kind and any(_frame_of(other) is frame for other in gc.get_referents(context))
        for generation in range(3)
        for context in gc.get_objects(generation)
    )


def _frame_of(generator: Any) -> FrameType | None:
    frame = getattr(generator, "gi_frame", None) or getattr(generator, "ag_frame", None)
    return frame if isinstance(frame, FrameType) else None


# ------------------------------------------------------------------------------------------------ handles


def id_of(handle: Any) -> str:
    """The id of an actor, in hexadecimal."""
    actor_id: str = handle._actor_id.hex()
    return actor_id


def actor_handle(actor_id: str) -> Any:
    """Returns a weak handle of an actor; None if this process never held one (asking Ray would end the process)."""
    ray_id = ActorID(bytes.fromhex(actor_id))
    if core_worker().get_local_actor_state(ray_id) is None:
        return None
    serialized, _ = core_worker().serialize_actor_handle(ray_id)
    return ActorHandle._deserialization_helper(serialized, True)


def is_pending(handle: Any) -> bool:
    """Whether Ray has not begun to make an actor yet, since dependencies or resources are missing."""
    return core_worker().get_local_actor_state(handle._actor_id) in UNMADE


def describe_actor(handle: Any) -> str:
    """Names an actor: ``Worker(3f2a91)``; or the driver."""
    if isinstance(handle, DriverHandle):
        return handle.name
    descriptor = getattr(handle, "_ray_actor_creation_function_descriptor", None)
    return short_actor("Actor" if descriptor is None else descriptor.class_name, id_of(handle))


def short_actor(name: str, actor_id: str) -> str:
    """``Worker(3f2a91)``."""
    return f"{name.rpartition('.')[2]}({actor_id[:6]})"


def methods_of(handle: Any) -> dict[str, inspect.Signature] | None:
    """The signatures of an actor's methods by name, without those of Ray and of this package; None if not known."""
    signatures = getattr(handle, "_ray_method_signatures", None)
    if not isinstance(signatures, dict):
        return None
    return {
        name: inspect.Signature([parameter for parameter in parameters if parameter.name != TRACE_ARGUMENT])
        for name, parameters in signatures.items()
        if not name.startswith(_NO_METHODS)
    }


def is_generator(handle: Any, method: str) -> bool:
    """Whether a method is known to be a generator."""
    flags = getattr(handle, "_ray_method_is_generator", None)
    return isinstance(flags, dict) and bool(flags.get(method))


def unusual_options(handle: Any, method: str, options: dict[str, Any]) -> dict[str, str]:
    """The options of a task that differ from the method's own; `options` are those of Ray's submit function."""
    declared = getattr(handle, method)
    usual = {
        "name": "",
        "num_returns": "streaming" if is_generator(handle, method) else 1,  # which is refused elsewhere
        "max_task_retries": getattr(declared, "_max_task_retries", None) or 0,
        "retry_exceptions": getattr(declared, "_retry_exceptions", None),
        "concurrency_group_name": None,
        "tensor_transport": getattr(declared, "_tensor_transport", None),
        "labels": None,
    }
    unusual = {name: options[name] for name, value in usual.items() if name in options and options[name] != value}
    return {name.removesuffix("_name"): repr(value) for name, value in unusual.items()}


def read_method(value: Any) -> tuple[Any, str] | None:
    """The handle and the name of ``actor.method``; None for other values."""
    if not isinstance(value, ActorMethod):
        return None
    handle, name = getattr(value, "_actor", None), getattr(value, "_method_name", None)
    return (handle, name) if isinstance(handle, ActorHandle) and isinstance(name, str) else None
