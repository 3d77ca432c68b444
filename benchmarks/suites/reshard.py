"""Weights move from a trainer's layout to that of rollouts: 200 tensors from TP 4 to TP 2 x DP 2, on eight actors.

raycollect moves what each rollout needs. What people write by hand moves full tensors: the first trainer gathers them
and broadcasts them in one piece (`ray.util.collective` over gloo), and each rollout takes its share; or each trainer
puts its shards into the object store, and each rollout puts the full tensors together from there, and takes its share.
Who knows both layouts can copy each box from the store straight to where it belongs: the least that goes by the store.

All begin and end alike: the trainers' shards have other values in each turn, and what the rollouts keep is written in
place. Shards lie in ordinary memory, and for contenders that say so in the shared arena.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from itertools import count as count_from
from typing import Any

import numpy as np
import ray

import raycollect as col
from benchmarks import names
from benchmarks.moving import InRayGroup, Moving, RayRank
from benchmarks.ours import Replayed
from benchmarks.report import Record
from benchmarks.suite import Choice, Maker, entry, sweep
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
_BOXES = "object store, boxes by hand"
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


class Shards(RayRank):
    """One rank of either side."""

    def __init__(self, rank: int, *, is_trainer: bool) -> None:
        self.rank = rank
        self.is_trainer = is_trainer
        self.mesh = _TRAINER if is_trainer else _ROLLOUT
        self.nbytes = 0
        self.turn = 0
        self.shards: dict[str, Any] = {}
        self.shared: dict[str, Any] = {}

    def prepare(self, nbytes: int) -> None:
        """Makes the shards, unless they are there: in ordinary memory, and in the arena."""
        if self.nbytes == nbytes:
            return
        self.nbytes = nbytes
        boxes = _boxes(nbytes, self.mesh, self.rank)
        wholes = {name: _value(at, shape) for at, (name, shape) in enumerate(shapes(nbytes).items())}
        self.shards = {name: np.array(whole[boxes[name]]) for name, whole in wholes.items()}
        self.shared = {name: col.array(shard) for name, shard in self.shards.items()}
        self.turn = 0

    def begin(self, turn: int) -> None:
        """A trainer's shards get the values of a turn, and a rollout's are set to zero."""
        for shards in (self.shards, self.shared):
            for shard in shards.values():
                if self.is_trainer:
                    shard += turn - self.turn
                else:
                    shard.fill(0)
        self.turn = turn

    def get_shards(self) -> dict[str, Any]:
        """The shards, as one ref."""
        return self.shards

    def get_shared(self) -> dict[str, Any]:
        """Those in the arena."""
        return self.shared

    def is_right(self, *, is_shared: bool) -> bool:
        """Whether the shards hold what they should in this turn."""
        boxes, shards = _boxes(self.nbytes, self.mesh, self.rank), self.shared if is_shared else self.shards
        return all(
            np.array_equal(shards[name], _value(at, shape)[boxes[name]] + self.turn)
            for at, (name, shape) in enumerate(shapes(self.nbytes).items())
        )

    # ------------------------------------------------------------------------------------------ by hand

    def gather(self, group: str) -> None:
        """The first trainer has the full tensors, one behind the other, in `full`; all make room for them."""
        collective = import_module("ray.util.collective")
        self.full = np.empty(sum(rows * columns for rows, columns in shapes(self.nbytes).values()), np.float32)
        if not self.is_trainer:
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
        if not self.is_trainer:
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

    def take_boxes(self, *parts: dict[str, Any]) -> None:
        """Copies each box that it needs of what the trainers have put to its place."""
        mine, others = _mine(self.nbytes, self.rank), [_boxes_of(self.nbytes, rank) for rank in range(len(parts))]
        for name, shard in self.shards.items():
            for part, boxes in zip(parts, others, strict=True):
                shared = _common(mine[name], boxes[name])
                if shared is not None:
                    here, there = shared
                    shard[here] = part[name][there]

    def take(self, *parts: dict[str, Any]) -> None:
        """Takes its share of what all trainers have put."""
        boxes = [_boxes_of(self.nbytes, rank) for rank in range(len(parts))]
        mine = _mine(self.nbytes, self.rank)
        for name, shape in shapes(self.nbytes).items():
            whole = np.empty(shape, np.float32)
            for part, box in zip(parts, boxes, strict=True):
                whole[box[name]] = part[name]
            self.shards[name][...] = whole[mine[name]]


_Slices = tuple[slice, ...]


def _common(mine: _Slices, its: _Slices) -> tuple[_Slices, _Slices] | None:
    """What two boxes have in common, as parts of each; None: nothing."""
    spans = [(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(mine, its, strict=True)]
    if any(lo >= hi for lo, hi in spans):
        return None
    here, there = (
        tuple(slice(lo - one.start, hi - one.start) for (lo, hi), one in zip(spans, box, strict=True))
        for box in (mine, its)
    )
    return here, there


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


_turns = count_from(1)


class Participant(Shards, col.CollectiveParticipant):
    """The same with the mixin."""


class Resharding(Moving):
    """A contender with eight actors."""

    ACTOR: type = Shards
    is_shared = False  # whether it works on the shards in the arena

    def start(self) -> list[Any]:
        """Starts the trainers and the rollouts."""
        remote = ray.remote(num_cpus=0)(self.ACTOR)
        self.trainers = [remote.remote(rank, is_trainer=True) for rank in range(4)]
        self.rollouts = [remote.remote(rank, is_trainer=False) for rank in range(4)]
        return [*self.trainers, *self.rollouts]

    def fill(self) -> None:
        """The next turn begins: the trainers have other values, the rollouts none."""
        turn = next(_turns)
        ray.get([actor.begin.remote(turn) for actor in self.actors])

    def is_right(self) -> list[bool]:
        """Whether each rollout has its shards."""
        return ray.get([actor.is_right.remote(is_shared=self.is_shared) for actor in self.rollouts])


class Resharded(Resharding):
    """`reshard_refs`, in place, on refs that persist over the calls."""

    ACTOR = Participant

    def __init__(self, name: str) -> None:
        super().__init__(name)
        col.declare_collective_group(self.actors, group_name=self.group)

    def prepare(self, nbytes: int) -> None:
        """Makes the shards, and a ref to those of each actor."""
        super().prepare(nbytes)
        self.src, self.dst = layouts(nbytes, _TRAINER), layouts(nbytes, _ROLLOUT)
        self.refs = [
            [(actor.get_shared if self.is_shared else actor.get_shards).remote() for actor in side]
            for side in (self.trainers, self.rollouts)
        ]

    def operate(self) -> None:
        """One call."""
        col.reshard_refs(*self.refs, self.group, src=self.src, dst=self.dst)

    def close(self) -> None:
        """Lets go of refs and group, and ends the actors."""
        self.refs = []
        col.destroy_collective_group(self.group)
        super().close()


class InArena(Resharded):
    """The same on shards in the arena."""

    is_shared = True


class Captured(Replayed, InArena):
    """The same as a captured step."""

    def record(self) -> None:
        """The call."""
        InArena.operate(self)


class ByRay(InRayGroup, Resharding):
    """The first trainer gathers, and broadcasts.

    Over one group of all eight, as its gloo has one world per process: the other trainers hear the broadcast, too.
    """

    def operate(self) -> None:
        """Two calls of each."""
        calls = [actor.gather.remote(self.group) for actor in self.actors]
        ray.get([*calls, *(actor.spread.remote(self.group) for actor in self.actors)])


class ByStore(Resharding):
    """Through the object store: full tensors, then a share of them."""

    take = "take"

    def operate(self) -> None:
        """One call per actor."""
        put = [actor.put.remote() for actor in self.trainers]
        ray.get([getattr(actor, self.take).remote(*put) for actor in self.rollouts])


class ByBoxes(ByStore):
    """Through the object store, each box straight to its place."""

    take = "take_boxes"


def measure(choice: Choice) -> Iterator[Record]:
    """Measures over four actors on each side."""
    makers: list[Maker] = [
        entry(names.STORE, ByStore),
        entry(_BOXES, ByBoxes),
        entry(names.ORDINARY, Resharded),
        entry(names.ARENA, InArena),
        entry(names.CAPTURED, Captured),
        entry(names.RAY, ByRay),
    ]
    sizes = choice.sizes or (64 * MB,)
    yield from sweep(NAME, choice, makers, op=_OP, ranks=8, sizes=sizes, runs=lambda _: (8, 24))
