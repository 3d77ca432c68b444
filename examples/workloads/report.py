"""Helpers of the workloads: timing ways in turn, and a report as a table or as JSON."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import ray

import raycollect as col


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A check.

    Attributes:
        name: What.
        found: What was found, in words.
        good: Whether it holds.
    """

    name: str
    found: str
    good: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """How long each way takes for one amount of work.

    Attributes:
        what: The amount of work, in words.
        ms: The median of each way, in ms. The first way is ours; the others are shown as multiples of it.
    """

    what: str
    ms: Mapping[str, float]

    @property
    def ratios(self) -> dict[str, float]:
        """How often the time of the first way goes into each way's."""
        first = next(iter(self.ms.values()))
        return {way: spent / first for way, spent in self.ms.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The result of a workload.

    Attributes:
        title: What it does.
        unit: What is timed.
        checks: What must hold.
        timings: A row per amount of work.
    """

    title: str
    unit: str
    checks: tuple[Check, ...]
    timings: tuple[Timing, ...]

    @property
    def ok(self) -> bool:
        """True where every check holds."""
        return all(check.good for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain values, with the machine and its load."""
        return {
            "title": self.title,
            "unit": self.unit,
            "machine": machine(),
            "checks": [{"name": check.name, "found": check.found, "good": check.good} for check in self.checks],
            "timings": [{"what": one.what, "ms": dict(one.ms), "ratios": one.ratios} for one in self.timings],
        }

    def text(self) -> str:
        """The report as text: the checks, then a table for each row."""
        lines = [self.title, ""]
        lines += [f"{'ok' if check.good else 'NOT OK':>6}  {check.name:<34} {check.found}" for check in self.checks]
        for timing in self.timings:
            lines += ["", f"{timing.what}, ms per {self.unit}"]
            for way, ratio in timing.ratios.items():
                lines.append(f"{'':>6}  {way:<34} {timing.ms[way]:>10.3f}  {ratio:>7.2f} x")
        here = machine()
        lines += ["", f"{here['cores']} cores, {here['processor']}, load {here['load']}"]
        return "\n".join(lines)


def machine() -> dict[str, Any]:
    """The machine and its load, as far as they matter for times."""
    return {
        "cores": os.cpu_count(),
        "processor": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "ray": ray.__version__,
        "load": f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "unknown",
    }


def compare(
    ways: Mapping[str, Callable[[], object]],
    runs: int,
    warmup: int = 2,
    before: Callable[[], object] = lambda: None,
) -> dict[str, float]:
    """Times ways in turns, each in an order that is drawn, so that other load affects all of them alike.

    Args:
        ways: What each way does once, by its name.
        runs: How often each is timed.
        warmup: How many turns go before that.
        before: What is done before each time, and not timed.

    Returns:
        The median of each way, in ms.
    """
    spent: dict[str, list[float]] = {name: [] for name in ways}
    draw = random.Random(0)
    for turn in range(-warmup, runs):
        for name in draw.sample(list(ways), len(ways)):
            before()
            start_s = time.perf_counter()
            ways[name]()
            if turn >= 0:
                spent[name].append((time.perf_counter() - start_s) * 1e3)
    return {name: statistics.median(times) for name, times in spent.items()}


@contextlib.contextmanager
def ending(actors: list[Any]) -> Iterator[list[Any]]:
    """Actors that end with the block."""
    try:
        yield actors
    finally:
        for actor in actors:
            ray.kill(actor)


@contextlib.contextmanager
def declared(actors: list[Any], name: str) -> Iterator[str]:
    """A declared group that is destroyed with the block; yields its name."""
    col.declare_collective_group(actors, group_name=name)
    try:
        yield name
    finally:
        col.destroy_collective_group(name)


def ensure_ray() -> None:
    """Joins the cluster that RAY_ADDRESS names, or starts Ray here."""
    if not ray.is_initialized():
        ray.init(include_dashboard=False)


def command_line(main: Callable[..., Report], parser: argparse.ArgumentParser) -> None:
    """Runs a workload with the arguments of the command line, prints its report, and exits with 1 if a check fails."""
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    arguments = vars(parser.parse_args())
    as_json = arguments.pop("json")
    report = main(**arguments)
    print(json.dumps(report.to_dict(), indent=2) if as_json else report.text())
    sys.exit(0 if report.ok else 1)
