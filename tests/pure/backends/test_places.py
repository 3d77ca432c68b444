"""The place of a tensor: any change of it is another place, and without one it is known again."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from raycollect.backends import arrays

try:
    import torch
except ImportError:
    torch = None


with_torch = pytest.mark.skipif(torch is None, reason="torch is not installed")


def _set(array: Any, name: str, value: Any) -> None:
    setattr(array, name, value)


CHANGES: dict[str, Any] = {
    "moved": lambda array: array.resize(1_000_000, refcheck=False),
    "read-only": lambda array: array.setflags(write=False),
    "shape": lambda array: _set(array, "shape", (3, 4)),
    "dtype": lambda array: _set(array, "dtype", "int64"),
}


@pytest.mark.parametrize(
    ("name", "dtype"), [(name, dtype) for name in CHANGES for dtype in ("float64", "bfloat16")][:-1]
)
def test_whatever_changes_about_an_array_is_another_place(name: str, dtype: str) -> None:
    array = np.ones(12, getattr(ml_dtypes, dtype, dtype))
    before = arrays.place_of(array)
    assert arrays.place_of(array) == before
    CHANGES[name](array)
    assert arrays.place_of(array) != before


def test_an_array_that_has_moved_and_looks_the_same_is_at_another_place() -> None:
    array = np.ones(100_000)
    before, address = arrays.place_of(array), array.ctypes.data
    others = []
    while array.ctypes.data == address:
        array.resize(10, refcheck=False)
        others.append(np.ones(99_000 + 8 * len(others)))  # takes the room that it left
        array.resize(100_000, refcheck=False)
    assert arrays.place_of(array) != before


TORCH_CHANGES: dict[str, Any] = {
    "moved": lambda tensor: _set(tensor, "data", tensor.clone()),
    "shape": lambda tensor: _set(tensor, "data", tensor.view(4, 3)),
    "strides": lambda tensor: tensor.t_(),
    "dtype": lambda tensor: _set(tensor, "data", tensor.to(torch.int32)),
    "conjugated": lambda tensor: _set(tensor, "data", tensor.conj()),
    "storage given back": lambda tensor: tensor.untyped_storage().resize_(0),
}


@with_torch
@pytest.mark.parametrize("name", TORCH_CHANGES)
def test_whatever_changes_about_a_tensor_of_torch_is_another_place(name: str) -> None:
    tensor = torch.arange(12).reshape(3, 4).to(torch.complex64 if name == "conjugated" else torch.float32)
    before = arrays.place_of(tensor)
    assert arrays.place_of(tensor) == before
    assert before[0] == arrays.memory(tensor).ctypes.data  # type: ignore[union-attr]
    TORCH_CHANGES[name](tensor)
    try:
        assert arrays.place_of(tensor) != before
    except TypeError:
        assert not arrays.is_tensor(tensor)


@with_torch
def test_only_tensors_whose_versions_count_have_one() -> None:
    with torch.inference_mode():
        uncounted = torch.ones(2)
    counted = [torch.ones(2), torch.nn.Parameter(torch.ones(2))]
    assert [arrays.has_version(tensor) for tensor in (*counted, uncounted, np.ones(2))] == [True, True, False, False]
    before = [tensor._version for tensor in counted]
    arrays.raise_versions(counted)
    assert [tensor._version for tensor in counted] == [version + 1 for version in before]
