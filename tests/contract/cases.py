"""The values of the contract: one generator of cases, with operands for each rank and what numpy makes of them."""

from __future__ import annotations

import functools
import operator
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from inspect import signature
from typing import Any

import ml_dtypes
import numpy as np

WORLD = 3

FOLDS: dict[str, Callable[[Any, Any], Any]] = {
    "sum": operator.add,
    "product": operator.mul,
    "min": np.minimum,
    "max": np.maximum,
    "avg": operator.add,
    "band": operator.and_,
    "bor": operator.or_,
    "bxor": operator.xor,
}
BITWISE = ("band", "bor", "bxor")

NARROW = ("bfloat16", "float8_e4m3fn", "float8_e5m2")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
DTYPES = ("bool", *INTEGERS, "float16", "float32", "float64", "complex64", "complex128", *NARROW)

REDUCTIONS = ("allreduce", "reduce", "reducescatter", "scan", "exscan")
PIECEWISE = ("allgather", "gather", "scatter", "reducescatter", "alltoall")
ROOTED = ("reduce", "broadcast", "gather", "scatter", "send")
OPERATIONS = (*REDUCTIONS, "broadcast", "allgather", "gather", "scatter", "alltoall", "send", "barrier")
MOVING = OPERATIONS[1:-1]
"""The operations with tensors, less allreduce."""

IN_LISTS = ("allgather", "gather", "alltoall")
"""Those whose outputs are tensor lists."""

AT_ROOT = ("reduce", "gather")
"""Those of which only the root has an output."""

OUTPUT_REFS = {
    "allgather": "tensor_list_refs",
    "reducescatter": "tensor_refs",
    "gather": "tensor_list_ref",
    "scatter": "tensor_refs",
    "alltoall": "tensor_list_out_refs",
}
"""Operation -> the driver's parameter of the outputs, which are made where it is None; the others have none."""

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, kw_only=True)
class Call:
    """What the driver asks for.

    Attributes:
        operation: The operation.
        op: The reduce op.
        root: The root, or the sender.
        peer: The receiver of a send.
        makes: Whether outputs are made rather than given.
    """

    operation: str
    op: str = "sum"
    root: int = 0
    peer: int = -1
    makes: bool = False

    @property
    def function(self) -> str:
        """The driver's function."""
        return {"send": "send_ref", "barrier": "barrier"}.get(self.operation, f"{self.operation}_refs")

    @property
    def sole(self) -> int | None:
        """The one rank with an output; None: all have one."""
        return self.peer if self.operation == "send" else self.root if self.operation in AT_ROOT else None

    def arguments(self, tensors: list[Any], lists: list[Any], actors: list[Any]) -> dict[str, Any]:
        """The values of the driver's parameters, by their names in any operation.

        Refs are given in another order than that of their ranks.
        """
        given, given_lists = [*tensors[1:], *tensors[:1]], [*lists[2:], *lists[:2]]
        values = {
            "tensor_refs": given,
            "tensor_list_refs": given_lists,
            "tensor_list_in_refs": given,
            "tensor_list_out_refs": given_lists,
            "tensor_list_ref": lists[self.root],
            "src_tensor_ref": tensors[self.root],
            "dst_tensor_ref": actors[self.peer] if self.makes else tensors[self.peer],
            "op": self.op,
            "inplace": not self.makes,
            "src_rank": self.root,
            "dst_rank": self.root,
        }
        return values | ({OUTPUT_REFS[self.operation]: None} if self.makes and self.operation in OUTPUT_REFS else {})

    def outputs(self, tensors: list[Any], lists: list[Any]) -> Any:
        """The refs that the driver's function returns where none are made: those of the outputs, by rank."""
        if self.operation == "barrier":
            return None
        found = lists if self.operation in IN_LISTS else tensors
        return found if self.sole is None else found[self.sole]


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one rank does.

    Attributes:
        operation: The operation; ``"recv"`` for the receiver of a send, ``""`` for a rank without a part in it.
        tensor: The tensor; for an alltoall, the pieces that are sent.
        pieces: The tensor list; for an alltoall, the pieces that are received.
        op: The reduce op.
        root: The root; for a send or receive, the other rank.
    """

    operation: str
    tensor: Any = None
    pieces: Any = None
    op: str = "sum"
    root: int = 0

    @property
    def arguments(self) -> dict[str, Any]:
        """The values of the members' parameters, by their names in any operation."""
        return {
            "tensor": self.tensor,
            "tensor_list": self.pieces,
            "tensor_list_in": self.tensor,
            "tensor_list_out": self.pieces,
            "op": self.op,
            "src_rank": self.root,
            "dst_rank": self.root,
        }


def called(function: Callable[..., Any], values: dict[str, Any]) -> Any:
    """Calls a function with those of the values that it has parameters for."""
    return function(**{name: values[name] for name in signature(function).parameters if name in values})


def leaves(value: Any) -> list[Array]:
    """The arrays of a value."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in leaves(item)]
    if hasattr(value, "data_ptr"):
        value = value.numpy()
    return [value] if isinstance(value, np.ndarray) else []


def dtype_of(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name) if name in NARROW else name)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One collective on valid operands.

    Attributes:
        operation: One of `OPERATIONS`.
        dtype: The dtype of all tensors.
        counts: The elements of each rank's piece; of a whole tensor the first number counts.
        op: The reduce op.
        root: The root, or the sender.
        layout: How the tensors lie in memory, one of `LAYOUTS`.
        makes: Whether the driver's call makes the outputs.
    """

    operation: str
    dtype: str = "float32"
    counts: tuple[int, ...] = (7, 7, 7)
    op: str = "sum"
    root: int = 0
    layout: str = "plain"
    makes: bool = False

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in vars(self).items() if value != vars(_USUAL)[name])

    @property
    def peer(self) -> int:
        return (self.root + 1) % WORLD

    @property
    def call(self) -> Call:
        return Call(operation=self.operation, op=self.op, root=self.root, peer=self.peer, makes=self.makes)

    def part(self, rank: int) -> Part:
        """The operands of a rank before the collective; made anew each time."""
        return self._part(rank, _given)

    def after(self, rank: int) -> Part:
        """The same operands afterwards."""
        return self._part(rank, _unchanged if self.makes else _expected)

    def made(self, rank: int) -> Any:
        """The output that is made for a rank; None for no output."""
        part = self._part(rank, _expected)
        if self.operation == "send":
            return part.tensor if rank == self.peer else None
        if self.operation in AT_ROOT and rank != self.root:
            return None
        return part.pieces if self.operation in IN_LISTS else part.tensor

    def _part(self, rank: int, values: Callable[[Case, int], tuple[Any, Any]]) -> Part:
        if self.operation == "send":
            if rank not in (self.root, self.peer):
                return Part(operation="")
            tensor, _ = values(self, rank)
            verb, other = ("send", self.peer) if rank == self.root else ("recv", self.root)
            return Part(operation=verb, tensor=self._lay(tensor), root=other)
        tensor, pieces = values(self, rank)
        whole = self._lay(tensor) if not isinstance(tensor, list) else self._list(tensor)
        return Part(operation=self.operation, tensor=whole, pieces=self._list(pieces), op=self.op, root=self.root)

    def _list(self, pieces: list[Array] | None) -> Any:
        if pieces is None:
            return None
        return np.stack(pieces) if self.layout == "one tensor" else [self._lay(one) for one in pieces]

    def _lay(self, values: Array | None) -> Any:
        return None if values is None else LAYOUTS[self.layout](values)


def _copied(made: Array, values: Array) -> Array:
    made[...] = values.reshape(made.shape)
    return made


def _read_only(values: Array) -> Array:
    made = values.copy()
    made.flags.writeable = False
    return made


def _in_torch(values: Array) -> Any:
    import torch

    return torch.from_numpy(values)


LAYOUTS: dict[str, Callable[[Array], Any]] = {
    "plain": lambda values: values,
    "one tensor": lambda values: values,
    "no dimensions": lambda values: values[:1].reshape(()),
    "strided": lambda values: _copied(np.zeros(2 * values.size, values.dtype)[::2], values),
    "reversed": lambda values: _copied(np.zeros(values.size, values.dtype)[::-1], values),
    "transposed": lambda values: _copied(np.zeros((values.size, 2), values.dtype).T, np.concatenate([values, values])),
    "read-only": _read_only,
    "big-endian": lambda values: values.astype(values.dtype.newbyteorder(">")),
    **({"in torch": _in_torch} if find_spec("torch") else {}),
    "nested": lambda values: {"weights": values, "others": [values[::-1].copy(), values[:2].copy()]},
}

_USUAL = Case(operation="")


def values(case: Case, rank: int, count: int, to: int = 0) -> Array:
    """Small integers, whose sums and products are exact in each dtype."""
    rng = np.random.default_rng([zlib.crc32(case.op.encode()), rank, to])
    return rng.integers(0, 3, count).astype(dtype_of(case.dtype))


def _blank(case: Case, count: int) -> Array:
    return np.full(count, 3).astype(dtype_of(case.dtype))  # no value has it, but of a bool


def _fold(case: Case, arrays: list[Array]) -> Array:
    folded = functools.reduce(FOLDS[case.op], arrays)
    return (folded / len(arrays) if case.op == "avg" else folded).astype(arrays[0].dtype)


def _given(case: Case, rank: int) -> tuple[Any, Any]:
    """What a rank gives, and where it takes."""
    counts, count = case.counts, case.counts[0]
    is_root = rank == case.root
    match case.operation:
        case "barrier":
            return None, None
        case "broadcast" | "send" if not is_root:
            return _blank(case, count), None
        case "allgather" | "gather":
            taken = [_blank(case, one) for one in counts] if case.operation == "allgather" or is_root else None
            return values(case, rank, counts[rank]), taken
        case "scatter":
            given = [values(case, rank, one, to) for to, one in enumerate(counts)] if is_root else None
            return _blank(case, counts[rank]), given
        case "reducescatter":
            return _blank(case, counts[rank]), [values(case, rank, one, to) for to, one in enumerate(counts)]
        case "alltoall":
            sizes = [counts[(rank + to) % WORLD] for to in range(WORLD)]
            return [values(case, rank, one, to) for to, one in enumerate(sizes)], [_blank(case, one) for one in sizes]
    return values(case, rank, count), None


def _expected(case: Case, rank: int) -> tuple[Any, Any]:
    """The same after the collective."""
    counts, count = case.counts, case.counts[0]
    tensor, pieces = _given(case, rank)
    match case.operation:
        case "allreduce":
            tensor = _fold(case, [values(case, of, count) for of in range(WORLD)])
        case "reduce" if rank == case.root:
            tensor = _fold(case, [values(case, of, count) for of in range(WORLD)])
        case "scan":
            tensor = _fold(case, [values(case, of, count) for of in range(rank + 1)])
        case "exscan" if rank:
            tensor = _fold(case, [values(case, of, count) for of in range(rank)])
        case "broadcast" | "send":
            tensor = values(case, case.root, count)
        case "allgather" | "gather" if pieces is not None:
            pieces = [values(case, of, one) for of, one in enumerate(counts)]
        case "scatter":
            tensor = values(case, case.root, counts[rank], rank)
        case "reducescatter":
            tensor = _fold(case, [values(case, of, counts[rank], rank) for of in range(WORLD)])
        case "alltoall":
            pieces = [values(case, of, counts[(of + rank) % WORLD], rank) for of in range(WORLD)]
    return tensor, pieces


def _unchanged(case: Case, rank: int) -> tuple[Any, Any]:
    return _given(case, rank)


def difference(case: Case, found: Any, expected: Any) -> str:
    """Says in what a value differs from the expected one; "" for in nothing."""
    ours, theirs = leaves(found), leaves(expected)
    if len(ours) != len(theirs):
        return f"{len(ours)} tensors, not {len(theirs)}"
    near = {"rtol": 0.15 if case.dtype in NARROW else 2e-3} if case.op == "avg" else {"rtol": 0.0}
    for at, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        if one.dtype != other.dtype or one.shape != other.shape:
            return f"tensor {at} is {one.dtype}{list(one.shape)}, not {other.dtype}{list(other.shape)}"
        wide = np.complex128 if one.dtype.kind == "c" else np.float64
        if not np.allclose(one.astype(wide), other.astype(wide), atol=0, **near):
            return f"tensor {at} is {one.reshape(-1)[:9]!s}, not {other.reshape(-1)[:9]!s}"
    return ""


# ---------------------------------------------------------------------------------------------- the generator


def has_meaning(op: str, dtype: str) -> bool:
    """Whether numpy has a meaning for a reduce op of a dtype."""
    kind = "f" if dtype in NARROW else np.dtype(dtype).kind
    if op in BITWISE:
        return kind in "biu"
    return kind not in {"avg": "biu", "min": "c", "max": "c"}.get(op, "")


def _dtypes() -> Iterator[Case]:
    """Each dtype in two operations, and each operation on three dtypes or more."""
    for at, dtype in enumerate(DTYPES):
        yield Case(operation="allreduce", dtype=dtype)
        yield Case(operation=MOVING[at % len(MOVING)], dtype=dtype, counts=(5, 3, 7))


def _reduce_ops() -> Iterator[Case]:
    for operation in REDUCTIONS:
        for op in FOLDS:
            yield Case(operation=operation, op=op, dtype="uint8" if op in BITWISE else "float32")
    for op in FOLDS:
        yield Case(operation="allreduce", op=op, dtype="bool" if op in BITWISE else "float16")


def _roots() -> Iterator[Case]:
    for operation in ROOTED:
        for root in range(WORLD):
            yield Case(operation=operation, root=root, counts=(3, 5, 9), dtype="int64")
    yield Case(operation="barrier")


def _sizes() -> Iterator[Case]:
    for operation in OPERATIONS[:-1]:
        for counts in ((1, 1, 1), (100_001, 1, 33_333)):
            yield Case(operation=operation, counts=counts, root=1)
    yield Case(operation="allreduce", counts=(1_000_001,) * WORLD)


def _empty() -> Iterator[Case]:
    for operation in OPERATIONS[:-1]:
        yield Case(operation=operation, counts=(0, 0, 0), root=2)
    for operation in PIECEWISE:
        for counts in ((3, 0, 5), (0, 4, 0)):
            yield Case(operation=operation, counts=counts, root=2)


def _layouts() -> Iterator[Case]:
    """Each layout in three operations, and each operation on two layouts or more."""
    for at, layout in enumerate(LAYOUTS):
        for operation in ("allreduce", MOVING[at], MOVING[(at + 4) % len(MOVING)]):
            if layout not in ("one tensor", "read-only"):
                yield Case(operation=operation, layout=layout, root=1)
    for operation in PIECEWISE:
        yield Case(operation=operation, layout="one tensor")


def _made() -> Iterator[Case]:
    for operation in OPERATIONS[:-1]:
        if operation != "broadcast":  # which makes nothing
            yield Case(operation=operation, makes=True, counts=(4, 0, 7), dtype="int32", root=1)
            yield Case(operation=operation, makes=True, layout="nested", root=2)
            yield Case(operation=operation, makes=True, layout="read-only")


def _every() -> Iterator[Case]:
    """The product; it takes long."""
    for operation in OPERATIONS[:-1]:
        for dtype in DTYPES:
            for op in FOLDS if operation in REDUCTIONS else ("sum",):
                for root in range(WORLD) if operation in ROOTED else (0,):
                    for counts in ((1, 1, 1), (5, 3, 7), (0, 2, 0), (1023, 4097, 1)):
                        if operation not in REDUCTIONS or has_meaning(op, dtype):
                            yield Case(operation=operation, dtype=dtype, op=op, root=root, counts=counts)


FAMILIES: dict[str, Callable[[], Iterator[Case]]] = {
    "dtypes": _dtypes,
    "reduce ops": _reduce_ops,
    "roots": _roots,
    "sizes": _sizes,
    "empty": _empty,
    "layouts": _layouts,
    "made": _made,
    "every": _every,
}
