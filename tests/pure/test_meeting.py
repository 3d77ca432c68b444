"""Which core a rank waits on."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterator

import pytest

import raycollect.cores
from raycollect.backends import _meeting
from raycollect.backends._meeting import Meeting, control_nbytes, prepare
from raycollect.cores import SETTLED_S
from raycollect.errors import CollectiveTimeoutError
from raycollect.model import Launch


class Cores:
    """A system whose threads run where they are put."""

    def __init__(self, mask: set[int]) -> None:
        self.mask = mask
        self.at: dict[int, int] = {}
        self.moves: list[set[int]] = []

    def current(self) -> int:
        return self.at[threading.get_ident()] + 1

    def set_mask(self, pid: int, mask: set[int]) -> None:
        assert pid == 0
        self.moves.append(set(mask))
        if self.at[threading.get_ident()] not in mask:
            self.at[threading.get_ident()] = min(mask)


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cores]:
    system = Cores({0, 1, 2})
    monkeypatch.setattr(raycollect.cores, "current_core", system.current)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(system.mask))
    monkeypatch.setattr(os, "sched_setaffinity", system.set_mask)
    return system


def meetings(count: int) -> list[Meeting]:
    segment = mmap.mmap(-1, control_nbytes(count))
    prepare(segment, count)
    return [Meeting(segment, rank, count, "team") for rank in range(count)]


def wait_in_vain(meeting: Meeting, seq: int, core: int, system: Cores) -> None:
    """A rank comes to a barrier that nobody else comes to, on a core."""
    system.at[threading.get_ident()] = core
    launch = Launch(seq=seq, ranks=tuple(range(3)), timeout_s=0.001)
    meeting.enter(launch, 1e12)
    with pytest.raises(CollectiveTimeoutError):
        meeting.barrier(launch, 0.0)
    meeting.end(launch, False)


def test_who_waits_for_a_rank_of_its_own_core_goes_to_one_that_has_none(cores: Cores) -> None:
    first, second, third = meetings(3)
    wait_in_vain(first, 1, 0, cores)
    wait_in_vain(second, 2, 1, cores)
    assert cores.moves == []
    wait_in_vain(third, 3, 1, cores)
    assert cores.moves == [{2}, {0, 1, 2}]  # and may run everywhere again
    assert cores.at[threading.get_ident()] == 2


@pytest.mark.parametrize("mask", [{0}, {0, 1}])
def test_who_finds_no_free_core_stays(cores: Cores, mask: set[int]) -> None:
    cores.mask = mask
    first, second, third = meetings(3)
    wait_in_vain(first, 1, 0, cores)
    wait_in_vain(second, 2, 1, cores)
    wait_in_vain(third, 3, 0, cores)
    assert cores.moves == []


def test_more_ranks_than_cores_spread_evenly(cores: Cores) -> None:
    cores.mask = {0, 1}
    ranks = meetings(4)
    for seq, (rank, core) in enumerate(zip(ranks[:3], (0, 1, 0), strict=True), 1):
        wait_in_vain(rank, seq, core, cores)
    assert cores.moves == []
    wait_in_vain(ranks[3], 4, 0, cores)  # with two others, and one on the other core
    assert cores.moves == [{1}, {0, 1}]


def test_who_has_looked_does_not_look_again_at_once(cores: Cores, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, _ = meetings(3)
    now = [100.0]
    monkeypatch.setattr(_meeting.time, "monotonic", lambda: now[0])
    wait_in_vain(first, 1, 0, cores)
    for seq, passed_s, moves in ((2, 0.0, 2), (3, SETTLED_S / 2, 2), (4, SETTLED_S, 4)):
        now[0] += passed_s
        wait_in_vain(second, seq, 0, cores)
        assert len(cores.moves) == moves
