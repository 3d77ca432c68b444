"""The results of a benchmark, as tables and as a picture."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from itertools import groupby
from operator import attrgetter
from pathlib import Path

from raycollect.core import files
from raycollect.planner.wording import columns, counted, nbytes_words, seconds_words


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One way at one size."""

    way: str
    nbytes: int
    median_s: float  # of a run, until it is done on all ranks
    p90_s: float
    algorithm_bandwidth: float  # bytes over median time, in bytes per second
    bus_bandwidth: float  # bytes per second that are moved at least; see `raycollect.observe.summary`
    wrong: int  # wrong elements: always 0, since `measure` raises otherwise


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The results of a benchmark."""

    operation: str
    ranks: int
    backend: str
    dtype: str
    runs: int  # that each time is of
    rows: tuple[Row, ...]  # by way, then size

    @property
    def title(self) -> str:
        """The benchmark in one line."""
        return f"{self.operation} of {self.dtype} between {self.ranks} actors over {self.backend}"

    @property
    def ways(self) -> dict[str, list[Row]]:
        """The rows of each way, by size."""
        return {way: list(rows) for way, rows in groupby(self.rows, attrgetter("way"))}


_HEAD = ("size", "median", "p90", "algbw GB/s", "busbw GB/s", "wrong")

# Way -> colour and marker: of Okabe and Ito's colours, which colour-blind readers can tell apart.
_STYLES: Mapping[str, tuple[str, str]] = {
    "captured": ("#0072B2", "o"),
    "refs": ("#D55E00", "s"),
    "members": ("#009E73", "^"),
}


def table(result: Result) -> list[str]:
    """The lines of a table for each way, below a title."""
    lines = [f"{result.title}, {counted(result.runs, 'run')} each"]
    for way, rows in result.ways.items():
        cells = [_HEAD, *map(_cells, rows)]
        lines += ["", way, *columns(cells, _HEAD)]
    return lines


def _cells(row: Row) -> tuple[str, ...]:
    rates = (f"{rate / 1e9:.3f}" for rate in (row.algorithm_bandwidth, row.bus_bandwidth))
    return nbytes_words(row.nbytes), seconds_words(row.median_s), seconds_words(row.p90_s), *rates, str(row.wrong)


def draw(result: Result, path: Path) -> None:
    """Draws the median times over the sizes, a line for each way, both axes logarithmic; replaces the file.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: The file can't be written.
    """
    figure = import_module("matplotlib.figure").Figure(figsize=(8, 4.8), layout="constrained")
    axes = figure.subplots()
    for way, rows in result.ways.items():
        colour, marker = _STYLES[way]
        by_size = sorted(rows, key=attrgetter("nbytes"))
        axes.plot(
            [row.nbytes for row in by_size],
            [row.median_s * 1e6 for row in by_size],
            label=way,
            color=colour,
            marker=marker,
            linewidth=1.8,
        )
    sizes = sorted({row.nbytes for row in result.rows})
    axes.set(xscale="log", yscale="log", xlabel="bytes", ylabel="median, us (less is better)", title=result.title)
    axes.set_xticks(sizes, [nbytes_words(nbytes) for nbytes in sizes], fontsize=8, rotation=30)
    axes.yaxis.set_major_locator(import_module("matplotlib.ticker").LogLocator(subs=(1, 2, 5), numticks=12))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.grid(visible=True, color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=130, format=path.suffix[1:] or None)
    files.write(path, drawn.getvalue())
