"""What a measurement is, how it is shown and how it is kept."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

PACKAGES = ("ray", "numpy", "torch", "xoscar", "pygloo", "raycollect")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One contender at one size.

    Attributes:
        suite: The suite that measured it, such as ``"driver"``.
        op: The operation.
        ranks: How many actors took part.
        nbytes: Bytes per rank.
        contender: Who was measured.
        median_ms: The median time of one operation.
        p90_ms: Nine in ten were faster.
        runs: How many operations were timed.
    """

    suite: str
    op: str
    ranks: int
    nbytes: int
    contender: str
    median_ms: float
    p90_ms: float
    runs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """How many times faster than a peer the library has to be.

    Attributes:
        ranks: How many actors take part.
        nbytes: Bytes per rank.
        contender: Who has to be faster.
        peer: Than whom.
        ratio: How many times, at least.
    """

    ranks: int
    nbytes: int
    contender: str
    peer: str
    ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A target beside what was measured."""

    target: Target
    ratio: float

    @property
    def reached(self) -> bool:
        """True where the library is fast enough."""
        return self.ratio >= self.target.ratio


def summarise(times_ms: Sequence[float], *, suite: str, op: str, ranks: int, nbytes: int, contender: str) -> Row:
    """Makes one row of the times of one contender."""
    ordered = sorted(times_ms)
    return Row(
        suite=suite,
        op=op,
        ranks=ranks,
        nbytes=nbytes,
        contender=contender,
        median_ms=statistics.median(ordered),
        p90_ms=ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))],
        runs=len(ordered),
    )


def judge(rows: Sequence[Row], targets: Sequence[Target]) -> list[Verdict]:
    """Compares the medians with those targets for which both contenders were measured."""
    medians = {(row.ranks, row.nbytes, row.contender): row.median_ms for row in rows}
    verdicts = []
    for target in targets:
        ours = medians.get((target.ranks, target.nbytes, target.contender))
        theirs = medians.get((target.ranks, target.nbytes, target.peer))
        if ours and theirs:
            verdicts.append(Verdict(target=target, ratio=theirs / ours))
    return verdicts


# ---------------------------------------------------------------------------------------------- the machine


def describe_machine() -> dict[str, str]:
    """What a reader must know to judge the numbers."""
    described = {
        "cpu": _cpu_model(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }
    for package in PACKAGES:
        try:
            described[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return described


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


# ---------------------------------------------------------------------------------------------- showing and keeping


def size(nbytes: int) -> str:
    """A size as a person reads it: ``4 B``, ``1 MB`` (of 1,048,576 bytes)."""
    for unit, name in ((1 << 30, "GB"), (1 << 20, "MB"), (1 << 10, "KB")):
        if nbytes >= unit:
            return f"{nbytes / unit:g} {name}"
    return f"{nbytes} B"


def show_machine(console: Console, machine: dict[str, str]) -> None:
    """Prints the machine's description in one line."""
    console.print(", ".join(f"{name} {value}" for name, value in machine.items()), highlight=False, style="dim")


def show_rows(console: Console, rows: Sequence[Row], *, title: str, peer: str) -> None:
    """Prints a table; its last column tells how many times faster each contender is than `peer`."""
    reference = {(row.op, row.ranks, row.nbytes): row.median_ms for row in rows if row.contender == peer}
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for heading in ("op", "ranks", "size", "contender"):
        table.add_column(heading, no_wrap=True)
    for heading in ("median", "p90", "runs", "faster"):
        table.add_column(heading, justify="right", no_wrap=True)
    last = None
    for row in rows:
        case = (row.op, row.ranks, row.nbytes)
        if last is not None and case != last:
            table.add_section()
        first = case != last
        base = reference.get(case)
        table.add_row(
            row.op if first else "",
            str(row.ranks) if first else "",
            size(row.nbytes) if first else "",
            row.contender,
            f"{row.median_ms:.3f}",
            f"{row.p90_ms:.3f}",
            str(row.runs),
            f"{base / row.median_ms:.2f} x" if base else "",
        )
        last = case
    console.print(table)


def show_verdicts(console: Console, verdicts: Sequence[Verdict]) -> None:
    """Prints each target and whether it was reached."""
    for verdict in verdicts:
        target = verdict.target
        console.print(
            f"{'reached' if verdict.reached else 'NOT REACHED':>12}  {target.ranks} ranks, {size(target.nbytes)}: "
            f"{verdict.ratio:.2f} times faster than {target.peer} (target {target.ratio:g})",
            highlight=False,
            soft_wrap=True,
        )


def write_json(path: Path, machine: dict[str, str], rows: Sequence[Row]) -> None:
    """Writes ``{"machine": {...}, "rows": [{...}, ...]}``."""
    document = {"machine": machine, "rows": [asdict(row) for row in rows]}
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
