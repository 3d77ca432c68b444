"""The limit of an arena: from the environment, or a share of the memory of this process."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from raycollect.errors.text import shown

VARIABLE = "RAYCOLLECT_ARENA_LIMIT"
"""Bytes, or a number with k, M or G (powers of 1024); 0 disables the arena."""
SHARE = 0.3
"""The share of the memory that one arena may take if the variable is not set."""

_UNITS = {"": 0, "k": 10, "m": 20, "g": 30}
_MOST = 1 << 47  # what a process can address
_CGROUPS = (("", "", "memory.max"), ("memory", "memory", "memory.limit_in_bytes"))
"""The controller named by a line of /proc/self/cgroup, the folder of its hierarchy, its file: v2, then v1."""


def arena_limit(environ: Mapping[str, str], root: Path = Path("/")) -> int:
    """The limit in bytes; 0: no arena.

    Raises:
        OSError: The variable is invalid.
    """
    text = environ.get(VARIABLE, "").strip()
    if not text:
        return int(usable_nbytes(root) * SHARE)
    match = re.fullmatch(r"([0-9]{1,18})([kmg]?)", text.lower())
    limit = int(match[1]) << _UNITS[match[2]] if match is not None else _MOST
    if limit >= _MOST:
        raise OSError(f"{VARIABLE} is {shown(text)}, expected a number of bytes below 2**47, or one with k, M or G")
    return limit


def usable_nbytes(root: Path = Path("/")) -> int:
    """The memory that this process may use: the machine's, or the lower limit of its control group."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *_cgroup_limits(root)])


def _cgroup_limits(root: Path) -> Iterator[int]:
    """Limits of control groups. In a container the path may be the host's; the group is then mounted at the top."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        for controller, folder, file in _CGROUPS:
            if controller in controllers.split(","):
                top = root / "sys/fs/cgroup" / folder
                here = top / path.lstrip("/")
                for group in (here, *(above for above in here.parents if above.is_relative_to(top))):
                    yield from _read(group / file)


def _read(file: Path) -> Iterator[int]:
    try:
        yield int(file.read_text())
    except (OSError, ValueError):  # the file is missing, or contains "max"
        return
