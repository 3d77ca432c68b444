"""All kernels, compiled by the real nvrtc with cupy's options for two architectures; what is in their PTX."""

from __future__ import annotations

import inspect
import re

import numpy as np
import pytest
from cupy.cuda import compiler
from cupy_backends.cuda.libs import nvrtc

from raycollect.backends.elements import NARROW
from raycollect.backends.nccl import fold_kernels
from raycollect.core.model import ReduceOp

DTYPES = [*map(np.dtype, "?bhilBHILefdFD"), *sorted(NARROW, key=str)]
CAPABILITIES = (80, 90)
RANKS = (2, 3, 17)
"""Also more than one kernel takes."""

OPTIONS = ("-ftz=true",)
"""Those of cupy that change results."""

INSTRUCTIONS = {
    "float32": ("add.rn.f32", "mul.rn.f32", "div.rn.f32", "set.lt.u32.f32"),
    "float16": ("cvt.f32.f16", "cvt.rn.f16.f32", "add.rn.f32"),
    "bfloat16": ("add.rn.f32", "div.rn.f32"),
    "float64": ("add.rn.f64", "mul.rn.f64", "div.rn.f64"),
    "complex64": ("sub.rn.f32", "add.rn.f32", "mul.rn.f32"),
    "complex128": ("sub.rn.f64", "add.rn.f64", "mul.rn.f64"),
}


def compiled(source: str, arch: str) -> str:
    """The PTX of a module, or "" where it is compiled for one GPU.

    Raises:
        AssertionError: It can't be compiled; with what the compiler says.
    """
    program = nvrtc.createProgram(source, "kernels.cu", (), ())
    try:
        nvrtc.compileProgram(program, (f"-arch={arch}", "-std=c++17", *OPTIONS))
        found = nvrtc.getPTX(program) if arch.startswith("compute") else ""
        return found.decode() if isinstance(found, bytes) else found
    except nvrtc.NVRTCError:
        raise AssertionError(nvrtc.getProgramLog(program)) from None
    finally:
        nvrtc.destroyProgram(program)


def test_cupy_compiles_so_that_subnormal_numbers_are_flushed() -> None:
    """The reason for PTX; where this fails, cupy's options have changed."""
    assert "options += ('-ftz=true',)" in inspect.getsource(compiler._compile_with_cache_cuda)
    plain = 'extern "C" __global__ void it(float* a) { a[0] = a[1] + a[2]; }'
    assert "add.ftz.f32" in compiled(plain, "compute_80")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_module(dtype: np.dtype, capability: int) -> None:
    for ranks in RANKS:
        source = fold_kernels.source_of(dtype, ranks)
        assert "#include" not in source
        ptx = compiled(source, f"compute_{capability}")
        assert ".ftz" not in ptx
        assert "fma." not in ptx
        if ranks % 2:  # a division by 2 is a product
            assert not [one for one in INSTRUCTIONS.get(dtype.name, ()) if one not in ptx]
        wanted = set(re.findall(r"void (\w+)\(", source))
        assert set(re.findall(r"\.entry (\w+)", ptx)) == wanted
        assert wanted
        compiled(source, f"sm_{capability}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ranks", RANKS)
def test_a_module_has_every_kernel_that_a_fold_launches(dtype: np.dtype, ranks: int) -> None:
    source = fold_kernels.source_of(dtype, ranks)
    if dtype.kind == "c":
        ops, shapes = [ReduceOp.PRODUCT], [fold_kernels._PAIR]
    else:
        ops = [op for form in fold_kernels._forms(dtype) for op in form.combine]
        shapes = [shape for targets in (1, ranks) for shape in fold_kernels.shapes(ranks, targets)]
    for op in ops:
        for shape in shapes:
            assert f" {fold_kernels.name_of(op, shape)}(" in source
