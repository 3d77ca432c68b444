"""Which core a rank waits on, whom it wakes, and whom it sees leave."""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count

import pytest

from raycollect.backends.shm import meeting as _meeting
from raycollect.backends.shm.meeting import OUTCOMES, Meeting, control_nbytes, prepare
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


# ---------------------------------------------------------------------------------------------- who sees whom leave


class Watched(tuple[int, ...]):
    """The ranks of a launch; `meanwhile` is called each time that a rank begins to go through them."""

    meanwhile: Callable[[], object]

    def __iter__(self) -> Iterator[int]:
        self.meanwhile()
        return super().__iter__()


def watched(launch: Launch, meanwhile: Callable[[], object]) -> Launch:
    ranks = Watched(launch.ranks)
    ranks.meanwhile = meanwhile
    return Launch(seq=launch.seq, ranks=ranks, timeout_s=launch.timeout_s)


def agreed(ranks: list[Meeting]) -> Launch:
    """A launch in which all have arrived."""
    launch = alone(ranks)
    for rank in ranks:
        rank.barrier(launch, 0.0, waits_for=())
    return launch


def go_on(ranks: list[Meeting], seq: int) -> bool:
    """These ranks run a later launch, or fail, as they would have to wait for the readers of an earlier one."""
    launch = Launch(seq=seq, ranks=tuple(rank.rank for rank in ranks), timeout_s=WAIT_S)
    for rank in ranks:
        try:
            rank.enter(launch, 0.0)
        except CollectiveTimeoutError:
            rank.end(launch, False)
            return False
        rank.barrier(launch, 0.0, waits_for=())
        rank.end(launch, True)
    return True


def test_the_last_rank_sees_all_though_the_others_go_on_meanwhile() -> None:
    """As many numbers later they use the same places for what they record."""
    first, *others = ranks = meetings(3)
    launch, later, went = agreed(ranks), count(1 + OUTCOMES, OUTCOMES), list[bool]()
    assert [rank.end(launch, True) for rank in others] == [(1,), (1, 2)]
    assert first.end(watched(launch, lambda: went.append(go_on(others, next(later)))), True) == (0, 1, 2)
    assert went[-1], "nothing holds them up once it has left"


@pytest.mark.parametrize("look", range(2))
def test_of_ranks_that_leave_at_once_one_sees_all(look: int) -> None:
    first, *others = ranks = meetings(3)
    launch, looks, seen = agreed(ranks), count(), list[tuple[int, ...]]()

    def meanwhile() -> None:
        if next(looks) == look:
            seen.extend(rank.end(launch, True) for rank in others)

    seen.append(first.end(watched(launch, meanwhile), True))
    assert len(seen) == 3
    assert (0, 1, 2) in seen


def test_a_late_rank_continues_though_a_later_launch_of_the_other_has_failed() -> None:
    first, second = ranks = meetings(2)
    launch = agreed(ranks)
    second.end(launch, True)
    assert not go_on([second], 1 + OUTCOMES)
    first.barrier(launch, time.monotonic() + WAIT_S)
    assert first.end(launch, True) == (0, 1)
