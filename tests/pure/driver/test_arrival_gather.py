"""The consistency check where one process gathers the arrivals: who may come when, and what the last one gets."""

from __future__ import annotations

import random
import sys

import pytest

from raycollect.driver.arrival_gather import ArrivalGather
from raycollect.errors import ProtocolError


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("world", range(1, 9))
def test_the_last_rank_completes_each_round_in_any_order(world: int, seed: int) -> None:
    ranks = sorted(random.Random(seed).sample(range(20), world))
    gather = ArrivalGather(ranks)
    for number in range(3):
        order = random.Random(seed + number).sample(ranks, world)
        for at, rank in enumerate(order):
            assert gather.missing == (tuple(r for r in ranks if r not in order[:at]) if at else ()), "nobody waits"
            found = gather.arrive(number, rank, bytes([number, rank]))
            in_order = tuple(bytes([number, rank]) for rank in ranks)
            assert found == (in_order if at == world - 1 else None), "in the order of the ranks, not of their coming"
    assert gather.missing == ()


def test_coming_twice_is_a_protocol_error_and_changes_nothing() -> None:
    gather = ArrivalGather((0, 1))
    assert gather.arrive(0, 0, b"first") is None
    for number, rank in ((0, 0), (1, 1), (-1, 1)):
        with pytest.raises(ProtocolError):
            gather.arrive(number, rank, b"second")
    assert gather.missing == (1,)
    assert gather.arrive(0, 1, b"other") == (b"first", b"other")
    with pytest.raises(ProtocolError):
        gather.arrive(0, 1, b"again")


@pytest.mark.parametrize("rank", [-1, 1, 3, 99])
def test_a_stranger_is_a_protocol_error(rank: int) -> None:
    gather = ArrivalGather((0, 2))
    gather.arrive(0, 0, b"")
    with pytest.raises(ProtocolError):
        gather.arrive(0, rank, b"")
    assert gather.missing == (2,)


def test_arrivals_of_a_complete_round_are_released() -> None:
    part = bytearray(5)
    gather = ArrivalGather((0, 1))
    before = sys.getrefcount(part)
    for number in range(20):
        gather.arrive(number, 0, part)
        gather.arrive(number, 1, part)
    assert sys.getrefcount(part) == before
