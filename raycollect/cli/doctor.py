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
from collections.abc import Callable, Iterable, Mapping, Sequence
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


Ask = Callable[[str], dict[str, Any]]
"""Runs code in a child process, and returns the JSON object on its last line; raises ChildError."""


def run_child(code: str, timeout_s: float = _CHILD_TIMEOUT_S) -> dict[str, Any]:
    """Does what `Ask` says, in an interpreter of this environment."""
    folder = str(Path(raycollect.__file__).parents[1])  # the child imports this raycollect, also from its sources
    path = os.environ.get("PYTHONPATH", "")
    if not folder.endswith("-packages"):  # in front of the path that one would hide modules of Python
        path = os.pathsep.join(filter(None, (folder, path)))
    command, environ = [sys.executable, "-c", code], {**os.environ, "PYTHONPATH": path}
    try:
        with _children:
            done = subprocess.run(
                command, env=environ, capture_output=True, errors="replace", timeout=timeout_s, check=False
            )
    except subprocess.TimeoutExpired as exc:
        raise ChildError(f"no answer after {timeout_s:g} s") from exc
    except OSError as exc:
        raise ChildError(f"no process could be started: {exc}") from exc
    last = (done.stderr if done.returncode else done.stdout).strip().rpartition("\n")[2]
    if done.returncode < 0:
        last = f"its process was ended by {signal.Signals(-done.returncode).name}"
    if done.returncode:
        raise ChildError(last or f"its process ended with {done.returncode}")
    answer: dict[str, Any] = json.loads(last)
    return answer


def examine(ask: Ask = run_child, root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> tuple[Row, ...]:
    """Makes all checks side by side; returns their rows in the order of the table."""
    checks: list[tuple[str, str, bool, Callable[[], Row | Sequence[Row]]]] = [
        ("software", "Python", True, python),
        ("software", "raycollect", True, this_package),
        *[("software", name, True, partial(package, ask, name, least)) for name, least in requirements().items()],
        *[("backends", ", ".join(names), False, partial(loaded, ask, names)) for names in _with_one_library()],
        ("GPUs", "NVIDIA driver", False, partial(driver, root)),
        ("GPUs", "cupy", False, partial(library, ask, _CUPY, "pip install 'raycollect[cuda12]' (or cuda13)")),
        ("GPUs", "torch with CUDA", False, partial(library, ask, _TORCH, "pip install torch (a CUDA build)")),
        ("shared memory", "/dev/shm", False, partial(dev_shm, root)),
        ("shared memory", "memfd", True, memfd),
        ("shared memory", "other processes", False, partial(other_processes, ask)),
        ("shared memory", "arena", False, partial(arena, root, environ)),
        ("limits", "ulimit -n", False, partial(limit, "n", resource.getrlimit(resource.RLIMIT_NOFILE)[0])),
        ("limits", "ulimit -u", False, partial(limit, "u", resource.getrlimit(resource.RLIMIT_NPROC)[0])),
        ("limits", "cores", False, partial(cores, root)),
        ("planner", "measured costs", False, partial(measured_costs, environ)),
        ("cluster", "Ray cluster", False, partial(cluster, ask, environ)),
    ]
    looks = [threads.apart(_rows, *check) for check in checks]
    return tuple(row for look in looks for row in look.result())


def _rows(section: str, check: str, required: bool, look: Callable[[], Row | Sequence[Row]]) -> list[Row]:
    try:
        made = look()
    except Exception as exc:  # noqa: BLE001 - any: the other rows are of use
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
    width = max(width, len(indent) + 40)
    lines, section = list[tuple[str, str]](), ""

    def add(state: str, text: str, first: str, others: str) -> None:
        filled = textwrap.fill(
            text,
            width,
            initial_indent=first,
            subsequent_indent=others,
            break_long_words=False,
            break_on_hyphens=False,
        )
        lines.extend(zip([state, *[""] * filled.count("\n")], (filled or first.rstrip()).split("\n"), strict=True))

    for row in rows:
        if row.section != section:
            lines += [("", ""), ("", row.section)] if section else [("", row.section)]
            section = row.section
        add(row.state, row.found, f"  {row.state:<{len(WARNING)}}  {row.check:<{widest}}  ", indent)
        if row.cure:
            add("", row.cure, f"{indent}-> ", f"{indent}   ")
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


def package(ask: Ask, name: str, least: str) -> Row:
    """A required package: its version, and whether it can be imported."""
    cure = f"pip install --force-reinstall '{name}>={least}'"
    try:
        version = ask(_VERSION.format(name=name))["version"]
    except ChildError as exc:
        return Row(MISSING, f"it can't be imported: {exc}", cure)
    if _numbers(version) < _numbers(least):
        return Row(MISSING, f"{version}, below {least}", cure)
    return Row(OK, version)


_VERSION = """
import importlib, importlib.metadata, json
importlib.import_module({name!r})
print(json.dumps({{"version": importlib.metadata.version({name!r})}}))
"""


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


def loaded(ask: Ask, names: Sequence[str]) -> list[Row]:
    """Backends: what each can do, or lacks."""
    try:
        lacks = ask(_LOAD.format(names=names))
    except ChildError as exc:
        lacks = dict.fromkeys(names, str(exc))
    return [_backend(name, lacks[name]) for name in names]


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


def _backend(name: str, lacks: str) -> Row:
    line = backends.BACKENDS[name]
    if lacks:
        return Row(MISSING, lacks, line.install, name, required=not line.libraries and not line.factory)
    reach = "one process" if line.one_process else "several hosts" if line.cross_host else "one host"
    tested = "" if line.tested else "; not tested by this project"
    return Row(OK, f"{', '.join(sorted(line.devices))}; {reach}{tested}", check=name)


# ---------------------------------------------------------------------------------------------- GPUs


def driver(root: Path) -> Row:
    """The driver of NVIDIA's GPUs, and how many it sees."""
    text = _read(root, "proc/driver/nvidia/version")
    if not text:
        cure = "nothing, where there is no GPU; else install the driver, and give it to the container (--gpus all)"
        return Row(MISSING, "no driver", cure)
    version = re.search(r"\s(\d+\.\d+[\d.]*)\s", f"{text} ")
    gpus = len(list((root / "proc/driver/nvidia/gpus").glob("*")))
    found = f"{version[1] if version else text.splitlines()[0]}, {counted(gpus, 'GPU')}"
    return Row(OK, found) if gpus else Row(WARNING, found, "give the container a GPU (--gpus all)")


def library(ask: Ask, code: str, install: str) -> Row:
    """A library with its GPUs and its NCCL."""
    cure = f"of use only with an NVIDIA GPU: {install}"
    try:
        said = ask(code)
    except ChildError as exc:
        return Row(MISSING, f"it can't be imported: {exc}", cure)
    nccl = f"NCCL {said['nccl']}" if said["nccl"] else "no NCCL"
    found = f"{said['version']}, {counted(said['gpus'], 'GPU')}, {nccl}"
    found += f" ({said['problem']})" if said["problem"] else ""
    return Row(OK, found) if said["gpus"] and said["nccl"] else Row(WARNING, found, cure)


_CUPY = """
import json
import cupy
said = {"version": cupy.__version__, "gpus": 0, "nccl": "", "problem": ""}
try:
    said["gpus"] = cupy.cuda.runtime.getDeviceCount()
    from cupy.cuda import nccl
    number = nccl.get_version()
    said["nccl"] = f"{number // 10_000}.{number // 100 % 100}.{number % 100}"
except Exception as exc:
    said["problem"] = str(exc)
print(json.dumps(said))
"""

_TORCH = """
import json
import torch
said = {"version": torch.__version__, "gpus": torch.cuda.device_count(), "nccl": "", "problem": ""}
try:
    said["nccl"] = ".".join(map(str, torch.cuda.nccl.version())) if torch.version.cuda else ""
except Exception as exc:
    said["problem"] = str(exc)
print(json.dumps(said))
"""


# ---------------------------------------------------------------------------------------------- shared memory


def dev_shm(root: Path) -> Row:
    """The size of /dev/shm, where Ray keeps its object store, against the memory that this process may use."""
    from raycollect.pos.limit import usable_nbytes  # with numpy

    cure = "docker run --shm-size=..., or mount -o remount,size=... /dev/shm: Ray keeps its object store there"
    try:
        stat = os.statvfs(root / "dev/shm")
    except OSError as exc:
        return Row(WARNING, f"not there: {exc.strerror}", cure)
    usable = usable_nbytes(root)
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


def other_processes(ask: Ask) -> Row:
    """Whether a process of this user can open another one's memory, as arenas and doorbells do."""
    cure = "one pid namespace, and /proc without hidepid, for all actors of a host; else tensors are copied"
    fd = shared_memory.create("raycollect-doctor", 4096)
    token = os.urandom(32)
    try:
        os.pwrite(fd, token, 0)
        is_same = ask(_OPEN.format(pid=os.getpid(), fd=fd))["token"] == token.hex()
    except ChildError as exc:
        return Row(WARNING, f"memory of another process can't be opened under /proc: {exc}", cure)
    finally:
        os.close(fd)
    if not is_same:
        return Row(WARNING, "/proc shows another process's memory", cure)
    return Row(OK, "their memory opens under /proc/<pid>/fd")


_OPEN = """
import json, os
fd = os.open("/proc/{pid}/fd/{fd}", os.O_RDWR)
print(json.dumps({{"token": os.pread(fd, 32, 0).hex()}}))
"""


def arena(root: Path, environ: Mapping[str, str]) -> Row:
    """The limit of shared memory for the tensors of a process."""
    from raycollect.pos import limit  # with numpy

    try:
        nbytes = limit.arena_limit(environ, root)
    except OSError as exc:
        return Row(WARNING, str(exc), f"correct or unset {limit.VARIABLE}")
    if not nbytes:
        return Row(WARNING, "switched off", f"unset {limit.VARIABLE}")
    why = limit.VARIABLE if environ.get(limit.VARIABLE, "").strip() else f"{limit.SHARE:.0%} of the memory"
    return Row(OK, f"up to {nbytes_words(nbytes)} per process ({why})")


# ---------------------------------------------------------------------------------------------- limits


def limit(letter: str, soft: int) -> Row:
    """A limit of open files, of which a driver needs a few per actor, or of threads; each actor has dozens."""
    if 0 <= soft < FEW:
        return Row(WARNING, str(soft), f"ulimit -{letter} 65536, before Ray starts")
    return Row(OK, "unlimited" if soft < 0 else str(soft))


def cores(root: Path) -> Row:
    """The cores that this process may use, by its mask and by the quota of its cgroup."""
    count, period = len(os.sched_getaffinity(0)), _read(root, "sys/fs/cgroup/cpu.max")
    match = re.fullmatch(r"(\d+) (\d+)", period)
    quota = int(match[1]) / int(match[2]) if match else float(count)
    found = f"{count} of {os.cpu_count()}" + (f", with the time of {quota:g} by its cgroup" if match else "")
    if min(count, quota) < 2:
        return Row(WARNING, found, "two cores or more: ranks that wait for each other take turns on one")
    return Row(OK, found)


# ---------------------------------------------------------------------------------------------- planner and cluster


def measured_costs(environ: Mapping[str, str]) -> Row:
    """The file of measured costs, by which the planner chooses algorithms."""
    cure, variable = "raycollect bench --calibrate", link_costs.ENVIRONMENT_VARIABLE
    path, is_named, is_there = link_costs.looked_up(environ)
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


def cluster(ask: Ask, environ: Mapping[str, str]) -> Row:
    """Whether a cluster runs that a driver here would join. It is not joined, and none is started."""
    address = environ.get("RAY_ADDRESS") or None
    if address == "local":
        return Row(OK, "RAY_ADDRESS is local: each driver starts a cluster of its own")
    try:
        said = ask(_CLUSTER.format(address=address))
    except ChildError as exc:
        said = {"problem": str(exc), "address": address}
    if "problem" not in said:
        nodes, groups = counted(said["nodes"], "node"), counted(said["groups"], "group")
        return Row(OK, f"{said['address']}: {nodes}, {groups} declared")
    if address:
        return Row(WARNING, said["problem"], "correct or unset RAY_ADDRESS")
    if said.get("address"):
        return Row(WARNING, said["problem"], "stop that one, or say in RAY_ADDRESS which one drivers shall join")
    cure = "ray start --head; or nothing: without a cluster the first declaration starts one of its own"
    return Row(MISSING, said["problem"], cure)


_CLUSTER = """
import json
from raycollect.group import cluster_registry
said = {{}}
try:
    said["address"] = cluster_registry.find_cluster({address!r})
    cluster = cluster_registry.ClusterReader(said["address"])
    said |= {{"nodes": cluster.alive_nodes(), "groups": len(cluster.groups())}}
except (ConnectionError, RuntimeError) as exc:
    said["problem"] = str(exc)
print(json.dumps(said))
"""


def _read(root: Path, path: str) -> str:
    try:
        return (root / path).read_text().strip()
    except OSError:
        return ""
