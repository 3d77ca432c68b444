"""The source of the kernels that fold the elements of several ranks on a GPU, in CUDA C++ without a header.

cupy appends ``-ftz=true`` to its compiler options: plain float32 arithmetic would flush subnormal numbers to zero,
unlike other backends (P7). So float32 operations are written in PTX, which no option changes. Those of float64 are
intrinsics, so that the compiler fuses none.

A module has all kernels for one element type and one number of ranks: with headers, each would take a second to
compile. Elements without a C++ type are loaded and stored as integers. Narrow floats are folded in
float32 and rounded once, so the bits are those of `folds.fold`. Floats of 8 bits use tables, which `ml_dtypes` fills.
Rounding to such a float uses the upper half of a float32 with its last bit set if the lower half is not zero ("round to
odd"): this keeps all information that matters for a result that is shorter by at least two bits.

The statements, one a line, use the common subset of C++ and Python, so that a fake of cupy can run them unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from importlib import import_module
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from raycollect.backends.elements import NARROW
from raycollect.core.model import ReduceOp

_THREADS = 256  # Of a block
_MOST_BLOCKS = 1 << 16
AT_ONCE = 16  # The most ranks that one kernel reads and targets that it writes


def _instruction(name: str, gives: str, takes: Sequence[str], instruction: str) -> str:
    # A function of one instruction of PTX; its registers are those of `_REGISTERS`.
    given = ", ".join(f"{kind} {letter}" for kind, letter in zip(takes, "ab", strict=False))
    places = ", ".join(f"%{at}" for at in range(1 + len(takes)))
    read = ", ".join(f'"{_REGISTERS[kind]}"({letter})' for kind, letter in zip(takes, "ab", strict=False))
    body = f'{gives} c; asm("{instruction} {places};" : "={_REGISTERS[gives]}"(c) : {read}); return c;'
    return f"\n__device__ {gives} {name}({given}) {{ {body} }}"


# C++'s type -> the register of PTX that has it
_REGISTERS = {"float": "f", "unsigned short": "h", "unsigned": "r"}
_FLOAT32_PTX = {"add": "add.rn.f32", "minus": "sub.rn.f32", "times": "mul.rn.f32", "over": "div.rn.f32"}
_FLOAT32 = "".join(_instruction(name, "float", ("float",) * 2, ptx) for name, ptx in _FLOAT32_PTX.items())
_FLOAT32 += _instruction("less", "unsigned", ("float", "float"), "set.lt.u32.f32")
_FLOAT32 += """
__device__ bool is_nan(float a) { return (__float_as_uint(a) & 0x7fffffff) > 0x7f800000; }
__device__ float lesser(float a, float b) { return ((less(a, b) > 0) || is_nan(a)) ? a : b; }
__device__ float greater(float a, float b) { return ((less(b, a) > 0) || is_nan(a)) ? a : b; }
"""
_FLOAT64 = """
__device__ double add(double a, double b) { return __dadd_rn(a, b); }
__device__ double minus(double a, double b) { return __dsub_rn(a, b); }
__device__ double times(double a, double b) { return __dmul_rn(a, b); }
__device__ double over(double a, double b) { return __ddiv_rn(a, b); }
__device__ double lesser(double a, double b) { return ((a < b) || (a != a)) ? a : b; }
__device__ double greater(double a, double b) { return ((b < a) || (a != a)) ? a : b; }
"""
_FLOAT16 = _instruction("from_half", "float", ("unsigned short",), "cvt.f32.f16")
_FLOAT16 += _instruction("to_half", "unsigned short", ("float",), "cvt.rn.f16.f32") + "\n"
_BFLOAT16 = """
__device__ float from_bfloat16(unsigned short a) { return __uint_as_float(unsigned(a) << 16); }
__device__ unsigned even(unsigned a) { return (a + 0x7fff + ((a >> 16) & 1)) >> 16; }
__device__ unsigned short to_bfloat16(float a) { return is_nan(a) ? 0x7fc0 : even(__float_as_uint(a)); }
"""
_FLOAT8 = """
__device__ unsigned odd(float a) { return (__float_as_uint(a) >> 16) | unsigned((__float_as_uint(a) & 0xffff) != 0); }
"""

_OF_FLOATS = {
    ReduceOp.SUM: "add({}, {})",
    ReduceOp.AVG: "add({}, {})",
    ReduceOp.PRODUCT: "times({}, {})",
    ReduceOp.MIN: "lesser({}, {})",
    ReduceOp.MAX: "greater({}, {})",
}
# Reduce op -> the combination of two integers; unsigned, since only unsigned sums wrap around
_OF_BITS = {
    ReduceOp.SUM: "({} + {})",
    ReduceOp.PRODUCT: "({} * {})",
    ReduceOp.BAND: "({} & {})",
    ReduceOp.BOR: "({} | {})",
    ReduceOp.BXOR: "({} ^ {})",
}
_OF_NUMBERS = {ReduceOp.MIN: "lesser({}, {})", ReduceOp.MAX: "greater({}, {})"}
_OF_BOOLS = {
    ReduceOp.SUM: "({} | {})",
    ReduceOp.PRODUCT: "({} & {})",
    ReduceOp.MIN: "({} & {})",
    ReduceOp.MAX: "({} | {})",
    ReduceOp.BAND: "({} & {})",
    ReduceOp.BOR: "({} | {})",
    ReduceOp.BXOR: "({} ^ {})",
}
_COMPARED = """
__device__ {0} lesser({0} a, {0} b) {{ return a < b ? a : b; }}
__device__ {0} greater({0} a, {0} b) {{ return a > b ? a : b; }}
"""

_WHOLE = {1: ("unsigned char", "signed char"), 2: ("unsigned short", "short"), 4: ("unsigned", "int")}
_WHOLE[8] = "unsigned long long", "long long"

_LOOP = (
    "for (unsigned long long i = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x; i < n;"
    " i += (unsigned long long)gridDim.x * blockDim.x) {"
)


class _Form(NamedTuple):
    """The code by which some reduce ops fold elements of a type."""

    stored: str  # C++'s type of an element in memory
    wide: str  # that of the fold
    dtype: str  # numpy's name for that
    combine: dict[ReduceOp, str]
    into: str = "{}"  # converts an element to that
    back: str = "{}"  # converts the result back
    tables: bool = False


class Shape(NamedTuple):
    """The part of a fold that a kernel does."""

    reads: int  # from how many ranks
    writes: int  # how many targets it writes; 0: more ranks follow, and it writes one row of the wide type
    follows: bool  # whether it continues from such a row


_PAIR = Shape(2, 1, False)


def shapes(world: int, targets: int) -> Iterator[Shape]:
    """Returns the kernels, one after the other, that fold the elements of so many ranks into so many targets."""
    left, follows = world, False
    while left + follows > AT_ONCE:
        yield Shape(AT_ONCE - follows, 0, follows)
        left, follows = left - AT_ONCE + follows, True
    yield Shape(left, min(targets, AT_ONCE), follows)


def name_of(op: ReduceOp, shape: Shape) -> str:
    """The name of a kernel in its module."""
    return f"raycollect_{op.name.lower()}_{'on_' * shape.follows}{shape.reads}_{shape.writes}"


def has_tables(dtype: np.dtype[Any]) -> bool:
    """Whether kernels for that type take the tables behind their sources: to float32, [256], and back, [65536]."""
    return dtype in NARROW and dtype.itemsize == 1


def wide_of(op: ReduceOp, dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The type of the row that a kernel writes if more ranks follow."""
    return np.dtype(next(form.dtype for form in _forms(dtype) if op in form.combine))


def launch(dtype: np.dtype[Any], world: int, name: str, pointers: Sequence[int], count: int) -> None:
    """Enqueues a kernel of `source_of` on cupy's current stream, for so many elements at each of its pointers."""
    blocks = min(-(-count // _THREADS), _MOST_BLOCKS)
    _kernel_named(dtype, world, name)((blocks,), (_THREADS,), (*pointers, count))


def complex_product(a: Any, b: Any, out: Any) -> None:
    """Enqueues the product of two cupy arrays of complex numbers, [n], contiguous; `out` may be one of them."""
    if out.size:
        name = name_of(ReduceOp.PRODUCT, _PAIR)
        launch(np.dtype(out.dtype), 2, name, [int(array.data.ptr) for array in (a, b, out)], out.size)


@lru_cache(maxsize=1024)
def _kernel_named(dtype: np.dtype[Any], world: int, name: str) -> Any:
    return _module(dtype, world).get_function(name)


@lru_cache(maxsize=64)
def _module(dtype: np.dtype[Any], world: int) -> Any:
    return import_module("cupy").RawModule(code=source_of(dtype, world))  # cupy caches compiled code on disk


@lru_cache(maxsize=64)
def source_of(dtype: np.dtype[Any], world: int) -> str:
    """The module that folds elements of a type of so many ranks, by each op, into one target or into as many.

    A complex type: its products alone; its other ops are those of its parts.
    """
    if dtype.kind == "c":
        part, number = ("float", _FLOAT32) if dtype.itemsize == 8 else ("double", _FLOAT64)
        return number + _complex_product(part)
    forms = _forms(dtype)
    wanted = dict.fromkeys(shape for targets in (1, world) for shape in shapes(world, targets))
    kernels = [_kernel(form, op, shape, world) for form, shape in product(forms, wanted) for op in form.combine]
    return _preamble(dtype) + "".join(kernels)


def _preamble(dtype: np.dtype[Any]) -> str:
    if dtype.kind in "biu":
        return _COMPARED.format(_wide_whole(dtype, is_signed=dtype.kind == "i"))
    if dtype.name == "float64":
        return _FLOAT64
    own = {"float32": "", "float16": _FLOAT16, "bfloat16": _BFLOAT16}
    return _FLOAT32 + own.get(dtype.name, _FLOAT8)


def _wide_whole(dtype: np.dtype[Any], *, is_signed: bool) -> str:
    return _WHOLE[max(dtype.itemsize, 4)][is_signed]


def _forms(dtype: np.dtype[Any]) -> tuple[_Form, ...]:
    if dtype.kind in "biu":
        stored, nbytes = _WHOLE[dtype.itemsize], max(dtype.itemsize, 4)
        bits = _Form(stored[0], _wide_whole(dtype, is_signed=False), f"u{nbytes}", _OF_BITS)
        if dtype.kind == "b":
            return (bits._replace(combine=_OF_BOOLS),)
        signed = dtype.kind == "i"
        wide = _wide_whole(dtype, is_signed=signed)
        return bits, _Form(stored[signed], wide, f"{dtype.kind}{nbytes}", _OF_NUMBERS)
    if dtype.name == "float64":
        return (_Form("double", "double", "f8", _OF_FLOATS),)
    form = _Form("float", "float", "f4", _OF_FLOATS)
    if dtype.name == "float16":
        form = form._replace(stored="unsigned short", into="from_half({})", back="to_half({})")
    elif dtype.name == "bfloat16":
        form = form._replace(stored="unsigned short", into="from_bfloat16({})", back="to_bfloat16({})")
    elif has_tables(dtype):
        form = form._replace(stored="unsigned char", into="wide_of[{}]", back="short_of[odd({})]", tables=True)
    return (form,)


def _kernel(form: _Form, op: ReduceOp, shape: Shape, world: int) -> str:
    rows = [f"a{at}" for at in range(shape.reads)]
    takes = [f"const {form.wide}* before"] * shape.follows + [f"const {form.stored}* {row}" for row in rows]
    takes += ["const float* wide_of", "const unsigned char* short_of"] * form.tables
    takes += [f"{form.stored}* o{at}" for at in range(shape.writes)] or [f"{form.wide}* o0"]
    values = ["before[i]"] * shape.follows + [form.into.format(f"{row}[i]") for row in rows]
    steps = [f"{form.wide} total = {values[0]};"]
    steps += [f"total = {form.combine[op].format('total', value)};" for value in values[1:]]
    if not shape.writes:
        return _function(name_of(op, shape), takes, [*steps, "o0[i] = total;"])
    if op is ReduceOp.AVG:
        steps.append(f"total = over(total, {form.wide}({world}));")
    steps.append(f"{form.stored} result = {form.back.format('total')};")
    steps += [f"o{at}[i] = result;" for at in range(shape.writes)]
    return _function(name_of(op, shape), takes, steps)


def _complex_product(part: str) -> str:
    # Rounds at each step, as `folds` does; the target may be a source.
    takes = [f"const {part}* a0", f"const {part}* a1", f"{part}* o0"]
    steps = [
        f"{part} real = minus(times(a0[2 * i], a1[2 * i]), times(a0[2 * i + 1], a1[2 * i + 1]));",
        f"{part} imag = add(times(a0[2 * i], a1[2 * i + 1]), times(a0[2 * i + 1], a1[2 * i]));",
        "o0[2 * i] = real;",
        "o0[2 * i + 1] = imag;",
    ]
    return _function(name_of(ReduceOp.PRODUCT, _PAIR), takes, steps)


def _function(name: str, takes: list[str], steps: list[str]) -> str:
    head = f'extern "C" __global__ void {name}({", ".join(takes)}, unsigned long long n) {{'
    return "\n".join(["", head, _LOOP, *steps, "}", "}", ""])
