"""The command line: measures, shows, writes, judges."""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import ray

from benchmarks import machine
from benchmarks.report import Record, Report
from benchmarks.suite import Choice, Table
from benchmarks.targets import judge

SUITES = ("links", "calls", "steps", "weights", "faults")
"""Those without Ray come first."""
RESULTS = Path(__file__).with_name("results")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=main.__doc__)
    parser.add_argument("--suite", nargs="+", choices=SUITES, default=SUITES, help="which (default: all)")
    parser.add_argument("--quick", action="store_true", help="fewer cases and runs: minutes")
    parser.add_argument("--ranks", type=_positive, nargs="+", default=(), help="processes, 2 to 16 (default: by suite)")
    parser.add_argument("--sizes", type=_positive, nargs="+", default=(), help="bytes per rank (default: by suite)")
    parser.add_argument("--runs", type=_positive, help="operations per contender and case (default: by size)")
    shown = "for the JSON of each table (default: the published results, or none where cases are chosen)"
    parser.add_argument("--output", type=Path, metavar="DIR", help=shown)
    parser.add_argument("--check", action="store_true", help="exit with 1 where a target is missed")
    return parser.parse_args(arguments)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return number


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures raycollect beside what people use today, all contenders of a table in turn."""
    options = parse(arguments)
    ranks, sizes = tuple(options.ranks), tuple(options.sizes)
    choice = Choice(quick=options.quick, ranks=ranks, sizes=sizes, runs=options.runs)
    output = options.output or (None if ranks or sizes or options.runs else RESULTS)
    missed = 0
    for name in (name for name in SUITES if name in options.suite):
        suite: Any = import_module(f"benchmarks.suites.{name}")
        start_s = time.monotonic()
        reports = {table.name: Report(machine.describe()) for table in suite.TABLES}
        for record in _measured(suite, choice):
            reports[record.suite].add(record)
        for table in suite.TABLES:
            missed += _finish(table, reports[table.name], output)
        print(f"\nmeasured {name} in {time.monotonic() - start_s:.0f} s", flush=True)
    return int(options.check and missed > 0)


def _measured(suite: Any, choice: Choice) -> Iterator[Record]:
    if not suite.NEEDS_RAY:
        yield from suite.measure(choice)
        return
    ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    try:
        yield from suite.measure(choice)
    finally:
        ray.shutdown()


def _finish(table: Table, report: Report, folder: Path | None) -> int:
    """Shows and writes a table that has records; returns the number of missed targets."""
    if not (report.rows or report.outcomes or report.skipped):
        return 0
    report.judged = judge(report)
    print(report.text(f"{table.name}: {table.title}", table.reference))
    for verdict in report.judged:
        print(f"{'reached' if verdict.reached else 'MISSED':>12}  {verdict.said}")
    if folder is not None and (report.rows or report.outcomes):
        report.write(folder / f"{table.name}.json")
    return sum(not verdict.reached for verdict in report.judged)


if __name__ == "__main__":
    sys.exit(main())
