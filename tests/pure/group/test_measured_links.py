"""Links that groups have measured: what is still to be measured, by whom, and what is kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgpack
import pytest

from raycollect.core.model import Address, GroupSpec, Member
from raycollect.group import cluster_registry
from raycollect.group.link_costs import FILE, MEASURED, Costs
from raycollect.group.measured_links import MeasuredLinks, turns
from raycollect.group.membership import membership_of
from raycollect.planner import Link, Membership

SLOW = Link(latency_s=1e-3, bandwidth=1e7)


def membership(places: str, backend: str = "tcp", costs: Costs | None = None) -> Membership:
    """A group of which rank r is on the machine of the r-th letter."""
    members = [
        Member(
            rank=rank,
            actor_id=f"actor {rank}",
            actor=f"W({rank})",
            address=Address(host="10.0.0.1", port=1, secret=b""),
            machine=place,
            node_id=place,
            pid=rank,
            incarnation="",
            ordered=True,
        )
        for rank, place in enumerate(places)
    ]
    spec = GroupSpec(name="g", group_id="1", backend=backend, world_size=len(places))
    return membership_of(spec, members, costs)


@pytest.fixture(autouse=True)
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[bytes, bytes]]:
    """The cluster's store."""
    kept: dict[bytes, bytes] = {}
    monkeypatch.setattr(cluster_registry, "keep", kept.update)
    monkeypatch.setattr(cluster_registry, "look_up", lambda keys: {key: kept[key] for key in keys if key in kept})
    return kept


@pytest.mark.parametrize("places", ["ab", "aabbcc", "abcabc", "abcde", "aabcdefgh"])
def test_one_rank_of_each_host_measures_each_pair_once(places: str) -> None:
    of = membership(places)
    asked = turns(of, {})
    assert set(asked) == {places.index(place) for place in places}
    for rank, others in asked.items():
        met = [other for other in others if other >= 0]
        assert sorted((rank, *met)) == sorted(asked), "everyone else once"
        for turn, other in enumerate(others):
            assert other < 0 or asked[other][turn] == rank, "in the same turn"


@pytest.mark.parametrize(
    ("places", "backend", "costs"),
    [
        ("aaaa", "tcp", Costs()),
        ("ab", "nccl", Costs()),
        ("ab", "tcp", Costs(between=Link(latency_s=1.0, bandwidth=1.0, source=FILE))),
    ],
)
def test_nothing_is_measured_on_one_host_by_other_backends_and_where_a_file_tells(
    places: str, backend: str, costs: Costs
) -> None:
    of = membership(places, backend, costs)
    assert turns(of, {}) == {}
    links = MeasuredLinks()
    links.add(membership("ab"), {0: [(1, 1e-3, 1e7)]})
    assert links.of(of) == ({} if costs.between.source == FILE or places == "aaaa" else {(0, 1): SLOW})


def test_what_was_measured_is_not_measured_again_by_anybody(store: dict[bytes, bytes]) -> None:
    links, of = MeasuredLinks(), membership("aabbcc")
    links.add(of, {0: [(2, 1e-3, 1e7)], 2: [(4, 2e-3, 2e7)]})
    assert links.of(of) == {(0, 1): SLOW, (1, 2): Link(latency_s=2e-3, bandwidth=2e7)}
    assert all(link.source == MEASURED for link in links.of(of).values())
    assert turns(of, links.of(of)) == turns(of, MeasuredLinks().of(of)) != {}
    assert set(turns(of, links.of(of))) == {0, 4}
    assert MeasuredLinks().of(membership("cba")) == {(0, 1): Link(latency_s=2e-3, bandwidth=2e7), (1, 2): SLOW}
    assert len(store) == 2


@pytest.mark.parametrize(
    "told",
    [(), (1,), (1, 1.0), (0, 1.0, 1.0), (7, 1.0, 1.0), (-1, 1.0, 1.0), (0.5, 1.0, 1.0)]
    + [(2, latency_s, bandwidth) for latency_s, bandwidth in [(-1.0, 1.0), (1.0, 0.0), (1.0, float("inf"))]]
    + [(2, float("nan"), 1.0), (2, float("inf"), 1.0), (2, 1.0, 1.0, 1.0), (float("nan"), 1.0, 1.0)],
)
def test_what_makes_no_sense_is_not_kept(told: Sequence[float], store: dict[bytes, bytes]) -> None:
    links, of = MeasuredLinks(), membership("aab")
    links.add(of, {0: [told] if told else []})
    assert links.of(of) == {}
    assert not store


@pytest.mark.parametrize("entry", [b"", b"x", msgpack.packb(None), msgpack.packb(["a", 1]), msgpack.packb([1.0])])
def test_an_entry_of_another_version_is_no_link(entry: bytes, store: dict[bytes, bytes]) -> None:
    of = membership("ab")
    MeasuredLinks().add(of, {0: [(1, 1e-3, 1e7)]})
    (key,) = store
    store[key] = entry
    assert MeasuredLinks().of(of) == {}


def test_a_group_reckons_with_its_links(store: dict[bytes, Any]) -> None:
    pairs = {(0, 1): SLOW, (0, 2): Link(latency_s=0.0, bandwidth=1e9), (1, 2): Link(latency_s=0.0, bandwidth=1e9)}
    topology = membership("aabbc").topology.on_links(pairs)
    assert topology.pairs is not None
    assert topology.pairs.slowest() == (0, 1)
    assert topology.between == Link(latency_s=1e-3, bandwidth=2e7), "of what a host sends, half goes over a link"
    assert membership("aaa").topology.on_links(pairs).pairs is None
