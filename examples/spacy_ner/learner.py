"""One worker's spaCy: its pipeline, its share of the batches, and all gradients in one array. Does not use Ray."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from spacy.language import Language
from spacy.schemas import ConfigSchemaTraining
from spacy.training import Example
from spacy.training.initialize import init_nlp
from spacy.util import load_config, registry, resolve_dot_names
from thinc.api import Model, Optimizer, fix_random_seed
from thinc.types import FloatsXd

Array = NDArray[np.float32]
Key = tuple[int, str]
"""How thinc names a parameter: the number of its layer, and its name there."""

HERE = Path(__file__).parent
CONFIG = HERE / "config.cfg"
_MANY_UPDATES = 1_000_003
"""More updates than a training has, so that no two ranks draw the same dropout."""
_NO_STEP: Any = False  # spaCy's own training passes it, though its type says an optimizer or None


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The model and the data of a training.

    Attributes:
        train: The ``.spacy`` file of the training documents.
        dev: The ``.spacy`` file of the test documents.
        config: spaCy's training config.
        overrides: Settings that differ from it, by their dotted names, as ``spacy train`` takes them.
    """

    train: Path
    dev: Path
    config: Path = CONFIG
    overrides: Mapping[str, Any] = field(default_factory=dict)

    def load(self) -> Any:
        """The config, with the overrides."""
        paths = {"paths.train": str(self.train), "paths.dev": str(self.dev)}
        return load_config(self.config, overrides={**self.overrides, **paths})


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A parameter of a layer, and its place in the arrays of all parameters.

    Attributes:
        node: The layer.
        name: The parameter's name there.
        owner: The rank that owns it if parameters are sharded.
        start, stop: Its elements in the arrays of all parameters.
        shape: Its own.
    """

    node: Model[Any, Any]
    name: str
    owner: int
    start: int
    stop: int
    shape: tuple[int, ...]

    @property
    def key(self) -> Key:
        """What thinc's optimizer calls it."""
        return (self.node.id, self.name)

    def of(self, flat: Array) -> Array:
        """Its part of such an array, in its shape."""
        return flat[self.start : self.stop].reshape(self.shape)


def floats(array: Array) -> FloatsXd:
    """The same array, with thinc's type."""
    return cast(FloatsXd, array)


def share_out(models: Iterable[Model[Any, Any]], ranks: int) -> list[Parameter]:
    """Gives each rank whole parameters of about the same size in all, and lays them out rank after rank.

    The largest parameters go first, each to the rank with the least: the embedding tables are most of the model.
    """
    found = [(node, name) for model in models for node in model.walk() for name in node.param_names]
    found = [(node, name) for node, name in found if node.has_param(name)]
    sizes = [int(node.get_param(name).size) for node, name in found]
    loads, owners = [0] * ranks, [0] * len(found)
    for at in sorted(range(len(found)), key=lambda at: -sizes[at]):
        owners[at] = loads.index(min(loads))
        loads[owners[at]] += sizes[at]
    parameters, start = [], 0
    for at in sorted(range(len(found)), key=lambda at: owners[at]):
        node, name = found[at]
        shape, stop = node.get_param(name).shape, start + sizes[at]
        parameters.append(Parameter(node=node, name=name, owner=owners[at], start=start, stop=stop, shape=shape))
        start = stop
    return parameters


class Learner:
    """A spaCy pipeline that computes gradients of its batches, and takes steps down a sum of gradients.

    All learners of a training begin with the same weights. Batch ``i`` of a rank is batch ``i * ranks + rank`` of the
    training; its dropout is drawn from a seed made of rank and update. So the result of an update depends on neither
    the process nor the way gradients travel.

    Args:
        job: What is trained.
        rank: This learner's.
        ranks: How many there are.
        allocate: Makes the arrays of weights and of gradients: ``allocate(elements, dtype)``.
    """

    def __init__(self, job: Job, rank: int, ranks: int, allocate: Callable[..., Array] = np.zeros) -> None:
        config = job.load()
        self.rank, self.ranks = rank, ranks
        self.nlp: Language = init_nlp(config)
        config = self.nlp.config.interpolate()
        self.training: dict[str, Any] = registry.resolve(config["training"], schema=ConfigSchemaTraining)
        train, self._dev = resolve_dot_names(config, [self.training["train_corpus"], self.training["dev_corpus"]])
        self.examples: list[Example] = list(train(self.nlp))
        self._optimizer_config = config["training"]["optimizer"]
        pipeline: list[tuple[str, Any]] = self.nlp.pipeline  # Any: its types say functions, which have no model
        self.parameters = share_out((pipe.model for _, pipe in pipeline), ranks)
        self.flat_weights = allocate(self.parameters[-1].stop, np.float32)
        self.flat_gradients = allocate(self.parameters[-1].stop, np.float32)
        for parameter in self.parameters:
            weights = parameter.of(self.flat_weights)
            weights[...] = parameter.node.get_param(parameter.name)
            parameter.node.set_param(parameter.name, floats(weights))
            parameter.node.set_grad(parameter.name, floats(parameter.of(self.flat_gradients)))
        self.index = {parameter.key: at for at, parameter in enumerate(self.parameters)}
        self._first = self.flat_weights.copy()
        self.restart()

    # ------------------------------------------------------------------------------------------ the training

    def restart(self) -> None:
        """Forgets what it has learned."""
        self.flat_weights[...] = self._first
        self.flat_gradients[...] = 0
        self.optimizer: Optimizer = registry.resolve({"optimizer": self._optimizer_config})["optimizer"]
        self.update = 0
        self.loss = 0.0
        self._batches = self.batches()

    def batches(self) -> Iterator[list[Example]]:
        """The batches of this rank, from the beginning, endless."""
        return itertools.islice(self._all_batches(), self.rank, None, self.ranks)

    def _all_batches(self) -> Iterator[list[Example]]:
        """All batches of the training, epoch after epoch, each in an order of its own."""
        for epoch in itertools.count():
            order = list(self.examples)
            random.Random(epoch).shuffle(order)
            yield from self.training["batcher"](order)

    def backward(self) -> None:
        """Adds the gradients of the next batch to the present ones; thinc calls `inc_grad` for each."""
        fix_random_seed(self.update * _MANY_UPDATES + self.rank)
        losses = self.nlp.update(next(self._batches), sgd=_NO_STEP, drop=self.training["dropout"])
        self.loss = losses["ner"]
        self.update += 1

    def step(self, parameters: Iterable[Parameter]) -> None:
        """Lets the optimizer change these parameters; their gradients are zero afterwards."""
        for parameter in parameters:
            node, name = parameter.node, parameter.name
            weights, _ = self.optimizer(parameter.key, node.get_param(name), node.get_grad(name))
            node.set_param(name, weights)

    def step_all(self) -> None:
        """An optimizer's step of all parameters, as every rank does it after an allreduce."""
        self.step(self.parameters)
        self.optimizer.step_schedules()

    def step_owned(self) -> None:
        """An optimizer's step of the parameters that this rank owns; the gradients of the others are dropped."""
        self.step(self.owned(self.rank))
        self.flat_gradients[...] = 0
        self.optimizer.step_schedules()

    def owned(self, rank: int) -> list[Parameter]:
        """The parameters of a rank."""
        return [parameter for parameter in self.parameters if parameter.owner == rank]

    def pieces(self, flat: Array) -> list[Array]:
        """An array of all parameters as one piece per owner."""
        spans = [self.owned(rank) for rank in range(self.ranks)]
        return [flat[span[0].start : span[-1].stop] for span in spans]

    def set_proxy(self, proxy: Any) -> None:
        """Makes thinc use this object for weights and gradients; None: the arrays here."""
        for parameter in self.parameters:
            parameter.node._params.proxy = proxy  # thinc has no public name for it; spacy-ray does the same
        if proxy is None:
            for parameter in self.parameters:
                parameter.node.set_param(parameter.name, floats(parameter.of(self.flat_weights)))

    # ------------------------------------------------------------------------------------------ looking at it

    def digest(self) -> str:
        """Equal if two learners' weights are the same to the last bit."""
        return hashlib.sha256(b"".join(self.weight(p).tobytes() for p in self.parameters)).hexdigest()

    def weight(self, parameter: Parameter) -> Array:
        """A parameter as thinc has it now."""
        return cast(Array, parameter.node.get_param(parameter.name))

    def evaluate(self) -> dict[str, Any]:
        """spaCy's scores on the test documents: ``ents_p``, ``ents_r``, ``ents_f`` and more."""
        return self.nlp.evaluate(list(self._dev(self.nlp)))

    def save(self, path: Path) -> None:
        """Writes the pipeline as spaCy does; ``spacy.load`` reads it."""
        self.nlp.to_disk(path)


def train_in_one_process(job: Job, ranks: int, updates: int) -> tuple[Learner, list[float]]:
    """The reference: one process computes all ranks' gradients one after the other, and adds them up.

    Returns:
        The learner with the final weights, and the loss of each update over all ranks.
    """
    learners = [Learner(job, rank, ranks) for rank in range(ranks)]
    losses = []
    for _ in range(updates):
        for learner in learners:
            learner.backward()
        total = learners[0].flat_gradients.copy()
        for learner in learners[1:]:
            total += learner.flat_gradients
        for learner in learners:
            learner.flat_gradients[...] = total
            learner.step_all()
        losses.append(sum(learner.loss for learner in learners))
    return learners[0], losses
