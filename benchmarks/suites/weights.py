"""A trainer's new weights in three rollouts: 200 tensors, called from the driver.

raycollect's versions (`publish`, `subscribe`) end with the digest of each tensor recomputed in each rollout, and with
nothing half-written in sight. How much of the time that is, a contender tells whose digests cost nothing. The others
move the same bytes and check nothing: `broadcast_refs`; the object store, from which each rollout copies; and a
broadcast of `ray.util.collective` over gloo, of all tensors in one piece.

All begin and end alike: the trainer's weights have other values in each turn, and those of the rollouts are written in
place. They lie in ordinary memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from itertools import count as count_from
from typing import Any

import numpy as np
import ray

import raycollect as col
from benchmarks import names
from benchmarks.moving import InRayGroup, Moving, RayRank
from benchmarks.report import Record
from benchmarks.suite import Choice, Maker, entry, sweep
from benchmarks.targets import MB

NAME = "weights"
TITLE = "versions of weights, from a trainer to three rollouts"
REFERENCE = names.STORE
NEEDS_RAY = True

COUNT, ROLLOUTS = 200, 3
_OP = f"sync of {COUNT}"


class Weights(RayRank):
    """The trainer, or a rollout."""

    def __init__(self) -> None:
        self.weights: dict[str, Any] = {}

    def prepare(self, nbytes: int) -> None:
        """Makes the weights."""
        rows = max(nbytes // (4 * COUNT * 512), 1)
        self.weights = {f"layers.{at}": np.zeros((rows, 512), np.float32) for at in range(COUNT)}

    def fill(self, value: float, free: bytes) -> None:
        """Gives all elements a value; `free`: digests cost nothing, and are this one."""
        for array in self.weights.values():
            array.fill(value)
        import_module("raycollect.weights.digests").xxhash = _Free(free) if free else import_module("xxhash")

    def get(self) -> dict[str, Any]:
        """The weights, as one ref."""
        return self.weights

    def is_right(self, value: float) -> bool:
        """Whether all elements have a value."""
        return all(bool((array == np.float32(value)).all()) for array in self.weights.values())

    @col.by_value
    def put(self) -> dict[str, Any]:
        """The weights, through the object store."""
        return self.weights

    def load(self, weights: dict[str, Any]) -> None:
        """Copies them from there."""
        for name, array in self.weights.items():
            np.copyto(array, weights[name])

    def spread(self, group: str, is_trainer: bool) -> None:
        """Broadcasts all in one piece."""
        arrays = list(self.weights.values())
        flat = np.concatenate([array.ravel() for array in arrays]) if is_trainer else self._room(arrays)
        import_module("ray.util.collective").broadcast(flat, 0, group)
        if not is_trainer:
            for array, part in zip(arrays, np.split(flat, len(arrays)), strict=True):
                array[...] = part.reshape(array.shape)

    def _room(self, arrays: Sequence[Any]) -> Any:
        if getattr(self, "room", np.empty(0)).size != sum(array.size for array in arrays):
            self.room = np.empty(sum(array.size for array in arrays), np.float32)
        return self.room


class Participant(Weights, col.CollectiveParticipant):
    """The same with the mixin."""


class _Free:
    """In place of xxhash: no digest, but one of this turn."""

    def __init__(self, digest: bytes) -> None:
        self._digest = digest

    def xxh3_128(self) -> _Free:
        return self

    def update(self, data: Any) -> None:
        """Does nothing."""

    def digest(self) -> bytes:
        return self._digest


_turns = count_from(1)


class Sync(Moving):
    """A contender with a trainer and its rollouts."""

    ACTOR: type = Weights
    is_free = False

    def __init__(self, name: str, rollouts: int = ROLLOUTS) -> None:
        self._count = rollouts
        super().__init__(name)

    def start(self) -> list[Any]:
        """Starts the trainer and the rollouts."""
        remote = ray.remote(num_cpus=0)(self.ACTOR)
        self.trainer, *self.rollouts = (remote.remote() for _ in range(1 + self._count))
        return [self.trainer, *self.rollouts]

    def prepare(self, nbytes: int) -> None:
        """Makes the weights."""
        self.forget()
        super().prepare(nbytes)

    def fill(self) -> None:
        """The next turn: the trainer has other weights, the rollouts none."""
        self.turn = next(_turns)
        free = self.turn.to_bytes(16, "big") if self.is_free else b""
        calls = [actor.fill.remote(0.0, free) for actor in self.rollouts]
        ray.get([*calls, self.trainer.fill.remote(float(self.turn), free)])

    def forget(self) -> None:
        """Lets go of what was prepared."""

    def close(self) -> None:
        """Lets go of what was prepared, and ends the actors."""
        self.forget()
        super().close()

    def is_right(self) -> list[bool]:
        """Whether each rollout has the weights of the turn."""
        return ray.get([actor.is_right.remote(float(self.turn)) for actor in self.rollouts])


class Versions(Sync):
    """A version is put, and each rollout is updated to it: three receiver groups."""

    ACTOR = Participant
    pub: Any = None
    subs: Sequence[Any] = ()

    def prepare(self, nbytes: int) -> None:
        """Publishes the weights, and subscribes."""
        super().prepare(nbytes)
        self.pub = col.publish([self.trainer.get.remote()], self.group)
        self.subs = [col.subscribe(self.group, [actor.get.remote()]) for actor in self.rollouts]

    def operate(self) -> None:
        """Two calls."""
        self.pub.put()
        self.pub.push(self.subs)

    def forget(self) -> None:
        """Ends both."""
        for one in (*self.subs, *([self.pub] if self.pub else [])):
            one.close()
        self.pub, self.subs = None, ()


class Unchecked(Versions):
    """The same, where digests cost nothing."""

    is_free = True


class Broadcast(Sync):
    """`broadcast_refs`, in place."""

    ACTOR = Participant

    def prepare(self, nbytes: int) -> None:
        """Declares the group and takes the refs."""
        super().prepare(nbytes)
        self.declared = col.declare_collective_group(self.actors, group_name=self.group)
        self.refs = [actor.get.remote() for actor in self.actors]

    def operate(self) -> None:
        """One call."""
        col.broadcast_refs(self.refs, group_name=self.group)

    def forget(self) -> None:
        """Ends the group."""
        if hasattr(self, "declared"):
            self.declared.destroy()
            del self.declared, self.refs


class ByRay(InRayGroup, Sync):
    """A broadcast of all in one piece."""

    def operate(self) -> None:
        """One call per actor."""
        ray.get([one.spread.remote(self.group, one is self.trainer) for one in self.actors])


class ByStore(Sync):
    """Through the object store."""

    def operate(self) -> None:
        """One call per actor."""
        put = self.trainer.put.remote()
        ray.get([one.load.remote(put) for one in self.rollouts])


def measure(choice: Choice) -> Iterator[Record]:
    """Measures over four actors."""
    makers: list[Maker] = [
        entry(names.STORE, ByStore),
        entry(names.VERSIONS, Versions),
        entry(names.UNCHECKED, Unchecked),
        entry(names.ORDINARY, Broadcast),
        entry(names.RAY, ByRay),
    ]
    sizes = choice.sizes or (100 * MB,)
    yield from sweep(NAME, choice, makers, op=_OP, ranks=4, sizes=sizes, runs=lambda _: (6, 20))
