"""Layouts: which rank holds which box of a global tensor, and where in its local tensor that box lies.

A *region* is one box on one rank. All descriptions of layouts become regions, the only input of the reshard planner.
Several ranks may hold one box (replicas), boxes may differ in size or be empty, one rank may have several regions of a
tensor, and several tensors may lie in one local tensor (a fused QKV). Of a partial sum, each rank holds one addend.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from hashlib import blake2b
from itertools import product
from math import prod
from typing import Any, NoReturn

import msgpack

from raycollect.core.codec import Codec
from raycollect.errors import ProtocolError
from raycollect.errors.text import is_unicode, listed, shown
from raycollect.planner.boxes import Box, Point, chunk, extent, words
from raycollect.planner.layout_arguments import (
    ITEMSIZES,
    MOST_RANKS,
    axes_of,
    check_named,
    dtype_name,
    items_of,
    mesh_of,
    refuse,
    shape_of,
    whole,
)

__all__ = ["ITEMSIZES", "Axes", "Layout", "Region", "Regions", "fused_layouts", "layout"]

Axes = tuple[tuple[tuple[int, int], ...], ...]
"""For each dimension of a global tensor the dimensions of the local one that together make it, the slowest first: (the
dimension, its size; 0: as large as it is). A transposed tensor, and a slot of each expert, lie so. Empty: dimension by
dimension."""

_DEFAULT = "float32"
_SHOWN = 16  # how many regions a printed layout lists


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """One box of a global tensor, on one rank.

    Attributes:
        rank: The rank that holds it, counted over its side of a reshard.
        box: For each dimension of the global tensor the first index, and the one behind the last.
        at: Where the box begins in the rank's local tensor.
        part: Which addend of a partial sum it is; 0 where it is the value itself.
    """

    rank: int
    box: tuple[tuple[int, int], ...]
    at: tuple[int, ...]
    part: int = 0
    bounds: Box = field(init=False, repr=False, compare=False)  # the first place, and the one behind the last

    def __post_init__(self) -> None:
        try:
            box = tuple((whole(lo), whole(hi)) for lo, hi in self.box)
            plain = whole(self.rank, MOST_RANKS - 1), box, tuple(map(whole, self.at)), whole(self.part, MOST_RANKS - 1)
        except (TypeError, ValueError):
            self._refuse()
        if len(plain[2]) != len(box) or any(lo > hi for lo, hi in box):
            self._refuse()
        bounds = tuple(lo for lo, _ in box), tuple(hi for _, hi in box)
        for name, value in zip(("rank", "box", "at", "part", "bounds"), (*plain, bounds), strict=True):
            object.__setattr__(self, name, value)

    def _refuse(self) -> NoReturn:
        names = ("rank", "box", "at", "part")
        refuse("region", ", ".join(f"{name} {shown(getattr(self, name))}" for name in names))

    @property
    def volume(self) -> int:
        """The number of elements."""
        return prod(hi - lo for lo, hi in self.box)


@dataclass(frozen=True, eq=False)
class Regions:
    """The regions of one form of tensor; many tensors share it. Equal where all regions are."""

    world_size: int
    parts: int  # how many addends a partial sum has; 1: values
    rows: tuple[Region, ...] = field(repr=False)  # ascending by rank

    @cached_property
    def signature(self) -> bytes:
        """A digest of all of it."""
        rows = [(region.rank, region.box, region.at, region.part) for region in self.rows]
        return blake2b(msgpack.packb((self.world_size, self.parts, rows)), digest_size=16).digest()

    @cached_property
    def of_rank(self) -> dict[int, list[Region]]:
        """Rank -> its regions; ranks that have none are left out."""
        by_rank: dict[int, list[Region]] = {}
        for region in self.rows:
            by_rank.setdefault(region.rank, []).append(region)
        return by_rank

    @cached_property
    def local_shapes(self) -> dict[int, Point]:
        """Rank -> the shape of the smallest local tensor that holds its regions."""
        shapes: dict[int, Point] = {}
        for region in self.rows:
            ends = tuple(at + hi - lo for at, (lo, hi) in zip(region.at, region.box, strict=True))
            shapes[region.rank] = tuple(map(max, shapes.get(region.rank, ends), ends))
        return shapes

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Regions) and self.signature == other.signature)

    def __hash__(self) -> int:
        return hash(self.signature)


@dataclass(frozen=True, kw_only=True, eq=False)
class Layout:
    """How a global tensor lies on the ranks of one side of a reshard; see `layout` and `fused_layouts`.

    Attributes:
        shape: Of the global tensor.
        dtype: numpy's name of the element type: ``"float32"``.
        regions: The boxes of each rank.
        key: The local tensor that it lies in, by its name in the dict of a rank's tensors; empty: that of the tensor.
        axes: Which dimensions of the local tensor make those in which the regions lie.
        converts: Whether a target asks for its dtype, so that sources of another one are converted.
        said: Its source, for people.
    """

    shape: tuple[int, ...]
    dtype: str
    regions: Regions
    key: str = ""
    axes: Axes = ()
    converts: bool = False
    said: str = ""

    def __post_init__(self) -> None:
        if self.axes and len(self.axes) != len(self.shape):
            refuse("axes", self.axes, f"the local dimensions of each of {len(self.shape)}")
        if self.dtype not in ITEMSIZES:
            refuse("dtype", shown(self.dtype), f"one of {', '.join(ITEMSIZES)}")
        _check_fit(self.shape, self.regions)

    @classmethod
    def of_regions(
        cls, shape: Sequence[int], regions: Sequence[Region], *, dtype: Any = None, world_size: int | None = None
    ) -> Layout:
        """The layout with these regions, where no mesh describes it: strided heads, experts, uneven boxes.

        The number of ranks is `world_size`; None: one more than the highest rank that has a region. The number of
        addends is one more than the highest. `dtype` is as in `layout`.

        Raises:
            InvalidArgumentError: A region is not in the tensor, `regions` is empty, or `world_size` is too small.
        """
        given = items_of("regions", regions)
        if not given or not all(isinstance(region, Region) for region in given):
            refuse("regions", regions)
        rows = tuple(sorted(given, key=lambda region: (region.rank, region.box, region.at, region.part)))
        parts = 1 + max(region.part for region in rows)
        least = 1 + rows[-1].rank
        try:
            ranks = least if world_size is None else whole(world_size)
        except (TypeError, ValueError):
            ranks = -1
        if ranks < least:
            refuse("world_size", shown(world_size), f"at least {least}, as rank {least - 1} has a region")
        table = Regions(ranks, parts, rows)
        return cls(shape=shape_of(shape), regions=table, said=f"{len(rows)} regions", **_dtype_fields(dtype))

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.regions.world_size

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return ITEMSIZES[self.dtype]

    @cached_property
    def signature(self) -> bytes:
        """A digest: equal for equal layouts."""
        head: bytes = msgpack.packb((self.shape, self.dtype, self.key, self.axes, self.converts))
        return blake2b(head + self.regions.signature, digest_size=16).digest()

    def local_shape(self, rank: int) -> tuple[int, ...] | None:
        """The shape of a rank's local tensor, if no other tensor lies in it; None if the rank has none."""
        shape = self.regions.local_shapes.get(rank)
        return None if shape is None else folded(self.axes, shape)

    def astype(self, dtype: Any) -> Layout:
        """The same with another dtype, which a target asks for: as with `dtype` of `layout`."""
        return replace(self, **_dtype_fields(dtype))

    def to_bytes(self) -> bytes:
        """The layout as msgpack; the inverse of `from_bytes`."""
        rows = [(region.rank, region.box, region.at, region.part) for region in self.regions.rows]
        regions = self.regions.world_size, self.regions.parts, rows
        return _LAYOUTS.encode((self.shape, self.dtype, regions, self.key, self.axes, self.converts, self.said))

    @classmethod
    def from_bytes(cls, data: bytes) -> Layout:
        """Reads the bytes of `to_bytes`.

        Raises:
            InvalidArgumentError: The bytes are no layout.
        """
        if not isinstance(data, bytes):
            refuse("layout", data, "what Layout.to_bytes wrote")
        try:
            shape, dtype, (world_size, parts, rows), key, axes, converts, said = _LAYOUTS.decode(data)
        except ProtocolError as exc:
            refuse("layout", f"unreadable ({exc.detail})", "what Layout.to_bytes wrote")
        regions = tuple(Region(rank=rank, box=box, at=at, part=part) for rank, box, at, part in rows)
        table = Regions(world_size, parts, regions)
        return cls(shape=shape, dtype=dtype, regions=table, key=key, axes=axes, converts=converts, said=said)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Layout) and self.signature == other.signature)

    def __hash__(self) -> int:
        return hash(self.signature)

    def __repr__(self) -> str:
        where = f" in {self.key!r}" if self.key else ""
        return f"<Layout {self.dtype}{list(self.shape)} over {self.world_size} ranks{where}: {self.said}>"

    def __str__(self) -> str:
        rows, parts = self.regions.rows, self.regions.parts
        lines = [repr(self)]
        for region in rows[:_SHOWN]:
            addend = f", addend {region.part + 1} of {parts}" if parts > 1 else ""
            lo, hi = region.bounds
            local = words((region.at, tuple(at + size for at, size in zip(region.at, extent((lo, hi)), strict=True))))
            lines.append(f"  rank {region.rank}: {words((lo, hi))} at {local} of its tensor{addend}")
        if len(rows) > _SHOWN:
            lines.append(f"  ... and {len(rows) - _SHOWN} more regions")
        return "\n".join(lines)


_Row = tuple[int, tuple[tuple[int, int], ...], tuple[int, ...], int]  # a region: rank, box, at, part
_LAYOUTS = Codec[Any](tuple[Point, str, tuple[int, int, tuple[_Row, ...]], str, Axes, bool, str], "layout", version=4)


def unfolded(axes: Axes, shape: Point) -> Point:
    """The shape of a local tensor with the dimensions in which the regions lie."""
    return tuple(prod(shape[d] for d, _ in group) for group in axes) if axes else shape


def folded(axes: Axes, shape: Point) -> Point:
    """The shape of a local tensor in which the regions need this one."""
    if not axes:
        return shape
    sizes: dict[int, int] = {}
    for group, size in zip(axes, shape, strict=True):
        inner = prod(length for _, length in group[1:])
        sizes |= {d: length or -(-size // inner) for d, length in group}
    return tuple(sizes[d] for d in sorted(sizes))


def layout(
    shape: Sequence[int],
    *,
    mesh: Mapping[str, int],
    spec: Sequence[str | Sequence[str] | None] = (),
    partial: str | Sequence[str] = (),
    dtype: Any = None,
) -> Layout:
    """Describes the layout of a global tensor on a mesh of ranks, by names of axes as in JAX and torch's device mesh.

    ``layout([8, 4], mesh={"dp": 2, "tp": 4}, spec=("tp", None))`` cuts the first dimension over ``tp`` and keeps a
    replica on each rank of ``dp``. A dimension that its axes do not divide is cut as by `torch.chunk`: the last ranks
    have less, or nothing.

    Args:
        shape: Of the global tensor.
        mesh: Axis -> its size. Ranks count through it with the last axis fastest.
        spec: For each dimension the axis that cuts it, several axes (the first one slowest), or None; dimensions that
            are left out are whole. Along axes that are named nowhere the ranks have replicas.
        partial: Axes along which each rank holds an addend; the value is their sum. For sources only.
        dtype: Of the elements: a name, or a numpy or torch dtype; by default float32. If a target has one, sources
            of another dtype are converted: both are float64, float32, float16 or bfloat16.

    Returns:
        The layout, for any number of tensors of this shape.

    Raises:
        InvalidArgumentError: An axis is unknown or used twice, or a number or dtype makes no sense.
    """
    axes = mesh_of(mesh)
    cuts = tuple(() if axes_named is None else axes_of("spec", axes_named) for axes_named in items_of("spec", spec))
    sums = axes_of("partial", partial)
    extents = shape_of(shape)
    if len(cuts) > len(extents):
        refuse("spec", f"{len(cuts)} dimensions", f"at most {len(extents)}, as the shape {shown(list(extents))} has")
    used = [*(axis for cut in cuts for axis in cut), *sums]
    for axis in used:
        if axis not in mesh:
            refuse("spec", f"axis {shown(axis)}", f"an axis of the mesh: {listed(map(repr, mesh))}")
        if used.count(axis) > 1:
            refuse("spec", f"axis {shown(axis)} twice", "each axis for one dimension, or for the partial sum")
    cuts += ((),) * (len(extents) - len(cuts))
    table = _of_mesh(extents, axes, cuts, sums)
    return Layout(shape=extents, regions=table, said=_mesh_words(axes, cuts, sums), **_dtype_fields(dtype))


def fused_layouts(key: str, layouts: Mapping[str, Layout], dim: int = 0) -> dict[str, Layout]:
    """Lays several tensors one behind the other into one local tensor, as a fused QKV has them.

    Each rank's local tensor, named `key`, holds its box of each of them in this order along dimension `dim`.

    Args:
        key: The name of the local tensor.
        layouts: Name of a global tensor -> its layout, all of one dtype, number of ranks and of dimensions.
        dim: The dimension along which they lie behind each other.

    Returns:
        Name -> its layout in the fused tensor; to be merged into the dict of all layouts.

    Raises:
        InvalidArgumentError: The layouts do not fit each other.
    """
    check_named("fused_layouts", "layouts", layouts, Layout)
    every = list(layouts.values())
    if not isinstance(key, str) or not key or not is_unicode(key):
        refuse("key", shown(key), "the name of a local tensor", op="fused_layouts")
    kinds = {(each.dtype, each.world_size, len(each.shape)) for each in every}
    if len(kinds) != 1 or any(each.key or each.axes for each in every):
        actual = f"{len(every)} of {len(kinds)} kinds"
        refuse("layouts", actual, "layouts of one dtype, rank count and dimensions", op="fused_layouts")
    if not isinstance(dim, int) or not 0 <= dim < len(every[0].shape):
        expected = f"a dimension of the tensors, from 0 to {len(every[0].shape) - 1}"
        refuse("dim", dim, expected, op="fused_layouts")
    tables = _stacked(tuple(each.regions for each in every), dim)
    return {
        name: replace(each, regions=table, key=key, said=f"{each.said}, fused along dimension {dim}")
        for (name, each), table in zip(layouts.items(), tables, strict=True)
    }


@lru_cache(maxsize=256)
def _of_mesh(
    shape: Point, mesh: tuple[tuple[str, int], ...], cuts: tuple[tuple[str, ...], ...], sums: tuple[str, ...]
) -> Regions:
    names = [axis for axis, _ in mesh]
    sizes = dict(mesh)
    at = (0,) * len(shape)
    rows = []
    for rank, place in enumerate(product(*(range(size) for _, size in mesh))):
        where = dict(zip(names, place, strict=True))
        box = tuple(
            chunk(0, size, prod(sizes[axis] for axis in cut), _index(cut, where, sizes))
            for size, cut in zip(shape, cuts, strict=True)
        )
        rows.append(Region(rank=rank, box=box, at=at, part=_index(sums, where, sizes)))
    return Regions(len(rows), prod(sizes[axis] for axis in sums), tuple(rows))


def _index(axes: Sequence[str], where: Mapping[str, int], sizes: Mapping[str, int]) -> int:
    at = 0
    for axis in axes:
        at = at * sizes[axis] + where[axis]
    return at


@lru_cache(maxsize=256)
def _stacked(tables: tuple[Regions, ...], dim: int) -> tuple[Regions, ...]:
    filled: dict[int, int] = {}  # rank -> how far its local tensor is filled
    stacked = []
    for table in tables:
        rows = tuple(
            replace(region, at=(*region.at[:dim], region.at[dim] + filled.get(region.rank, 0), *region.at[dim + 1 :]))
            for region in table.rows
        )
        for rank, shape in table.local_shapes.items():
            filled[rank] = filled.get(rank, 0) + shape[dim]
        stacked.append(Regions(table.world_size, table.parts, rows))
    return tuple(stacked)


@lru_cache(maxsize=256)
def _check_fit(shape: Point, regions: Regions) -> None:
    for region in regions.rows:
        if len(region.box) != len(shape) or any(hi > size for (_, hi), size in zip(region.box, shape, strict=True)):
            refuse("region", f"{words(region.bounds)} of rank {region.rank}", f"a box in the shape {list(shape)}")
        if region.rank >= regions.world_size or region.part >= regions.parts:
            refuse(
                "region", f"addend {region.part} of rank {region.rank}", f"below {regions.parts}, {regions.world_size}"
            )


def _dtype_fields(dtype: Any) -> dict[str, Any]:
    return {"dtype": _DEFAULT if dtype is None else dtype_name(dtype), "converts": dtype is not None}


def _mesh_words(mesh: Sequence[tuple[str, int]], cuts: Sequence[Sequence[str]], sums: Sequence[str]) -> str:
    axes = ", ".join(f"{axis}={size}" for axis, size in mesh)
    spec = ", ".join("None" if not cut else "+".join(cut) for cut in cuts)
    return f"mesh {axes}, spec ({spec})" + (f", partial over {'+'.join(sums)}" if sums else "")
