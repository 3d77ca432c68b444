"""The GPU that this process has for backend `nccl`, and whether the members of a group can use theirs together.

Where there is no GPU, this is found out without importing cupy: none was assigned, they are hidden, or there is no
driver or no cupy.
"""

from __future__ import annotations

import logging
import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from raycollect.backends.capabilities import no_gpu
from raycollect.backends.nccl import ipc_driver
from raycollect.core.codec import Wire

SHARING_FROM = 23000  # The first NCCL that takes several ranks on one GPU, if `SHARING` is set before its first use
MOST_ON_ONE = 2  # As many as its documentation allows there, as experimental
SHARING = "NCCL_MULTI_RANK_GPU_ENABLE"

_log = logging.getLogger("raycollect")
_read: bool | None = None  # whether NCCL lets ranks of this process share a GPU; None: it has not read that yet

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_NOTHING = ("", "-1", "NoDevFiles")
# Files that exist where there is a driver; the last one is that of WSL
_DRIVER = (Path("/dev/nvidiactl"), Path("/dev/dxg"))


class Gpu(Wire, frozen=True, kw_only=True):
    """A GPU as `nccl` would use it, and the NCCL of this process."""

    name: str  # which GPU of its machine, as `name_of`
    version: int  # NCCL's, as 22803 for 2.28.3
    may_share: bool  # whether the environment allows sharing the GPU with other ranks


def here(given: bool | None = None) -> Gpu | None:
    """Returns the calling thread's current GPU, or None if there is none or something that `nccl` needs is missing.

    `given`: whether this process was assigned a GPU by whoever started it; None if unknown: its environment counts.
    """
    if given is False or not _may_have_one() or no_gpu():
        return None
    cupy, nccl = import_module("cupy"), import_module("cupy.cuda.nccl")
    try:
        name = name_of(cupy.cuda.runtime, cupy.cuda.runtime.getDevice())
        version = int(nccl.get_version())
    except Exception as exc:  # noqa: BLE001 - a device or a library that fails at its first call, in cupy's many kinds
        _log.warning("there is a GPU, but no group is formed on it: %s", exc)
        return None
    return Gpu(name=name, version=version, may_share=may_share())


def name_of(runtime: Any, device: int) -> str:
    """Names a GPU uniquely on its machine, or the part of one that MIG makes: all parts have its PCI bus id."""
    return "/".join(filter(None, (str(runtime.deviceGetPCIBusId(device)), ipc_driver.uuid_of(device).hex())))


def may_share() -> bool:
    """Tells whether NCCL lets this process share a GPU with other ranks, or can yet be told to.

    NCCL reads that from its environment as a process first joins a communicator of several ranks.
    """
    return os.environ.get(SHARING, "1") == "1" if _read is None else _read


def first_use() -> None:
    """Notes that this process joins a communicator of several ranks."""
    global _read
    if _read is None:
        _read = os.environ.get(SHARING) == "1"


def why_not(machines: Sequence[str], gpus: Sequence[Gpu | None]) -> str:
    """Says why members that all have GPUs can't use them together, or ""."""
    found = [one for one in gpus if one is not None]
    if len({one.version for one in found}) > 1:
        return "the ranks have different releases of NCCL"
    places = list(zip(machines, (one.name for one in found), strict=True))
    shared = [place for place, count in Counter(places).items() if count > 1]
    if not shared or sharing(machines, gpus):
        return ""
    on = {
        f"{machine}/{name}": [at for at, other in enumerate(places) if other == (machine, name)]
        for machine, name in shared
    }
    if why := sharing_fault(on, found[0].version):
        return why
    ranks = next(iter(on.values()))
    return "" if all(one.may_share for one in found) else f"ranks {ranks} share a GPU, and {SHARING} forbids it"


def sharing(machines: Sequence[str], gpus: Sequence[Gpu | None]) -> str:
    """Says how members that all share one GPU work without NCCL, else ""."""
    found = [one for one in gpus if one is not None]
    is_one = len({(machine, one.name) for machine, one in zip(machines, found, strict=True)}) == 1
    return "by CUDA IPC, as all ranks share one GPU" if is_one and len(found) > 1 else ""


def sharing_fault(shared: Mapping[str, Sequence[int]], version: int) -> str:
    """Says why NCCL can't connect ranks of which only some share GPUs, given the ranks by GPU; "" if it can."""
    gpu, ranks = max(shared.items(), key=lambda one: len(one[1]))
    if version < SHARING_FROM:
        return f"ranks {list(ranks)} share the GPU {gpu}, which NCCL takes from 2.30 on, and this is {version}"
    if len(ranks) > MOST_ON_ONE:
        told = f"ranks {list(ranks)} share the GPU {gpu}, while other ranks of the group are on another one"
        return f"{told}; NCCL's documentation allows {MOST_ON_ONE} ranks on a GPU, and says that more of them hang"
    return ""


def _may_have_one() -> bool:
    if "cupy" in sys.modules:
        return True
    if os.environ.get(_VISIBLE) in _NOTHING or not any(path.exists() for path in _DRIVER):
        return False
    return find_spec("cupy") is not None
