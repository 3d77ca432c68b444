"""Atoms: how tensors are cut into them, and where they lie on each rank.

The tensors of a publication are cut at the bounds of all boxes of the publisher and of the registered receivers, so
that a receiver's boxes consist of whole atoms. A receiver that registers after the version was put reads all atoms that
overlap its boxes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from math import prod

from raycollect.errors import Violation, wrong_layout
from raycollect.planner.boxes import (
    Box,
    BoxIndex,
    Point,
    atoms,
    common,
    extent,
    halved,
    is_inside,
    moved,
    volume,
)
from raycollect.planner.layout import ITEMSIZES, Layout, Region
from raycollect.planner.reshard.matching import fused_faults, objection
from raycollect.planner.reshard.request import local_tensors
from raycollect.weights.cut import Atom, VersionCut

MOST_NBYTES = 16 << 20
"""The most bytes of an atom: an atom with the wrong digest is read again, and an atom may lie in memory twice."""

SMALL_NBYTES, BUCKET_NBYTES = 64 << 10, 1 << 20
"""The most bytes of an atom that lies in a bucket, and of a bucket."""

FEWEST_MEMBERS, MOST_MEMBERS = 16, 512
"""The fewest atoms in a bucket, as a receiver reads all of them where one has changed; and the most, as they may have
to be read one by one."""

Layouts = Mapping[str, Layout]
"""Layouts by name of the global tensor; a single one has the name ``""``."""

_Sharers = frozenset[tuple[int, int]]
"""The ranks that have or need an atom: the number of the side, and the rank in it."""


def cut(src: Layouts, others: Iterable[Layouts], *, in_buckets: bool = False) -> VersionCut:
    """Cuts the tensors of a publication, in order of the names; with `in_buckets`, small atoms lie in buckets."""
    sides = [src, *others]
    pieces_of: dict[object, list[tuple[Box, _Sharers]]] = {}
    dtypes: dict[Atom, str] = {}
    small: dict[tuple[str, _Sharers], list[Atom]] = {}
    for name, layout in src.items():
        tables = [
            (number, side[name].regions)
            for number, side in enumerate(sides)
            if name in side and side[name].shape == layout.shape
        ]
        key = (layout.itemsize, *tables)
        if key not in pieces_of:
            every = [(number, region) for number, table in tables for region in table.rows]
            pieces_of[key] = [
                (piece, frozenset((every[at][0], every[at][1].rank) for at in owners))
                for box, owners in atoms([region.bounds for _, region in every])
                for piece in halved(box, -(-volume(box) * layout.itemsize // MOST_NBYTES))
            ]
        for box, sharers in pieces_of[key]:
            dtypes[name, box] = layout.dtype
            if in_buckets and volume(box) * layout.itemsize <= SMALL_NBYTES:
                small.setdefault((layout.dtype, sharers), []).append((name, box))
    return _in_buckets(dtypes, small.values(), src.keys()) if small else VersionCut(dtypes, {})


def _in_buckets(dtypes: Mapping[Atom, str], small: Iterable[Sequence[Atom]], names: Collection[str]) -> VersionCut:
    """Returns a cut in which atoms that may lie in one bucket do, each bucket in place of its first member."""
    numbers = (number for number in count() if f"bucket {number}" not in names)
    bucket_of: dict[Atom, Atom] = {}
    members: dict[Atom, tuple[Atom, ...]] = {}
    for same in small:
        nbytes = {(name, box): volume(box) * ITEMSIZES[dtypes[name, box]] for name, box in same}
        for some in batches(same, nbytes.__getitem__, BUCKET_NBYTES, MOST_MEMBERS):
            if len(some) >= FEWEST_MEMBERS:
                bucket = f"bucket {next(numbers)}", ((0,), (sum(volume(box) for _, box in some),))
                members[bucket] = tuple(some)
                bucket_of |= dict.fromkeys(some, bucket)
    return VersionCut({bucket_of.get(atom, atom): dtype for atom, dtype in dtypes.items()}, members)


def source_faults(src: Layouts) -> Iterator[Violation]:
    """Yields the reasons why a side can't be a publisher: addends, and elements that no rank has."""
    yield from fused_faults("layout", tuple(src.items()), is_written=False)
    for name, layout in src.items():
        if layout.regions.parts > 1:
            yield wrong_layout(f"layout of {name!r}", "a partial sum", "values: reduce it first")
        elif (held := sum(volume(box) for box, _ in atoms([region.bounds for region in layout.regions.rows]))) != prod(
            layout.shape
        ):
            yield wrong_layout(f"layout of {name!r}", f"{held} elements", f"all {prod(layout.shape)} of the tensor")


def target_faults(dst: Layouts) -> Iterator[Violation]:
    """Yields the reasons why a side can't be a receiver: addends, and elements that are written twice."""
    yield from fused_faults("layout", tuple(dst.items()), is_written=True)
    for name, layout in dst.items():
        if layout.regions.parts > 1:
            yield wrong_layout(f"layout of {name!r}", "a partial sum", "values: a receiver gets no addends")


def reader_faults(dst: Layouts, src: Layouts) -> Iterator[Violation]:
    """Yields the reasons why a publisher can't serve a receiver."""
    for name, layout in dst.items():
        if name not in src:
            yield wrong_layout(f"layout of {name!r}", "of a tensor that is not published", "one that is")
        elif layout.shape != src[name].shape:
            yield wrong_layout(f"layout of {name!r}", f"shape {list(layout.shape)}", f"{list(src[name].shape)}")
        elif layout.dtype != src[name].dtype and not layout.converts:
            expected = f"{src[name].dtype}, or a layout that asks for it (astype)"
            yield wrong_layout(f"layout of {name!r}", f"dtype {layout.dtype}", expected)
        elif layout.dtype != src[name].dtype and (expected := objection(src[name], layout)):
            actual = f"dtype {layout.dtype}, made of {src[name].dtype}"
            yield wrong_layout(f"layout of {name!r}", actual, expected)


@dataclass(frozen=True, slots=True)
class AtomPart:
    """A part of an atom in a rank's local tensors; of a bucket, a part of one of its members.

    Attributes:
        name: The global tensor.
        whole: The box of the atom, or of the member.
        box: That box, or the part of it that the rank has.
        at: Where `box` begins in the local tensor.
        size: Its extent in each dimension.
        lies: The elements of the member in the bucket; None: the atom is no bucket.
    """

    name: str
    whole: Box
    box: Box
    at: Point
    size: Point
    lies: slice | None = None


Parts = dict[Atom, tuple[AtomPart, ...]]
"""The atoms and buckets that lie on a rank, and where."""


def places(layouts: Layouts, rank: int, cut: VersionCut, *, whole: bool) -> Parts:
    """Returns where atoms and buckets lie on a rank; with `whole`, only atoms that lie there as one box.

    A bucket then has all of its members there as one box each.
    """
    parts = _places(layouts, rank, cut.parts(), whole=whole)
    if not cut.members:
        return parts
    result: Parts = {}
    for atom in cut.atoms:
        if atom not in cut.members:
            some = parts.get(atom, ())
        else:
            members = [
                [replace(part, lies=lies) for part in parts.get(member, ())]
                for member, lies in zip(cut.members[atom], cut.lies[atom], strict=True)
            ]
            some = () if whole and not all(members) else tuple(part for lying in members for part in lying)
        if some:
            result[atom] = some
    return result


def _places(layouts: Layouts, rank: int, among: Iterable[Atom], *, whole: bool) -> Parts:
    boxes: dict[str, list[Box]] = {}
    for name, box in among:
        boxes.setdefault(name, []).append(box)
    result: Parts = {}
    overlaps: dict[object, list[tuple[Box, Region]]] = {}
    for name, some in boxes.items():
        if name not in layouts:
            continue
        key = layouts[name].regions, tuple(some)
        if key not in overlaps:
            index = BoxIndex(some)
            regions = layouts[name].regions.of_rank.get(rank, ())
            overlaps[key] = [
                (some[at], region) for region in regions if region.volume for at in index.over(region.bounds)
            ]
        for box, region in overlaps[key]:
            part = common(box, region.bounds)
            assert part is not None
            if whole and (not is_inside(box, region.bounds) or (name, box) in result):
                continue
            lo, _ = moved(part, region.bounds[0], region.at)
            result[name, box] = (*result.get((name, box), ()), AtomPart(name, box, part, lo, extent(part)))
    return result


Piece = tuple[int, Point, Point]
"""Where elements lie in what a holder serves: the index of the array, their first one in it, and their extent."""


def served_places(layouts: Layouts, rank: int, cut: VersionCut) -> dict[Atom, tuple[Piece, ...]]:
    """Returns the atoms that a rank of the publisher serves.

    It serves copies of the tensors that have atoms of their own, in order, and then the buckets.
    """
    lying = held_places(layouts, rank, cut)
    tensors = sorted({pieces[0][0] for atom, pieces in lying.items() if atom not in cut.members})
    index = {tensor: at for at, tensor in enumerate(tensors)}
    buckets = {bucket: len(index) + at for at, bucket in enumerate(bucket for bucket in cut.members if bucket in lying)}
    return {
        atom: ((buckets[atom], *atom[1]),) if atom in buckets else ((index[pieces[0][0]], *pieces[0][1:]),)
        for atom, pieces in lying.items()
    }


def held_places(layouts: Layouts, rank: int, cut: VersionCut) -> dict[Atom, tuple[Piece, ...]]:
    """Returns the atoms that lie in a rank's tensors; of a bucket, where each of its members lies.

    Those of other element types than in the version are left out.
    """
    tensors = local_tensors(tuple(layouts.items())).get(rank, ())
    index = {tensor.key: at for at, tensor in enumerate(tensors)}
    return {
        atom: tuple((index[layouts[part.name].key or part.name], part.at, part.size) for part in parts)
        for atom, parts in places(layouts, rank, cut, whole=True).items()
        if all(layouts[part.name].dtype == cut.dtypes[atom[0]] for part in parts)
    }


def batches(
    some: Iterable[Atom],
    nbytes_of: Callable[[Atom], int],
    most_nbytes: int,
    most: int,
    boxes_of: Callable[[Atom], int] = lambda atom: 1,
) -> list[list[Atom]]:
    """Divides atoms into lists of at most so many bytes and boxes, but at least an atom."""
    result: list[list[Atom]] = []
    nbytes = boxes = 0
    for atom in some:
        size, more = nbytes_of(atom), boxes_of(atom)
        if not result or nbytes + size > most_nbytes or boxes + more > most:
            result.append([])
            nbytes = boxes = 0
        result[-1].append(atom)
        nbytes += size
        boxes += more
    return result
