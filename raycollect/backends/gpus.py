"""The GPU of this process for backend `nccl`, and whether the members of a group can use theirs together.

cupy is not imported if no GPU was assigned, GPUs are hidden, or the driver or cupy is missing.
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

from raycollect.backends import cuda_driver
from raycollect.backends.capabilities import no_gpu
from raycollect.core.codec import Wire

SHARING_FROM = 23000  # The first NCCL that takes several ranks on one GPU, if `SHARING` is set before its first use
MOST_ON_ONE = 2  # The most that its documentation allows, as experimental
SHARING = "NCCL_MULTI_RANK_GPU_ENABLE"

_log = logging.getLogger("raycollect")
_read: bool | None = None  # whether NCCL lets ranks of this process share a GPU; None: it has not read its environment

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_NOTHING = ("", "-1", "NoDevFiles")
# Files that exist with a driver; the last one is that of WSL
_DRIVER = (Path("/dev/nvidiactl"), Path("/dev/dxg"))


class Gpu(Wire, frozen=True, kw_only=True):
    """A GPU as `nccl` would use it, and the NCCL of this process."""

    name: str  # which GPU of its machine, as `name_of`
    version: int  # NCCL's, as 22803 for 2.28.3
    may_share: bool  # whether the environment allows sharing the GPU with other ranks


def here(given: bool | None = None) -> Gpu | None:
    """Returns the calling thread's current GPU, or None without a GPU or a requirement of `nccl`.

    `given`: whether this process was assigned a GPU; None if unknown: its environment counts.
    """
    if given is False or not _may_have_one() or no_gpu():
        return None
    cupy, nccl = import_module("cupy"), import_module("cupy.cuda.nccl")
    try:
        name = name_of(cupy.cuda.runtime, cupy.cuda.runtime.getDevice())
        version = int(nccl.get_version())
    except Exception as exc:  # noqa: BLE001 - a failing device or library: cupy raises many kinds
        _log.warning("there is a GPU, but no group is formed on it: %s", exc)
        return None
    return Gpu(name=name, version=version, may_share=may_share())


def name_of(runtime: Any, device: int) -> str:
    """Names a GPU uniquely on its machine, or the part of one that MIG makes: all parts have its PCI bus id."""
    return "/".join(filter(None, (str(runtime.deviceGetPCIBusId(device)), cuda_driver.uuid_of(device).hex())))


def may_share() -> bool:
    """Tells whether NCCL lets this process share a GPU with other ranks, or can still be configured to.

    NCCL reads its environment when a process first joins a communicator of several ranks.
    """
    return os.environ.get(SHARING, "1") == "1" if _read is None else _read


def first_use() -> None:
    """Records that this process joins a communicator of several ranks."""
    global _read
    if _read is None:
        _read = os.environ.get(SHARING) == "1"


def why_not(machines: Sequence[str], gpus: Sequence[Gpu | None]) -> str:
    """Says why members that all have GPUs can't use them together, or ""."""
    present = [gpu for gpu in gpus if gpu is not None]
    if len({gpu.version for gpu in present}) > 1:
        return "the ranks have different releases of NCCL"
    places = list(zip(machines, (gpu.name for gpu in present), strict=True))
    shared = [place for place, count in Counter(places).items() if count > 1]
    if not shared:
        return ""
    on = {
        f"{machine}/{name}": [at for at, other in enumerate(places) if other == (machine, name)]
        for machine, name in shared
    }
    if why := sharing_fault(on, present[0].version):
        return why
    ranks = next(iter(on.values()))
    return "" if all(gpu.may_share for gpu in present) else f"ranks {ranks} share a GPU, and {SHARING} forbids it"


def sharing_fault(shared: Mapping[str, Sequence[int]], version: int) -> str:
    """Says why NCCL can't connect ranks that share GPUs, given the ranks by GPU; "" if it can."""
    gpu, ranks = max(shared.items(), key=lambda item: len(item[1]))
    if version < SHARING_FROM:
        return f"ranks {list(ranks)} share the GPU {gpu}, which needs NCCL 2.30, and this is {version}"
    if len(ranks) > MOST_ON_ONE:
        detail = f"NCCL's documentation allows {MOST_ON_ONE} ranks on a GPU, and says that more of them hang"
        return f"ranks {list(ranks)} share the GPU {gpu}; {detail}"
    return ""


def _may_have_one() -> bool:
    if "cupy" in sys.modules:
        return True
    if os.environ.get(_VISIBLE) in _NOTHING or not any(path.exists() for path in _DRIVER):
        return False
    return find_spec("cupy") is not None
