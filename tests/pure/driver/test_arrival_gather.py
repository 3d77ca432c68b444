"""The consistency check where one process gathers the arrivals: who may come when, and what the last one gets."""

from __future__ import annotations

import random

import pytest

from raycollect.driver.arrival_gather import ArrivalGather
from raycollect.errors import ProtocolError


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("world", range(1, 9))
def test_the_last_rank_completes_the_check_in_any_order(world: int, seed: int) -> None:
    ranks = sorted(random.Random(seed).sample(range(20), world))
    order = random.Random(seed + 1).sample(ranks, world)
    check = ArrivalGather(ranks)
    for at, rank in enumerate(order):
        assert check.missing == tuple(r for r in ranks if r not in order[:at])
        found = check.arrive(rank, bytes([rank]))
        in_order = tuple(bytes([rank]) for rank in ranks)
        assert found == (in_order if at == world - 1 else None), "in the order of the ranks, not of their coming"
    assert check.missing == ()


def test_coming_twice_is_a_protocol_error_and_changes_nothing() -> None:
    check = ArrivalGather((0, 1))
    assert check.arrive(0, b"first") is None
    with pytest.raises(ProtocolError, match="rank 0 came to the consistency check twice"):
        check.arrive(0, b"second")
    assert check.missing == (1,)
    assert check.arrive(1, b"other") == (b"first", b"other")
    with pytest.raises(ProtocolError, match="twice"):
        check.arrive(1, b"again")


@pytest.mark.parametrize("rank", [-1, 1, 3, 99])
def test_a_stranger_is_a_protocol_error(rank: int) -> None:
    check = ArrivalGather((0, 2))
    with pytest.raises(ProtocolError, match=rf"rank {rank} has no part"):
        check.arrive(rank, b"")
    assert check.missing == (0, 2)
