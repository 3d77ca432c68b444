"""A rank's connection to the other members by `pygloo` or by xoscar's fork of it: gloo's calls, on numpy arrays.

Both libraries hold the GIL while they connect and while they block, and neither can be interrupted. pygloo 0.2.1 can't
be told a timeout (its binding lacks the conversion): there it is gloo's own 30 s.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from importlib import import_module
from typing import Any

from raycollect.contracts import Rendezvous
from raycollect.errors import BackendNotInstalledError, BackendUnavailableError, RaycollectError
from raycollect.model import GroupSpec, ReduceOp

from .arrays import Array

__all__ = ["GlooLibrary", "GlooLink", "is_native"]

CALL_TIMEOUT_S = 60.0
"""The library's own limit for one call, where it can be set: a peer died without closing its connection."""

LIBRARIES = ("pygloo", "xoscar.collective.xoscar_pygloo")
"""Modules to look for, in this order."""

NATIVE_DTYPES = {
    "int8": "glooInt8",
    "uint8": "glooUint8",
    "int32": "glooInt32",
    "uint32": "glooUint32",
    "int64": "glooInt64",
    "uint64": "glooUint64",
    "float32": "glooFloat32",
    "float64": "glooFloat64",
}
"""numpy's dtype -> gloo's, for those that it reduces as well as numpy does. Its float16 is left out: it rounds at each
step of the ring (seen at 8 ranks: up to 2.4 units in the last place, 0.5 by a fold in float32) and is slower."""

NATIVE_OPS = {
    ReduceOp.SUM: "SUM",
    ReduceOp.PRODUCT: "PRODUCT",
    ReduceOp.MIN: "MIN",
    ReduceOp.MAX: "MAX",
    ReduceOp.AVG: "SUM",
}

ORDERED = frozenset({ReduceOp.MIN, ReduceOp.MAX})
"""Where floats are left to numpy: gloo's comparison keeps a NaN or loses it, as its place in the ring has it."""


def is_native(op: ReduceOp, dtype: str) -> bool:
    """Tells whether gloo itself reduces elements of that dtype, with numpy's meaning."""
    return dtype in NATIVE_DTYPES and op in NATIVE_OPS and not (op in ORDERED and dtype.startswith("float"))


class GlooLibrary:
    """The names that differ between the two libraries.

    Attributes:
        name: The module's name.
        module: The module.
        dtypes: Its enum of element types.
        ring: Its ring algorithm.
    """

    def __init__(self, name: str, module: Any) -> None:
        self.name = name
        self.module = module
        self.dtypes: Any = getattr(module, "glooDataType_t", None) or module.GlooDataType_t
        self.ring: Any = (getattr(module, "allreduceAlgorithm", None) or module.AllreduceAlgorithm).RING

    @classmethod
    def load(cls, group_name: str) -> GlooLibrary:
        """Imports whichever library there is.

        Raises:
            BackendNotInstalledError: There is none; what each import said is in the text.
        """
        said = []
        for name in LIBRARIES:
            try:
                return cls(name, import_module(name))
            except ImportError as exc:
                said.append(f"{name}: {exc}")
        raise BackendNotInstalledError(group_name=group_name, detail="backend 'gloo': " + "; ".join(said))


class _Store:
    """Our rendezvous as gloo's store. Each key is set by one rank and read by the others.

    pygloo calls `set` and `get`, xoscar `set_tcp` and `get_tcp`; both call `wait` with a list of keys before `get`.
    """

    def __init__(self, rendezvous: Rendezvous, timeout_s: float) -> None:
        self._rendezvous = rendezvous
        self._timeout_s = timeout_s

    def set(self, key: str, data: bytes) -> bool:
        """Publishes a key."""
        self._rendezvous.put(f"gloo.key.{key}", bytes(data))
        return True

    def get(self, key: str) -> bytes:
        """Waits for a key."""
        return self._rendezvous.get(f"gloo.key.{key}", self._timeout_s)

    def wait(self, keys: Sequence[str], timeout: Any = None) -> bool:
        """Waits for keys."""
        for key in keys:
            self.get(key)
        return True

    set_tcp = set  # noqa: A003
    get_tcp = get


class GlooLink:
    """One rank's connections; all arrays are contiguous.

    Each call blocks until this rank's part is done. A send waits until the peer receives, whatever its size: two ranks
    that both send first wait for ever.

    Args:
        library: The library.
        spec: The group, of two ranks or more, which all come now.
        rank: This process's rank.
        rendezvous: How the members find each other.
        host: The address to listen on.
        timeout_s: How long to wait for a member's address.

    Raises:
        BackendUnavailableError: The members can't connect.
    """

    def __init__(
        self, library: GlooLibrary, spec: GroupSpec, rank: int, rendezvous: Rendezvous, *, host: str, timeout_s: float
    ) -> None:
        self._gloo = gloo = library.module
        self._library = library
        self._uint8 = library.dtypes.glooUint8
        try:
            self._context = gloo.rendezvous.Context(rank, spec.world_size)
            try:
                self._context.setTimeout(timedelta(seconds=CALL_TIMEOUT_S))
            except TypeError:  # pygloo 0.2.1 has the method, but not the conversion of its argument
                pass
            store = _Store(rendezvous, timeout_s)
            theirs = gloo.rendezvous.CustomStore(store)
            device = gloo.transport.tcp.CreateDevice(gloo.transport.tcp.attr(host))
            self._context.connectFullMesh(theirs, device)
        except RaycollectError:
            raise
        except Exception as exc:
            detail = f"backend 'gloo': rank {rank} can't connect to the others from {host}: {exc}"
            raise BackendUnavailableError(group_name=spec.name, detail=detail) from exc
        self._held = store, theirs, device  # the context needs them and does not hold them

    def allreduce(self, op: ReduceOp, own: Array, out: Array) -> None:
        """Reduces by gloo's ring; both [n], a native dtype; AVG gives the sum."""
        dtype, reduce_by = self._native(op, own)
        self._gloo.allreduce(
            self._context, _pointer(own), _pointer(out), own.size, dtype, reduce_by, self._library.ring
        )

    def reduce(self, op: ReduceOp, own: Array, out: Array, root: int) -> None:
        """Reduces to the root; `out` is the library's to write on all ranks."""
        dtype, reduce_by = self._native(op, own)
        self._gloo.reduce(self._context, _pointer(own), _pointer(out), own.size, dtype, reduce_by, root)

    def broadcast(self, array: Array, root: int) -> None:
        """Moves the root's bytes to all."""
        pointer = _pointer(array)
        self._gloo.broadcast(self._context, pointer, pointer, array.nbytes, self._uint8, root)

    def allgather(self, own: Array, everyone: Array) -> None:
        """Brings all ranks' bytes to all: `own` is [n], `everyone` [world_size, n]."""
        self._gloo.allgather(self._context, _pointer(own), _pointer(everyone), own.nbytes, self._uint8)

    def send(self, array: Array, peer: int) -> None:
        """Sends bytes."""
        self._gloo.send(self._context, _pointer(array), array.nbytes, self._uint8, peer)

    def recv(self, array: Array, peer: int) -> None:
        """Receives bytes."""
        self._gloo.recv(self._context, _pointer(array), array.nbytes, self._uint8, peer)

    def barrier(self) -> None:
        """Waits for all."""
        self._gloo.barrier(self._context)

    def close(self) -> None:
        """Closes the connections."""
        self._context.closeConnections()

    def _native(self, op: ReduceOp, array: Array) -> tuple[Any, Any]:
        dtype = getattr(self._library.dtypes, NATIVE_DTYPES[array.dtype.name])
        return dtype, getattr(self._gloo.ReduceOp, NATIVE_OPS[op])


def _pointer(array: Array) -> int:
    return int(array.__array_interface__["data"][0])
