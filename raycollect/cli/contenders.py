"""The contenders of `raycollect bench`: a collective by raycollect, by Ray's own library, and by the object store.

Each contender has actors of its own, of the class that its users would write: only those of the driver's collectives
inherit the mixin. Ray spreads them over its nodes. All use float32 tensors.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayTaskError

import raycollect as col
from raycollect.cli.harness import Skipped, timed
from raycollect.cli.options import OPERATIONS
from raycollect.errors import KernelError, RaycollectError, copy_error

ELEMENT_NBYTES = np.dtype(np.float32).itemsize

group_names: Iterator[str] = (f"raycollect-bench-{number}" for number in itertools.count(1))


def whole_of(operation: str, ranks: int, nbytes: int) -> int:
    """Converts bytes to elements: at least one for each rank, if there are pieces."""
    pieces = ranks if OPERATIONS[operation][1] else 1
    return max(1, nbytes // (pieces * ELEMENT_NBYTES)) * pieces


def _arguments(operation: str, given: Any, taken: Any) -> tuple[Any, ...]:
    if OPERATIONS[operation][1]:
        return taken, given
    return (given, 0) if operation == "broadcast" else (given,)


def _differing(array: Any, value: float) -> int:
    """Counts the elements that differ from a value by more than rounding."""
    slack = 1e-5 * value
    if value - slack <= array.min() and array.max() <= value + slack:
        return 0
    return int(np.count_nonzero(~(abs(array - value) <= slack)))  # counts NaN, too


class BenchActor:
    """An actor without the mixin: it holds the tensors of one rank, and calls any library."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.given: Any = None
        self.taken: Any = None
        self._rank, self._ranks = rank, ranks

    def prepare(self, operation: str, whole: int, in_arena: bool) -> None:
        """Makes the tensors of an operation and a size, and drops the last ones."""
        self.given = self.taken = None
        self._operation = operation
        lengths = {"whole": whole, "piece": whole // self._ranks}
        zeros = col.zeros if in_arena else np.zeros
        gives, takes = OPERATIONS[operation]
        self.given = zeros(lengths[gives], np.float32)
        self.taken = zeros(lengths[takes], np.float32) if takes else self.given

    def get(self, name: str) -> Any:
        """Returns ``"given"``, the tensor that this rank gives, or ``"taken"``."""
        return getattr(self, name)

    def fill(self) -> None:
        """Sets the input of this rank to its rank plus one, and clears its result."""
        self.taken.fill(np.nan)
        self.given.fill(self._rank + 1)

    def wrong(self, growth: float) -> int:
        """Counts the wrong elements of this rank's result; sums are `growth` times that of the inputs."""
        values, pieces = [growth * sum(range(1, self._ranks + 1))], [self.taken]
        if self._operation == "broadcast":
            values = [1.0]
        elif self._operation in ("allgather", "alltoall"):
            values, pieces = [rank + 1.0 for rank in range(self._ranks)], np.split(self.taken, self._ranks)
        return sum(map(_differing, pieces, values))

    # ------------------------------------------------------------------------------------------ calls of a library

    def join(self, library: str, group: str, backend: str) -> None:
        """Joins a group of ``"raycollect"``, or of ``"ray"``, which is `ray.util.collective` over gloo."""
        if library == "ray":
            import ray.util.collective as ray_collective  # in some contenders' actors only, as torch
            import torch

            torch.set_num_threads(1)
            self._library: Any = ray_collective
        else:
            self._library = col
        self._group = group
        self._library.init_collective_group(self._ranks, self._rank, backend, group)

    def leave(self) -> None:
        """Leaves the group."""
        self._library.destroy_collective_group(self._group)

    def times(self, count: int) -> list[float]:
        """Makes it `count` times, after a barrier; returns the seconds of each."""
        self._library.barrier(self._group)
        return timed(self.bound(), count)

    def bound(self) -> Callable[[], object]:
        """Returns a function that makes this rank's part of the call."""
        operation, given, taken = self._operation, self.given, self.taken
        if self._library is not col:  # which takes lists of tensors in the place of tensors of several pieces
            given = np.split(given, self._ranks) if operation == "reducescatter" else given
            taken = np.split(taken, self._ranks) if operation == "allgather" else taken
        return partial(getattr(self._library, operation), *_arguments(operation, given, taken), self._group)

    # ------------------------------------------------------------------------------------------ the object store

    @col.by_value
    def put(self) -> Any:
        """Returns the input through the object store."""
        return self.given

    def take(self, *arrays: Any) -> None:
        """Copies the result from the inputs of all ranks, or from the whole result."""
        if self._operation == "allgather":
            np.concatenate(arrays, out=self.taken)
        elif self._operation in ("alltoall", "reducescatter"):
            pieces = [np.split(array, self._ranks)[self._rank] for array in arrays]
            if self._operation == "alltoall":
                np.concatenate(pieces, out=self.taken)
            else:
                np.sum(pieces, axis=0, out=self.taken)
        else:
            self.taken[...] = arrays[0]


class BenchParticipant(BenchActor, col.CollectiveParticipant):
    """The same with the mixin."""


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Raises an error of raycollect in an actor as itself, not as Ray's wrapper."""
    try:
        yield
    except RayTaskError as exc:
        if isinstance(exc.cause, RaycollectError):
            raise copy_error(exc.cause) from None
        raise


class BenchContender:
    """A contender with actors of its own. Closing it ends them.

    Args:
        name: The contender's name.
        operation: One of `OPERATIONS`.
        ranks: The number of actors.
        backend: The backend of their group.
        in_arena: Whether the tensors lie in the shared arena.
    """

    ACTOR: type = BenchActor
    TIMED_IN = "driver"
    GROWS = frozenset({"allreduce"})  # the operations that sum in place

    def __init__(self, name: str, operation: str, ranks: int, *, backend: str = "auto", in_arena: bool = False) -> None:
        self.name: str = name
        self.operation: str = operation
        self.ranks: int = ranks
        self.backend: str = backend
        self.group: str = next(group_names)
        self._in_arena = in_arena
        self.closing: ExitStack = ExitStack()
        remote: Any = ray.remote(num_cpus=0, scheduling_strategy="SPREAD")(self.ACTOR)
        self.actors: list[Any] = [remote.remote(rank, ranks) for rank in range(ranks)]
        for actor in self.actors:
            self.closing.callback(ray.kill, actor)
        try:
            self.start()
        except BaseException:
            self.close()
            raise

    def start(self) -> None:
        """Forms the group."""

    def operate(self) -> None:
        """Runs the operation once; returns when all ranks have its result."""
        raise NotImplementedError

    def prepare(self, nbytes: int) -> None:
        """Makes the tensors."""
        self.each("prepare", self.operation, whole_of(self.operation, self.ranks, nbytes), self._in_arena)

    def fill(self) -> None:
        """Sets the inputs, and clears the results."""
        self.each("fill")

    def run(self, count: int) -> Sequence[float]:
        """Runs the operation `count` times."""
        return timed(self.operate, count)

    def check(self, runs: int) -> None:
        """Raises KernelError if a result is wrong."""
        wrong = self.each("wrong", float(self.ranks) ** (runs - 1) if self.operation in self.GROWS else 1.0)
        if any(wrong):
            detail = f"{self.name}: {sum(wrong)} elements are wrong, by rank: {wrong}"
            raise KernelError(op=self.operation, group_name=self.group, detail=detail)

    def close(self) -> None:
        """Destroys the group, and ends the actors."""
        self.closing.close()

    def each(self, method: str, *args: Any) -> list[Any]:
        """Calls a method of all actors; returns the results by rank."""
        with _plain_errors():
            results: list[Any] = ray.get([getattr(actor, method).remote(*args) for actor in self.actors])
        return results


class Refs(BenchContender):
    """The driver's collective, on refs that persist over the calls."""

    ACTOR = BenchParticipant
    call: Callable[[], object]

    def start(self) -> None:
        """Declares the group."""
        declared = col.declare_collective_group(self.actors, backend=self.backend, group_name=self.group)
        self.closing.callback(declared.destroy)
        self.backend: str = declared.backend

    def prepare(self, nbytes: int) -> None:
        """Makes the tensors, and a ref to each."""
        super().prepare(nbytes)
        given, taken = ([actor.get.remote(name) for actor in self.actors] for name in ("given", "taken"))
        operation = getattr(col, f"{self.operation}_refs")
        self.call = partial(operation, *_arguments(self.operation, given, taken), self.group)

    def operate(self) -> None:
        """Makes one call."""
        self.call()


class Captured(Refs):
    """The same call as a captured step."""

    step: Any = None

    def prepare(self, nbytes: int) -> None:
        """Records the step."""
        self._forget()
        super().prepare(nbytes)
        with col.capture() as self.step:
            self.call()

    def operate(self) -> None:
        """Runs the step once."""
        self.step.run()

    def close(self) -> None:
        """Closes the step first."""
        self._forget()
        super().close()

    def _forget(self) -> None:
        if self.step is not None:
            self.step.close()
            self.step = None


class Members(BenchContender):
    """Calls that the actors make themselves, in a loop; the time of a call is that of the slowest rank."""

    LIBRARY = "raycollect"
    TIMED_IN = "actors"

    def start(self) -> None:
        """Has the actors join a group."""
        self.each("join", self.LIBRARY, self.group, self.backend)
        self.closing.callback(self.each, "leave")

    def run(self, count: int) -> Sequence[float]:
        """Runs the loop."""
        return [max(ranks) for ranks in zip(*self.each("times", count), strict=True)]


class RayCollective(Members):
    """`ray.util.collective` over gloo, called like `Members`.

    Raises:
        Skipped: It lacks the operation, or its gloo lacks torch.
    """

    LIBRARY = "ray"
    GROWS = frozenset({"allreduce", "reducescatter"})  # over gloo, it reduces all pieces in place

    def __init__(self, name: str, operation: str, ranks: int, *, backend: str = "gloo", in_arena: bool = False) -> None:
        if operation == "alltoall":
            raise Skipped("ray.util.collective has no alltoall")
        if find_spec("torch") is None:
            raise Skipped("its gloo needs torch (pip install torch)")
        super().__init__(name, operation, ranks, backend="gloo", in_arena=in_arena)


class ObjectStore(BenchContender):
    """Through Ray's object store: the driver adds up and puts the sum; else the ranks copy from each other's inputs."""

    def operate(self) -> None:
        """Moves the tensors once."""
        refs = [actor.put.remote() for actor in self.actors]
        if self.operation == "allreduce":
            first, *others = ray.get(refs)
            total = first + others[0]
            for array in others[1:]:
                total += array
            refs = [ray.put(total)]
        takers = self.actors
        if self.operation == "broadcast":
            refs, takers = refs[:1], takers[1:]
        ray.get([actor.take.remote(*refs) for actor in takers])


CONTENDERS: Mapping[str, Callable[..., BenchContender]] = {
    "captured": partial(Captured, in_arena=True),
    "refs": partial(Refs, in_arena=True),
    "members": partial(Members, in_arena=True),
    "ray.util.collective": RayCollective,
    "object-store": ObjectStore,
}
"""The ways of `raycollect bench`; raycollect's tensors lie in the arena."""
