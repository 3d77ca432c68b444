"""The bootstrap store of a Ray job: records in Ray's internal key-value store."""

from __future__ import annotations

from contextlib import suppress

import ray

from raycollect.errors import InvalidGroupError
from raycollect.group.bootstrap_store import LeaderRecord
from raycollect.ray_bridge import ray_session
from raycollect.ray_bridge.ray_cluster import NAMESPACE, KeyValueStore


class RayBootstrapStore:
    """A `BootstrapStore` in which names are unique per job and per process that created the members.

    Args:
        owner: Ray's id of the process that created the members. Empty: members of the job share names, whichever
            process created them.
    """

    def __init__(self, owner: str) -> None:
        self.host: str = ray_session.node_address()
        self._store = KeyValueStore()
        self._job = ray.get_runtime_context().get_job_id()
        self._owner = owner

    def post(self, name: str, record: bytes, *, replace: bool = False) -> bool:
        """Posts a record; False if that name has one, and `replace` is False."""
        return self._store.put(self._key(name), record, overwrite=replace) or replace

    def read(self, name: str) -> bytes | None:
        """The record of that name."""
        return self._store.get(self._key(name))

    def remove(self, name: str) -> None:
        """Removes the record of that name."""
        self._store.delete(self._key(name))

    def where(self, name: str) -> str:
        """The key of the record."""
        return f"the key {self._key(name)!r} of namespace {NAMESPACE!r} in Ray's internal key-value store"

    def elsewhere(self, name: str) -> str:
        """The leader of a group of this name whose members another process created; empty if there is no such group."""
        for key in map(bytes.decode, self._store.keys(f"group/{self._job}/".encode())):
            _, _, owner, its_name = key.split("/", 3)
            if its_name == name and owner != self._owner:
                record = self._store.get(key.encode())
                with suppress(InvalidGroupError):
                    return LeaderRecord.from_bytes(record).who if record else ""
        return ""

    def _key(self, name: str) -> bytes:
        return f"group/{self._job}/{self._owner}/{name}".encode()
