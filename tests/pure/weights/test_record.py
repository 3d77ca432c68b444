"""`record_layout`: what is read off a loader is what the loader does to real tensors; the rest is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raycollect.errors import InvalidArgumentError, LayoutError
from raycollect.planner.joined import join_layouts
from raycollect.planner.layout import Layout, layout
from raycollect.weights.layouts.record import record_layout
from tests.pure.resharding import UNTOUCHED, held_by

LIBRARIES = ["numpy", "torch"]


class Library(NamedTuple):
    """What loaders use of numpy or torch."""

    zeros: Callable[..., Any]
    cat: Callable[..., Any]
    stack: Callable[..., Any]
    as_array: Callable[[Any], Any]


def library(name: str) -> Library:
    if name == "numpy":
        return Library(lambda shape: np.zeros(shape, np.float32), np.concatenate, np.stack, lambda x: x)
    torch = pytest.importorskip("torch")
    return Library(torch.zeros, torch.cat, torch.stack, lambda x: x.numpy())


def filled(layouts: Mapping[str, Layout], whole: Mapping[str, Any], local: Mapping[str, Any]) -> dict[str, Any]:
    """What the layouts say that rank 0 holds."""
    tensors = held_by(layouts, {name: np.asarray(whole[name]) for name in layouts})[0]
    return {name: tensors.get(name, np.full(tuple(local[name].shape), UNTOUCHED)) for name in local}


def check(used: Library, loader: Callable[..., object], local: Mapping[str, Any], whole: Mapping[str, Any]) -> Any:
    """Records a loader, and compares with what it does to real tensors."""
    layouts = record_layout(loader, local, whole)
    real = {name: used.zeros(tuple(tensor.shape)) + UNTOUCHED for name, tensor in local.items()}
    loader(whole, real)
    for name, array in filled(layouts, whole, local).items():
        np.testing.assert_array_equal(array, used.as_array(real[name]), err_msg=name)
    return layouts


def wholes(used: Library, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Full tensors, no two elements of which are equal."""
    tensors, begin = {}, 1000
    for name, shape in shapes.items():
        tensors[name] = used.zeros(shape)
        used.as_array(tensors[name])[...] = np.arange(begin, begin + int(np.prod(shape))).reshape(shape)
        begin += int(np.prod(shape))
    return tensors


@st.composite
def programs(draw: st.DrawFn) -> tuple[dict[str, tuple[int, int]], Callable[[Library], Callable[..., None]], Any]:
    """A loader of one local tensor: boxes of full tensors behind each other, or each in a slot; perhaps transposed."""
    shapes = {name: (draw(st.integers(1, 6)), draw(st.integers(1, 6))) for name in "abc"[: draw(st.integers(1, 3))]}
    is_turned, is_stacked = draw(st.booleans()), draw(st.booleans())
    rows = min(shape[0] for shape in shapes.values())
    columns = min(shape[1] for shape in shapes.values())
    height, width = draw(st.integers(1, rows)), draw(st.integers(1, columns))
    picks = []
    for _ in range(draw(st.integers(1, 4))):
        name = draw(st.sampled_from(sorted(shapes)))
        lo = draw(st.integers(0, shapes[name][0] - height)), draw(st.integers(0, shapes[name][1] - width))
        picks.append((name, lo))
    padding = draw(st.integers(0, 2))

    def loader(used: Library) -> Callable[..., None]:
        def load(full: Any, local: Any) -> None:
            boxes = [full[name][r : r + height, c : c + width] for name, (r, c) in picks]
            boxes = [box.T if is_turned else box for box in boxes]
            joined = used.stack(boxes) if is_stacked else used.cat(boxes)
            local["w"][: joined.shape[0]] = joined

        return load

    each = (width, height) if is_turned else (height, width)
    shape = (len(picks) + padding, *each) if is_stacked else (len(picks) * each[0] + padding, each[1])
    return shapes, loader, shape


@pytest.mark.parametrize("name", LIBRARIES)
@given(programs())
@settings(max_examples=60)
def test_layouts_say_what_the_loader_does(name: str, program: Any) -> None:
    used = library(name)
    shapes, loader, shape = program
    layouts = check(used, loader(used), {"w": used.zeros(shape)}, wholes(used, shapes))
    assert Layout.from_bytes(next(iter(layouts.values())).to_bytes()) == next(iter(layouts.values()))


@pytest.mark.parametrize("places", [[(0, 0), (0, 1), (0, 1), (1, 1)], [(0, 0), (1, 0), (1, 1), (0, 1)]])
def test_single_elements_may_lie_behind_each_other_along_two_dimensions(places: list[tuple[int, int]]) -> None:
    def load(full: Any, local: Any) -> None:
        for at, (row, column) in enumerate(places):
            local["w"][at] = full["a"][row : row + 1, column : column + 1]

    used = library("numpy")
    check(used, load, {"w": used.zeros((4, 1, 1))}, wholes(used, {"a": (2, 2)}))


def engine(rank: int, used: Library) -> Callable[..., None]:
    """A loader as of an inference engine, for rank `rank` of 2: fused QKV, strided heads, experts, padding."""

    def load(full: Any, local: Any) -> None:
        local["qkv"][:4] = full["q"][4 * rank : 4 * rank + 4]
        for at, name in ((4, "k"), (6, "v")):
            local["qkv"][at : at + 2] = full[name].reshape(2, 2, 6)[rank]
        local["heads"][...] = full["heads"].reshape(2, 2, 3, 4)[:, rank].reshape(6, 4)  # one of each pair of heads
        local["down"][...] = full["down"][:, 3 * rank : 3 * rank + 3].T
        for expert in range(3):
            local["w13"][expert, :2] = full[f"gate.{expert}"][2 * rank : 2 * rank + 2]
            local["w13"][expert, 2:] = full[f"up.{expert}"][2 * rank : 2 * rank + 2]
        local["w2"] = used.stack([full[f"out.{expert}"][:, 2 * rank : 2 * rank + 2] for expert in range(3)])
        local["all"][...] = full["all"].reshape(12, 5)[6 * rank : 6 * rank + 6]
        local["vocabulary"][: 3 - rank] = full["vocabulary"][3 * rank : 3 * rank + 3]
        local["norm"][...] = full["norm"]

    return load


LOCAL = {
    "qkv": (8, 6),
    "heads": (6, 4),
    "down": (3, 5),
    "w13": (3, 4, 5),
    "w2": (3, 5, 2),
    "all": (6, 5),
    "vocabulary": (4, 2),
    "norm": (6,),
}
FULL = {
    "q": (8, 6),
    "k": (4, 6),
    "v": (4, 6),
    "heads": (12, 4),
    "down": (5, 6),
    "all": (4, 3, 5),
    **{f"{name}.{expert}": (4, 5) for name in ("gate", "up") for expert in range(3)},
    **{f"out.{expert}": (5, 4) for expert in range(3)},
    "vocabulary": (5, 2),
    "norm": (6,),
    "unused": (3,),
}


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_loader_of_an_engine(name: str) -> None:
    used = library(name)
    local = {key: used.zeros(shape) for key, shape in LOCAL.items()}
    ranks = [check(used, engine(rank, used), local, wholes(used, FULL)) for rank in range(2)]
    joined = join_layouts(ranks)
    assert set(joined) == set(FULL) - {"unused"}
    assert joined["norm"] == layout([6], mesh={"dp": 2}, dtype="float32")  # which is the loader's to convert
    assert joined["q"].key == "qkv"
    assert len(joined["heads"].regions.rows) == 4
    assert joined["down"].axes == (((1, 0),), ((0, 0),))
    assert joined["gate.1"].axes == (((0, 0), (1, 4)), ((2, 0),))
    assert joined["vocabulary"].local_shape(1) == (4, 2)


def test_parameters_without_storage_are_filled_themselves_and_others_are_left_alone() -> None:
    torch = pytest.importorskip("torch")
    with torch.device("meta"):
        module = torch.nn.Linear(4, 2, bias=False)

    def load(full: Any, local: Any) -> None:
        assert local["weight"] is module.weight
        module.weight.data.copy_(full["weight"].to(torch.bfloat16).chunk(2)[1].contiguous())

    layouts = record_layout(load, dict(module.named_parameters()), {"weight": torch.empty(4, 4, dtype=torch.float16)})
    assert layouts["weight"].dtype == "float32"
    assert [row.box for row in layouts["weight"].regions.rows] == [((2, 4), (0, 4))]
    real = torch.nn.Linear(4, 2, bias=False)
    before = real.weight.clone()
    record_layout(lambda full, local: local["weight"].copy_(full["w"]), {"weight": real.weight}, {"w": (2, 4)})
    assert torch.equal(real.weight, before)


def refused(name: str, load: Callable[..., object], shape: tuple[int, ...] = (4, 3)) -> str:
    with pytest.raises(LayoutError) as caught:
        record_layout(load, {"w": library(name).zeros(shape)}, {"a": (4, 3), "b": (4, 3), "c": (5,)})
    return str(caught.value)


def put(value: Callable[[Any], Any]) -> Callable[..., None]:
    def load(full: Any, local: Any) -> None:
        local["w"][...] = value(full)

    return load


@pytest.mark.parametrize("name", LIBRARIES)
def test_what_can_not_be_recorded_is_named(name: str) -> None:
    assert "mul" in refused(name, put(lambda full: full["a"] * 2))
    assert "add" in refused(name, put(lambda full: full["a"] + full["b"]))
    assert "of shape [2, 3], expected shape [4, 3]" in refused(name, lambda full, local: local.update(w=full["a"][:2]))
    assert "no placeholder any more" in refused(name, lambda full, local: local.update(w=3))
    assert "no placeholder any more" in refused(name, lambda full, local: local.pop("w"))


def test_what_numpy_alone_and_torch_alone_do_is_named() -> None:
    torch = pytest.importorskip("torch")
    assert "numpy.add" in refused("numpy", put(lambda full: full["a"].sum(0)))
    assert "ufunc 'multiply'" in refused("numpy", put(lambda full: np.asarray(full["a"]).view(np.ndarray) * 2))
    assert "torch's view as another dtype" in refused("torch", put(lambda full: full["a"].view(torch.int32)))
    assert "meta" in refused("torch", put(lambda full: full["a"].tolist()))
    assert "numpy's view as another dtype" in refused("numpy", put(lambda full: full["a"].view(np.int16)))
    assert "torch's fill_" in refused("torch", lambda full, local: local["w"].fill_(full["a"][0, 0]))
    assert "torch's add_" in refused("torch", lambda full, local: local["w"].copy_(full["a"]).add_(1))
    assert "torch's fill_" in refused("torch", put(lambda full: torch.empty(3, device="meta").fill_(full["a"][0, 0])))
    for taken in (lambda full: full["a"].tolist(), lambda full: [full["c"][0], full["c"][1], 0]):
        assert "numpy's assignment of elements of type" in refused("numpy", put(taken))
    assert "torch's index_put_" in refused("torch", lambda full, local: local["w"].__setitem__([0], full["a"][0]))


@pytest.mark.parametrize("name", LIBRARIES)
def test_what_is_no_boxes_is_told(name: str) -> None:
    def mixed(full: Any, local: Any) -> None:
        local["w"][:2] = full["a"][:2]
        local["w"][2, :] = full["c"][:3]

    def both(full: Any, local: Any) -> None:
        local["w"][...] = full["a"]
        local["x"][...] = full["a"]

    assert "filled from tensors of different numbers of dimensions: 'a', 'c'" in refused(name, mixed)
    used = library(name)
    with pytest.raises(LayoutError, match="'a' is in 'w' and in 'x'"):
        record_layout(both, {"w": used.zeros((4, 3)), "x": used.zeros((4, 3))}, {"a": (4, 3)})


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_turned_column_is_single_elements_unless_they_are_too_many(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def turned(full: Any, local: Any) -> None:
        local["w"][:3, :3] = full["a"][:3, :3]
        local["w"][3:, :3] = full["b"][:3, 1:2].T

    used = library(name)
    check(used, turned, {"w": used.zeros((4, 3))}, wholes(used, {"a": (4, 3), "b": (4, 3)}))
    monkeypatch.setattr("raycollect.weights.layouts.identities.MOST_BOXES", 3)
    assert "no view of it has their dimensions" in refused(name, turned)


def test_a_list_is_assigned_as_numpy_does_it():
    used = library("numpy")
    whole = wholes(used, {"a": (3,), "b": (3,)})
    layouts = check(used, put(lambda full: [full["a"], full["b"]]), {"w": used.zeros((2, 3))}, whole)
    assert list(layouts) == ["a", "b"]
    assert record_layout(put(lambda full: [1.0, 2.0, 3.0]), {"w": used.zeros((3,))}, whole) == {}


def test_scattered_elements_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raycollect.weights.layouts.identities.MOST_BOXES", 3)
    assert "scattered elements of 'a'" in refused("numpy", put(lambda full: full["a"][::-1]))


def test_what_comes_from_no_full_tensor_is_in_no_region() -> None:
    def load(full: Any, local: Any) -> None:
        local["w"].fill(0)
        local["w"][:2] = full["a"][:2]
        local["w"][1] = 7.0

    torch = pytest.importorskip("torch")

    def padded(full: Any, local: Any) -> None:
        local["w"].copy_(torch.nn.functional.pad(full["a"][:1], (0, 0, 0, 3), value=1.0))

    (padding,) = record_layout(padded, {"w": torch.zeros(4, 3, dtype=torch.float64)}, {"a": (4, 3)}).values()
    (recorded,) = record_layout(load, {"w": np.zeros((4, 3))}, {"a": (4, 3)}).values()
    assert recorded == padding
    assert [row.box for row in recorded.regions.rows] == [((0, 0), (0, 0)), ((0, 1), (0, 3))]
    assert recorded.local_shape(0) == (4, 3)
    assert record_layout(lambda full, local: None, {"w": np.zeros(2)}, {"a": (2,)}) == {}


def test_what_the_loader_itself_raises_is_passed_on() -> None:
    with pytest.raises(KeyError, match="nothing"):
        record_layout(put(lambda full: full["nothing"]), {"w": np.zeros(2)}, {"a": (2,)})
    with pytest.raises(ValueError, match="broadcast"):
        record_layout(put(lambda full: full["a"]), {"w": np.zeros(2)}, {"a": (3,)})


@pytest.mark.parametrize(
    ("local", "names", "words"),
    [
        ({}, {"a": (2,)}, "at least one tensor each"),
        ({"w": 3}, {"a": (2,)}, r"local\['w'\] is an int"),
        ({"w": np.zeros(2)}, {"a": 3}, r"names\['a'\] is an int"),
    ],
)
def test_arguments_that_make_no_sense_are_told(local: Any, names: Any, words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        record_layout(lambda full, there: None, local, names)


def test_ranks_that_differ_are_told_by_name() -> None:
    first, other = layout([4], mesh={"r": 1}), layout([4], mesh={"r": 1}, dtype="int8")
    assert join_layouts([{"a": first}, {"a": first, "b": other}])["b"].regions.rows[0].rank == 1
    with pytest.raises(LayoutError) as caught:
        join_layouts([{"a": first, "b": layout([4], mesh={"r": 2})}, {"a": other}])
    assert [(v.rank, v.field, v.found) for v in caught.value.violations] == [
        (0, "layout of 'b'", "over 2 ranks"),
        (1, "layout of 'a'", "int8[4]"),
    ]
    with pytest.raises(LayoutError, match="layouts of each rank"):
        join_layouts([])
