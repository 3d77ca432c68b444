"""`join_layouts`: the layouts that each rank of a side has recorded for itself, as layouts of the side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from raycollect.errors import Violation, refusal, wrong_layout
from raycollect.planner.layout import Layout, Regions
from raycollect.planner.layout_arguments import check_named, refuse

__all__ = ["join_layouts"]


def join_layouts(ranks: Sequence[Mapping[str, Layout]]) -> dict[str, Layout]:
    """Joins layouts that each rank has recorded for itself (`record_layout`).

    Args:
        ranks: The layouts that each rank of a side has recorded, in rank order. A rank may lack tensors of others.

    Returns:
        Name -> its layout over all of these ranks.

    Raises:
        InvalidArgumentError: `ranks` is no list of dicts of layouts.
        LayoutError: Ranks have recorded different global tensors by one name; lists all such tensors.
    """
    if not isinstance(ranks, Sequence):
        refuse("ranks", ranks, "a list of dicts of Layouts", op="join_layouts")
    for some in ranks:
        check_named("join_layouts", "ranks", some, Layout)
    firsts: dict[str, tuple[int, Layout]] = {}
    wrong: list[Violation] = []
    for rank, some in enumerate(ranks):
        for name, layout in some.items():
            first, like = firsts.setdefault(name, (rank, layout))
            if layout.world_size != 1:
                expected = "what a rank has recorded for itself"
                wrong.append(wrong_layout(f"layout of {name!r}", f"over {layout.world_size} ranks", expected, rank))
            elif _kind(layout) != _kind(like):
                expected = f"{_words(like)}, as on rank {first}"
                wrong.append(wrong_layout(f"layout of {name!r}", _words(layout), expected, rank))
    if wrong or not firsts:
        wrong = wrong or [wrong_layout("ranks", "empty", "layouts of each rank")]
        raise refusal("join_layouts", "", tuple(wrong))
    joined = {}
    for name, (_, like) in firsts.items():
        rows = tuple(
            replace(row, rank=rank)
            for rank, some in enumerate(ranks)
            if name in some
            for row in some[name].regions.rows
        )
        table = Regions(len(ranks), like.regions.parts, rows)
        joined[name] = replace(like, regions=table, said=f"{like.said} on each rank")
    return joined


def _kind(layout: Layout) -> tuple[object, ...]:
    return layout.shape, layout.dtype, layout.key, layout.axes, layout.regions.parts


def _words(layout: Layout) -> str:
    where = f" in {layout.key!r}" if layout.key else ""
    folds = f", with local dimensions {[[d for d, _ in group] for group in layout.axes]}" if layout.axes else ""
    return f"{layout.dtype}{list(layout.shape)}{where}{folds}"
