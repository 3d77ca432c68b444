"""What the doctor says of shared memory, limits, measured costs and the cluster."""

from __future__ import annotations

import errno
import os
import re
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raycollect.cli.doctor import findings, surroundings
from raycollect.cli.doctor.findings import MISSING, OK, WARNING, ChildError, Finding, Machine
from raycollect.core import shared_memory
from raycollect.core.model import Segment
from raycollect.group import link_costs
from raycollect.planner import Link
from raycollect.planner.wording import nbytes_words
from tests.pure.cli.machines import file_in, machine_of


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
    found = surroundings.dev_shm(machine_of())
    assert found.state == state
    assert found.found.startswith(f"{nbytes_words(total)}, {nbytes_words(free)} of it free; memory 16 GiB")
    assert bool(found.cure) == (state != OK)


def test_no_dev_shm_is_a_warning(tmp_path: Path) -> None:
    found = surroundings.dev_shm(machine_of(tmp_path))
    assert (found.state, found.found) == (WARNING, "not there: No such file or directory")
    assert "--shm-size" in found.cure


@pytest.mark.parametrize("problem", [OSError(errno.EPERM, "Operation not permitted"), AttributeError("no F_ADD_SEALS")])
def test_no_memory_without_a_name_is_missing(monkeypatch: pytest.MonkeyPatch, problem: Exception) -> None:
    def create(name: str, nbytes: int) -> int:
        raise problem

    assert surroundings.anonymous_memory(machine_of()).state == OK
    monkeypatch.setattr(shared_memory, "create", create)
    found = surroundings.anonymous_memory(machine_of())
    assert (found.state, found.required) == (MISSING, True)
    assert surroundings.other_processes(machine_of()).state == WARNING


def test_what_a_probe_opens_it_closes() -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    surroundings.anonymous_memory(machine_of())
    surroundings.other_processes(machine_of(said=ChildError("no")))
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_real_process_opens_the_memory_of_this_one() -> None:
    found = surroundings.other_processes(Machine())
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
            findings.run_child(code, 60.0)
            opens = True
        except ChildError:
            opens = False
    finally:
        os.close(fd)
    assert (found.state == OK) == opens, "doctor and the arenas see the same"


@pytest.mark.parametrize("said", [ChildError("PermissionError: /proc/7/fd/3"), {"token": "00"}])
def test_a_process_that_can_not_be_opened_is_a_warning(said: Any) -> None:
    found = surroundings.other_processes(machine_of(said=said))
    assert (found.state, found.required) == (WARNING, False)
    assert "hidepid" in found.cure


def test_namespaces_are_named(tmp_path: Path) -> None:
    assert surroundings.namespaces(machine_of(tmp_path)).state == WARNING
    (tmp_path / "proc/self/ns").mkdir(parents=True)
    for at, name in enumerate(("ipc", "mnt", "net", "pid")):
        (tmp_path / "proc/self/ns" / name).symlink_to(f"{name}:[{at}]")
    found = surroundings.namespaces(machine_of(tmp_path))
    assert (found.state, found.found) == (OK, "ipc:[0], mnt:[1], net:[2], pid:[3]")


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
    found = surroundings.arena(machine_of(environ={"RAYCOLLECT_ARENA_LIMIT": value}))
    assert found.state == state
    assert says in found.found


def test_huge_pages_are_read_from_sys(tmp_path: Path) -> None:
    assert surroundings.huge_pages(machine_of(tmp_path)).found == "shared memory: unknown; other memory: unknown"
    file_in(tmp_path, "sys/kernel/mm/transparent_hugepage/shmem_enabled", "always within_size [advise] never\n")
    file_in(tmp_path, "sys/kernel/mm/transparent_hugepage/enabled", "[always] madvise never\n")
    assert surroundings.huge_pages(machine_of(tmp_path)).found == "shared memory: advise; other memory: always"


@pytest.mark.parametrize("look", [surroundings.open_files, surroundings.processes])
@pytest.mark.parametrize(("limit", "state"), [(1024, WARNING), (4096, OK), (1 << 20, OK), (-1, OK)])
def test_limits_are_held_against_what_is_few(look: Callable[[Machine], Finding], limit: int, state: str) -> None:
    found = look(machine_of(limit=limit))
    assert (found.state, found.found) == (state, "unlimited" if limit < 0 else str(limit))
    assert bool(found.cure) == (state == WARNING)


def test_locked_memory_is_told() -> None:
    assert surroundings.locked_memory(machine_of(limit=8 << 20)).found.startswith("8 MiB")
    assert surroundings.locked_memory(machine_of(limit=-1)).found == "unlimited"


def test_a_real_limit_is_the_soft_one() -> None:
    assert Machine().limit(resource.RLIMIT_NOFILE) == resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def test_the_memory_of_a_cgroup_is_told(tmp_path: Path) -> None:
    assert "cgroup" not in surroundings.memory(machine_of(tmp_path)).found
    file_in(tmp_path, "proc/self/cgroup", "0::/box\n")
    file_in(tmp_path, "sys/fs/cgroup/box/memory.max", str(1 << 28))
    assert surroundings.memory(machine_of(tmp_path)).found.startswith("256 MiB by its cgroup, of ")


@pytest.mark.parametrize(
    ("files", "cores", "state", "says"),
    [
        ({}, 4, OK, "4 of "),
        ({}, 1, WARNING, "1 of "),
        ({"cpu.max": "max 100000"}, 2, OK, "2 of "),
        ({"cpu.max": "150000 100000"}, 4, WARNING, "with the time of 1.5 by its cgroup"),
        ({"cpu/cpu.cfs_quota_us": "400000", "cpu/cpu.cfs_period_us": "100000"}, 8, OK, "with the time of 4 by"),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 2, OK, "2 of "),
        ({"cpu.max": "nonsense"}, 2, OK, "2 of "),
    ],
)
def test_cores_are_those_of_the_mask_and_the_quota(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, files: dict[str, str], cores: int, state: str, says: str
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    for name, text in files.items():
        file_in(tmp_path, f"sys/fs/cgroup/{name}", text)
    found = surroundings.cpus(machine_of(tmp_path))
    assert found.state == state
    assert says in found.found
    assert ("cgroup" in found.found) == ("cgroup" in says or "time of" in says)


def test_measured_costs_are_those_that_the_planner_reads(tmp_path: Path) -> None:
    environ = {"XDG_CONFIG_HOME": str(tmp_path)}
    absent = surroundings.measured_costs(machine_of(environ=environ))
    assert (absent.state, absent.cure) == (WARNING, "raycollect bench --calibrate")
    path = link_costs.default_path(environ)
    link_costs.write(
        path, [link_costs.Measured(place="inside", backend="shm", link=Link(latency_s=1e-5, bandwidth=4e9))]
    )
    found = surroundings.measured_costs(machine_of(environ=environ))
    assert (found.state, found.found) == (OK, f"{path}: inside over shm")
    path.write_text("{}")
    assert surroundings.measured_costs(machine_of(environ=environ)).state == WARNING


@pytest.mark.parametrize("content", [None, "{}"])
def test_a_named_file_of_costs_that_is_no_good_stops_everything(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "costs.json"
    if content is not None:
        path.write_text(content)
    environ = {link_costs.ENVIRONMENT_VARIABLE: str(path)}
    found = surroundings.measured_costs(machine_of(environ=environ))
    assert (found.state, found.required) == (MISSING, True)
    assert found.found.endswith("no group can be declared")
    with pytest.raises(ValueError, match=re.escape(str(path))):
        link_costs.current(environ)


@pytest.mark.parametrize(
    ("said", "environ", "state", "says", "cure"),
    [
        ({"address": "h:1", "nodes": 1, "groups": 2}, {}, OK, "h:1: 1 node, 2 groups declared", ""),
        ({"problem": "none runs"}, {}, MISSING, "none runs", "ray start --head"),
        ({"problem": "not asked"}, {"RAY_ADDRESS": "local"}, OK, "each driver starts a cluster of its own", ""),
        ({"problem": "refused", "address": "h:1"}, {}, WARNING, "refused", "RAY_ADDRESS"),
        ({"problem": "refused"}, {"RAY_ADDRESS": "h:1"}, WARNING, "refused", "unset RAY_ADDRESS"),
        (ChildError("no answer after 20 s"), {}, MISSING, "no answer after 20 s", "ray start"),
        (ChildError("No module named 'ray'"), {"RAY_ADDRESS": "h:1"}, WARNING, "No module", "unset RAY_ADDRESS"),
    ],
)
def test_a_cluster_is_asked_for(said: Any, environ: dict[str, str], state: str, says: str, cure: str) -> None:
    found = surroundings.ray_cluster(machine_of(environ=environ, said=said))
    assert (found.state, found.required) == (state, False)
    assert says in found.found
    assert cure in found.cure


def test_an_address_that_nobody_has_is_refused_by_a_real_child() -> None:
    found = surroundings.ray_cluster(Machine(environ={"RAY_ADDRESS": "127.0.0.1:1"}))
    assert (found.state, "no Ray cluster answers" in found.found) == (WARNING, True), found
