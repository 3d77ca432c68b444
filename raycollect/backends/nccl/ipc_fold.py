"""Folds on a GPU: the elements of all ranks at once, in rank order, by one kernel that cupy compiles.

A kernel reads one element of each rank, folds them in registers, and writes the result to all targets: for w ranks w
reads and, in an allreduce, w writes per element, the minimum of memory traffic. Narrow floats are folded in float32 and
rounded once, so the bits are those of `folds.fold`, which defines them.

The operations use only what C++ and Python have in common, functional casts and no statements but assignments, so that
a fake of cupy can run them unchanged. Floats of 8 bits use tables, which `ml_dtypes` fills. Rounding to such a float
uses the upper half of a float32 with its last bit set if the lower half is not zero ("round to odd"): this keeps all
information that matters for a result that is shorter by at least two bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np

from raycollect.backends.elements import NARROW
from raycollect.backends.nccl.ops import combiner
from raycollect.backends.nccl.ops import fold as fold_rows
from raycollect.core.model import ReduceOp

AT_ONCE = 16  # The most ranks that one kernel reads and targets that it writes: its arguments have 4 KB
_PREAMBLE = """
template <typename T> __device__ T lesser_of(T a, T b) { return (a < b) || (a != a) ? a : b; }
template <typename T> __device__ T greater_of(T a, T b) { return (a > b) || (a != a) ? a : b; }
__device__ float from_bfloat16(unsigned short a) { return __uint_as_float(unsigned(a) << 16); }
__device__ unsigned odd(float a) { return (__float_as_uint(a) >> 16) | unsigned((__float_as_uint(a) & 0xffff) != 0); }
__device__ unsigned even(unsigned a) { return (a + 0x7fff + ((a >> 16) & 1)) >> 16; }
__device__ unsigned short to_bfloat16(float a) { return a != a ? 0x7fc0 : even(__float_as_uint(a)); }
"""

# Reduce op -> how two ranks' elements become one
_COMBINE = {
    ReduceOp.SUM: "({} + {})",
    ReduceOp.AVG: "({} + {})",
    ReduceOp.PRODUCT: "({} * {})",
    ReduceOp.MIN: "lesser_of({}, {})",
    ReduceOp.MAX: "greater_of({}, {})",
    ReduceOp.BAND: "({} & {})",
    ReduceOp.BOR: "({} | {})",
    ReduceOp.BXOR: "({} ^ {})",
}

# The exceptions for bools
_BOOL_COMBINE = {
    ReduceOp.SUM: "({} | {})",
    ReduceOp.PRODUCT: "({} & {})",
    ReduceOp.MIN: "({} & {})",
    ReduceOp.MAX: "({} | {})",
}

_PARTS = {"complex64": "float32", "complex128": "float64"}  # Complex types, whose sums are those of their parts


class _Type(NamedTuple):
    """How elements of a type are folded."""

    name: str  # cupy's name of the type in a kernel
    wide: str  # the type of the fold, in cupy
    number: str  # the same in C++
    into: str = "{}"  # converts an element to that
    back: str = "{}"  # converts the result back


_TYPES = {
    "float16": _Type("float16", "float32", "float", "float({})", "float16({})"),
    "bfloat16": _Type("uint16", "float32", "float", "from_bfloat16({})", "to_bfloat16({})"),
    "float32": _Type("float32", "float32", "float"),
    "float64": _Type("float64", "float64", "double"),
}

_FLOAT8 = _Type("uint8", "float32", "float", "wide_of[{}]", "short_of[odd({})]")
_TABLES = ", raw float32 wide_of, raw uint8 short_of"


def _type_of(dtype: np.dtype[Any]) -> _Type:
    if dtype in NARROW and dtype.itemsize == 1:
        return _FLOAT8
    return _TYPES.get(dtype.name) or _Type(dtype.name, dtype.name, dtype.name)


class Folder:
    """Folds on the GPU `device`, its number in this process."""

    def __init__(self, device: int) -> None:
        self._cupy = import_module("cupy")
        self._device = device
        self._tables: dict[str, tuple[Any, Any]] = {}

    def row(self, address: int, nbytes: int, dtype: np.dtype[Any]) -> Any:
        """Views memory as a cupy array, [n]; does not keep the memory alive."""
        memory = self._cupy.cuda.UnownedMemory(address, nbytes, None, self._device)
        pointer = self._cupy.cuda.MemoryPointer(memory, 0)
        return self._cupy.ndarray((nbytes // dtype.itemsize,), dtype, memptr=pointer)

    def copy(self, to: int, source: int, nbytes: int) -> None:
        """Enqueues a copy on cupy's current stream."""
        runtime = self._cupy.cuda.runtime
        if nbytes and to != source:
            stream = self._cupy.cuda.get_current_stream().ptr
            runtime.memcpyAsync(to, source, nbytes, runtime.memcpyDeviceToDevice, stream)

    def fold(
        self, op: ReduceOp, dtype: np.dtype[Any], sources: Sequence[int], targets: Sequence[int], nbytes: int
    ) -> None:
        """Enqueues a fold on cupy's current stream.

        `sources` are the addresses of the ranks' elements, in rank order, of `nbytes` each; `targets`, those of the
        result, may be among them. `op` must be valid for the dtype.
        """
        if not nbytes:
            return
        if len(sources) == 1:
            for target in targets:
                self.copy(target, sources[0], nbytes)
            return
        if dtype.kind == "c" and op is ReduceOp.PRODUCT:
            self._times(dtype, sources, targets, nbytes)
            return
        dtype = np.dtype(_PARTS.get(dtype.name, dtype))
        found, tables = _type_of(dtype), self._tables_of(dtype)
        rows = [self.row(source, nbytes, np.dtype(found.name)) for source in sources]
        into = [self.row(target, nbytes, np.dtype(found.name)) for target in targets]
        total: list[Any] = []
        world = len(rows)
        while len(rows) + len(total) > AT_ONCE:
            some, rows = rows[: AT_ONCE - len(total)], rows[AT_ONCE - len(total) :]
            part = self._cupy.empty(some[0].size, np.dtype(found.wide))
            _kernel(op, dtype, len(some), 0, bool(total), world)(*total, *some, *tables, part)
            total = [part]
        first, others = into[:AT_ONCE], targets[AT_ONCE:]
        _kernel(op, dtype, len(rows), len(first), bool(total), world)(*total, *rows, *tables, *first)
        for target in others:
            self.copy(target, targets[0], nbytes)

    def _times(self, dtype: np.dtype[Any], sources: Sequence[int], targets: Sequence[int], nbytes: int) -> None:
        # Rounds at each step: a compiler might fuse some.
        total = self._cupy.empty(nbytes // dtype.itemsize, dtype)
        fold_rows(combiner(ReduceOp.PRODUCT, dtype), [self.row(one, nbytes, dtype) for one in sources], total)
        for target in targets:
            self.copy(target, int(total.data.ptr), nbytes)

    def _tables_of(self, dtype: np.dtype[Any]) -> tuple[Any, ...]:
        # For 8-bit floats: float32 by their bits, [256], and their bits by the upper half of float32, [65536].
        if _type_of(dtype) is not _FLOAT8:
            return ()
        if dtype.name not in self._tables:
            wide = np.arange(1 << 8, dtype=np.uint8).view(dtype).astype(np.float32)
            halves = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)
            with np.errstate(all="ignore"):
                short = halves.astype(dtype).view(np.uint8)
            self._tables[dtype.name] = self._cupy.asarray(wide), self._cupy.asarray(short)
        return self._tables[dtype.name]


@lru_cache(maxsize=256)
def _kernel(op: ReduceOp, dtype: np.dtype[Any], reads: int, writes: int, follows: bool, world: int) -> Any:
    # A kernel that folds elements of `reads` of the `world` ranks. `writes` 0: more ranks follow, and it writes one row
    # of the wide type. `follows`: it continues from such a row.
    found, ranks = _type_of(dtype), [f"a{at}" for at in range(reads)]
    combine = (_BOOL_COMBINE.get(op) if dtype.kind == "b" else None) or _COMBINE[op]
    given = [f"{found.wide} before"] * follows + [f"{found.name} {rank}" for rank in ranks]
    value, *others = ["before"] * follows + [found.into.format(rank) for rank in ranks]
    for other in others:
        value = combine.format(value, other)
    if writes:
        if op is ReduceOp.AVG:
            value = f"({value} / {found.number}({world}))"
        taken = [f"{found.name} o{at}" for at in range(writes)]
        steps = [f"o0 = {found.back.format(value)}", *(f"o{at} = o0" for at in range(1, writes))]
    else:
        taken, steps = [f"{found.wide} o0"], [f"o0 = {value}"]
    tables = _TABLES if found is _FLOAT8 else ""
    name = f"raycollect_{op.name.lower()}_{dtype.name}_{'on_' * follows}{reads}_{writes}"
    made = import_module("cupy").ElementwiseKernel
    return made(", ".join(given) + tables, ", ".join(taken), "; ".join(steps), name, preamble=_PREAMBLE)
