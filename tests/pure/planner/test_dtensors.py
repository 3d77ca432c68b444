"""The layouts of DTensors, against what torch cuts; what is refused; and how they look in a process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raycollect.backends.dtensors import is_dtensor, local_of, placement_of
from raycollect.core.placement import UNKNOWN, Cut, Placement
from raycollect.errors import LayoutError
from raycollect.planner.dtensors import layout_of, layout_of_side
from raycollect.weights.layouts.dtensors import layout_of as public_layout_of
from tests.pure.dtensors import FakeDTensor, FakeMesh, Partial, Replicate, Shard, _MaskPartial, _StridedShard

CUTS = st.one_of(
    st.builds(Cut, st.just("Shard"), st.integers(0, 1)),
    st.builds(Cut, st.just("_StridedShard"), st.integers(0, 1), st.integers(1, 3)),
    st.just(Cut("Replicate")),
)


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    mesh = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    world = int(np.prod(mesh))
    return Placement(
        shape=(draw(st.integers(0, 13)), draw(st.integers(1, 5))),
        dtype="float32",
        mesh=mesh,
        ranks=tuple(draw(st.permutations(range(world)))),
        at=draw(st.integers(0, world - 1)),
        cuts=tuple(draw(CUTS) for _ in mesh),
    )


def cut_by_torch(whole: Any, one: Placement, place: int) -> Any:
    """The local tensor of a place of the mesh, cut by torch's own code."""
    kinds = pytest.importorskip("torch.distributed.tensor.placement_types")
    at = np.unravel_index(place, one.mesh)
    for cut, size, index in zip(one.cuts, one.mesh, at, strict=True):
        if cut.kind == "Replicate":
            continue
        made = kinds.Shard(cut.dim)
        if cut.kind == "_StridedShard":
            made = kinds._StridedShard(cut.dim, split_factor=cut.factor)
        whole = made._split_tensor(whole, size, with_padding=False)[0][index]
    return whole


@given(placements())
@settings(max_examples=150)
def test_every_rank_has_what_torch_gives_it(one: Placement) -> None:
    torch = pytest.importorskip("torch")
    whole = torch.arange(int(np.prod(one.shape))).reshape(one.shape)
    laid = layout_of(one)
    assert laid.world_size == len(one.ranks)
    for rank in range(laid.world_size):
        expected = cut_by_torch(whole, one, one.ranks.index(rank)).numpy()
        shape = laid.local_shape(rank)
        assert shape == expected.shape
        found = np.full(shape, -1)
        for row in laid.regions.of_rank[rank]:
            there = tuple(slice(a, a + hi - lo) for a, (lo, hi) in zip(row.at, row.box, strict=True))
            found[there] = whole.numpy()[tuple(slice(lo, hi) for lo, hi in row.box)]
        np.testing.assert_array_equal(found, expected)


PLACED = Placement(shape=(4, 6), dtype="float32", mesh=(2,), ranks=(0, 1), at=0, cuts=(Cut("Shard", 0),))


def test_partial_sums_number_their_addends() -> None:
    one = replace(PLACED, mesh=(2, 2), ranks=(0, 1, 2, 3), cuts=(Cut("Partial"), Cut("Shard", 1)))
    laid = layout_of(one)
    assert laid.regions.parts == 2
    assert [(row.part, row.box[1]) for row in laid.regions.rows] == [(0, (0, 3)), (0, (3, 6)), (1, (0, 3)), (1, (3, 6))]


def test_a_part_that_is_empty_keeps_its_shape() -> None:
    laid = layout_of(replace(PLACED, shape=(5, 6), mesh=(4,), ranks=(0, 1, 2, 3)))
    assert [laid.local_shape(rank) for rank in range(4)] == [(2, 6), (2, 6), (1, 6), (0, 6)]


def test_ranks_are_those_of_torch_in_order_or_those_of_a_side() -> None:
    one = replace(PLACED, ranks=(7, 3))
    assert [row.box[0] for row in layout_of(one).regions.rows] == [(2, 4), (0, 2)]
    laid = layout_of_side("src", "w", [replace(one, at=1), one])
    assert not isinstance(laid, list)
    assert [row.box[0] for row in laid.regions.rows] == [(2, 4), (0, 2)]


@pytest.mark.parametrize(
    ("held", "words"),
    [
        ([PLACED, None], "no DTensor on rank 1 of src"),
        (
            [PLACED, replace(PLACED, ranks=(2, 3), at=1)],
            r"on mesh \[2\] of ranks 2, 3 as \(Shard\(0\)\) on rank 1 of src",
        ),
        ([PLACED, PLACED], r"of which there are places \[0, 0\]"),
        ([PLACED], r"a mesh of the 1 ranks that src_refs are"),
        ([replace(PLACED, cuts=(Cut("Secret(1)", UNKNOWN),))], r"with the placement Secret\(1\)"),
        ([replace(PLACED, dtype="float4")], "a DTensor of float4"),
    ],
)
def test_what_is_no_layout_of_the_side_is_told(held: list[Any], words: str) -> None:
    found = layout_of_side("src", "w", held)
    assert isinstance(found, list)
    (one,) = found
    assert (one.kind, one.field) == ("layout", "src of 'w'")
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(one.found + one.expected)


# ---------------------------------------------------------------------------------------------- in a process


def made(*cuts: Any, mesh: FakeMesh | None = None) -> FakeDTensor:
    mesh = mesh or FakeMesh(np.arange(2), (1,))
    return FakeDTensor(np.zeros((2, 6), np.float32), (4, 6), mesh, cuts)


def test_a_dtensor_is_known_by_what_it_looks_like() -> None:
    one = made(Shard(0))
    assert is_dtensor(one)
    assert not is_dtensor(np.zeros(2))
    assert local_of(one) is one._local_tensor
    assert placement_of(one) == replace(PLACED, at=1)
    mesh = FakeMesh(np.arange(8).reshape(2, 2, 2), (1, 0, 1))
    placed = placement_of(made(Replicate(), _StridedShard(0, split_factor=2), Partial("sum"), mesh=mesh))
    assert placed is not None
    assert placed.at == 5
    assert placed.cuts == (Cut("Replicate"), Cut("_StridedShard", 0, 2), Cut("Partial"))


def test_layouts_of_a_dict_and_of_one() -> None:
    assert public_layout_of(made(Shard(0))) == layout_of(PLACED)
    assert public_layout_of({"w": made(Shard(0))}) == {"w": layout_of(PLACED)}


def test_all_that_have_no_layout_are_told_by_name() -> None:
    values = {
        "ok": made(Shard(0)),
        "plain": np.zeros(2),
        "mean": made(Partial("avg")),
        "masked": made(_MaskPartial("sum")),
        "away": made(Shard(0), mesh=FakeMesh(np.arange(2), None)),
    }
    with pytest.raises(LayoutError) as caught:
        public_layout_of(values)
    told = {one.field: one.found for one in caught.value.violations}
    assert told == {
        "layout of 'plain'": "of a numpy.ndarray",
        "layout of 'mean'": "a DTensor with the placement Partial(avg)",
        "layout of 'masked'": "a DTensor with the placement _MaskPartial(sum)",
        "layout of 'away'": "of a tests.pure.dtensors.FakeDTensor, whose mesh does not have this process",
    }
