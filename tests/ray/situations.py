"""The table of situations in which one rank does not do what the others do; `test_mismatch` runs them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
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
        return [rank for rank in range(WORLD) if self.part(rank).operation]


USUAL: dict[str, dict[str, Any]] = {
    **{operation: {"tensor": some} for operation in ("allreduce", "reduce", "broadcast", "gather", "scatter")},
    **{operation: {"tensor": some, "pieces": some_pieces} for operation in ("allgather", "reducescatter")},
    "alltoall": {"tensor": some_pieces, "pieces": some_pieces},
    "barrier": {},
}
"""Verb -> what a rank gives that is no root; functions are called for a value."""


def part(operation: str, *given: dict[str, Any]) -> Callable[[], Part]:
    """An operation with what is usual, and what is given instead."""
    every = {name: value for one in (USUAL.get(operation, {}), *given) for name, value in one.items()}
    return lambda: Part(
        operation=operation, **{name: value() if callable(value) else value for name, value in every.items()}
    )


def odd(
    operation: str,
    what: str,
    *,
    against: str = "",
    all_give: dict[str, Any] | None = None,
    root_gives: dict[str, Any] | None = None,
    error: type[errors.RefusedError] = errors.MismatchError,
    no_plan: str = "",
    **given: Any,
) -> Situation:
    """All ranks do what is usual, and the culprit gives something else.

    Args:
        operation: What they do.
        what: The field that is named.
        against: The culprit's operation, where it is another one.
        all_give: What is not usual on all ranks.
        root_gives: What only rank 0 gives, as the root.
        error: What is raised.
        no_plan: See `Situation`.
        given: What the culprit gives.
    """
    common = all_give or {}
    return Situation(
        first=None if root_gives is None else part(operation, common, root_gives),
        most=part(operation, common),
        odd=part(against, given) if against else part(operation, common, given),
        field=what,
        error=error,
        no_plan=no_plan,
    )


def pair(what: str, sent: Callable[[], Any], taken: Callable[[], Any], **others: Any) -> Situation:
    """Rank 0 sends to the culprit, which receives into something else."""
    send, receive = part("send", {"tensor": sent, "root": ODD}), part("recv", {"tensor": taken, "root": 0})
    return Situation(most=lambda: Part(operation="send"), first=send, odd=receive, field=what, idle=True, **others)


def array(*args: Any) -> Callable[[], Any]:
    return partial(some, *args)


def pieces(*counts: int) -> Callable[[], Any]:
    return partial(some_pieces, *counts)


ONE_CALL = "a call of the driver has one {} for all ranks"
ONE_OP, ONE_ROOT, ONE_VERB = map(ONE_CALL.format, ("reduce op", "root", "operation"))
INTS = array(4, "int32")
INVALID = errors.InvalidArgumentError

SITUATIONS = {
    "count": odd("allreduce", "shape", tensor=array(8)),
    "shape": odd("allreduce", "shape", tensor=lambda: some().reshape(2, 2)),
    "dtype": odd("allreduce", "dtype", tensor=INTS),
    "count of a broadcast": odd("broadcast", "shape", tensor=array(8)),
    "dtype of a reduce": odd("reduce", "dtype", tensor=array(4, "float64")),
    "dtype of an allgather": odd("allgather", "dtype", tensor=INTS),
    "reduce op": odd("allreduce", "reduce op", op="max", no_plan=ONE_OP),
    "root": odd("broadcast", "root", root=1, no_plan=ONE_ROOT),
    "root of a reduce": odd("reduce", "root", all_give={"root": 2}, root=1, no_plan=ONE_ROOT),
    "allreduce against broadcast": odd("allreduce", "op", against="broadcast", no_plan=ONE_VERB),
    "allgather against barrier": odd("allgather", "op", against="barrier", no_plan=ONE_VERB),
    "a list against a tensor": odd("allreduce", "structure", tensor=lambda: [some()]),
    "a longer list": odd(
        "allreduce",
        "tensor count",
        all_give={"tensor": lambda: [some(), some()]},
        tensor=lambda: [some(), some(), some()],
    ),
    "a tensor list that is too short": odd("allgather", "output", pieces=pieces(4, 4), error=INVALID),
    "an item of the wrong size": odd("allgather", "shape of output 2", pieces=pieces(4, 4, 5)),
    "an item of a reducescatter": odd("reducescatter", "shape of input 2", pieces=pieces(4, 4, 5)),
    "a reducescatter of too few": odd("reducescatter", "input", pieces=pieces(4, 4), error=INVALID),
    "a scatter into less": odd("scatter", "shape of output", root_gives={"pieces": some_pieces}, tensor=array(3)),
    "a gather into too few": odd("gather", "output", all_give={"root": ODD}, pieces=pieces(4, 4), error=INVALID),
    "a piece of an alltoall": odd("alltoall", "shape of output 2", pieces=pieces(4, 4, 3)),
    "shape of a reduce": odd("reduce", "shape", all_give={"root": 2}, tensor=array(5)),
    "dtype of a broadcast": odd("broadcast", "dtype", all_give={"root": 2}, tensor=INTS),
    "dtype of an item": odd("allgather", "dtype of output 1", pieces=lambda: [some(), INTS(), some()]),
    "dtype of a gather": odd("gather", "dtype", root_gives={"pieces": some_pieces}, tensor=INTS),
    "a gather into the wrong size": odd("gather", "shape of output 2", all_give={"root": ODD}, pieces=pieces(4, 4, 5)),
    "a scatter of too few": odd("scatter", "input", all_give={"root": ODD}, pieces=pieces(4, 4), error=INVALID),
    "dtype of a scatter": odd("scatter", "dtype of output", root_gives={"pieces": some_pieces}, tensor=INTS),
    "a reducescatter into more": odd("reducescatter", "shape of output", tensor=array(5)),
    "a reducescatter into another dtype": odd("reducescatter", "dtype of output", tensor=array(4, "float64")),
    "an alltoall of too few": odd("alltoall", "input", tensor=pieces(4, 4), error=INVALID),
    "an alltoall into too few": odd("alltoall", "output", pieces=pieces(4, 4), error=INVALID),
    "receive of more": pair("shape", some, array(8)),
    "receive of less": pair("shape", array(8), some),
    "receive of another dtype": pair("dtype", some, INTS),
    "a read-only target": odd("allreduce", "operand", tensor=read_only, error=errors.ReadOnlyError),
    "receive into read-only memory": pair("operand", some, read_only, error=errors.ReadOnlyError),
    "targets that overlap": odd("allgather", "operand", pieces=overlapping, error=errors.AliasError),
    "one target twice": odd("allgather", "operand", pieces=lambda: [some()] * WORLD, error=errors.AliasError),
    # of a plan the operand is named, of a call the argument
    "no tensor": odd("allreduce", "", tensor="text", error=errors.NotATensorError),
    "receive into no tensor": pair("", some, lambda: "text", error=errors.NotATensorError),
    "a reduce op without a meaning": odd(  # it is not what the others do, and numpy has no meaning for it
        "allreduce",
        "reduce op",
        all_give={"tensor": array(4, "complex64")},
        op="max",
        error=errors.RefusedError,
        no_plan=ONE_OP,
    ),
}
