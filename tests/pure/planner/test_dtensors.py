"""The layouts of DTensors, against what torch cuts; what is refused; and how they look in a process."""

from __future__ import annotations

import importlib
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raycollect.backends.dtensors import is_dtensor, local_of, placement_of
from raycollect.core.placement import UNKNOWN, Cut, Placement
from raycollect.errors import LayoutError
from raycollect.planner.dtensors import layout_of, layout_of_side
from raycollect.planner.layout import Layout
from raycollect.weights.layouts.dtensors import layout_of as public_layout_of
from tests.pure import threaded_job
from tests.pure.dtensors import FakeDTensor, FakeMesh, Partial, Replicate, Shard, _MaskPartial, _StridedShard
from tests.support.values import replace

CUTS = st.one_of(
    st.builds(Cut, st.just("Shard"), st.integers(0, 1), st.just(1)),
    st.builds(Cut, st.just("_StridedShard"), st.integers(0, 1), st.integers(1, 3)),
    st.just(Cut("Replicate", 0, 1)),
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
    """The local tensor of a place of the mesh, cut by torch in the order that it reads from placements."""
    kinds = pytest.importorskip("torch.distributed.tensor.placement_types")
    spec = importlib.import_module("torch.distributed.tensor._dtensor_spec").DTensorSpec
    at = np.unravel_index(place, one.mesh)
    made = [
        kinds._StridedShard(cut.dim, split_factor=cut.factor)
        if cut.kind == "_StridedShard"
        else getattr(kinds, cut.kind)(*[cut.dim] * (cut.kind == "Shard"))
        for cut in one.cuts
    ]
    order = spec._maybe_convert_StridedShard_to_shard_order(tuple(made), SimpleNamespace(size=one.mesh.__getitem__))
    if order is None:  # no order explains the factors
        axes = [axis for axis, cut in enumerate(one.cuts) if cut.kind != "Replicate"]
    else:
        axes = [axis for entry in order for axis in entry.mesh_dims]
        made = [kinds.Shard(cut.dim) for cut in one.cuts]
    for axis in axes:
        whole = made[axis]._split_tensor(whole, one.mesh[axis], with_padding=False)[0][at[axis]]
    return whole


def cut_by_layout(whole: Any, laid: Layout, rank: int) -> Any:
    """The local tensor of a rank, as a layout says."""
    found = np.full(laid.local_shape(rank), -1, whole.dtype)
    for row in laid.regions.of_rank[rank]:
        there = tuple(slice(a, a + hi - lo) for a, (lo, hi) in zip(row.at, row.box, strict=True))
        found[there] = whole[tuple(slice(lo, hi) for lo, hi in row.box)]
    return found


@given(placements())
@settings(max_examples=150)
def test_every_rank_has_what_torch_gives_it(one: Placement) -> None:
    torch = pytest.importorskip("torch")
    whole = torch.arange(int(np.prod(one.shape))).reshape(one.shape)
    laid = layout_of(one)
    assert laid.world_size == len(one.ranks)
    for rank in range(laid.world_size):
        expected = cut_by_torch(whole, one, one.ranks.index(rank)).numpy()
        np.testing.assert_array_equal(cut_by_layout(whole.numpy(), laid, rank), expected)


@pytest.mark.parametrize(
    "mesh",
    [(3, 2), (2, 3), *(pytest.param(mesh, marks=pytest.mark.full) for mesh in ((8, 2), (2, 2, 2), (4, 1), (2, 5)))],
)
def test_parameters_of_fsdp2_over_tensor_parallelism_lie_where_full_tensor_finds_them(mesh: tuple[int, ...]) -> None:
    """Also where the rows do not divide. The last axis of the mesh is that of tensor parallelism."""
    pytest.importorskip("torch.distributed.fsdp")
    sizes = [1, 5, 6, 7, 16, 23, 50257 if mesh == (8, 2) else 31]
    world = int(np.prod(mesh))
    held = threaded_job.run(world, partial(threaded_job.fsdp_over_tp, mesh, sizes))
    for number, rows in enumerate(sizes):
        placed = [one[number].placement for one in held]
        laid = layout_of_side("src", "w", placed)
        assert not isinstance(laid, list)
        assert laid == layout_of(placed[0])
        for rank in range(world):
            one = held[rank][number]
            np.testing.assert_array_equal(one.full, np.arange(2 * rows).reshape(rows, 2))
            np.testing.assert_array_equal(cut_by_layout(one.full, laid, rank), one.local)


def test_order_that_torch_keeps_apart_from_the_placements_is_taken() -> None:
    spec = pytest.importorskip("torch.distributed.tensor._dtensor_spec")
    kinds = pytest.importorskip("torch.distributed.tensor.placement_types")
    mesh = FakeMesh(np.arange(6).reshape(3, 2), (0, 1))

    def placed(*cuts: Any, **given: Any) -> Placement:
        one = FakeDTensor(np.zeros((1, 2), np.float32), (7, 2), mesh, cuts)
        one._spec = spec.DTensorSpec(mesh, cuts, **given)  # type: ignore[attr-defined]
        found = placement_of(one)
        assert found is not None
        return found

    def rows(one: Placement) -> list[list[int]]:
        return [list(cut_by_layout(np.arange(14).reshape(7, 2), layout_of(one), rank)[:, 0] // 2) for rank in range(6)]

    shard, strided = kinds.Shard(0), kinds._StridedShard(0, split_factor=2)
    by_last = [[0, 1], [4], [2, 3], [5], [], [6]]
    backwards = (spec.ShardOrderEntry(tensor_dim=0, mesh_dims=(1, 0)),)
    assert rows(placed(shard, shard)) == [[0, 1], [2], [3, 4], [5], [6], []]
    assert rows(placed(shard, shard, shard_order=backwards)) == by_last
    assert rows(placed(strided, shard)) == by_last
    literal = placed(strided, shard, use_strided_shard_as_shard_order=False)
    assert rows(literal) == [[0, 1], [4], [2, 3], [5], [6], []]
    assert placed(kinds.Shard(1), shard).order == ()
    wrong = layout_of_side("src", "w", [literal, replace(literal, order=(), at=0)])
    assert isinstance(wrong, list)
    assert "cut by the axes 0, 1" in wrong[0].expected


PLACED = Placement(shape=(4, 6), dtype="float32", mesh=(2,), ranks=(0, 1), at=0, cuts=(Cut("Shard", 0, 1),))


def test_partial_sums_number_their_addends() -> None:
    one = replace(PLACED, mesh=(2, 2), ranks=(0, 1, 2, 3), cuts=(Cut("Partial", 0, 1), Cut("Shard", 1, 1)))
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
        ([replace(PLACED, cuts=(Cut("Secret(1)", UNKNOWN, 1),))], r"with the placement Secret\(1\)"),
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
    assert placed.cuts == (Cut("Replicate", 0, 1), Cut("_StridedShard", 0, 2), Cut("Partial", 0, 1))


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
