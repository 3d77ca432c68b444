"""What has a digest, and where it lies on each rank."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import raycollect as col
from raycollect.planner.boxes import extent
from raycollect.weights import atoms, digests

ROWS, COLUMNS = col.layout([8, 6], mesh={"tp": 2}, spec=("tp",)), col.layout([8, 6], mesh={"tp": 3}, spec=(None, "tp"))


def _elements(cut_atoms):
    return sum(np.prod(extent(box)) for _, box in cut_atoms.atoms)


def test_tensors_are_cut_at_the_edges_of_all_layouts():
    assert len(atoms.cut({"w": ROWS}, []).atoms) == 2
    cut_atoms = atoms.cut({"w": ROWS, "v": ROWS}, [{"w": COLUMNS, "other": COLUMNS}])
    assert [sum(name == wanted for name, _ in cut_atoms.atoms) for wanted in "wv"] == [6, 2]
    assert _elements(cut_atoms) == 2 * 48
    assert len(atoms.cut({"w": ROWS}, [{"w": col.layout([6, 6], mesh={"tp": 3}, spec=("tp",))}]).atoms) == 2


def test_large_ones_are_cut_in_pieces():
    whole = col.layout([3 * atoms.MOST_NBYTES // 8, 2], mesh={"x": 1}, dtype="float32")
    assert len(atoms.cut({"w": whole}, []).atoms) == 3


@settings(max_examples=40)
@given(st.lists(st.sampled_from(["rows", "columns", "none"]), min_size=1, max_size=3), st.integers(1, 4))
def test_each_rank_finds_each_of_its_elements_once(readers, ranks):
    cuts = {"rows": ("tp",), "columns": (None, "tp"), "none": ()}
    sides = [{"w": col.layout([7, 5], mesh={"tp": ranks}, spec=cuts[reader])} for reader in readers]
    cut_atoms = atoms.cut({"w": ROWS_OF_7}, sides)
    for side in sides:
        for rank in range(ranks):
            local = np.zeros(side["w"].local_shape(rank) or (0, 0), int)
            for atom, parts in atoms.places(side, rank, cut_atoms, whole=True).items():
                for part in parts:
                    assert part.box == atom[1]
                    local[tuple(slice(lo, lo + n) for lo, n in zip(part.at, part.size, strict=True))] += 1
            assert (local == 1).all()


ROWS_OF_7 = col.layout([7, 5], mesh={"tp": 2}, spec=("tp",))


def test_a_layout_that_was_not_known_has_parts_of_atoms():
    cut_atoms = atoms.cut({"w": ROWS}, [])
    assert atoms.places({"w": COLUMNS}, 1, cut_atoms, whole=True) == {}
    parts = [part for some in atoms.places({"w": COLUMNS}, 1, cut_atoms, whole=False).values() for part in some]
    assert [(part.box, part.at) for part in parts] == [(((0, 2), (4, 4)), (0, 0)), (((4, 2), (8, 4)), (4, 0))]


def test_what_a_receiver_can_not_have_is_named():
    asks = col.layout([8, 6], mesh={"tp": 2}, dtype="float16")
    for dst, expected in (
        ({"x": ROWS}, "not published"),
        ({"w": col.layout([8, 5], mesh={"tp": 2})}, "shape"),
        ({"w": asks}, ""),
    ):
        (text,) = [str(fault) for fault in atoms.reader_faults(dst, {"w": ROWS})] or [""]
        assert expected in text
        assert bool(text) == bool(expected)


def test_a_dtype_that_a_receiver_asks_for_is_a_float_made_of_floats():
    ids, flags = (col.layout([8, 6], mesh={"tp": 2}, dtype=dtype) for dtype in ("int64", "int8"))
    for dst, src in ((flags, ids), (flags, ROWS), (ROWS.astype("float16"), ids)):
        (fault,) = atoms.reader_faults({"w": dst}, {"w": src})
        assert f"dtype {dst.dtype}, made of {src.dtype}" in str(fault)
    assert not list(atoms.reader_faults({"w": ROWS.astype("bfloat16")}, {"w": ROWS}))


def test_a_receiver_gets_values_and_each_in_a_place_of_its_own():
    (fault,) = atoms.target_faults({"w": col.layout([8, 6], mesh={"dp": 2}, partial="dp")})
    assert "a partial sum" in str(fault)
    fused = col.fused_layouts("qk", {"q": ROWS, "k": ROWS})
    assert not list(atoms.target_faults(fused))
    faults = atoms.target_faults({**fused, "k": fused["q"]})
    assert all(f"written twice on rank {rank}" in str(fault) for rank, fault in zip(range(2), faults, strict=True))
    (fault,) = atoms.source_faults({**fused, "k": fused["k"].astype("float16")})
    assert "shared by 'q', 'k'" in str(fault)


@pytest.mark.parametrize("shape", [(), (0,), (5,), (300_000,), (700, 400), (3, 2, 1)])
def test_a_digest_is_that_of_the_elements_wherever_they_lie(shape):
    array = np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
    spread = np.zeros((*shape, 2), np.float32)[..., 0]
    assert digests.copied(spread, array) == digests.digest(array) == digests.digest(np.array(array, order="F"))
    np.testing.assert_array_equal(spread, array)
    if array.size:
        changed = np.array(array)
        changed[...] = array + 1
        assert digests.digest(changed) != digests.digest(array)
