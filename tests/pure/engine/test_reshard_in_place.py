"""Reshards on shm without messages: what is copied how often, in loops, with memory that not all can reach."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest

from raycollect.backends.array_copies import ArrayCopies
from raycollect.backends.shm.communicator import ShmCommunicator
from raycollect.core.model import GroupSpec
from raycollect.engine.packed_boxes import PackedBoxes
from raycollect.errors import KernelError, PlanAbortedError
from raycollect.planner import Request, Reshard
from raycollect.planner.layout import fused_layouts, layout
from raycollect.planner.reshard import rounds
from raycollect.pos import tensors
from tests.pure.engine.convoys import convoy_of
from tests.pure.fleet import Convoy, FailAt
from tests.pure.resharding import bound, empty_of, held_by, request_of, whole_tensors
from tests.support.values import replace

WORLD = 5
SRC = {
    "rows": layout([12, 10], mesh={"tp": 2}, spec=("tp",)),
    "sum": layout([7, 4], mesh={"dp": 2}, partial="dp", dtype="float64"),
    **fused_layouts("qkv", {name: layout([4, 6], mesh={"tp": 2}, spec=("tp",), dtype="int16") for name in "qkv"}),
}
DST = {
    "rows": layout([12, 10], mesh={"tp": 3}, spec=(None, "tp")),
    "sum": layout([7, 4], mesh={"tp": 3}, dtype="float64"),
    **{name: layout([4, 6], mesh={"tp": 3}, spec=(None, "tp"), dtype="int16") for name in "qkv"},
}
RESHARD = bound(SRC, DST, (0, 1), (2, 3, 4))


@pytest.fixture
def convoy() -> Iterator[Convoy]:
    """Ranks in threads, whose staging all can reach."""
    with convoy_of(WORLD, "shm", tensors.allocate) as made:
        yield made


@pytest.fixture
def small_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "PIECE_NBYTES", 32)
    monkeypatch.setattr(rounds, "ROUND_NBYTES", 96)


def shared(held: Mapping[int, Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
    return {rank: {key: tensors.array(one) for key, one in some.items()} for rank, some in held.items()}


def keep(convoy: Convoy, reshard: Reshard, src: Mapping[int, Any], dst: Mapping[int, Any]) -> dict[int, Any]:
    """Keeps the operands; by source as in `request_of`."""
    sides = ((src, reshard.src_ranks, 0), (dst, reshard.dst_ranks, 1))
    return {2 * ranks[at] + odd: convoy.keep(ranks[at], one) for side, ranks, odd in sides for at, one in side.items()}


def operands_of(reshard: Reshard, group: GroupSpec, keys: Mapping[int, Any]) -> Request:
    """The request for it."""
    asked = request_of(reshard, group)
    operands = tuple(
        (rank, None if a is None else keys[a], None if b is None else keys[b]) for rank, a, b in asked.operands
    )
    return replace(asked, operands=operands)


def start(convoy: Convoy, reshard: Reshard, keys: Mapping[int, Any]) -> dict[int, Any]:
    """Runs it; the errors by rank."""
    (membership,) = convoy.memberships
    outcomes = convoy.run([operands_of(reshard, membership.spec, keys)], [membership])
    return {rank: outcome.error for rank, outcome in outcomes.items() if outcome.error is not None}


def check(taken: Mapping[int, Any], whole: Mapping[str, Any]) -> None:
    for rank, held in held_by(DST, whole).items():
        for key, array in held.items():
            np.testing.assert_array_equal(taken[rank][key], array, err_msg=f"{key} on rank {rank}")


def refuse(*args: object, **kwargs: object) -> None:
    raise AssertionError("packed, or sent as a message")


@pytest.mark.usefixtures("small_rounds")
@pytest.mark.parametrize("is_shared", [True, False])
def test_boxes_are_read_where_they_are_and_others_packed_once(
    monkeypatch: pytest.MonkeyPatch, convoy: Convoy, is_shared: bool
) -> None:
    """Also in loops, where all ranks know before the agreement where their boxes lie."""
    monkeypatch.setattr(ShmCommunicator, "launch", refuse)
    monkeypatch.setattr(PackedBoxes, "load", refuse)
    packed: list[int] = []
    pack = ArrayCopies.run
    monkeypatch.setattr(ArrayCopies, "run", lambda copies: (packed.append(len(copies.steps)), pack(copies)))
    whole = whole_tensors(SRC, 0)
    given, taken = held_by(SRC, whole), empty_of(DST)
    if is_shared:
        given, taken = shared(given), shared(taken)  # a part of a sum goes on from a target
    keys = keep(convoy, RESHARD, given, taken)
    for run in range(4):
        whole = whole_tensors(SRC, run)
        for rank, held in held_by(SRC, whole).items():
            for key, array in held.items():
                given[rank][key][...] = array
        assert start(convoy, RESHARD, keys) == {}
        check(taken, whole)
    assert any(packed) is not is_shared


def test_memory_of_one_rank_changes_between_the_runs_of_a_loop(convoy: Convoy) -> None:
    """The other ranks repeat what they know, and find what is new."""
    whole = whole_tensors(SRC, 0)
    given, taken = shared(held_by(SRC, whole)), empty_of(DST)
    keys = keep(convoy, RESHARD, given, taken)
    for run in range(6):
        whole = whole_tensors(SRC, run)
        fresh = held_by(SRC, whole)
        for rank in (0, 1):
            for key, array in fresh[rank].items():
                given[rank][key][...] = array
        if run % 3 == 2:  # in shared memory, or not
            moved = shared({1: fresh[1]})[1] if run == 2 else fresh[1]
            keys[2] = convoy.keep(1, moved)
        elif run >= 3:
            keys[2] = convoy.keep(1, fresh[1])
        assert start(convoy, RESHARD, keys) == {}
        check(taken, whole)


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("point", ["before_kernel", "after_kernel"])
def test_a_failure_ends_all_and_leaves_what_may_be_half_written_dirty(convoy: Convoy, point: str, rank: int) -> None:
    whole = whole_tensors(SRC, 2)
    given, taken = shared(held_by(SRC, whole)), empty_of(DST)
    keys = keep(convoy, RESHARD, given, taken)
    assert start(convoy, RESHARD, keys) == {}
    faults = convoy.faults = FailAt(point=point, rank=rank)
    errors = start(convoy, RESHARD, keys)
    assert faults.consumed == 1
    assert type(errors[rank]) is KernelError
    assert {type(error) for other, error in errors.items() if other != rank} <= {PlanAbortedError, KernelError}
    dirty = [store.statistics().dirty for store in convoy.stores]
    assert dirty[:2] == [0, 0]
    assert bool(dirty[rank]) is (rank > 1)  # of the others, those that had begun
    convoy.faults = None
    assert start(convoy, RESHARD, keys) == {}
    check(taken, whole)
    assert [store.statistics().dirty for store in convoy.stores] == [0] * WORLD
