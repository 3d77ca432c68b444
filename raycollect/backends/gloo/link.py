"""A rank's connections by `pygloo` or by xoscar's fork of it: gloo's calls, on numpy arrays.

Both libraries hold the GIL while they connect and while they block, and neither can be interrupted. pygloo 0.2.1 has no
working timeout (its binding lacks the conversion): gloo's own 30 s apply. torch's gloo is handled by `torch_dist`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from importlib.util import find_spec
from typing import Any

from raycollect.backends.arrays import Array
from raycollect.backends.capabilities import has_torch_gloo
from raycollect.backends.loading import XOSCAR_GLOO, load_library
from raycollect.backends.meshed import is_as_numpy
from raycollect.core.model import GroupSpec, ReduceOp
from raycollect.core.protocols import Rendezvous
from raycollect.errors import BackendNotInstalledError, BackendUnavailableError, RaycollectError

TORCH = "torch"  # Stands for torch's own gloo
LIBRARIES = ("pygloo", XOSCAR_GLOO, TORCH)  # Modules to look for, in this order
# numpy's dtype -> gloo's, where gloo reduces as well as numpy. float16 is left out: gloo rounds at each step of the
# ring (seen at 8 ranks: up to 2.4 units in the last place, 0.5 by a fold in float32) and is slower.
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

NATIVE_OPS = {
    ReduceOp.SUM: "SUM",
    ReduceOp.PRODUCT: "PRODUCT",
    ReduceOp.MIN: "MIN",
    ReduceOp.MAX: "MAX",
    ReduceOp.AVG: "SUM",
}


def is_native(op: ReduceOp, dtype: str) -> bool:
    """Tells whether gloo itself reduces elements of that dtype, with numpy's semantics."""
    return dtype in NATIVE_DTYPES and is_as_numpy(op, dtype)


class GlooLibrary:
    """The names that differ between the two libraries."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.dtypes: Any = getattr(module, "glooDataType_t", None) or module.GlooDataType_t
        self.ring: Any = (getattr(module, "allreduceAlgorithm", None) or module.AllreduceAlgorithm).RING

    @staticmethod
    def found(group_name: str) -> list[str]:
        """Names the installed libraries, in the order of `LIBRARIES`; imports torch only if there is no other.

        Raises:
            BackendNotInstalledError: There is none; the text has each import error.
        """
        there: list[str] = []
        said = []
        for name in LIBRARIES:
            try:
                if name != TORCH:
                    load_library(name)
                elif find_spec(name) is None or not (there or has_torch_gloo()):
                    raise ImportError("not installed, or without gloo")
                there.append(name)
            except (ImportError, OSError) as exc:
                said.append(f"{name}: {exc}")
        if not there:
            raise BackendNotInstalledError(group_name=group_name, detail="backend 'gloo': " + "; ".join(said))
        return there


class _Store:
    """The rendezvous as gloo's store. Each key is set by one rank and read by the others.

    pygloo calls `set` and `get`, xoscar `set_tcp` and `get_tcp`; both call `wait` with a list of keys before `get`.
    """

    def __init__(self, rendezvous: Rendezvous, timeout_s: float) -> None:
        self._rendezvous = rendezvous
        self._timeout_s = timeout_s

    def set(self, key: str, data: bytes) -> bool:
        self._rendezvous.put(f"gloo.key.{key}", bytes(data))
        return True

    def get(self, key: str) -> bytes:
        return self._rendezvous.get(f"gloo.key.{key}", self._timeout_s)

    def wait(self, keys: Sequence[str], timeout: Any = None) -> bool:
        for key in keys:
            self.get(key)
        return True

    set_tcp = set  # noqa: A003
    get_tcp = get


class GlooLink:
    """One rank's connections; all arrays are contiguous, and each call blocks until this rank's part is done.

    Creating it blocks until all ranks connect, and raises BackendUnavailableError if they can't.
    """

    def __init__(
        self, library: GlooLibrary, spec: GroupSpec, rank: int, rendezvous: Rendezvous, *, host: str, timeout_s: float
    ) -> None:
        self._gloo = gloo = library.module
        self._library = library
        self._uint8 = library.dtypes.glooUint8
        try:
            self._context = gloo.rendezvous.Context(rank, spec.world_size)
            self.limit(timeout_s)
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
        self._is_open = True

    def limit(self, timeout_s: float) -> None:
        """Limits each wait for another rank from now on, where the library can."""
        with suppress(TypeError):  # pygloo 0.2.1 has the method, but not the conversion of its argument
            self._context.setTimeout(timedelta(seconds=timeout_s))

    def allreduce(self, op: ReduceOp, own: Array, out: Array) -> None:
        """Reduces by gloo's ring; both arrays are [n] of a native dtype; AVG gives the sum."""
        dtype, reduce_by = self._native(op, own)
        self._gloo.allreduce(
            self._context, _pointer(own), _pointer(out), own.size, dtype, reduce_by, self._library.ring
        )

    def reduce(self, op: ReduceOp, own: Array, out: Array, root: int) -> None:
        """Reduces to the root; the library may write `out` on all ranks."""
        dtype, reduce_by = self._native(op, own)
        self._gloo.reduce(self._context, _pointer(own), _pointer(out), own.size, dtype, reduce_by, root)

    def broadcast(self, array: Array, root: int) -> None:
        """Copies the root's bytes to all."""
        pointer = _pointer(array)
        self._gloo.broadcast(self._context, pointer, pointer, array.nbytes, self._uint8, root)

    def close(self) -> None:
        """Closes the connections; may be called twice."""
        is_open, self._is_open = self._is_open, False
        if is_open:
            self._context.closeConnections()

    def _native(self, op: ReduceOp, array: Array) -> tuple[Any, Any]:
        dtype = getattr(self._library.dtypes, NATIVE_DTYPES[array.dtype.name])
        return dtype, getattr(self._gloo.ReduceOp, NATIVE_OPS[op])


def _pointer(array: Array) -> int:
    return int(array.__array_interface__["data"][0])
