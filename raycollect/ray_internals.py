"""The one place that asks Ray for things that its public API does not offer; each is feature-detected.

What is used, and why it holds, stands in docs/adr/0002-ray-internals.md.
"""

from __future__ import annotations

import functools
import gc
import inspect
import os
import socket
import sys
import threading
from collections.abc import Callable, Collection
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any

import ray
from ray import _raylet, cloudpickle
from ray._private import services
from ray._private.state import GlobalState
from ray._private.worker import global_worker
from ray._raylet import ActorID
from ray.actor import ActorHandle, ActorMethod
from ray.exceptions import RayError
from ray.experimental import internal_kv

from raycollect.errors import ForkedError, RayClientError, RaycollectError, Violation, refusal
from raycollect.model import Key

_FIRST_PUT = 100_000_000
_NOBODY = b"\xff" * 12

_UNMADE = 0, 1  # DEPENDENCIES_UNREADY and PENDING_CREATION in Ray's ActorTableData
_NO_METHODS = "__", "_raycollect_"
"""What the names of methods begin with that are none of the actor's author."""

_inherited: list[Any] = []
"""Ray's ends that this process has of its parent: nothing but the process itself can know of a fork."""


def _note_fork() -> None:
    if global_worker.connected:
        _inherited.append(core_worker())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)


def is_forked() -> bool:
    """True where Ray's end in this process is that of its parent, whose threads did not come along."""
    return bool(_inherited) and core_worker() is _inherited[-1]


def ensure_ray() -> None:
    """Starts Ray where it does not run; an address in the environment is honoured.

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


# ---------------------------------------------------------------------------------------------- ids


def read_ref(ref: Any) -> tuple[Key, str]:
    """The POS key of an ObjectRef, and the actor whose method returned it.

    An id is 8 bytes of the call, 12 of the actor, 4 of the job, and the index of the return.

    Returns:
        The ref's own id, and the actor's in hexadecimal; empty where no method of an actor returned it.
    """
    binary: bytes = ref.binary()
    nobody = binary[8:20] == _NOBODY or _is_of_put(binary)
    return Key(binary), "" if nobody else binary[8:24].hex()


def is_put(ref: Any) -> bool:
    """True for a ref made by ray.put: Ray counts those from `_FIRST_PUT` on, beyond any return of a method."""
    return _is_of_put(ref.binary())


def _is_of_put(binary: bytes) -> bool:
    return int.from_bytes(binary[24:], "little") >= _FIRST_PUT


def current_actor_id() -> str:
    """The id of the actor that this process is, in hexadecimal; empty in a driver or task."""
    if not ray.is_initialized():
        return ""
    actor_id = core_worker().get_actor_id()
    return "" if actor_id.is_nil() else actor_id.hex()


def current_task() -> bytes | None:
    """The id of the actor task that this thread or coroutine runs.

    Returns:
        None outside an actor, and in a thread of the user's own: Ray gives such a thread a random task id, whose tail
        is not the id of the actor.
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


_STREAM = getattr(_raylet, "StreamingGeneratorExecutionContext", None)
"""What Ray runs a streaming generator with; None where this Ray has no such thing."""


def is_streamed(frame: FrameType, *, unknown: bool) -> bool:
    """Whether Ray streams a generator, which only what it runs it with can tell.

    That was made a moment ago, so it is nearly always among the youngest objects; all others are looked through where
    it is not.

    Args:
        frame: Of the generator, which has just begun.
        unknown: The answer where this Ray can't tell.
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


# ---------------------------------------------------------------------------------------------- direct transport


class Returned:
    """A kept value on its way to Ray, which takes the handle of it.

    Where the method has a `tensor_transport`, Ray takes the tensors themselves, not copies of them, into a store of its
    own, and moves them when another actor gets the ref. The handle travels with what is left: it says where the tensors
    lie, and its token is counted with the ref as ever.

    Args:
        handle: The handle.
        value: What the method returned.
        types: The types of its tensors.
    """

    __slots__ = ("_handle", "_types", "_value")

    def __init__(self, handle: Any, value: Any, types: Collection[type]) -> None:
        self._handle = handle
        self._value = value
        self._types = types

    def __reduce__(self) -> tuple[Any, ...]:
        taken = _taken_types()
        if taken and all(one in taken for one in self._types):
            # Pickled by itself: Ray counts the token, and only who looks for the handle unpickles it. Where the actor
            # that owns the token did, as it gets its own tensors back, Ray 2.60 would count it for ever.
            return _arrived, (self._value, cloudpickle.dumps(self._handle))
        return _arrived, (self._handle, b"")


def _taken_types() -> Collection[type]:
    """The types of tensors that Ray takes as they are out of what this thread pickles now; none where it copies all."""
    context = global_worker.get_serialization_context()
    if not getattr(getattr(context, "_thread_local", None), "use_external_transport", False):
        return ()
    registered = getattr(context, "_rdt_custom_serializer_registered", {})
    return [kind for kind, is_registered in registered.items() if is_registered]


class _Peek(threading.local):
    """Whether this thread wants the handles of what it unpickles, and the last that it met."""

    wanted = False
    found: Any = None


_peek = _Peek()


def _arrived(value: Any, handle: bytes) -> Any:
    """What Ray makes of a `Returned` where it is used: its value, or its handle where Ray has not taken the tensors."""
    if _peek.wanted:
        _peek.found = cloudpickle.loads(handle) if handle else value
    return value


class _Untouched:
    """In the place of the tensors of an object that is only looked into: any number of Nones."""

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: int) -> None:
        return None


def is_direct(ref: Any) -> bool:
    """True for the ref of a method with a `tensor_transport`: Ray keeps its tensors in the actor that made them."""
    transport = getattr(ref, "tensor_transport", None)
    return callable(transport) and transport() is not None


def get(ref: Any, timeout_s: float | None = None) -> Any:
    """As `ray.get`, but of kept tensors that Ray would move by a `tensor_transport`, the handle; no tensor moves.

    Raises:
        UnsupportedError: This Ray does not let one look into such an object.
    """
    if not is_direct(ref):
        return ray.get(ref, timeout=timeout_s)
    worker: Any = global_worker
    if "rdt_objects" not in inspect.signature(worker.deserialize_objects).parameters:
        found, expected = f"Ray {ray.__version__}", "Ray 2.57 to 2.60, or a method without tensor_transport"
        wrong = Violation(kind="unsupported", rank=-1, field="tensor_transport", found=found, expected=expected)
        raise refusal("get", "", (wrong,))
    timeout_ms = -1 if timeout_s is None else int(timeout_s * 1000)
    serialized = worker.core_worker.get_objects([ref], timeout_ms)
    _peek.wanted, _peek.found = True, None
    try:
        worker.deserialize_objects(serialized, [ref], rdt_objects={ref.hex(): _Untouched()})
        found = _peek.found
    finally:
        _peek.wanted, _peek.found = False, None
    if found is not None:
        return found
    of_any: Any = ray.get  # its types leave out what is used here: not every transport reaches this process
    return of_any(ref, timeout=timeout_s, _use_object_store=True)


def on_completed(ref: Any, callback: Callable[[Any], object]) -> None:
    """Calls back with the value of a ref, as `get` has it, or with the exception, on another thread."""
    if not is_direct(ref):
        ref._on_completed(callback)
        return

    def wait() -> None:  # Ray's own callback would wait there for the tensors, which never come
        try:
            value = get(ref)
        except (RayError, RaycollectError) as exc:
            value = exc
        callback(value)

    threading.Thread(target=wait, name="raycollect-direct", daemon=True).start()


# ---------------------------------------------------------------------------------------------- processes


@lru_cache(maxsize=1)
def memory_domain() -> str:
    """Equal for processes that can show each other memory: one boot, one set of namespaces."""
    try:
        spaces = [str(Path("/proc/self/ns", name).readlink()) for name in ("ipc", "net", "mnt", "pid")]
        return "/".join([Path("/proc/sys/kernel/random/boot_id").read_text().strip(), *spaces])
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


def before_shutdown(call: Callable[[], None]) -> Callable[[], None]:
    """Makes a call before `ray.shutdown()` ends this process's actors; gives what undoes that.

    Ray has no hook for it, so that its function is replaced. Whoever has imported the function itself goes past this,
    and so does Ray at the end of the interpreter.
    """
    before = ray.shutdown

    @functools.wraps(before)
    def shutdown(*args: Any, **kwargs: Any) -> None:
        if is_connected():
            call()
        before(*args, **kwargs)

    def undo() -> None:
        if ray.shutdown is shutdown:
            ray.shutdown = before

    ray.shutdown = shutdown
    return undo


def session() -> Any:
    """Equal as long as this process stays in its Ray session: another one after ray.shutdown() and ray.init()."""
    return core_worker()


def describe_process() -> str:
    """This process, for a person in another one."""
    context = ray.get_runtime_context()
    kind = "actor" if current_actor_id() else "driver"
    return f"{kind} process {os.getpid()} on {node_address()} (job {context.get_job_id()})"


def is_ordered() -> bool:
    """True where this actor runs its methods one by one, in submission order (P2)."""
    worker = core_worker()
    return not worker.current_actor_is_asyncio() and worker.current_actor_max_concurrency() <= 1


# ---------------------------------------------------------------------------------------------- handles


def actor_handle(actor_id: str) -> Any:
    """A handle of an actor that this process knows, which does not keep the actor alive.

    Returns:
        None where this process has never held a handle of it (asking Ray for one would end the process).
    """
    if core_worker().get_local_actor_state(ActorID(bytes.fromhex(actor_id))) is None:
        return None
    serialized, _ = core_worker().serialize_actor_handle(ActorID(bytes.fromhex(actor_id)))
    return ActorHandle._deserialization_helper(serialized, True)


def is_pending(handle: Any) -> bool:
    """Whether Ray has not begun to make an actor yet, for want of what it depends on or of resources."""
    return core_worker().get_local_actor_state(handle._actor_id) in _UNMADE


def describe_actor(handle: Any) -> str:
    """What a person calls an actor: ``Worker(3f2a91)``."""
    cls = getattr(handle, "_ray_actor_creation_function_descriptor", None)
    name = cls.class_name if cls is not None else "Actor"
    return short_actor(name, handle._actor_id.hex())


def short_actor(name: str, actor_id: str) -> str:
    """``Worker(3f2a91)``."""
    return f"{name.rpartition('.')[2]}({actor_id[:6]})"


def methods_of(handle: Any) -> dict[str, inspect.Signature] | None:
    """How the methods of an actor are called, by name, less those of Ray and of this package.

    Returns:
        None where the handle does not tell.
    """
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
    """True for a method that is known to be a generator."""
    known = getattr(handle, "_ray_method_is_generator", None)
    return isinstance(known, dict) and bool(known.get(method))


def read_method(value: Any) -> tuple[Any, str] | None:
    """The actor's handle and the name of ``actor.method``; None for what is none, or does not tell."""
    if not isinstance(value, ActorMethod):
        return None
    handle, name = getattr(value, "_actor", None), getattr(value, "_method_name", None)
    return (handle, name) if isinstance(handle, ActorHandle) and isinstance(name, str) else None


def on_last_ref(ref: Any, callback: Callable[[], None]) -> bool:
    """Calls back when the last reference to a ref is gone anywhere, borrowers included; this process must own it.

    Returns:
        False where this Ray can't tell.
    """
    register = getattr(core_worker(), "add_object_out_of_scope_callback", None)
    if register is None:
        return False
    register(ref, lambda _: callback())
    return True


def cluster_client() -> Any:
    """This process's client of its cluster's key-value store; None where it is connected to no cluster."""
    return internal_kv.internal_kv_get_gcs_client()


def cluster_address(named: str) -> str:
    """The ``"host:port"`` of a cluster's control store, of a name for it that `ray.init` takes; asks nobody.

    Raises:
        ValueError: The name makes no sense.
        ConnectionError: It is ``"auto"``, and no cluster, or several, run here.
    """
    return str(services.canonicalize_bootstrap_address_or_die(named))


def read_cluster(address: str) -> tuple[Any, Any]:
    """A client of a cluster's key-value store, and one of its tables, without becoming a driver there.

    Raises:
        RayError, RuntimeError: Nobody answers there, or a Ray of another version.
    """
    raylet: Any = _raylet  # its types leave out what is used here
    client, state = raylet.GcsClient(address=address), GlobalState()
    options = raylet.GcsClientOptions.create(address, None, allow_cluster_id_nil=True, fetch_cluster_id_if_nil=False)
    state._initialize_global_state(options)
    return client, state
