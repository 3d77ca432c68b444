"""A timeline as a small picture for notebooks: a row per process, colored by what it does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from raycollect.core import html
from raycollect.observe.trace import CHECK, KERNEL, METHOD, STAGING, WAIT, Span
from raycollect.observe.whole import TimelineTrace
from raycollect.planner.wording import seconds_words

WIDTH = 480
"""The width of a row, in pixels; what is shorter than a pixel fills one."""
MOST = 16
"""The number of processes that are shown; the others are counted."""
HEIGHT = 14

_COLORS: Mapping[str, tuple[str, tuple[str, ...]]] = {  # in the order of drawing: methods contain the others
    "method": ("#4c78a8", (METHOD,)),
    "wait": ("#e3b341", (WAIT,)),
    "consistency check": ("#b07aa1", (CHECK,)),
    "kernel": ("#59a14f", (KERNEL, STAGING)),
}


def picture(trace: TimelineTrace) -> html.Markup:
    """Returns the rows of the processes that have run something, and a legend; nothing if there is none."""
    rows = [(process.title, _row(process.spans, trace)) for process in trace.processes]
    drawn = [row for row in rows if row[1]]
    if not drawn:
        return html.Markup("")
    legend = " ".join(f"{_square(color)} {name}" for name, (color, _) in _COLORS.items())
    head = "process", seconds_words(trace.ended_s - trace.began_s)
    return html.Markup(html.table(head, drawn, count=len(drawn), most=MOST) + html.line(html.Markup(legend)))


def _row(spans: Sequence[Span], trace: TimelineTrace) -> html.Markup:
    per_s = WIDTH / max(trace.ended_s - trace.began_s, 1e-9)
    paths = []
    for color, kinds in _COLORS.values():
        pixels = (
            (max(int((span.begin_s - trace.began_s) * per_s), 0), int((span.end_s - trace.began_s) * per_s) + 1)
            for span in spans
            if span.kind in kinds and span.end_s > trace.began_s
        )
        path = "".join(f"M{lo} {HEIGHT / 2:g}H{hi}" for lo, hi in _merged(pixels))
        if path:
            paths.append(f'<path d="{path}" stroke="{color}" stroke-width="{HEIGHT}"></path>')
    drawn = "".join(paths)
    return html.Markup(drawn and f'<svg width="{WIDTH}" height="{HEIGHT}" role="img">{drawn}</svg>')


def _square(color: str) -> str:
    return f'<svg width="10" height="10"><rect width="10" height="10" fill="{color}"></rect></svg>'


def _merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merges ranges that touch; none ends beyond the row."""
    merged: list[tuple[int, int]] = []
    for lo, hi in sorted(set(ranges)):
        if merged and lo <= merged[-1][1]:
            merged[-1] = merged[-1][0], min(max(hi, merged[-1][1]), WIDTH)
        else:
            merged.append((lo, min(hi, WIDTH)))
    return merged
