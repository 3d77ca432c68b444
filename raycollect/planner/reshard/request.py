"""A request of a reshard: the layouts and ranks of both sides, and the tensors that each rank must hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from math import prod

import msgpack

from raycollect.core.codec import Wire
from raycollect.core.model import TENSOR, Structure, TensorInfo
from raycollect.errors.text import listed
from raycollect.planner.boxes import Point
from raycollect.planner.layout import ITEMSIZES, Axes, Layout, Regions, folded

Named = tuple[tuple[str, Layout], ...]
"""Layouts by name of the global tensor, in order of the names."""


@dataclass(frozen=True, slots=True, eq=False)
class Form:
    """Tensors with the same regions on both sides, which travel together. Each is one object of its reshard."""

    src: Regions
    dst: Regions
    itemsize: int  # of the elements that travel
    first: int  # the place of the first of its names in `Reshard.names`
    count: int  # the number of its names, which are consecutive


@dataclass(frozen=True, eq=False)
class Reshard:
    """Two layouts, bound to the ranks of a group. Equal where all layouts and ranks are.

    Attributes:
        src: The layouts of the sources. A single tensor has the name ``""``.
        dst: The layouts of the targets.
        src_ranks: The rank in the group of each rank of the sources.
        dst_ranks: The same of the targets.
    """

    src: Named
    dst: Named
    src_ranks: tuple[int, ...]
    dst_ranks: tuple[int, ...]

    @cached_property
    def signature(self) -> bytes:
        """A digest of all of it."""
        names = [[name for name, _ in side] for side in (self.src, self.dst)]
        digest = blake2b(msgpack.packb((self.src_ranks, self.dst_ranks, names)), digest_size=16)
        digest.update(b"".join([layout.signature for side in (self.src, self.dst) for _, layout in side]))
        return digest.digest()

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that take part, ascending."""
        return tuple(sorted({*self.src_ranks, *self.dst_ranks}))

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the tensors that move, those of one form together."""
        return self._sorted[0]

    @cached_property
    def forms(self) -> tuple[Form, ...]:
        """The forms, in the order of `names`."""
        return self._sorted[1]

    @cached_property
    def dtypes(self) -> tuple[str, ...]:
        """The element type in which each of `names` travels."""
        src, dst = dict(self.src), dict(self.dst)
        return tuple(travelling(src[name], dst[name]) for name in self.names)

    @cached_property
    def _sorted(self) -> tuple[tuple[str, ...], tuple[Form, ...]]:
        sources = dict(self.src)
        groups: dict[tuple[Regions, Regions, int], list[str]] = {}
        for name, taken in self.dst:
            if name in sources:
                itemsize = ITEMSIZES[travelling(sources[name], taken)]
                groups.setdefault((sources[name].regions, taken.regions, itemsize), []).append(name)
        names: list[str] = []
        forms = []
        for (src, dst, itemsize), some in groups.items():
            forms.append(Form(src, dst, itemsize, len(names), len(some)))
            names += some
        return tuple(names), tuple(forms)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Reshard) and self.signature == other.signature)

    def __hash__(self) -> int:
        return hash(self.signature)


def travelling(src: Layout, dst: Layout) -> str:
    """The element type in which a tensor travels: the narrower of both; addends of sums as they are.

    Received boxes are passed on without a conversion, which could change them.
    """
    return src.dtype if src.regions.parts > 1 or src.itemsize < dst.itemsize else dst.dtype


class LocalTensor(Wire, frozen=True, kw_only=True):
    """A tensor that a rank must hold."""

    shape: Point
    dtype: str
    itemsize: int
    is_whole: bool  # whether its regions cover all of it
    axes: Axes = ()  # see `Layout.axes`
    key: str  # its name in the dict of the rank's tensors; empty: the rank holds this one alone


def local_tensors(side: Named) -> dict[int, tuple[LocalTensor, ...]]:
    """The tensors that each rank of a side must hold, by rank; ranks with equal tensors share one object."""
    keyed: dict[str, list[Layout]] = {}
    for name, layout in side:
        keyed.setdefault(layout.key or name, []).append(layout)
    kinds: dict[tuple[_Lying, ...], list[str]] = {}  # keys of the same regions
    for key, layouts in keyed.items():
        kinds.setdefault(tuple((layout.regions, layout.dtype, layout.axes) for layout in layouts), []).append(key)
    shared: dict[tuple[object, ...], tuple[LocalTensor, ...]] = {}
    by_rank = {}
    for rank in sorted({rank for _, layout in side for rank in layout.regions.of_rank}):
        held = tuple(_local(tables, rank) for tables in kinds)
        if held not in shared:
            tensor_of = {
                key: LocalTensor(
                    key=key,
                    shape=local[0],
                    dtype=tables[0][1],
                    itemsize=ITEMSIZES[tables[0][1]],
                    is_whole=local[1],
                    axes=tables[0][2],
                )
                for (tables, keys), local in zip(kinds.items(), held, strict=True)
                if local is not None
                for key in keys
            }
            shared[held] = tuple(tensor_of[key] for key in keyed if key in tensor_of)
        by_rank[rank] = shared[held]
    return by_rank


_Lying = tuple[Regions, str, Axes]


def _local(tables: Sequence[_Lying], rank: int) -> tuple[Point, bool] | None:
    """The shape of a local tensor, and whether its regions cover all of it."""
    shapes = [shape for regions, *_ in tables if (shape := regions.local_shapes.get(rank)) is not None]
    if not shapes:
        return None
    shape = folded(tables[0][2], tuple(max(sizes) for sizes in zip(*shapes, strict=True)))
    filled = sum(region.volume for regions, *_ in tables for region in regions.of_rank.get(rank, ()))
    return shape, filled == prod(shape)


Fault = tuple[str, str, str]
"""(the wrong property, its value, the expected value)."""


def faults_of(structure: Structure, infos: Sequence[TensorInfo], tensors: Sequence[LocalTensor]) -> list[Fault]:
    """All faults of the value that a rank holds; `tensors` are the expected ones."""
    names = dict.fromkeys(tensor.key for tensor in tensors)
    if tuple(names) == ("",):
        if structure != TENSOR:
            return [("value", str(structure), "a tensor")]
        return list(_unlike([("", infos[0], tensors[0])]))
    if structure.kind != "dict" or any(item != TENSOR for item in structure.items):
        return [("value", str(structure), f"a dict of tensors: {listed(map(repr, names))}")]
    held = dict(zip(structure.names, infos, strict=True))
    faults = [
        ("dict", f"without {name!r}", "a tensor of that name, as the layout says") for name in names if name not in held
    ]
    strange = [name for name in held if name not in names]
    faults += [("dict", f"with {name!r}", "only names that have a layout") for name in strange]
    return [*faults, *_unlike([(tensor.key, held[tensor.key], tensor) for tensor in tensors if tensor.key in held])]


def _unlike(pairs: Sequence[tuple[str, TensorInfo, LocalTensor]]) -> Iterator[Fault]:
    for name, info, tensor in pairs:
        of = f" of {name!r}" if name else ""
        if info.shape != tensor.shape:
            yield f"shape{of}", str(list(info.shape)), f"{list(tensor.shape)}, as the layout says"
        if info.dtype != tensor.dtype:
            yield f"dtype{of}", info.dtype, f"{tensor.dtype}, as the layout says"


def made_of(tensors: Sequence[LocalTensor], library: str = "numpy") -> tuple[Structure, tuple[TensorInfo, ...]]:
    """The new tensors of a target that has none yet."""
    infos = tuple(
        TensorInfo(shape=tensor.shape, dtype=tensor.dtype, itemsize=tensor.itemsize, library=library)
        for tensor in tensors
    )
    names = tuple(tensor.key for tensor in tensors)
    return (TENSOR if names == ("",) else Structure("dict", names, (TENSOR,) * len(names))), infos


def tensor_indices(structure: Structure, tensors: tuple[LocalTensor, ...]) -> tuple[int, ...]:
    """For each local tensor its index among the tensors of a value that has no faults."""
    if structure.kind == "tensor":
        return (0,)
    at = {name: index for index, name in enumerate(structure.names)}
    return tuple(at[tensor.key] for tensor in tensors)
