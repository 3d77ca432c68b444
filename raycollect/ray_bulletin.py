"""The bulletin of a Ray job: records in Ray's internal key-value store, under the job's id."""

from __future__ import annotations

import ray
from ray.experimental import internal_kv

from raycollect import ray_internals

_NAMESPACE = b"raycollect"


class RayBulletin:
    """See `raycollect.bulletin.Bulletin`. Names of two jobs never meet."""

    def __init__(self) -> None:
        self.host: str = ray_internals.node_address()
        self._job = ray.get_runtime_context().get_job_id()

    def post(self, name: str, record: bytes) -> bool:
        """Posts a record where there is none of that name."""
        # Ray answers whether the key was there before.
        return not internal_kv._internal_kv_put(self._key(name), record, overwrite=False, namespace=_NAMESPACE)

    def replace(self, name: str, record: bytes) -> None:
        """Posts a record in the place of another."""
        internal_kv._internal_kv_put(self._key(name), record, overwrite=True, namespace=_NAMESPACE)

    def read(self, name: str) -> bytes | None:
        """The record of that name."""
        record: bytes | None = internal_kv._internal_kv_get(self._key(name), namespace=_NAMESPACE)
        return record

    def remove(self, name: str, record: bytes) -> None:
        """Takes a record away, unless it was replaced."""
        if self.read(name) == record:
            internal_kv._internal_kv_del(self._key(name), namespace=_NAMESPACE)

    def _key(self, name: str) -> bytes:
        return f"group/{self._job}/{name}".encode()
