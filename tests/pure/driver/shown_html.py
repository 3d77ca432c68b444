"""Reads what notebooks show."""

from __future__ import annotations

import re

from tests.pure.planner.test_render import Page


def read(shown):
    """The text of a fragment, which is well-formed, has no script and gives no text a colour."""
    page = Page()
    page.feed(shown)
    page.close()
    assert page.open == []
    assert "<script" not in shown
    assert not re.search(r"<[^>]* on\w+=", shown)
    assert not re.search(r"[^-]color:|<text[^>]* fill=|<(p|td|th|pre|b|li|div|summary)[^>]*color", shown)
    shown.encode("utf-8")
    return "\n".join(page.text)
