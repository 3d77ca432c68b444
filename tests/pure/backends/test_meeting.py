"""Which core a rank waits on, and what it makes of arrivals that come again."""

from __future__ import annotations

import mmap
import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

from raycollect.backends.shm import meeting as _meeting
from raycollect.backends.shm.meeting import ARRIVAL_NBYTES, Meeting, control_nbytes, prepare
from raycollect.core.cpu_affinity import SETTLED_S
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


def test_who_has_looked_does_not_look_again_at_once(cores: Cores, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, _ = meetings(3)
    now = [100.0]
    monkeypatch.setattr(_meeting.time, "monotonic", lambda: now[0])
    wait_in_vain(first, 1, 0, cores)
    for seq, passed_s, moves in ((2, 0.0, 2), (3, SETTLED_S / 2, 2), (4, SETTLED_S, 4)):
        now[0] += passed_s
        wait_in_vain(second, seq, 0, cores)
        assert len(cores.moves) == moves


# ---------------------------------------------------------------------------------------------- arrivals again

TURNS = 4
"""How often a launch agrees at most: each of the two areas comes twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One launch, as all ranks come to it.

    Attributes:
        seq: Its number.
        ranks: Who comes.
        arrivals: What each rank brings, by turn.
        afresh: By turn, whether they agree without expecting anything.
    """

    seq: int
    ranks: tuple[int, ...]
    arrivals: list[dict[int, bytes]]
    afresh: list[bool]

    def brought(self, turn: int) -> list[bytes]:
        return [self.arrivals[turn][rank] for rank in self.ranks]


def checks(world: int, launches: int, seed: int) -> list[Check]:
    """Launches of which most are as those before, but for some arrivals, some of the ranks, or the count of turns."""
    rng = random.Random(seed)
    arrivals = [b"", b"a", b"b", b"ab", rng.randbytes(7), rng.randbytes(4096), rng.randbytes(ARRIVAL_NBYTES)]
    now = [dict.fromkeys(range(world), b"a") for _ in range(TURNS)]
    made, seq, ranks = list[Check](), 0, tuple(range(world))
    for _ in range(launches):
        seq += rng.choice((1, 1, 1, 2, 70))
        if rng.random() < 0.2:
            ranks = tuple(sorted(rng.sample(range(world), rng.randrange(1, world + 1))))
        for turn in range(TURNS):
            if rng.random() < 0.3:
                now[turn] = now[turn] | {rng.randrange(world): rng.choice(arrivals)}
        count = rng.choice((1, 2, 2, TURNS))
        afresh = [rng.random() < 0.1 for _ in range(count)]
        made.append(Check(seq=seq, ranks=ranks, arrivals=now[:count], afresh=afresh))
    return made


@dataclass(slots=True, kw_only=True)
class Visitor:
    """One rank at checks, that compares what it is told with what is meant.

    Attributes:
        meeting: Its end.
        rng: Chooses what it expects.
        known: What it has expected before; the very objects.
        heard: How often it was told what.
    """

    meeting: Meeting
    rng: random.Random
    known: list[Sequence[bytes]] = field(default_factory=list)
    heard: Counter[str] = field(default_factory=Counter)

    def visit(self, check: Check) -> None:
        launch = Launch(seq=check.seq, ranks=check.ranks, timeout_s=WAIT_S)
        until_s = time.monotonic() + WAIT_S
        for turn, afresh in enumerate(check.afresh):
            brought = check.brought(turn)
            arrival = check.arrivals[turn][self.meeting.rank]
            if afresh:
                assert list(self.meeting.agree(launch, arrival)) == brought
                continue
            self.meeting.enter(launch, until_s)
            expected = self.expect(brought)
            found = self.meeting.agree_again(launch, arrival, expected, until_s)
            assert found == (None if list(expected) == brought else brought)
            self.heard["as expected" if found is None else "otherwise"] += 1
        self.meeting.end(launch, True)

    def expect(self, brought: list[bytes]) -> Sequence[bytes]:
        """Mostly what will come, as the very object of an earlier time; or as another one; or what will not come."""
        way = self.rng.random()
        as_long = [one for one in self.known if len(one) == len(brought)]
        same = [one for one in as_long if list(one) == brought]
        if way < 0.6 and same:
            return self.rng.choice(same)
        if way < 0.8 and as_long:
            return self.rng.choice(as_long)
        wrong = self.rng.randrange(len(brought)) if way > 0.9 else -1
        made = tuple(blob + b"!" if at == wrong else bytes(blob) for at, blob in enumerate(brought))
        self.known.append(made)
        del self.known[:-12]
        return made


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", range(4))
def test_who_agrees_again_hears_of_all_that_is_not_as_expected(world: int, seed: int) -> None:
    """In either area, among any ranks, and whatever changed and changed back meanwhile."""
    every = checks(world, 60, seed)
    visitors = [
        Visitor(meeting=meeting, rng=random.Random(seed * 10 + rank)) for rank, meeting in enumerate(meetings(world))
    ]

    def visit_all(one: Visitor) -> None:
        for check in every:
            if one.meeting.rank in check.ranks:
                one.visit(check)

    with ThreadPoolExecutor(world) as threads:
        for future in [threads.submit(visit_all, one) for one in visitors]:
            future.result(WAIT_S)
    heard = sum((one.heard for one in visitors), Counter[str]())
    assert min(heard["as expected"], heard["otherwise"]) > 10 * world


@pytest.mark.parametrize("world", [1, 2, 4])
def test_what_is_as_before_is_not_read_again(monkeypatch: pytest.MonkeyPatch, world: int) -> None:
    ranks, read, reads = meetings(world), Meeting._read, list[int]()

    def noted(meeting: Meeting, rank: int, parity: int) -> memoryview:
        reads.append(rank)
        return read(meeting, rank, parity)

    monkeypatch.setattr(Meeting, "_read", noted)
    brought = [b"x" * 1000] * world
    expected, equal, counts = tuple(brought), tuple(brought), list[int]()
    for seq, told in enumerate((expected, expected, expected, equal, equal), 1):
        launch, until_s = Launch(seq=seq, ranks=tuple(range(world)), timeout_s=WAIT_S), time.monotonic() + WAIT_S
        reads.clear()

        def come(one: Meeting, launch: Launch = launch, until_s: float = until_s, told: Any = told) -> list[Any]:
            one.enter(launch, until_s)
            found = [one.agree_again(launch, brought[one.rank], told, until_s) for _ in range(2)]  # in each area
            one.end(launch, True)
            return found

        with ThreadPoolExecutor(world) as threads:
            assert list(threads.map(come, ranks)) == [[None] * 2] * world
        counts.append(len(reads))
    all_of_it = 2 * world * world
    assert counts == [all_of_it, 0, 0, all_of_it, 0]


# ---------------------------------------------------------------------------------------------- who wakes whom


def alone(ranks: list[Meeting]) -> Launch:
    """A launch that all have entered."""
    launch = Launch(seq=1, ranks=tuple(range(len(ranks))), timeout_s=WAIT_S)
    for one in ranks:
        one.enter(launch, time.monotonic() + WAIT_S)
    return launch


@pytest.fixture
def posts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Whose semaphores were posted."""
    made: list[int] = []

    def noted(memory: memoryview, count: int, *, init: bool) -> list[Semaphore]:
        found = semaphores(memory, count, init=init)
        for rank, one in enumerate(found):
            monkeypatch.setattr(one, "ring", partial(made.append, rank))
        return found

    monkeypatch.setattr(_meeting, "semaphores", noted)
    return made


def test_who_sleeps_is_woken_by_the_rank_that_it_sleeps_for(posts: list[int]) -> None:
    ranks = meetings(4)
    launch = alone(ranks)
    ranks[0]._words[_meeting._ASLEEP] = 3 + 1
    for one in ranks[1:3]:
        one.barrier(launch, 0.0, waits_for=())
        assert posts == []
    ranks[3].barrier(launch, 0.0, waits_for=())
    assert posts == [0]


def test_who_leaves_too_early_wakes_all_who_sleep(posts: list[int]) -> None:
    ranks = meetings(4)
    launch = alone(ranks)
    for one in ranks[:2]:
        one._words[one.rank * _meeting._WORD_STRIDE + _meeting._ASLEEP] = 3 + 1
    ranks[2].end(launch, False)
    assert posts == [0, 1]
    ranks[2].leave()
    assert posts == [0, 1] * 2


def test_nobody_sleeps_for_a_rank_that_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where it has come while the sleep was announced: nobody would end that."""
    ranks = meetings(3)
    first, second, third = ranks
    launch = alone(ranks)
    slept_for: list[int] = []
    take = first._semaphore.take

    def announced() -> int:
        if first._words[_meeting._ASLEEP] == third.rank + 1 and third._phase == 0:
            third.barrier(launch, 0.0, waits_for=())
        return take()

    def slept(timeout_s: float) -> bool:
        slept_for.append(first._words[_meeting._ASLEEP] - 1)
        second.barrier(launch, 0.0, waits_for=())
        return True

    monkeypatch.setattr(first._semaphore, "take", announced)
    monkeypatch.setattr(first._semaphore, "wait", slept)
    first.barrier(launch, time.monotonic() + WAIT_S)
    assert slept_for == [second.rank]
