"""Allreduce called from the driver: `raycollect.allreduce_refs` beside `ray.util.collective`.

    python -m benchmarks.allreduce [--ranks 2 4] [--sizes 4 1048576] [--runs 100] [--json FILE]

Both reduce ordinary numpy buffers (float32, in place) of the same actors in turn, and the driver waits until all is
done. `raycollect` gets refs that persist over the calls; `ray.util.collective` gets one actor call per
rank. What they computed is checked after every round.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
from rich.console import Console

import raycollect as col
from benchmarks import report
from benchmarks.interleave import Contender, interleave
from benchmarks.report import Row, Target

SUITE = "driver"
OP = "allreduce"
OURS = "raycollect"
PEER = "ray.util.collective"

SIZES = (4, 1 << 20, 64 << 20)
TARGETS = [
    Target(ranks=2, nbytes=nbytes, contender=OURS, peer=PEER, ratio=ratio)
    for nbytes, ratio in zip(SIZES, (1.2, 1.3, 1.7), strict=True)
]


def expected(ranks: int, runs: int) -> float:
    """What every element holds after `runs` sums, where rank r began with r + 1."""
    return ranks * (ranks + 1) / 2 * float(ranks) ** (runs - 1)


class Worker(col.CollectiveParticipant):
    """One actor for all contenders, with a buffer for each: they differ in nothing but the way to reduce."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.arrays: dict[str, Any] = {}

    def allocate(self, name: str, nbytes: int) -> None:
        self.arrays[name] = np.zeros(max(1, nbytes // 4), np.float32)

    def fill(self, name: str) -> None:
        self.arrays[name].fill(self.rank + 1)

    def holds(self, name: str, value: float) -> bool:
        return bool(np.allclose(self.arrays[name], value, rtol=1e-5))

    def get_array(self, name: str) -> Any:
        return self.arrays[name]

    def join(self, ranks: int, group: str) -> None:
        import ray.util.collective as collective
        import torch

        torch.set_num_threads(1)
        collective.init_collective_group(ranks, self.rank, "gloo", group)
        self.collective = collective

    def allreduce(self, name: str, group: str) -> None:
        self.collective.allreduce(self.arrays[name], group)


class Contestant:
    """What the contenders have in common: a buffer in each actor."""

    name: str

    def __init__(self, actors: Sequence[Any]) -> None:
        self.actors = list(actors)
        self.group = f"benchmark-{len(self.actors)}"

    def prepare(self, nbytes: int) -> None:
        ray.get([actor.allocate.remote(self.name, nbytes) for actor in self.actors])

    def fill(self) -> None:
        ray.get([actor.fill.remote(self.name) for actor in self.actors])

    def check(self, runs: int) -> None:
        value = expected(len(self.actors), runs)
        right = ray.get([actor.holds.remote(self.name, value) for actor in self.actors])
        if not all(right):
            wrong = [rank for rank, good in enumerate(right) if not good]
            raise AssertionError(f"{self.name}: not {value} after {runs} runs on ranks {wrong}")

    def close(self) -> None:
        """Gives back what the contender holds beside the actors."""


class Raycollect(Contestant):
    """`allreduce_refs` on refs that persist."""

    name = OURS

    def __init__(self, actors: Sequence[Any], backend: str) -> None:
        super().__init__(actors)
        self.refs: list[Any] = []
        col.declare_collective_group(self.actors, backend=backend, group_name=self.group)

    def prepare(self, nbytes: int) -> None:
        super().prepare(nbytes)
        self.refs = [actor.get_array.remote(self.name) for actor in self.actors]

    def run(self) -> None:
        col.allreduce_refs(self.refs, group_name=self.group)

    def close(self) -> None:
        self.refs = []
        col.destroy_collective_group(self.group)


class RayUtilCollective(Contestant):
    """`ray.util.collective` over gloo, one actor call per rank."""

    name = PEER

    def __init__(self, actors: Sequence[Any]) -> None:
        super().__init__(actors)
        ray.get([actor.join.remote(len(self.actors), self.group) for actor in self.actors])

    def run(self) -> None:
        ray.get([actor.allreduce.remote(self.name, self.group) for actor in self.actors])


def gather_contenders(actors: Sequence[Any], backend: str, console: Console) -> list[Contender]:
    """Sets up those that are installed, and names those that are not."""
    contenders: list[Contender] = [Raycollect(actors, backend)]
    if importlib.util.find_spec("torch") is None:
        console.print(f"skipped: {PEER} (its gloo needs torch, which is not installed)")
    else:
        contenders.append(RayUtilCollective(actors))
    return contenders


def default_runs(nbytes: int) -> int:
    """Many of the small ones, few of the big ones: about half a minute in all."""
    return 400 if nbytes < 1 << 16 else 200 if nbytes < 16 << 20 else 48


def measure(*, ranks: int, sizes: Sequence[int], runs: int | None, backend: str, console: Console) -> list[Row]:
    """Times all contenders at all sizes.

    Args:
        ranks: How many actors there are.
        sizes: Bytes per rank.
        runs: Operations per size; None chooses by size.
        backend: The backend of raycollect.
        console: Where to tell what is going on.

    Returns:
        One row per size and contender.
    """
    remote = ray.remote(num_cpus=0)(Worker)
    actors = [remote.remote(rank) for rank in range(ranks)]
    contenders = gather_contenders(actors, backend, console)
    rows = []
    try:
        for nbytes in sizes:
            with console.status(f"{OP}, {ranks} ranks, {report.size(nbytes)}"):
                times = interleave(contenders, nbytes=nbytes, runs=runs or default_runs(nbytes))
            rows += [
                report.summarise(spent, suite=SUITE, op=OP, ranks=ranks, nbytes=nbytes, contender=name)
                for name, spent in times.items()
            ]
    finally:
        for contender in contenders:
            contender.close()
        for actor in actors:
            ray.kill(actor)
    return rows


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.allreduce", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2], help="actors (default 2)")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes per rank (default 4 B, 1 MB, 64 MB)")
    parser.add_argument("--runs", type=int, help="operations per size (default: by size)")
    parser.add_argument("--backend", default="auto", help="raycollect's backend (default auto)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there, too")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a target is not reached")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, shows, keeps; returns the exit status."""
    options = parse(arguments)
    console = Console()
    machine = report.describe_machine()
    report.show_machine(console, machine)
    if not ray.is_initialized():
        ray.init(include_dashboard=False)
    rows: list[Row] = []
    for ranks in options.ranks:
        rows += measure(ranks=ranks, sizes=options.sizes, runs=options.runs, backend=options.backend, console=console)
    report.show_rows(console, rows, title="allreduce, float32, in place, called from the driver; ms", peer=PEER)
    verdicts = report.judge(rows, TARGETS)
    report.show_verdicts(console, verdicts)
    if options.json:
        report.write_json(options.json, machine, rows)
    return 1 if options.check and not all(verdict.reached for verdict in verdicts) else 0


if __name__ == "__main__":
    sys.exit(main())
