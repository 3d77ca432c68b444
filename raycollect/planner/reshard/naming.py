"""Layouts by name or pattern: which layout a tensor has, where a dict of layouts may have patterns for keys.

A key with ``*`` or ``?`` is a pattern, as `fnmatch` reads it. An exact name precedes all patterns, and the first
pattern that matches counts. Where the layout of a pattern names the local tensor that it lies in (``"layers.*.qkv"``),
the wildcards of that name are replaced by the matches of the pattern's wildcards, in order.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from fnmatch import translate
from functools import lru_cache

from raycollect.errors import Violation, wrong_layout
from raycollect.errors.text import listed
from raycollect.planner.layout import Layout

_TOKEN = re.compile(r"\*|\?|\[!?\]?[^\]]*\]|.", re.DOTALL)


def is_pattern(key: str) -> bool:
    """Whether a key of a dict of layouts is a pattern."""
    return "*" in key or "?" in key


def has_patterns(layouts: Mapping[str, Layout]) -> bool:
    """Whether any key is a pattern, so that the names have to be given."""
    return any(map(is_pattern, layouts))


def of_names(layouts: Mapping[str, Layout], names: Iterable[str]) -> tuple[dict[str, Layout], list[str]]:
    """The layouts of the exact names and of these names of global tensors, and the names without a layout."""
    return _expanded(layouts, names, lambda name, layout: name)


def of_held(layouts: Mapping[str, Layout], keys: Iterable[str]) -> tuple[dict[str, Layout], list[str]]:
    """The same by names of local tensors, each of which may hold several global ones."""
    return _expanded(layouts, keys, lambda name, layout: layout.key or name)


def _expanded(
    layouts: Mapping[str, Layout], wanted: Iterable[str], tensor_of: Callable[[str, Layout], str]
) -> tuple[dict[str, Layout], list[str]]:
    expanded = {name: layout for name, layout in layouts.items() if not is_pattern(name)}
    exact = {tensor_of(name, layout) for name, layout in expanded.items()}
    patterns: dict[str, list[str]] = {}
    for name, layout in layouts.items():
        if is_pattern(name):
            patterns.setdefault(tensor_of(name, layout), []).append(name)
    missing = []
    for tensor in wanted:
        if tensor in exact:
            continue
        for pattern, names in patterns.items():
            if (match := _compiled(pattern).fullmatch(tensor)) is not None:
                groups = match.groups()
                for name in names:
                    key = _filled(layouts[name].key, groups)
                    expanded[_filled(name, groups)] = replace(layouts[name], key=key) if key else layouts[name]
                break
        else:
            missing.append(tensor)
    return expanded, missing


def pattern_faults(side: str, layouts: Mapping[str, Layout]) -> Iterator[Violation]:
    """The violations of patterns whose local tensor has other wildcards."""
    for name, layout in layouts.items():
        if layout.key and _wildcards(layout.key) != _wildcards(name):
            actual = f"in {layout.key!r}"
            yield wrong_layout(f"{side} of {name!r}", actual, "a local tensor with its wildcards")


def unmatched(side: str, missing: Iterable[str], layouts: Mapping[str, Layout]) -> Violation:
    """The violation of tensors without a layout."""
    expected = "a name or pattern for each of them"
    if layouts:
        expected += f", beside {listed(map(repr, layouts))}"
    return wrong_layout(side, f"without a layout of {listed(map(repr, missing))}", expected)


@lru_cache(maxsize=1024)
def _compiled(pattern: str) -> re.Pattern[str]:
    """The pattern, with a group for each wildcard."""
    return re.compile("".join(map(_as_regex, _TOKEN.findall(pattern))), re.DOTALL)


def _as_regex(token: str) -> str:
    inner = translate(token)[len("(?s:") : -len(r")\Z")]
    return f"({inner})" if _is_wild(token) else inner


def _is_wild(token: str) -> bool:
    return token in "*?" or len(token) > 1


def _wildcards(pattern: str) -> list[str]:
    if not is_pattern(pattern):
        return []
    return list(filter(_is_wild, _TOKEN.findall(pattern)))


def _filled(pattern: str, groups: Iterable[str]) -> str:
    if not is_pattern(pattern):
        return pattern
    given = iter(groups)
    return "".join(next(given) if _is_wild(token) else token for token in _TOKEN.findall(pattern))
