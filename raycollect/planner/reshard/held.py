"""What a rank of a reshard holds, beside what its layouts say."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

from raycollect.core.model import TENSOR, Structure, TensorInfo
from raycollect.errors.text import listed
from raycollect.planner.reshard.request import LocalTensor

Fault = tuple[str, str, str]
"""(what is wrong, what was found, what the layout says)."""


def faults_of(structure: Structure, infos: Sequence[TensorInfo], tensors: Sequence[LocalTensor]) -> list[Fault]:
    """All that is wrong with what a rank holds; `tensors` is what it should hold."""
    names = tuple(one.key for one in tensors)
    if names == ("",):
        if structure != TENSOR:
            return [("value", str(structure), "a tensor")]
        return list(_unlike([("", infos[0], tensors[0])]))
    if structure.kind != "dict" or any(item != TENSOR for item in structure.items):
        return [("value", str(structure), f"a dict of tensors: {listed(map(repr, names))}")]
    held = dict(zip(structure.names, infos, strict=True))
    found = [
        ("dict", f"without {name!r}", "a tensor of that name, as the layout says") for name in names if name not in held
    ]
    strange = [name for name in held if name not in names]
    found += [("dict", f"with {name!r}", "only names that have a layout") for name in strange]
    return [*found, *_unlike([(one.key, held[one.key], one) for one in tensors if one.key in held])]


def _unlike(pairs: Sequence[tuple[str, TensorInfo, LocalTensor]]) -> Iterator[Fault]:
    for name, info, one in pairs:
        of = f" of {name!r}" if name else ""
        if info.shape != one.shape:
            yield f"shape{of}", str(list(info.shape)), f"{list(one.shape)}, as the layout says"
        if info.dtype != one.dtype:
            yield f"dtype{of}", info.dtype, f"{one.dtype}, as the layout says"


def made_of(tensors: Sequence[LocalTensor], library: str = "numpy") -> tuple[Structure, tuple[TensorInfo, ...]]:
    """What is made for a target that has no tensors yet."""
    infos = tuple(
        TensorInfo(shape=one.shape, dtype=one.dtype, itemsize=one.itemsize, library=library) for one in tensors
    )
    names = tuple(one.key for one in tensors)
    return (TENSOR if names == ("",) else Structure("dict", names, (TENSOR,) * len(names))), infos


@lru_cache(maxsize=64)
def places_of(structure: Structure, tensors: tuple[LocalTensor, ...]) -> tuple[int, ...]:
    """For each local tensor its place among the tensors of a value that has no faults."""
    if structure.kind == "tensor":
        return (0,)
    at = {name: place for place, name in enumerate(structure.names)}
    return tuple(at[one.key] for one in tensors)
