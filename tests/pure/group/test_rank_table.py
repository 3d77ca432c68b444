"""Rank tables: the vendor's form both ways, every mistake named with its place, and the ranks that actors get."""

from __future__ import annotations

import copy
import json
import pickle
import random
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raycollect.errors import InvalidGroupError
from raycollect.group.rank_table import MOST_NBYTES, ActorPlacement, Device, RankTable, assign

DOCUMENTED = """
{
    "version":"1.0",
    "node_list":[
        {"device_list":[{"device_id":"0", "rank":"0"}, {"device_id":"1", "rank":"1"}]}
    ]
}
"""
"""The template of the vendor's document."""


def document_of(*nodes: list[tuple[Any, Any]]) -> dict[str, Any]:
    lists = [[{"device_id": device_id, "rank": rank} for device_id, rank in node] for node in nodes]
    return {"version": "1.0", "node_list": [{"device_list": devices} for devices in lists]}


@st.composite
def tables(draw: st.DrawFn) -> RankTable:
    """Up to four nodes of up to four devices; any device ids, any order of the ranks."""
    ids = draw(st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=4, unique=True), min_size=1, max_size=4))
    ranks = iter(draw(st.permutations(range(sum(map(len, ids))))))
    return RankTable(nodes=tuple(tuple(Device(device_id=d, rank=next(ranks)) for d in node) for node in ids))


def _problems(document: Any) -> list[str]:
    with pytest.raises(InvalidGroupError) as caught:
        RankTable.from_dict(document, source="table.json")
    first, *problems = caught.value.detail.split("\n  - ")
    assert first == "table.json is refused:"
    return problems


# ---------------------------------------------------------------------------------------------- reading and writing


def test_the_documented_file_is_read_and_written_back(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_text(DOCUMENTED, encoding="utf-8-sig")  # some editors put a mark first
    table = RankTable.read(path)
    assert table.nodes == ((Device(device_id=0, rank=0), Device(device_id=1, rank=1)),)
    assert (table.world_size, table.chip_map, str(table)) == (2, (0, 1), "2 ranks on 1 node")
    table.write(tmp_path / "again.json")
    assert json.loads((tmp_path / "again.json").read_text()) == json.loads(DOCUMENTED)


@given(tables())
def test_a_table_survives_its_json(table: RankTable) -> None:
    assert RankTable.from_dict(json.loads(table.to_json())) == table
    assert pickle.loads(pickle.dumps(table)) == table
    at = [(at, device) for at, devices in enumerate(table.nodes) for device in devices]
    assert all((table.node_of(d.rank), table.device_of(d.rank)) == (node, d.device_id) for node, d in at)
    for devices in table.to_dict()["node_list"]:
        assert all(type(value) is str for device in devices["device_list"] for value in device.values())


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_that_is_not_there_is_refused(rank: int) -> None:
    table = RankTable.of_device_ids([[4, 5]])
    for ask in (table.node_of, table.device_of):
        with pytest.raises(ValueError, match=rf"no rank {rank}; there are 0 to 1"):
            ask(rank)


def test_vendor_fields_are_ignored_and_numbers_may_be_integers() -> None:
    document = document_of([(1, "0"), ("0", 1)])
    document |= {"version": 1.0, "status": "completed"}
    document["node_list"][0]["server_id"] = "10.0.0.1"
    document["node_list"][0]["device_list"][0].update(device_ip="127.0.0.1", local_rank="0")
    before = copy.deepcopy(document)
    assert RankTable.from_dict(document) == RankTable.of_device_ids([[1, 0]])
    assert document == before


def test_coerce_takes_a_table_a_path_and_a_dict(tmp_path: Path) -> None:
    table = RankTable.of_device_ids([[0, 1]])
    table.write(tmp_path / "t.json")
    assert RankTable.coerce(table) is table
    assert RankTable.coerce(tmp_path / "t.json") == RankTable.coerce(str(tmp_path / "t.json")) == table
    assert RankTable.coerce(table.to_dict()) == table
    with pytest.raises(InvalidGroupError):
        RankTable.coerce([0, 1])


# ---------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00", b"[" * 100_000, b"9" * 5_000, b"null", b"[]", b"{}", None])
def test_a_file_that_is_no_table_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "table.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InvalidGroupError) as caught:
        RankTable.read(path)
    assert str(path) in caught.value.detail


BROKEN: list[tuple[str, Any]] = [
    *(("version", value) for value in ("2.0", {})),
    *(("node_list", value) for value in ("abc", [])),
    *(("node_list.1", value) for value in ("abc", {"device_list": []}, {"device_list": {}})),
    *(("node_list.1.device_list.0", value) for value in ([2], {"device_id": "0", "rank": "3"})),
    *(("node_list.1.device_list.0.rank", value) for value in ("3", "0")),
    ("node_list.0.device_list.1.device_id", "0"),
    *(
        (f"node_list.0.device_list.1.{name}", value)
        for name in ("device_id", "rank")
        for value in ("x", "", "-1", " 1", "1\n", "٣", "1" * 10, "1" * 5_000, -1, 1.0, True, 10**9, [1], {})
    ),
]
"""Where a table is changed, and to what."""


def _put(document: Any, at: str, value: Any) -> None:
    *path, last = (int(step) if step.isdecimal() else step for step in at.split("."))
    for step in path:
        document = document[step]
    document[last] = value


@pytest.mark.parametrize(("at", "value"), BROKEN, ids=lambda value: repr(value)[:40])
def test_one_mistake_is_one_problem_with_its_place(at: str, value: Any) -> None:
    document = document_of([("0", "0"), ("1", "1")], [("0", "2")])
    RankTable.from_dict(document)
    _put(document, at, value)
    (problem,) = _problems(document)
    *path, last = at.split(".")
    assert re.sub(r"\.(\d)", r"[\1]", ".".join(path)) in problem
    assert last.isdecimal() or last == "device_list" or last in problem


def test_all_mistakes_come_in_one_error() -> None:
    document = document_of([("0", "0"), ("0", "x")], [("a", "0"), ("1", "9")])
    document["version"] = "0.9"
    found = [problem.partition(" is ")[0] for problem in _problems(document)]
    assert sorted(found) == [
        "node_list[0].device_list[1]",
        "node_list[1].device_list[0]",
        "node_list[1].device_list[1].rank",
        "version",
    ]


HUGE = 10**5000  # which Python does not write


@pytest.mark.parametrize(
    "document",
    [
        {"version": HUGE, "node_list": HUGE},
        {"version": "1.0", "node_list": [{"device_list": [{"device_id": HUGE, "rank": -HUGE}]}]},
        {"x" * 10_000: 1, HUGE: 2},
        {"version": "1.0", "node_list": [{"device_list": [{"device_id": "x" * 1000, "rank": "y" * 1000}] * 50_000}]},
        {"version": "1.0", "node_list": [{}] * 100_001},
    ],
    ids=range(5),
)
def test_any_malformed_table_raises_a_short_typed_error(document: Any) -> None:
    with pytest.raises(InvalidGroupError) as caught:
        RankTable.from_dict(document)
    assert len(str(caught.value)) < 10_000


def test_a_file_that_is_too_long_is_not_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_text(RankTable.of_device_ids([[0]]).to_json().ljust(MOST_NBYTES))
    RankTable.read(path)
    with path.open("a") as file:
        file.write(" ")
    for too_long in (path, "/dev/zero"):
        with pytest.raises(InvalidGroupError, match=f"longer than {MOST_NBYTES} bytes"):
            RankTable.read(too_long)


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), min_size=1, max_size=3), min_size=1, max_size=3)
)
def test_a_table_is_refused_exactly_where_ranks_or_devices_collide(nodes: list[list[tuple[int, int]]]) -> None:
    ranks = sorted(rank for node in nodes for _, rank in node)
    good = ranks == list(range(len(ranks))) and all(len({d for d, _ in node}) == len(node) for node in nodes)
    devices = tuple(tuple(Device(device_id=d, rank=r) for d, r in node) for node in nodes)
    if good:
        assert RankTable.from_dict(document_of(*nodes)) == RankTable(nodes=devices)
    else:
        assert _problems(document_of(*nodes))
        with pytest.raises(InvalidGroupError, match=r"as in|expected each"):
            RankTable(nodes=devices)


def test_a_table_is_valid_from_birth() -> None:
    first, second = Device(device_id=0, rank=0), Device(device_id=0, rank=1)
    for nodes in ((), ((first,), ()), ((second,),)):
        with pytest.raises(InvalidGroupError):
            RankTable(nodes=nodes)
    for wrong in (-1, "0", 10**9):
        with pytest.raises(ValueError, match="a whole number of 0 to"):
            Device(device_id=wrong, rank=0)  # type: ignore[arg-type]
    with pytest.raises(AttributeError):
        RankTable.of_device_ids([[0]]).nodes = ()  # type: ignore[misc]


@pytest.mark.parametrize(
    "device_ids", [[], [[]], [[0, 0]], [[0], [-1]], [HUGE], [[0], "1"], "01", {"0": [0]}], ids=range(8)
)
def test_device_ids_that_make_no_table_are_refused(device_ids: Any) -> None:
    for wrong in (device_ids, [HUGE]):
        with pytest.raises(InvalidGroupError):
            RankTable.of_device_ids(wrong)


# ---------------------------------------------------------------------------------------------- the ranks of actors


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
