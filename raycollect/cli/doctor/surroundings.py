"""Probes of the machine: its shared memory, its limits, what was measured on it, the cluster that runs on it."""

from __future__ import annotations

import os
import re
import resource

from raycollect.cli.doctor.findings import MISSING, OK, WARNING, ChildError, Finding, Machine
from raycollect.core import shared_memory
from raycollect.errors import InvalidArgumentError
from raycollect.group import link_costs
from raycollect.planner.wording import counted, nbytes_words

SHARE_OF_MEMORY = 0.1  # the part of the memory that /dev/shm has to have: Ray keeps its object store there
CLUSTER_TIMEOUT_S = 20.0  # how long a cluster has for its answer, the import of Ray included

# What is few for a process that drives actors: each costs it a descriptor or two, and each has dozens of threads.
FEW_FILES = FEW_PROCESSES = 4096

# ---------------------------------------------------------------------------------------------- shared memory


def dev_shm(machine: Machine) -> Finding:
    """The size of /dev/shm, where Ray keeps its object store, against the memory that this process may use."""
    from raycollect.pos.limit import usable_nbytes  # with numpy

    cure = "docker run --shm-size=..., or mount -o remount,size=... /dev/shm: Ray keeps its object store there"
    try:
        stat = os.statvfs(machine.root / "dev/shm")
    except OSError as exc:
        return Finding(state=WARNING, found=f"not there: {exc.strerror}", cure=cure)
    memory = usable_nbytes(machine.root)
    total, free = stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize
    found = f"{nbytes_words(total)}, {nbytes_words(free)} of it free; memory {nbytes_words(memory)}"
    if min(total, free) < SHARE_OF_MEMORY * memory:
        return Finding(state=WARNING, found=f"{found}: below {SHARE_OF_MEMORY:.0%}", cure=cure)
    return Finding(state=OK, found=found)


def anonymous_memory(machine: Machine) -> Finding:
    """Whether sealed memory without a name can be made, which shm groups and arenas consist of."""
    try:
        os.close(shared_memory.create("raycollect-doctor", 1 << 20))
    except (OSError, AttributeError) as exc:
        cure = "a Linux that has memfd_create and lets containers call it (seccomp); until then name backend='tcp'"
        return Finding(state=MISSING, found=str(exc), cure=cure, required=True)
    return Finding(state=OK, found="memfd_create and its seals work", required=True)


_OPENS = """
import json, os
fd = os.open("/proc/{pid}/fd/{fd}", os.O_RDWR)
print(json.dumps({{"token": os.pread(fd, 32, 0).hex()}}))
"""


def other_processes(machine: Machine) -> Finding:
    """Whether a process of this user can open another one's memory, by trying it, as arenas and doorbells do."""
    cure = "one pid namespace, and /proc without hidepid, for all actors of a host; else tensors are copied"
    try:
        fd = shared_memory.create("raycollect-doctor", 4096)
    except (OSError, AttributeError) as exc:
        return Finding(state=WARNING, found=f"there is no memory to show: {exc}", cure=cure)
    token = os.urandom(32)
    try:
        os.pwrite(fd, token, 0)
        said = machine.ask(_OPENS.format(pid=os.getpid(), fd=fd))["token"]
    except ChildError as exc:
        found = f"memory of another process can't be opened under /proc: {exc}"
        return Finding(state=WARNING, found=found, cure=cure)
    finally:
        os.close(fd)
    if said != token.hex():
        return Finding(state=WARNING, found="/proc shows another process's memory", cure=cure)
    scope = machine.read("/proc/sys/kernel/yama/ptrace_scope")
    found = f"their memory opens under /proc/<pid>/fd (kernel.yama.ptrace_scope: {scope or 'not there'})"
    return Finding(state=OK, found=found)


def namespaces(machine: Machine) -> Finding:
    """The namespaces that decide which processes can share memory: those of one host are to have the same."""
    found = []
    for name in ("ipc", "mnt", "net", "pid"):
        try:
            found.append(os.readlink(machine.root / "proc/self/ns" / name))  # noqa: PTH115 - it is no path
        except OSError:
            cure = "a /proc that shows them; else processes are told apart by the host's name"
            return Finding(state=WARNING, found="/proc/self/ns can't be read", cure=cure)
    return Finding(state=OK, found=", ".join(found))


def arena(machine: Machine) -> Finding:
    """The limit of shared memory for the tensors of a process."""
    from raycollect.pos import limit  # with numpy

    try:
        nbytes = limit.arena_limit(machine.environ, machine.root)
    except OSError as exc:
        return Finding(state=WARNING, found=str(exc), cure=f"correct or unset {limit.VARIABLE}")
    if not nbytes:
        return Finding(state=WARNING, found="switched off", cure=f"unset {limit.VARIABLE}")
    why = limit.VARIABLE if machine.environ.get(limit.VARIABLE, "").strip() else f"{limit.SHARE:.0%} of the memory"
    return Finding(state=OK, found=f"up to {nbytes_words(nbytes)} per process ({why})")


def huge_pages(machine: Machine) -> Finding:
    """Whether shared memory can have huge pages, for which it is asked 2 MiB at a time."""
    shared = _chosen(machine.read("/sys/kernel/mm/transparent_hugepage/shmem_enabled"))
    private = _chosen(machine.read("/sys/kernel/mm/transparent_hugepage/enabled"))
    found = f"shared memory: {shared or 'unknown'}; other memory: {private or 'unknown'}"
    return Finding(state=OK, found=found)


def _chosen(text: str) -> str:
    match = re.search(r"\[(\w+)\]", text)
    return match[1] if match else ""


# ---------------------------------------------------------------------------------------------- limits


def open_files(machine: Machine) -> Finding:
    """The limit of open files, of which a driver needs a few per actor."""
    return _limit(machine, resource.RLIMIT_NOFILE, "n", FEW_FILES)


def processes(machine: Machine) -> Finding:
    """The limit of processes and threads; each actor has dozens of threads."""
    return _limit(machine, resource.RLIMIT_NPROC, "u", FEW_PROCESSES)


def _limit(machine: Machine, which: int, letter: str, few: int) -> Finding:
    limit = machine.limit(which)
    if 0 <= limit < few:
        return Finding(state=WARNING, found=str(limit), cure=f"ulimit -{letter} 65536, before Ray starts")
    return Finding(state=OK, found="unlimited" if limit < 0 else str(limit))


def locked_memory(machine: Machine) -> Finding:
    """The limit of locked memory. Nothing here locks any; NCCL over InfiniBand does."""
    limit = machine.limit(resource.RLIMIT_MEMLOCK)
    found = "unlimited" if limit < 0 else f"{nbytes_words(limit)}; only NCCL over InfiniBand needs more"
    return Finding(state=OK, found=found)


def memory(machine: Machine) -> Finding:
    """The memory that this process may use, and of what the machine has."""
    from raycollect.pos.limit import usable_nbytes  # with numpy

    machines = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    usable = usable_nbytes(machine.root)
    found = nbytes_words(usable)
    if usable < machines:
        found += f" by its cgroup, of {nbytes_words(machines)}"
    return Finding(state=OK, found=found)


def cpus(machine: Machine) -> Finding:
    """The cores that this process may use, by its mask and by the quota of its cgroup."""
    cores, quota = len(os.sched_getaffinity(0)), _quota(machine)
    found = f"{cores} of {os.cpu_count()}" + (f", with the time of {quota:g} by its cgroup" if quota else "")
    if min(cores, quota or cores) < 2:
        cure = "two cores or more: ranks that wait for each other take turns on one"
        return Finding(state=WARNING, found=found, cure=cure)
    return Finding(state=OK, found=found)


def _quota(machine: Machine) -> float:
    """The cores that the cgroup grants; 0 for no limit."""
    both = machine.read("/sys/fs/cgroup/cpu.max").split() or [
        machine.read("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"),
        machine.read("/sys/fs/cgroup/cpu/cpu.cfs_period_us"),
    ]
    try:
        return max(int(both[0]) / int(both[1]), 0.0)
    except (ValueError, IndexError, ZeroDivisionError):
        return 0.0


# ---------------------------------------------------------------------------------------------- planner and cluster


def measured_costs(machine: Machine) -> Finding:
    """The file of measured costs, by which the planner chooses algorithms."""
    cure = "raycollect bench --calibrate"
    variable = link_costs.ENVIRONMENT_VARIABLE
    path, is_named, is_there = link_costs.looked_up(machine.environ)
    if not is_there:
        return Finding(state=WARNING, found=f"no {path}: the planner uses defaults", cure=cure)
    try:
        links = link_costs.read(path, source=variable if is_named else "the file").measured
    except InvalidArgumentError as exc:
        (violation,) = exc.violations
        found = f"{violation.field} is {violation.found}"
        if not is_named:
            return Finding(state=WARNING, found=f"{found}: the planner uses defaults", cure=cure)
        found, cure = f"{found}: no group can be declared", f"unset {variable}, or {cure} --output {path}"
        return Finding(state=MISSING, found=found, cure=cure, required=True)
    said = ", ".join(f"{one.place} over {one.backend}" for one in links)
    return Finding(state=OK, found=f"{path}: {said or 'no links'}")


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


def ray_cluster(machine: Machine) -> Finding:
    """Whether a cluster runs that a driver here would join. It is not joined, and none is started."""
    address = machine.environ.get("RAY_ADDRESS") or None
    if address == "local":
        return Finding(state=OK, found="RAY_ADDRESS is local: each driver starts a cluster of its own")
    try:
        said = machine.ask(_CLUSTER.format(address=address), CLUSTER_TIMEOUT_S)
    except ChildError as exc:
        said = {"problem": str(exc), "address": address}
    if "problem" not in said:
        nodes, groups = counted(said["nodes"], "node"), counted(said["groups"], "group")
        return Finding(state=OK, found=f"{said['address']}: {nodes}, {groups} declared")
    found = " ".join(str(said["problem"]).split())
    if address:
        return Finding(state=WARNING, found=found, cure="correct or unset RAY_ADDRESS")
    if said.get("address"):
        cure = "stop that one, or say in RAY_ADDRESS which one drivers shall join"
        return Finding(state=WARNING, found=found, cure=cure)
    cure = "ray start --head; or nothing: without a cluster the first declaration starts one of its own"
    return Finding(state=MISSING, found=found, cure=cure)
