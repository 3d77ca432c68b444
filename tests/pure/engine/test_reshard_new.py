"""Reshards that leave given targets as they are: into new tensors, and all or nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raycollect.errors import KernelError, RefusedError, TensorDirtyError
from raycollect.planner import plan
from raycollect.planner.explain import explain
from raycollect.planner.layout import Layout, Region, layout
from raycollect.planner.reshard.halves import decode_half
from raycollect.planner.reshard.request import made_of
from tests.pure.engine.convoys import convoy_of
from tests.pure.engine.reshard_runs import must, run
from tests.pure.fleet import FailAt
from tests.pure.resharding import UNTOUCHED, bound, empty_of, held_by, membership_of, request_of, scenes, whole_tensors

ROWS = layout([4, 2], mesh={"r": 2}, spec=("r",))
WHOLE = layout([4, 2], mesh={"r": 2})
GAP = Layout.of_regions([2], [Region(rank=0, box=((0, 2),), at=(1,))])  # its first element is in no region


@given(scenes(4), st.booleans(), st.integers(0, 99))
@settings(max_examples=50)
def test_new_tensors_and_snapshots_hold_what_numpy_says(scene: Any, snapshot: bool, seed: int) -> None:
    src, dst, src_ranks, dst_ranks = scene
    reshard = bound(src, dst, src_ranks, dst_ranks)
    whole = whole_tensors(src, seed)
    given_, taken, expected = held_by(src, whole, seed), empty_of(dst), held_by(dst, whole)
    with convoy_of(max(reshard.ranks) + 1) as convoy:
        made = must(run(convoy, reshard, given_, taken, inplace=snapshot, snapshot=snapshot))
    for rank, tensors in expected.items():
        for key, array in tensors.items():
            found = taken[rank] if snapshot else made[dst_ranks[rank]][0]
            np.testing.assert_array_equal(found[key], array, err_msg=f"{key} on rank {rank}")
            if not snapshot:
                assert (taken[rank][key] == UNTOUCHED).all()


def test_new_tensors_are_like_the_given_ones() -> None:
    torch = pytest.importorskip("torch")
    held = torch.full((4, 2), 7.0)
    with convoy_of(3) as convoy:
        reshard = bound({"": layout([4, 2], mesh={"r": 1})}, {"": WHOLE}, (2,), (0, 1))
        made = must(
            run(convoy, reshard, {0: np.ones((4, 2), np.float32)}, {0: held, 1: held.numpy().copy()}, inplace=False)
        )
    assert torch.equal(made[0][0], torch.ones(4, 2))
    assert type(made[1][0]) is np.ndarray
    assert (held == 7).all()


def test_a_new_tensor_may_overlap_the_source_that_its_target_does() -> None:
    both = np.arange(8, dtype=np.float32).reshape(4, 2)
    with convoy_of(1) as convoy:
        reshard = bound({"": layout([4, 2], mesh={"r": 1})}, {"": layout([4, 2], mesh={"r": 1})}, (0,), (0,))
        made = must(run(convoy, reshard, {0: both}, {0: both}, inplace=False))
    np.testing.assert_array_equal(made[0][0], both)
    assert made[0][0] is not both


def test_a_failure_before_all_have_theirs_changes_nothing() -> None:
    shards = {rank: {"w": np.full((2, 2), rank + 1, np.float32)} for rank in range(2)}
    taken = empty_of({"w": WHOLE})
    with convoy_of(4) as convoy:
        reshard = bound({"w": ROWS}, {"w": WHOLE}, (0, 1), (2, 3))
        faults = convoy.faults = FailAt(point="after_kernel", rank=3)
        outcomes = run(convoy, reshard, shards, taken, snapshot=True)
        assert faults.consumed == 1
        assert isinstance(outcomes[3].error, KernelError)
        assert all((one["w"] == UNTOUCHED).all() for one in taken.values())
        assert [store.statistics().dirty for store in convoy.stores] == [0] * 4
        convoy.faults = None
        must(run(convoy, reshard, shards, taken, snapshot=True))
    np.testing.assert_array_equal(taken[0]["w"], [[1, 1], [1, 1], [2, 2], [2, 2]])


@pytest.mark.parametrize("arguments", [{"inplace": False}, {"snapshot": True}])
def test_what_is_in_no_region_of_a_half_written_target_is_not_taken_over(arguments: Any) -> None:
    with convoy_of(2) as convoy:
        reshard = bound({"": layout([2], mesh={"r": 1})}, {"": GAP}, (1,), (0,))
        target, source = np.zeros(3, np.float32), np.ones(2, np.float32)
        made = must(run(convoy, reshard, {0: source}, {0: target}, **arguments))
        np.testing.assert_array_equal(made[0][0] if made[0] else target, [0, 1, 1])
        convoy.faults = FailAt(point="after_kernel", rank=0)
        run(convoy, reshard, {0: source}, {0: target})
        convoy.faults = None
        outcomes = run(convoy, reshard, {0: source}, {0: target}, **arguments)
        assert {type(one.error) for one in outcomes.values()} == {TensorDirtyError}


def test_other_refusals_stay() -> None:
    with convoy_of(2) as convoy:
        reshard = bound({"": layout([4, 2], mesh={"r": 1})}, {"": layout([4, 2], mesh={"r": 1})}, (0,), (1,))
        outcomes = run(
            convoy, reshard, {0: np.ones((4, 2), np.float32)}, {0: np.ones((4, 3), np.float32)}, inplace=False
        )
    assert all(isinstance(one.error, RefusedError) for one in outcomes.values())


def test_a_snapshot_needs_scratch_where_its_target_is() -> None:
    membership = membership_of(3)
    asked = request_of(
        bound({"": ROWS}, {"": layout([4, 2], mesh={"r": 1})}, (0, 1), (2,)), membership.spec, snapshot=True
    )
    planned = plan([asked], [membership])
    part = planned.parts[0]
    halves = [decode_half(part.template(rank).boxes) for rank in range(3)]
    held = {2 * rank: made_of(halves[rank].src)[1] for rank in (0, 1)} | {5: made_of(halves[2].dst)[1]}
    told = explain(planned, held)
    assert (told.memory.outputs, told.memory.scratch) == (0, 32)
