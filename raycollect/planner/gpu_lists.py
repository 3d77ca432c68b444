"""Lists with tensors of each GPU of a rank: what is wrong with one, and in which form the ranks compare them. Pure.

A *row* has one tensor of each GPU. *Lists* have, for each GPU, a list with a tensor on it for each GPU of each rank, in
the order of the ranks and of the GPUs of a rank. All tensors of a rank have one shape and dtype.

Ranks compare what they bring to the group's GPU, where the kernels run. Its structure tells how many GPUs a rank has,
so that the agreement refuses different numbers of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from raycollect.core.model import PIECES, TENSOR, OpKind, Structure, TensorInfo
from raycollect.errors.text import listed

Held = tuple[Structure, tuple[TensorInfo, ...]]
"""A value: its structure, and its tensors in order."""

_CUDA = "cuda:"
_TENSORS = "tensors on GPUs"
_ROW = "a list of tensors, one of each GPU"


class Fault(NamedTuple):
    """What is wrong; see `Violation`."""

    kind: str
    field: str
    found: str
    expected: str


def off_gpu_fault(name: str, infos: Sequence[TensorInfo]) -> Fault | None:
    """The fault of tensors of which one is on no GPU."""
    away = next((one.device for one in infos if not one.device.startswith(_CUDA)), "")
    return Fault("unsupported", f"device of {name}", away, _TENSORS) if away else None


def unlike_fault(name: str, infos: Sequence[TensorInfo]) -> Fault | None:
    """The fault of tensors that differ in shape or dtype."""
    shapes, dtypes = [str(list(one.shape)) for one in infos], [one.dtype for one in infos]
    for field, all_values in (("shape", shapes), ("dtype", dtypes)):
        values = list(dict.fromkeys(all_values))
        if len(values) > 1:
            return Fault("mismatch", f"{field} of {name}", listed(values), "the same of all")
    return None


def row_fault(name: str, row: Sequence[TensorInfo]) -> Fault | None:
    """The fault of a row: not on GPUs, two on one GPU, or different shapes or dtypes."""
    fault = off_gpu_fault(name, row)
    if fault is not None:
        return fault
    devices = [one.device for one in row]
    if len(set(devices)) < len(devices):
        return Fault("argument", f"placement of {name}", listed(devices), "each tensor on another GPU")
    return unlike_fault(name, row)


def lists_fault(
    name: str, lists: Sequence[Sequence[TensorInfo]], row: Sequence[TensorInfo], world: int
) -> Fault | None:
    """The fault of lists that have to match a valid row."""
    count = len(row)
    if len(lists) != count:
        return Fault("argument", name, f"{len(lists)} lists", f"{count} lists, one for each GPU")
    for at, (tensors, own) in enumerate(zip(lists, row, strict=True)):
        one = f"{name}[{at}]"
        if len(tensors) != world * count:
            expected = f"{world * count}, one for each of {count} GPUs of {world} ranks"
            return Fault("argument", one, f"{len(tensors)} tensors", expected)
        devices = {info.device for info in tensors} - {own.device}
        if devices:
            return Fault("argument", f"placement of {one}", listed(sorted(devices)), own.device)
        fault = unlike_fault(one, [own, *tensors])
        if fault is not None:
            return fault
    return None


def place_of(kind: OpKind, infos: Sequence[TensorInfo], index: int) -> int:
    """The place in a row of the tensor that an index names: by its GPU for a send, else by its place; -1: none."""
    if kind is OpKind.SEND:
        return next((at for at, one in enumerate(infos) if one.device == f"{_CUDA}{index}"), -1)
    return index if 0 <= index < len(infos) else -1


def place_fault(kind: OpKind, name: str, infos: Sequence[TensorInfo], index: int) -> Fault | None:
    """The fault of an index that names no tensor of a row."""
    if place_of(kind, infos, index) >= 0:
        return None
    if kind is OpKind.SEND:
        there = listed(one.device.removeprefix(_CUDA) for one in infos)
        return Fault("argument", "gpu index", str(index), f"a GPU of which there is a tensor: {there}")
    return Fault("argument", name, str(index), f"one of 0 to {len(infos) - 1}")


def fault_of(
    kind: OpKind,
    held: Held,
    world: int,
    *,
    gives: bool,
    named: Sequence[tuple[str, int]] = (),
    beside: Held | None = None,
) -> Fault | None:
    """The fault of a value (`held`) that a rank gives, or takes into. For a send, one tensor is a row as well.

    `named` are the tensors of a row that the operation names: (what the index is called, the index). `beside`, for a
    value that the rank takes into, is what it gives, which is valid.
    """
    name = "input" if gives else "output"
    fault = _lists_fault(name, held, world) if are_lists(kind, gives=gives) else _row_fault(kind, name, held)
    for what, index in named:
        fault = fault or place_fault(kind, what, held[1], index)
    if fault is not None or gives or beside is None:
        return fault
    (_, row), (structure, infos) = (held, beside) if are_lists(kind, gives=True) else (beside, held)
    return lists_fault(name, structure.build(infos), row, world)


def _row_fault(kind: OpKind, name: str, held: Held) -> Fault | None:
    structure, infos = held
    items = structure.items if structure.kind in ("list", "tuple") else ()
    if structure == TENSOR and kind is OpKind.SEND:
        return off_gpu_fault(name, infos)
    if not items or {*items} != {TENSOR}:
        return Fault("argument", name, str(structure), _ROW)
    return row_fault(name, infos)


def _lists_fault(name: str, held: Held, world: int) -> Fault | None:
    structure, infos = held
    items = structure.items if structure.kind in ("list", "tuple") else ()
    if not items or not all(one.kind in ("list", "tuple") and {*one.items} == {TENSOR} for one in items):
        return Fault("argument", name, str(structure), "a list of tensors for each GPU")
    lists = structure.build(infos)
    firsts = [one[0] for one in lists]
    return off_gpu_fault(name, infos) or row_fault(name, firsts) or lists_fault(name, lists, firsts, world)


def whole(count: int, more: str = "") -> Structure:
    """One tensor for all of a rank's GPUs; `more` is what else has to be equal on all ranks."""
    return Structure("dict", (f"tensor of {count} GPUs{more}",), (TENSOR,))


def by_gpu(count: int) -> Structure:
    """A tensor of each of a rank's GPUs."""
    return Structure("dict", tuple(f"GPU {at}" for at in range(count)), (TENSOR,) * count)


def by_rank(world: int, count: int) -> Structure:
    """The same for each rank."""
    return Structure("list", (), (by_gpu(count),) * world)


def are_lists(kind: OpKind, *, gives: bool) -> bool:
    """Whether the operand that a rank gives, or takes into, is lists; else it is a row."""
    return PIECES.get(kind, (False, False))[0 if gives else 1]


def gpus_of(infos: Sequence[TensorInfo]) -> int:
    """How many GPUs a row or lists cover."""
    return len({one.device for one in infos})


def carried(kind: OpKind, infos: Sequence[TensorInfo], world: int, *, gives: bool, home: str = "cuda") -> Held:
    """What a rank brings to the group's GPU (`home`) from valid tensors: structure and tensors."""
    count = gpus_of(infos)
    if kind is OpKind.SEND:
        structure = TENSOR
    elif kind not in PIECES:
        structure = whole(count)
    else:
        structure = by_rank(world, count) if are_lists(kind, gives=gives) else by_gpu(count)
    return structure, (replace(infos[0], device=home),) * structure.count


def made(kind: OpKind, infos: Sequence[TensorInfo], world: int) -> Held:
    """What a rank takes into where no output was given, on the GPUs of what it gives; for an operation in pieces."""
    firsts = tuple({one.device: one for one in infos}.values())
    row = Structure("list", (), (TENSOR,) * len(firsts))
    if not are_lists(kind, gives=False):
        return row, firsts
    each = Structure("list", (), row.items * world)
    structure = Structure("list", (), (each,) * len(firsts))
    return structure, tuple(one for one in firsts for _ in range(each.count))
