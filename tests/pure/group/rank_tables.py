"""Rank tables of any nodes and devices."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from raycollect.group.rank_table import Device, RankTable


def document_of(*nodes: list[tuple[Any, Any]]) -> dict[str, Any]:
    lists = [[{"device_id": device_id, "rank": rank} for device_id, rank in node] for node in nodes]
    return {"version": "1.0", "node_list": [{"device_list": devices} for devices in lists]}


@st.composite
def tables(draw: st.DrawFn) -> RankTable:
    """Up to four nodes of up to four devices; any device ids, any order of the ranks."""
    ids = draw(st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=4, unique=True), min_size=1, max_size=4))
    ranks = iter(draw(st.permutations(range(sum(map(len, ids))))))
    return RankTable(nodes=tuple(tuple(Device(device_id=d, rank=next(ranks)) for d in node) for node in ids))
