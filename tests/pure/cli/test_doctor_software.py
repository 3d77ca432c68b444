"""What the doctor says of libraries, backends and GPUs."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import raycollect
from raycollect import backends
from raycollect.cli import doctor
from raycollect.cli.doctor import software
from raycollect.cli.doctor.findings import MISSING, OK, WARNING, ChildError, Finding, Machine, Probe
from tests.pure.cli.machines import file_in, machine_of

ROOT = Path(raycollect.__file__).parents[1]


def test_the_lowest_versions_are_those_of_pyproject() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    block = re.search(r"^dependencies = \[\n(.*?)^\]", text, re.DOTALL | re.MULTILINE)
    assert block is not None
    always = re.findall(r'"([\w-]+)>=([\d.]+)"', block[1])
    assert dict(always) == software.REQUIRED
    assert f'requires-python = ">={".".join(map(str, software.LOWEST_PYTHON))}"' in text


@pytest.mark.parametrize("name", sorted(software.REQUIRED))
def test_a_required_package_is_there_or_missing(name: str) -> None:
    look, lowest = software.package(name), software.REQUIRED[name]
    absent = look(machine_of(there=False))
    assert (absent.state, absent.required, absent.cure) == (MISSING, True, f"pip install '{name}>={lowest}'")
    for version, state in ((lowest, OK), ("999.0rc1", OK), (f"{lowest}.1", OK), ("0.0.9", MISSING)):
        found = look(machine_of(said={"version": version}))
        assert (found.state, found.found.split(",")[0]) == (state, version)


def test_versions_are_compared_by_number() -> None:
    assert software.package("ray")(machine_of(said={"version": "2.9.1"})).state == MISSING
    assert software.package("ray")(machine_of(said={"version": "2.100"})).state == OK


def test_a_required_package_that_is_broken_is_missing() -> None:
    found = software.package("numpy")(machine_of(said=ChildError("its process was ended by SIGILL")))
    assert (found.state, found.required) == (MISSING, True)
    assert found.found == "it can't be imported: its process was ended by SIGILL"
    assert "--force-reinstall" in found.cure


@pytest.mark.parametrize(("version", "state"), [((3, 9, 1), MISSING), ((3, 10, 0), OK), ((4, 0, 0), OK)])
def test_python_has_to_be_new_enough(monkeypatch: pytest.MonkeyPatch, version: tuple[int, ...], state: str) -> None:
    monkeypatch.setattr(sys, "version_info", version)
    monkeypatch.setattr(sys, "platform", "linux")
    found = software.python(machine_of())
    assert (found.state, found.required) == (state, True)


def test_another_system_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert software.python(machine_of()).state == WARNING


def _loads(problems: dict[str, str]) -> Callable[[str], dict[str, str]]:
    """A child that says of each backend it is asked for what is wrong with it."""

    def said(code: str) -> dict[str, str]:
        names = re.findall(r"'([^']+)'", re.findall(r"^for name in (.*):$", code, re.MULTILINE)[0])
        return {name: problems.get(name, "") for name in names}

    return said


def test_a_backend_that_loads_says_what_it_can() -> None:
    rows = {row.check: row for row in software.all_backends(machine_of(said=_loads({})))}
    assert list(rows) == list(backends.names())
    assert rows["shm"].found == "cpu; one host"
    assert rows["local"].found == "cpu; one process"
    assert rows["torch:nccl"].found == "cuda; several hosts; not tested by this project"
    assert {name for name, row in rows.items() if row.required} == {"local", "shm", "tcp"}


def test_a_backend_that_is_missing_has_its_install_line() -> None:
    why = "backend 'gloo': it needs what is not there (pygloo: No module).\n Install it: pip install 'raycollect[gloo]'"
    why = why.replace(").\n ", "). ")
    rows = {row.check: row for row in software.all_backends(machine_of(said=_loads({"gloo": why})))}
    gloo = rows["gloo"]
    assert (gloo.state, gloo.found) == (MISSING, "pygloo: No module")
    assert (gloo.cure, gloo.required) == ("pip install 'raycollect[gloo]'", False)
    assert rows["shm"].state == OK


def test_a_library_that_ends_its_process_takes_no_other_backend_along() -> None:
    def said(code: str) -> dict[str, str]:
        if "'torch:gloo'" in code:
            raise ChildError("its process was ended by SIGSEGV")
        return _loads({})(code)

    rows = {row.check: row for row in software.all_backends(machine_of(said=said))}
    fallen = {name for name, row in rows.items() if row.found == "its process was ended by SIGSEGV"}
    assert fallen == {name for name, line in backends.BACKENDS.items() if line.libraries == ("torch",)}
    assert rows["gloo"].state == rows["tcp"].state == rows["torch:hccl"].state == OK


def test_a_real_child_loads_the_backends_of_this_package() -> None:
    if importlib.util.find_spec("cupy") is not None:
        pytest.skip("cupy is installed here")
    machine = Machine()
    shm, nccl = (software._backend(machine, name, ("shm", "nccl")) for name in ("shm", "nccl"))
    assert shm.state == OK, shm
    assert (nccl.state, nccl.required) == (MISSING, False)
    assert nccl.found.startswith("cupy.cuda.nccl: ")
    assert "raycollect[cuda13]" in nccl.cure


def test_the_driver_is_read_from_proc(tmp_path: Path) -> None:
    absent = software.driver(machine_of(tmp_path))
    assert (absent.state, absent.found, absent.required) == (MISSING, "no driver", False)
    line = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build  (x) Thu Jan 23"
    file_in(tmp_path, "proc/driver/nvidia/version", f"{line}\nGCC version: gcc 12\n")
    assert software.driver(machine_of(tmp_path)).state == WARNING, "a driver, and no GPU"
    for at in range(2):
        file_in(tmp_path, f"proc/driver/nvidia/gpus/0000:0{at}:00.0/information", "Model: H")
    found = software.driver(machine_of(tmp_path))
    assert (found.state, found.found) == (OK, "570.86.15, 2 GPUs")


@pytest.mark.parametrize(
    ("said", "state", "says"),
    [
        ({"version": "13.6", "gpus": 2, "nccl": 22304}, OK, "13.6, 2 GPUs, NCCL 2.23.4"),
        ({"version": "13.6", "gpus": 1, "nccl": 0}, WARNING, "13.6, 1 GPU, no NCCL"),
        ({"version": "13.6", "gpus": 0, "nccl": 22304, "problem": "no device"}, WARNING, "no device"),
        (ChildError("libcuda.so.1: cannot open"), MISSING, "it can't be imported: libcuda.so.1: cannot open"),
        ({}, WARNING, "the check failed: KeyError"),
    ],
)
def test_cupy(said: Any, state: str, says: str) -> None:
    probe = Probe(section="", check="cupy", look=software.cupy)
    [found] = doctor.examine(machine_of(said=said), [probe])
    assert (found.state, found.required) == (state, False)
    assert says in found.found


@pytest.mark.parametrize(
    ("said", "state", "says"),
    [
        (
            {"version": "2.13", "cuda": "12.8", "gpus": 1, "nccl": "2.27", "names": ["H"]},
            OK,
            "2.13, 1 GPU (H), NCCL 2.27",
        ),
        ({"version": "2.13", "cuda": "12.8", "gpus": 0, "nccl": "2.27"}, WARNING, "2.13, 0 GPUs, NCCL 2.27"),
        (
            {"version": "2.13", "cuda": "12.8", "gpus": 1, "nccl": 0, "problem": "no NCCL: x"},
            WARNING,
            "1 GPU, no NCCL: x",
        ),
        ({"version": "2.13+cpu", "cuda": None, "gpus": 0, "nccl": 0}, MISSING, "2.13+cpu, built without CUDA"),
        (ChildError("its process was ended by SIGSEGV"), MISSING, "SIGSEGV"),
    ],
)
def test_torch(said: Any, state: str, says: str) -> None:
    found = software.torch_cuda(machine_of(said=said))
    assert (found.state, found.required) == (state, False)
    assert says in found.found


@pytest.mark.parametrize("look", [software.cupy, software.torch_cuda])
def test_a_library_that_is_not_there_is_not_imported(look: Callable[[Machine], Finding]) -> None:
    found = look(machine_of(there=False, said=AssertionError("asked")))
    assert found.state == MISSING
    assert "pip install" in found.cure
