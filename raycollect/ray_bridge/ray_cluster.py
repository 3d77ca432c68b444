"""The control store of a Ray cluster: its processes, its key-value store, its address."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray import _raylet
from ray._private import services
from ray._private.state import GlobalState, state
from ray.core.generated import gcs_pb2
from ray.exceptions import RayError
from ray.experimental import internal_kv

from raycollect.core import threads

_raylet_types: Any = _raylet  # its type stubs lack some names
_messages: Any = gcs_pb2  # their names are made when it is imported

NAMESPACE = b"raycollect"

ANSWER_S = 2.0
"""How long a lease waits for the control store, in seconds."""


def living_workers() -> frozenset[str]:
    """The `worker_id` of each living process. Ray does not mark those of a dead node, so its nodes are asked too."""
    table = map(_messages.WorkerTableData.FromString, state._connect_and_get_accessor().get_worker_table())
    nodes = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    return frozenset(
        worker.worker_address.worker_id.hex()
        for worker in table
        if worker.is_alive and worker.worker_address.node_id.hex() in nodes
    )


def has_restarted(actor_id: str) -> bool:
    """Whether Ray has restarted an actor; True if the control store does not answer in time."""
    try:
        asking = threads.call_in_helper(state.actor_table, actor_id)  # Ray sets no time limit
        return not threads.has_ended(asking, ANSWER_S) or bool(asking.result().get("NumRestarts"))
    except (RayError, RuntimeError):
        return True


class KeyValueStore:
    """The package's records in a cluster's key-value store.

    `timeout_s` limits the wait for an answer; None means Ray's own limit.

    Args:
        client: Ray's client of the cluster; by default that of this process.

    Attributes:
        is_connected: False if this process has no cluster.

    Raises:
        RayError, RuntimeError: By each method, if the store does not answer in time.
    """

    def __init__(self, client: Any = None) -> None:
        self._client = internal_kv.internal_kv_get_gcs_client() if client is None else client
        self.is_connected: bool = self._client is not None

    def put(self, key: bytes, value: bytes, *, overwrite: bool, timeout_s: float | None = None) -> bool:
        """Puts a value; False if the key had one, which stays unless `overwrite`."""
        return bool(self._client.internal_kv_put(key, value, overwrite, NAMESPACE, timeout=timeout_s))

    def get(self, key: bytes, *, timeout_s: float | None = None) -> bytes | None:
        """The value of a key."""
        value: bytes | None = self._client.internal_kv_get(key, NAMESPACE, timeout=timeout_s)
        return value

    def get_all(self, keys: Sequence[bytes], *, timeout_s: float | None = None) -> list[bytes | None]:
        """The values of several keys."""
        values = self._client.internal_kv_multi_get(list(keys), NAMESPACE, timeout=timeout_s)
        return [values.get(key) for key in keys]

    def keys(self, prefix: bytes, *, timeout_s: float | None = None) -> list[bytes]:
        """The keys with a prefix."""
        return list(self._client.internal_kv_keys(prefix, NAMESPACE, timeout=timeout_s))

    def delete(self, key: bytes, *, by_prefix: bool = False, timeout_s: float | None = None) -> None:
        """Deletes a key, or all keys with a prefix."""
        self._client.internal_kv_del(key, by_prefix, NAMESPACE, timeout=timeout_s)


class ClusterTables:
    """The tables of a cluster: its nodes, jobs and actors.

    Args:
        state: Ray's reader of the tables.

    Raises:
        RayError, RuntimeError: By each method, if the cluster does not answer.
    """

    def __init__(self, state: Any) -> None:
        self._state = state

    def living_nodes(self) -> int:
        """The number of living nodes."""
        return sum(bool(node["Alive"]) for node in self._state.node_table())

    def ended_jobs(self) -> set[str]:
        """The ids of jobs that have ended."""
        return {job["JobID"] for job in self._state.job_table() if job["IsDead"]}

    def actor(self, actor_id: str) -> Mapping[str, Any]:
        """Ray's ``State``, ``Pid`` and ``NumRestarts`` of an actor; empty if Ray does not know it any more."""
        row: Mapping[str, Any] = self._state.actor_table(actor_id)
        return row


def cluster_address(named: str) -> str:
    """The ``"host:port"`` of a cluster's control store, from a name that `ray.init` takes, without I/O.

    Raises:
        ValueError: The name makes no sense.
        ConnectionError: It is ``"auto"``, and no cluster, or several, run here.
    """
    return str(services.canonicalize_bootstrap_address_or_die(named))


def read_cluster(address: str) -> tuple[KeyValueStore, ClusterTables]:
    """Returns a cluster's key-value store and tables, without becoming a driver there.

    Raises:
        RayError, RuntimeError: No answer from there, or a Ray of another version.
    """
    store, reader = KeyValueStore(_raylet_types.GcsClient(address=address)), GlobalState()
    options = _raylet_types.GcsClientOptions.create(
        address, None, allow_cluster_id_nil=True, fetch_cluster_id_if_nil=False
    )
    reader._initialize_global_state(options)
    return store, ClusterTables(reader)
