"""What the terminal shows."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from benchmarks.report import Peak, Row, Skip, Traffic, size
from benchmarks.targets import Verdict


def show_machine(console: Console, machine: dict[str, str]) -> None:
    """Prints the machine's description in one line."""
    console.print(", ".join(f"{name} {value}" for name, value in machine.items()), highlight=False, style="dim")


def show_rows(console: Console, rows: Sequence[Row], *, title: str, reference: str) -> None:
    """Prints a table; its last column tells how many times faster each contender is than the reference."""
    base = {(row.op, row.ranks, row.nbytes): row.median_ms for row in rows if row.contender == reference}
    table = _table(title, ("op", "ranks", "size", "contender"), ("median ms", "p90 ms", "runs", "faster"))
    last = None
    for row in rows:
        case = (row.op, row.ranks, row.nbytes)
        if last is not None and case != last:
            table.add_section()
        first = case != last
        table.add_row(
            row.op if first else "",
            str(row.ranks) if first else "",
            (size(row.nbytes) if row.nbytes else "-") if first else "",
            row.contender,
            f"{row.median_ms:.3f}",
            f"{row.p90_ms:.3f}",
            str(row.runs),
            f"{base[case] / row.median_ms:.2f} x" if case in base else "",
        )
        last = case
    console.print(table)


def show_memory(console: Console, peaks: Sequence[Peak]) -> None:
    """Prints the peaks of memory."""
    if not peaks:
        return
    table = _table("peak memory beside the operands", ("op", "ranks", "size", "contender"), ("MB, most of any rank",))
    for peak in peaks:
        most = f"{max(peak.extra_nbytes) / 2**20:.1f}"
        table.add_row(peak.op, str(peak.ranks), size(peak.nbytes), peak.contender, most)
    console.print(table)


def show_traffic(console: Console, found: Sequence[Traffic]) -> None:
    """Prints the bytes of the busiest links."""
    if not found:
        return
    table = _table("the busiest link sends", ("op", "ranks", "size", "contender"), ("MB", "MB, the least"))
    for one in found:
        sent, least = f"{one.sent_nbytes / 1e6:.3f}", f"{one.least_nbytes / 1e6:.3f}"
        table.add_row(one.op, str(one.ranks), size(one.nbytes), one.contender, sent, least)
    console.print(table)


def show_skipped(console: Console, skipped: Sequence[Skip]) -> None:
    """Names those who were not measured."""
    for skip in skipped:
        console.print(f"skipped in {skip.suite}: {skip.contender}: {skip.reason}", highlight=False, style="yellow")


def show_verdicts(console: Console, verdicts: Sequence[Verdict]) -> None:
    """Prints each target and whether it was reached."""
    for verdict in verdicts:
        outcome = "NOT MEASURED" if verdict.measured is None else "reached" if verdict.reached else "MISSED"
        style = "" if verdict.reached else "bold red"
        console.print(f"{outcome:>12}  {verdict.in_words().said}", highlight=False, soft_wrap=True, style=style)


def _table(title: str, left: Sequence[str], right: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for heading in left:
        table.add_column(heading, no_wrap=True)
    for heading in right:
        table.add_column(heading, justify="right", no_wrap=True)
    return table
