"""Weights that move: from a trainer to rollouts, between layouts, and a tensor from actor to actor.

In tables `weights` and `reshard`, 200 tensors go from the layout of the trainers to that of the rollouts. raycollect
moves what each rollout needs. By hand, people copy each box from what the trainers have put into the object store. Both
begin and end alike: the trainers' values are others in each turn, and the rollouts' tensors are written in place.

In table `p2p` a buffer of one actor arrives at another. `send_ref` writes into a buffer there; by Ray Direct Transport
and through the object store the receiver gets a new one, and "copied" copies that into its buffer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from importlib import import_module
from itertools import count
from typing import Any

import numpy as np
import ray

import raycollect as col
from benchmarks.report import Record
from benchmarks.suite import BURST, KB, MB, Choice, Maker, Table, entry, sweep
from raycollect.cli.contenders import BenchActor, BenchContender, Members, RayCollective, Refs
from raycollect.cli.harness import timed

WEIGHTS = Table("weights", "weights from a trainer to three rollouts", "object store")
RESHARD = Table(
    "reshard", "weights from four trainers to two replicas over two ranks each", "object store, boxes by hand"
)
P2P = Table("p2p", "from one actor to another, float32")
TABLES = (WEIGHTS, RESHARD, P2P)
NEEDS_RAY = True

COUNT, COLUMNS = 200, 512
MESHES: dict[int, tuple[dict[str, int], dict[str, int]]] = {
    4: ({"tp": 1}, {"dp": 3, "tp": 1}),
    8: ({"tp": 4}, {"dp": 2, "tp": 2}),
}
"""The number of actors -> the trainers, and the rollouts."""
CUTS = (("tp", None), (None, "tp"))  # half of the tensors are cut by rows, as layers alternate; half by columns

Boxes = dict[str, tuple[slice, ...]]
_turns = count(1)


def size_of(mesh: dict[str, int]) -> int:
    return int(np.prod(list(mesh.values())))


def layouts(nbytes: int, mesh: dict[str, int]) -> dict[str, col.Layout]:
    """How the tensors of a model of so many bytes lie on one side."""
    shape = (max(nbytes // (4 * COUNT * COLUMNS) // 4 * 4, 4), COLUMNS)
    return {f"layers.{at}": col.layout(shape, mesh=mesh, spec=CUTS[at % 2]) for at in range(COUNT)}


def boxes(nbytes: int, mesh: dict[str, int], rank: int) -> Boxes:
    """The part of each tensor that a rank holds."""
    regions = {name: layout.regions.of_rank[rank][0] for name, layout in layouts(nbytes, mesh).items()}
    return {name: tuple(slice(lo, hi) for lo, hi in region.box) for name, region in regions.items()}


def common(mine: tuple[slice, ...], its: tuple[slice, ...]) -> tuple[tuple[slice, ...], ...] | None:
    """The intersection of two boxes, as a part of each; None: it is empty."""
    spans = [(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(mine, its, strict=True)]
    if any(lo >= hi for lo, hi in spans):
        return None
    return tuple(
        tuple(slice(lo - side.start, hi - side.start) for (lo, hi), side in zip(spans, box, strict=True))
        for box in (mine, its)
    )


class Holder:
    """A trainer or a rollout: it holds its part of the weights."""

    def __init__(self, rank: int, ranks: int) -> None:
        sides, trainers = MESHES[ranks], size_of(MESHES[ranks][0])
        self.trainers = trainers
        self.is_trainer = rank < trainers
        self.mesh, self.rank = (sides[0], rank) if self.is_trainer else (sides[1], rank - trainers)
        self.trainer_mesh = sides[0]

    def prepare(self, nbytes: int, in_arena: bool) -> None:
        """Makes the tensors."""
        self.boxes = boxes(nbytes, self.mesh, self.rank)
        self.theirs = [boxes(nbytes, self.trainer_mesh, rank) for rank in range(self.trainers)]
        shape = next(iter(layouts(nbytes, self.mesh).values())).shape
        whole = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
        make = col.array if in_arena else np.array
        self.first = {name: np.array(whole[box]) for name, box in self.boxes.items()}
        self.weights: dict[str, Any] = {name: make(first) for name, first in self.first.items()}

    def begin(self, turn: int) -> None:
        """A trainer's weights get the values of a turn; those of a rollout are cleared."""
        for name, array in self.weights.items():
            if self.is_trainer:
                np.add(self.first[name], turn, out=array)
            else:
                array.fill(0)

    def is_right(self, turn: int) -> bool:
        """Whether the weights have the values of a turn."""
        return all(np.array_equal(array, self.first[name] + turn) for name, array in self.weights.items())

    def get(self) -> dict[str, Any]:
        """The weights, as one ref."""
        return self.weights

    # ------------------------------------------------------------------------------------------ by hand

    @col.by_value
    def put(self) -> dict[str, Any]:
        """The weights, through the object store."""
        return self.weights

    def take(self, *parts: dict[str, Any]) -> None:
        """Copies each box that it needs of what the trainers have put to its place."""
        for part, its in zip(parts, self.theirs, strict=True):
            for name, array in self.weights.items():
                shared = common(self.boxes[name], its[name])
                if shared is not None:
                    array[shared[0]] = part[name][shared[1]]


class HolderParticipant(Holder, col.CollectiveParticipant):
    """The same with the mixin."""


class ByStore(BenchContender):
    """The trainers put their weights, and the rollouts copy."""

    ACTOR: type = Holder

    def prepare(self, nbytes: int) -> None:
        """Makes the weights."""
        self.meshes = MESHES[self.ranks]
        trainers = size_of(self.meshes[0])
        self.sides = self.actors[:trainers], self.actors[trainers:]
        self.each("prepare", nbytes, self._in_arena)

    def fill(self) -> None: ...

    def run(self, count: int) -> Sequence[float]:
        """Moves the weights so many times, others each time."""
        spent_s = list[float]()
        for _ in range(count):
            turn = next(_turns)
            self.each("begin", turn)
            spent_s += timed(self.operate, 1)
            right = self.each("is_right", turn)
            assert all(right), f"{self.name}: {right}"
        return spent_s

    def check(self, runs: int) -> None: ...

    def operate(self) -> None:
        """Moves the weights once."""
        put = [actor.put.remote() for actor in self.sides[0]]
        ray.get([actor.take.remote(*put) for actor in self.sides[1]])


class Moved(ByStore):
    """The driver's collective on refs that persist: `broadcast_refs`, or `reshard_refs` between layouts."""

    ACTOR = HolderParticipant
    start = Refs.start

    def prepare(self, nbytes: int) -> None:
        """Makes the weights, and a ref to those of each actor."""
        super().prepare(nbytes)
        src, dst = (layouts(nbytes, mesh) for mesh in self.meshes)
        held = [[actor.get.remote() for actor in side] for side in self.sides]

        def move() -> None:
            if self.operation == "broadcast":
                col.broadcast_refs(held[0] + held[1], group_name=self.group)
            else:
                col.reshard_refs(*held, self.group, src=src, dst=dst)

        self.move = move

    def operate(self) -> None:
        """Makes the call."""
        self.move()


class MovedByStep(Moved):
    """The same under `col.step`."""

    def prepare(self, nbytes: int) -> None:
        """Makes the step."""
        super().prepare(nbytes)
        self.move = col.step(self.move)
        self.closing.callback(self.move.close)


class Versions(ByStore):
    """A version is put, and each rollout is updated to it, with a receipt."""

    ACTOR = HolderParticipant

    def prepare(self, nbytes: int) -> None:
        """Publishes the weights, and subscribes."""
        super().prepare(nbytes)
        ((trainer,), rollouts) = self.sides
        held = self.closing.enter_context(ExitStack())
        self.publication = held.enter_context(col.publish([trainer.get.remote()], self.group))
        self.subscriptions = [held.enter_context(col.subscribe(self.group, [actor.get.remote()])) for actor in rollouts]

    def operate(self) -> None:
        """Puts and pushes."""
        self.publication.put()
        self.publication.push(self.subscriptions)


# ---------------------------------------------------------------------------------------------- from actor to actor


class Pair(BenchActor):
    """One of two actors: rank 0 sends, rank 1 receives."""

    def prepare(self, operation: str, whole: int, in_arena: bool) -> None:
        """Makes the buffer."""
        self.array: Any = (col.zeros if in_arena else np.zeros)(whole, np.float32)

    def fill(self) -> None:
        """Sets what is sent, and clears what is received."""
        self.array = self.array if self.array.flags.writeable else np.empty_like(self.array)
        self.array.fill(1 - self._rank)

    def wrong(self, growth: float) -> int:
        """Counts the elements that have not arrived."""
        return int(np.count_nonzero(self.array != 1))

    def move(self) -> None:
        """Sends or receives by the library of the group."""
        if self._rank:
            self._library.recv(self.array, 0, self._group)
        else:
            self._library.send(self.array, 1, self._group)

    def get_array(self) -> Any:
        """A ref to the buffer."""
        return self.array

    @col.by_value
    def put_array(self) -> Any:
        """The buffer through the object store."""
        return self.array

    def keep(self, value: Any, is_copied: bool) -> None:
        """Copies what came through the object store, or keeps it where it lies."""
        if is_copied:
            self.array[...] = value
        else:
            self.array = value


class PairParticipant(Pair, col.CollectiveParticipant):
    """The same with the mixin."""


class StoreSend(BenchContender):
    """A method returns the array, and its ref goes to a method of the other actor, which keeps it, read-only."""

    ACTOR = Pair
    IS_COPIED = False

    def operate(self) -> None:
        """Sends once."""
        ray.get(self.actors[1].keep.remote(self.actors[0].put_array.remote(), self.IS_COPIED))


class StoreCopy(StoreSend):
    """The same, copied into the receiver's buffer."""

    IS_COPIED = True


class SendRef(BenchContender):
    """`raycollect.send_ref` from the driver, from ref to ref."""

    ACTOR = PairParticipant
    start = Refs.start

    def prepare(self, nbytes: int) -> None:
        """Makes the buffers, and a ref to each."""
        super().prepare(nbytes)
        self.refs = [actor.get_array.remote() for actor in self.actors]

    def operate(self) -> None:
        """Sends once."""
        col.send_ref(*self.refs, group_name=self.group)


class MemberSend(Members):
    """A method of each actor, which calls `send` or `recv`."""

    ACTOR = Pair

    run = BenchContender.run  # timed in the driver

    def operate(self) -> None:
        """Calls both actors."""
        self.each("move")


class RaySend(MemberSend, RayCollective):
    """The same by `ray.util.collective`."""


class Transporter:
    """An actor for Ray Direct Transport: it returns torch tensors that travel by gloo."""

    def __init__(self, rank: int, ranks: int) -> None:
        self._torch, self._rank = import_module("torch"), rank
        self._torch.set_num_threads(1)

    def prepare(self, operation: str, whole: int, in_arena: bool) -> None:
        """Makes the tensor."""
        self.tensor = self._torch.empty(whole, dtype=self._torch.float32)

    def fill(self) -> None:
        """Makes another one, as one that was sent or received may be shared."""
        self.tensor = self._torch.full_like(self.tensor, 1 - self._rank)

    def wrong(self, growth: float) -> int:
        """Counts the elements that have not arrived."""
        return int((self.tensor != 1).sum())

    @ray.method(tensor_transport="gloo")
    def give(self) -> Any:
        """Sends the tensor to the receiver of the ref."""
        return self.tensor

    def keep(self, tensor: Any) -> None:
        """Keeps what it received."""
        self.tensor = tensor


class DirectTransport(BenchContender):
    """Ray Direct Transport over gloo."""

    ACTOR = Transporter

    def start(self) -> None:
        """Creates its group."""
        create = import_module("ray.experimental.collective").create_collective_group
        create(self.actors, backend="gloo")

    def operate(self) -> None:
        """Sends once."""
        ray.get(self.actors[1].keep.remote(self.actors[0].give.remote()))


# ---------------------------------------------------------------------------------------------- the suite


def measure(choice: Choice) -> Iterator[Record]:
    """Measures over four and eight actors, then between two."""
    makers: list[Maker] = [
        entry("object store", ByStore, "broadcast", 4),
        entry("raycollect, put and push", Versions, "broadcast", 4),
        entry("raycollect", Moved, "broadcast", 4),
    ]
    op, sizes = f"sync of {COUNT}", (100 * MB,)
    yield from sweep(WEIGHTS, choice, makers, op=op, ranks=4, sizes=sizes, runs=lambda _: (6, 20))
    makers = [
        entry("object store, boxes by hand", ByStore, "reshard", 8),
        entry("raycollect", Moved, "reshard", 8),
        entry("raycollect, arena", Moved, "reshard", 8, in_arena=True),
        entry("raycollect, captured", MovedByStep, "reshard", 8, in_arena=True),
    ]
    op, sizes = f"reshard of {COUNT}", (64 * MB,)
    yield from sweep(RESHARD, choice, makers, op=op, ranks=8, sizes=sizes, runs=lambda _: (8, 24))
    makers = [
        entry("raycollect", SendRef, "broadcast", 2),
        entry("raycollect, arena", SendRef, "broadcast", 2, in_arena=True),
        entry("raycollect, in actors", MemberSend, "broadcast", 2),
        entry("raycollect, in actors, arena", MemberSend, "broadcast", 2, in_arena=True),
        entry("ray.util.collective", RaySend, "broadcast", 2),
        entry("Ray Direct Transport", DirectTransport, "broadcast", 2),
        entry("object store", StoreSend, "broadcast", 2),
        entry("object store, copied", StoreCopy, "broadcast", 2),
    ]
    sizes = (4, 64 * KB, MB, 16 * MB, 64 * MB)
    yield from sweep(P2P, choice, makers, op="send", ranks=2, sizes=sizes, runs=_runs, burst=BURST)


def _runs(nbytes: int) -> tuple[int, int]:
    return (30, 200) if nbytes < 16 * MB else (6, 24)
