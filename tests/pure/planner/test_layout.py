"""Layouts: what a mesh means, fused tensors, regions, their forms as text and bytes, and what is refused."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raycollect.errors import InvalidArgumentError, RefusedError
from raycollect.planner.boxes import BoxIndex, atoms, common, halved, volume, without
from raycollect.planner.joined import join_layouts
from raycollect.planner.layout import Layout, Region, fused_layouts, layout
from raycollect.weights.layouts.record import record_layout
from tests.pure.resharding import boxes, meshes

WORLD = 4


def held(one: Layout) -> list[tuple[Any, ...]]:
    return [(row.rank, row.box, row.at, row.part) for row in one.regions.rows]


def test_an_axis_cuts_a_dimension_and_others_replicate() -> None:
    one = layout([8, 4], mesh={"dp": 2, "tp": 2}, spec=("tp", None))
    whole = (0, 4)
    assert held(one) == [(rank, ((4 * (rank % 2), 4 * (rank % 2) + 4), whole), (0, 0), 0) for rank in range(4)]
    assert one.local_shape(3) == (4, 4)
    assert one.world_size == 4


def test_several_axes_cut_one_dimension_with_the_first_one_slowest() -> None:
    one = layout([8], mesh={"a": 2, "b": 2}, spec=(("b", "a"),))
    assert [row.box[0] for row in one.regions.rows] == [(0, 2), (4, 6), (2, 4), (6, 8)]


def test_uneven_sizes_are_cut_as_torch_cuts_them() -> None:
    torch = pytest.importorskip("torch")
    for size in range(12):
        one = layout([size], mesh={"tp": 4}, spec=("tp",))
        chunks = [len(chunk) for chunk in torch.zeros(size).chunk(4)] if size else []
        assert [one.local_shape(rank) for rank in range(4)] == [
            (chunks[rank] if rank < len(chunks) else 0,) for rank in range(4)
        ]


def test_partial_sums_number_their_addends() -> None:
    one = layout([4], mesh={"dp": 2, "tp": 2}, spec=("tp",), partial="dp")
    assert one.regions.parts == 2
    assert [row.part for row in one.regions.rows] == [0, 0, 1, 1]


def test_fused_tensors_lie_behind_each_other() -> None:
    parts = {"q": layout([8, 2], mesh={"tp": 2}, spec=("tp",)), "k": layout([4, 2], mesh={"tp": 2}, spec=("tp",))}
    fused = fused_layouts("qkv", parts)
    assert [one.key for one in fused.values()] == ["qkv", "qkv"]
    assert [row.at for row in fused["k"].regions.rows] == [(4, 0), (4, 0)]
    assert [row.box for row in fused["k"].regions.rows] == [((0, 2), (0, 2)), ((2, 4), (0, 2))]


def test_a_dtype_that_is_said_is_asked_for() -> None:
    silent = layout([4], mesh={"tp": 2}, spec=("tp",))
    asked = layout([4], mesh={"tp": 2}, spec=("tp",), dtype="float32")
    assert (silent.dtype, silent.converts, asked.converts) == ("float32", False, True)
    assert silent != asked == silent.astype(np.float32)
    rows = list(silent.regions.rows)
    assert Layout.of_regions([4], rows) == silent
    assert Layout.of_regions([4], rows, dtype="float32") == asked
    with pytest.raises(InvalidArgumentError, match="'float31', expected one of bool"):
        silent.astype("float31")


def test_equal_layouts_are_equal_however_they_were_made() -> None:
    by_mesh = layout([4], mesh={"tp": 2}, spec=("tp",))
    rows = [Region(rank=1, box=((2, 4),), at=(0,)), Region(rank=0, box=((0, 2),), at=(0,))]
    by_hand = Layout.of_regions([4], rows)
    assert by_mesh == by_hand
    assert hash(by_mesh) == hash(by_hand)
    assert by_mesh != layout([4], mesh={"tp": 2}, spec=("tp",), dtype="float64")
    assert by_mesh != layout([4], mesh={"tp": 2})


@given(st.data())
def test_layouts_travel_as_bytes(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from([meshes, boxes]))
    one = data.draw(kind((3, 4), "int16", WORLD, partial=True))
    again = Layout.from_bytes(one.to_bytes())
    assert again == one
    assert held(again) == held(one)
    assert str(again) == str(one)


@pytest.mark.parametrize("data", [b"", b"\xc1", b"nothing", layout([4], mesh={"a": 1}).to_bytes()[:-3]])
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(InvalidArgumentError, match="to_bytes"):
        Layout.from_bytes(data)


def test_a_layout_tells_what_it_is() -> None:
    one = layout([8, 4], mesh={"dp": 2, "tp": 2}, spec=("tp",), partial="dp", dtype=np.float16)
    assert repr(one) == "<Layout float16[8, 4] over 4 ranks: mesh dp=2, tp=2, spec (tp, None), partial over dp>"
    assert "rank 3: [4:8, 0:4] at [0:4, 0:4] of its tensor, addend 2 of 2" in str(one)
    assert str(layout([99], mesh={"a": 99}, spec=("a",))).endswith("... and 83 more regions")


BoolOfNumpy1 = type("bool_", (), {})


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (BoolOfNumpy1, "bool"),
        *((one, np.dtype(one).name) for one in (bool, int, float, complex, np.bool_, np.longlong, np.double)),
        *((one, np.dtype(one).name) for one in ("float", "half", "longlong", "c16", ">f4", "<i8", "=u2", "|b1", "f2")),
        *((np.dtype(one), np.dtype(one).name) for one in (">f4", ">i2", "longlong", "c8", "|b1")),
    ],
)
def test_dtypes_have_the_names_that_numpy_gives_them(dtype: Any, name: str) -> None:
    assert layout([2], mesh={"a": 1}, dtype=dtype) == layout([2], mesh={"a": 1}, dtype=name)


HUGE = 2**5000
ODD: list[Any] = [
    *(None, True, 3, -1, 2**70, HUGE, 1.5, float("nan"), float("inf"), b"x", "", "\ud800", "x" * 100_000),
    *([], {}, (), [None], [[1, 2]], ["a", "a"], [HUGE], {"a": None}, {None: 2}, {"a": 2**70}, {"a": 2**40}, {1: 2}),
    *({"\ud800": 2}, {"a": 2**19, "b": 4}, object(), np.ones(3), np.float32(4), np.bool_(True), int, range(3)),
]
ONE = layout([4, 4], mesh={"a": 2}, spec=("a",))
PLACE: dict[str, Any] = {"rank": 0, "box": ((0, 4),), "at": (0,), "part": 0}
CALLS: dict[str, Callable[[Any], object]] = {
    "shape": lambda odd: layout(odd, mesh={"a": 2}, spec=("a",)),
    "mesh": lambda odd: layout([4], mesh=odd, spec=("a",)),
    "spec": lambda odd: layout([4], mesh={"a": 2}, spec=odd),
    "axis": lambda odd: layout([4], mesh={"a": 2}, spec=(odd,)),
    "partial": lambda odd: layout([4], mesh={"a": 2}, partial=odd),
    "fused key": lambda odd: fused_layouts(odd, {"q": ONE}),
    "fused layouts": lambda odd: fused_layouts("qkv", odd),
    "fused layout": lambda odd: fused_layouts("qkv", {"q": odd}),
    "fused dim": lambda odd: fused_layouts("qkv", {"q": ONE}, odd),
    "regions": lambda odd: Layout.of_regions([4], odd),
    "shape of regions": lambda odd: Layout.of_regions(odd, [Region(**PLACE)]),
    **{
        name: lambda odd, name=name: Layout.of_regions([4], [Region(**{**PLACE, name: odd})])  # type: ignore[misc]
        for name in PLACE
    },
    "span": lambda odd: Layout.of_regions([4], [Region(**{**PLACE, "box": (odd,)})]),
    "bytes": Layout.from_bytes,
    "joined": join_layouts,
    "joined rank": lambda odd: join_layouts([odd]),
    "loader": lambda odd: record_layout(None if callable(odd) else odd, {"a": np.ones(3)}, {"a": (3,)}),
    "local": lambda odd: record_layout(lambda full, local: None, odd, {"a": (3,)}),
    "full": lambda odd: record_layout(lambda full, local: None, {"a": np.ones(3)}, odd),
    "full shape": lambda odd: record_layout(lambda full, local: None, {"a": np.ones(3)}, {"a": odd}),
}


@pytest.mark.parametrize("call", CALLS)
def test_odd_arguments_are_taken_or_refused_in_few_words(call: str) -> None:
    refused = []
    for odd in ODD:
        try:
            CALLS[call](odd)
        except RefusedError as exc:
            refused.append(pickle.loads(pickle.dumps(exc)))
    assert refused
    assert max(len(str(error)) for error in refused) < 5000


def test_numbers_of_numpy_are_numbers() -> None:
    plain = Region(rank=1, box=((0, 2),), at=(3,))
    one = Region(rank=np.int64(1), box=np.array([[0, 2]]), at=np.array([3]), part=np.uint8(0))  # type: ignore[arg-type]
    assert Layout.of_regions(np.array([4]), [one]) == Layout.of_regions([4], [plain])
    assert layout(np.array([4]), mesh={"a": np.int32(2)}, spec=("a",)) == layout([4], mesh={"a": 2}, spec=("a",))


@pytest.mark.parametrize("dtype", [object, str, b"f4", 3, "\ud800", float("nan"), [], np.dtype("S3"), "x" * 10_000])
def test_other_dtypes_are_refused_in_few_words(dtype: Any) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        layout([2], mesh={"a": 1}, dtype=dtype)
    (violation,) = caught.value.violations
    assert violation.field == "dtype"
    assert len(violation.found) < 100


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"spec": ("rows",)}, "axis 'rows', expected an axis of the mesh: 'dp', 'tp'"),
        ({"spec": ("tp", "tp")}, "axis 'tp' twice"),
        ({"spec": ("tp",), "partial": "tp"}, "axis 'tp' twice"),
        ({"spec": "tp"}, "'tp', expected for each dimension an axis"),
        ({"spec": (None, None, "tp")}, "3 dimensions, expected at most 2"),
        ({"mesh": {}}, "the size of each axis"),
        ({"mesh": {"dp": 0, "tp": 1}}, "the size of each axis"),
        ({"dtype": "float31"}, "'float31', expected one of bool"),
        ({"shape": [4, -1]}, "whole numbers from 0 on"),
    ],
)
def test_what_makes_no_sense_is_told(arguments: dict[str, Any], words: str) -> None:
    given_ = {"shape": [4, 4], "mesh": {"dp": 2, "tp": 2}} | arguments
    with pytest.raises(InvalidArgumentError, match=words):
        layout(given_.pop("shape"), **given_)


def test_regions_that_make_no_sense_are_told() -> None:
    with pytest.raises(InvalidArgumentError, match="a box in the shape"):
        Layout.of_regions([4], [Region(rank=0, box=((0, 5),), at=(0,))])
    with pytest.raises(InvalidArgumentError, match="a place in the local tensor"):
        Region(rank=0, box=((3, 2),), at=(0,))
    with pytest.raises(InvalidArgumentError, match="from 0 on"):
        Region(rank=-1, box=((0, 2),), at=(0,))
    with pytest.raises(InvalidArgumentError, match="at least one Region"):
        Layout.of_regions([4], [])


def test_the_last_ranks_may_hold_nothing() -> None:
    rows = [Region(rank=0, box=((0, 4),), at=(0,))]
    wide = Layout.of_regions([4], rows, world_size=3)
    assert (wide.world_size, wide.local_shape(0), wide.local_shape(2)) == (3, (4,), None)
    assert Layout.from_bytes(wide.to_bytes()) == wide != Layout.of_regions([4], rows)
    for wrong in (0, True, "3"):
        with pytest.raises(InvalidArgumentError):
            Layout.of_regions([4], rows, world_size=wrong)  # type: ignore[arg-type]


def test_layouts_that_can_not_be_fused_are_told() -> None:
    one, other = layout([4], mesh={"a": 2}), layout([4], mesh={"a": 2}, dtype="int8")
    with pytest.raises(InvalidArgumentError, match="of one dtype"):
        fused_layouts("both", {"one": one, "other": other})
    with pytest.raises(InvalidArgumentError, match="a dimension of the tensors"):
        fused_layouts("both", {"one": one}, dim=1)


BOXES = st.lists(
    st.tuples(st.tuples(st.integers(0, 3), st.integers(0, 3)), st.tuples(st.integers(0, 5), st.integers(0, 5))).map(
        lambda pair: (pair[0], tuple(map(max, *pair)))
    ),
    max_size=6,
)


@given(BOXES)
def test_atoms_are_all_elements_once_with_all_boxes_that_have_them(some: list[Any]) -> None:
    def elements(box: Any) -> set[tuple[int, int]]:
        return {(x, y) for x in range(box[0][0], box[1][0]) for y in range(box[0][1], box[1][1])}

    found: dict[tuple[int, int], list[int]] = {}
    for box, places in atoms(some):
        for element in elements(box):
            assert element not in found
            found[element] = sorted(places)
    every = {element for box in some for element in elements(box)}
    assert found == {one: [at for at, box in enumerate(some) if one in elements(box)] for one in every}
    if some:
        left = set().union(*map(elements, without(some[0], some[1:])))
        assert left == elements(some[0]).difference(*map(elements, some[1:]))
        solid = [box for box in some if volume(box)]
        if volume(some[0]):
            over = BoxIndex(solid).over(some[0])
            assert over == [at for at, box in enumerate(solid) if common(box, some[0]) is not None]
            assert sorted(e for part in halved(some[0], 3) for e in elements(part)) == sorted(elements(some[0]))
