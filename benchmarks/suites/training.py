"""An iteration of training: gradients, their sum, a step, on the digits and by the learner of ``examples/digits.py``.

The driver's loop waits for the sum of each iteration, as a loop does that looks at the loss now and then, and for the
actors at the end of a burst; an operation is its share of the burst. The same loop body under ``@col.step``, and an
actor call per rank that does the whole iteration with `ray.util.collective`, wait for each. Each contender has actors
of its own, those of `ray.util.collective` without the mixin. All begin again before each round, and must end with the
weights of one process.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import ray

import raycollect as col
from benchmarks import names
from benchmarks.crew import group_names
from benchmarks.moving import InRayGroup, RayRank
from benchmarks.report import Record, Skipped
from benchmarks.suite import Choice, Maker, close, compare, entry, gather

try:
    from examples import digits
except ImportError as exc:
    digits = None
    _missing = str(exc)

NAME = "training"
TITLE = "one iteration of the training on digits: gradients, allreduce, step"
REFERENCE = names.LOOP
NEEDS_RAY = True

RANKS = (2, 4)
BURST = 24


def _learner(*bases: type) -> Any:
    """The class of a contender's actors."""

    class Learner(*bases, digits.Learner):  # type: ignore[misc]
        """A learner of the example."""

        @col.by_value
        def learned(self) -> Any:
            """Its weights, through the object store."""
            return self.weights()

        def iterate(self, group: str) -> None:
            """An iteration, with `ray.util.collective`."""
            from ray.util import collective

            collective.allreduce(self.gradient(), group_name=group)
            self.apply(self.buffer)

    return ray.remote(num_cpus=0)(Learner)


class Training:
    """What the contenders have in common: actors that hold a shard of the images each, and how they are checked.

    Args:
        name: The contender's name.
        ranks: The number of actors.

    Raises:
        Skipped: What the example needs is not installed.
    """

    BASES: tuple[type, ...] = (col.CollectiveParticipant,)
    """What the class of the actors inherits besides the learner."""

    def __init__(self, name: str, ranks: int) -> None:
        if digits is None:
            raise Skipped(f"it needs what `make demo` installs: {_missing}")
        self.name = name
        self.ranks = ranks
        self.group = next(group_names)
        self._images = digits.load()[0]
        remote = _learner(*self.BASES)
        shards = self._images.shards(ranks)
        self.actors = [remote.remote(shard, total=len(self._images)) for shard in shards]

    def prepare(self, nbytes: int) -> None:
        """Waits for the actors."""
        self.fill()

    def fill(self) -> None:
        """All begin anew."""
        ray.get([actor.begin.remote() for actor in self.actors])

    def operate(self) -> None:
        """Does an iteration, or submits what is left of it."""
        raise NotImplementedError

    def finish(self) -> None:
        """Waits for what was submitted."""

    def run(self, count: int) -> Sequence[float]:
        """So many iterations; each is told to have taken the same."""
        start_s = time.perf_counter()
        for _ in range(count):
            self.operate()
        self.finish()
        return [(time.perf_counter() - start_s) / count] * count

    def check(self, runs: int) -> None:
        """Raises unless all actors have the weights of one process that trains on all images."""
        expected = digits.train_in_one_process(self._images, runs)
        for rank, found in enumerate(ray.get([actor.learned.remote() for actor in self.actors])):
            difference = float(np.abs(found - expected).max())
            if not difference <= digits.MAX_DIFFERENCE:
                raise AssertionError(f"{self.name}: weights of rank {rank} differ by {difference} after {runs} runs")

    def close(self) -> None:
        """Ends the actors."""
        for actor in self.actors:
            ray.kill(actor)


class Loop(Training):
    """The loop as people write it: a `.remote()` call per actor and method, `allreduce_refs` between them."""

    def __init__(self, name: str, ranks: int) -> None:
        super().__init__(name, ranks)
        self._last: list[Any] = []
        col.declare_collective_group(self.actors, group_name=self.group)

    def operate(self) -> None:
        """Waits for the sum, not for the step."""
        gradients = [actor.gradient.remote() for actor in self.actors]
        col.allreduce_refs(gradients, group_name=self.group)
        pairs = zip(self.actors, gradients, strict=True)
        self._last = [actor.apply.remote(gradient) for actor, gradient in pairs]

    def finish(self) -> None:
        """Waits for the last step; those before it are done by then."""
        ray.get(self._last)

    def close(self) -> None:
        """Lets go of refs, group and actors."""
        self._last = []
        col.destroy_collective_group(self.group)
        super().close()


class Step(Loop):
    """The same loop body under ``@col.step``."""

    def __init__(self, name: str, ranks: int) -> None:
        super().__init__(name, ranks)
        self._step = col.step(self._iteration)

    def _iteration(self) -> None:
        gradients = [actor.gradient.remote() for actor in self.actors]
        col.allreduce_refs(gradients, group_name=self.group)
        for actor, gradient in zip(self.actors, gradients, strict=True):
            actor.apply.remote(gradient)

    def operate(self) -> None:
        """One call of the step; waits for all of it."""
        self._step()

    def close(self) -> None:
        """Closes the step, then the rest."""
        self._step.close()
        super().close()


class InActors(InRayGroup, Training):
    """An actor call per rank does all of the iteration, with `ray.util.collective` over gloo."""

    BASES = (RayRank,)

    def operate(self) -> None:
        """One call per rank."""
        ray.get([actor.iterate.remote(self.group) for actor in self.actors])


def measure(choice: Choice) -> Iterator[Record]:
    """Measures over 2 and 4 actors."""
    for ranks in choice.ranks or ((2,) if choice.quick else RANKS):
        choice.progress(f"{NAME}: starts {ranks} actors for each contender")
        makers: list[Maker] = [
            entry(names.STEP, Step, ranks),
            entry(names.LOOP, Loop, ranks),
            entry(names.RAY, InActors, ranks),
        ]
        contenders, skipped = gather(NAME, makers)
        yield from skipped
        if not contenders:
            return
        choice.progress(f"{NAME}: {ranks} actors")
        runs = choice.runs_or(10 * BURST, 20 * BURST)
        nbytes = digits.train_in_one_process(digits.load()[0], 1).nbytes
        yield from compare(contenders, suite=NAME, op="iteration", ranks=ranks, nbytes=nbytes, runs=runs, burst=BURST)
        close(contenders)
