"""Checks what raycollect can use on this machine: a table of probes, each of which returns one or more rows.

A probe looks, changes nothing, and never raises: what goes wrong in it becomes a row. Libraries are imported in child
processes, since a broken one may end its process. Ray is asked, never started.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import replace

from raycollect.cli.doctor import software, surroundings
from raycollect.cli.doctor.findings import MISSING, WARNING, Finding, Machine, Probe
from raycollect.core import threads

__all__ = ["PROBES", "examine", "lacking", "table"]

PROBES: tuple[Probe, ...] = (
    Probe(section="software", check="Python", look=software.python, required=True),
    Probe(section="software", check="raycollect", look=software.this_package, required=True),
    *(Probe(section="software", check=name, look=software.package(name), required=True) for name in software.REQUIRED),
    Probe(section="backends", check="backends", look=software.all_backends, required=True),
    Probe(section="GPUs", check="NVIDIA driver", look=software.driver),
    Probe(section="GPUs", check="cupy", look=software.cupy),
    Probe(section="GPUs", check="torch with CUDA", look=software.torch_cuda),
    Probe(section="shared memory", check="/dev/shm", look=surroundings.dev_shm),
    Probe(section="shared memory", check="memfd", look=surroundings.anonymous_memory, required=True),
    Probe(section="shared memory", check="other processes", look=surroundings.other_processes),
    Probe(section="shared memory", check="namespaces", look=surroundings.namespaces),
    Probe(section="shared memory", check="arena", look=surroundings.arena),
    Probe(section="shared memory", check="huge pages", look=surroundings.huge_pages),
    Probe(section="limits", check="ulimit -n", look=surroundings.open_files),
    Probe(section="limits", check="ulimit -u", look=surroundings.processes),
    Probe(section="limits", check="ulimit -l", look=surroundings.locked_memory),
    Probe(section="limits", check="memory", look=surroundings.memory),
    Probe(section="limits", check="cores", look=surroundings.cpus),
    Probe(section="planner", check="measured costs", look=surroundings.measured_costs),
    Probe(section="cluster", check="Ray cluster", look=surroundings.ray_cluster),
)


def examine(machine: Machine, probes: Sequence[Probe] = PROBES) -> tuple[Finding, ...]:
    """Runs probes side by side; returns their rows in the order of the table. Takes seconds where torch is."""
    looks = [threads.apart(_rows, machine, probe) for probe in probes]
    return tuple(row for look in looks for row in look.result())


def _rows(machine: Machine, probe: Probe) -> list[Finding]:
    try:
        said = probe.look(machine)
        rows = [said] if isinstance(said, Finding) else list(said)
    except Exception as exc:  # noqa: BLE001 - whatever it is, the other rows are of use
        state = MISSING if probe.required else WARNING
        found = " ".join(f"the check failed: {type(exc).__name__}: {exc}".split())
        rows = [Finding(state=state, found=found, required=probe.required)]
    return [replace(row, section=probe.section, check=row.check or probe.check) for row in rows]


def lacking(findings: Iterable[Finding]) -> tuple[str, ...]:
    """Returns what is required and missing."""
    return tuple(one.check for one in findings if one.required and one.state == MISSING)


def table(findings: Sequence[Finding], width: int = 120) -> list[str]:
    """The rows as lines of text under their headings, each with what to do below it."""
    check = max((len(one.check) for one in findings), default=0)
    indent = " " * (2 + len(WARNING) + 2 + check + 2)
    lines: list[str] = []
    section = ""
    for one in findings:
        if one.section != section:
            section = one.section
            lines += ["", section] if lines else [section]
        head = f"  {one.state:<{len(WARNING)}}  {one.check:<{check}}  "
        lines += _wrapped(one.found, head, indent, width)
        if one.cure:
            lines += _wrapped(one.cure, f"{indent}-> ", f"{indent}   ", width)
    return [line.rstrip() for line in lines]


def _wrapped(text: str, first: str, others: str, width: int) -> list[str]:
    wrapped = textwrap.wrap(
        text,
        width=max(width, len(others) + 40),
        initial_indent=first,
        subsequent_indent=others,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return wrapped or [first]
