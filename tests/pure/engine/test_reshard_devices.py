"""Reshards of tensors on GPUs, on the fake of cupy: ranks stage theirs, and write the targets at the end."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raycollect.backends import arrays
from raycollect.errors import AliasError, RaycollectError
from raycollect.planner import plan
from raycollect.planner.explain import explain
from raycollect.planner.layout import Layout, Region, layout
from tests.fake_cupy import Fake
from tests.pure.engine.convoys import allreduces, convoy_of
from tests.pure.engine.reshard_runs import must, run
from tests.pure.fleet import FailAt
from tests.pure.mixed import faked, host, is_on_gpu, same
from tests.pure.resharding import UNTOUCHED, bound, empty_of, held_by, membership_of, request_of, scenes, whole_tensors
from tests.support.values import replace

HOW = ("into given targets", "into new targets", "into targets like the given ones", "all or nothing")

ROWS = layout([4, 2], mesh={"r": 2}, spec=("r",))
COLUMNS = layout([4, 2], mesh={"r": 2}, spec=(None, "r"))
WHOLE = layout([4, 2], mesh={"r": 2})
GAP = Layout.of_regions([2], [Region(rank=0, box=((0, 2),), at=(1,))])  # its first element is in no region


@pytest.fixture(scope="module")
def gpus() -> Iterator[Fake]:
    with faked() as made:
        yield made


def put(fake: Fake, values: Any, device: int = 0, *, gaps: bool = False) -> Any:
    """A tensor of a GPU, perhaps every other element of a longer one."""
    with fake.cupy.cuda.Device(device):
        if not gaps or not values.ndim:
            return fake.cupy.asarray(values)
        wide = fake.cupy.zeros((*values.shape[:-1], 2 * values.shape[-1]), values.dtype)
        wide[..., ::2] = fake.cupy.asarray(values)
        return wide[..., ::2]


@given(scenes(4), st.sampled_from(["local", "shm", "tcp"]), st.sampled_from(HOW), st.integers(0, 99))
@settings(max_examples=60)
def test_tensors_may_be_on_gpus_and_in_host_memory(gpus: Fake, scene: Any, backend: str, how: str, seed: int) -> None:
    src, dst, src_ranks, dst_ranks = scene
    draw, whole = random.Random(seed), whole_tensors(src, seed)

    def somewhere(side: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
        return {
            rank: {
                key: put(gpus, one, rank % 2, gaps=draw.random() < 0.3) if draw.random() < 0.6 else one
                for key, one in held.items()
            }
            for rank, held in side.items()
        }

    given_, taken, expected = somewhere(held_by(src, whole, seed)), somewhere(empty_of(dst)), held_by(dst, whole)
    new, like, snapshot = (how == one for one in HOW[1:])
    with convoy_of(max(*src_ranks, *dst_ranks) + 1, backend) as convoy:
        reshard = bound(src, dst, src_ranks, dst_ranks)
        outcomes = run(convoy, reshard, given_, None if new else taken, inplace=not like, snapshot=snapshot)
        made = must(outcomes)
        assert not any(store.statistics().dirty for store in convoy.stores)
    for rank, tensors in expected.items():
        found = made[dst_ranks[rank]][0] if new or like else taken[rank]
        for key, array in tensors.items():
            if not new:
                same(found[key], array)
                assert is_on_gpu(found[key]) == is_on_gpu(taken[rank][key])
            if like:
                assert (host(taken[rank][key]) == UNTOUCHED).all()
        for name, one in dst.items() if new else ():  # elements in no region are undefined
            for region in one.regions.of_rank.get(rank, ()) if not one.axes else ():
                box = (*(slice(at, at + hi - lo) for at, (lo, hi) in zip(region.at, region.box, strict=True)), ...)
                same(host(found[one.key or name])[box], tensors[one.key or name][box])


def test_new_targets_are_on_the_device_of_what_their_rank_gives(gpus: Fake) -> None:
    given_ = {0: put(gpus, np.ones((2, 2), np.float32), 1), 1: np.ones((2, 2), np.float32)}
    with convoy_of(3) as convoy:
        three = layout([4, 2], mesh={"r": 3})
        made = must(run(convoy, bound({"": ROWS}, {"": three}, (0, 1), (0, 1, 2)), given_, None))
    assert [arrays.describe(made[rank][0]).device for rank in range(3)] == ["cuda:1", "cpu", "cpu"]
    for rank in range(3):
        same(made[rank][0], np.ones((4, 2)))


@pytest.mark.parametrize("point", ["before_kernel", "after_kernel"])
def test_a_failure_leaves_targets_on_gpus_unchanged_and_clean(gpus: Fake, point: str) -> None:
    given_ = {rank: np.full((2, 2), rank, np.float32) for rank in range(2)}
    taken = {rank: put(gpus, np.full((4, 1), UNTOUCHED, np.float32), rank) for rank in range(2)}
    with convoy_of(2) as convoy:
        reshard = bound({"": ROWS}, {"": COLUMNS}, (0, 1), (0, 1))
        convoy.faults = FailAt(point=point, rank=0)
        outcomes = run(convoy, reshard, given_, taken)
        assert isinstance(outcomes[0].error, RaycollectError)
        same(taken[0], np.full((4, 1), UNTOUCHED))
        assert not convoy.stores[0].statistics().dirty
        convoy.faults = None
        must(run(convoy, reshard, given_, taken))
    for rank in range(2):
        same(taken[rank], [[0], [0], [1], [1]])


def test_a_target_of_a_gpu_beside_one_of_the_host_is_dirty_after_a_failure(gpus: Fake) -> None:
    side = {"a": ROWS, "b": ROWS}
    values = {name: np.ones((2, 2), np.float32) for name in side}
    taken = [{"a": np.zeros((4, 1), np.float32), "b": put(gpus, np.zeros((4, 1), np.float32))} for _ in range(2)]
    with convoy_of(2) as convoy:
        reshard = bound(side, {"a": COLUMNS, "b": COLUMNS}, (0, 1), (0, 1))
        convoy.faults = FailAt(point="after_kernel", rank=0)
        run(convoy, reshard, dict.fromkeys(range(2), values), dict(enumerate(taken)))
        assert convoy.stores[0].statistics().dirty == 2
        same(taken[0]["b"], np.zeros((4, 1)))
        convoy.faults = None
        must(run(convoy, reshard, dict.fromkeys(range(2), values), dict(enumerate(taken))))
        assert not convoy.stores[0].statistics().dirty
    same(taken[0]["b"], np.ones((4, 1)))


@pytest.mark.parametrize("inplace", [True, False])
def test_elements_in_no_region_keep_their_values(gpus: Fake, inplace: bool) -> None:
    target = put(gpus, np.array([5, 6, 7], np.float32), gaps=True)
    with convoy_of(2) as convoy:
        reshard = bound({"": layout([2], mesh={"r": 1})}, {"": GAP}, (1,), (0,))
        made = must(run(convoy, reshard, {0: np.ones(2, np.float32)}, {0: target}, inplace=inplace))
    same(target if inplace else made[0][0], [5, 1, 1])
    same(target, [5, 1, 1] if inplace else [5, 6, 7])


def test_a_target_on_a_gpu_may_not_overlap_a_source(gpus: Fake) -> None:
    both = put(gpus, np.zeros((4, 2), np.float32))
    with convoy_of(2) as convoy:
        outcomes = run(
            convoy,
            bound({"": ROWS}, {"": WHOLE}, (0, 1), (0, 1)),
            {0: both[:2], 1: np.ones((2, 2), np.float32)},
            {0: both, 1: np.zeros((4, 2), np.float32)},
        )
    assert {type(outcome.error) for outcome in outcomes.values()} == {AliasError}


def test_a_batch_sums_what_it_has_moved_to_a_gpu(gpus: Fake) -> None:
    with convoy_of([[0, 1]]) as convoy:
        (membership,) = convoy.memberships
        convoy.memberships[0] = membership = replace(membership, spec=replace(membership.spec, memory="cpu"))
        given_ = [put(gpus, np.full((2, 2), 1 + rank, np.float32), rank) for rank in range(2)]
        taken = [put(gpus, np.zeros((4, 1), np.float32), rank) for rank in range(2)]
        asked = request_of(bound({"": ROWS}, {"": COLUMNS}, (0, 1), (0, 1)), membership.spec)
        keys = [(convoy.keep(rank, given_[rank]), convoy.keep(rank, taken[rank])) for rank in range(2)]
        moved = replace(asked, operands=tuple((rank, *of_rank) for rank, of_rank in enumerate(keys)))
        (summed,) = allreduces(convoy, [taken])
        summed = replace(summed, operands=tuple((rank, of_rank[1], None) for rank, of_rank in enumerate(keys)))
        must(convoy.run([moved, summed], [membership, membership]))
    for rank in range(2):
        same(taken[rank], [[2], [2], [4], [4]])


def test_a_plan_counts_the_staging_buffers(gpus: Fake) -> None:
    membership = membership_of(2)
    membership = replace(membership, spec=replace(membership.spec, memory="cpu"))
    request = request_of(bound({"": ROWS}, {"": WHOLE}, (0, 1), (0, 1)), membership.spec)
    planned = plan([request], [membership])
    infos = {
        source: (arrays.describe(put(gpus, np.zeros(shape, np.float32))),)
        for _, src, dst in request.operands
        for source, shape in ((src, (2, 2)), (dst, (4, 2)))
    }
    assert explain(planned, infos).memory.device_staging == 16 + 32
