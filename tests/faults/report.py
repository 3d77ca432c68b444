"""The page that says what was tried and what came of it: each measurement writes its own section of it."""

from __future__ import annotations

from pathlib import Path

PAGE = Path(__file__).with_name("results.md")


def write_section(name: str, markdown: str, page: Path = PAGE) -> None:
    """Replaces what stands between ``<!-- begin NAME -->`` and ``<!-- end NAME -->``.

    Raises:
        ValueError: The page has no such section.
    """
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    before, found, rest = page.read_text(encoding="utf-8").partition(begin)
    _, ended, after = rest.partition(end)
    if not (found and ended):
        raise ValueError(f"{page.name} has no section {name!r}")
    page.write_text(f"{before}{begin}\n{markdown.strip()}\n{end}{after}", encoding="utf-8")
