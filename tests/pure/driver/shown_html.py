"""Reads what notebooks show, and makes what they are shown."""

from __future__ import annotations

import re

from raycollect.driver.group_status import MemberStatus
from tests.support.html_page import Page


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


def status(rank, **more):
    given = {
        "rank": rank,
        "actor": f"Worker({rank:06x})",
        "node_id": "0123456789ab",
        "pid": 1000 + rank,
        "ordered": True,
        "plans": (),
        "steps": (),
        "awaited_s": 0.0,
        "answers": True,
        "doing": "",
        "stack": (),
        "ended": 0,
        "story": (),
        "host": "10.0.0.1",
        "device": "GPU 0",
    }
    return MemberStatus(**{**given, **more})


def progress(shown):
    return re.search(r'<progress max="(\d+)"(?: value="(\d+)")?', shown).groups()
