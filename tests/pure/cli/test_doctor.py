"""What `raycollect doctor` finds: each probe in surroundings that are made up, and all of them where they run."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import re
import resource
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

import raycollect
from raycollect import backends
from raycollect.backends import Capabilities
from raycollect.cli import doctor
from raycollect.cli.doctor import findings, software, surroundings
from raycollect.cli.doctor.findings import MISSING, OK, WARNING, ChildError, Finding, Machine, Probe
from raycollect.core import shared_memory
from raycollect.core.model import Segment
from raycollect.group import link_costs
from raycollect.planner import Link

ROOT = Path(raycollect.__file__).parents[1]


def _machine(
    root: Path = Path("/nowhere"),
    environ: dict[str, str] | None = None,
    said: Any = None,
    there: bool = True,
    limit: int = -1,
) -> Machine:
    """Surroundings: children say `said`, or fail with it; packages are there or not; all limits are the same."""

    def run(code: str, timeout_s: float) -> dict[str, Any]:
        assert 0 < timeout_s <= 60
        compile(code, "<probe>", "exec")  # not ast.parse, which CPython 3.11 can't do in several threads
        if isinstance(said, Exception):
            raise said
        answer = said(code) if callable(said) else said
        return json.loads(json.dumps(answer))

    return Machine(root=root, environ=environ or {}, run=run, is_there=lambda name: there, limit=lambda which: limit)


def _file(root: Path, path: str, text: str) -> None:
    target = root / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)


# ---------------------------------------------------------------------------------------------- the frame


def test_every_probe_has_a_row_of_its_own_name_and_heading() -> None:
    """On the machine of the tests, whatever it has; only the libraries' children are left out."""
    machine = Machine(run=_machine(said=ChildError("none here")).run)
    rows = doctor.examine(machine)
    single = [probe for probe in doctor.PROBES if probe.check != "backends"]
    assert [row.check for row in rows if row.section != "backends"] == [probe.check for probe in single]
    assert [row.check for row in rows if row.section == "backends"] == list(backends.names())
    assert {row.state for row in rows} <= {OK, WARNING, MISSING}
    assert not any(row.found.startswith("the check failed") for row in rows), rows
    assert set(doctor.lacking(rows)) == {*software.REQUIRED, "local", "shm", "tcp"}, "no child has said that they load"


@pytest.mark.parametrize(("required", "state"), [(True, MISSING), (False, WARNING)])
def test_a_probe_that_fails_is_a_row_and_the_others_go_on(required: bool, state: str) -> None:
    def fail(machine: Machine) -> Finding:
        raise ZeroDivisionError("by zero")

    def late(machine: Machine) -> Iterator[Finding]:
        yield Finding(check="first", state=OK, found="")
        raise KeyError("second")

    def well(machine: Machine) -> Finding:
        return Finding(check="third", state=OK, found="it works")

    probes = [
        Probe(section="a", check="zero", look=fail, required=required),
        Probe(section="a", check="late", look=late),
        Probe(section="b", check="third", look=well),
    ]
    rows = doctor.examine(_machine(), probes)
    assert [(row.section, row.check, row.state) for row in rows] == [
        ("a", "zero", state),
        ("a", "late", WARNING),
        ("b", "third", OK),
    ]
    assert rows[0].found == "the check failed: ZeroDivisionError: by zero"
    assert doctor.lacking(rows) == (("zero",) if required else ())


def test_the_table_has_headings_and_says_what_to_do_below() -> None:
    long = " ".join(["word"] * 30)
    rows = [
        Finding(section="a", check="one", state=OK, found="well"),
        Finding(section="a", check="another", state=MISSING, found=long, cure="pip install it"),
        Finding(section="b", check="last", state=WARNING, found=""),
    ]
    lines = doctor.table(rows, width=60)
    assert lines[:2] == ["a", "  ok       one      well"]
    assert lines[2].startswith("  missing  another  word word")
    assert max(map(len, lines)) <= 60
    assert " ".join(" ".join(lines).split()).count("word") == 30
    assert lines[-4:] == [" " * 20 + "-> pip install it", "", "b", "  warning  last"]
    assert doctor.table([]) == []


def test_one_code_is_run_once() -> None:
    ran = []

    def said(code: str) -> dict[str, str]:
        ran.append(code)
        return {"code": code}

    machine = _machine(said=said)
    machine.start("1")
    assert [machine.ask(code)["code"] for code in ("1", "2", "1")] == ["1", "2", "1"]
    assert sorted(ran) == ["1", "2"]


# ---------------------------------------------------------------------------------------------- children


def test_a_child_answers_with_its_last_line() -> None:
    code = "import raycollect\nprint('noise')\nprint('{\"from\": \"%s\"}' % raycollect.__file__)"
    assert findings.run_child(code, 60.0) == {"from": raycollect.__file__}


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "ended by SIGSEGV"),
        ("raise ImportError('libfoo.so.1: cannot open')", r"ImportError: libfoo.so.1: cannot open"),
        ("import sys; sys.exit(3)", "ended with 3"),
        ("print('hello')", "it said 'hello'"),
        ("print('[1]')", r"it said \[1\]"),
        ("import sys; sys.stdout.buffer.write(bytes([255, 254]))", "it said"),
        ("", "it said ''"),
    ],
)
def test_a_child_that_does_not_answer_is_an_error(code: str, says: str) -> None:
    with pytest.raises(ChildError, match=says):
        findings.run_child(code, 60.0)


def test_a_child_that_hangs_is_given_up() -> None:
    with pytest.raises(ChildError, match=r"no answer after 0\.3 s"):
        findings.run_child("import threading; threading.Event().wait()", 0.3)


def test_a_child_that_can_not_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(ChildError, match="no process could be started"):
        findings.run_child("print({})", 1.0)


# ---------------------------------------------------------------------------------------------- software


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
    absent = look(_machine(there=False))
    assert (absent.state, absent.required, absent.cure) == (MISSING, True, f"pip install '{name}>={lowest}'")
    for version, state in ((lowest, OK), ("999.0rc1", OK), (f"{lowest}.1", OK), ("0.0.9", MISSING)):
        found = look(_machine(said={"version": version}))
        assert (found.state, found.found.split(",")[0]) == (state, version)


def test_versions_are_compared_by_number() -> None:
    assert software.package("ray")(_machine(said={"version": "2.9.1"})).state == MISSING
    assert software.package("ray")(_machine(said={"version": "2.100"})).state == OK


def test_a_required_package_that_is_broken_is_missing() -> None:
    found = software.package("numpy")(_machine(said=ChildError("its process was ended by SIGILL")))
    assert (found.state, found.required) == (MISSING, True)
    assert found.found == "it can't be imported: its process was ended by SIGILL"
    assert "--force-reinstall" in found.cure


@pytest.mark.parametrize(("version", "state"), [((3, 9, 1), MISSING), ((3, 10, 0), OK), ((4, 0, 0), OK)])
def test_python_has_to_be_new_enough(monkeypatch: pytest.MonkeyPatch, version: tuple[int, ...], state: str) -> None:
    monkeypatch.setattr(sys, "version_info", version)
    monkeypatch.setattr(sys, "platform", "linux")
    found = software.python(_machine())
    assert (found.state, found.required) == (state, True)


def test_another_system_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert software.python(_machine()).state == WARNING


# ---------------------------------------------------------------------------------------------- backends


def _loads(problems: dict[str, str]) -> Callable[[str], dict[str, str]]:
    """A child that says of each backend it is asked for what is wrong with it."""

    def said(code: str) -> dict[str, str]:
        names = re.findall(r"'([^']+)'", re.findall(r"^for name in (.*):$", code, re.MULTILINE)[0])
        return {name: problems.get(name, "") for name in names}

    return said


def test_a_backend_that_loads_says_what_it_can() -> None:
    rows = {row.check: row for row in software.all_backends(_machine(said=_loads({})))}
    assert list(rows) == list(backends.names())
    assert rows["shm"].found == "cpu; one host"
    assert rows["local"].found == "cpu; one process"
    assert rows["torch:nccl"].found == "cuda; several hosts; not tested by this project"
    assert {name for name, row in rows.items() if row.required} == {"local", "shm", "tcp"}


def test_a_backend_that_is_missing_has_its_install_line() -> None:
    why = "backend 'gloo': it needs what is not there (pygloo: No module).\n Install it: pip install 'raycollect[gloo]'"
    why = why.replace(").\n ", "). ")
    rows = {row.check: row for row in software.all_backends(_machine(said=_loads({"gloo": why})))}
    gloo = rows["gloo"]
    assert (gloo.state, gloo.found) == (MISSING, "pygloo: No module")
    assert (gloo.cure, gloo.required) == ("pip install 'raycollect[gloo]'", False)
    assert rows["shm"].state == OK


def test_a_library_that_ends_its_process_takes_no_other_backend_along() -> None:
    def said(code: str) -> dict[str, str]:
        if "'torch:gloo'" in code:
            raise ChildError("its process was ended by SIGSEGV")
        return _loads({})(code)

    rows = {row.check: row for row in software.all_backends(_machine(said=said))}
    fallen = {name for name, row in rows.items() if row.found == "its process was ended by SIGSEGV"}
    assert fallen == {name for name, line in backends.BACKENDS.items() if line.libraries == ("torch",)}
    assert rows["gloo"].state == rows["tcp"].state == rows["torch:hccl"].state == OK


def test_a_backend_of_an_installed_package_has_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    offered = (EntryPoint(name="rocket", value="rockets:line", group=backends.ENTRY_POINTS),)
    monkeypatch.setattr(backends, "_offered", lambda name=None: offered)
    [row] = (one for one in software.all_backends(_machine(said=_loads({}))) if one.check == "rocket")
    assert (row.state, row.found, row.required) == (OK, "offered by an installed package", False)
    [row] = (
        one for one in software.all_backends(_machine(said=_loads({"rocket": "it burns"}))) if one.check == "rocket"
    )
    assert (row.state, row.found) == (MISSING, "it burns")
    assert "reinstall" in row.cure


def test_a_real_child_loads_the_backends_of_this_package() -> None:
    if importlib.util.find_spec("cupy") is not None:
        pytest.skip("cupy is installed here")
    machine = Machine()
    shm, nccl = (software._backend(machine, name, ("shm", "nccl")) for name in ("shm", "nccl"))
    assert shm.state == OK, shm
    assert (nccl.state, nccl.required) == (MISSING, False)
    assert nccl.found.startswith("cupy.cuda.nccl: ")
    assert "raycollect[cuda13]" in nccl.cure


# ---------------------------------------------------------------------------------------------- GPUs


def test_the_driver_is_read_from_proc(tmp_path: Path) -> None:
    absent = software.driver(_machine(tmp_path))
    assert (absent.state, absent.found, absent.required) == (MISSING, "no driver", False)
    line = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build  (x) Thu Jan 23"
    _file(tmp_path, "proc/driver/nvidia/version", f"{line}\nGCC version: gcc 12\n")
    assert software.driver(_machine(tmp_path)).state == WARNING, "a driver, and no GPU"
    for at in range(2):
        _file(tmp_path, f"proc/driver/nvidia/gpus/0000:0{at}:00.0/information", "Model: H")
    found = software.driver(_machine(tmp_path))
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
    [found] = doctor.examine(_machine(said=said), [probe])
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
    found = software.torch_cuda(_machine(said=said))
    assert (found.state, found.required) == (state, False)
    assert says in found.found


@pytest.mark.parametrize("look", [software.cupy, software.torch_cuda])
def test_a_library_that_is_not_there_is_not_imported(look: Callable[[Machine], Finding]) -> None:
    found = look(_machine(there=False, said=AssertionError("asked")))
    assert found.state == MISSING
    assert "pip install" in found.cure


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
    found = surroundings.dev_shm(_machine())
    assert found.state == state
    assert found.found.startswith(f"{findings.size(total)}, {findings.size(free)} of it free; memory 16 GiB")
    assert bool(found.cure) == (state != OK)


def test_no_dev_shm_is_a_warning(tmp_path: Path) -> None:
    found = surroundings.dev_shm(_machine(tmp_path))
    assert (found.state, found.found) == (WARNING, "not there: No such file or directory")
    assert "--shm-size" in found.cure


@pytest.mark.parametrize("problem", [OSError(errno.EPERM, "Operation not permitted"), AttributeError("no F_ADD_SEALS")])
def test_no_memory_without_a_name_is_missing(monkeypatch: pytest.MonkeyPatch, problem: Exception) -> None:
    def create(name: str, nbytes: int) -> int:
        raise problem

    assert surroundings.anonymous_memory(_machine()).state == OK
    monkeypatch.setattr(shared_memory, "create", create)
    found = surroundings.anonymous_memory(_machine())
    assert (found.state, found.required) == (MISSING, True)
    assert surroundings.other_processes(_machine()).state == WARNING


def test_what_a_probe_opens_it_closes() -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    surroundings.anonymous_memory(_machine())
    surroundings.other_processes(_machine(said=ChildError("no")))
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
    found = surroundings.other_processes(_machine(said=said))
    assert (found.state, found.required) == (WARNING, False)
    assert "hidepid" in found.cure


def test_namespaces_are_named(tmp_path: Path) -> None:
    assert surroundings.namespaces(_machine(tmp_path)).state == WARNING
    (tmp_path / "proc/self/ns").mkdir(parents=True)
    for at, name in enumerate(("ipc", "mnt", "net", "pid")):
        (tmp_path / "proc/self/ns" / name).symlink_to(f"{name}:[{at}]")
    found = surroundings.namespaces(_machine(tmp_path))
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
    found = surroundings.arena(_machine(environ={"RAYCOLLECT_ARENA_LIMIT": value}))
    assert found.state == state
    assert says in found.found


def test_huge_pages_are_read_from_sys(tmp_path: Path) -> None:
    assert surroundings.huge_pages(_machine(tmp_path)).found == "shared memory: unknown; other memory: unknown"
    _file(tmp_path, "sys/kernel/mm/transparent_hugepage/shmem_enabled", "always within_size [advise] never\n")
    _file(tmp_path, "sys/kernel/mm/transparent_hugepage/enabled", "[always] madvise never\n")
    assert surroundings.huge_pages(_machine(tmp_path)).found == "shared memory: advise; other memory: always"


# ---------------------------------------------------------------------------------------------- limits


@pytest.mark.parametrize("look", [surroundings.open_files, surroundings.processes])
@pytest.mark.parametrize(("limit", "state"), [(1024, WARNING), (4096, OK), (1 << 20, OK), (-1, OK)])
def test_limits_are_held_against_what_is_few(look: Callable[[Machine], Finding], limit: int, state: str) -> None:
    found = look(_machine(limit=limit))
    assert (found.state, found.found) == (state, "unlimited" if limit < 0 else str(limit))
    assert bool(found.cure) == (state == WARNING)


def test_locked_memory_is_told() -> None:
    assert surroundings.locked_memory(_machine(limit=8 << 20)).found.startswith("8 MiB")
    assert surroundings.locked_memory(_machine(limit=-1)).found == "unlimited"


def test_a_real_limit_is_the_soft_one() -> None:
    assert Machine().limit(resource.RLIMIT_NOFILE) == resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def test_the_memory_of_a_cgroup_is_told(tmp_path: Path) -> None:
    assert "cgroup" not in surroundings.memory(_machine(tmp_path)).found
    _file(tmp_path, "proc/self/cgroup", "0::/box\n")
    _file(tmp_path, "sys/fs/cgroup/box/memory.max", str(1 << 28))
    assert surroundings.memory(_machine(tmp_path)).found.startswith("256 MiB by its cgroup, of ")


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
        _file(tmp_path, f"sys/fs/cgroup/{name}", text)
    found = surroundings.cpus(_machine(tmp_path))
    assert found.state == state
    assert says in found.found
    assert ("cgroup" in found.found) == ("cgroup" in says or "time of" in says)


# ---------------------------------------------------------------------------------------------- planner and cluster


def test_measured_costs_are_those_that_the_planner_reads(tmp_path: Path) -> None:
    environ = {"XDG_CONFIG_HOME": str(tmp_path)}
    absent = surroundings.measured_costs(_machine(environ=environ))
    assert (absent.state, absent.cure) == (WARNING, "raycollect bench --calibrate")
    path = link_costs.default_path(environ)
    link_costs.write(
        path, [link_costs.Measured(place="inside", backend="shm", link=Link(latency_s=1e-5, bandwidth=4e9))]
    )
    found = surroundings.measured_costs(_machine(environ=environ))
    assert (found.state, found.found) == (OK, f"{path}: inside over shm")
    path.write_text("{}")
    assert surroundings.measured_costs(_machine(environ=environ)).state == WARNING


@pytest.mark.parametrize("content", [None, "{}"])
def test_a_named_file_of_costs_that_is_no_good_stops_everything(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "costs.json"
    if content is not None:
        path.write_text(content)
    environ = {link_costs.ENVIRONMENT_VARIABLE: str(path)}
    found = surroundings.measured_costs(_machine(environ=environ))
    assert (found.state, found.required) == (MISSING, True)
    assert found.found.endswith("no group can be declared")
    with pytest.raises(ValueError, match=re.escape(str(path))):
        link_costs.current(environ)


@pytest.mark.parametrize(
    ("said", "environ", "state", "says", "cure"),
    [
        ({"address": "h:1", "nodes": 1, "groups": 2}, {}, OK, "h:1: 1 node, 2 groups declared", ""),
        ({"problem": "none runs"}, {}, MISSING, "none runs", "ray start --head"),
        ({"problem": "refused", "address": "h:1"}, {}, WARNING, "refused", "RAY_ADDRESS"),
        ({"problem": "refused"}, {"RAY_ADDRESS": "h:1"}, WARNING, "refused", "unset RAY_ADDRESS"),
        (ChildError("no answer after 20 s"), {}, MISSING, "no answer after 20 s", "ray start"),
        (ChildError("No module named 'ray'"), {"RAY_ADDRESS": "h:1"}, WARNING, "No module", "unset RAY_ADDRESS"),
    ],
)
def test_a_cluster_is_asked_for(said: Any, environ: dict[str, str], state: str, says: str, cure: str) -> None:
    found = surroundings.ray_cluster(_machine(environ=environ, said=said))
    assert (found.state, found.required) == (state, False)
    assert says in found.found
    assert cure in found.cure


def test_an_address_that_nobody_has_is_refused_by_a_real_child() -> None:
    found = surroundings.ray_cluster(Machine(environ={"RAY_ADDRESS": "127.0.0.1:1"}))
    assert (found.state, "no Ray cluster answers" in found.found) == (WARNING, True), found


def test_this_file_knows_every_probe() -> None:
    """A new probe needs a test, and a name here."""
    known = set(re.findall(r"(?:software|surroundings)\.(\w+)", Path(__file__).read_text()))
    looks = {getattr(probe.look, "__qualname__", "").partition(".")[0] for probe in doctor.PROBES} - {"this_package"}
    assert looks <= known
    assert isinstance(backends.BACKENDS["shm"], Capabilities)
