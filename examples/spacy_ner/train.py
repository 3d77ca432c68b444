"""Trains a spaCy config in several Ray actors, and keeps the best pipeline; ``spacy project run ray-train`` runs it.

    python -m examples.spacy_ner.train [--workers 2] [--config config.cfg] [--output training]

The config sets the length of the training, batches, dropout and optimizer. An update is one run of a captured step, and
learns from one batch of each worker.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from wasabi.tables import row

from examples.spacy_ner.learner import CONFIG, HERE, Job
from examples.spacy_ner.trainer import Trainer
from examples.spacy_ner.ways import Captured

BEST = "model-best"
_WIDTHS = (7, 10, 8, 7, 7, 7)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """How good the pipeline is after some updates.

    Attributes:
        updates: How many.
        loss: The loss of a batch, the mean since the last evaluation.
        update_ms: How long an update took, the mean since the last evaluation.
        precision, recall, f_score: spaCy's, of entities in the test documents.
    """

    updates: int
    loss: float
    update_ms: float
    precision: float
    recall: float
    f_score: float

    def __str__(self) -> str:
        scores = (f"{100 * score:.1f}" for score in (self.precision, self.recall, self.f_score))
        return _row((str(self.updates), f"{self.loss:.2f}", f"{self.update_ms:.1f}", *scores))


def _row(cells: tuple[str, ...]) -> str:
    return str(row(cells, widths=_WIDTHS, aligns="r"))


HEADER = _row(("update", "loss", "ms", "P", "R", "F"))


def train(actors: list[Any], output: Path | None = None) -> Iterator[Evaluation]:
    """Trains from the beginning, and evaluates the pipeline every ``eval_frequency`` updates.

    Args:
        actors: The trainers, by rank; they live on.
        output: Where the best pipeline is written, as ``model-best``; None: nowhere.

    Yields:
        An evaluation at a time; the last after ``max_steps`` updates.
    """
    settings: dict[str, int] = ray.get(actors[0].settings.remote())
    way = Captured(actors)
    way.restart()
    best, done = -1.0, 0
    try:
        while done < settings["max_steps"]:
            count = min(settings["eval_frequency"], settings["max_steps"] - done)
            start_s = time.perf_counter()
            losses = way.train(count)
            spent_s = time.perf_counter() - start_s
            done += count
            scores: dict[str, float] = ray.get(actors[0].evaluate.remote())
            if output is not None and scores["ents_f"] > best:
                best = scores["ents_f"]
                ray.get(actors[0].save.remote(output.resolve() / BEST))
            yield Evaluation(
                updates=done,
                loss=sum(losses) / count / len(actors),
                update_ms=spent_s / count * 1e3,
                precision=scores["ents_p"],
                recall=scores["ents_r"],
                f_score=scores["ents_f"],
            )
    finally:
        way.close()


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Trains a spaCy pipeline with several Ray actors.")
    parser.add_argument("--workers", type=int, default=2, help="how many actors (default 2)")
    parser.add_argument("--config", type=Path, default=CONFIG, help="spaCy's training config")
    parser.add_argument("--train", type=Path, default=HERE / "corpus" / "train.spacy", help="documents to learn from")
    parser.add_argument("--dev", type=Path, default=HERE / "corpus" / "dev.spacy", help="documents to test with")
    parser.add_argument("--output", type=Path, default=HERE / "training", help="where the best pipeline is written")
    parser.add_argument("--max-steps", type=int, help="updates, where the config shall not say it")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Trains, and prints a line per evaluation."""
    options = parse(arguments)
    overrides = {} if options.max_steps is None else {"training.max_steps": options.max_steps}
    train_path, dev_path = options.train.resolve(), options.dev.resolve()
    job = Job(train=train_path, dev=dev_path, config=options.config.resolve(), overrides=overrides)
    ray.init(include_dashboard=False, log_to_driver=False)  # joins the cluster that RAY_ADDRESS names, else starts one
    try:
        print(HEADER)
        actors = [Trainer.remote(job, rank, options.workers) for rank in range(options.workers)]
        for evaluation in train(actors, options.output):
            print(evaluation, flush=True)
    finally:
        ray.shutdown()
    print(f"the best pipeline is in {options.output / BEST}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
