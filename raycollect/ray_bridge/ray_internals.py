"""Access to what Ray's public API does not offer; each use is feature-detected. See also `direct_transport`.

What is used, and why it holds, stands in docs/adr/0001-ray-internals.md.
"""

from __future__ import annotations

import functools
import gc
import inspect
import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any

import ray
from ray import _raylet
from ray._private import services
from ray._private.state import GlobalState, state
from ray._private.worker import global_worker
from ray._raylet import ActorID
from ray.actor import ActorHandle, ActorMethod
from ray.experimental import get_local_object_locations, get_object_locations, internal_kv

from raycollect.core import threads
from raycollect.core.model import Key
from raycollect.errors import ForkedError, RayClientError
from raycollect.ray_bridge.driver_handle import DriverHandle

_FIRST_PUT = 100_000_000
_NO_ACTOR = b"\xff" * 12
_UNMADE = 0, 1  # DEPENDENCIES_UNREADY and PENDING_CREATION in Ray's ActorTableData
_NO_METHODS = "__", "_raycollect_"  # prefixes of methods that the actor's author did not write

# Ray's ends that this process has of its parent: nothing but the process itself can know of a fork.
_inherited: list[Any] = []


def _note_fork() -> None:
    if global_worker.connected:
        _inherited.append(core_worker())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)


def is_forked() -> bool:
    """Whether Ray's core worker here is that of the parent, whose threads did not survive the fork."""
    return bool(_inherited) and core_worker() is _inherited[-1]


def is_started() -> bool:
    """Whether Ray runs for this process, also through Ray Client, or for the one that it was forked from."""
    return bool(global_worker.connected) or _is_client()


def ensure_ray() -> None:
    """Starts Ray where it does not run, honouring an address in the environment.

    Raises:
        ForkedError: This is a forked child of a process that is connected.
        RayClientError: This process is connected through Ray Client (ray://).
    """
    if global_worker.connected:
        if is_forked():
            raise ForkedError
        return
    if not _is_client():
        ray.init()
    if _is_client():  # also where the address in the environment was one of Ray Client
        raise RayClientError


def _is_client() -> bool:
    from ray.util.client import ray as client

    connected: bool = client.is_connected()
    return connected


def core_worker() -> Any:
    """Ray's core worker of this process."""
    worker: Any = global_worker
    return worker.core_worker


def read_ref(ref: Any) -> tuple[Key, str]:
    """Returns a ref's own id, and the id of the actor whose method returned it, in hexadecimal, or an empty string.

    An id is 8 bytes of the call, 12 of the actor, 4 of the job, and the index of the return.
    """
    binary: bytes = ref.binary()
    no_actor = binary[8:20] == _NO_ACTOR or int.from_bytes(binary[24:], "little") >= _FIRST_PUT
    return Key(binary), "" if no_actor else binary[8:24].hex()


def nbytes_of(ref: Any) -> int:
    """The size of what a ref stands for, which is there, without fetching it; 0: Ray does not tell."""
    for ask in (get_local_object_locations, get_object_locations):  # this process, or else the ref's owner
        nbytes = ask([ref]).get(ref, {}).get("object_size")
        if nbytes:
            return int(nbytes)
    return 0


def is_put(ref: Any) -> bool:
    """Whether ray.put made a ref: Ray counts those from `_FIRST_PUT` on, beyond any return of a method."""
    return int.from_bytes(ref.binary()[24:], "little") >= _FIRST_PUT


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


# What Ray runs a streaming generator with; None where this Ray has no such thing.
_STREAM = getattr(_raylet, "StreamingGeneratorExecutionContext", None)


def is_streamed(frame: FrameType, *, unknown: bool) -> bool:
    """Whether Ray streams a generator that has just begun; `unknown` where this Ray can't tell.

    Only Ray's execution context knows. It was made a moment ago, so it is nearly always among the youngest objects; the
    others are searched where it is not.
    """
    if _STREAM is None:
        return unknown
    return any(
        type(one) is _STREAM and any(_frame_of(other) is frame for other in gc.get_referents(one))
        for generation in range(3)
        for one in gc.get_objects(generation)
    )


def _frame_of(generator: Any) -> FrameType | None:
    frame = getattr(generator, "gi_frame", None) or getattr(generator, "ag_frame", None)
    return frame if isinstance(frame, FrameType) else None


@lru_cache(maxsize=1)
def memory_domain() -> str:
    """Equal for processes that can show each other memory: one boot, one set of namespaces, one user."""
    try:
        spaces = [str(Path("/proc/self/ns", name).readlink()) for name in ("ipc", "net", "mnt", "pid")]
        return "/".join([Path("/proc/sys/kernel/random/boot_id").read_text().strip(), *spaces, str(os.geteuid())])
    except OSError:
        return socket.gethostname()


def machine_id() -> str:
    """Equal for processes of one host: those of one memory domain, and of one Ray node where there is Ray.

    Not remembered: a process may have used groups without Ray before it started Ray, or have left one for another.
    """
    if not ray.is_initialized():
        return memory_domain()
    # Nodes of a test cluster share a machine and yet stand for hosts of their own.
    return f"{memory_domain()}/{ray.get_runtime_context().get_node_id()}"


def node_address() -> str:
    """The IP address of this Ray node."""
    address: str = ray.util.get_node_ip_address()
    return address


def is_worker() -> bool:
    """True inside an actor or a task."""
    return bool(global_worker.connected) and global_worker.mode == ray.WORKER_MODE and not is_forked()


def has_gpu() -> bool | None:
    """Whether Ray gave this actor or task a GPU; None where it is neither."""
    return bool(ray.get_runtime_context().get_accelerator_ids().get("GPU")) if is_worker() else None


def is_connected() -> bool:
    """True where this process is in a Ray session."""
    return bool(global_worker.connected) and not is_forked()


def is_in(session: object) -> bool:
    """True where this process is in that session, as `session` told it, and was not forked since."""
    worker: Any = global_worker
    return (
        bool(worker.connected) and worker.core_worker is session and (not _inherited or session is not _inherited[-1])
    )


_before_shutdown: list[Callable[[], object]] = []


def before_shutdown(call: Callable[[], object], *, is_last: bool = False) -> Callable[[], None]:
    """Makes a call before `ray.shutdown()` ends this process's actors; returns what undoes that.

    Ray has no hook for it, so its function is replaced. Whoever has imported the function itself bypasses this, and so
    does Ray at the end of the interpreter. `is_last`: the call comes after all others.
    """
    shutdown = ray.shutdown
    if not hasattr(shutdown, "__raycollect__"):

        @functools.wraps(shutdown)
        def after_calls(*args: Any, **kwargs: Any) -> None:
            if is_connected():
                for one in reversed(_before_shutdown[:]):
                    one()
            shutdown(*args, **kwargs)

        after_calls.__raycollect__ = True  # type: ignore[attr-defined]
        ray.shutdown = after_calls
    _before_shutdown.insert(0 if is_last else len(_before_shutdown), call)
    return functools.partial(_undo_before_shutdown, call)


def _undo_before_shutdown(call: Callable[[], object]) -> None:
    with suppress(ValueError):  # it was undone
        _before_shutdown.remove(call)


def session() -> Any:
    """Equal as long as this process stays in its Ray session."""
    worker: Any = global_worker  # as `core_worker`: it is asked for in each call
    return worker.core_worker


def describe_process() -> str:
    """Describes this process to a person elsewhere."""
    context = ray.get_runtime_context()
    kind = "actor" if current_actor_id() else "task" if is_worker() else "driver"
    return f"{kind} process {os.getpid()} on {node_address()} (job {context.get_job_id()})"


def worker_id() -> str:
    """Ray's id of this process, in hexadecimal."""
    return str(ray.get_runtime_context().get_worker_id())


def owner_id() -> str:
    """Ray's id of the process that made this actor, in hexadecimal; empty where this is no actor."""
    from ray.core.generated import core_worker_pb2

    read: Any = core_worker_pb2  # its names are made when it is imported
    if not current_actor_id():
        return ""
    serialized, _ = core_worker().serialize_actor_handle(core_worker().get_actor_id())
    return str(read.ActorHandle.FromString(serialized).owner_address.worker_id.hex())


def is_alive(worker: str) -> bool:
    """Whether Ray takes a process for alive, by its `worker_id`; asks the cluster's control store."""
    return worker in living_workers()


def living_workers() -> frozenset[str]:
    """The `worker_id` of each process that Ray takes for alive: of those of a node that is gone, Ray does not say."""
    from ray.core.generated import gcs_pb2

    read: Any = gcs_pb2  # its names are made when it is imported
    table = map(read.WorkerTableData.FromString, state._connect_and_get_accessor().get_worker_table())
    nodes = {one["NodeID"] for one in ray.nodes() if one["Alive"]}
    return frozenset(
        one.worker_address.worker_id.hex()
        for one in table
        if one.is_alive and one.worker_address.node_id.hex() in nodes
    )


def is_ordered() -> bool:
    """True where this actor runs its methods one by one, in submission order (P2); for one of its methods to call.

    Ray runs the methods of an actor that has concurrency groups in pools of threads, and those of other synchronous
    actors in the main thread. An actor with tensor transport has groups too: those that Ray itself uses.
    """
    worker = core_worker()
    if worker.current_actor_is_asyncio() or worker.current_actor_max_concurrency() > 1:
        return False
    handle = worker.get_actor_handle(worker.get_actor_id())
    if getattr(handle, "_ray_allow_out_of_order_execution", False):
        return False
    is_main = threading.current_thread() is threading.main_thread()
    return is_main or bool(getattr(handle, "_ray_enable_tensor_transport", False))


def actor_handle(actor_id: str) -> Any:
    """Returns a weak handle of an actor; None where this process never held one (asking Ray would end the process)."""
    if core_worker().get_local_actor_state(ActorID(bytes.fromhex(actor_id))) is None:
        return None
    serialized, _ = core_worker().serialize_actor_handle(ActorID(bytes.fromhex(actor_id)))
    return ActorHandle._deserialization_helper(serialized, True)


def is_pending(handle: Any) -> bool:
    """Whether Ray has not begun to make an actor yet, since dependencies or resources are missing."""
    return core_worker().get_local_actor_state(handle._actor_id) in _UNMADE


def describe_actor(handle: Any) -> str:
    """Names an actor: ``Worker(3f2a91)``; or the driver."""
    if isinstance(handle, DriverHandle):
        return handle.name
    cls = getattr(handle, "_ray_actor_creation_function_descriptor", None)
    name = cls.class_name if cls is not None else "Actor"
    return short_actor(name, handle._actor_id.hex())


def short_actor(name: str, actor_id: str) -> str:
    """``Worker(3f2a91)``."""
    return f"{name.rpartition('.')[2]}({actor_id[:6]})"


def methods_of(handle: Any) -> dict[str, inspect.Signature] | None:
    """The signatures of an actor's methods, by name, without those of Ray and of this package; None: not known."""
    signatures = getattr(handle, "_ray_method_signatures", None)
    if not isinstance(signatures, dict):
        return None
    found = {}
    for name, parameters in signatures.items():
        if not name.startswith(_NO_METHODS):
            given = [one for one in parameters if one.name != "_ray_trace_ctx"]  # which Ray adds
            found[name] = inspect.Signature(given)
    return found


def is_generator(handle: Any, method: str) -> bool:
    """Whether a method is known to be a generator."""
    known = getattr(handle, "_ray_method_is_generator", None)
    return isinstance(known, dict) and bool(known.get(method))


def unusual_options(handle: Any, method: str, options: dict[str, Any]) -> dict[str, str]:
    """What the caller of a method asks of its task, by option; `options` are of Ray's function that submits it."""
    declared = getattr(handle, method)
    retries = getattr(declared, "_max_task_retries", None) or 0
    usual = {
        "name": "",
        "num_returns": "streaming" if is_generator(handle, method) else 1,  # which is refused elsewhere
        "max_task_retries": retries,
        "retry_exceptions": getattr(declared, "_retry_exceptions", None),
        "concurrency_group_name": None,
        "tensor_transport": getattr(declared, "_tensor_transport", None),
        "labels": None,
    }
    found = {name: options[name] for name, value in usual.items() if name in options and options[name] != value}
    return {name.removesuffix("_name"): repr(value) for name, value in found.items()}


def read_method(value: Any) -> tuple[Any, str] | None:
    """The handle and the name of ``actor.method``; None for other values."""
    if not isinstance(value, ActorMethod):
        return None
    handle, name = getattr(value, "_actor", None), getattr(value, "_method_name", None)
    return (handle, name) if isinstance(handle, ActorHandle) and isinstance(name, str) else None


def on_last_ref(ref: Any, callback: Callable[[], None]) -> bool:
    """Calls back when the last reference to a ref is gone anywhere; this process must own it. False: Ray can't tell."""
    register = getattr(core_worker(), "add_object_out_of_scope_callback", None)
    if register is None:
        return False
    register(ref, lambda _: threads.survives(callback))
    return True


def cluster_client() -> Any:
    """This process's client of its cluster's key-value store; None where it is not connected."""
    return internal_kv.internal_kv_get_gcs_client()


def cluster_address(named: str) -> str:
    """The ``"host:port"`` of a cluster's control store, from a name that `ray.init` takes, without I/O.

    Raises:
        ValueError: The name makes no sense.
        ConnectionError: It is ``"auto"``, and no cluster, or several, run here.
    """
    return str(services.canonicalize_bootstrap_address_or_die(named))


def read_cluster(address: str) -> tuple[Any, Any]:
    """Returns clients of a cluster's key-value store and of its tables, without becoming a driver there.

    Raises:
        RayError, RuntimeError: Nobody answers there, or a Ray of another version.
    """
    raylet: Any = _raylet  # its types leave out what is used here
    client, state = raylet.GcsClient(address=address), GlobalState()
    options = raylet.GcsClientOptions.create(address, None, allow_cluster_id_nil=True, fetch_cluster_id_if_nil=False)
    state._initialize_global_state(options)
    return client, state
