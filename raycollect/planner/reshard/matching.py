"""Matches the holders and readers of each part of each tensor, and finds all faults of two layouts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import sub
from typing import NamedTuple

from raycollect.errors import Violation, wrong_layout
from raycollect.errors.text import listed
from raycollect.planner.boxes import Box, BoxIndex, Point, atoms, common, moved, volume, without, words
from raycollect.planner.layout import Layout, Region, Regions
from raycollect.planner.plan_cache import PlanCache
from raycollect.planner.reshard.request import Named, Reshard


class Alike(NamedTuple):
    """Ranks of a side where a box lies at one place."""

    shift: Point  # from a place in the global tensor to that in their local ones
    ranks: tuple[int, ...]


class BoxPiece(NamedTuple):
    """A box that travels whole: all of its holders have all of it, and all of its readers need all of it."""

    box: Box
    holders: tuple[tuple[Alike, ...], ...]  # for each addend (one, if it is no sum), the ranks that hold it
    readers: tuple[Alike, ...]  # a rank that needs the box at several places is in several


class Matched(NamedTuple):
    """The pieces of tensors of one form, and the boxes that no rank holds."""

    pieces: tuple[BoxPiece, ...]
    holes: tuple[tuple[Box, int, tuple[int, ...]], ...]  # (a box, its missing addend, its readers)


def matched(src: Regions, dst: Regions) -> Matched:
    """Matches the boxes of sources with those of targets, without empty ones."""
    result = _matched.find((src, dst))
    if result is None:
        result = _match(src, dst)
        _matched.add((src, dst), (), result)
    return result


_matched: PlanCache[Matched] = PlanCache(256, 64 << 20, lambda result: _PIECE_NBYTES * sum(map(len, result)))
_PIECE_NBYTES = 250


def _match(src: Regions, dst: Regions) -> Matched:
    held = atoms([region.bounds for region in src.rows])
    wanted = atoms([region.bounds for region in dst.rows])
    index = BoxIndex([box for box, _ in held])
    holders = [_by_part(src, places) for _, places in held]
    pieces, holes = [], []
    for box, places in wanted:
        rows = [dst.rows[at] for at in places]
        readers, ranks = _alike(rows), tuple(region.rank for region in rows)
        covered = 0
        covers = []
        for at in index.over(box):
            shared = common(box, held[at][0])
            if shared is None:
                continue
            covers.append(shared)
            covered += volume(shared)
            holes += [(shared, part, ranks) for part, some in enumerate(holders[at]) if not some]
            pieces.append(BoxPiece(shared, holders[at], readers))
        if covered < volume(box):
            holes += [(gap, -1, ranks) for gap in without(box, covers)]
    return Matched(tuple(pieces), tuple(holes))


def _by_part(regions: Regions, places: Sequence[int]) -> tuple[tuple[Alike, ...], ...]:
    by_part: list[list[Region]] = [[] for _ in range(regions.parts)]
    for at in places:
        by_part[regions.rows[at].part].append(regions.rows[at])
    return tuple(map(_alike, by_part))


def _alike(rows: Sequence[Region]) -> tuple[Alike, ...]:
    by_shift: dict[Point, list[int]] = {}
    for region in rows:
        by_shift.setdefault(tuple(map(sub, region.at, region.bounds[0])), []).append(region.rank)
    return tuple(Alike(shift, tuple(ranks)) for shift, ranks in by_shift.items())


def faults(reshard: Reshard) -> list[Violation]:
    """All faults of the layouts of a reshard, for any tensors; a reshard with faults is refused."""
    violations = [
        *_side_faults("src", reshard.src, reshard.src_ranks),
        *_side_faults("dst", reshard.dst, reshard.dst_ranks),
    ]
    src = dict(reshard.src)
    for name, taken in reshard.dst:
        given = src.get(name)
        if given is None:
            expected = f"a name of src: {listed(map(repr, src))}"
            violations.append(wrong_layout("dst", f"of {name!r}, which src does not have", expected))
        elif given.shape != taken.shape or (given.dtype != taken.dtype and not taken.converts):
            expected = f"{given.dtype}{list(given.shape)}, as in src"
            if given.shape == taken.shape:
                expected += "; or a layout that asks for it, by dtype= or astype()"
            violations.append(wrong_layout(_of("dst", name), f"{taken.dtype}{list(taken.shape)}", expected))
        elif given.dtype != taken.dtype and (expected := objection(given, taken)):
            violations.append(wrong_layout(_of("dst", name), f"{taken.dtype}, made of {given.dtype} of src", expected))
    return violations or list(_holes(reshard))


CONVERTED = ("float64", "float32", "float16", "bfloat16")


def objection(given: Layout, taken: Layout) -> str:
    """The expected dtypes, if a tensor can't be converted on its way; else an empty text."""
    if given.dtype not in CONVERTED or taken.dtype not in CONVERTED:
        return f"its dtype; what is converted is {', '.join(CONVERTED)}"
    if given.regions.parts > 1 and given.itemsize == taken.itemsize:
        return f"{given.dtype}, float32 or float64, as src is a partial sum"
    return ""


def _holes(reshard: Reshard) -> Iterator[Violation]:
    for form in reshard.forms:
        holes = matched(form.src, form.dst).holes
        names = reshard.names[form.first : form.first + form.count]
        for box, part, ranks in holes:
            which = f"addend {part + 1} of {form.src.parts} of {words(box)}" if part >= 0 else words(box)
            several = len(ranks) > 1
            who = f"rank{'s' * several} {listed(map(str, ranks))} of dst need{'s' * (not several)} it"
            for name in names:
                yield wrong_layout(_of("src", name), f"without {which}", f"it on some rank, because {who}")


def _side_faults(side: str, given: Named, ranks: Sequence[int]) -> Iterator[Violation]:
    if not given:
        yield wrong_layout(side, "empty", "the layout of at least one tensor")
    for name, layout in given:
        if layout.world_size != len(ranks):
            expected = f"{len(ranks)}, as many as there are {side}_refs"
            yield wrong_layout(f"number of ranks {_of(side, name)}", str(layout.world_size), expected)
        if side == "dst" and layout.regions.parts > 1:
            yield wrong_layout(_of(side, name), "a partial sum", "values: partial sums are for src only")
    yield from fused_faults(side, given, is_written=side == "dst")


def fused_faults(side: str, given: Named, *, is_written: bool) -> Iterator[Violation]:
    """The faults of local tensors that several regions share; if `is_written`, regions must not overlap."""
    keyed: dict[str, dict[str, Layout]] = {}
    for name, layout in given:
        keyed.setdefault(layout.key or name, {})[name] = layout
    checked = set[tuple[Regions, ...]]()
    for key, layouts in keyed.items():
        if len({(layout.dtype, len(layout.shape), layout.axes) for layout in layouts.values()}) > 1:
            expected = "tensors of one dtype, number and order of dimensions in one local tensor"
            yield wrong_layout(_of(side, key), f"shared by {listed(map(repr, layouts))}", expected)
        elif is_written and (tables := tuple(layout.regions for layout in layouts.values())) not in checked:
            checked.add(tables)
            for rank, (a, b) in _local_clashes(layouts):
                clash = f"written twice on rank {rank} of {side}: {a} and {b} overlap in the local tensor"
                yield wrong_layout(_of(side, key), clash, "a place of its own for each region")


def _local_clashes(layouts: Mapping[str, Layout]) -> Iterator[tuple[int, tuple[str, str]]]:
    if len(layouts) == 1 and all(
        len(some) == 1 for layout in layouts.values() for some in layout.regions.of_rank.values()
    ):
        return
    for rank in sorted({rank for layout in layouts.values() for rank in layout.regions.of_rank}):
        named = [(name, region) for name, lay in layouts.items() for region in lay.regions.of_rank.get(rank, ())]
        named = [(name, region) for name, region in named if region.volume]
        boxes = [moved(region.bounds, region.bounds[0], region.at) for _, region in named]
        clash = BoxIndex(boxes).clash()
        if clash is not None:
            a, b = (f"{words(named[at][1].bounds)} of {named[at][0]!r}" for at in clash)
            yield rank, (a, b)


def _of(side: str, name: str) -> str:
    return f"{side} of {name!r}" if name else side
