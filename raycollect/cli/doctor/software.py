"""Probes of what is installed: this package, what it needs, the backends, the GPUs."""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import raycollect
from raycollect import backends
from raycollect.cli.doctor.findings import MISSING, OK, WARNING, ChildError, Finding, Machine
from raycollect.planner.wording import counted

# Package -> the lowest version that raycollect works with, as pyproject.toml has it.
REQUIRED = {"ray": "2.57", "numpy": "1.24", "ml_dtypes": "0.4", "click": "8.2", "msgpack": "1.0.5", "xxhash": "3"}

LOWEST_PYTHON = (3, 10)

# ---------------------------------------------------------------------------------------------- software


def python(machine: Machine) -> Finding:
    """The interpreter and the system."""
    found = f"{platform.python_version()} on {platform.system()} {platform.release()}, {platform.machine()}"
    if sys.version_info < LOWEST_PYTHON:
        lowest = ".".join(map(str, LOWEST_PYTHON))
        return Finding(state=MISSING, found=found, cure=f"use Python {lowest} or later", required=True)
    if not sys.platform.startswith("linux"):
        cure = "Linux is what shared memory and the tests are made for"
        return Finding(state=WARNING, found=found, cure=cure, required=True)
    return Finding(state=OK, found=found, required=True)


def this_package(machine: Machine) -> Finding:
    """This package itself, and from where it is imported."""
    return Finding(state=OK, found=f"{raycollect.__version__} in {Path(raycollect.__file__).parent}")


def package(name: str) -> Callable[[Machine], Finding]:
    """A required package: its version, and whether it can be imported."""

    def look(machine: Machine) -> Finding:
        lowest = REQUIRED[name]
        cure = f"pip install '{name}>={lowest}'"
        if not machine.is_there(name):
            return Finding(state=MISSING, found="not installed", cure=cure, required=True)
        try:
            version = str(machine.ask(_IMPORTS.format(name=name))["version"])
        except ChildError as exc:
            found, cure = f"it can't be imported: {exc}", f"pip install --force-reinstall '{name}>={lowest}'"
            return Finding(state=MISSING, found=found, cure=cure, required=True)
        if _parts(version) < _parts(lowest):
            return Finding(state=MISSING, found=f"{version}, below {lowest}", cure=cure, required=True)
        return Finding(state=OK, found=version, required=True)

    return look


_IMPORTS = """
import importlib, importlib.metadata, json
importlib.import_module({name!r})
print(json.dumps({{"version": importlib.metadata.version({name!r})}}))
"""


# ---------------------------------------------------------------------------------------------- backends

_LOADS = """
import json
from raycollect import backends
from raycollect.errors import RaycollectError
said = {{}}
for name in {names!r}:
    try:
        backends.load(name)
        said[name] = ""
    except RaycollectError as exc:
        said[name] = getattr(exc, "detail", "") or str(exc)
    except Exception as exc:
        said[name] = f"{{type(exc).__name__}}: {{exc}}"
print(json.dumps(said))
"""


def all_backends(machine: Machine) -> list[Finding]:
    """Every backend of the table, by name."""
    together: dict[tuple[str, ...], list[str]] = {}
    for name, line in backends.BACKENDS.items():
        alone = (name,) if line.factory is not None else line.libraries
        together.setdefault(alone, []).append(name)
    for names in together.values():
        machine.start(_LOADS.format(names=tuple(names)))
    found = {name: _backend(machine, name, tuple(names)) for names in together.values() for name in names}
    return [found[name] for name in backends.names()]


def _backend(machine: Machine, name: str, names: tuple[str, ...]) -> Finding:
    # Loaded in a child process together with those that need the same libraries.
    line = backends.BACKENDS[name]
    required = not line.libraries and line.factory is None
    try:
        problem = str(machine.ask(_LOADS.format(names=names)).get(name, "it was not loaded"))
    except ChildError as exc:
        problem = str(exc)
    if problem:
        problem = " ".join(problem.removeprefix(f"backend {name!r}: ").split()).partition(". Install it:")[0]
        problem = re.sub(r"^it needs what is not there \((.*)\)$", r"\1", problem)
        return Finding(check=name, state=MISSING, found=problem, cure=line.install, required=required)
    return Finding(check=name, state=OK, found=_abilities(line), required=required)


def _abilities(line: backends.Capabilities) -> str:
    reach = "one process" if line.one_process else "several hosts" if line.cross_host else "one host"
    return f"{', '.join(sorted(line.devices))}; {reach}{'' if line.tested else '; not tested by this project'}"


# ---------------------------------------------------------------------------------------------- GPUs

_ONLY_WITH_GPU = "of use only with an NVIDIA GPU: "

_CUPY = """
import json
import cupy
said = {"version": cupy.__version__}
try:
    said["gpus"] = cupy.cuda.runtime.getDeviceCount()
except Exception as exc:
    said["gpus"], said["problem"] = 0, str(exc)
try:
    from cupy.cuda import nccl
    said["nccl"] = nccl.get_version()
except Exception:
    said["nccl"] = 0
print(json.dumps(said))
"""

_TORCH = """
import json
import torch
said = {"version": torch.__version__, "cuda": torch.version.cuda, "gpus": 0, "nccl": 0}
if torch.version.cuda and torch.cuda.is_available():
    said["gpus"] = torch.cuda.device_count()
    said["names"] = sorted({torch.cuda.get_device_name(at) for at in range(said["gpus"])})
if torch.version.cuda:
    try:
        said["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    except Exception as exc:
        said["problem"] = f"no NCCL: {exc}"
print(json.dumps(said))
"""


def driver(machine: Machine) -> Finding:
    """The driver of NVIDIA's GPUs, and how many it sees."""
    text = machine.read("/proc/driver/nvidia/version")
    if not text:
        cure = "nothing, where there is no GPU; else install the driver, and give it to the container (--gpus all)"
        return Finding(state=MISSING, found="no driver", cure=cure)
    version = re.search(r"\s(\d+\.\d+[\d.]*)\s", f"{text} ")
    try:
        gpus = len(list((machine.root / "proc/driver/nvidia/gpus").iterdir()))
    except OSError:
        gpus = 0
    found = f"{version[1] if version else text.splitlines()[0]}, {counted(gpus, 'GPU')}"
    if not gpus:
        return Finding(state=WARNING, found=found, cure="give the container a GPU (--gpus all)")
    return Finding(state=OK, found=found)


def cupy(machine: Machine) -> Finding:
    """The library cupy, its GPUs, and its NCCL."""
    cure = f"{_ONLY_WITH_GPU}pip install 'raycollect[cuda12]' (or cuda13, as the driver)"
    if not machine.is_there("cupy"):
        return Finding(state=MISSING, found="not installed", cure=cure)
    try:
        said = machine.ask(_CUPY)
    except ChildError as exc:
        return Finding(state=MISSING, found=f"it can't be imported: {exc}", cure=cure)
    found = f"{said['version']}, {counted(said['gpus'], 'GPU')}, {_nccl(said['nccl'])}"
    if not said["gpus"]:
        return Finding(state=WARNING, found=f"{found} ({said.get('problem', '')})", cure=cure)
    if not said["nccl"]:
        cure = "pip install nvidia-nccl-cu12 (or -cu13, as the driver)"
        return Finding(state=WARNING, found=found, cure=cure)
    return Finding(state=OK, found=found)


def torch_cuda(machine: Machine) -> Finding:
    """Whether torch was built for CUDA, its GPUs, and its NCCL."""
    cure = f"{_ONLY_WITH_GPU}pip install torch (a CUDA build)"
    if not machine.is_there("torch"):
        return Finding(state=MISSING, found="torch is not installed", cure=cure)
    try:
        said = machine.ask(_TORCH)
    except ChildError as exc:
        return Finding(state=MISSING, found=f"torch can't be imported: {exc}", cure=cure)
    if not said["cuda"]:
        return Finding(state=MISSING, found=f"torch {said['version']}, built without CUDA", cure=cure)
    names = f" ({', '.join(said['names'])})" if said.get("names") else ""
    found = f"{said['version']}, {counted(said['gpus'], 'GPU')}{names}, {said.get('problem') or _nccl(said['nccl'])}"
    if not said["gpus"]:
        cure = "check the driver, CUDA_VISIBLE_DEVICES, and that the driver is new enough for this build"
        return Finding(state=WARNING, found=found, cure=cure)
    if not said["nccl"]:
        return Finding(state=WARNING, found=found, cure="a build of torch with NCCL (pip install torch)")
    return Finding(state=OK, found=found)


def _nccl(version: Any) -> str:
    if isinstance(version, int) and version:  # 22304: 2.23.4
        version = f"{version // 10_000}.{version // 100 % 100}.{version % 100}"
    return f"NCCL {version}" if version else "no NCCL"


def _parts(version: str) -> tuple[int, ...]:
    """The numbers of a version, to compare; suffixes such as in ``2.0rc1`` do not count."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()
