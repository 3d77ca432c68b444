"""Pictures of the rows: latency over size or over ranks, bars where there is only one case."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from benchmarks import names
from benchmarks.report import Report, Row, ordered, size

mpl.use("Agg")

# Okabe and Ito's colours, which colour-blind readers can tell apart; ours are full lines, the others' are not.
_BLUE, _SKY, _GREEN, _ORANGE, _RED, _PINK, _BLACK = (
    *("#0072B2", "#56B4E9", "#009E73", "#E69F00", "#D55E00", "#CC79A7", "#000000"),
)
_STYLES: dict[str, tuple[str, str, str]] = {
    names.ARENA: (_BLUE, "-", "o"),
    names.SHM_ARENA: (_BLUE, "-", "o"),
    names.CAPTURED: (_GREEN, "-", "^"),
    names.LOOP: (_BLUE, "-", "o"),
    names.BATCH: (_BLUE, "-", "o"),
    names.NAMED_ARENA: (_BLUE, "-", "o"),
    names.NAMED: (_SKY, "-", "s"),
    names.ONE_ARENA: (_GREEN, "-", "^"),
    names.ONE: (_PINK, "-", "v"),
    names.ORDINARY: (_SKY, "-", "s"),
    names.SHM: (_SKY, "-", "s"),
    names.TCP: (_GREEN, "-", "^"),
    names.IMPERATIVE_ARENA: (_GREEN, "-", "^"),
    names.CALLS: (_GREEN, "-", "^"),
    names.PLANNED: (_BLUE, "-", "o"),
    names.REMEMBERED: (_SKY, "-", "s"),
    names.VERSIONS: (_BLUE, "-", "o"),
    names.UNCHECKED: (_GREEN, "-", "^"),
    names.STREAM: (_GREEN, "-", "^"),
    names.EAGER: (_BLUE, "-", "o"),
    names.EAGER_ARENA: (_SKY, "-", "s"),
    names.STEP: (_GREEN, "-", "^"),
    names.HOOK: (_GREEN, "-", "^"),
    names.GLOO: (_PINK, "-", "v"),
    names.IMPERATIVE: (_PINK, "-", "v"),
    names.RAY: (_RED, "--", "D"),
    names.RAY_INSIDE: (_RED, "--", "D"),
    names.RAY_BESIDE: (_ORANGE, "--", "X"),
    names.AFTER: (_BLACK, "--", "*"),
    names.RAY_CALLS: (_ORANGE, "--", "X"),
    names.RAY_AHEAD: (_BLACK, "--", "*"),
    names.TORCH: (_RED, "--", "D"),
    names.XOSCAR: (_ORANGE, "--", "X"),
    names.PYGLOO: (_PINK, "--", "P"),
    names.MPICH: (_BLACK, "--", "*"),
    names.RDT: (_ORANGE, "--", "X"),
    names.GRAPH: (_ORANGE, "--", "X"),
    names.STORE: (_BLACK, "--", "*"),
    names.STORE_COPIED: ("#777777", "--", "P"),
    names.RECORDED: (_BLUE, "-", "o"),
    names.UNRECORDED: (_SKY, "-", "s"),
    names.LIMIT: ("#777777", ":", ""),
    names.METHODS: ("#777777", ":", ""),
}
_FEW = 3
_TABLES_ONLY = ("cold", "hosts")
_TWO_DECADES = 100


def draw(report: Report, directory: Path) -> list[Path]:
    """Draws all rows of a suite.

    Args:
        report: What one suite measured.
        directory: Where the pictures go; those of the same name are replaced.

    Returns:
        The files.
    """
    directory.mkdir(parents=True, exist_ok=True)
    drawn = []
    for name, figure in _figures([row for row in report.rows if row.suite not in _TABLES_ONLY]):
        path = directory / f"{name}.png"
        figure.savefig(path, dpi=130)
        drawn.append(path)
    return drawn


def _figures(rows: Sequence[Row]) -> Iterator[tuple[str, Figure]]:
    for op in ordered(row.op for row in rows):
        cases = [row for row in rows if row.op == op]
        name = f"{cases[0].suite}-{op}".replace(" ", "-")
        worlds = ordered(row.ranks for row in cases)
        if len(worlds) >= _FEW:
            yield name, _over_ranks(cases)
            continue
        for ranks in worlds:
            alone = [row for row in cases if row.ranks == ranks]
            drawn = _over_size(alone) if len({row.nbytes for row in alone}) > 1 else _bars(alone)
            yield f"{name}-{ranks}", drawn


def _over_size(rows: Sequence[Row]) -> Figure:
    """Latency over the bytes per rank."""
    figure, (axes,) = _panels(1, f"{rows[0].suite}: {rows[0].op}, {rows[0].ranks} ranks")
    sizes = sorted({row.nbytes for row in rows})
    for line in _by_contender(rows):
        style = _style(line[0].contender)
        axes.plot([row.nbytes for row in line], [row.median_ms for row in line], **style)
    axes.set_ylabel("median, ms (less is better)")
    axes.set_xlabel("bytes per rank")
    _logarithmic(axes, sizes, [size(nbytes) for nbytes in sizes])
    return _with_legend(figure, axes)


def _over_ranks(rows: Sequence[Row]) -> Figure:
    """Latency over the number of ranks, one panel per size."""
    sizes = sorted({row.nbytes for row in rows})
    figure, panels = _panels(len(sizes), f"{rows[0].suite}: {rows[0].op}", sharey=True)
    for axes, nbytes in zip(panels, sizes, strict=True):
        same = [row for row in rows if row.nbytes == nbytes]
        for line in _by_contender(same):
            axes.plot([row.ranks for row in line], [row.median_ms for row in line], **_style(line[0].contender))
        worlds = sorted({row.ranks for row in same})
        _logarithmic(axes, worlds, [str(ranks) for ranks in worlds])
        axes.set_xlabel("ranks")
        axes.set_title(size(nbytes) if nbytes else "", fontsize=10)
    panels[0].set_ylabel("median, ms (less is better)")
    return _with_legend(figure, panels[-1])


def _bars(rows: Sequence[Row]) -> Figure:
    """Latency of each contender."""
    figure, (axes,) = _panels(1, f"{rows[0].suite}: {rows[0].op}, {rows[0].ranks} ranks, {size(rows[0].nbytes)}")
    drawn = axes.barh(
        [row.contender for row in rows],
        [row.median_ms for row in rows],
        color=[_style(row.contender)["color"] for row in rows],
    )
    axes.bar_label(drawn, fmt=" %.2f", fontsize=9)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel("median, ms (less is better)")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _by_contender(rows: Sequence[Row]) -> list[list[Row]]:
    return [[row for row in rows if row.contender == name] for name in ordered(row.contender for row in rows)]


def _style(contender: str) -> dict[str, Any]:
    colour, line, marker = _STYLES.get(contender, ("#777777", "-.", "."))
    return {
        "label": contender,
        "color": colour,
        "linestyle": line,
        "marker": marker,
        "linewidth": 1.8,
        "markersize": 6,
    }


def _panels(count: int, title: str, *, sharey: bool = False) -> tuple[Figure, list[Any]]:
    figure = Figure(figsize=(6.2 * count + 2.4, 4.4), layout="constrained")
    figure.suptitle(title, fontsize=12, fontweight="bold")
    made = figure.subplots(1, count, squeeze=False, sharey=sharey)
    return figure, list(made[0])


def _logarithmic(axes: Any, ticks: Sequence[int], labels: Sequence[str]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(ticks, labels, fontsize=9)
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < _TWO_DECADES * low else (1,), numticks=12))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.grid(visible=True, color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _with_legend(figure: Figure, axes: Any) -> Figure:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False, fontsize=9)
    return figure
