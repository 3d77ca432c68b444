"""What `raycollect doctor` says of the machine where this runs, and of what libraries, files and children say."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from click import unstyle

from raycollect import backends
from raycollect.cli import doctor
from raycollect.cli.doctor import MISSING, OK, WARNING, Check, Finding, Problem
from raycollect.core import shared_memory
from raycollect.group import link_costs
from tests.pure.cli.command_line import ROOT, run_command


def file_in(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def test_a_library_that_ends_its_process_is_a_row_and_what_is_required_is_told(tmp_path: Path) -> None:
    for name in ("torch", "ray"):
        file_in(tmp_path, f"{name}/__init__.py", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    result = run_command("doctor", environ={"PYTHONPATH": str(tmp_path), "RAY_ADDRESS": None})
    assert (result.exit_code, result.stderr) == (1, "")
    assert result.stdout.endswith("\n\nmissing, and required: ray\n")
    dead = re.findall(r"^  missing  (\S+) +its process was ended by SIGSEGV$", result.stdout, re.MULTILINE)
    assert dead == ["ray", *(name for name, line in backends.BACKENDS.items() if line.libraries == ("torch",))]
    assert all(f"\n  ok       {name} " in result.stdout for name in ("numpy", "local", "shm", "tcp"))


def test_a_check_that_fails_is_a_row() -> None:
    def look() -> str:
        raise ZeroDivisionError("by zero")

    for required, state in ((True, MISSING), (False, WARNING)):
        (row,) = Check("section", "check", look, "repair it", required).rows()
        assert row == Finding("section", "check", state, "ZeroDivisionError: by zero", "repair it", required)


def row_of(name: str) -> Finding:
    """The row of one of the checks that the command makes."""
    (check,) = (check for check in doctor.checks() if check.name == name)
    (row,) = check.rows()
    return row


def test_it_starts_where_there_is_no_numpy_and_no_ray() -> None:
    code = """
import sys
sys.modules.update(numpy=None, ray=None)
from raycollect.cli import doctor
rows = [row for check in doctor.checks() if check.section != "backends" for row in check.rows()]
print({row.check: row.state for row in rows}["memfd"], len(doctor.table(rows)) > 2)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "ok True\n"), done.stderr


def test_the_table_has_headings_and_says_what_to_do_below() -> None:
    rows = [
        Finding("a", "one", OK, "well"),
        Finding("a", "another", MISSING, "none", "pip install it"),
        Finding("b", "last", WARNING, ""),
    ]
    assert list(map(unstyle, doctor.table(rows))) == [
        "a",
        "  ok       one      well",
        "  missing  another  none",
        " " * 20 + "-> pip install it",
        "",
        "b",
        "  warning  last     ",
        "",
    ]
    assert doctor.table([]) == []


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "ended by SIGSEGV"),
        ("raise ImportError('libfoo.so.1: cannot open')", r"ImportError: libfoo.so.1: cannot open"),
        ("import sys; sys.exit(3)", "ended with 3"),
        ("import threading; threading.Event().wait()", r"no answer after 0\.5 s"),
    ],
)
def test_a_child_that_does_not_answer_is_an_error(code: str, says: str) -> None:
    with pytest.raises(Problem, match=says):
        doctor.run_child(code, 0.5 if "wait" in code else 60)


@pytest.mark.parametrize(
    ("name", "least", "state", "says"),
    [
        ("click", "8.2", OK, "8."),
        ("click", "8.100", MISSING, ", below 8.100"),
        ("click", "999.0rc1", MISSING, ", below 999"),
        ("no_such_package", "1", MISSING, "ModuleNotFoundError: No module named"),
    ],
)
def test_a_required_package_is_there_and_new_enough(name: str, least: str, state: str, says: str) -> None:
    (row,) = Check("software", name, partial(doctor.package, name, least), "pip install it", required=True).rows()
    assert (row.state, says in row.found) == (state, True), row
    assert (row.cure == "") == (state == OK)


def test_a_backend_says_what_it_can_or_what_it_lacks() -> None:
    shm, missing = doctor.loaded(("shm", "torch:hccl"))
    assert (shm.state, shm.found) == (OK, "cpu; one host")
    assert (missing.state, missing.required) == (MISSING, False)
    assert "torch" in missing.found
    assert missing.cure == backends.BACKENDS["torch:hccl"].install


def test_what_children_say_is_believed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In the place of Python, a program that says something else, or nothing."""
    file_in(tmp_path, "python", "#!/bin/sh\necho '\"00\"'\n")
    (tmp_path / "python").chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert row_of("other processes").found == "/proc shows another process's memory"
    monkeypatch.setattr(sys, "executable", "/bin/false")
    rows = [(row.state, row.required, row.found) for row in doctor.loaded(("shm", "gloo"))]
    assert rows == [(MISSING, required, "its process ended with 1") for required in (True, False)]


def test_the_driver_is_read_from_proc(tmp_path: Path) -> None:
    with pytest.raises(Problem):
        doctor.driver(tmp_path)
    line = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build  (x) Thu Jan 23"
    file_in(tmp_path, "version", f"{line}\nGCC version: gcc 12\n")
    with pytest.raises(Problem):  # a driver, and no GPU
        doctor.driver(tmp_path)
    for at in range(2):
        file_in(tmp_path, f"gpus/0000:0{at}:00.0/information", "Model: H")
    assert doctor.driver(tmp_path) == f"{line}, 2 GPUs"


@pytest.mark.parametrize(("free", "state"), [(1.0, OK), (0.001, WARNING)])
def test_dev_shm_is_held_against_the_memory(monkeypatch: pytest.MonkeyPatch, free: float, state: str) -> None:
    total = os.sysconf("SC_PHYS_PAGES")
    fields = (os.sysconf("SC_PAGE_SIZE"),) * 2 + (total, int(free * total), int(free * total), 0, 0, 0, 0, 255)
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(fields))
    row = row_of("/dev/shm")
    assert row.state == state
    assert ", memory " not in row.found
    assert "; memory " in row.found


def test_a_check_closes_what_it_opens() -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    assert row_of("memfd").state == OK
    assert row_of("other processes").state in (OK, WARNING)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_doctor_and_the_arenas_see_the_same_of_other_processes() -> None:
    fd = shared_memory.create("raycollect-test", 4096)
    try:
        token = b"t" * shared_memory.TOKEN_NBYTES
        os.pwrite(fd, token, 0)
        code = (
            "import os\nfrom raycollect.core import shared_memory\nfrom raycollect.core.model import Segment\n"
            f"segment = Segment({os.getpid()}, {fd}, {token!r}, 4096)\n"
            "with shared_memory.opened(segment, 'raycollect-test', os.O_RDWR):\n    print(1)"
        )
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, timeout=60)
    finally:
        os.close(fd)
    assert (row_of("other processes").state == OK) == (done.returncode == 0)


@pytest.mark.parametrize(("soft", "state"), [(1024, WARNING), (4096, OK), (1 << 20, OK), (-1, OK)])
def test_limits_are_held_against_what_is_few(monkeypatch: pytest.MonkeyPatch, soft: int, state: str) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (soft, -1))
    row = row_of("ulimit -n")
    assert (row.state, row.found) == (state, "unlimited" if soft < 0 else str(soft))


def test_measured_costs_are_those_that_the_planner_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv(link_costs.ENVIRONMENT_VARIABLE, raising=False)
    absent = row_of("measured costs")
    assert (absent.state, absent.cure) == (WARNING, "raycollect bench --calibrate")
    path = link_costs.default_path()
    link = link_costs.MeasuredLink(place="inside", backend="shm", latency_s=1e-5, bandwidth=4e9)
    link_costs.write(path, [link])
    assert row_of("measured costs").found == f"{path}: inside over shm"
    path.write_text("{}")
    assert row_of("measured costs").state == WARNING
    monkeypatch.setenv(link_costs.ENVIRONMENT_VARIABLE, str(path))
    named = row_of("measured costs")
    assert (named.state, named.required) == (MISSING, True)


def test_a_cluster_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "local")
    assert row_of("Ray cluster").state == OK
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    row = row_of("Ray cluster")
    assert (row.state, "no Ray cluster answers" in row.found) == (MISSING, True), row


def test_an_extra_says_what_it_is_for_and_how_to_get_it() -> None:
    rows = {row.check: row for check in doctor.checks() if check.section == "extras" for row in check.rows()}
    assert rows.keys() == doctor.EXTRAS.keys()
    for name, row in rows.items():
        assert row.found.startswith(doctor.EXTRAS[name])
        assert row.state == OK or (row.state == MISSING and f"raycollect[{name}]" in row.cure and not row.required)


def test_an_extra_lacks_what_the_extras_of_its_packages_lack(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, requirement in (
        ("raycollect", 'some-library[more]>=1; extra == "rllib"'),
        ("some_library", 'no-such-package>=3; extra == "more"'),
    ):
        head = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
        file_in(tmp_path, f"{name}-1.0.dist-info/METADATA", f"{head}Requires-Dist: {requirement}\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(Problem, match=r"without no-such-package>=3$"):
        doctor.extra("rllib")
    file_in(tmp_path, "no_such_package-3.1.dist-info/METADATA", "Metadata-Version: 2.1\nName: x\nVersion: 3.1\n")
    assert doctor.extra("rllib") == doctor.EXTRAS["rllib"]


def test_pages_name_every_extra() -> None:
    tomllib = pytest.importorskip("tomllib")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"].keys()
    named = {
        page: re.findall(r"`([\w-]+)`", (ROOT / page).read_text()) for page in ("docs/quickstart.md", "CONTRIBUTING.md")
    }
    assert doctor.EXTRAS.keys() <= extras & set(named["docs/quickstart.md"])
    assert extras - doctor.EXTRAS.keys() <= set(named["CONTRIBUTING.md"])
