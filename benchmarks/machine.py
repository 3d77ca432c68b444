"""What the numbers were measured on."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

PACKAGES = ("ray", "numpy", "torch", "xoscar", "pygloo", "mpich", "mpi4py", "raycollect")
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")


def describe() -> dict[str, str]:
    """What a reader must know to judge the numbers."""
    described = {
        "cpu": _cpu_model(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
        "system": f"{platform.system()} {platform.release()}",
        "huge pages": _chosen("enabled"),
        "huge pages of shared memory": _chosen("shmem_enabled"),
        "load before": f"{os.getloadavg()[0]:.2f}",
        "python": platform.python_version(),
    }
    for package in PACKAGES:
        try:
            described[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return described


def _cpu_model() -> str:
    models = [line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def _chosen(setting: str) -> str:
    """The word in brackets, as in ``always [madvise] never``."""
    words = " ".join(_lines(_HUGE_PAGES / setting)).split()
    return next((word.strip("[]") for word in words if word.startswith("[")), "unknown")


def _lines(path: str | Path) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
