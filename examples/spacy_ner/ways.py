"""The ways to train: each is a team of actors that makes updates, in lockstep and to the same weights."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import ray

import raycollect as col
from examples.spacy_ner.learner import Job
from examples.spacy_ner.server import ServerWorker
from examples.spacy_ner.trainer import Trainer

_numbers = itertools.count()


class Way:
    """A way to train. Updates are numbered from the last `restart`.

    Args:
        actors: One per rank; several ways may have the same ones, as each restarts them.
    """

    def __init__(self, actors: list[Any]) -> None:
        self.actors = actors
        self.group = f"spacy-{next(_numbers)}"

    @property
    def ranks(self) -> int:
        """The number of workers."""
        return len(self.actors)

    def restart(self) -> None:
        """All forget what they have learned."""
        ray.get([actor.restart.remote() for actor in self.actors])

    def train(self, updates: int) -> list[float]:
        """Makes so many updates.

        Returns:
            The loss of each, over all ranks.
        """
        return [sum(self.update()) for _ in range(updates)]

    def update(self) -> list[float]:
        """Makes one update, and returns the loss of each rank."""
        raise NotImplementedError

    def cpu_s(self) -> float:
        """The CPU time of all ranks so far, in seconds."""
        return float(sum(ray.get([actor.cpu_s.remote() for actor in self.actors])))

    def digests(self) -> list[str]:
        """What the weights of each rank are, to the last bit."""
        return ray.get([actor.digest.remote() for actor in self.actors])

    def close(self) -> None:
        """Releases what the way holds; the actors live on."""


class Server(Way):
    """A sharded parameter server: ``inc_grad.remote`` per parameter, as in spacy-ray.

    Args:
        actors: One per rank.
        every_call: Whether every gradient that thinc adds is a call, as in spacy-ray, or the sum of an update.
    """

    def __init__(self, actors: list[Any], *, every_call: bool) -> None:
        super().__init__(actors)
        self._every_call = every_call
        ray.get([actor.set_peers.remote(actors) for actor in actors])

    def restart(self) -> None:
        ray.get([actor.restart.remote(every_call=self._every_call) for actor in self.actors])

    def train(self, updates: int) -> list[float]:
        """One call per rank trains; the workers find each other by themselves."""
        losses = ray.get([actor.train.remote(updates) for actor in self.actors])
        return [sum(of_update) for of_update in zip(*losses, strict=True)]


class Imperative(Way):
    """An allreduce per parameter, called by each rank, as in the original documents.

    Args:
        actors: One per rank.
        library: ``"ray"`` for `ray.util.collective` over gloo, which needs torch, or ``"raycollect"``.
    """

    def __init__(self, actors: list[Any], library: str) -> None:
        super().__init__(actors)
        self._library = library
        ray.get([actor.join.remote(library, self.ranks, rank, self.group) for rank, actor in enumerate(actors)])

    def train(self, updates: int) -> list[float]:
        """One call per rank trains."""
        losses = ray.get([actor.train.remote(self._library, self.group, updates) for actor in self.actors])
        return [sum(of_update) for of_update in zip(*losses, strict=True)]

    def close(self) -> None:
        """Leaves the group."""
        ray.get([actor.leave.remote(self._library, self.group) for actor in self.actors])


class Declared(Way):
    """The base of the driver's ways: a declared group."""

    def __init__(self, actors: list[Any]) -> None:
        super().__init__(actors)
        col.declare_collective_group(actors, group_name=self.group)

    def close(self) -> None:
        """Destroys the group."""
        col.destroy_collective_group(self.group)


class Refs(Declared):
    """All gradients of an update in one `allreduce_refs`, by Ray calls."""

    def update(self) -> list[float]:
        gradients = [actor.gradients.remote() for actor in self.actors]
        col.allreduce_refs(gradients, self.group)
        steps = [actor.apply.remote(of_rank) for actor, of_rank in zip(self.actors, gradients, strict=True)]
        return ray.get(steps)


class Captured(Declared):
    """The whole update, traced once: gradients, their sum, the optimizer's step."""

    def __init__(self, actors: list[Any]) -> None:
        super().__init__(actors)
        self.step = col.step(self.iterate)

    def iterate(self) -> list[Any]:
        """An update; the losses of the ranks."""
        gradients = [actor.gradients.remote() for actor in self.actors]
        self.communicate(gradients)
        return [actor.apply.remote(of_rank) for actor, of_rank in zip(self.actors, gradients, strict=True)]

    def communicate(self, gradients: list[Any]) -> None:
        """What becomes of the gradients of all ranks."""
        col.allreduce_refs(gradients, self.group)

    def update(self) -> list[float]:
        return self.step()

    def close(self) -> None:
        """Closes the step, then destroys the group."""
        self.step.close()
        super().close()


class Sharded(Captured):
    """Traced once as well, but each rank takes the optimizer's step of its own parameters only, as a server does."""

    def iterate(self) -> list[Any]:
        actors = self.actors
        pieces = [actor.gradient_pieces.remote() for actor in actors]
        sums = [actor.received.remote() for actor in actors]
        col.reducescatter_refs(sums, pieces, self.group)
        own = [actor.apply_owned.remote(of_rank) for actor, of_rank in zip(actors, sums, strict=True)]
        col.allgather_refs([actor.weight_pieces.remote() for actor in actors], own, self.group)
        return [actor.loss.remote() for actor in actors]


class Alone(Captured):
    """No communication: each rank trains by itself, on its own batches. It shows the time of computing alone."""

    def communicate(self, gradients: list[Any]) -> None:
        """Nothing."""


SERVER, EVERY_CALL = "parameter server", "parameter server, every call"
RAY, IMPORTED = "ray.util.collective", "the same, raycollect"
REFS, CAPTURED, SHARDED = "allreduce_refs", "captured", "captured, sharded"
ALONE = "computing alone"

WAYS: dict[str, tuple[Any, Callable[[list[Any]], Way]]] = {
    EVERY_CALL: (ServerWorker, partial(Server, every_call=True)),
    SERVER: (ServerWorker, partial(Server, every_call=False)),
    RAY: (Trainer, partial(Imperative, library="ray")),
    IMPORTED: (Trainer, partial(Imperative, library="raycollect")),
    REFS: (Trainer, Refs),
    CAPTURED: (Trainer, Captured),
    SHARDED: (Trainer, Sharded),
    ALONE: (Trainer, Alone),
}
"""Name -> the actors' class, and what makes the way."""


class Team:
    """The actors of some ways to train with so many ranks; ways with actors of one class have the same ones.

    Args:
        job: What is trained.
        ranks: How many workers.
        names: The wanted ways.
    """

    def __init__(self, job: Job, ranks: int, names: Sequence[str]) -> None:
        classes = dict.fromkeys(WAYS[name][0] for name in names)
        self._actors = {cls: [cls.remote(job, rank, ranks) for rank in range(ranks)] for cls in classes}
        self.ways = {name: WAYS[name][1](self._actors[WAYS[name][0]]) for name in names}

    def close(self) -> None:
        """Ends the ways, and the actors."""
        for way in self.ways.values():
            way.close()
        for actors in self._actors.values():
            for actor in actors:
                ray.kill(actor)
