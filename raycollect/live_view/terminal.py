"""The live view in a terminal, drawn by rich."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from raycollect.live_view.frame import Frame, GroupFrame, OperationFrame, PublicationFrame, RankFrame, ReceiverFrame
from raycollect.live_view.stream import Shares
from raycollect.planner.wording import nbytes_words, seconds_words

COLORS = {"method": "blue", "wait": "yellow", "check": "magenta", "kernel": "green"}
"""The color of each activity; idle time has none."""

_CELL = "█"
_LEAST_SLOTS, _MOST_SLOTS = 12, 80  # time slots that are shown
_OTHER_COLUMNS = 64  # the width of the other columns
_STACK_LINES = 3


def draw(frame: Frame, width: int) -> RenderableType:
    """Returns a frame as a renderable of rich, for a terminal of `width` columns."""
    slots = min(max(width - _OTHER_COLUMNS, _LEAST_SLOTS), _MOST_SLOTS)
    parts: list[RenderableType] = [_head(frame)]
    parts += [_group(group, frame.activities, slots) for group in frame.groups]
    if not frame.groups:
        parts.append(Text("no group is declared"))
    if frame.operations:
        parts.append(_operations(frame.operations))
    if frame.publications:
        parts.append(_publications(frame.publications))
    parts += [Text(f"missing: {line}", style="red") for line in frame.missing]
    return Group(*parts)


def _head(frame: Frame) -> Text:
    head = Text(f"{frame.program}, pid {frame.pid} on {frame.host}   ", style="bold")
    for activity, color in COLORS.items():
        head.append(f"{_CELL} ", style=color).append(f"{activity}  ", style="default")
    return head


def _group(group: GroupFrame, activities: Sequence[str], slots: int) -> Table:
    state = group.state + (f": {group.detail}" if group.detail else "")
    title = f"group {group.name!r}: {len(group.ranks)} ranks over {group.backend}, {state}"
    table = Table(title=Text(title), title_justify="left", expand=True, box=None, pad_edge=False)
    table.add_column("rank", justify="right")
    table.add_column("actor", overflow="ellipsis", no_wrap=True)
    table.add_column("time", width=slots, no_wrap=True)
    table.add_column("state", ratio=1, overflow="fold")
    for rank in group.ranks:
        style = "red" if rank.is_last else ""
        stream = _stream(rank.stream[-slots:], activities)
        table.add_row(str(rank.rank), Text(rank.actor), stream, Text("\n".join(_state(rank))), style=style)
    return table


def _stream(stream: Sequence[Shares], activities: Sequence[str]) -> Text:
    text = Text()
    for shares in stream:
        most = max(range(len(shares)), key=lambda at: shares[at])
        if shares[most] > 1 - sum(shares):
            text.append(_CELL, style=COLORS[activities[most]])
        else:
            text.append(" ")
    return text


def _state(rank: RankFrame) -> list[str]:
    lines = [rank.state]
    if rank.collectives:
        lines.append(f"has not finished {rank.collectives}")
    if rank.awaited_s:
        lines.append(f"others wait for it: {seconds_words(rank.awaited_s)}")
    if rank.is_last:
        lines += rank.stack[-_STACK_LINES:]
    return lines


def _operations(operations: Sequence[OperationFrame]) -> Table:
    table = Table(title_justify="left", box=None, pad_edge=False)
    for heading in ("operation", "group", "backend"):
        table.add_column(heading)
    for heading in ("calls/s", "bytes", "median", "bandwidth", "predicted", "waiting", "last rank"):
        table.add_column(heading, justify="right")
    for row in operations:
        table.add_row(
            row.op,
            Text(row.group),  # its name is no markup
            row.backend,
            f"{row.calls_per_s:.3g}",
            nbytes_words(row.nbytes) if row.nbytes else "",
            seconds_words(row.median_s),
            _rate(row.bandwidth),
            _rate(row.predicted_bandwidth),
            f"{row.waiting:.0%}",
            str(row.last_rank) if row.last_rank >= 0 else "",
        )
    return table


def _publications(publications: Sequence[PublicationFrame]) -> Table:
    table = Table(title_justify="left", box=None, pad_edge=False)
    for heading in ("weights", "process", "version"):
        table.add_column(heading)
    for heading in ("bytes", "recorded at", "behind", "skipped"):
        table.add_column(heading, justify="right")
    for publication in publications:
        publisher = f"unknown: {publication.error}" if publication.error else publication.publisher
        held = f"{publication.holders} ranks" if publication.number else ""
        nbytes = nbytes_words(publication.nbytes) if publication.number else ""
        table.add_row(Text(publication.name), Text(publisher), _version(publication), nbytes, held)
        for receiver in publication.receivers:
            counts = str(receiver.behind), str(receiver.skipped)
            table.add_row("", Text(_receivers(receiver)), _version(receiver), "", "", *counts)
    return table


def _version(of: PublicationFrame | ReceiverFrame) -> str:
    return f"{of.number} of epoch {of.epoch}" if of.number else "none"


def _receivers(receiver: ReceiverFrame) -> str:
    first, *others = receiver.actors
    return f"  {first} and {len(others)} more" if others else f"  {first}"


def _rate(rate: float) -> str:
    return f"{rate / 1e9:.3g} GB/s" if rate else ""
