"""Atoms: the parts of tensors that are read and verified one by one.

The tensors of a publication are cut at the bounds of all boxes of the publisher and of the registered receivers, so
that a receiver's boxes consist of whole atoms. A receiver that registers after the version was put reads all atoms that
overlap its boxes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
    words,
)
from raycollect.planner.layout import Layout, Region
from raycollect.planner.reshard.matching import fused_faults, objection
from raycollect.planner.reshard.request import local_tensors
from raycollect.weights.protocol import Atom

MOST_NBYTES = 16 << 20
"""The most bytes of an atom: an atom with the wrong digest is read again, and an atom may lie in memory twice."""

Layouts = Mapping[str, Layout]
"""Layouts by name of the global tensor; a single one has the name ``""``."""


def cut(src: Layouts, others: Iterable[Layouts]) -> tuple[Atom, ...]:
    """Returns the atoms of a publication, in order of the names."""
    readers = list(others)
    boxes_of: dict[object, list[Box]] = {}
    result = []
    for name, layout in src.items():
        tables = [
            layout.regions,
            *(reader[name].regions for reader in readers if name in reader and reader[name].shape == layout.shape),
        ]
        key = (layout.itemsize, *dict.fromkeys(tables))
        if key not in boxes_of:
            every = [region.bounds for table in tables for region in table.rows]
            pieces = (halved(box, -(-volume(box) * layout.itemsize // MOST_NBYTES)) for box, _ in atoms(every))
            boxes_of[key] = [piece for some in pieces for piece in some]
        result += [(name, box) for box in boxes_of[key]]
    return tuple(result)


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
    """A part of an atom in a rank's local tensors.

    Attributes:
        name: The global tensor.
        box: The box of the atom, or the part of it that the rank has.
        at: Where the box begins in the local tensor.
        size: Its extent in each dimension.
    """

    name: str
    box: Box
    at: Point
    size: Point


def places(layouts: Layouts, rank: int, among: Sequence[Atom], *, whole: bool) -> dict[Atom, tuple[AtomPart, ...]]:
    """Returns where atoms lie on a rank; with `whole`, only atoms that lie there as one box."""
    boxes: dict[str, list[Box]] = {}
    for name, box in among:
        boxes.setdefault(name, []).append(box)
    result: dict[Atom, tuple[AtomPart, ...]] = {}
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
            result[name, box] = (*result.get((name, box), ()), AtomPart(name, part, lo, extent(part)))
    return result


def held_places(layouts: Layouts, rank: int, among: Sequence[Atom]) -> dict[Atom, tuple[int, Point]]:
    """Returns the atoms that a rank has: the index of the local tensor, and where the atom begins in it."""
    tensors = local_tensors(tuple(layouts.items())).get(rank, ())
    index = {tensor.key: at for at, tensor in enumerate(tensors)}
    return {
        atom: (index[layouts[atom[0]].key or atom[0]], part.at)
        for atom, (part,) in places(layouts, rank, among, whole=True).items()
    }


def batches(some: Iterable[Atom], layouts: Layouts, most_nbytes: int, most: int) -> list[list[Atom]]:
    """Divides atoms into lists of at most so many bytes, but at least an atom, and at most so many atoms."""
    result: list[list[Atom]] = []
    nbytes = 0
    for atom in some:
        size = volume(atom[1]) * layouts[atom[0]].itemsize
        if not result or nbytes + size > most_nbytes or len(result[-1]) == most:
            result.append([])
            nbytes = 0
        result[-1].append(atom)
        nbytes += size
    return result


def shown(atom: Atom) -> str:
    """Returns an atom as text."""
    name, box = atom
    return f"{name!r}{words(box)}"
