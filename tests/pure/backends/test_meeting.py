"""Which core a rank waits on, and whom it wakes."""

from __future__ import annotations

import mmap
import threading
import time
from functools import partial

import pytest

from raycollect.backends.shm import meeting as _meeting
from raycollect.backends.shm.meeting import Meeting, control_nbytes, prepare
from raycollect.core.model import Launch
from raycollect.core.semaphores import Semaphore, semaphores
from raycollect.errors import CollectiveTimeoutError
from tests.pure.placed import Cores
from tests.pure.watched import WAIT_S


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> Cores:
    return Cores({0, 1, 2}).install(monkeypatch)


def meetings(count: int) -> list[Meeting]:
    segment = memoryview(mmap.mmap(-1, control_nbytes(count)))
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


# ---------------------------------------------------------------------------------------------- who wakes whom


def alone(ranks: list[Meeting]) -> Launch:
    """A launch that all have entered."""
    launch = Launch(seq=1, ranks=tuple(range(len(ranks))), timeout_s=WAIT_S)
    for rank in ranks:
        rank.enter(launch, time.monotonic() + WAIT_S)
    return launch


@pytest.fixture
def posts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Whose semaphores were posted."""
    posted: list[int] = []

    def noted(memory: memoryview, count: int, *, init: bool) -> list[Semaphore]:
        result = semaphores(memory, count, init=init)
        for rank, semaphore in enumerate(result):
            monkeypatch.setattr(semaphore, "ring", partial(posted.append, rank))
        return result

    monkeypatch.setattr(_meeting, "semaphores", noted)
    return posted


def test_who_sleeps_is_woken_by_the_rank_that_it_sleeps_for(posts: list[int]) -> None:
    ranks = meetings(4)
    launch = alone(ranks)
    ranks[0]._words[_meeting._ASLEEP] = 3 + 1
    for rank in ranks[1:3]:
        rank.barrier(launch, 0.0, waits_for=())
        assert posts == []
    ranks[3].barrier(launch, 0.0, waits_for=())
    assert posts == [0]
