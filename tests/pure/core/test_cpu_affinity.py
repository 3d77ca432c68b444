"""How ranks spread over cores, and keep to them while they stay awake."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest

from raycollect.core import cpu_affinity
from raycollect.core.cpu_affinity import SETTLED_S, CorePin, Seeker
from tests.pure.placed import Cores

SHAPES = [(ranks, many) for ranks in range(2, 7) for many in range(1, 5)]
"""How many ranks are on how many cores."""

ROUNDS = 4
"""After how many rounds all lie evenly."""


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch) -> Cores:
    return Cores(set(range(4))).install(monkeypatch)


class Crew:
    """Ranks of one machine, each with a berth.

    Attributes:
        seen: On which core each was when it last took its berth, counted from 1; as others see it.
    """

    def __init__(self, system: Cores, at: Sequence[int]) -> None:
        self.system, self.ranks = system, range(len(at))
        self.berths = [CorePin() for _ in at]
        self.seen = [core + 1 for core in at]
        system.at, system.masks, system.moves = dict(enumerate(at)), {}, []

    def take(self, rank: int, seen: Sequence[int]) -> None:
        """One takes its berth, by some numbers."""
        self.system.who = rank
        self.seen[rank] = self.berths[rank].take(seen, rank)
        assert self.seen[rank] == self.system.at[rank] + 1

    def take_all(self) -> None:
        """All take their berths by the same numbers."""
        seen = tuple(self.seen)
        for rank in self.ranks:
            self.take(rank, seen)

    def leave(self, rank: int) -> None:
        self.system.who = rank
        self.berths[rank].leave()

    @property
    def places(self) -> list[int]:
        return [self.system.at[rank] for rank in self.ranks]

    def spread(self, mask: set[int]) -> int:
        """By how many ranks one core has more than another."""
        counts = Counter(self.places)
        return max(counts[core] for core in mask) - min(counts[core] for core in mask)


def distributions(ranks: int, many: int, seed: int) -> Iterator[list[int]]:
    """Every way to be on cores; which rank is where is left to chance."""
    rng = random.Random(seed)
    for at in itertools.combinations_with_replacement(range(many), ranks):
        yield rng.sample(at, ranks)


# ---------------------------------------------------------------------------------------------- berths


@pytest.mark.parametrize(("ranks", "many"), SHAPES)
@pytest.mark.parametrize("seed", range(3))
def test_all_by_the_same_numbers_come_to_lie_evenly_and_stay(system: Cores, ranks: int, many: int, seed: int) -> None:
    system.mask = set(range(many))
    for at in distributions(ranks, many, seed):
        crew = Crew(system, at)
        for _ in range(ROUNDS):
            crew.take_all()
        assert crew.spread(system.mask) <= 1, at
        assert [system.masks.get(rank, system.mask) for rank in crew.ranks] == [{core} for core in crew.places]
        places, moves = crew.places, len(system.moves)
        for _ in range(3):
            crew.take_all()
        assert (crew.places, len(system.moves)) == (places, moves), at


@pytest.mark.parametrize(("ranks", "many"), SHAPES)
@pytest.mark.parametrize("seed", range(3))
def test_one_after_the_other_they_come_to_lie_evenly_and_stay(system: Cores, ranks: int, many: int, seed: int) -> None:
    """In any order, each by what the others have said by then."""
    system.mask, rng = set(range(many)), random.Random(seed)
    for at in distributions(ranks, many, seed):
        crew = Crew(system, at)
        for _ in range(ROUNDS):
            for rank in rng.sample(crew.ranks, ranks):
                crew.take(rank, crew.seen)
        assert crew.spread(system.mask) <= 1, at
        places, moves = crew.places, len(system.moves)
        for rank in (*crew.ranks, *reversed(crew.ranks)):
            crew.take(rank, crew.seen)
        assert (crew.places, len(system.moves)) == (places, moves), at


def test_who_lies_evenly_stays_where_it_is(system: Cores) -> None:
    """The last ones of a core that has too many move, and no more of them than it takes."""
    system.mask = {0, 1}
    for at, after in (
        ([0, 1], [0, 1]),
        ([1, 0, 1, 0], [1, 0, 1, 0]),
        ([1, 1, 0], [1, 1, 0]),
        ([0, 0, 0, 0], [0, 0, 1, 1]),
        ([1, 0, 1, 1, 1], [1, 0, 1, 1, 0]),
    ):
        crew = Crew(system, at)
        crew.take_all()
        assert crew.places == after


@pytest.mark.parametrize("at", [[0, 1], [1, 2, 0], [0, 0, 1, 1]])
def test_who_may_not_keep_to_its_core_is_as_it_was(system: Cores, at: list[int]) -> None:
    system.mask, system.refuses = set(at), True
    crew = Crew(system, at)
    for _ in range(3):
        crew.take_all()
    assert (crew.places, system.masks) == (at, {})
    system.refuses = False
    for rank in crew.ranks:
        crew.leave(rank)
    assert system.moves == [], "nothing was kept"
    crew.take_all()
    assert crew.places == at
    assert system.masks == {rank: {core} for rank, core in enumerate(at)}


def test_who_may_not_go_to_another_core_says_where_it_is(system: Cores) -> None:
    system.refuses = True
    crew = Crew(system, [0, 0])
    crew.take_all()
    assert crew.seen == [1, 1]


def test_a_mask_that_somebody_else_has_set_meanwhile_stays(system: Cores) -> None:
    for theirs in ({2, 3}, {0, 1}, {3}):
        crew = Crew(system, [0])
        crew.take_all()
        system.masks[0] = theirs
        crew.leave(0)
        assert system.masks[0] == theirs
        crew.leave(0)
        assert system.masks[0] == theirs


def test_who_does_not_know_its_own_core_keeps_to_none(system: Cores, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_affinity, "current_core", lambda: 0)
    berth = CorePin()
    assert berth.take([0, 1, 1], 0) == 0
    berth.leave()
    assert system.moves == []


@pytest.mark.parametrize("seed", range(8))
def test_nobody_leaves_its_own_mask(system: Cores, seed: int) -> None:
    """Where masks differ, and others are on cores that one may not use."""
    rng = random.Random(seed)
    for ranks in range(2, 7):
        masks = [set(rng.sample(range(4), rng.randrange(1, 5))) for _ in range(ranks)]
        crew = Crew(system, [rng.choice(sorted(mask)) for mask in masks])
        system.masks = dict(enumerate(masks))
        for turn in range(10):
            seen = tuple(crew.seen)
            for rank in rng.sample(crew.ranks, ranks):
                crew.take(rank, seen if turn % 2 else crew.seen)
                assert system.masks[rank] == {system.at[rank]}
                assert system.at[rank] in masks[rank]
        for rank in crew.ranks:
            crew.leave(rank)
        assert system.masks == dict(enumerate(masks))
        moves = len(system.moves)
        for rank in crew.ranks:
            crew.leave(rank)
        assert len(system.moves) == moves, "a second time it does nothing"


def test_the_real_system_tells_where_one_is() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_affinity, "_sched_getcpu", lambda: 6)
        assert cpu_affinity.current_core() == 7
        patch.setattr(cpu_affinity, "_sched_getcpu", lambda: -1)
        assert cpu_affinity.current_core() == 0


# ---------------------------------------------------------------------------------------------- seekers


def test_a_seeker_does_not_look_where_none_of_its_core_is_awaited(system: Cores) -> None:
    system.who, system.at = 0, {0: 1}
    seeker = Seeker()
    assert seeker.seek([1, 3, 0], [1, 2, 3], 0.0) == 2
    assert system.moves == []
    assert seeker.seek([2], [1, 2, 3], 0.0) == 4, "and so it is free to look at once"
    assert system.masks[0] == {0, 1, 2, 3}


def test_a_seeker_that_was_refused_is_where_it_was(system: Cores) -> None:
    system.who, system.at, system.refuses = 0, {0: 1}, True
    seeker = Seeker()
    assert seeker.seek([2], [2], 5.0) == 2
    assert system.masks == {}
    system.refuses = False
    assert seeker.seek([2], [2], 5.0 + SETTLED_S / 2) == 2, "it does not try again at once"
    assert seeker.seek([2], [2], 5.0 + SETTLED_S) == 1
    assert system.masks == {0: {0, 1, 2, 3}}


def test_a_seeker_that_does_not_know_its_core_stays(system: Cores, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_affinity, "current_core", lambda: 0)
    assert Seeker().seek([0, 0], [0, 0], 0.0) == 0
    assert system.moves == []
