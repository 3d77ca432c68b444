"""What GPUs there are, and what can be done with them; cupy and torch are not imported before somebody asks.

With ``RAYCOLLECT_FAKE_GPU=1`` the tests run on `tests.fake_cupy`: two GPUs, and an NCCL that lets ranks share one.

With ``RAYCOLLECT_GPU_AS_HOSTS=1`` each rank tells NCCL that it is alone on its host, so that NCCL of any release joins
several ranks on one GPU. They communicate by sockets: this shows results, deadlines and aborts, but no speed.
"""

from __future__ import annotations

import os
import warnings
from functools import cache
from importlib import import_module
from typing import Any

import pytest

from raycollect.backends.gpus import MOST_ON_ONE, SHARING, SHARING_FROM

FAKE = os.environ.get("RAYCOLLECT_FAKE_GPU") == "1"

FAKE_DEVICES, FAKE_NCCL = 2, 23000

AS_HOSTS = os.environ.get("RAYCOLLECT_GPU_AS_HOSTS") == "1"
MOST_AS_HOSTS = 3
"""Each rank's kernels wait on the GPU for those of the others, and all have to find room there."""


def environment_of(rank: int) -> dict[str, str]:
    """What NCCL reads of a rank's environment, once, when the rank's process first uses it.

    Ranks may share a GPU; as hosts, each rank's process counts as a host of its own.
    """
    if not AS_HOSTS:
        return {SHARING: "1"}
    return {
        "NCCL_HOSTID": f"host-of-rank-{rank}",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
        "NCCL_MNNVL_ENABLE": "0",
    }


def host_of(rank: int) -> str:
    """The address that a rank names as its host's."""
    return f"host-of-rank-{rank}" if AS_HOSTS else ""


def _imported(name: str) -> Any:
    """A module; what it warns of when it is imported is no reason to do without it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return import_module(name)


@cache
def why_none() -> str:
    """Why nothing can run on a GPU here, or ""."""
    if FAKE:
        return ""
    try:
        count = int(_imported("cupy").cuda.runtime.getDeviceCount())
        _imported("cupy.cuda.nccl").get_version()
    except Exception as exc:  # no cupy, no driver, no NCCL: each in its own kind
        return f"no GPU to test on: {type(exc).__name__}: {exc}"
    return "" if count else "no GPU to test on: cupy sees none"


def count() -> int:
    """How many GPUs this process sees."""
    return int(import_module("cupy").cuda.runtime.getDeviceCount())


def nccl_version() -> int:
    """NCCL's version, as 22803 for 2.28.3."""
    return int(import_module("cupy.cuda.nccl").get_version())


def why_not_so_many(ranks: int) -> str:
    """Why so many ranks can't be had here, or ""."""
    if ranks <= count() or (AS_HOSTS and ranks <= MOST_AS_HOSTS):
        return ""
    most = MOST_ON_ONE * count() if nccl_version() >= SHARING_FROM else count()
    return "" if ranks <= most else f"{ranks} ranks on {count()} GPU: NCCL {nccl_version()} takes {most}"


@cache
def why_no_torch() -> str:
    """Why there are no torch tensors on a GPU here, or ""."""
    if FAKE:
        return "the fake has no torch tensors"
    try:
        return "" if _imported("torch").cuda.is_available() else "torch sees no GPU"
    except ImportError as exc:
        return f"no torch: {exc}"


def why_not(library: str, dtype: str = "float32") -> str:
    """Why there are no tensors of a library and an element type on a GPU here, or ""."""
    if library == "torch":
        return why_no_torch() or ("" if hasattr(import_module("torch"), dtype) else f"this torch has no {dtype}")
    return _why_not_cupy(dtype)


def need(library: str, dtype: str = "float32") -> None:
    """Skips the test where there are no such tensors."""
    if why := why_not(library, dtype):
        pytest.skip(why)


@cache
def _why_not_cupy(dtype: str) -> str:
    cupy, numpy = import_module("cupy"), import_module("numpy")
    import_module("ml_dtypes")  # numpy knows its types by their names from now on
    try:
        cupy.empty(1, numpy.dtype(dtype))
    except Exception as exc:  # older cupys refuse them, each in its way
        return f"this cupy has no {dtype}: {exc}"
    return ""
