"""The cost model: lines, and bytes in closed form against bytes counted pair by pair."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raycollect import backends
from raycollect.core.model import OpKind, Pricing
from raycollect.planner import Cluster, Link, Topology, predict
from raycollect.planner.algorithms import envelope
from raycollect.planner.cost import CONTENTION, FREE, HostLayout, Line, launch, priced
from raycollect.planner.pairs import pairwise_cost
from raycollect.planner.topology import BETWEEN, INSIDE
from tests.pure.counting import counted
from tests.pure.meaning import KINDS
from tests.support.values import replace

COLLECTIVES = tuple(kind for kind in KINDS if kind is not OpKind.SEND)
TCP = backends.get("tcp")
_PLACES = st.lists(st.integers(0, 4), min_size=1, max_size=12)


def pricing_of(backend: str) -> Pricing:
    return backends.get(backend).pricing if backends.is_known(backend) else Pricing()


# ---------------------------------------------------------------------------------------------- lines


_LINES = st.lists(
    st.builds(Line, st.floats(0, 1, allow_subnormal=False), st.floats(0, 1e-3, allow_subnormal=False)),
    min_size=1,
    max_size=6,
)


@given(lines=_LINES, sizes=st.lists(st.integers(0, 1 << 40), max_size=20))
def test_the_envelope_is_the_minimum_at_every_size(lines: list[Line], sizes: list[int]) -> None:
    found = envelope(lines)
    starts = [start for _, start in found]
    assert starts[0] == 0
    assert starts == sorted(set(starts))
    slopes = [lines[at].per_byte_s for at, _ in found]
    assert slopes == sorted(set(slopes), reverse=True), "each one is better for larger sizes only"
    for nbytes in {*sizes, *starts, *(max(0, start - 1) for start in starts)}:
        taken = next(at for at, start in reversed(found) if start <= nbytes)
        best = min(line.time_s(nbytes) for line in lines)
        assert lines[taken].time_s(nbytes) == pytest.approx(best, rel=1e-9, abs=1e-12)


def test_of_equal_lines_one_is_taken() -> None:
    assert envelope([Line(1, 1), Line(1, 1)]) == [(0, 0)]
    assert envelope([Line(1, 2), Line(1, 1), Line(0, 3)]) == [(2, 0), (1, 1)]
    assert envelope([Line(0, 1), Line(1e30, 0)]) == [(0, 0)], "nobody gives so many bytes"


# ---------------------------------------------------------------------------------------------- layouts
@given(_PLACES)
def test_a_layout_says_of_a_topology_what_counting_says(places: list[int]) -> None:
    topology = Topology.of(places)
    layout = HostLayout.of(topology, len(places) - 1)
    hosts, ranks = topology.hosts, range(len(places))
    assert (layout.world, layout.hosts) == (len(places), len(set(places)))
    assert layout.largest == max(places.count(one) for one in places)
    assert layout.root_size == places.count(places[-1])
    pairs = [(a, b) for a in ranks for b in ranks if a != b]
    assert layout.inside_pairs == sum(hosts[a] == hosts[b] for a, b in pairs)
    assert layout.between_pairs == sum(hosts[a] != hosts[b] for a, b in pairs)
    assert layout.crossings == sum(hosts[a] != hosts[(a + 1) % len(places)] for a in ranks)
    assert tuple(rank for group in topology.groups() for rank in group) == tuple(sorted(ranks, key=lambda r: hosts[r]))


# ---------------------------------------------------------------------------------------------- backends
@given(places=_PLACES, backend=st.sampled_from(["tcp", "gloo", "torch:nccl"]), data=st.data())
def test_the_bytes_of_kernels_are_those_counted_pair_by_pair(
    places: list[int], backend: str, data: st.DataObject
) -> None:
    topology = Topology.of(places)
    for kind in COLLECTIVES:
        root = data.draw(st.integers(0, len(places) - 1))
        is_tree = backend == "torch:nccl" or (backend == "gloo" and topology.host_count == 1)
        if kind is OpKind.BROADCAST and is_tree:
            continue  # which see below
        by_host = backend != "torch:nccl" and 1 < topology.host_count < len(places)
        if by_host and kind in (OpKind.BROADCAST, OpKind.ALLGATHER):
            continue  # `test_by_host` counts it
        cost = priced(kind, pricing_of(backend), HostLayout.of(topology, root, rank_order=True))
        inside, between = counted(kind, backend, topology.hosts, root)
        assert (cost.inside, cost.between) == pytest.approx((inside, between))


@pytest.mark.parametrize("backend", ["gloo", "torch:gloo"])
def test_a_broadcast_of_gloo_enters_each_host_once_too(backend: str) -> None:
    """Its own tree has the ranks of a host get it from another one: 4 times over these links."""
    cost = priced(OpKind.BROADCAST, pricing_of(backend), HostLayout.uniform(3, 2))
    assert cost == priced(OpKind.BROADCAST, pricing_of("tcp"), HostLayout.uniform(3, 2))
    assert (cost.inside, cost.between) == (3, 2)


@pytest.mark.parametrize("world", range(1, 9))
@pytest.mark.parametrize("kind", COLLECTIVES)
def test_the_bytes_of_shared_memory_are_those_counted_pair_by_pair(kind: OpKind, world: int) -> None:
    cost = priced(kind, pricing_of("shm"), HostLayout.uniform(1, world))
    assert (cost.inside, cost.between) == pytest.approx(counted(kind, "shm", (0,) * world, 0))


@pytest.mark.parametrize("backend", ["local", "shm", "tcp", "gloo", "torch:gloo", "nobody knows it"])
def test_one_rank_moves_nothing_and_waits_for_nobody(backend: str) -> None:
    alone = HostLayout.uniform(1, 1)
    for kind in OpKind:
        assert priced(kind, pricing_of(backend), alone) == FREE
    assert launch(pricing_of(backend), alone) == FREE


def test_on_one_host_the_links_between_hosts_cost_nothing() -> None:
    near = HostLayout.uniform(1, 4)
    slow = replace(near, between=Link(latency_s=1, bandwidth=1))
    for kind in COLLECTIVES:
        assert priced(kind, TCP.pricing, near) == priced(kind, TCP.pricing, slow)
        if kind in (OpKind.ALLTOALL, OpKind.GATHER, OpKind.SCATTER):
            assert pairwise_cost(kind, TCP.pricing, near) == pairwise_cost(kind, TCP.pricing, slow)


def test_ranks_of_one_host_share_the_link_between_hosts() -> None:
    """Two hosts: all that each rank of one has for the ranks of the other goes over one link."""
    for ranks in (1, 2, 4, 8):
        line = priced(OpKind.ALLTOALL, pricing_of("tcp"), HostLayout.uniform(2, ranks)).line
        contention = CONTENTION if ranks > 1 else 1
        assert line.per_byte_s == pytest.approx(ranks / 2 * contention / BETWEEN.bandwidth)


# ---------------------------------------------------------------------------------------------- predictions


def _names(kind: OpKind | str, cluster: Cluster, nbytes: int = 1 << 20) -> set[str]:
    return {one.name for one in predict(kind, nbytes, cluster)}


def test_predictions_name_the_algorithms_that_there_are_the_fastest_first() -> None:
    cluster = Cluster(hosts=64, ranks_per_host=8, backend=TCP)
    assert _names("allreduce", cluster) == {"native"}, "which goes host by host"
    assert _names("allreduce", replace(cluster, bitwise=True)) == {"native"}
    assert _names("allreduce", replace(cluster, backend=backends.get("gloo"))) == {"native"}
    assert _names(OpKind.BROADCAST, cluster) == {"native", "tree"}
    assert _names(OpKind.BROADCAST, replace(cluster, backend=backends.get("gloo"))) == {"native", "tree"}
    assert _names("allgather", cluster) == {"native", "ring"}
    for kind in ("alltoall", "gather", "scatter"):
        assert _names(kind, cluster) == {"native", "pairwise"}
    for kind in ("reduce", "reducescatter", "barrier", "send"):
        assert _names(kind, cluster) == {"native"}
    for kind in COLLECTIVES:
        times = [one.time_s for one in predict(kind, 1 << 24, cluster)]
        assert times == sorted(times)


def test_a_cluster_folds_as_its_backend_does_unless_it_is_told() -> None:
    cluster = Cluster(hosts=64, ranks_per_host=8, backend=TCP)
    by_host, in_order = (replace(cluster, bitwise=bitwise) for bitwise in (False, True))
    by_default = predict("allreduce", 4 << 20, cluster)
    assert by_default == predict("allreduce", 4 << 20, by_host) != predict("allreduce", 4 << 20, in_order)


def test_an_unknown_operation_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ValueError, match=r"no operation 'allredcue'.* allreduce"):
        predict("allredcue", 8, Cluster(hosts=2, ranks_per_host=2, backend=TCP))


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="0 hosts"):
        Cluster(hosts=0, ranks_per_host=8, backend=TCP)
    with pytest.raises(ValueError, match="one host"):
        Cluster(hosts=2, ranks_per_host=8, backend=backends.get("shm"))
    with pytest.raises(ValueError, match="nothing"):
        predict("nothing", 1, Cluster(hosts=1, ranks_per_host=1, backend=TCP))
    with pytest.raises(ValueError, match="-1 bytes"):
        predict("allreduce", -1, Cluster(hosts=1, ranks_per_host=1, backend=TCP))
    with pytest.raises(ValueError, match="no such link"):
        replace(INSIDE, bandwidth=0.0)
