"""The layouts of torch's DTensors, from their placements.

The axes of the mesh cut the tensor one after the other, each the rest of the former. FSDP2 over tensor parallelism
cuts by the latter first, though its axis of the mesh is the last. The split factor of torch's `_StridedShard` gives the
order: it is the product of the axes that follow in the mesh and cut earlier. Any other factor
is taken literally: it cuts into so many parts, each of which is cut over the axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from math import prod

from msgspec.structs import replace

from raycollect.core.placement import UNKNOWN, Cut, Placement
from raycollect.errors import Violation, wrong_layout
from raycollect.errors.text import listed
from raycollect.planner.boxes import Point, chunk
from raycollect.planner.layout import ITEMSIZES, Layout, Region, Regions

_Run = tuple[int, int]

_EXPECTED = "Shard, _StridedShard, Replicate or Partial('sum'); or a layout in words for this tensor"


def fault_of(field: str, placement: Placement) -> Violation | None:
    """The reason why a DTensor has no layout, found without the parts on other ranks."""
    unknown = [cut.kind for cut in placement.cuts if cut.dim == UNKNOWN]
    if unknown:
        return wrong_layout(field, f"a DTensor with the placement {listed(unknown)}", _EXPECTED)
    if placement.dtype not in ITEMSIZES:
        return wrong_layout(field, f"a DTensor of {placement.dtype}", f"one of {', '.join(ITEMSIZES)}")
    return None


def layout_of(placement: Placement, order: Sequence[int] = ()) -> Layout:
    """The layout of a DTensor without faults.

    Args:
        placement: Its placement, on any rank.
        order: For each rank of the layout its place in the mesh; by default ranks have the order of torch's.
    """
    ranks = placement.ranks
    places = tuple(order) or tuple(sorted(range(len(ranks)), key=ranks.__getitem__))
    table = _regions(placement.shape, placement.mesh, placement.cuts, placement.order, places)
    return Layout(shape=placement.shape, dtype=placement.dtype, regions=table, said=_words(placement))


def layout_of_side(side: str, name: str, held: Sequence[Placement | None]) -> Layout | list[Violation]:
    """The layout of the DTensor of which each rank of a side holds a part, or its violations.

    Args:
        side: ``"src"`` or ``"dst"``.
        name: Of the tensor.
        held: The placement of each rank's part; None where it has none.
    """
    field = f"{side} of {name!r}" if name else side
    first = next(placement for placement in held if placement is not None)
    fault = fault_of(field, first)
    if fault is not None:
        return [fault]
    violations = []
    for rank, placement in enumerate(held):
        if placement is None:
            violations.append(
                wrong_layout(field, f"no DTensor on rank {rank} of {side}", "one on all of its ranks, or on none")
            )
        elif replace(placement, at=first.at) != first:
            expected = f"{_words(first)}, as on rank {held.index(first)}; or a layout in words for this tensor"
            violations.append(
                wrong_layout(field, f"a DTensor on {_words(placement)} on rank {rank} of {side}", expected)
            )
    places = [placement.at for placement in held if placement is not None]
    if not violations and sorted(places) != list(range(len(first.ranks))):
        expected = f"a mesh of the {len(held)} ranks that {side}_refs are, each once; or refs of all ranks of the mesh"
        violations.append(
            wrong_layout(field, f"a DTensor on {_words(first)}, of which there are places {places}", expected)
        )
    return violations or layout_of(first, places)


@lru_cache(maxsize=256)
def _regions(shape: Point, mesh: Point, cuts: tuple[Cut, ...], given: Point, places: Point) -> Regions:
    order = given or _cutting_order(cuts, mesh)
    if not given and order:
        cuts = tuple(replace(cut, factor=1) for cut in cuts)
    order = order or tuple(range(len(mesh)))
    sums = [axis for axis, cut in enumerate(cuts) if cut.kind == "Partial"]
    coordinates = list(product(*map(range, mesh)))
    rows = []
    for rank, place in enumerate(places):
        where = coordinates[place]
        part = 0
        for axis in sums:
            part = part * mesh[axis] + where[axis]
        lines = [
            _runs(shape[dim], [(cuts[a].factor, mesh[a], where[a]) for a in order if _does_cut(cuts[a], dim)])
            for dim in range(len(shape))
        ]
        for some in product(*lines):
            box, at = tuple(run for run, _ in some), tuple(begin for _, begin in some)
            rows.append(Region(rank=rank, box=box, at=at, part=part))
    return Regions(len(places), prod(mesh[axis] for axis in sums), tuple(rows))


def _does_cut(cut: Cut, dim: int) -> bool:
    return cut.kind in ("Shard", "_StridedShard") and cut.dim == dim


def _cutting_order(cuts: Sequence[Cut], mesh: Point) -> Point:
    """The order of the axes by the split factors; empty if the factors give none."""
    orders: dict[int, list[int]] = {}
    for axis in reversed(range(len(mesh))):
        cut = cuts[axis]
        if not _does_cut(cut, cut.dim):
            continue
        order = orders.setdefault(cut.dim, [])
        before = next((at for at in range(len(order) + 1) if prod(mesh[a] for a in order[:at]) == cut.factor), None)
        if before is None:
            return ()
        order.insert(before, axis)
    return tuple(axis for order in orders.values() for axis in order)


def _runs(size: int, cuts: Sequence[tuple[int, int, int]]) -> list[tuple[_Run, int]]:
    """The remaining runs of indices of a dimension, each with its begin in the local tensor."""
    runs = [(0, size)]
    for factor, count, at in cuts:
        length = sum(hi - lo for lo, hi in runs)
        picked = []
        for number in range(factor):
            lo, hi = chunk(0, length, factor, number)
            picked.append(chunk(lo, hi, count, at))
        runs = _joined([run for lo, hi in picked for run in _between(runs, lo, hi)])
    begin, placed = 0, []
    for lo, hi in runs or [(0, 0)]:
        placed.append(((lo, hi), begin))
        begin += hi - lo
    return placed


def _between(runs: Sequence[_Run], begin: int, end: int) -> list[_Run]:
    """The indices from the `begin`-th to before the `end`-th."""
    selected, passed = [], 0
    for lo, hi in runs:
        first, last = max(begin - passed, 0), min(end - passed, hi - lo)
        if first < last:
            selected.append((lo + first, lo + last))
        passed += hi - lo
    return selected


def _joined(runs: Sequence[_Run]) -> list[_Run]:
    joined: list[_Run] = []
    for lo, hi in runs:
        if joined and joined[-1][1] == lo:
            joined[-1] = joined[-1][0], hi
        else:
            joined.append((lo, hi))
    return joined


def _words(placement: Placement) -> str:
    cuts = ", ".join(_cut_words(cut) for cut in placement.cuts)
    if placement.order:
        cuts += f", cut by the axes {listed(placement.order)} in this order"
    mesh = f"{list(placement.mesh)} of ranks {listed(placement.ranks)}"
    return f"{placement.dtype}{list(placement.shape)} on mesh {mesh} as ({cuts})"


def _cut_words(cut: Cut) -> str:
    if cut.kind == "Shard":
        return f"Shard({cut.dim})"
    return f"_StridedShard({cut.dim}, split_factor={cut.factor})" if cut.kind == "_StridedShard" else f"{cut.kind}()"
