"""Reshards from the layouts to the arrays: plan, encode, decode and run on ranks in threads, against plain numpy."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raycollect.backends.tcp.link import TcpMesh
from raycollect.core.model import Launch
from raycollect.core.protocols import Communicator
from raycollect.errors import AliasError, CollectiveTimeoutError, LayoutError, ReadOnlyError
from raycollect.planner import Reshard
from raycollect.planner.layout import Layout, Region, layout
from raycollect.planner.reshard import rounds
from raycollect.planner.sizes import least_between
from raycollect.pos import tensors
from tests.pure.engine.convoys import allreduces, convoy_of
from tests.pure.engine.reshard_runs import must, run
from tests.pure.fleet import FailAt
from tests.pure.resharding import (
    UNTOUCHED,
    bound,
    empty_of,
    held_by,
    request_of,
    scenes,
    whole_tensors,
)
from tests.support.values import replace


@given(scenes(), st.sampled_from(["local", "shm", "shm, in place", "tcp"]), st.integers(1, 3), st.integers(0, 99))
@settings(max_examples=80)
def test_targets_hold_what_numpy_says(scene: Any, where: str, hosts: int, seed: int) -> None:
    src, dst, src_ranks, dst_ranks = scene
    reshard = bound(src, dst, src_ranks, dst_ranks)
    whole = whole_tensors(src, seed)
    given, taken, expected = held_by(src, whole, seed), empty_of(dst), held_by(dst, whole)
    world = max(reshard.ranks) + 1
    backend, _, in_place = where.partition(", ")
    with convoy_of(world, backend) as convoy:
        if in_place:  # the staging can be read by all, and so can some of the tensors
            convoy.allocate = tensors.allocate
            given = {rank: _some_shared(held, seed + rank) for rank, held in given.items()}
        outcomes = run(convoy, reshard, given, taken, [rank % hosts for rank in range(world)])
    for outcome in outcomes.values():
        if outcome.error is not None:
            raise outcome.error
    for rank, arrays_ in expected.items():
        for key, array in arrays_.items():
            np.testing.assert_array_equal(taken[rank][key], array, err_msg=f"{key} on rank {rank}")


def _some_shared(held: Mapping[str, Any], seed: int) -> dict[str, Any]:
    draw = random.Random(seed)
    return {key: tensors.array(one) if draw.random() < 0.6 else one for key, one in held.items()}


def least_of(reshard: Reshard, hosts: Sequence[int]) -> int:
    """The bytes that each host needs and does not hold, element by element; -1 where there are partial sums."""
    total, sources = 0, dict(reshard.src)
    for name, taken in reshard.dst:
        given_ = sources[name]
        if given_.regions.parts > 1:
            return -1
        for host in set(hosts):
            held, needed = np.zeros(taken.shape, bool), np.zeros(taken.shape, bool)
            for mask, side, ranks in ((held, given_, reshard.src_ranks), (needed, taken, reshard.dst_ranks)):
                for one in side.regions.rows:
                    if hosts[ranks[one.rank]] == host:
                        mask[(*(slice(lo, hi) for lo, hi in one.box), ...)] = True
            total += int(np.count_nonzero(needed & ~held)) * min(taken.itemsize, given_.itemsize)
    return total


@given(scenes(4), st.integers(2, 3))
@settings(max_examples=40)
def test_the_links_between_hosts_carry_the_least_there_is(scene: Any, count: int) -> None:
    """Counted where `tcp` sends."""
    src, dst, src_ranks, dst_ranks = scene
    reshard = bound(src, dst, src_ranks, dst_ranks)
    world = max(reshard.ranks) + 1
    hosts = [rank % count for rank in range(world)]
    carried: list[int] = []

    def counted(send: Callable[..., None]) -> Callable[..., None]:
        def tell(link: TcpMesh, rank: int, array: Any, batch: Any, **how: bool) -> None:
            if hosts[rank] != hosts[link.rank]:
                carried.append(array.nbytes)
            send(link, rank, array, batch, **how)

        return tell

    with pytest.MonkeyPatch.context() as patch, convoy_of(world, "tcp") as convoy:
        patch.setattr(TcpMesh, "send", counted(TcpMesh.send))
        must(run(convoy, reshard, held_by(src, whole_tensors(src, 1)), empty_of(dst), hosts))
    least = least_of(reshard, hosts)
    assert least == least_between(reshard, hosts)
    assert least < 0 or sum(carried) == least


WORLD = 3
FULL = layout([6, 4], mesh={"r": WORLD})
CUT = layout([6, 4], mesh={"r": WORLD}, spec=("r",))
ADDENDS = layout([6, 4], mesh={"r": WORLD}, partial="r")
COLUMNS = layout([6, 4], mesh={"r": WORLD}, spec=(None, "r"))
ONE = layout([6, 4], mesh={"r": 1})


def arrays(shape: tuple[int, ...]) -> list[Any]:
    rng = np.random.default_rng(7)
    return [rng.standard_normal(shape).astype(np.float32) for _ in range(WORLD)]


def test_tensors_of_no_dimensions_and_any_strides() -> None:
    scalar = layout([], mesh={"r": 2}, dtype="float64")
    wide = np.arange(48, dtype=np.float32).reshape(4, 12)[::-1, ::2].T  # [6, 4], with gaps, and backwards
    src = {0: {"s": np.array(3.0), "w": wide}, 1: {"s": np.array(3.0)}}
    with convoy_of(4) as convoy:
        two = Layout.of_regions([6, 4], [*ONE.regions.rows, Region(rank=1, box=((0, 0), (0, 0)), at=(0, 0))])
        reshard = bound({"s": scalar, "w": two}, {"s": scalar, "w": layout([6, 4], mesh={"r": 2})}, (0, 1), (2, 3))
        src[1]["w"] = np.empty((0, 0), np.float32)
        target = np.zeros((4, 12), np.float32)[:, ::2].T
        taken = {rank: {"s": np.zeros(()), "w": target if rank == 0 else np.zeros((6, 4), ">f4")} for rank in (0, 1)}
        must(run(convoy, reshard, src, taken))
    for value in taken.values():
        assert value["s"] == 3.0
        np.testing.assert_array_equal(value["w"], wide)


TURNED = replace(layout([4, 6], mesh={"r": 2}, spec=(None, "r")), axes=(((1, 0),), ((0, 0),)))  # [3, 4] on each rank
SLOTS = replace(layout([6, 4], mesh={"r": 2}, spec=(None, "r")), axes=(((0, 0), (1, 2)), ((2, 0),)))  # [3, 2, 2]


def test_local_tensors_lie_transposed_and_in_slots() -> None:
    wholes = {"w": np.arange(24.0, dtype=np.float32).reshape(4, 6), "e": arrays((6, 4))[0]}
    src = {"w": layout([4, 6], mesh={"r": 1}), "e": ONE}
    there = {"w": TURNED, "e": SLOTS}
    expected = {
        rank: {
            "w": wholes["w"][:, 3 * rank : 3 * rank + 3].T,
            "e": wholes["e"].reshape(3, 2, 4)[..., 2 * rank :][..., :2],
        }
        for rank in range(2)
    }
    with convoy_of(3) as convoy:
        made = must(run(convoy, bound(src, there, (2,), (0, 1)), {0: wholes}, None))
        for rank, tensors in expected.items():
            for name, array in tensors.items():
                np.testing.assert_array_equal(made[rank][0][name], array)
        back = must(run(convoy, bound(there, src, (0, 1), (2,)), {rank: made[rank][0] for rank in (0, 1)}, None))
        for name, array in wholes.items():
            np.testing.assert_array_equal(back[2][0][name], array)
        with_gaps = {
            rank: {"w": one["w"], "e": np.ones((2, 3, 2), np.float32).transpose(1, 0, 2)}
            for rank, one in expected.items()
        }
        outcomes = run(convoy, bound(there, src, (0, 1), (2,)), with_gaps, None)
        assert "dimensions as one" in outcomes[2].error.violations[0].expected


def test_many_rounds_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "PIECE_NBYTES", 16)
    monkeypatch.setattr(rounds, "ROUND_NBYTES", 32)
    wholes = arrays((6, 4))
    with convoy_of(WORLD) as convoy:
        reshard = bound({"few": ADDENDS}, {"few": COLUMNS}, range(WORLD), range(WORLD))
        made = must(run(convoy, reshard, {rank: {"few": one} for rank, one in enumerate(wholes)}, None))
    total = wholes[0] + wholes[1] + wholes[2]
    for rank in range(WORLD):
        at = COLUMNS.regions.rows[rank].bounds
        np.testing.assert_array_equal(made[rank][0]["few"], total[:, at[0][1] : at[1][1]])


def test_narrow_floats_are_added_wide_and_rounded_once() -> None:
    parts = [np.full((6, 4), value, np.float16) for value in (2048, 1, 1)]  # one by one, each 1 would be lost
    src = layout([6, 4], mesh={"r": 3}, partial="r", dtype="float16")
    with convoy_of(WORLD) as convoy:
        reshard = bound({"": src}, {"": layout([6, 4], mesh={"r": 3}, dtype="float16")}, range(3), range(3))
        made = must(run(convoy, reshard, dict(enumerate(parts)), None))
    assert {float(one) for rank in range(3) for one in made[rank][0].ravel()} == {2050.0}


# ---------------------------------------------------------------------------------------------- what goes wrong


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (lambda taken: taken[1]["w"].setflags(write=False), ReadOnlyError),
        (lambda taken: taken[1].update(w=taken[1]["w"].astype(np.float64)), LayoutError),
        (lambda taken: taken[1].update(w=np.zeros((4, 6), np.float32)), LayoutError),
        (lambda taken: taken[1].pop("w"), LayoutError),
        (lambda taken: taken[1].update(more=np.zeros(1, np.float32)), LayoutError),
    ],
)
def test_what_one_rank_can_not_do_no_rank_does(spoil: Callable[[Any], Any], error: type[Exception]) -> None:
    given_ = {rank: {"w": one, "v": np.ones(2, np.float32)} for rank, one in enumerate(arrays((2, 4)))}
    side = {"w": FULL, "v": layout([2], mesh={"r": WORLD})}
    taken = empty_of(side)
    spoil(taken)
    with convoy_of(2 * WORLD) as convoy:
        reshard = bound({**side, "w": CUT}, side, range(WORLD), range(WORLD, 2 * WORLD))
        outcomes = run(convoy, reshard, given_, taken)
        assert {type(outcome.error) for outcome in outcomes.values()} == {error}
        assert {one.rank for one in outcomes[0].error.violations} == {WORLD + 1}
        assert all((taken[rank]["w"] == UNTOUCHED).all() for rank in (0, 2))
        taken = empty_of(side)
        must(run(convoy, reshard, given_, taken))  # the group works on
    np.testing.assert_array_equal(taken[2]["w"], np.concatenate([one["w"] for one in given_.values()]))


def test_a_target_may_not_overlap_a_source() -> None:
    shards = arrays((6, 4))
    with convoy_of(WORLD) as convoy:
        reshard = bound({"": CUT}, {"": FULL}, range(WORLD), range(WORLD))
        outcomes = run(convoy, reshard, {rank: one[:2] for rank, one in enumerate(shards)}, dict(enumerate(shards)))
    assert {type(outcome.error) for outcome in outcomes.values()} == {AliasError}


def test_what_is_written_in_part_stays_dirty() -> None:
    """A tensor with elements in no region is not whole after a reshard."""
    gap = Layout.of_regions([2], [Region(rank=0, box=((0, 2),), at=(1,))])
    src = layout([2], mesh={"r": 1})
    target = np.zeros(3, np.float32)
    with convoy_of(2) as convoy:
        reshard = bound({"": src}, {"": gap}, (1,), (0,))
        convoy.faults = FailAt(point="after_kernel", rank=0)
        run(convoy, reshard, {0: np.ones(2, np.float32)}, {0: target})
        convoy.faults = None
        must(run(convoy, reshard, {0: np.ones(2, np.float32)}, {0: target}))
        assert convoy.stores[0].statistics().dirty == 1
    np.testing.assert_array_equal(target, [0, 1, 1])


class Deserted:
    """A communicator whose other ranks come to the agreement alone, and to no later launch."""

    def __init__(self, inner: Communicator) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def agree(self, launch: Launch, arrival: bytes, *more: Any) -> Any:
        if not arrival:
            raise CollectiveTimeoutError(missing=(1,))
        return self._inner.agree(launch, arrival, *more)


def test_a_target_with_copies_of_ones_own_is_dirty_if_the_rest_never_comes() -> None:
    with convoy_of([[0, 1], [0, 1]]) as convoy:
        for group_id, inner in list(convoy.communicators[0].items()):
            convoy.communicators[0][group_id] = Deserted(inner)  # type: ignore[assignment]
        spec = convoy.memberships[1].spec
        cut, other = layout([4, 4], mesh={"r": 2}, spec=("r",)), layout([4, 4], mesh={"r": 2}, spec=(None, "r"))
        asked = request_of(bound({"": cut}, {"": other}, (0, 1), (0, 1)), spec)
        given = [np.ones((2, 4), np.float32) for _ in range(2)]
        taken = [np.zeros((4, 2), np.float32) for _ in range(2)]
        operands = tuple((rank, convoy.keep(rank, given[rank]), convoy.keep(rank, taken[rank])) for rank in range(2))
        summed = allreduces(convoy, [[np.ones(1), np.ones(1)]])
        outcomes = convoy.run([*summed, replace(asked, operands=operands)], convoy.memberships)
        assert isinstance(outcomes[0].error, CollectiveTimeoutError)
        assert taken[0].any()
        assert convoy.stores[0].is_dirty([(taken[0].ctypes.data, taken[0].ctypes.data + taken[0].nbytes)])
