"""What the package uses of Ray beyond its public API is as it expects; docs/adr/0001-ray-internals.md says what for."""

from __future__ import annotations

import ast
import inspect
import pkgutil
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import ray
from ray import _raylet
from ray.actor import ActorHandle

from raycollect.ray_bridge import ray_actors, ray_refs, serialization, submitted_calls
from tests.support.sources import PACKAGE, trees

BRIDGE = PACKAGE / "ray_bridge"
TESTS = Path(__file__).parents[2]
PAGE = PACKAGE.parent / "docs/adr/0001-ray-internals.md"

THERE, SET, FIELD = "exists", "is set by the source of its class, function or module", "is a field of the message"

INTERNALS = {
    # what this process is
    "ray._private.worker.global_worker": THERE,
    "ray._private.worker.global_worker.connected": THERE,
    "ray._private.worker.global_worker.core_worker": SET,
    "ray._private.worker.global_worker.mode": THERE,
    "ray._raylet.CoreWorker.current_actor_is_asyncio": "self",
    "ray._raylet.CoreWorker.current_actor_max_concurrency": "self",
    "ray._raylet.CoreWorker.get_actor_handle": "self, actor_id",
    "ray._raylet.CoreWorker.get_actor_id": "self",
    "ray._raylet.CoreWorker.get_current_task_function_name": "self",
    "ray._raylet.CoreWorker.get_current_task_id": "self",
    "ray._raylet.StreamingGeneratorExecutionContext": THERE,
    "ray.actor._modify_class.__ray_actor_class__": SET,
    "ray.actor.method.__ray_concurrency_group__": SET,
    "ray.actor.method.__ray_num_returns__": SET,
    "ray.core.generated.core_worker_pb2.ActorHandle": THERE,
    "ray.core.generated.core_worker_pb2.ActorHandle.owner_address": FIELD,
    "ray.util.client.ray": THERE,
    "ray.util.client.ray.is_connected": THERE,
    # handles and their methods
    "ray._raylet.CoreWorker.get_local_actor_state": "self, actor_id",
    "ray._raylet.CoreWorker.serialize_actor_handle": "self, actor_id",
    "ray.actor.ActorHandle._actor_id": THERE,
    "ray.actor.ActorHandle._deserialization_helper": "state, weak_ref, outer_object_ref",
    "ray.actor.ActorHandle._ray_actor_creation_function_descriptor": SET,
    "ray.actor.ActorHandle._ray_actor_id": SET,
    "ray.actor.ActorHandle._ray_allow_out_of_order_execution": SET,
    "ray.actor.ActorHandle._ray_enable_tensor_transport": SET,
    "ray.actor.ActorHandle._ray_method_is_generator": SET,
    "ray.actor.ActorHandle._ray_method_signatures": SET,
    "ray.actor.ActorHandle._ray_weak_ref": SET,
    "ray.actor.ActorMethod._actor": SET,
    "ray.actor.ActorMethod._max_task_retries": SET,
    "ray.actor.ActorMethod._method_name": SET,
    "ray.actor.ActorMethod._retry_exceptions": SET,
    "ray.actor.ActorMethod._tensor_transport": SET,
    # hooks
    "ray.actor.ActorClass.__ray_metadata__": SET,
    "ray.actor.ActorClass._remote": "self, args, kwargs, actor_options",
    "ray.actor.ActorHandle._actor_method_call": (
        "self, method_name, args, kwargs, name, num_returns, max_task_retries, retry_exceptions, "
        "concurrency_group_name, generator_backpressure_num_objects, num_objects_per_yield, enable_task_events, "
        "tensor_transport, labels"
    ),
    "ray.remote_function.RemoteFunction._function_name": SET,
    "ray.remote_function.RemoteFunction._remote": "self, args, kwargs, serialized_runtime_env_info, task_options",
    "ray._raylet.ObjectRefGenerator._generator_ref": "an attribute of its own",
    "ray.util.tracing.tracing_helper._ray_trace_ctx": "a parameter that Ray adds to methods",
    # refs and values
    "ray._private.ray_constants.OBJECT_METADATA_TYPE_PYTHON": THERE,
    "ray._private.serialization.SerializationContext": THERE,
    "ray._private.serialization.SerializationContext._rdt_custom_serializer_registered": SET,
    "ray._private.serialization.SerializationContext._thread_local": SET,
    "ray._private.serialization.SerializationContext.serialize": "self, value",
    "ray._private.serialization.SerializationContext.use_external_transport": SET,
    "ray._private.serialization._object_ref_deserializer": (
        "binary, call_site, owner_address, object_status, tensor_transport"
    ),
    "ray._private.worker.Worker.deserialize_objects": "self, serialized_objects, object_refs, rdt_objects",
    "ray._private.worker.Worker.get_serialization_context": "self",
    "ray._raylet.CoreWorker.add_object_out_of_scope_callback": "self, object_ref, callback",
    "ray._raylet.CoreWorker.get_objects": "self, object_refs, timeout_ms",
    "ray._raylet.CoreWorker.serialize_object_ref": "self, object_ref",
    "ray._raylet.MessagePackSerializedObject": THERE,
    "ray._raylet.MessagePackSerializer": THERE,
    "ray._raylet.MessagePackSerializer.dumps": "o, python_serializer",
    "ray._raylet.ObjectRef._on_completed": "self, py_callback",
    "ray._raylet.ObjectRef.tensor_transport": "self",
    "ray._raylet.Pickle5SerializedObject": THERE,
    "ray._raylet.Pickle5Writer": THERE,
    "ray._raylet.RawSerializedObject": THERE,
    "ray._raylet.SerializedObject": THERE,
    "ray.get": "object_refs, timeout, _use_object_store",
    # the control store
    "ray._private.services.canonicalize_bootstrap_address_or_die": "addr, temp_dir",
    "ray._private.state.GlobalState": THERE,
    "ray._private.state.GlobalState._connect_and_get_accessor": "self",
    "ray._private.state.GlobalState._initialize_global_state": "self, gcs_options",
    "ray._private.state.GlobalState.actor_table": "self, actor_id, job_id, actor_state_name",
    "ray._private.state.GlobalState.job_table": "self",
    "ray._private.state.GlobalState.node_table": "self",
    "ray._private.state.state": THERE,
    "ray._raylet.GcsClient": THERE,
    "ray._raylet.GcsClientOptions": THERE,
    "ray._raylet.GcsClientOptions.create": (
        "gcs_address, cluster_id_hex, allow_cluster_id_nil, fetch_cluster_id_if_nil"
    ),
    "ray._raylet.GlobalStateAccessor.get_worker_table": "self",
    "ray._raylet.InnerGcsClient.internal_kv_del": "self, key, del_by_prefix, namespace, timeout",
    "ray._raylet.InnerGcsClient.internal_kv_get": "self, key, namespace, timeout",
    "ray._raylet.InnerGcsClient.internal_kv_keys": "self, prefix, namespace, timeout",
    "ray._raylet.InnerGcsClient.internal_kv_multi_get": "self, keys, namespace, timeout",
    "ray._raylet.InnerGcsClient.internal_kv_put": "self, key, value, overwrite, namespace, timeout",
    "ray.core.generated.common_pb2.Address.node_id": FIELD,
    "ray.core.generated.common_pb2.Address.worker_id": FIELD,
    "ray.core.generated.gcs_pb2.WorkerTableData": THERE,
    "ray.core.generated.gcs_pb2.WorkerTableData.is_alive": FIELD,
    "ray.core.generated.gcs_pb2.WorkerTableData.worker_address": FIELD,
    "ray.experimental.internal_kv.internal_kv_get_gcs_client": "",
}
"""What is used of Ray -> the parameters of a function, or how else it is known to be there."""

PRIVATE_MODULES = re.compile(r"ray\.(_|core\b|experimental\.internal_kv\b|util\.client\b)")
PUBLIC = {"FromString", "ag_frame", "gi_frame", "hex", "register_at_fork", "shutdown"}
PUBLIC |= {"__cause__", "__version__", "__weakref__"}


def is_set(owner: object, name: str) -> bool:
    """Whether the source of a class, of a function, or of an instance's module assigns to an attribute."""
    if inspect.isclass(owner) or inspect.isfunction(owner):
        source = inspect.getsource(owner)
    else:
        source = inspect.getsource(pkgutil.resolve_name(type(owner).__module__))
    return any(
        isinstance(node, (ast.Attribute, ast.Name))
        and isinstance(node.ctx, ast.Store)
        and name == (node.attr if isinstance(node, ast.Attribute) else node.id)
        for node in ast.walk(ast.parse(source))
    )


def takes_trace_argument() -> bool:
    """Whether Ray adds an argument to the methods of actors."""

    class Actor:
        def method(self) -> None: ...

    method = ray.remote(Actor).__ray_metadata__.modified_class.method
    return "_ray_trace_ctx" in inspect.signature(method).parameters


@pytest.mark.parametrize(("path", "expected"), INTERNALS.items(), ids=INTERNALS)
def test_ray_is_as_the_package_expects(path: str, expected: str) -> None:
    owner, _, name = path.rpartition(".")
    if expected == SET:
        assert is_set(pkgutil.resolve_name(owner), name)
    elif expected == FIELD:
        assert name in pkgutil.resolve_name(owner).DESCRIPTOR.fields_by_name
    elif name == "_generator_ref":
        assert pkgutil.resolve_name(owner)("a ref", Mock())._generator_ref == "a ref"
    elif name == "_ray_trace_ctx":
        assert takes_trace_argument()
    elif expected == THERE:
        pkgutil.resolve_name(path)
    else:
        assert ", ".join(inspect.signature(pkgutil.resolve_name(path)).parameters) == expected


def test_ids_have_the_layout_that_the_package_reads() -> None:
    """`tests/ray/test_collectives.py` reads refs of methods; `test_refusals.py` those of `ray.put` and of tasks."""
    assert (ray.ObjectRef.size(), ray.TaskID.size(), ray.ActorID.size(), ray.JobID.size()) == (28, 24, 16, 4)
    job = ray.JobID.from_int(7)
    actor = ray.ActorID.of(job, ray.TaskID.for_driver_task(job), 1)
    assert actor.binary()[12:] == job.binary()
    assert ray.TaskID.for_actor_creation_task(actor).binary()[8:] == actor.binary()
    assert ray.ActorID.nil().binary()[:12] == b"\xff" * 12


def test_the_states_of_an_actor_that_is_not_made_yet() -> None:
    states = pkgutil.resolve_name("ray.core.generated.gcs_pb2").ActorTableData
    assert (states.DEPENDENCIES_UNREADY, states.PENDING_CREATION) == ray_actors.UNMADE


# ---------------------------------------------------------------------------------------- the table and the sources


@cache
def imports(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """The names that a file imports, as it calls them, and where they come from."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((one.asname or "", one.name) for one in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((one.asname or one.name, f"{node.module}.{one.name}") for one in node.names)


def dotted(node: ast.expr, known: dict[str, str]) -> str:
    """The path in Ray of an expression such as `_raylet.GcsClient`; empty for others."""
    if isinstance(node, ast.Attribute):
        owner = dotted(node.value, known)
        return f"{owner}.{node.attr}" if owner else ""
    if isinstance(node, ast.Call):
        return "ray._raylet.CoreWorker" if getattr(node.func, "id", "") == "core_worker" else ""
    return known.get(node.id, "") if isinstance(node, ast.Name) else ""


def defined(folder: Path) -> set[str]:
    """The names of functions, classes and attributes that a folder of the package defines."""
    found = set[str]()
    for tree in trees(folder).values():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "self":
                found.add(node.attr)
    return found


def looked_up(tree: ast.Module) -> Iterator[str]:
    """The names that a file looks up, hooks or deletes by strings."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr", "setattr", "hook"):
            yield from (one.value for one in node.args[1:2] if isinstance(one, ast.Constant))
        elif isinstance(node, ast.Constant) and re.fullmatch(r"_+(?!_*raycollect)[a-z][a-z_]*", str(node.value)):
            yield node.value


def reached(tree: ast.Module) -> set[str]:
    """The last parts of the paths of what a file reaches of Ray's internals, as far as its text shows them."""
    own = defined(BRIDGE) | defined(PACKAGE / "core")
    known = {name: path for name, path in imports(tree) if path.startswith("ray.") and name} | {"ray": "ray"}
    known |= {"global_worker": "ray._private.worker.global_worker"}
    found = {path for _, path in imports(tree) if PRIVATE_MODULES.match(path)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name) and PRIVATE_MODULES.match(path := dotted(node.value, known)):
                    known[target.id] = path
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        path = dotted(node, known)
        is_private = node.attr.startswith(("_", "internal_kv")) and node.attr not in own
        if PRIVATE_MODULES.match(path) or (is_private and getattr(node.value, "id", "") not in ("self", "cls")):
            found.add(path or node.attr)
    names = {path.rpartition(".")[2] for path in found if not is_module(path)}
    return {name for name in names | (set(looked_up(tree)) - own) if name not in PUBLIC and not hasattr(object, name)}


def is_module(path: str) -> bool:
    try:
        return inspect.ismodule(pkgutil.resolve_name(path))
    except (AttributeError, ImportError, ValueError):
        return False


LAST_PARTS = {path.rpartition(".")[2] for path in INTERNALS}


def test_what_a_file_reaches_is_found() -> None:
    text = """
from ray import _raylet
from ray._private import worker
types: Any = _raylet
ours = types.First, core_worker().second(), worker.global_worker.third, one._fourth, getattr(one, "_fifth", None)
"""
    assert reached(ast.parse(text)) == {"First", "second", "global_worker", "third", "_fourth", "_fifth"}


def test_the_bridge_uses_nothing_else() -> None:
    found = {file: reached(tree) - LAST_PARTS for file, tree in trees(BRIDGE).items()}
    assert {file: names for file, names in found.items() if names} == {}


def test_all_internals_are_used_and_described() -> None:
    used = set[str]()
    for tree in trees(BRIDGE).values():
        for node in ast.walk(tree):
            used |= {getattr(node, name, "") for name in ("attr", "id", "name", "arg") if hasattr(node, name)}
            used |= set(re.findall(r"\w+", node.value)) if isinstance(getattr(node, "value", None), str) else set()
    assert LAST_PARTS - used == set()
    page = PAGE.read_text()
    assert LAST_PARTS - set(re.findall(r"\w+", page)) == set()
    tests = "".join(f"{path.stem}\n{path.read_text()}" for path in TESTS.rglob("test_*.py"))
    assert set(re.findall(r"\btest_\w+", page)) - set(re.findall(r"\btest_\w+", tests)) == set()


def test_only_the_bridge_uses_internals() -> None:
    """But for ``__ray_call__``, which others only call."""
    found = []
    for file, tree in trees(PACKAGE).items():
        if file.startswith("ray_bridge/"):
            continue
        found += [f"{file}: {path}" for _, path in imports(tree) if PRIVATE_MODULES.match(path)]
        for node in ast.walk(tree):
            names = [getattr(node, "attr", ""), node.value if isinstance(node, ast.Constant) else ""]
            found += [f"{file}: {one}" for one in names if is_of_ray(one)]
    assert found == []


def is_of_ray(name: object) -> bool:
    return (
        name != "__ray_call__" and isinstance(name, str) and bool(re.fullmatch(r"_ray_\w+|__ray_\w+|_actor_id", name))
    )


# ---------------------------------------------------------------------------------------- an older or a newer Ray


def test_without_the_hook_calls_are_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans in program order are actor tasks then."""
    monkeypatch.delattr(ActorHandle, "_actor_method_call")
    assert not submitted_calls.see_calls()
    assert submitted_calls.watch(SimpleNamespace(_actor_id=b"any")) is None


@pytest.mark.parametrize("missing", ["RawSerializedObject", "MessagePackSerializedObject", "Pickle5Writer"])
def test_without_the_forms_ray_pickles(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    class Value:
        pass

    assert serialization.take_over(Value, lambda value: None)
    monkeypatch.delattr(_raylet, missing)
    assert not serialization.take_over(Value, lambda value: None)


def test_without_the_callback_the_end_of_refs_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """`tests/ray/test_store.py` shows that a store is bounded then."""
    monkeypatch.setattr("ray._private.worker.global_worker.core_worker", SimpleNamespace(), raising=False)
    assert not ray_refs.on_last_ref(object(), lambda: None)


def test_without_the_context_it_is_not_known_whether_a_generator_is_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    frame = inspect.currentframe()
    assert frame is not None
    assert ray_actors.is_streamed(frame) is False
    monkeypatch.delattr(_raylet, "StreamingGeneratorExecutionContext")
    assert ray_actors.is_streamed(frame) is None


def test_a_handle_without_names_and_signatures() -> None:
    handle = SimpleNamespace(_actor_id=bytes.fromhex("3f2a91" + "00" * 13))
    assert ray_actors.describe_actor(handle) == "Actor(3f2a91)"
    assert ray_actors.methods_of(handle) is None
    assert not ray_actors.is_generator(handle, "method")
