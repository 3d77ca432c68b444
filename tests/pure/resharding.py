"""Reshards for tests: sides of random layouts, and what numpy says that they must hold afterwards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import compress, pairwise
from typing import Any

import numpy as np
from hypothesis import strategies as st

from raycollect.core.model import GroupSpec, OpKind
from raycollect.engine.packed_boxes import unfold
from raycollect.planner import Membership, Request, Reshard, Topology
from raycollect.planner.layout import Layout, Region, fused_layouts, layout
from raycollect.planner.reshard.request import local_tensors

Layouts = Mapping[str, Layout]

CONVERTED = ("float16", "float32", "float64")

UNTOUCHED = 99
"""What targets hold where no region is."""


def bound(src: Layouts, dst: Layouts, src_ranks: Sequence[int], dst_ranks: Sequence[int]) -> Reshard:
    """A reshard of the layouts, on these ranks."""
    return Reshard(tuple(src.items()), tuple(dst.items()), tuple(src_ranks), tuple(dst_ranks))


def request_of(reshard: Reshard, group: GroupSpec, *, made: bool = False, **arguments: Any) -> Request:
    """The request over sources that are numbers: 2 r is what rank r gives, 2 r + 1 what it takes into."""
    operands = tuple(
        (
            rank,
            2 * rank if rank in reshard.src_ranks else None,
            2 * rank + 1 if rank in reshard.dst_ranks and not made else None,
        )
        for rank in reshard.ranks
    )
    return Request(kind=OpKind.ALLTOALL, group=group, operands=operands, reshard=reshard, **arguments)


def membership_of(world: int, hosts: Sequence[int] = ()) -> Membership:
    """A group on some hosts."""
    spec = GroupSpec(name="group", group_id="id", backend="local", world_size=world)
    return Membership(
        spec=spec, participants=tuple(map(str, range(world))), topology=Topology(hosts=tuple(hosts) or (0,) * world)
    )


def whole_tensors(side: Layouts, seed: int) -> dict[str, Any]:
    """The global tensors, of small whole numbers: their sums are exact in any dtype and order."""
    rng = np.random.default_rng(seed)
    return {name: rng.integers(0, 9, one.shape).astype(one.dtype) for name, one in side.items()}


def held_by(side: Layouts, whole: Mapping[str, Any], seed: int = 0) -> dict[int, dict[str, Any]]:
    """What each rank of a side holds, where the global tensors are these; of a partial sum, an addend."""
    rng = np.random.default_rng(seed)
    held = empty_of(side)
    for name, one in side.items():
        parts = [rng.integers(0, 5, one.shape).astype(one.dtype) for _ in range(one.regions.parts - 1)]
        parts.append((whole[name] - sum(parts)).astype(one.dtype) if parts else whole[name])
        for region in one.regions.rows:
            _local(unfold(held[region.rank][one.key or name], one.axes), region)[...] = parts[region.part][
                _slices(region)
            ]
    return held


def empty_of(side: Layouts) -> dict[int, dict[str, Any]]:
    """Local tensors that hold nothing yet."""
    return {
        rank: {one.key: np.full(one.shape, UNTOUCHED, one.dtype) for one in tensors}
        for rank, tensors in local_tensors(tuple(side.items())).items()
    }


def _slices(region: Region) -> tuple[Any, ...]:
    return (*(slice(lo, hi) for lo, hi in region.box), ...)


def _local(tensor: Any, region: Region) -> Any:
    ends = [(at, at + hi - lo) for at, (lo, hi) in zip(region.at, region.box, strict=True)]
    return tensor[(*(slice(lo, hi) for lo, hi in ends), ...)]


# ------------------------------------------------------------------------------------------- random layouts


@st.composite
def meshes(draw: st.DrawFn, shape: Sequence[int], dtype: str, world: int, *, partial: bool) -> Layout:
    """A layout over a mesh of that many ranks: cut, replicated, or along an axis a partial sum."""
    sizes = draw(st.sampled_from([(a, world // a) for a in range(1, world + 1) if world % a == 0]))
    mesh = {"a": sizes[0], "b": sizes[1]}
    spec: list[Any] = [None] * len(shape)
    sums = []
    for axis in mesh:
        places = [*range(len(shape)), "replicate", *(["sum"] if partial else [])]
        place = draw(st.sampled_from(places))
        if place == "sum":
            sums.append(axis)
        elif place != "replicate":
            spec[place] = (*(spec[place] or ()), axis)
    return layout(shape, mesh=mesh, spec=spec, partial=sums, dtype=dtype)


@st.composite
def boxes(draw: st.DrawFn, shape: Sequence[int], dtype: str, world: int, *, partial: bool) -> Layout:
    """Uneven boxes that cover the tensor, behind each other in local tensors with gaps; some twice on a rank."""
    cells: list[tuple[tuple[int, int], ...]] = [()]
    for size in shape:
        inner = draw(st.lists(st.integers(0, size), max_size=2, unique=True))
        edges = [0, *sorted(inner), size]
        cells = [(*cell, (lo, hi)) for cell in cells for lo, hi in pairwise(edges) if lo < hi]
    parts = draw(st.integers(1, 2)) if partial else 1
    filled: dict[int, int] = {}
    rows = []
    for cell in cells:
        for part in range(parts):
            for rank in draw(st.lists(st.integers(0, world - 1), min_size=1, max_size=2)):
                at = (filled.get(rank, 0), *(0 for _ in cell[1:]))[: len(cell)]
                if cell:
                    filled[rank] = at[0] + cell[0][1] - cell[0][0] + draw(st.integers(0, 1))
                elif any(one.rank == rank for one in rows):
                    continue
                rows.append(Region(rank=rank, box=cell, at=at, part=part))
    for rank in range(world):
        if not any(one.rank == rank for one in rows):
            rows.append(Region(rank=rank, box=tuple((0, 0) for _ in shape), at=(0,) * len(shape)))
    held = {(one.box, one.part) for one in rows}
    if any((cell, part) not in held for cell in cells for part in range(parts)):
        return draw(meshes(shape, dtype, world, partial=partial))
    return Layout.of_regions(shape, rows, dtype=dtype)


@st.composite
def scenes(draw: st.DrawFn, most: int = 5) -> tuple[Layouts, Layouts, tuple[int, ...], tuple[int, ...]]:
    """Layouts of both sides, and the ranks of the group that they are: apart, the same, or some in common."""
    src_world, dst_world = draw(st.integers(1, most)), draw(st.integers(1, most))
    shared = draw(st.integers(0, min(src_world, dst_world)))
    total = src_world + dst_world - shared
    order = draw(st.permutations(range(total)))
    src_ranks, dst_ranks = tuple(order[:src_world]), tuple(order[src_world - shared :])
    src: dict[str, Layout] = {}
    dst: dict[str, Layout] = {}
    for at in range(draw(st.integers(1, 3))):
        shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
        dtype = draw(st.sampled_from(["float32", "int16", "float64", "uint8", "float16"]))
        wanted = draw(st.sampled_from([dtype, *(CONVERTED if dtype in CONVERTED else ())]))
        for side, world, partial, held in ((src, src_world, True, dtype), (dst, dst_world, False, wanted)):
            kind = draw(st.sampled_from([meshes, meshes, boxes]))
            side[f"t{at}"] = draw(kind(shape, held, world, partial=partial and dtype != "uint8"))
    for side in (src, dst):
        first = side["t0"]
        alike = [one.dtype == first.dtype and len(one.shape) == len(first.shape) for one in side.values()]
        some = dict(compress(side.items(), alike))
        if len(some) > 1 and draw(st.booleans()):
            side.update(fused_layouts("fused", some, draw(st.integers(0, len(first.shape) - 1))))
    return src, dst, src_ranks, dst_ranks
