"""The command line: measures, shows, keeps, judges."""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import cast

import ray
from rich.console import Console

from benchmarks import machine, tables
from benchmarks.report import Report
from benchmarks.suite import Choice, Suite
from benchmarks.suites import SUITES
from benchmarks.targets import judge

RESULTS = Path(__file__).with_name("results")
_WIDTH = 120


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=main.__doc__)
    parser.add_argument("--suite", nargs="+", choices=list(SUITES), default=list(SUITES), help="which (default: all)")
    parser.add_argument("--quick", action="store_true", help="fewer cases and runs: minutes")
    parser.add_argument("--ranks", type=_whole, nargs="+", default=(), help="processes, 2 to 16 (default: by suite)")
    parser.add_argument("--sizes", type=_whole, nargs="+", default=(), help="bytes per rank (default: by suite)")
    parser.add_argument(
        "--busy", type=float, nargs="+", metavar="MS", default=(), help="ms of computing (default: by suite)"
    )
    parser.add_argument("--runs", type=_whole, help="operations per contender and case (default: by size)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all records there, too")
    parser.add_argument("--output", type=Path, metavar="DIR", default=RESULTS, help="for the JSON of each suite")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a target is missed, or not measured")
    return parser.parse_args(arguments)


def _whole(text: str) -> int:
    """A positive whole number."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return number


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures raycollect beside what people use today, all contenders of a comparison in turn."""
    options = parse(arguments)
    console = Console(width=None if sys.stdout.isatty() else _WIDTH)
    whole = Report(machine.describe())
    tables.show_machine(console, whole.machine)
    with _ray() as ready, console.status("") as status:
        choice = Choice(
            quick=options.quick,
            ranks=tuple(options.ranks),
            sizes=tuple(options.sizes),
            busy_ms=tuple(options.busy),
            runs=options.runs,
            progress=status.update,
        )
        for name in (name for name in SUITES if name in options.suite):
            suite = cast("Suite", import_module(SUITES[name]))
            status.update(f"{name}: starts")
            if suite.NEEDS_RAY:
                ready()
            start_s = time.monotonic()
            report = _measure(suite, choice, whole)
            report.judged = [verdict.in_words() for verdict in judge(report)]
            _show(console, suite, report)
            console.print(f"measured {name} in {time.monotonic() - start_s:.0f} s", highlight=False, style="dim")
            report.write(options.output / f"{name}.json")
    verdicts = judge(whole)
    whole.judged = [verdict.in_words() for verdict in verdicts]
    tables.show_verdicts(console, verdicts)
    if options.json:
        whole.write(options.json)
    return 1 if options.check and not all(verdict.reached for verdict in verdicts) else 0


def _measure(suite: Suite, choice: Choice, whole: Report) -> Report:
    """Runs one suite; its records go to its own report and to that of all."""
    report = Report(whole.machine)
    for record in suite.measure(choice):
        report.add(record)
        whole.add(record)
    return report


def _show(console: Console, suite: Suite, report: Report) -> None:
    if report.rows:
        tables.show_rows(console, report.rows, title=f"{suite.NAME}: {suite.TITLE}", reference=suite.REFERENCE)
    tables.show_memory(console, report.memory)
    tables.show_traffic(console, report.traffic)
    tables.show_skipped(console, report.skipped)


@contextmanager
def _ray() -> Iterator[Callable[[], None]]:
    """Gives a function that starts Ray, once; ends it."""

    def ready() -> None:
        if not ray.is_initialized():
            ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)

    try:
        yield ready
    finally:
        ray.shutdown()


if __name__ == "__main__":
    sys.exit(main())
