"""What the Trace Event Format asks of a document."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from typing import Any


def check(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Raises unless a document is what the Trace Event Format asks for; gives its complete events."""
    json.dumps(document, allow_nan=False)
    rows = defaultdict[tuple[int, int], list[dict[str, Any]]](list)
    flows = defaultdict[tuple[str, str, int], list[dict[str, Any]]](list)
    named = set[tuple[int, int]]()
    for event in document["traceEvents"]:
        assert type(event["pid"]) is type(event["tid"]) is int
        assert event["ph"] in ("M", "X", "s", "f")
        if event["ph"] == "M":
            named.add((event["pid"], event["tid"]))
            continue
        assert isinstance(event["ts"], (int, float))
        assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
            rows[event["pid"], event["tid"]].append(event)
        else:
            flows[event["cat"], event["name"], event["id"]].append(event)
    assert set(rows) <= named, "every row has a name"
    owners = defaultdict[int, set[int]](set)
    for pid, tid in rows:
        owners[tid].add(pid)
    assert all(len(pids) == 1 for pids in owners.values()), "a row belongs to one process"
    for row in rows.values():
        for first, other in itertools.combinations(row, 2):
            (_, e1), (b2, e2) = sorted((_span(first), _span(other)), key=lambda span: (span[0], -span[1]))
            assert b2 >= e1 - 1e-6 or e2 <= e1 + 1e-6, f"{first} and {other} overlap in part"
    for ends in flows.values():
        assert [event["ph"] for event in ends] == ["s", "f"]
        assert ends[0]["ts"] <= ends[1]["ts"]
        assert ends[1]["bp"] == "e"
        for event in ends:
            inside = [_span(part) for part in rows[event["pid"], event["tid"]]]
            assert any(begin <= event["ts"] <= end for begin, end in inside), "a flow binds to a slice"
    return [event for row in rows.values() for event in row]


def _span(event: dict[str, Any]) -> tuple[float, float]:
    return event["ts"], event["ts"] + event["dur"]
