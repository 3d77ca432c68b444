"""The table of situations in which one rank does not do what the others do; `test_mismatch` runs them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from raycollect import errors

WORLD = 3
ODD = 1
"""The culprit's rank; two others agree, so that there is no doubt who it is."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one rank does.

    Attributes:
        operation: The operation; ``"recv"`` for the taker of a send, ``""`` for a rank that has no part in it.
        tensor: The operand, or of an alltoall the pieces that are given.
        pieces: The `tensor_list`, or of an alltoall the pieces that are taken.
        op: The reduce op.
        root: The root; of a send or receive the other rank.
    """

    operation: str
    tensor: Any = None
    pieces: Any = None
    op: str = "sum"
    root: int = 0

    def bits(self) -> list[bytes]:
        """All that its tensors hold."""
        return [np.asarray(one).tobytes() for one in (*leaves(self.tensor), *leaves(self.pieces))]


def leaves(value: Any) -> list[Any]:
    """The arrays of a value; nothing of what is no array."""
    if isinstance(value, (list, tuple)):
        return [one for item in value for one in leaves(item)]
    return [value] if isinstance(value, np.ndarray) else []


def some(count: int = 4, dtype: str = "float32", start: int = 1) -> np.ndarray[Any, Any]:
    """An array without zeros."""
    return np.arange(start, start + count).astype(dtype)


def some_pieces(*counts: int) -> list[np.ndarray[Any, Any]]:
    return [some(count, start=10 * at) for at, count in enumerate(counts or (4,) * WORLD)]


def read_only() -> np.ndarray[Any, Any]:
    array = some()
    array.flags.writeable = False
    return array


def overlapping() -> list[np.ndarray[Any, Any]]:
    whole = some(4 + WORLD)
    return [whole[at : at + 4] for at in range(WORLD)]


@dataclass(frozen=True, kw_only=True)
class Situation:
    """One way in which a rank does not fit.

    Attributes:
        most: What the ranks that agree do.
        odd: What the culprit does.
        field: What is named as wrong with it.
        error: What is raised.
        first: What rank 0 does, where that is something of its own: it sends, or is the root.
        idle: True where rank 2 has no part in it.
        no_plan: Why one call of the driver can't say this; empty where it can.
    """

    most: Callable[[], Part]
    odd: Callable[[], Part]
    field: str
    error: type[errors.RefusedError] = errors.MismatchError
    first: Callable[[], Part] | None = field(default=None)
    idle: bool = False
    no_plan: str = ""

    def part(self, rank: int) -> Part:
        """What a rank does; made anew each time, always the same."""
        if rank == ODD:
            return self.odd()
        if rank == 0 and self.first is not None:
            return self.first()
        return Part(operation="") if self.idle else self.most()

    @property
    def ranks(self) -> list[int]:
        """The ranks that take part."""
        return [rank for rank in range(WORLD) if self.part(rank).verb]


def pair(operation: str, first: Callable[[], Part], odd: Callable[[], Part], what: str, **others: Any) -> Situation:
    """A situation between rank 0 and the culprit alone."""
    return Situation(most=lambda: Part(operation=operation), first=first, odd=odd, field=what, idle=True, **others)


ONE_CALL = "a call of the driver has one {} for all ranks"

SITUATIONS = {
    "count": Situation(
        most=lambda: Part(operation="allreduce", tensor=some(4)),
        odd=lambda: Part(operation="allreduce", tensor=some(8)),
        field="shape",
    ),
    "shape": Situation(
        most=lambda: Part(operation="allreduce", tensor=some(4)),
        odd=lambda: Part(operation="allreduce", tensor=some(4).reshape(2, 2)),
        field="shape",
    ),
    "dtype": Situation(
        most=lambda: Part(operation="allreduce", tensor=some(4, "float32")),
        odd=lambda: Part(operation="allreduce", tensor=some(4, "int32")),
        field="dtype",
    ),
    "count of a broadcast": Situation(
        most=lambda: Part(operation="broadcast", tensor=some(4)),
        odd=lambda: Part(operation="broadcast", tensor=some(8)),
        field="shape",
    ),
    "dtype of a reduce": Situation(
        most=lambda: Part(operation="reduce", tensor=some(4, "float32")),
        odd=lambda: Part(operation="reduce", tensor=some(4, "float64")),
        field="dtype",
    ),
    "dtype of an allgather": Situation(
        most=lambda: Part(operation="allgather", tensor=some(4), pieces=some_pieces()),
        odd=lambda: Part(operation="allgather", tensor=some(4, "int32"), pieces=some_pieces()),
        field="dtype",
    ),
    "reduce op": Situation(
        most=lambda: Part(operation="allreduce", tensor=some(), op="sum"),
        odd=lambda: Part(operation="allreduce", tensor=some(), op="max"),
        field="reduce op",
        no_plan=ONE_CALL.format("reduce op"),
    ),
    "root": Situation(
        most=lambda: Part(operation="broadcast", tensor=some(), root=0),
        odd=lambda: Part(operation="broadcast", tensor=some(), root=1),
        field="root",
        no_plan=ONE_CALL.format("root"),
    ),
    "root of a reduce": Situation(
        most=lambda: Part(operation="reduce", tensor=some(), root=2),
        odd=lambda: Part(operation="reduce", tensor=some(), root=1),
        field="root",
        no_plan=ONE_CALL.format("root"),
    ),
    "allreduce against broadcast": Situation(
        most=lambda: Part(operation="allreduce", tensor=some()),
        odd=lambda: Part(operation="broadcast", tensor=some()),
        field="op",
        no_plan=ONE_CALL.format("operation"),
    ),
    "allgather against barrier": Situation(
        most=lambda: Part(operation="allgather", tensor=some(), pieces=some_pieces()),
        odd=lambda: Part(operation="barrier"),
        field="op",
        no_plan=ONE_CALL.format("operation"),
    ),
    "a list against a tensor": Situation(
        most=lambda: Part(operation="allreduce", tensor=some()),
        odd=lambda: Part(operation="allreduce", tensor=[some()]),
        field="structure",
    ),
    "a longer list": Situation(
        most=lambda: Part(operation="allreduce", tensor=[some(), some()]),
        odd=lambda: Part(operation="allreduce", tensor=[some(), some(), some()]),
        field="tensor count",
    ),
    "a tensor list that is too short": Situation(
        most=lambda: Part(operation="allgather", tensor=some(), pieces=some_pieces()),
        odd=lambda: Part(operation="allgather", tensor=some(), pieces=some_pieces(4, 4)),
        field="output",
        error=errors.InvalidArgumentError,
    ),
    "an item of the wrong size": Situation(
        most=lambda: Part(operation="allgather", tensor=some(), pieces=some_pieces()),
        odd=lambda: Part(operation="allgather", tensor=some(), pieces=some_pieces(4, 4, 5)),
        field="shape of output 2",
    ),
    "an item of a reducescatter": Situation(
        most=lambda: Part(operation="reducescatter", tensor=some(), pieces=some_pieces()),
        odd=lambda: Part(operation="reducescatter", tensor=some(), pieces=some_pieces(4, 4, 5)),
        field="shape of input 2",
    ),
    "a reducescatter of too few": Situation(
        most=lambda: Part(operation="reducescatter", tensor=some(), pieces=some_pieces()),
        odd=lambda: Part(operation="reducescatter", tensor=some(), pieces=some_pieces(4, 4)),
        field="input",
        error=errors.InvalidArgumentError,
    ),
    "a scatter into less": Situation(
        first=lambda: Part(operation="scatter", tensor=some(), pieces=some_pieces()),
        most=lambda: Part(operation="scatter", tensor=some()),
        odd=lambda: Part(operation="scatter", tensor=some(3)),
        field="shape of output",
    ),
    "a gather into too few": Situation(
        most=lambda: Part(operation="gather", tensor=some(), root=ODD),
        odd=lambda: Part(operation="gather", tensor=some(), pieces=some_pieces(4, 4), root=ODD),
        field="output",
        error=errors.InvalidArgumentError,
    ),
    "a piece of an alltoall": Situation(
        most=lambda: Part(operation="alltoall", tensor=some_pieces(), pieces=some_pieces()),
        odd=lambda: Part(operation="alltoall", tensor=some_pieces(), pieces=some_pieces(4, 4, 3)),
        field="shape of output 2",
    ),
    "shape of a reduce": Situation(
        most=lambda: Part(operation="reduce", tensor=some(4), root=2),
        odd=lambda: Part(operation="reduce", tensor=some(5), root=2),
        field="shape",
    ),
    "dtype of a broadcast": Situation(
        most=lambda: Part(operation="broadcast", tensor=some(4, "float32"), root=2),
        odd=lambda: Part(operation="broadcast", tensor=some(4, "int32"), root=2),
        field="dtype",
    ),
    "dtype of an item": Situation(
        most=lambda: Part(operation="allgather", tensor=some(), pieces=some_pieces()),
        odd=lambda: Part(operation="allgather", tensor=some(), pieces=[some(), some(4, "int32"), some()]),
        field="dtype of output 1",
    ),
    "dtype of a gather": Situation(
        first=lambda: Part(operation="gather", tensor=some(), pieces=some_pieces()),
        most=lambda: Part(operation="gather", tensor=some()),
        odd=lambda: Part(operation="gather", tensor=some(4, "int32")),
        field="dtype",
    ),
    "a gather into the wrong size": Situation(
        most=lambda: Part(operation="gather", tensor=some(), root=ODD),
        odd=lambda: Part(operation="gather", tensor=some(), pieces=some_pieces(4, 4, 5), root=ODD),
        field="shape of output 2",
    ),
    "a scatter of too few": Situation(
        most=lambda: Part(operation="scatter", tensor=some(), root=ODD),
        odd=lambda: Part(operation="scatter", tensor=some(), pieces=some_pieces(4, 4), root=ODD),
        field="input",
        error=errors.InvalidArgumentError,
    ),
    "dtype of a scatter": Situation(
        first=lambda: Part(operation="scatter", tensor=some(), pieces=some_pieces()),
        most=lambda: Part(operation="scatter", tensor=some()),
        odd=lambda: Part(operation="scatter", tensor=some(4, "int32")),
        field="dtype of output",
    ),
    "a reducescatter into more": Situation(
        most=lambda: Part(operation="reducescatter", tensor=some(), pieces=some_pieces()),
        odd=lambda: Part(operation="reducescatter", tensor=some(5), pieces=some_pieces()),
        field="shape of output",
    ),
    "a reducescatter into another dtype": Situation(
        most=lambda: Part(operation="reducescatter", tensor=some(), pieces=some_pieces()),
        odd=lambda: Part(operation="reducescatter", tensor=some(4, "float64"), pieces=some_pieces()),
        field="dtype of output",
    ),
    "an alltoall of too few": Situation(
        most=lambda: Part(operation="alltoall", tensor=some_pieces(), pieces=some_pieces()),
        odd=lambda: Part(operation="alltoall", tensor=some_pieces(4, 4), pieces=some_pieces()),
        field="input",
        error=errors.InvalidArgumentError,
    ),
    "an alltoall into too few": Situation(
        most=lambda: Part(operation="alltoall", tensor=some_pieces(), pieces=some_pieces()),
        odd=lambda: Part(operation="alltoall", tensor=some_pieces(), pieces=some_pieces(4, 4)),
        field="output",
        error=errors.InvalidArgumentError,
    ),
    "receive of more": pair(
        "send",
        lambda: Part(operation="send", tensor=some(4), root=ODD),
        lambda: Part(operation="recv", tensor=some(8), root=0),
        "shape",
    ),
    "receive of less": pair(
        "send",
        lambda: Part(operation="send", tensor=some(8), root=ODD),
        lambda: Part(operation="recv", tensor=some(4), root=0),
        "shape",
    ),
    "receive of another dtype": pair(
        "send",
        lambda: Part(operation="send", tensor=some(4, "float32"), root=ODD),
        lambda: Part(operation="recv", tensor=some(4, "int32"), root=0),
        "dtype",
    ),
    "a read-only target": Situation(
        most=lambda: Part(operation="allreduce", tensor=some()),
        odd=lambda: Part(operation="allreduce", tensor=read_only()),
        field="operand",
        error=errors.ReadOnlyError,
    ),
    "receive into read-only memory": pair(
        "send",
        lambda: Part(operation="send", tensor=some(), root=ODD),
        lambda: Part(operation="recv", tensor=read_only(), root=0),
        "operand",
        error=errors.ReadOnlyError,
    ),
    "targets that overlap": Situation(
        most=lambda: Part(operation="allgather", tensor=some(), pieces=some_pieces()),
        odd=lambda: Part(operation="allgather", tensor=some(), pieces=overlapping()),
        field="operand",
        error=errors.AliasError,
    ),
    "one target twice": Situation(
        most=lambda: Part(operation="allgather", tensor=some(), pieces=some_pieces()),
        odd=lambda: Part(operation="allgather", tensor=some(), pieces=[some()] * WORLD),
        field="operand",
        error=errors.AliasError,
    ),
    "no tensor": Situation(
        most=lambda: Part(operation="allreduce", tensor=some()),
        odd=lambda: Part(operation="allreduce", tensor="text"),
        field="",  # of a plan the operand, of a call the argument
        error=errors.NotATensorError,
    ),
    "receive into no tensor": pair(
        "send",
        lambda: Part(operation="send", tensor=some(), root=ODD),
        lambda: Part(operation="recv", tensor="text", root=0),
        "",
        error=errors.NotATensorError,
    ),
    "a reduce op without a meaning": Situation(
        most=lambda: Part(operation="allreduce", tensor=some(4, "complex64"), op="sum"),
        odd=lambda: Part(operation="allreduce", tensor=some(4, "complex64"), op="max"),
        field="reduce op",
        error=errors.RefusedError,  # it is not what the others do, and numpy has no meaning for it
        no_plan=ONE_CALL.format("reduce op"),
    ),
}
