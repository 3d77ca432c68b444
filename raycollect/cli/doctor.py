"""The checks of `raycollect doctor`: what raycollect can use on this machine, and how to get the rest.

A check changes nothing. Libraries are imported in child processes, since a broken library may end its process. Ray is
asked, never started.
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

import click
from packaging.requirements import Requirement  # Ray requires it

import raycollect
from raycollect import backends
from raycollect.core import shared_memory, threads
from raycollect.errors import InvalidArgumentError
from raycollect.group import link_costs
from raycollect.planner.wording import counted, nbytes_words

OK, WARNING, MISSING = "ok", "warning", "missing"  # works; works, but not well; does not work
_COLOURS = {OK: "green", WARNING: "yellow", MISSING: "red"}

SHARE_OF_MEMORY = 0.1  # the part of the memory that /dev/shm has to have: Ray keeps its object store there
FEW = 4096  # too few open files, or processes, for a process that drives actors

EXTRAS = {
    "torch": "torch tensors, raycollect.torch, the backends torch:<name>",
    "gloo": "the backend gloo",
    "cuda12": "the backend nccl, on GPUs with CUDA 12",
    "cuda13": "the backend nccl, on GPUs with CUDA 13",
    "progress": "progress bars",
    "top": "raycollect top",
    "notebook": "JupyterLab with bars as widgets",
    "rllib": "the examples with RLlib",
    "spacy": "the examples with spaCy",
    "demo": "the examples with scikit-learn",
    "bench": "benchmarks beside gloo and MPI",
}
"""What each extra is for; further extras are for contributors, and CONTRIBUTING.md names them."""

_CHILD_TIMEOUT_S = 60.0  # to import torch on a busy machine takes several seconds
_children = threading.Semaphore(4)


class Problem(Exception):
    """The problem that a check has found, as text."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One row of the table; nothing works if a `required` item is missing."""

    section: str
    check: str
    state: str
    found: str
    cure: str = ""
    required: bool = False


@dataclass(frozen=True, slots=True)
class Check:
    """One check; `look` returns a description, or the rows, and raises if there is a problem, which `cure` solves."""

    section: str
    name: str
    look: Callable[[], str | list[Finding]]
    cure: str = ""
    required: bool = False
    state: str = WARNING  # if `look` raises and the item is not required

    def rows(self) -> list[Finding]:
        """Runs the check. Never raises, as the other checks are useful."""
        try:
            result = self.look()
        except Exception as exc:  # noqa: BLE001 - any
            problem = str(exc) if isinstance(exc, Problem) else threads.cause_of(exc)
            state = MISSING if self.required else self.state
            return [Finding(self.section, self.name, state, problem, self.cure, self.required)]
        return [Finding(self.section, self.name, OK, result, "", self.required)] if isinstance(result, str) else result


def checks() -> list[Check]:
    """Returns all checks, in the order of the table."""
    shm = "docker run --shm-size=..., or mount -o remount,size=... /dev/shm: Ray keeps its object store there"
    sealed = "a Linux that has memfd_create and lets containers call it (seccomp); until then name backend='tcp'"
    namespaces = "one pid namespace, and /proc without hidepid, for all actors of a host; else tensors are copied"
    gpu = "nothing, without a GPU; else install the driver, and give the GPUs to the container (--gpus all)"
    ray = "correct RAY_ADDRESS, or unset it: a driver needs no running cluster, and starts Ray"
    if not os.environ.get("RAY_ADDRESS"):
        ray = "ray stop, if that cluster has ended; or RAY_ADDRESS=local: a driver needs none, and starts Ray"
    must_have_costs = bool(os.environ.get(link_costs.ENVIRONMENT_VARIABLE))  # else no group can be declared
    costs = "raycollect bench --calibrate" + must_have_costs * f", or unset {link_costs.ENVIRONMENT_VARIABLE}"
    add = "pip install 'raycollect[{0}]', or '.[{0}]' in a clone"
    reinstall = "pip install --force-reinstall '{}>={}'"
    return [
        Check("software", "Python", python, "use Linux, which shared memory and the tests require"),
        Check("software", "raycollect", this_package, "pip install raycollect"),
        *[
            Check("software", name, partial(package, name, least), reinstall.format(name, least), required=True)
            for name, least in requirements().items()
        ],
        *[Check("backends", ", ".join(names), partial(loaded, names)) for names in _with_one_library()],
        *[Check("extras", name, partial(extra, name), add.format(name), state=MISSING) for name in EXTRAS],
        Check("GPUs", "NVIDIA driver", driver, gpu, state=MISSING),
        Check("shared memory", "/dev/shm", dev_shm, shm),
        Check("shared memory", "memfd", memfd, sealed, required=True),
        Check("shared memory", "other processes", other_processes, namespaces),
        Check("limits", "ulimit -n", partial(limit, resource.RLIMIT_NOFILE), "ulimit -n 65536, before Ray starts"),
        Check("limits", "ulimit -u", partial(limit, resource.RLIMIT_NPROC), "ulimit -u 65536, before Ray starts"),
        Check("planner", "measured costs", measured_costs, costs, required=must_have_costs),
        Check("cluster", "Ray cluster", cluster, ray, state=MISSING),
    ]


def examine() -> list[Finding]:
    """Runs all checks concurrently; returns their rows in the order of the table."""
    looks = [threads.call_in_helper(check.rows) for check in checks()]
    return [row for look in looks for row in look.result()]


def lacking(rows: Iterable[Finding]) -> tuple[str, ...]:
    """Returns the required items that are missing."""
    return tuple(row.check for row in rows if row.required and row.state == MISSING)


def table(rows: Sequence[Finding]) -> list[str]:
    """Returns the rows under the headings of their sections, each with its cure below it."""
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
    if not folder.endswith("-packages"):  # at the front of the path, site-packages would hide modules of Python
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
    """Returns the interpreter and the system."""
    description = f"{platform.python_version()} on {platform.system()} {platform.release()}, {platform.machine()}"
    if platform.system() != "Linux":
        raise Problem(description)
    return description


def this_package() -> str:
    """Returns the version and the location of this package."""
    description = f"{raycollect.__version__} in {Path(raycollect.__file__).parent}"
    if not requirements():
        raise Problem(f"{description}, not installed")
    return description


def requirements() -> dict[str, str]:
    """Returns the required packages and their lowest versions; none if raycollect is not installed."""
    try:
        lines = metadata.requires("raycollect") or []
    except metadata.PackageNotFoundError:
        lines = []
    matches = (re.fullmatch(r"([\w.-]+)>=([\d.]+)", line) for line in lines)  # others are for extras
    return {match[1]: match[2] for match in matches if match}


def extra(name: str) -> str:
    """Returns what an extra is for, if its packages are installed; imports none of them."""
    own = list(_requirements("raycollect", name))
    missing = list(_missing(own)) if own else ["its packages: this installation of raycollect is older"]
    if missing:
        raise Problem(f"{EXTRAS[name]}; without {', '.join(missing)}")
    return EXTRAS[name]


def _requirements(distribution: str, extra: str) -> Iterator[Requirement]:
    """The requirements that an extra adds to those of an installed distribution."""
    for line in map(Requirement, metadata.requires(distribution) or []):
        if line.marker and not line.marker.evaluate({"extra": ""}) and line.marker.evaluate({"extra": extra}):
            yield line


def _missing(requirements: Iterable[Requirement]) -> Iterator[str]:
    """The requirements that are not installed, with those of the extras that they name."""
    for requirement in requirements:
        try:
            is_new_enough = requirement.specifier.contains(metadata.version(requirement.name), prereleases=True)
        except metadata.PackageNotFoundError:
            is_new_enough = False
        if not is_new_enough:
            yield f"{requirement.name}{requirement.specifier}"
            continue
        for extra in requirement.extras:
            yield from _missing(_requirements(requirement.name, extra))


def package(name: str, least: str) -> str:
    """Imports a required package; returns its version."""
    code = f"import json, {name}, importlib.metadata\nprint(json.dumps(importlib.metadata.version({name!r})))"
    version: str = run_child(code)
    if _numbers(version) < _numbers(least):
        raise Problem(f"{version}, below {least}")
    return version


def _numbers(version: str) -> tuple[int, ...]:
    """Returns the numbers of a version, to compare; suffixes such as in ``2.0rc1`` do not count."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()


def _with_one_library() -> list[tuple[str, ...]]:
    """Groups the backends by the libraries that they need: a broken library ends the process that loads it."""
    by_libraries: dict[tuple[str, ...], list[str]] = {}
    for name, line in backends.BACKENDS.items():
        by_libraries.setdefault((name,) if line.factory else line.libraries, []).append(name)
    return [tuple(names) for names in by_libraries.values()]


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


def loaded(names: Sequence[str]) -> list[Finding]:
    """Returns what each backend can do, or lacks."""
    try:
        lacks = run_child(_LOAD.format(names=names))
    except Problem as exc:
        lacks = dict.fromkeys(names, str(exc))
    rows = []
    for name in names:
        line = backends.BACKENDS[name]
        if lacks[name]:
            required = not line.libraries and not line.factory
            rows.append(Finding("backends", name, MISSING, lacks[name], line.install, required))
            continue
        reach = "one process" if line.one_process else "several hosts" if line.cross_host else "one host"
        tested = "" if line.tested else "; not tested by this project"
        rows.append(Finding("backends", name, OK, f"{', '.join(sorted(line.devices))}; {reach}{tested}"))
    return rows


# ---------------------------------------------------------------------------------------------- the machine


def driver(root: Path = Path("/proc/driver/nvidia")) -> str:
    """Returns the driver of NVIDIA's GPUs, and how many GPUs it sees."""
    try:
        version = (root / "version").read_text().partition("\n")[0]
    except OSError:
        raise Problem("no driver") from None
    gpus = len(list((root / "gpus").glob("*")))
    if not gpus:
        raise Problem(f"{version}, and no GPU")
    return f"{version}, {counted(gpus, 'GPU')}"


def dev_shm() -> str:
    """Compares /dev/shm, where Ray keeps its object store, with the memory that this process may use."""
    from raycollect.pos.limit import usable_nbytes  # with numpy

    stat, usable = os.statvfs("/dev/shm"), usable_nbytes()
    total, free = stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize
    description = f"{nbytes_words(total)}, {nbytes_words(free)} of it free; memory {nbytes_words(usable)}"
    if min(total, free) < SHARE_OF_MEMORY * usable:
        raise Problem(f"{description}: below {SHARE_OF_MEMORY:.0%}")
    return description


def memfd() -> str:
    """Checks whether sealed memory without a name can be made, for shm groups and arenas."""
    os.close(shared_memory.create("raycollect-doctor", 1 << 20))
    return "memfd_create and its seals work"


def other_processes() -> str:
    """Checks whether a process of this user can open another process's memory, as arenas and doorbells do."""
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
    """Returns the limit of open files (a driver needs a few per actor) or of threads (each actor has dozens)."""
    soft = resource.getrlimit(which)[0]
    if 0 <= soft < FEW:
        raise Problem(str(soft))
    return "unlimited" if soft < 0 else str(soft)


def measured_costs() -> str:
    """Returns the file of measured costs, by which the planner chooses algorithms."""
    path, _, is_there = link_costs.looked_up(os.environ)
    if not is_there:
        raise Problem(f"no {path}: the planner uses defaults")
    try:
        links = link_costs.read(path).measured
    except InvalidArgumentError as exc:
        (wrong,) = exc.violations
        raise Problem(f"{wrong.field} is {wrong.found}") from exc
    return f"{path}: {', '.join(f'{link.place} over {link.backend}' for link in links) or 'no links'}"


_CLUSTER = """
import json
from raycollect.group import cluster_registry as registry
try:
    address = registry.find_cluster({address!r})
except ConnectionError:
    if {address!r}:
        raise
    print(json.dumps(["", 0, 0]))
    raise SystemExit
cluster = registry.ClusterReader(address)
print(json.dumps([cluster.address, cluster.alive_nodes(), len(cluster.groups())]))
"""


def cluster() -> str:
    """Returns the cluster that a driver here joins, or that it starts Ray. The check does neither."""
    named = os.environ.get("RAY_ADDRESS") or None
    if named == "local":
        return "RAY_ADDRESS is local: a driver here starts Ray"
    address, nodes, groups = run_child(_CLUSTER.format(address=named))
    if not address:
        return "none runs here: a driver here starts Ray"
    return f"a driver here joins {address}: {counted(nodes, 'node')}, {counted(groups, 'group')} declared"
