"""What `raycollect doctor` checks: what raycollect can use on this machine, and what to do about the rest.

A check looks, and changes nothing. Libraries are imported in child processes, since a broken one may end its process.
Ray is asked, never started.
"""

from __future__ import annotations

import json
import os
import platform
import re
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

import click

import raycollect
from raycollect import backends
from raycollect.core import shared_memory, threads
from raycollect.errors import InvalidArgumentError
from raycollect.group import link_costs
from raycollect.planner.wording import counted, nbytes_words

OK, WARNING, MISSING = "ok", "warning", "missing"  # works; works, but worse than it could; does not work
_COLOURS = {OK: "green", WARNING: "yellow", MISSING: "red"}

SHARE_OF_MEMORY = 0.1  # the part of the memory that /dev/shm has to have: Ray keeps its object store there
FEW = 4096  # too few open files, or processes, for one that drives actors

_CHILD_TIMEOUT_S = 60.0  # to import torch on a busy machine takes several seconds
_children = threading.Semaphore(4)


class Problem(Exception):
    """What a check has found to be wrong, in words."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table; nothing works without what is `required`."""

    section: str
    check: str
    state: str
    found: str
    cure: str = ""
    required: bool = False


@dataclass(frozen=True, slots=True)
class Check:
    """One check; `look` returns what is there, or the rows, and raises where it is not; `cure` is what to do then."""

    section: str
    name: str
    look: Callable[[], str | list[Row]]
    cure: str = ""
    required: bool = False
    state: str = WARNING  # where `look` raises and nothing is required

    def rows(self) -> list[Row]:
        """Looks. Never raises: the other checks are of use."""
        try:
            found = self.look()
        except Exception as exc:  # noqa: BLE001 - any
            told = str(exc) if isinstance(exc, Problem) else threads.cause_of(exc)
            state = MISSING if self.required else self.state
            return [Row(self.section, self.name, state, told, self.cure, self.required)]
        return [Row(self.section, self.name, OK, found, "", self.required)] if isinstance(found, str) else found


def checks() -> list[Check]:
    """All checks, in the order of the table."""
    shm = "docker run --shm-size=..., or mount -o remount,size=... /dev/shm: Ray keeps its object store there"
    sealed = "a Linux that has memfd_create and lets containers call it (seccomp); until then name backend='tcp'"
    apart = "one pid namespace, and /proc without hidepid, for all actors of a host; else tensors are copied"
    gpu = "nothing, where there is no GPU; else install the driver, and give the GPUs to the container (--gpus all)"
    ray = "ray start --head, or correct RAY_ADDRESS; or nothing: without either, the first declaration starts a cluster"
    must_have_costs = bool(os.environ.get(link_costs.ENVIRONMENT_VARIABLE))  # else no group can be declared
    costs = "raycollect bench --calibrate" + must_have_costs * f", or unset {link_costs.ENVIRONMENT_VARIABLE}"
    reinstall = "pip install --force-reinstall '{}>={}'"
    return [
        Check("software", "Python", python, "Linux is what shared memory and the tests are made for"),
        Check("software", "raycollect", this_package, "pip install raycollect"),
        *[
            Check("software", name, partial(package, name, least), reinstall.format(name, least), required=True)
            for name, least in requirements().items()
        ],
        *[Check("backends", ", ".join(names), partial(loaded, names)) for names in _with_one_library()],
        Check("GPUs", "NVIDIA driver", driver, gpu, state=MISSING),
        Check("shared memory", "/dev/shm", dev_shm, shm),
        Check("shared memory", "memfd", memfd, sealed, required=True),
        Check("shared memory", "other processes", other_processes, apart),
        Check("limits", "ulimit -n", partial(limit, resource.RLIMIT_NOFILE), "ulimit -n 65536, before Ray starts"),
        Check("limits", "ulimit -u", partial(limit, resource.RLIMIT_NPROC), "ulimit -u 65536, before Ray starts"),
        Check("planner", "measured costs", measured_costs, costs, required=must_have_costs),
        Check("cluster", "Ray cluster", cluster, ray, state=MISSING),
    ]


def examine() -> list[Row]:
    """Makes all checks side by side; returns their rows in the order of the table."""
    looks = [threads.call_in_helper(check.rows) for check in checks()]
    return [row for look in looks for row in look.result()]


def lacking(rows: Iterable[Row]) -> tuple[str, ...]:
    """Returns what is required and missing."""
    return tuple(row.check for row in rows if row.required and row.state == MISSING)


def table(rows: Sequence[Row]) -> list[str]:
    """The rows under the headings of their sections, each with what to do below it."""
    lines = list[str]()
    width = max((len(row.check) for row in rows), default=0)
    for section, of_section in groupby(rows, attrgetter("section")):
        lines += [section]
        for row in of_section:
            state = click.style(f"{row.state:<{len(WARNING)}}", fg=_COLOURS[row.state])
            lines += [f"  {state}  {row.check:<{width}}  {row.found}"]
            lines += [f"{'':{width + 13}}-> {row.cure}"] if row.cure else []
        lines += [""]
    return lines


def run_child(code: str, timeout_s: float = _CHILD_TIMEOUT_S) -> Any:
    """Runs code in an interpreter of this environment; returns the JSON on its last line, or raises Problem."""
    folder = str(Path(raycollect.__file__).parents[1])  # the child imports this raycollect, also from its sources
    path = os.environ.get("PYTHONPATH", "")
    if not folder.endswith("-packages"):  # in front of the path that one would hide modules of Python
        path = os.pathsep.join(filter(None, (folder, path)))
    command, environ = [sys.executable, "-c", code], {**os.environ, "PYTHONPATH": path}
    try:
        with _children:
            done = subprocess.run(command, env=environ, capture_output=True, errors="replace", timeout=timeout_s)
    except subprocess.TimeoutExpired as exc:
        raise Problem(f"no answer after {timeout_s:g} s") from exc
    if done.returncode < 0:
        raise Problem(f"its process was ended by {signal.Signals(-done.returncode).name}")
    if done.returncode:
        raise Problem(done.stderr.strip().rpartition("\n")[2] or f"its process ended with {done.returncode}")
    return json.loads(done.stdout.strip().rpartition("\n")[2])


# ---------------------------------------------------------------------------------------------- software


def python() -> str:
    """The interpreter and the system."""
    found = f"{platform.python_version()} on {platform.system()} {platform.release()}, {platform.machine()}"
    if platform.system() != "Linux":
        raise Problem(found)
    return found


def this_package() -> str:
    """This package, and from where it is imported."""
    found = f"{raycollect.__version__} in {Path(raycollect.__file__).parent}"
    if not requirements():
        raise Problem(f"{found}, not installed")
    return found


def requirements() -> dict[str, str]:
    """The packages that this one always needs, and their lowest versions; none if it is not installed."""
    try:
        lines = metadata.requires("raycollect") or []
    except metadata.PackageNotFoundError:
        lines = []
    found = (re.fullmatch(r"([\w.-]+)>=([\d.]+)", line) for line in lines)  # others are for extras
    return {one[1]: one[2] for one in found if one}


def package(name: str, least: str) -> str:
    """The version of a required package, which is imported."""
    code = f"import json, {name}, importlib.metadata\nprint(json.dumps(importlib.metadata.version({name!r})))"
    version: str = run_child(code)
    if _numbers(version) < _numbers(least):
        raise Problem(f"{version}, below {least}")
    return version


def _numbers(version: str) -> tuple[int, ...]:
    """The numbers of a version, to compare; suffixes such as in ``2.0rc1`` do not count."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()


def _with_one_library() -> list[tuple[str, ...]]:
    """The backends, those together that need the same libraries: a broken one ends the process that loads them."""
    found: dict[tuple[str, ...], list[str]] = {}
    for name, line in backends.BACKENDS.items():
        found.setdefault((name,) if line.factory else line.libraries, []).append(name)
    return [tuple(names) for names in found.values()]


_LOAD = """
import json
from raycollect import backends
lacks = {{}}
for name in {names!r}:
    try:
        lacks[name] = backends.lacks(name) or (backends.load(name) and "")
    except Exception as exc:
        lacks[name] = f"{{type(exc).__name__}}: {{exc}}"
print(json.dumps(lacks))
"""


def loaded(names: Sequence[str]) -> list[Row]:
    """Backends: what each can do, or lacks."""
    try:
        lacks = run_child(_LOAD.format(names=names))
    except Problem as exc:
        lacks = dict.fromkeys(names, str(exc))
    rows = []
    for name in names:
        line = backends.BACKENDS[name]
        if lacks[name]:
            required = not line.libraries and not line.factory
            rows.append(Row("backends", name, MISSING, lacks[name], line.install, required))
            continue
        reach = "one process" if line.one_process else "several hosts" if line.cross_host else "one host"
        tested = "" if line.tested else "; not tested by this project"
        rows.append(Row("backends", name, OK, f"{', '.join(sorted(line.devices))}; {reach}{tested}"))
    return rows


# ---------------------------------------------------------------------------------------------- the machine


def driver(root: Path = Path("/proc/driver/nvidia")) -> str:
    """The driver of NVIDIA's GPUs, and how many it sees."""
    try:
        version = (root / "version").read_text().partition("\n")[0]
    except OSError:
        raise Problem("no driver") from None
    gpus = len(list((root / "gpus").glob("*")))
    if not gpus:
        raise Problem(f"{version}, and no GPU")
    return f"{version}, {counted(gpus, 'GPU')}"


def dev_shm() -> str:
    """The size of /dev/shm, where Ray keeps its object store, against the memory that this process may use."""
    from raycollect.pos.limit import usable_nbytes  # with numpy

    stat, usable = os.statvfs("/dev/shm"), usable_nbytes()
    total, free = stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize
    found = f"{nbytes_words(total)}, {nbytes_words(free)} of it free; memory {nbytes_words(usable)}"
    if min(total, free) < SHARE_OF_MEMORY * usable:
        raise Problem(f"{found}: below {SHARE_OF_MEMORY:.0%}")
    return found


def memfd() -> str:
    """Whether sealed memory without a name can be made, which shm groups and arenas consist of."""
    os.close(shared_memory.create("raycollect-doctor", 1 << 20))
    return "memfd_create and its seals work"


def other_processes() -> str:
    """Whether a process of this user can open another one's memory, as arenas and doorbells do."""
    fd, token = shared_memory.create("raycollect-doctor", 4096), os.urandom(32)
    path = f"/proc/{os.getpid()}/fd/{fd}"
    try:
        os.pwrite(fd, token, 0)
        read = run_child(f"import json, os\nprint(json.dumps(os.pread(os.open({path!r}, os.O_RDWR), 32, 0).hex()))")
    finally:
        os.close(fd)
    if read != token.hex():
        raise Problem("/proc shows another process's memory")
    return "their memory opens under /proc/<pid>/fd"


def limit(which: int) -> str:
    """A limit of open files, of which a driver needs a few per actor, or of threads; each actor has dozens."""
    soft = resource.getrlimit(which)[0]
    if 0 <= soft < FEW:
        raise Problem(str(soft))
    return "unlimited" if soft < 0 else str(soft)


def measured_costs() -> str:
    """The file of measured costs, by which the planner chooses algorithms."""
    path, _, is_there = link_costs.looked_up(os.environ)
    if not is_there:
        raise Problem(f"no {path}: the planner uses defaults")
    try:
        links = link_costs.read(path).measured
    except InvalidArgumentError as exc:
        (wrong,) = exc.violations
        raise Problem(f"{wrong.field} is {wrong.found}") from exc
    return f"{path}: {', '.join(f'{one.place} over {one.backend}' for one in links) or 'no links'}"


_CLUSTER = """
import json
from raycollect.group import cluster_registry as registry
cluster = registry.ClusterReader(registry.find_cluster({address!r}))
print(json.dumps([cluster.address, cluster.alive_nodes(), len(cluster.groups())]))
"""


def cluster() -> str:
    """The cluster that a driver here would join. It is not joined, and none is started."""
    named = os.environ.get("RAY_ADDRESS") or None
    if named == "local":
        return "RAY_ADDRESS is local: each driver starts a cluster of its own"
    address, nodes, groups = run_child(_CLUSTER.format(address=named))
    return f"{address}: {counted(nodes, 'node')}, {counted(groups, 'group')} declared"
