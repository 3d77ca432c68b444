"""Lists with tensors of each GPU of a rank: what is wrong with one, and in which form the ranks compare them. Pure.

A *row* has one tensor of each GPU. *Lists* have, for each GPU, a list with a tensor on it for each GPU of each rank, in
the order of the ranks and of the GPUs of a rank. All tensors of a rank have one shape and dtype.

Ranks compare what they bring to the group's GPU, where the kernels run. Its structure tells how many GPUs a rank has,
so that the agreement refuses different numbers of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from raycollect.core.model import TENSOR, Structure, TensorInfo
from raycollect.errors.text import listed

BACKEND = "nccl"
"""The backend whose groups may have several GPUs per process."""

_CUDA = "cuda:"
_TENSORS = "tensors on GPUs"


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


def whole(count: int, more: str = "") -> Structure:
    """One tensor for all of a rank's GPUs; `more` is what else has to be equal on all ranks."""
    return Structure("dict", (f"tensor of {count} GPUs{more}",), (TENSOR,))


def by_gpu(count: int) -> Structure:
    """A tensor of each of a rank's GPUs."""
    return Structure("dict", tuple(f"GPU {at}" for at in range(count)), (TENSOR,) * count)


def by_rank(world: int, count: int) -> Structure:
    """The same for each rank."""
    return Structure("list", (), (by_gpu(count),) * world)
