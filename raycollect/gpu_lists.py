"""Lists with tensors of each GPU of a rank: what is wrong with one, and in which form the ranks compare them. Pure.

A *row* has one tensor of each GPU. *Lists* have for each GPU a list with a tensor on it for each GPU of each rank, in
the order of the ranks, and of the GPUs of a rank. All tensors of a rank are of one shape and dtype.

What the ranks compare is what they bring to the GPU of the group, where the kernels work: its structure tells how many
GPUs a rank has, so that the door refuses different numbers of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from raycollect.model import PIECES, TENSOR, OpKind, Structure, TensorInfo

__all__ = [
    "Fault",
    "Held",
    "are_lists",
    "by_gpu",
    "by_rank",
    "carried",
    "fault_of",
    "gpus_of",
    "lists_fault",
    "made",
    "off_gpu_fault",
    "place_fault",
    "place_of",
    "row_fault",
    "unlike_fault",
    "whole",
]

Held = tuple[Structure, tuple[TensorInfo, ...]]
"""A value: how it is made, and its tensors in order."""

_CUDA = "cuda:"
_TENSORS = "tensors on GPUs"
_ROW = "a list of tensors, one of each GPU"


class Fault(NamedTuple):
    """What is wrong, as violations have it.

    Attributes:
        kind: The kind of the violation.
        field: What is wrong.
        found: What was found.
        expected: What would have been right.
    """

    kind: str
    field: str
    found: str
    expected: str


# ---------------------------------------------------------------------------------------------- what is wrong


def off_gpu_fault(name: str, infos: Sequence[TensorInfo]) -> Fault | None:
    """Whether a tensor is on no GPU."""
    away = next((one.device for one in infos if not one.device.startswith(_CUDA)), "")
    return Fault("unsupported", f"device of {name}", away, _TENSORS) if away else None


def unlike_fault(name: str, infos: Sequence[TensorInfo]) -> Fault | None:
    """Whether tensors differ in shape or dtype."""
    for field, look in _ALIKE.items():
        values = list(dict.fromkeys(map(look, infos)))
        if len(values) > 1:
            return Fault("mismatch", f"{field} of {name}", ", ".join(values), "the same of all")
    return None


_ALIKE: dict[str, Callable[[TensorInfo], str]] = {
    "shape": lambda info: str(list(info.shape)),
    "dtype": lambda info: info.dtype,
}
"""What is the same of all tensors of a rank."""


def row_fault(name: str, row: Sequence[TensorInfo]) -> Fault | None:
    """What is wrong with tensors that should be one of each GPU."""
    fault = off_gpu_fault(name, row)
    if fault is not None:
        return fault
    devices = [one.device for one in row]
    if len(set(devices)) < len(devices):
        return Fault("argument", f"devices of {name}", ", ".join(devices), "each tensor on another GPU")
    return unlike_fault(name, row)


def lists_fault(
    name: str, lists: Sequence[Sequence[TensorInfo]], row: Sequence[TensorInfo], world: int
) -> Fault | None:
    """What is wrong with lists that should go with a row.

    Args:
        name: What they are called.
        lists: The lists.
        row: A row that is as it should be.
        world: How many ranks there are.
    """
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
            return Fault("argument", f"devices of {one}", ", ".join(sorted(devices)), own.device)
        fault = unlike_fault(one, [own, *tensors])
        if fault is not None:
            return fault
    return None


def place_of(kind: OpKind, infos: Sequence[TensorInfo], index: int) -> int:
    """The place in a row of the tensor that an index means: of that GPU for a send, else at that place; -1: none."""
    if kind is OpKind.SEND:
        return next((at for at, one in enumerate(infos) if one.device == f"{_CUDA}{index}"), -1)
    return index if 0 <= index < len(infos) else -1


def place_fault(kind: OpKind, name: str, infos: Sequence[TensorInfo], index: int) -> Fault | None:
    """Whether there is no such tensor in a row."""
    if place_of(kind, infos, index) >= 0:
        return None
    if kind is OpKind.SEND:
        there = ", ".join(one.device.removeprefix(_CUDA) for one in infos)
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
    """What is wrong with a value that a rank gives, or takes into.

    Args:
        kind: The operation. For a send, one tensor is a row as well.
        held: The value.
        world: How many ranks there are.
        gives: Whether the rank gives it; else it takes into it.
        named: The tensors of a row that the operation names: (what the index is called, the index).
        beside: What the rank gives, which is as it should be; for what it takes into.
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


# ---------------------------------------------------------------------------------------------- what is compared


def whole(count: int, more: str = "") -> Structure:
    """One tensor, of all of a rank's GPUs; `more` is what else has to be the same on all ranks."""
    return Structure("dict", (f"tensor of {count} GPUs{more}",), (TENSOR,))


def by_gpu(count: int) -> Structure:
    """A tensor of each of a rank's GPUs."""
    return Structure("dict", tuple(f"GPU {at}" for at in range(count)), (TENSOR,) * count)


def by_rank(world: int, count: int) -> Structure:
    """The same for each rank."""
    return Structure("list", (), (by_gpu(count),) * world)


def are_lists(kind: OpKind, *, gives: bool) -> bool:
    """Whether what a rank gives, or takes into, are lists; else it is a row."""
    return PIECES.get(kind, (False, False))[0 if gives else 1]


def gpus_of(infos: Sequence[TensorInfo]) -> int:
    """How many GPUs a rank has, of a row or of lists."""
    return len({one.device for one in infos})


def carried(kind: OpKind, infos: Sequence[TensorInfo], world: int, *, gives: bool, home: str = "cuda") -> Held:
    """What a rank brings to the GPU of the group: its structure and its tensors.

    Args:
        kind: The operation.
        infos: The tensors of a row or of lists that are as they should be.
        world: How many ranks there are.
        gives: Whether the rank gives it; else it takes into it.
        home: The GPU of the group.
    """
    count = gpus_of(infos)
    if kind is OpKind.SEND:
        structure = TENSOR
    elif kind not in PIECES:
        structure = whole(count)
    else:
        structure = by_rank(world, count) if are_lists(kind, gives=gives) else by_gpu(count)
    return structure, (replace(infos[0], device=home),) * structure.count


def made(kind: OpKind, infos: Sequence[TensorInfo], world: int) -> Held:
    """What a rank takes into where nothing was given for that, on the same GPUs.

    Args:
        kind: An operation in pieces.
        infos: The tensors of the row or of the lists that it gives; these are as they should be.
        world: How many ranks there are.
    """
    firsts = tuple({one.device: one for one in infos}.values())
    row = Structure("list", (), (TENSOR,) * len(firsts))
    if not are_lists(kind, gives=False):
        return row, firsts
    each = Structure("list", (), row.items * world)
    structure = Structure("list", (), (each,) * len(firsts))
    return structure, tuple(one for one in firsts for _ in range(each.count))
