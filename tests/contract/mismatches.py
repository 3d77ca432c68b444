"""The mismatches of the contract: one table of calls in which one rank does not do what the others do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from raycollect import errors
from tests.contract.cases import WORLD, Call, Part

ODD = 1
"""The rank that differs; the two others agree."""

DRIVER, TORCH, PLAN = "driver", "torch", "plan"
"""Callers that don't hear of some mismatches.

A call of the driver has one operation, op and root for all ranks. Functions of torch refuse some tensors themselves.
A plan that is only explained knows shapes and dtypes, and does not look at memory.
"""

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """One collective that is refused.

    Attributes:
        most: What the ranks that agree do.
        odd: What rank `ODD` does.
        field: The field of the violation.
        error: The class of the error.
        first: What rank 0 does, where it is the sender or the root.
        idle: Whether rank 2 has no part in it.
        never: The callers it can't occur to.
    """

    most: Callable[[], Part]
    odd: Callable[[], Part]
    field: str
    error: type[errors.RefusedError] = errors.MismatchError
    first: Callable[[], Part] | None = field(default=None)
    idle: bool = False
    never: tuple[str, ...] = ()

    @property
    def call(self) -> Call:
        part = self.odd()
        if part.operation == "recv":
            return Call(operation="send", root=part.root, peer=ODD)
        return Call(operation=part.operation, op=part.op, root=part.root)

    def part(self, rank: int) -> Part:
        """The operands of a rank; made anew each time, always the same."""
        if rank == ODD:
            return self.odd()
        if rank == 0 and self.first is not None:
            return self.first()
        return Part(operation="") if self.idle else self.most()


def _array(count: int = 4, dtype: str = "float32", start: int = 1) -> Array:
    return np.arange(start, start + count).astype(dtype)


def _list(*counts: int) -> list[Array]:
    return [_array(count, start=10 * at) for at, count in enumerate(counts or (4,) * WORLD)]


def _read_only() -> Array:
    array = _array()
    array.flags.writeable = False
    return array


def _overlapping() -> list[Array]:
    whole = _array(4 + WORLD)
    return [whole[at : at + 4] for at in range(WORLD)]


_USUAL: dict[str, dict[str, Any]] = {
    **{name: {"tensor": _array} for name in ("allreduce", "reduce", "broadcast", "gather", "scatter", "scan")},
    **{name: {"tensor": _array, "pieces": _list} for name in ("allgather", "reducescatter")},
    "alltoall": {"tensor": _list, "pieces": _list},
    "barrier": {},
}
"""Operation -> the operands of a rank that is not the root; functions are called for a value."""


def _part(operation: str, *operands: dict[str, Any]) -> Callable[[], Part]:
    """An operation with its usual operands, less those given instead."""
    every = {name: value for one in (_USUAL.get(operation, {}), *operands) for name, value in one.items()}
    return lambda: Part(
        operation=operation, **{name: value() if callable(value) else value for name, value in every.items()}
    )


def _odd(
    operation: str,
    what: str,
    *,
    against: str = "",
    of_all: dict[str, Any] | None = None,
    of_root: dict[str, Any] | None = None,
    **others: Any,
) -> Mismatch:
    """A mismatch of an operation.

    Args:
        operation: The operation.
        what: The field of the violation.
        against: The operation of rank `ODD`, where it is another one.
        of_all: Unusual operands of all ranks.
        of_root: Operands of rank 0, the root, alone.
        others: Attributes of `Mismatch`; and what differs on rank `ODD`.
    """
    known = {name: others.pop(name) for name in ("error", "never") if name in others}
    common = of_all or {}
    return Mismatch(
        first=None if of_root is None else _part(operation, common, of_root),
        most=_part(operation, common),
        odd=_part(against, others) if against else _part(operation, common, others),
        field=what,
        **known,
    )


def _pair(what: str, sent: Callable[[], Any], taken: Callable[[], Any], **others: Any) -> Mismatch:
    """Rank 0 sends a tensor, and rank `ODD` receives into another."""
    send, receive = _part("send", {"tensor": sent, "root": ODD}), _part("recv", {"tensor": taken, "root": 0})
    return Mismatch(most=lambda: Part(operation=""), first=send, odd=receive, field=what, idle=True, **others)


def _of(*args: Any) -> Callable[[], Any]:
    return partial(_array, *args)


def _pieces(*counts: int) -> Callable[[], Any]:
    return partial(_list, *counts)


_INTS = _of(4, "int32")
_INVALID = errors.InvalidArgumentError
_MEMBERS = (DRIVER, TORCH)
_BY_TORCH = (TORCH,)  # torch's own functions refuse it, or have no such operand

MISMATCHES = {
    "count": _odd("allreduce", "shape", tensor=_of(8)),
    "shape": _odd("allreduce", "shape", tensor=lambda: _array().reshape(2, 2)),
    "dtype": _odd("allreduce", "dtype", tensor=_INTS),
    "count of a broadcast": _odd("broadcast", "shape", tensor=_of(8)),
    "dtype of a broadcast": _odd("broadcast", "dtype", of_all={"root": 2}, tensor=_INTS),
    "shape of a reduce": _odd("reduce", "shape", of_all={"root": 2}, tensor=_of(5)),
    "dtype of a reduce": _odd("reduce", "dtype", tensor=_of(4, "float64")),
    "count of a scan": _odd("scan", "shape", tensor=_of(5), never=_BY_TORCH),
    "dtype of an allgather": _odd("allgather", "dtype", tensor=_INTS, never=_BY_TORCH),
    "reduce op": _odd("allreduce", "reduce op", op="max", never=(DRIVER,)),
    "root": _odd("broadcast", "root", root=1, never=(DRIVER,)),
    "root of a reduce": _odd("reduce", "root", of_all={"root": 2}, root=1, never=(DRIVER,)),
    "allreduce against broadcast": _odd("allreduce", "op", against="broadcast", tensor=_array, never=(DRIVER,)),
    "allgather against barrier": _odd("allgather", "op", against="barrier", never=_MEMBERS),
    "a list against a tensor": _odd("allreduce", "structure", tensor=lambda: [_array()], never=_BY_TORCH),
    "a longer list": _odd(
        "allreduce",
        "tensor count",
        of_all={"tensor": lambda: [_array(), _array()]},
        tensor=lambda: [_array(), _array(), _array()],
        never=_BY_TORCH,
    ),
    "an allgather into too few": _odd("allgather", "output", pieces=_pieces(4, 4), error=_INVALID),
    "an item of the wrong size": _odd("allgather", "shape of output 2", pieces=_pieces(4, 4, 5)),
    "dtype of an item": _odd(
        "allgather", "dtype of output 1", pieces=lambda: [_array(), _INTS(), _array()], never=_BY_TORCH
    ),
    "an item of a reducescatter": _odd("reducescatter", "shape of input 2", pieces=_pieces(4, 4, 5)),
    "a reducescatter of too few": _odd("reducescatter", "input", pieces=_pieces(4, 4), error=_INVALID),
    "a reducescatter into more": _odd("reducescatter", "shape of output", tensor=_of(5)),
    "a reducescatter into another dtype": _odd(
        "reducescatter", "dtype of output", tensor=_of(4, "float64"), never=_BY_TORCH
    ),
    "a gather into too few": _odd("gather", "output", of_all={"root": ODD}, pieces=_pieces(4, 4), error=_INVALID),
    "a gather into the wrong size": _odd("gather", "shape of output 2", of_all={"root": ODD}, pieces=_pieces(4, 4, 5)),
    "dtype of a gather": _odd("gather", "dtype", of_root={"pieces": _list}, tensor=_INTS),
    "a scatter of too few": _odd("scatter", "input", of_all={"root": ODD}, pieces=_pieces(4, 4), error=_INVALID),
    "a scatter into less": _odd("scatter", "shape of output", of_root={"pieces": _list}, tensor=_of(3)),
    "dtype of a scatter": _odd("scatter", "dtype of output", of_root={"pieces": _list}, tensor=_INTS),
    "a piece of an alltoall": _odd("alltoall", "shape of output 2", pieces=_pieces(4, 4, 3)),
    "an alltoall of too few": _odd("alltoall", "input", tensor=_pieces(4, 4), error=_INVALID),
    "an alltoall into too few": _odd("alltoall", "output", pieces=_pieces(4, 4), error=_INVALID),
    "a root that is no rank": _odd("broadcast", "src_rank", root=7, error=_INVALID, never=_MEMBERS),
    "a root below zero": _odd("reduce", "dst_rank", root=-1, error=_INVALID, never=_MEMBERS),
    "a root that is text": _odd(
        "scatter", "src_rank", of_root={"pieces": _list}, root="1", error=_INVALID, never=_MEMBERS
    ),
    "a root that is a float": _odd("broadcast", "src_rank", root=0.0, error=_INVALID, never=_MEMBERS),
    "a reduce op that is none": _odd("allreduce", "op", op="mean", error=_INVALID, never=_MEMBERS),
    "one tensor that can't be split": _odd(
        "alltoall", "input", of_all={"tensor": _of(6), "pieces": _of(6)}, tensor=_of(7), error=_INVALID, never=_BY_TORCH
    ),
    "no tensors on the root": _odd(
        "scatter", "", of_all={"root": ODD}, of_root={}, pieces=None, error=errors.NotATensorError, never=_MEMBERS
    ),
    "receive of more": _pair("shape", _array, _of(8)),
    "receive of less": _pair("shape", _of(8), _array),
    "receive of another dtype": _pair("dtype", _array, _INTS),
    "a read-only target": _odd(
        "allreduce", "operand", tensor=_read_only, error=errors.ReadOnlyError, never=(TORCH, PLAN)
    ),
    "receive into read-only memory": _pair(
        "operand", _array, _read_only, error=errors.ReadOnlyError, never=(TORCH, PLAN)
    ),
    "targets that overlap": _odd("allgather", "operand", pieces=_overlapping, error=errors.AliasError, never=(PLAN,)),
    "one target twice": _odd(
        "allgather", "operand", pieces=lambda: [_array()] * WORLD, error=errors.AliasError, never=(PLAN,)
    ),
    # of a plan the operand is named, of a member's call the argument
    "no tensor": _odd("allreduce", "", tensor="text", error=errors.NotATensorError, never=_BY_TORCH),
    "receive into no tensor": _pair("", _array, lambda: "text", error=errors.NotATensorError, never=_BY_TORCH),
    "a reduce op without a meaning": _odd(  # numpy has none for it; nor is it the others' op
        "allreduce",
        "reduce op",
        of_all={"tensor": _of(4, "complex64")},
        op="max",
        error=errors.RefusedError,
        never=_MEMBERS,
    ),
}
