"""Weights move from a trainer's layout to that of rollouts: 200 tensors from TP 4 to TP 2 x DP 2, on eight actors.

raycollect moves what each rollout needs. What people write by hand moves full tensors: the first trainer gathers them
and broadcasts them in one piece (`ray.util.collective` over gloo), and each rollout takes its share; or each trainer
puts its shards into the object store, and each rollout takes its share from there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any

import numpy as np
import ray

import raycollect as col
from benchmarks import names
from benchmarks.crew import group_names, needs_torch
from benchmarks.interleave import timed
from benchmarks.report import Record, size
from benchmarks.suite import Choice, Maker, close, compare, entry, gather
from benchmarks.targets import MB

NAME = "reshard"
TITLE = "weights from one layout to another, called from the driver"
REFERENCE = names.RAY
NEEDS_RAY = True

COUNT = 200
_COLUMNS = 512
_OP = f"reshard of {COUNT}"
_TRAINER = {"tp": 4}
_ROLLOUT = {"dp": 2, "tp": 2}
_CUTS = (("tp", None), (None, "tp"))  # half of the tensors are cut by rows, as layers alternate; half by columns


def shapes(nbytes: int) -> dict[str, tuple[int, int]]:
    """The tensors of a model of so many bytes."""
    rows = max(nbytes // (4 * COUNT * _COLUMNS) // 4 * 4, 4)
    return {f"layers.{at}": (rows, _COLUMNS) for at in range(COUNT)}


def layouts(nbytes: int, mesh: dict[str, int]) -> dict[str, Any]:
    """How they lie on one side."""
    return {
        name: col.layout(shape, mesh=mesh, spec=_CUTS[at % 2])
        for at, (name, shape) in enumerate(shapes(nbytes).items())
    }


def _boxes(nbytes: int, mesh: dict[str, int], rank: int) -> dict[str, tuple[slice, ...]]:
    found = {}
    for name, one in layouts(nbytes, mesh).items():
        (region,) = one.regions.of_rank[rank]
        found[name] = tuple(slice(lo, hi) for lo, hi in region.box)
    return found


def _value(at: int, shape: tuple[int, int]) -> Any:
    return np.arange(shape[0] * shape[1], dtype=np.float32).reshape(shape) + at


@ray.remote(num_cpus=0)
class Shards(col.CollectiveParticipant):
    """One rank of either side; its shards are those of all contenders."""

    def __init__(self, rank: int, *, is_trainer: bool) -> None:
        self.rank = rank
        self.mesh = _TRAINER if is_trainer else _ROLLOUT
        self.nbytes = 0
        self.shards: dict[str, Any] = {}

    def prepare(self, nbytes: int) -> None:
        """Makes the shards, unless they are there; a trainer's have the values."""
        if self.nbytes == nbytes:
            return
        self.nbytes = nbytes
        boxes = _boxes(nbytes, self.mesh, self.rank)
        is_trainer = self.mesh is _TRAINER
        self.shards = {}
        for at, (name, shape) in enumerate(shapes(nbytes).items()):
            whole = _value(at, shape)[boxes[name]]
            self.shards[name] = np.array(whole) if is_trainer else np.zeros_like(whole)

    def clear(self) -> None:
        """Sets a rollout's shards to zero."""
        for array in self.shards.values():
            array.fill(0)

    def get_shards(self) -> dict[str, Any]:
        """The shards, as one ref."""
        return self.shards

    def is_right(self) -> bool:
        """Whether they hold what they should."""
        boxes = _boxes(self.nbytes, self.mesh, self.rank)
        return all(
            np.array_equal(self.shards[name], _value(at, shape)[boxes[name]])
            for at, (name, shape) in enumerate(shapes(self.nbytes).items())
        )

    # ------------------------------------------------------------------------------------------ by hand

    def join(self, ranks: int, rank: int, group: str) -> None:
        """Joins a group of `ray.util.collective`."""
        import_module("torch").set_num_threads(1)
        import_module("ray.util.collective").init_collective_group(ranks, rank, "gloo", group)

    def leave(self, group: str) -> None:
        """Leaves it."""
        import_module("ray.util.collective").destroy_collective_group(group)

    def gather(self, group: str) -> None:
        """The first trainer has the full tensors, one behind the other, in `full`; all make room for them."""
        collective = import_module("ray.util.collective")
        self.full = np.empty(sum(rows * columns for rows, columns in shapes(self.nbytes).values()), np.float32)
        if self.mesh is _ROLLOUT:
            return
        flat = np.concatenate([array.ravel() for array in self.shards.values()])
        if self.rank:
            collective.send(flat, 0, group)
            return
        parts = [flat, *(np.empty_like(flat) for _ in range(1, _TRAINER["tp"]))]
        for rank, part in enumerate(parts[1:], 1):
            collective.recv(part, rank, group)
        boxes = [_boxes_of(self.nbytes, rank) for rank in range(len(parts))]
        taken = 0
        for name, whole in self._named():
            share = self.shards[name].size
            for part, box in zip(parts, boxes, strict=True):
                target = whole[box[name]]
                target[...] = part[taken : taken + share].reshape(target.shape)
            taken += share

    def spread(self, group: str) -> None:
        """All have what the first trainer has; a rollout takes its share."""
        import_module("ray.util.collective").broadcast(self.full, 0, group)
        if self.mesh is _ROLLOUT:
            mine = _mine(self.nbytes, self.rank)
            for name, whole in self._named():
                self.shards[name][...] = whole[mine[name]]

    def _named(self) -> Iterator[tuple[str, Any]]:
        begin = 0
        for name, (rows, columns) in shapes(self.nbytes).items():
            yield name, self.full[begin : begin + rows * columns].reshape(rows, columns)
            begin += rows * columns

    @col.by_value
    def put(self) -> dict[str, Any]:
        """The shards, through the object store."""
        return self.shards

    def take(self, *parts: dict[str, Any]) -> None:
        """Takes its share of what all trainers have put."""
        boxes = [_boxes_of(self.nbytes, rank) for rank in range(len(parts))]
        mine = _mine(self.nbytes, self.rank)
        for name, shape in shapes(self.nbytes).items():
            whole = np.empty(shape, np.float32)
            for part, box in zip(parts, boxes, strict=True):
                whole[box[name]] = part[name]
            self.shards[name][...] = whole[mine[name]]


_known: dict[tuple[int, str, int], dict[str, tuple[slice, ...]]] = {}


def _boxes_of(nbytes: int, rank: int) -> dict[str, tuple[slice, ...]]:
    return _remembered(nbytes, _TRAINER, rank)


def _mine(nbytes: int, rank: int) -> dict[str, tuple[slice, ...]]:
    return _remembered(nbytes, _ROLLOUT, rank)


def _remembered(nbytes: int, mesh: dict[str, int], rank: int) -> dict[str, tuple[slice, ...]]:
    key = nbytes, repr(mesh), rank
    if key not in _known:
        _known[key] = _boxes(nbytes, mesh, rank)
    return _known[key]


class Moving:
    """A contender over the eight actors."""

    def __init__(self, name: str, sides: Sequence[Sequence[Any]]) -> None:
        self.name = name
        self.trainers, self.rollouts = sides
        self.actors = [*self.trainers, *self.rollouts]
        self.group = next(group_names)

    def prepare(self, nbytes: int) -> None:
        """Makes the shards, which all contenders share."""
        ray.get([actor.prepare.remote(nbytes) for actor in self.actors])

    def fill(self) -> None:
        """Sets what the rollouts have to zero."""
        ray.get([actor.clear.remote() for actor in self.rollouts])

    def run(self, count: int) -> list[float]:
        """Moves the weights so many times, from zero each."""
        spent = []
        for _ in range(count):
            self.fill()
            spent += timed(self.operate, 1)
            self.check(1)
        return spent

    def check(self, runs: int) -> None:
        """Raises unless the rollouts have all weights."""
        if not all(ray.get([actor.is_right.remote() for actor in self.rollouts])):
            raise AssertionError(f"{self.name}: the rollouts do not have the weights")

    def operate(self) -> None:
        """Moves the weights once."""
        raise NotImplementedError

    def close(self) -> None:
        """Gives back what it holds."""


class Resharded(Moving):
    """`reshard_refs`, in place, on refs that persist over the calls."""

    def __init__(self, name: str, sides: Sequence[Sequence[Any]]) -> None:
        super().__init__(name, sides)
        col.declare_collective_group(self.actors, group_name=self.group)

    def prepare(self, nbytes: int) -> None:
        """Makes the shards, and a ref to those of each actor."""
        super().prepare(nbytes)
        self.src, self.dst = layouts(nbytes, _TRAINER), layouts(nbytes, _ROLLOUT)
        self.refs = [[actor.get_shards.remote() for actor in side] for side in (self.trainers, self.rollouts)]

    def operate(self) -> None:
        """One call."""
        col.reshard_refs(*self.refs, self.group, src=self.src, dst=self.dst)

    def close(self) -> None:
        """Lets go of refs and group."""
        self.refs = []
        col.destroy_collective_group(self.group)


class Captured(Resharded):
    """The same as a captured step."""

    step: Any = None

    def prepare(self, nbytes: int) -> None:
        """Records the call."""
        self._forget()
        super().prepare(nbytes)
        with col.capture() as self.step:
            super().operate()

    def operate(self) -> None:
        """One replay."""
        self.step.run()

    def close(self) -> None:
        """Lets go of the step, then of the rest."""
        self._forget()
        super().close()

    def _forget(self) -> None:
        if self.step is not None:
            self.step.close()
            self.step = None


class ByRay(Moving):
    """The first trainer gathers, and broadcasts.

    Over one group of all eight, as its gloo has one world per process: the other trainers hear the broadcast, too.
    """

    def __init__(self, name: str, sides: Sequence[Sequence[Any]]) -> None:
        needs_torch()
        super().__init__(name, sides)
        count = len(self.actors)
        ray.get([actor.join.remote(count, rank, self.group) for rank, actor in enumerate(self.actors)])

    def operate(self) -> None:
        """Two calls of each."""
        calls = [actor.gather.remote(self.group) for actor in self.actors]
        ray.get([*calls, *(actor.spread.remote(self.group) for actor in self.actors)])

    def close(self) -> None:
        """Leaves the group."""
        ray.get([actor.leave.remote(self.group) for actor in self.actors])


class ByStore(Moving):
    """Through the object store."""

    def operate(self) -> None:
        """One call per actor."""
        put = [actor.put.remote() for actor in self.trainers]
        ray.get([actor.take.remote(*put) for actor in self.rollouts])


def measure(choice: Choice) -> Iterator[Record]:
    """Measures over four actors on each side."""
    choice.progress(f"{NAME}: starts 8 actors")
    sides = [[Shards.remote(rank, is_trainer=is_trainer) for rank in range(4)] for is_trainer in (True, False)]  # type: ignore[attr-defined]
    makers: list[Maker] = [
        entry(names.STORE, ByStore, sides),
        entry(names.ORDINARY, Resharded, sides),
        entry(names.CAPTURED, Captured, sides),
        entry(names.RAY, ByRay, sides),
    ]
    try:
        contenders, skipped = gather(NAME, makers)
        yield from skipped
        for nbytes in choice.sizes or (64 * MB,):
            choice.progress(f"{NAME}: 8 actors, {size(nbytes)}")
            yield from compare(contenders, suite=NAME, op=_OP, ranks=8, nbytes=nbytes, runs=choice.runs_or(8, 24))
        close(contenders)
    finally:
        for actor in (actor for side in sides for actor in side):
            ray.kill(actor)
