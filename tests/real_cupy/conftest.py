"""Loads what the wheels have put beside cupy, and skips everything where cupy is missing."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest

cupy = pytest.importorskip("cupy", reason="`make real-cupy` installs it")

LIBRARIES = ("libnccl.so.*", "libcudart.so.*")
"""In this order: each finds the ones before by their names."""


def wheels() -> Path:
    """Where the packages of NVIDIA are."""
    return Path(cupy.__file__).parents[1] / "nvidia"


def pytest_configure() -> None:
    for pattern in LIBRARIES:
        for found in sorted(wheels().rglob(pattern)):
            ctypes.CDLL(os.fspath(found), mode=ctypes.RTLD_GLOBAL)


@pytest.fixture(scope="session")
def header() -> str:
    """`nccl.h` of the installed NCCL."""
    (found,) = wheels().rglob("include/nccl.h")
    return found.read_text(encoding="utf-8")
