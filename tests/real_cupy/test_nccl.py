"""NCCL's numbers, as the header of the installed package has them."""

from __future__ import annotations

import re

import pytest
from cupy.cuda import nccl

from raycollect.backends.nccl import group, ops
from raycollect.core.model import ReduceOp
from tests.fake_cupy import _clique, _errors
from tests.fake_cupy import _nccl as fake

DTYPES = {"float8_e4m3fn": "ncclFloat8e4m3", "float8_e5m2": "ncclFloat8e5m2"}
OPS = {ReduceOp.PRODUCT: "ncclProd"}
STATUSES = {6: "ncclRemoteError", 7: "ncclInProgress", 8: "ncclTimeout"}


@pytest.fixture
def numbers(header: str) -> dict[str, int]:
    return {name: int(number) for name, number in re.findall(r"\b(nccl\w+)\s*=\s*(\d+)\b", header)}


def test_the_header_is_that_of_the_library(header: str) -> None:
    (code,) = re.findall(r"#define NCCL_VERSION_CODE (\d+)", header)
    assert int(code) == nccl.get_version()


def test_element_types(numbers: dict[str, int]) -> None:
    for dtype, code in ops._CODES.items():
        assert numbers[DTYPES.get(dtype, f"nccl{dtype.capitalize()}")] == code
    assert numbers["ncclUint8"] == ops.BYTES
    assert set(fake._DTYPES) == set(ops._CODES.values())


def test_reduce_ops(numbers: dict[str, int]) -> None:
    for op, code in ops._OPS.items():
        assert numbers[OPS.get(op, f"nccl{op.name.capitalize()}")] == code
    for name in ("Sum", "Prod", "Max", "Min", "Avg"):
        assert numbers[f"nccl{name}"] == getattr(_clique, name.upper()) == getattr(fake, f"NCCL_{name.upper()}")


def test_statuses(numbers: dict[str, int]) -> None:
    assert {code: numbers[name] for code, name in STATUSES.items()} == {code: code for code in group._STATUSES}
    found = {"ncclUnhandledCudaError": 1, "ncclSystemError": 2, "ncclInternalError": 3}
    found |= {"ncclInvalidArgument": 4, "ncclInvalidUsage": 5, "ncclRemoteError": 6}
    assert {name: numbers[name] for name in found} == found
    assert set(_errors._NCCL_STATUSES) == {0, *found.values()}


def test_every_status_is_said_in_words(numbers: dict[str, int]) -> None:
    """Also by a cupy that has no words for it."""
    for status in range(1, numbers["ncclNumResults"]):
        try:
            told = group.said(nccl.NcclError(status))
        except KeyError as exc:
            told = group.said(exc)
        assert "NCCL" in told
        assert "KeyError" not in told
