"""SVG pictures of a plan: who sends what to whom, and when.

Text takes the colour of the page around it, and areas are half transparent, so that both are readable on light and dark
pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from raycollect.core.html import MOST_CELL, Markup, text
from raycollect.planner.report import Act, ActStep, Lane, Moved, MovedLink, Report, Row
from raycollect.planner.wording import clipped, counted, nbytes_words, numbered, ranks_words, seconds_words

MOST_LANES = 16
"""How many rows of the time line are drawn."""

MOST_COLUMNS = 16
"""How many ranks of a group are drawn."""

MOST_BUNDLES = 12
"""Of how many bundles of calls the messages are drawn."""

MOST_MOVES = 14
"""How many messages and steps of a bundle are drawn, one line each."""

_WIDTH, _LINE = 720, 22
_COLOURS = ("#4878a8", "#d08040", "#5a9a5a", "#b05050", "#8868a8", "#807060")
_LETTER = 6.2
"""The approximate width of a letter."""


def _svg(height: float, parts: Sequence[str]) -> Markup:
    return Markup(
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height:g}" '
        f'viewBox="0 0 {_WIDTH} {height:g}" style="max-width:100%" fill="currentColor" stroke="none" '
        f'font-family="sans-serif" font-size="11">\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _label(x: float, y: float, words: str, anchor: str = "start", most: int = MOST_CELL) -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}">{text(words, most)}</text>'


def _colour(call: int) -> str:
    return _COLOURS[call % len(_COLOURS)]


_LEFT = 150


def course(report: Report) -> Markup:
    """The time line of the participants; empty where nothing takes time."""
    lanes, more = report.lanes[:MOST_LANES], len(report.lanes) - MOST_LANES
    if not report.time_s:
        return Markup()
    height = _LINE * (len(lanes) + 1 + (more > 0))
    parts = [part for at, lane in enumerate(lanes) for part in _lane(lane, at, report.time_s)]
    if more > 0:
        parts.append(_label(0, _LINE * len(lanes) + 15, f"and {more} more lines"))
    foot = height - 6
    parts += [_label(_LEFT, foot, "0"), _label(_WIDTH, foot, seconds_words(report.time_s), anchor="end")]
    return _svg(height, parts)


def _lane(lane: Lane, at: int, time_s: float) -> list[str]:
    top, scale = _LINE * at, (_WIDTH - _LEFT) / time_s
    who = f"participant{'s' if len(lane.participants) > 1 else ''} {ranks_words(lane.participants)}"
    parts = [_label(0, top + 15, clipped(who, 26))]
    for bar in lane.bars:
        x, wide = _LEFT + bar.begins_s * scale, max(1.0, (bar.ends_s - bar.begins_s) * scale - 0.5)
        parts.append(
            f'<rect x="{x:.1f}" y="{top + 3}" width="{wide:.1f}" height="{_LINE - 6}" fill="{_colour(bar.calls[0])}" '
            f'fill-opacity="0.55"><title>{text(bar.label)}: {seconds_words(bar.ends_s - bar.begins_s)}</title></rect>'
        )
        words = clipped(ranks_words(bar.calls), 12)
        if len(words) * _LETTER + 4 <= wide:
            parts.append(_label(x + wide / 2, top + 15, words, anchor="middle"))
    return parts


class _Move(NamedTuple):
    """A message, or a step of several ranks at once."""

    launch: int  # when; 0 where the plan has no launches of its own
    words: str
    gives: tuple[int, ...]  # the ranks that give something
    takes: tuple[int, ...]  # the ranks that take something
    label: str = ""  # what is written beside it, instead of all its words


def traffic(bundles: Sequence[Sequence[Row]]) -> Markup:
    """Who sends what to whom: a column per rank, an arrow per message, a line over the ranks of a collective."""
    groups: dict[str, list[Sequence[Row]]] = {}
    for rows in bundles[:MOST_BUNDLES]:
        groups.setdefault(rows[0].group, []).append(rows)
    more = len(bundles) - MOST_BUNDLES
    pictures = [_group(name if len(groups) > 1 else "", found) for name, found in groups.items()]
    return Markup("".join(pictures) + (f"<p>and {more} more</p>\n" if more > 0 else ""))


_NAMES, _WORDS = 280, 225
"""The width of the texts left of the columns, and of those on the right of each line."""


def _group(name: str, bundles: Sequence[Sequence[Row]]) -> str:
    ranks = sorted({rank for rows in bundles for rank in rows[0].ranks})
    drawn = ranks[:MOST_COLUMNS]
    step = min((_WIDTH - _NAMES - _WORDS) / max(len(drawn), 1), 45.0)
    places = {rank: _NAMES + step * at for at, rank in enumerate(drawn)}
    top: float = _LINE
    parts = [_label(0, 15, f"group {name}" if name else "who sends to whom", most=44)]
    parts += [_label(x, 15, str(rank), anchor="middle") for rank, x in places.items()]
    if len(ranks) > len(drawn):
        parts.append(_label(_WIDTH - _WORDS, 15, f"and {len(ranks) - len(drawn)} more ranks"))
    for rows in bundles:
        made, height = _bundle(rows, places, top)
        parts += made
        top += height
    wires = "".join(f"M{x:g} {_LINE}V{top:g}" for x in places.values())
    parts.insert(0, f'<path d="{wires}" stroke="currentColor" stroke-opacity="0.25" fill="none"/>')
    return _svg(top + 4, parts)


def _bundle(rows: Sequence[Row], places: dict[int, float], top: float) -> tuple[list[str], float]:
    row = rows[0]
    nbytes = nbytes_words(sum(one.nbytes for one in rows))
    moves = _moves(row.acts, nbytes) if row.moved is None else _boxes(row.moved)
    shown = moves[:MOST_MOVES]
    told = [
        f"{numbered([one.call for one in rows])}: {row.op}",
        f"{nbytes} per rank, {seconds_words(row.time_s)}",
    ]
    inside, between = (sum(getattr(one.way, f"nbytes_{where}") for one in rows) for where in ("inside", "between"))
    told += [f"{nbytes_words(between)} between hosts, {nbytes_words(inside)} inside"] if between else []
    if len(moves) > len(shown):
        told.append(f"and {counted(len(moves) - len(shown), 'more step')}")
    parts = [_label(0, top + 15 + 14 * at, words, most=48) for at, words in enumerate(told)]
    for at, move in enumerate(shown):
        parts += _move(move, places, top + 11 + 16 * at, _colour(row.call))
    height = max(14 * len(told), 16 * len(shown)) + 12
    rule = f'<path d="M0 {top:g}H{_WIDTH}" stroke="currentColor" stroke-opacity="0.15"/>'
    return [rule, *parts], height


def _moves(acts: Sequence[Act], nbytes: str) -> list[_Move]:
    found: dict[tuple[ActStep, int], set[int]] = {}
    for act in acts:
        for step in act.steps:
            for rank in act.ranks if not step.is_local else ():
                sender = rank if step.is_message else -1  # each message is one of its own
                found.setdefault((replace(step, target=""), sender), set()).add(rank)
    moves = [_ends(step, tuple(sorted(ranks)), nbytes) for (step, _), ranks in found.items()]
    return sorted(moves, key=lambda move: move.launch)


def _boxes(moved: Moved) -> list[_Move]:
    """What the ranks of a reshard give, and to whom: inside their hosts, and between hosts."""
    found: dict[tuple[int, bool], list[MovedLink]] = {}
    for link in moved.links:
        found.setdefault((link.giver, link.is_between), []).append(link)
    moves = []
    for (giver, is_between), links in sorted(found.items()):
        takers = tuple(link.taker for link in links)
        many = f" to {len(takers)} ranks" if len(takers) > 1 else ""
        where = ", between hosts" if is_between else ""
        moves.append(_Move(0, f"{nbytes_words(sum(link.nbytes for link in links))}{many}{where}", (giver,), takers))
    return moves


def _ends(step: ActStep, ranks: tuple[int, ...], nbytes: str) -> _Move:
    launch = step.launch or 0
    if step.is_message:
        label = f"piece {step.piece}" if step.piece >= 0 else nbytes
        return _Move(launch, step.words, ranks, (step.peer,), label)
    if step.peer < 0:
        return _Move(launch, step.words, ranks, ranks)
    root, others = (step.peer,), tuple(rank for rank in ranks if rank != step.peer)
    return _Move(launch, step.words, *((others, root) if step.gives else (root, others)))


def _move(move: _Move, places: dict[int, float], y: float, colour: str) -> list[str]:
    gives, takes = ([places[rank] for rank in ranks if rank in places] for ranks in (move.gives, move.takes))
    xs = [*gives, *takes]
    if not xs:
        return []
    title = f"{move.words}{f', launch {move.launch}' if move.launch else ''}"
    parts = [f"<g><title>{text(title)}</title>"]
    parts.append(f'<path d="M{min(xs):g} {y:g}H{max(xs):g}" stroke="{colour}" stroke-width="2"/>')
    parts += [f'<circle cx="{x:g}" cy="{y:g}" r="3.5" fill="{colour}"/>' for x in gives]
    parts += [_head(x, gives, y, colour) for x in takes if x not in gives]
    parts += [_label(max(places.values()) + 14, y + 4, move.label or move.words, most=38), "</g>"]
    return ["".join(parts)]


def _head(x: float, gives: Sequence[float], y: float, colour: str) -> str:
    left, right = any(one < x for one in gives), any(one > x for one in gives)
    sides = [side for side, is_there in ((-1, left), (1, right)) if is_there]
    tips = "".join(f"M{x:g} {y:g}l{8 * side} -4v8z" for side in sides)
    return f'<path d="{tips}" fill="{colour}"/>'
