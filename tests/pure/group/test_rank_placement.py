"""Ranks that a table gives to actors, by node and device."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raycollect.errors import InvalidGroupError
from raycollect.group.rank_table import ActorPlacement, Device, RankTable, assign
from tests.pure.group.rank_tables import document_of, tables


def _actors(table: RankTable, seed: int) -> list[tuple[int, Device]]:
    """(node, device) of one actor per device, shuffled so that the nodes first appear in the table's order."""
    rng = random.Random(seed)
    waiting = [[(at, device) for device in rng.sample(node, len(node))] for at, node in enumerate(table.nodes)]
    seen, order = 0, []
    while any(waiting):
        at = rng.choice([at for at, left in enumerate(waiting) if left and at <= seen])
        order.append(waiting[at].pop())
        seen = max(seen, at + 1)
    return order


@given(tables(), st.integers(0, 10**6))
def test_actors_get_the_ranks_of_the_devices_they_own(table: RankTable, seed: int) -> None:
    actors = _actors(table, seed)
    places = [ActorPlacement(node_id=f"n{node}", devices=(device.device_id,)) for node, device in actors]
    assert assign(table, places) == tuple(device.rank for _, device in actors)


@given(tables(), st.integers(0, 10**6), st.sampled_from([(), (0, 1), (10**6,), (5,)]))
def test_otherwise_they_get_their_nodes_ranks_in_the_files_order(
    table: RankTable, seed: int, devices: tuple[int, ...]
) -> None:
    """The actors own no device, several, one that is not in the table, or one that all share."""
    nodes = [node for node, _ in _actors(table, seed)]
    ranks = assign(table, [ActorPlacement(node_id=f"n{node}", devices=devices) for node in nodes])
    assert sorted(ranks) == list(range(table.world_size))
    for at, node in enumerate(table.nodes):
        got = [rank for rank, where in zip(ranks, nodes, strict=True) if where == at]
        assert got == [device.rank for device in node]


def test_owning_all_devices_of_a_node_is_not_owning_one_each() -> None:
    table = RankTable.from_dict(document_of([(1, 0), (0, 1)]))
    places = [ActorPlacement(node_id="a", devices=(0, 1)), ActorPlacement(node_id="a")]
    assert assign(table, places) == (0, 1)
    assert RankTable.of_places([ActorPlacement(node_id="a", devices=(8, 9)), ActorPlacement(node_id="a")]).chip_map == (
        0,
        1,
    )


@given(tables(), st.integers(0, 10**6), st.booleans())
def test_the_table_of_a_group_gives_its_members_the_same_ranks(table: RankTable, seed: int, owning: bool) -> None:
    order = _actors(table, seed)
    places = [ActorPlacement(node_id=f"n{node}", devices=(d.device_id,) if owning else ()) for node, d in order]
    made = RankTable.of_places(places)
    assert assign(made, places) == tuple(range(len(places)))
    for rank, (node, device) in enumerate(order):
        assert places[rank].node_id == f"n{made.node_of(rank)}" == f"n{node}"
        if owning:
            assert made.device_of(rank) == device.device_id
    if not owning:
        assert all([d.device_id for d in node] == list(range(len(node))) for node in made.nodes)


def test_an_actor_without_a_name_is_named_by_its_position() -> None:
    with pytest.raises(InvalidGroupError, match=r"Ray node a has 2 actors \(actors\[0\], actors\[1\]\)"):
        assign(RankTable.of_device_ids([[0]]), [ActorPlacement(node_id="a"), ActorPlacement(node_id="a")])


@pytest.mark.parametrize(
    ("accelerator_ids", "devices"),
    [
        ({}, ()),
        ({"GPU": [], "TPU": []}, ()),
        ({"GPU": ["3"], "TPU": []}, (3,)),
        ({"GPU": ["0", "1"]}, (0, 1)),
        ({"GPU": ["GPU-8f2c"], "NPU": ["5"]}, (5,)),
    ],
)
def test_place_is_read_from_ray_accelerator_ids(
    accelerator_ids: dict[str, list[str]], devices: tuple[int, ...]
) -> None:
    assert ActorPlacement.of("n", accelerator_ids, "W(1)") == ActorPlacement(node_id="n", devices=devices, actor="W(1)")
