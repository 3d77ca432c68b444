"""Self-contained HTML fragments for notebooks.

Text that is not `Markup` is escaped. Fragments have no scripts and set no text color, so that they fit light and dark
pages. Cells set their alignment, as notebooks have another default; numbers stay on one line with their units; unfolded
text has the background of its row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from html import escape
from itertools import islice
from typing import TypeVar

MOST_CELL = 200  # the longest shown text, in characters
MOST_WHOLE = 10_000  # the longest shown folded text, in characters
MOST_ROWS = 64  # the most shown rows of a table, by default
_T = TypeVar("_T")


class Markup(str):
    """HTML that is not escaped."""

    __slots__ = ()


def text(value: object, most: int = MOST_CELL) -> Markup:
    """Escapes a value, and shortens it to `most` characters."""
    if isinstance(value, Markup):
        return value
    words = str(value)
    shortened = words if len(words) <= most else f"{words[: most - 3]}..."
    return Markup(escape(shortened.encode("utf-8", "replace").decode()))  # browsers can't receive a lone surrogate


def line(value: object) -> Markup:
    """A line of text."""
    return Markup(f"<p>{text(value)}</p>\n")


def link(address: str) -> Markup:
    """A link that opens in a page of its own; nothing for no address."""
    return Markup(f'<a href="{escape(address)}" target="_blank">{escape(address)}</a>') if address else Markup("")


def lines(values: Iterable[object]) -> Markup:
    """A list, with a line per value."""
    listed = "\n".join(f"<li>{text(value)}</li>" for value in values)
    return Markup(f"<ul>\n{listed}\n</ul>\n")


def folded(summary: object, whole: str) -> Markup:
    """A line that unfolds to a longer text, or to a fragment."""
    inside = whole if isinstance(whole, Markup) else f'<pre style="background:none">{text(whole, MOST_WHOLE)}</pre>'
    return Markup(f"<details><summary>{text(summary)}</summary>{inside}</details>")


def failure(error: BaseException) -> Markup:
    """An error: its first line, which unfolds to the whole text if it is longer."""
    message = f"{type(error).__name__}: {error}"
    first, _, more = message.partition("\n")
    return folded(first, message) if more or len(first) > MOST_CELL else text(first)


def bar(ended: int | None, count: int) -> Markup:
    """A progress bar; `ended` None: the progress is unknown."""
    value = "" if ended is None else f' value="{ended}"'
    return Markup(f'<progress max="{max(count, 1)}"{value} style="width:16em;vertical-align:middle"></progress>')


def pairs(items: Iterable[tuple[object, object]]) -> Markup:
    """A table of names and values, without the empty values."""
    rows = "\n".join(f"<tr>{_cell('th', name)}{_cell('td', what)}</tr>" for name, what in items if what != "")
    return Markup(f"<table>\n<tbody>\n{rows}\n</tbody>\n</table>\n" if rows else "")


def table(
    head: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    right: Collection[str] = (),
    count: int = 0,
    most: int = MOST_ROWS,
) -> Markup:
    """A table: the column titles, and the cells of each row.

    The columns named in `right` are aligned to the right. At most `most` of `count` rows are shown; a last row counts
    the others.
    """
    top = "".join(_cell("th", name, name in right) for name in head)
    shown = list(islice(rows, most))
    body = ["".join(_cell("td", cell, name in right) for cell, name in zip(row, head, strict=True)) for row in shown]
    if count > len(shown):
        lead, span = "<td></td>" * (len(head) > 1), max(len(head) - 1, 1)
        body.append(f'{lead}<td colspan="{span}" style="text-align:left">... {count - len(shown)} more</td>')
    table_rows = "\n".join(f"<tr>{row}</tr>" for row in body)
    return Markup(f"<table>\n<thead><tr>{top}</tr></thead>\n<tbody>\n{table_rows}\n</tbody>\n</table>\n")


def block(kind: str, title: object, *parts: str) -> Markup:
    """A fragment with a title and parts; `kind` is part of its CSS class: ``"plan"``."""
    return Markup(f'<div class="raycollect-{kind}">\n<p><b>{text(title)}</b></p>\n{"".join(parts)}</div>\n')


def shown(make: Callable[[_T], str]) -> Callable[[_T], str]:
    """Decorates a ``_repr_html_``, so that it never raises."""

    @functools.wraps(make)
    def render(self: _T) -> str:
        try:
            return str(make(self))
        except Exception as exc:  # noqa: BLE001 - showing a value must not fail its cell
            return str(block("nothing", f"{type(self).__name__}, which can't be shown: {type(exc).__name__}"))

    return render


def _cell(tag: str, value: object, is_right: bool = False) -> str:
    side = f"{'right' if is_right else 'left'}{';white-space:nowrap' if is_right and tag == 'td' else ''}"
    return f'<{tag} style="text-align:{side}">{text(value)}</{tag}>'
