"""Times and compares all ways of training, with 1, 2 and 4 workers.

    python -m examples.spacy_ner [--workers 1 2 4] [--updates 10] [--rounds 7] [--json FILE]

In each round every way starts again and makes the same updates, in a random order, so that other load affects all ways
alike. After each way, all ranks must have the weights of one process that computes all gradients itself, to the last
bit (gloo's sums of more than two ranks differ in rounding); else the program ends with an error. The first round warms
up. The table has the median of the rounds; the factor against the parameter server is the median of the rounds' ratios.
"CPU ms" is the time that all workers' processes compute or wait actively, which says more than the time if others use
the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import ray
from wasabi.tables import table

from benchmarks.machine import describe
from examples.spacy_ner import corpus, ways
from examples.spacy_ner.learner import Job, Learner, train_in_one_process

DOCUMENTS = {1: 1.18, 2: 2.07, 4: 2.92}
"""Workers -> how many times faster than spacy-ray's the training was with allreduce in the original documents."""


MAX_DIFFERENCE = 1e-5
"""The mean difference of a weight that is accepted if sums of more than two ranks are added in another order.

Adam divides a gradient by its own size: if it is near zero, its rounding decides on a step of up to the learning rate,
which is 1e-3.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The times of one way with some number of workers.

    Attributes:
        workers: How many actors trained.
        way: Its name.
        update_ms: An update, the median of the rounds.
        cpu_ms: The CPU time of all workers' processes in an update, the median of the rounds.
        than_server: How many times faster it is than the parameter server with a call per parameter; None where that
            was not measured.
        than_every_call: The same, beside the server with a call per gradient, which is what spacy-ray does.
    """

    workers: int
    way: str
    update_ms: float
    cpu_ms: float
    than_server: float | None
    than_every_call: float | None


def measure(job: Job, workers: int, names: Sequence[str], *, updates: int, rounds: int) -> list[Row]:
    """Times some ways with some number of workers.

    Raises:
        AssertionError: A rank of some way has other weights than one process.
    """
    expected, _ = train_in_one_process(job, workers, updates)
    team = ways.Team(job, workers, names)
    times: dict[str, list[float]] = {name: [] for name in names}
    cpu_times: dict[str, list[float]] = {name: [] for name in names}
    draw = random.Random(workers)
    try:
        for at in range(rounds + 1):
            for name in draw.sample(list(names), len(names)):
                spent_ms, cpu_ms = _time(team.ways[name], updates)
                _check(name, team.ways[name], expected)
                if at:
                    times[name].append(spent_ms)
                    cpu_times[name].append(cpu_ms)
    finally:
        team.close()
    return [
        Row(
            workers=workers,
            way=name,
            update_ms=statistics.median(times[name]),
            cpu_ms=statistics.median(cpu_times[name]),
            than_server=_ratio(times, ways.SERVER, name),
            than_every_call=_ratio(times, ways.EVERY_CALL, name),
        )
        for name in names
    ]


def _time(way: ways.Way, updates: int) -> tuple[float, float]:
    """Milliseconds and CPU milliseconds of an update, from the beginning of a training."""
    way.restart()
    start_cpu_s, start_s = way.cpu_s(), time.perf_counter()
    way.train(updates)
    spent_s, cpu_s = time.perf_counter() - start_s, way.cpu_s() - start_cpu_s
    return spent_s / updates * 1e3, cpu_s / updates * 1e3


def _check(name: str, way: ways.Way, expected: Learner) -> None:
    """Compares the weights of all ranks with those of one process."""
    if name == ways.ALONE:  # each rank learns only from its own batches
        return
    found = set(way.digests())
    if name == ways.RAY and way.ranks > 2 and len(found) == 1:  # gloo adds in an order of its own
        weights = ray.get(way.actors[0].weights.remote())
        difference = float(np.abs(weights - expected.flat_weights).mean())
        if difference <= MAX_DIFFERENCE:
            return
        raise AssertionError(f"{name}: weights differ by {difference:.1e} in the mean")
    if found != {expected.digest()}:
        raise AssertionError(f"{name}: other weights than in one process: {found}, expected {expected.digest()}")


def _ratio(times: dict[str, list[float]], server: str, name: str) -> float | None:
    if server not in times:
        return None
    return statistics.median(theirs / ours for theirs, ours in zip(times[server], times[name], strict=True))


def show(rows: Sequence[Row]) -> str:
    """The rows as a table."""
    header = ("workers", "way", "ms per update", "CPU ms", "x server", "x every call", "documents")
    body = []
    for row in rows:
        is_answer = row.way == ways.CAPTURED
        document = DOCUMENTS.get(row.workers) if is_answer else None
        numbers = [_number(value) for value in (row.than_server, row.than_every_call, document)]
        body.append((str(row.workers), row.way, f"{row.update_ms:.1f}", f"{row.cpu_ms:.1f}", *numbers))
    return str(table(body, header=header, divider=True, aligns=("r", "l", "r", "r", "r", "r", "r")))


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _machine() -> dict[str, str]:
    packages = {name: metadata.version(name) for name in ("spacy", "thinc", "numpy", "ray")}
    return {**describe(), **packages, "date": time.strftime("%Y-%m-%d")}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Times ways to train a spaCy pipeline in Ray actors.")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4], help="how many workers (default 1 2 4)")
    parser.add_argument("--updates", type=int, default=10, help="updates of a way in a round (default 10)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds that count (default 7)")
    parser.add_argument("--words", type=int, default=100, help="words of a worker's batch (default 100)")
    parser.add_argument(
        "--ways", nargs="+", choices=list(ways.WAYS), default=list(ways.WAYS), help="which (default all)"
    )
    parser.add_argument("--json", type=Path, help="a file for machine and rows")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Measures, and prints the table."""
    options = parse(arguments)
    names = [name for name in options.ways if name != ways.RAY or find_spec("torch")]
    machine: dict[str, Any] = _machine()
    rows: list[Row] = []
    ray.init(address="local", include_dashboard=False, log_to_driver=False, num_cpus=os.cpu_count())
    try:
        with tempfile.TemporaryDirectory() as directory:
            train, dev = corpus.write(Path(directory))
            job = Job(train=train, dev=dev, overrides={"training.batcher.size": options.words})
            for workers in options.workers:
                rows += measure(job, workers, names, updates=options.updates, rounds=options.rounds)
                print(show(rows[-len(names) :]), flush=True)
    finally:
        ray.shutdown()
    machine["load after"] = f"{os.getloadavg()[0]:.2f}"
    print(", ".join(f"{name} {value}" for name, value in machine.items()))
    if options.json:
        found = {"machine": machine, **vars(options), "json": None, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
