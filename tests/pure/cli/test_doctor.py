"""What `raycollect doctor` says, of made-up machines and of the one where this runs, and its child processes."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import raycollect
from raycollect import backends
from raycollect.cli import doctor
from raycollect.cli.doctor import MISSING, OK, WARNING, ChildError, Row
from raycollect.core import shared_memory
from raycollect.core.model import Segment
from raycollect.group import link_costs
from raycollect.planner import Link

ROOT = Path(raycollect.__file__).parents[1]


def saying(said: Any) -> doctor.Ask:
    """Children that say this, or fail with it."""

    def ask(code: str) -> dict[str, Any]:
        compile(code, "<check>", "exec")
        if isinstance(said, Exception):
            raise said
        answer: dict[str, Any] = said(code) if callable(said) else said
        return answer

    return ask


def file_in(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def test_every_check_has_a_row() -> None:
    """On the machine of the tests, whatever it has; only the children are left out."""
    rows = doctor.examine(saying(ChildError("none here")))
    assert [row.check for row in rows if row.section == "backends"] == list(backends.names())
    assert {row.state for row in rows} <= {OK, WARNING, MISSING}
    assert not any(row.found.startswith("the check failed") for row in rows), rows
    assert set(doctor.lacking(rows)) == {*doctor.requirements(), "local", "shm", "tcp"}, "no child says that they load"


def test_a_check_that_fails_is_a_row_and_the_others_go_on() -> None:
    rows = {row.check: row for row in doctor.examine(saying(ZeroDivisionError("by zero")))}
    assert (rows["numpy"].state, rows["numpy"].found) == (MISSING, "the check failed: ZeroDivisionError: by zero")
    assert (rows["cupy"].state, rows["cupy"].found) == (WARNING, "the check failed: ZeroDivisionError: by zero")
    assert rows["memfd"].state == OK


def test_the_table_has_headings_and_says_what_to_do_below() -> None:
    long = " ".join(["word"] * 30)
    rows = [
        Row(OK, "well", check="one", section="a"),
        Row(MISSING, long, "pip install it", check="another", section="a"),
        Row(WARNING, "", check="last", section="b"),
    ]
    states, lines = zip(*doctor.table(rows, width=60), strict=True)
    assert lines[:2] == ("a", "  ok       one      well")
    assert lines[2].startswith("  missing  another  word word")
    assert max(map(len, lines)) <= 60
    assert " ".join(" ".join(lines).split()).count("word") == 30
    assert lines[-4:] == (" " * 20 + "-> pip install it", "", "b", "  warning  last")
    assert [state for state in states if state] == [OK, MISSING, WARNING]
    assert doctor.table([]) == []


# ---------------------------------------------------------------------------------------------- children


def test_a_child_answers_with_its_last_line() -> None:
    code = "import raycollect\nprint('noise')\nprint('{\"from\": \"%s\"}' % raycollect.__file__)"
    assert doctor.run_child(code) == {"from": raycollect.__file__}


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "ended by SIGSEGV"),
        ("raise ImportError('libfoo.so.1: cannot open')", r"ImportError: libfoo.so.1: cannot open"),
        ("import sys; sys.exit(3)", "ended with 3"),
    ],
)
def test_a_child_that_does_not_answer_is_an_error(code: str, says: str) -> None:
    with pytest.raises(ChildError, match=says):
        doctor.run_child(code)


def test_a_child_that_hangs_is_given_up() -> None:
    with pytest.raises(ChildError, match=r"no answer after 0\.3 s"):
        doctor.run_child("import threading; threading.Event().wait()", 0.3)


# ---------------------------------------------------------------------------------------------- software


def test_the_requirements_are_those_of_pyproject() -> None:
    block = re.search(r"^dependencies = \[\n(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.DOTALL | re.MULTILINE)
    assert block is not None
    assert doctor.requirements() == dict(re.findall(r'"([\w-]+)>=([\d.]+)"', block[1]))


@pytest.mark.parametrize(
    ("said", "state"),
    [
        ({"version": "2.57"}, OK),
        ({"version": "2.100"}, OK),
        ({"version": "999.0rc1"}, OK),
        ({"version": "2.9.1"}, MISSING),
        (ChildError("ModuleNotFoundError: No module named 'ray'"), MISSING),
    ],
)
def test_a_required_package_is_there_and_new_enough(said: Any, state: str) -> None:
    row = doctor.package(saying(said), "ray", "2.57")
    assert row.state == state
    assert bool(row.cure) == (state == MISSING)


def _lacks(problems: dict[str, str]) -> Callable[[str], dict[str, str]]:
    """A child that says of each backend it is asked for what it lacks."""

    def said(code: str) -> dict[str, str]:
        names = re.findall(r"'([^']+)'", re.findall(r"^for name in (.*):$", code, re.MULTILINE)[0])
        return {name: problems.get(name, "") for name in names}

    return said


def _backends(said: Any) -> dict[str, Row]:
    return {row.check: row for row in doctor.examine(saying(said)) if row.section == "backends"}


def test_a_backend_says_what_it_can_or_what_it_lacks() -> None:
    rows = _backends(_lacks({"gloo": "pygloo: No module"}))
    assert list(rows) == list(backends.names())
    assert rows["shm"].found == "cpu; one host"
    assert rows["local"].found == "cpu; one process"
    assert rows["torch:nccl"].found == "cuda; several hosts; not tested by this project"
    assert (rows["gloo"].state, rows["gloo"].found) == (MISSING, "pygloo: No module")
    assert "pip install 'raycollect[gloo]'" in rows["gloo"].cure
    assert not any(row.required for row in rows.values())
    rows = _backends(_lacks(dict.fromkeys(backends.names(), "it burns")))
    assert {name for name, row in rows.items() if row.required} == {"local", "shm", "tcp"}


def test_a_library_that_ends_its_process_takes_no_other_backend_along() -> None:
    def said(code: str) -> dict[str, str]:
        if "'torch:gloo'" in code:
            raise ChildError("its process was ended by SIGSEGV")
        return _lacks({})(code) if "for name in" in code else {}

    rows = _backends(said)
    fallen = {name for name, row in rows.items() if row.found == "its process was ended by SIGSEGV"}
    assert fallen == {name for name, line in backends.BACKENDS.items() if line.libraries == ("torch",)}
    assert rows["gloo"].state == rows["tcp"].state == rows["torch:hccl"].state == OK


@pytest.mark.skipif(importlib.util.find_spec("cupy") is not None, reason="cupy is installed here")
def test_a_real_child_loads_the_backends_of_this_package() -> None:
    shm, nccl = doctor.loaded(doctor.run_child, ("shm", "nccl"))
    assert shm.state == OK, shm
    assert nccl.state == MISSING
    assert nccl.found.startswith("cupy.cuda.nccl: ")
    assert "raycollect[cuda13]" in nccl.cure


# ---------------------------------------------------------------------------------------------- GPUs


def test_the_driver_is_read_from_proc(tmp_path: Path) -> None:
    assert doctor.driver(tmp_path).found == "no driver"
    line = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build  (x) Thu Jan 23"
    file_in(tmp_path, "proc/driver/nvidia/version", f"{line}\nGCC version: gcc 12\n")
    assert doctor.driver(tmp_path).state == WARNING, "a driver, and no GPU"
    for at in range(2):
        file_in(tmp_path, f"proc/driver/nvidia/gpus/0000:0{at}:00.0/information", "Model: H")
    row = doctor.driver(tmp_path)
    assert (row.state, row.found) == (OK, "570.86.15, 2 GPUs")


@pytest.mark.parametrize(
    ("said", "state", "found"),
    [
        ({"version": "13.6", "gpus": 2, "nccl": "2.23.4", "problem": ""}, OK, "13.6, 2 GPUs, NCCL 2.23.4"),
        ({"version": "13.6", "gpus": 1, "nccl": "", "problem": ""}, WARNING, "13.6, 1 GPU, no NCCL"),
        ({"version": "13", "gpus": 0, "nccl": "", "problem": "no device"}, WARNING, "13, 0 GPUs, no NCCL (no device)"),
        (ChildError("libcuda.so.1: cannot open"), MISSING, "it can't be imported: libcuda.so.1: cannot open"),
    ],
)
@pytest.mark.parametrize("code", [doctor._CUPY, doctor._TORCH], ids=["cupy", "torch"])
def test_a_library_of_gpus(code: str, said: Any, state: str, found: str) -> None:
    row = doctor.library(saying(said), code, "pip install it")
    assert (row.state, row.found) == (state, found)
    assert bool(row.cure) == (state != OK)


# ---------------------------------------------------------------------------------------------- shared memory


class _Stat:
    f_frsize = 1 << 12

    def __init__(self, total: int, free: int) -> None:
        self.f_blocks, self.f_bavail = total >> 12, free >> 12


@pytest.mark.parametrize(
    ("total", "free", "state"), [(8 << 30, 8 << 30, OK), (64 << 20, 64 << 20, WARNING), (8 << 30, 0, WARNING)]
)
def test_dev_shm_is_held_against_the_memory(monkeypatch: pytest.MonkeyPatch, total: int, free: int, state: str) -> None:
    monkeypatch.setattr(os, "statvfs", lambda path: _Stat(total, free))
    monkeypatch.setattr("raycollect.pos.limit.usable_nbytes", lambda root: 16 << 30)
    row = doctor.dev_shm(Path("/nowhere"))
    assert row.state == state
    assert "memory 16 GiB" in row.found


def test_no_dev_shm_is_a_warning(tmp_path: Path) -> None:
    assert doctor.dev_shm(tmp_path).found == "not there: No such file or directory"


def test_a_check_closes_what_it_opens() -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    assert doctor.memfd().state == OK
    assert doctor.other_processes(saying(ChildError("no"))).state == WARNING
    assert doctor.other_processes(saying({"token": "00"})).found == "/proc shows another process's memory"
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_real_process_opens_the_memory_of_this_one() -> None:
    fd = shared_memory.create("raycollect-test", 4096)
    try:
        token = b"t" * shared_memory.TOKEN_NBYTES
        os.pwrite(fd, token, 0)
        segment = Segment(os.getpid(), fd, token, 4096)
        code = (
            "import json, os\nfrom raycollect.core import shared_memory\nfrom raycollect.core.model import Segment\n"
            f"segment = Segment({segment.pid}, {segment.fd}, {token!r}, 4096)\n"
            "with shared_memory.opened(segment, 'raycollect-test', os.O_RDWR):\n"
            "    print(json.dumps({}))"
        )
        try:
            doctor.run_child(code)
            opens = True
        except ChildError:
            opens = False
    finally:
        os.close(fd)
    assert (doctor.other_processes(doctor.run_child).state == OK) == opens, "doctor and the arenas see the same"


@pytest.mark.parametrize(
    ("value", "state", "says"),
    [
        ("3G", OK, "up to 3 GiB per process (RAYCOLLECT_ARENA_LIMIT)"),
        ("", OK, "30% of the memory"),
        ("0", WARNING, "switched off"),
        ("plenty", WARNING, "'plenty'"),
    ],
)
def test_the_arena_has_the_limit_that_it_will_have(value: str, state: str, says: str) -> None:
    row = doctor.arena(Path("/nowhere"), {"RAYCOLLECT_ARENA_LIMIT": value})
    assert row.state == state
    assert says in row.found


# ---------------------------------------------------------------------------------------------- limits


@pytest.mark.parametrize(("soft", "state"), [(1024, WARNING), (4096, OK), (1 << 20, OK), (-1, OK)])
def test_limits_are_held_against_what_is_few(soft: int, state: str) -> None:
    row = doctor.limit("n", soft)
    assert (row.state, row.found) == (state, "unlimited" if soft < 0 else str(soft))


@pytest.mark.parametrize(
    ("quota", "count", "state", "says"),
    [
        (None, 4, OK, "4 of "),
        (None, 1, WARNING, "1 of "),
        ("max 100000", 2, OK, "2 of "),
        ("150000 100000", 4, WARNING, "with the time of 1.5 by its cgroup"),
        ("nonsense", 2, OK, "2 of "),
    ],
)
def test_cores_are_those_of_the_mask_and_the_quota(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quota: str | None, count: int, state: str, says: str
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(count)))
    if quota is not None:
        file_in(tmp_path, "sys/fs/cgroup/cpu.max", quota)
    row = doctor.cores(tmp_path)
    assert row.state == state
    assert says in row.found


# ---------------------------------------------------------------------------------------------- planner and cluster


def test_measured_costs_are_those_that_the_planner_reads(tmp_path: Path) -> None:
    environ = {"XDG_CONFIG_HOME": str(tmp_path)}
    absent = doctor.measured_costs(environ)
    assert (absent.state, absent.cure) == (WARNING, "raycollect bench --calibrate")
    path = link_costs.default_path(environ)
    link_costs.write(
        path, [link_costs.Measured(place="inside", backend="shm", link=Link(latency_s=1e-5, bandwidth=4e9))]
    )
    assert doctor.measured_costs(environ).found == f"{path}: inside over shm"
    path.write_text("{}")
    assert doctor.measured_costs(environ).state == WARNING


@pytest.mark.parametrize("content", [None, "{}"])
def test_a_named_file_of_costs_that_is_no_good_stops_everything(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "costs.json"
    if content is not None:
        path.write_text(content)
    environ = {link_costs.ENVIRONMENT_VARIABLE: str(path)}
    row = doctor.measured_costs(environ)
    assert (row.state, row.required) == (MISSING, True)
    assert row.found.endswith("no group can be declared")
    with pytest.raises(ValueError, match=re.escape(str(path))):
        link_costs.current(environ)


@pytest.mark.parametrize(
    ("said", "address", "state", "says", "cure"),
    [
        ({"address": "h:1", "nodes": 1, "groups": 2}, None, OK, "h:1: 1 node, 2 groups declared", ""),
        ({"problem": "none runs"}, None, MISSING, "none runs", "ray start --head"),
        ({"problem": "not asked"}, "local", OK, "each driver starts a cluster of its own", ""),
        ({"problem": "refused", "address": "h:1"}, None, WARNING, "refused", "RAY_ADDRESS"),
        ({"problem": "refused"}, "h:1", WARNING, "refused", "unset RAY_ADDRESS"),
        (ChildError("No module named 'ray'"), "h:1", WARNING, "No module", "unset RAY_ADDRESS"),
    ],
)
def test_a_cluster_is_asked_for(said: Any, address: str | None, state: str, says: str, cure: str) -> None:
    row = doctor.cluster(saying(said), {} if address is None else {"RAY_ADDRESS": address})
    assert row.state == state
    assert says in row.found
    assert cure in row.cure


def test_an_address_that_nobody_has_is_refused_by_a_real_child() -> None:
    row = doctor.cluster(doctor.run_child, {"RAY_ADDRESS": "127.0.0.1:1"})
    assert (row.state, "no Ray cluster answers" in row.found) == (WARNING, True), row
