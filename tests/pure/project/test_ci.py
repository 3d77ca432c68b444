"""The continuous integration runs files that exist."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

ROOT = Path(__file__).parents[3]


def expanded(pattern: str) -> list[str]:
    """The paths of a pattern with braces."""
    parts = [part.split(",") for part in re.split(r"[{}]", pattern)]
    return ["".join(chosen) for chosen in product(*parts)]


def test_every_test_file_that_is_named_exists() -> None:
    text = re.sub(r"\s*\\\n\s*", " ", (ROOT / ".ci/run").read_text())
    named = [path for word in re.findall(r"tests/[\w/{},.]+", text) for path in expanded(word)]
    assert len(named) > 10
    assert [path for path in named if not (ROOT / path).exists()] == []
