"""The GPU that a process has for the backend `nccl`, and whether the members of a group can meet on theirs.

A process that has none finds that out without importing cupy: it was given none, hides them, has no driver, or no cupy.
"""

from __future__ import annotations

import logging
import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from .capabilities import no_gpu

__all__ = ["SHARING", "SHARING_FROM", "Gpu", "here", "sharing", "why_not"]

SHARING_FROM = 23000
"""The NCCL that takes several ranks on one GPU, where `SHARING` is set before it is first used."""
SHARING = "NCCL_MULTI_RANK_GPU_ENABLE"

_log = logging.getLogger("raycollect")

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_NOTHING = ("", "-1", "NoDevFiles")
_DRIVER = (Path("/dev/nvidiactl"), Path("/dev/dxg"))
"""What there is where there is a driver; the last one under Windows' Linux."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU as `nccl` would take it, and what this process has to do so.

    Attributes:
        bus: Its place in its machine.
        version: NCCL's, as 22803 for 2.28.3.
        may_share: Whether the environment lets it share the GPU with other ranks.
    """

    bus: str
    version: int
    may_share: bool


def here(given: bool | None = None) -> Gpu | None:
    """The GPU that is current in the calling thread; None: there is none, or not all that `nccl` needs.

    Args:
        given: Whether whoever started this process gave it a GPU; None: that is not known, and its environment counts.
    """
    if given is False or not _may_have_one() or no_gpu():
        return None
    cupy, nccl = import_module("cupy"), import_module("cupy.cuda.nccl")
    try:
        bus = str(cupy.cuda.runtime.deviceGetPCIBusId(cupy.cuda.runtime.getDevice()))
        version = int(nccl.get_version())
    except Exception as exc:  # noqa: BLE001 - a device or a library that fails at its first call, in cupy's many kinds
        _log.warning("there is a GPU, but no group is formed on it: %s", exc)
        return None
    return Gpu(bus=bus, version=version, may_share=os.environ.get(SHARING, "1") == "1")


def why_not(machines: Sequence[str], gpus: Sequence[Gpu | None]) -> str:
    """Why members that have GPUs can't meet on them, or "".

    Args:
        machines: One machine id per member, as in `Member.machine`.
        gpus: What each has; all have one.
    """
    found = [one for one in gpus if one is not None]
    if len({one.version for one in found}) > 1:
        return "the ranks have different releases of NCCL"
    places = list(zip(machines, (one.bus for one in found), strict=True))
    shared = [place for place, count in Counter(places).items() if count > 1]
    if not shared or sharing(machines, gpus):
        return ""
    ranks = [rank for rank, place in enumerate(places) if place == shared[0]]
    if found[0].version < SHARING_FROM:
        return f"ranks {ranks} share a GPU, which NCCL takes from 2.30 on"
    return "" if all(one.may_share for one in found) else f"ranks {ranks} share a GPU, and {SHARING} forbids it"


def sharing(machines: Sequence[str], gpus: Sequence[Gpu | None]) -> str:
    """How several members work that all share one GPU, where NCCL does not take that; else "".

    Args:
        machines: As `why_not` has them.
        gpus: Likewise.
    """
    found = [one for one in gpus if one is not None]
    is_one = len({(machine, one.bus) for machine, one in zip(machines, found, strict=True)}) == 1
    return (
        "by CUDA IPC, as NCCL takes several on one from 2.30 on" if is_one and found[0].version < SHARING_FROM else ""
    )


def _may_have_one() -> bool:
    """Whether it is worth importing cupy to ask."""
    if "cupy" in sys.modules:
        return True
    if os.environ.get(_VISIBLE) in _NOTHING or not any(path.exists() for path in _DRIVER):
        return False
    return find_spec("cupy") is not None
