"""Evaluation: each actor scores its part of a data set, and one of them gathers the scores and computes the metrics.

    python -m examples.workloads.evaluation [--actors 4] [--runs 15] [--json]

A linear classifier is evaluated. The parts are of unequal size, so that the pieces of the gather are, too. The scores
go straight to the actor that has all labels; the driver gets two numbers. The ways that are compared, each with the
metrics of one process: `gather_refs`, the same captured, the scores as arguments through the object store, and the
scores in the driver, which computes the metrics itself.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray

import raycollect as col
from examples.workloads.report import Check, Report, Timing, command_line, compare, declared, ending, ensure_ray

Scores = NDArray[np.float32]

SEED = 0
FEATURES, CLASSES = 32, 100
ROWS = (2_000, 50_000)
GROUP = "evaluators"


def make_weights() -> Scores:
    """The classifier, [FEATURES, CLASSES]."""
    return np.random.default_rng(SEED).standard_normal((FEATURES, CLASSES), np.float32)


def make_data(rows: int) -> tuple[Scores, NDArray[np.int64]]:
    """The data set: [rows, FEATURES], and [rows] labels that the classifier gets right most of the time."""
    rng = np.random.default_rng(SEED + 1)
    inputs = rng.standard_normal((rows, FEATURES), np.float32)
    noise = rng.standard_normal((rows, CLASSES), np.float32) * 2
    return inputs, (inputs @ make_weights() + noise).argmax(axis=1)


def cuts(rows: int, ranks: int) -> list[int]:
    """Where the parts begin and end: later ranks have more."""
    return [rows * at * (at + 1) // (ranks * (ranks + 1)) for at in range(ranks + 1)]


def metrics(scores: Scores, labels: NDArray[np.int64]) -> tuple[float, float]:
    """The share of rows whose label is first, and of those whose label is among the first five."""
    own = scores[np.arange(len(labels)), labels][:, None]
    better = (scores > own).sum(axis=1)
    return float((better == 0).mean()), float((better < 5).mean())


@ray.remote(num_cpus=0)
class Evaluator(col.CollectiveParticipant):
    """Has the classifier and a part of the data; rank 0 has all labels."""

    def begin(self, rank: int, ranks: int, rows: int) -> None:
        inputs, self.labels = make_data(rows)
        bounds = cuts(rows, ranks)
        self.inputs, self.weights = inputs[bounds[rank] : bounds[rank + 1]], make_weights()
        self.scores = col.empty((len(self.inputs), CLASSES), np.float32)

    def score(self) -> Scores:
        """The scores of this part, [n, CLASSES]; they stay here."""
        np.matmul(self.inputs, self.weights, out=self.scores)
        return self.scores

    @col.by_value
    def score_by_value(self) -> Scores:
        return self.score()

    def evaluate(self, pieces: list[Scores]) -> tuple[float, float]:
        """The metrics of all parts, given in rank order."""
        return metrics(np.concatenate(pieces), self.labels)

    def evaluate_values(self, *pieces: Scores) -> tuple[float, float]:
        return self.evaluate(list(pieces))


def by_gather(evaluators: list[Any]) -> tuple[float, float]:
    """The scores go to rank 0, where a method gets them."""
    pieces = col.gather_refs(None, [one.score.remote() for one in evaluators], group_name=GROUP)
    found: tuple[float, float] = ray.get(evaluators[0].evaluate.remote(pieces))
    return found


@col.step
def in_a_step(evaluators: list[Any]) -> Any:
    """The same, traced once."""
    pieces = col.gather_refs(None, [one.score.remote() for one in evaluators], group_name=GROUP)
    return evaluators[0].evaluate.remote(pieces)


def by_object_store(evaluators: list[Any]) -> tuple[float, float]:
    """The scores are arguments."""
    pieces = [one.score_by_value.remote() for one in evaluators]
    found: tuple[float, float] = ray.get(evaluators[0].evaluate_values.remote(*pieces))
    return found


def by_driver(evaluators: list[Any], labels: NDArray[np.int64]) -> tuple[float, float]:
    """The driver gets the scores."""
    return metrics(np.concatenate(ray.get([one.score_by_value.remote() for one in evaluators])), labels)


def time_ways(evaluators: list[Any], rows: int, runs: int) -> tuple[Timing, Check]:
    """Times an evaluation in all ways, and compares each with one process."""
    ray.get([one.begin.remote(rank, len(evaluators), rows) for rank, one in enumerate(evaluators)])
    inputs, labels = make_data(rows)
    expected = metrics(inputs @ make_weights(), labels)
    ways: dict[str, Callable[[], Any]] = {
        "gather_refs, captured": partial(in_a_step, evaluators),
        "gather_refs": partial(by_gather, evaluators),
        "object store": partial(by_object_store, evaluators),
        "the driver": partial(by_driver, evaluators, labels),
    }
    wrong = [name for name, way in ways.items() if not np.allclose(way(), expected, atol=2 / rows)]
    ms = compare(ways, runs)
    in_a_step.close()
    told = f"wrong: {wrong}" if wrong else f"top 1 {expected[0]:.3f}, top 5 {expected[1]:.3f} in each way"
    what = f"{rows} rows, {rows * CLASSES * 4 / 1e6:.1f} MB of scores, {len(evaluators)} actors"
    return Timing(what=what, ms=ms), Check(name=f"metrics of {rows} rows", found=told, good=not wrong)


def main(actors: int = 4, runs: int = 15, rows: Sequence[int] = ROWS) -> Report:
    """Checks and times all ways.

    Args:
        actors: How many evaluate.
        runs: How often each way is timed.
        rows: Of the data sets.
    """
    ensure_ray()
    evaluators = [Evaluator.remote() for _ in range(actors)]
    with ending(evaluators), declared(evaluators, GROUP):
        found = [time_ways(evaluators, count, runs) for count in rows]
    return Report(
        title=f"Evaluation by {actors} actors",
        unit="evaluation",
        checks=tuple(check for _, check in found),
        timings=tuple(timing for timing, _ in found),
    )


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description="Evaluation over actors, with a gather.")
    made.add_argument("--actors", type=int, default=4, help="actors (default 4)")
    made.add_argument("--runs", type=int, default=15, help="how often each way is timed (default 15)")
    made.add_argument("--rows", type=int, nargs="+", default=ROWS, help="of the data sets (default 2000 50000)")
    return made


if __name__ == "__main__":
    command_line(main, parser())
