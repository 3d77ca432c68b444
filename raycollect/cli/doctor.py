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
import textwrap
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import raycollect
from raycollect import backends
from raycollect.core import shared_memory, threads
from raycollect.errors import InvalidArgumentError
from raycollect.group import link_costs
from raycollect.planner.wording import counted, nbytes_words

OK, WARNING, MISSING = "ok", "warning", "missing"  # works; works, but worse than it could; does not work

SHARE_OF_MEMORY = 0.1  # the part of the memory that /dev/shm has to have: Ray keeps its object store there
FEW = 4096  # too few open files, or processes, for one that drives actors

_CHILD_TIMEOUT_S = 60.0  # to import torch on a busy machine takes several seconds
_children = threading.Semaphore(4)


@dataclass(frozen=True, slots=True)
class Row:
    """One row; `cure` is empty where there is nothing to do, and nothing works without what is `required`."""

    state: str
    found: str
    cure: str = ""
    check: str = ""
    section: str = ""
    required: bool = False


class ChildError(Exception):
    """A child process ended before it answered."""


def run_child(code: str, timeout_s: float = _CHILD_TIMEOUT_S) -> Any:
    """Runs code in an interpreter of this environment; returns the JSON on its last line, or raises ChildError."""
    folder = str(Path(raycollect.__file__).parents[1])  # the child imports this raycollect, also from its sources
    path = os.environ.get("PYTHONPATH", "")
    if not folder.endswith("-packages"):  # in front of the path that one would hide modules of Python
        path = os.pathsep.join(filter(None, (folder, path)))
    command, environ = [sys.executable, "-c", code], {**os.environ, "PYTHONPATH": path}
    try:
        with _children:
            done = subprocess.run(command, env=environ, capture_output=True, errors="replace", timeout=timeout_s)
    except subprocess.TimeoutExpired as exc:
        raise ChildError(f"no answer after {timeout_s:g} s") from exc
    if done.returncode < 0:
        raise ChildError(f"its process was ended by {signal.Signals(-done.returncode).name}")
    if done.returncode:
        raise ChildError(done.stderr.strip().rpartition("\n")[2] or f"its process ended with {done.returncode}")
    return json.loads(done.stdout.strip().rpartition("\n")[2])


def examine() -> tuple[Row, ...]:
    """Makes all checks side by side; returns their rows in the order of the table."""
    checks: list[tuple[str, str, bool, Callable[[], Row | Sequence[Row]]]] = [
        ("software", "Python", True, python),
        ("software", "raycollect", True, this_package),
        *[("software", name, True, partial(package, name, least)) for name, least in requirements().items()],
        *[("backends", ", ".join(names), False, partial(loaded, names)) for names in _with_one_library()],
        ("GPUs", "NVIDIA driver", False, driver),
        ("shared memory", "/dev/shm", False, dev_shm),
        ("shared memory", "memfd", True, memfd),
        ("shared memory", "other processes", False, other_processes),
        ("shared memory", "arena", False, arena),
        ("limits", "ulimit -n", False, partial(limit, "n", resource.getrlimit(resource.RLIMIT_NOFILE)[0])),
        ("limits", "ulimit -u", False, partial(limit, "u", resource.getrlimit(resource.RLIMIT_NPROC)[0])),
        ("limits", "cores", False, cores),
        ("planner", "measured costs", False, measured_costs),
        ("cluster", "Ray cluster", False, cluster),
    ]
    looks = [threads.apart(rows_of, *check) for check in checks]
    return tuple(row for look in looks for row in look.result())


def rows_of(section: str, check: str, required: bool, look: Callable[[], Row | Sequence[Row]]) -> list[Row]:
    """Makes a check; one that fails is a row, as the others are of use."""
    try:
        made = look()
    except Exception as exc:  # noqa: BLE001 - any, a child's too
        made = Row(MISSING if required else WARNING, f"the check failed: {type(exc).__name__}: {exc}")
    return [
        replace(row, section=section, check=row.check or check, required=row.required or required)
        for row in ([made] if isinstance(made, Row) else made)
    ]


def lacking(rows: Iterable[Row]) -> tuple[str, ...]:
    """Returns what is required and missing."""
    return tuple(row.check for row in rows if row.required and row.state == MISSING)


def table(rows: Sequence[Row], width: int = 120) -> list[tuple[str, str]]:
    """The rows as lines of text under their headings, each with its state, or empty, and what to do below it."""
    widest = max((len(row.check) for row in rows), default=0)
    indent = " " * (2 + len(WARNING) + 2 + widest + 2)
    wrap = partial(textwrap.wrap, width=max(width, len(indent) + 40), break_long_words=False, break_on_hyphens=False)
    lines, section = list[tuple[str, str]](), ""
    for row in rows:
        if row.section != section:
            lines += [("", ""), ("", row.section)] if section else [("", row.section)]
            section = row.section
        head = f"  {row.state:<{len(WARNING)}}  {row.check:<{widest}}  "
        first, *others = wrap(row.found, initial_indent=head, subsequent_indent=indent) or [head.rstrip()]
        cures = wrap(row.cure, initial_indent=f"{indent}-> ", subsequent_indent=f"{indent}   ")
        lines += [(row.state, first), *(("", line) for line in (*others, *cures))]
    return lines


# ---------------------------------------------------------------------------------------------- software


def python() -> Row:
    """The interpreter and the system."""
    found = f"{platform.python_version()} on {platform.system()} {platform.release()}, {platform.machine()}"
    if platform.system() == "Linux":
        return Row(OK, found)
    return Row(WARNING, found, "Linux is what shared memory and the tests are made for")


def this_package() -> Row:
    """This package, and from where it is imported."""
    found = f"{raycollect.__version__} in {Path(raycollect.__file__).parent}"
    return Row(OK, found) if requirements() else Row(WARNING, f"{found}, not installed", "pip install raycollect")


def requirements() -> dict[str, str]:
    """The packages that this one always needs, and their lowest versions; none if it is not installed."""
    try:
        lines = metadata.requires("raycollect") or []
    except metadata.PackageNotFoundError:
        lines = []
    found = (re.fullmatch(r"([\w.-]+)>=([\d.]+)", line) for line in lines)  # others are for extras
    return {one[1]: one[2] for one in found if one}


def package(name: str, least: str) -> Row:
    """A required package: its version, and whether it can be imported."""
    cure = f"pip install --force-reinstall '{name}>={least}'"
    code = f"import json, {name}, importlib.metadata\nprint(json.dumps(importlib.metadata.version({name!r})))"
    try:
        version = run_child(code)
    except ChildError as exc:
        return Row(MISSING, f"it can't be imported: {exc}", cure)
    if _numbers(version) < _numbers(least):
        return Row(MISSING, f"{version}, below {least}", cure)
    return Row(OK, version)


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
    except ChildError as exc:
        lacks = dict.fromkeys(names, str(exc))
    rows = []
    for name in names:
        line = backends.BACKENDS[name]
        if lacks[name]:
            required = not line.libraries and not line.factory
            rows.append(Row(MISSING, lacks[name], line.install, name, required=required))
            continue
        reach = "one process" if line.one_process else "several hosts" if line.cross_host else "one host"
        tested = "" if line.tested else "; not tested by this project"
        rows.append(Row(OK, f"{', '.join(sorted(line.devices))}; {reach}{tested}", check=name))
    return rows


# ---------------------------------------------------------------------------------------------- GPUs


def driver(root: Path = Path("/")) -> Row:
    """The driver of NVIDIA's GPUs, and how many it sees."""
    text = _read(root / "proc/driver/nvidia/version")
    if not text:
        cure = "nothing, where there is no GPU; else install the driver, and give it to the container (--gpus all)"
        return Row(MISSING, "no driver", cure)
    version = re.search(r"\s(\d+\.\d+[\d.]*)\s", f"{text} ")
    gpus = len(list((root / "proc/driver/nvidia/gpus").glob("*")))
    found = f"{version[1] if version else text.splitlines()[0]}, {counted(gpus, 'GPU')}"
    return Row(OK, found) if gpus else Row(WARNING, found, "give the container a GPU (--gpus all)")


# ---------------------------------------------------------------------------------------------- shared memory


def dev_shm() -> Row:
    """The size of /dev/shm, where Ray keeps its object store, against the memory that this process may use."""
    from raycollect.pos.limit import usable_nbytes  # with numpy

    cure = "docker run --shm-size=..., or mount -o remount,size=... /dev/shm: Ray keeps its object store there"
    try:
        stat = os.statvfs("/dev/shm")
    except OSError as exc:
        return Row(WARNING, f"not there: {exc.strerror}", cure)
    usable = usable_nbytes()
    total, free = stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize
    found = f"{nbytes_words(total)}, {nbytes_words(free)} of it free; memory {nbytes_words(usable)}"
    if min(total, free) < SHARE_OF_MEMORY * usable:
        return Row(WARNING, f"{found}: below {SHARE_OF_MEMORY:.0%}", cure)
    return Row(OK, found)


def memfd() -> Row:
    """Whether sealed memory without a name can be made, which shm groups and arenas consist of."""
    try:
        os.close(shared_memory.create("raycollect-doctor", 1 << 20))
    except (OSError, AttributeError) as exc:
        cure = "a Linux that has memfd_create and lets containers call it (seccomp); until then name backend='tcp'"
        return Row(MISSING, str(exc), cure)
    return Row(OK, "memfd_create and its seals work")


def other_processes() -> Row:
    """Whether a process of this user can open another one's memory, as arenas and doorbells do."""
    cure = "one pid namespace, and /proc without hidepid, for all actors of a host; else tensors are copied"
    fd, token = shared_memory.create("raycollect-doctor", 4096), os.urandom(32)
    path = f"/proc/{os.getpid()}/fd/{fd}"
    try:
        os.pwrite(fd, token, 0)
        read = run_child(f"import json, os\nprint(json.dumps(os.pread(os.open({path!r}, os.O_RDWR), 32, 0).hex()))")
    except ChildError as exc:
        return Row(WARNING, f"memory of another process can't be opened under /proc: {exc}", cure)
    finally:
        os.close(fd)
    if read != token.hex():
        return Row(WARNING, "/proc shows another process's memory", cure)
    return Row(OK, "their memory opens under /proc/<pid>/fd")


def arena() -> Row:
    """The limit of shared memory for the tensors of a process."""
    from raycollect.pos import limit  # with numpy

    try:
        nbytes = limit.arena_limit(os.environ)
    except OSError as exc:
        return Row(WARNING, str(exc), f"correct or unset {limit.VARIABLE}")
    if not nbytes:
        return Row(WARNING, "switched off", f"unset {limit.VARIABLE}")
    why = limit.VARIABLE if os.environ.get(limit.VARIABLE, "").strip() else f"{limit.SHARE:.0%} of the memory"
    return Row(OK, f"up to {nbytes_words(nbytes)} per process ({why})")


# ---------------------------------------------------------------------------------------------- limits


def limit(letter: str, soft: int) -> Row:
    """A limit of open files, of which a driver needs a few per actor, or of threads; each actor has dozens."""
    if 0 <= soft < FEW:
        return Row(WARNING, str(soft), f"ulimit -{letter} 65536, before Ray starts")
    return Row(OK, "unlimited" if soft < 0 else str(soft))


def cores(root: Path = Path("/")) -> Row:
    """The cores that this process may use, by its mask and by the quota of its cgroup."""
    count, match = len(os.sched_getaffinity(0)), re.fullmatch(r"(\d+) (\d+)", _read(root / "sys/fs/cgroup/cpu.max"))
    quota = int(match[1]) / int(match[2]) if match else float(count)
    found = f"{count} of {os.cpu_count()}" + (f", with the time of {quota:g} by its cgroup" if match else "")
    if min(count, quota) < 2:
        return Row(WARNING, found, "two cores or more: ranks that wait for each other take turns on one")
    return Row(OK, found)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


# ---------------------------------------------------------------------------------------------- planner and cluster


def measured_costs() -> Row:
    """The file of measured costs, by which the planner chooses algorithms."""
    cure, variable = "raycollect bench --calibrate", link_costs.ENVIRONMENT_VARIABLE
    path, is_named, is_there = link_costs.looked_up(os.environ)
    if not is_there:
        return Row(WARNING, f"no {path}: the planner uses defaults", cure)
    try:
        links = link_costs.read(path, source=variable if is_named else "the file").measured
    except InvalidArgumentError as exc:
        (violation,) = exc.violations
        found = f"{violation.field} is {violation.found}"
        if not is_named:
            return Row(WARNING, f"{found}: the planner uses defaults", cure)
        cure = f"unset {variable}, or {cure} --output {path}"
        return Row(MISSING, f"{found}: no group can be declared", cure, required=True)
    return Row(OK, f"{path}: {', '.join(f'{one.place} over {one.backend}' for one in links) or 'no links'}")


# It prints the address, the numbers of nodes and groups, and a problem.
_CLUSTER = """
import json
from raycollect.group import cluster_registry
address, nodes, groups, problem = None, 0, 0, ""
try:
    address = cluster_registry.find_cluster({address!r})
    cluster = cluster_registry.ClusterReader(address)
    nodes, groups = cluster.alive_nodes(), len(cluster.groups())
except (ConnectionError, RuntimeError) as exc:
    problem = str(exc)
print(json.dumps([address, nodes, groups, problem]))
"""


def cluster() -> Row:
    """Whether a cluster runs that a driver here would join. It is not joined, and none is started."""
    named = os.environ.get("RAY_ADDRESS") or None
    if named == "local":
        return Row(OK, "RAY_ADDRESS is local: each driver starts a cluster of its own")
    try:
        address, nodes, groups, problem = run_child(_CLUSTER.format(address=named))
    except ChildError as exc:
        address, nodes, groups, problem = None, 0, 0, str(exc)
    if not problem:
        return Row(OK, f"{address}: {counted(nodes, 'node')}, {counted(groups, 'group')} declared")
    if named:
        return Row(WARNING, problem, "correct or unset RAY_ADDRESS")
    if address:
        return Row(WARNING, problem, "stop that one, or say in RAY_ADDRESS which one drivers shall join")
    cure = "ray start --head; or nothing: without a cluster the first declaration starts one of its own"
    return Row(MISSING, problem, cure)
