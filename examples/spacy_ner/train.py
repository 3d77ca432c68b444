"""Trains a spaCy config in several Ray actors, and keeps the best pipeline; `spacy project run ray-train` runs it.

    python train.py [--workers 2] [--config config.cfg] [--output training]

The config sets the length of the training, batches, dropout and optimizer. An update learns from one batch of each
worker: an actor computes the gradients of its batch, `allreduce_refs` sums them, and every actor lets the optimizer
change its weights. spaCy sums a loss over the words of a batch, so the sum over workers is that of one bigger batch.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray
from spacy.schemas import ConfigSchemaTraining
from spacy.training import Example
from spacy.training.initialize import init_nlp
from spacy.util import load_config, registry, resolve_dot_names
from thinc.api import fix_random_seed

import raycollect as col

Array = NDArray[np.float32]

HERE = Path(__file__).parent
ONE_THREAD = {"env_vars": dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "BLIS_NUM_THREADS"), "1")}
_MANY_UPDATES = 1_000_003  # more than a training has, so that no two ranks draw the same dropout
_NO_STEP: Any = False  # spaCy's own training passes it, though its type says an optimizer or None


class Learner:
    """A spaCy pipeline that computes gradients of its batches, and applies a sum of gradients. It does not use Ray.

    All learners of a training begin with the same weights. Batch `i` of a rank is batch `i * ranks + rank` of the
    training; its dropout is drawn from a seed of rank and update.

    Args:
        config: spaCy's training config.
        overrides: Settings that differ from it, by their dotted names, as `spacy train` takes them.
        rank: The rank of this learner.
        ranks: The number of learners.
        zeros: Allocates the gradients, ``zeros(shape, dtype)``.
    """

    def __init__(
        self,
        config: Path,
        overrides: Mapping[str, Any],
        rank: int = 0,
        ranks: int = 1,
        zeros: Callable[..., Array] = np.zeros,
    ) -> None:
        self.rank, self.ranks, self.updates, self.loss = rank, ranks, 0, 0.0
        self.nlp = init_nlp(load_config(config, overrides=dict(overrides)))
        resolved = self.nlp.config.interpolate()
        self.training: dict[str, Any] = registry.resolve(resolved["training"], schema=ConfigSchemaTraining)
        train, self._dev = resolve_dot_names(resolved, [self.training["train_corpus"], self.training["dev_corpus"]])
        self._examples: list[Example] = list(train(self.nlp))
        self._batches = itertools.islice(self._all_batches(), rank, None, ranks)
        pipeline: list[tuple[str, Any]] = self.nlp.pipeline  # Any: its types say functions, which have no model
        layers = [layer for _, pipe in pipeline for layer in pipe.model.walk()]
        self._parameters = [(layer, name) for layer in layers for name in layer.param_names if layer.has_param(name)]
        self._gradients: dict[str, Array] = {}
        for at, (layer, name) in enumerate(self._parameters):
            gradient = self._gradients[f"{at} {layer.name} {name}"] = zeros(layer.get_param(name).shape, np.float32)
            layer.set_grad(name, gradient)  # thinc adds to it in place

    def _all_batches(self) -> Iterator[list[Example]]:
        """Yields all batches of the training, epoch after epoch, each in an order of its own."""
        for epoch in itertools.count():
            order = list(self._examples)
            random.Random(epoch).shuffle(order)
            yield from self.training["batcher"](order)

    def gradients(self) -> dict[str, Array]:
        """Computes the gradients of the next batch; returns the same arrays each time."""
        fix_random_seed(self.updates * _MANY_UPDATES + self.rank)
        self.loss = self.nlp.update(next(self._batches), sgd=_NO_STEP, drop=self.training["dropout"])["ner"]
        self.updates += 1
        return self._gradients

    def apply(self, gradients: dict[str, Array]) -> float:
        """Lets the optimizer change the weights by the reduced `gradients`, which it clears; returns the loss."""
        optimizer = self.training["optimizer"]
        for layer, name in self._parameters:
            weights, _ = optimizer((layer.id, name), layer.get_param(name), layer.get_grad(name))
            layer.set_param(name, weights)
        optimizer.step_schedules()
        return self.loss

    def digest(self) -> str:
        """Returns a hash of all weights: equal where they are the same to the last bit."""
        return hashlib.sha256(b"".join(layer.get_param(name).tobytes() for layer, name in self._parameters)).hexdigest()

    def evaluate(self) -> dict[str, Any]:
        """Returns spaCy's scores on the test documents: ``ents_p``, ``ents_r``, ``ents_f`` and more."""
        return self.nlp.evaluate(list(self._dev(self.nlp)))

    def settings(self) -> dict[str, int]:
        """Returns the length of the training, from the config."""
        return {name: self.training[name] for name in ("max_steps", "eval_frequency")}

    def save(self, path: Path) -> None:
        """Writes the pipeline; `spacy.load` reads it."""
        self.nlp.to_disk(path)


@ray.remote(num_cpus=0, runtime_env=ONE_THREAD)
class Trainer(col.CollectiveParticipant, Learner):
    """A learner in an actor. Its gradients lie in shared memory, where the others add to them in place."""

    def __init__(self, config: Path, overrides: Mapping[str, Any], rank: int, ranks: int) -> None:
        Learner.__init__(self, config, overrides, rank, ranks, col.zeros)

    evaluate = col.by_value(Learner.evaluate)
    settings = col.by_value(Learner.settings)
    digest = col.by_value(Learner.digest)


@dataclass(frozen=True, slots=True)
class Evaluation:
    updates: int
    loss: float  # of a batch, the mean since the last evaluation
    precision: float
    recall: float
    f_score: float


def train(trainers: list[Any], output: Path | None = None) -> Iterator[Evaluation]:
    """Trains, and yields an evaluation every `eval_frequency` updates; `output`/model-best is the best pipeline."""
    settings: dict[str, int] = ray.get(trainers[0].settings.remote())
    col.declare_collective_group(trainers, group_name="spacy")

    @col.step
    def update() -> list[Any]:
        gradients = [trainer.gradients.remote() for trainer in trainers]
        col.allreduce_refs(gradients, group_name="spacy")
        return [trainer.apply.remote(of_rank) for trainer, of_rank in zip(trainers, gradients, strict=True)]

    best, losses = -1.0, list[float]()
    for done in range(1, settings["max_steps"] + 1):
        losses += update()
        if done % settings["eval_frequency"] and done < settings["max_steps"]:
            continue
        scores: dict[str, float] = ray.get(trainers[0].evaluate.remote())
        if output is not None and scores["ents_f"] > best:
            best = scores["ents_f"]
            ray.get(trainers[0].save.remote(output.resolve() / "model-best"))
        yield Evaluation(done, sum(losses) / len(losses), scores["ents_p"], scores["ents_r"], scores["ents_f"])
        losses.clear()
    update.close()
    col.destroy_collective_group("spacy")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains a spaCy pipeline with several Ray actors.")
    parser.add_argument("--workers", type=int, default=2, help="how many actors (default 2)")
    parser.add_argument("--config", type=Path, default=HERE / "config.cfg", help="spaCy's training config")
    parser.add_argument("--train", type=Path, default=HERE / "corpus" / "train.spacy", help="documents to learn from")
    parser.add_argument("--dev", type=Path, default=HERE / "corpus" / "dev.spacy", help="documents to test with")
    parser.add_argument("--output", type=Path, default=HERE / "training", help="where the best pipeline is written")
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    overrides = {"paths.train": str(options.train.resolve()), "paths.dev": str(options.dev.resolve())}
    ray.init(include_dashboard=False, log_to_driver=False)  # joins the cluster that RAY_ADDRESS names, else starts one
    ranks = range(options.workers)
    trainers = [Trainer.remote(options.config.resolve(), overrides, rank, options.workers) for rank in ranks]
    print(f"{'update':>7} {'loss':>10} {'P':>7} {'R':>7} {'F':>7}")
    for evaluation in train(trainers, options.output):
        scores = (f"{100 * score:7.1f}" for score in (evaluation.precision, evaluation.recall, evaluation.f_score))
        print(f"{evaluation.updates:>7} {evaluation.loss:>10.2f}", *scores, flush=True)
    print(f"the best pipeline is in {options.output / 'model-best'}")


if __name__ == "__main__":
    main()
