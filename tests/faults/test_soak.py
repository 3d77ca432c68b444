"""The soak in short: thirty groups come and go, three actors are killed, and nothing is left; and what it would see."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import pytest
import ray

import raycollect as col
from tests.faults import growth, soak
from tests.faults.growth import Look, by_class, grown, rising, slope
from tests.faults.soak import PHASES, Phase
from tests.support.actors import spread


@pytest.fixture(scope="module")
def soaked(cluster):
    """The actors of all soaks: each looks at what has grown in it, whatever was there before."""
    made = soak.start_lasting()
    ray.get([actor.call.remote(growth.prepare) for actor in made])
    yield made
    for actor in made:
        ray.kill(actor)


@pytest.fixture
def lasting(tidy, soaked):
    """The actors of a soak."""
    return soaked


@pytest.mark.full
@pytest.mark.parametrize(
    ("number", "cycles"),
    [pytest.param(*one, marks=pytest.mark.timeout(400)) for one in ((0, 14), (1, 16), (3, 3))],
)
def test_short_soak_leaves_nothing(lasting: Any, number: int, cycles: int) -> None:
    outcome = soak.soak(PHASES[number], lasting, cycles=cycles, looks=1)
    assert list(grown(outcome.looks[0], outcome.looks[-1])) == [], outcome.classes


@pytest.mark.full
@pytest.mark.timeout(900)
def test_thousands_of_fresh_refs_leave_nothing(lasting: Any) -> None:
    """Results of methods that a collective takes and nobody keeps; at the first look all that is remembered is full."""
    group, looks = col.declare_collective_group(lasting, group_name="fresh"), []
    for count in (15_000, 30_000):
        for _ in range(5_000):
            col.allreduce_refs([actor.ones.remote(1) for actor in lasting], group)
        looks.append(growth.look(count, lasting))
    group.destroy()
    assert list(grown(*looks)) == []
    for process, before in looks[0].figures.items():
        grew = looks[1].figures[process]["private"] - before["private"]
        assert grew < 100 * 15_000, process  # a nested ``ray.put`` in each result takes 150 of each of three actors


_kept: list[Any] = []


def _keeps_refs(cycle: int, actors: Any) -> None:
    _kept.extend(spread(actors))


def _keeps_groups(cycle: int, actors: Any) -> None:
    _kept.append(col.declare_collective_group(actors, group_name=f"kept {cycle}"))


def _keeps_threads(cycle: int, actors: Any) -> None:
    ray.get(actors[1].call.remote(lambda self: threading.Thread(target=threading.Event().wait, daemon=True).start()))


def _keeps_actors(cycle: int, actors: Any) -> None:
    (one,) = soak.start(1)
    ray.get(one.read.remote())
    _kept.append(one)


@pytest.mark.full
@pytest.mark.parametrize(
    ("cycle", "seen"),
    [
        (_keeps_refs, ["driver: references", "actor 0: values in the store", "actor 2: values in the store"]),
        (_keeps_groups, ["driver: living objects", "driver: groups", "actor 1: living objects"]),
        (_keeps_threads, ["actor 1: threads of Python"]),
        (_keeps_actors, ["driver: living actors"]),
    ],
)
def test_leaks_are_detected(lasting: Any, monkeypatch: pytest.MonkeyPatch, cycle: Any, seen: list[str]) -> None:
    monkeypatch.setattr(growth, "SETTLE_S", 1.0)
    try:
        outcome = soak.soak(Phase(name="leaks", cycle=cycle), lasting, cycles=3, looks=1)
    finally:
        _kept.clear()
    for one in seen:
        assert any(line.startswith(one) for line in outcome.grew), (one, outcome.grew)
    assert "What grew:" in soak.report([outcome], warm=0)


# ---------------------------------------------------------------------------------------------- judging, alone


def _look(cycle: int, **figures: int) -> Look:
    return Look(cycle=cycle, figures={"driver": figures}, classes={"driver": Counter({"Lease": figures["threads"]})})


def test_counts_may_not_grow_but_for_what_is_rays_own() -> None:
    first = _look(5, threads=4, sockets=10)
    assert list(grown(first, _look(9, threads=4, sockets=16))) == []
    assert list(grown(first, _look(9, threads=3, sockets=2))) == [], "less is no leak"
    assert [line.split(":")[1] for line in grown(first, _look(9, threads=5, sockets=17))] == [
        " threads of Python",
        " sockets",
    ]
    assert list(by_class(first, _look(9, threads=6, sockets=1))) == ["driver: Lease +2"]


@pytest.mark.parametrize(("per_cycle", "killed", "is_seen"), [
    (0, False, False), (8191, False, False), (8300, False, True), (-9000, False, False),
    (130_000, True, False), (135_000, True, True),
])  # fmt: skip
def test_memory_may_grow_by_so_much_per_cycle(per_cycle: int, killed: bool, is_seen: bool) -> None:
    looks = [_look(cycle, threads=1, private=10**8 + per_cycle * cycle) for cycle in (5, 50, 95, 140)]
    assert slope(looks, "driver", "private") == pytest.approx(per_cycle, abs=1e-3)
    assert bool(list(rising(looks, killed=killed))) == is_seen


@pytest.mark.parametrize(("last", "is_seen"), [(50, False), (90, False), (110, True)])
def test_growth_up_to_a_megabyte_counts_as_warm_up(last: int, is_seen: bool) -> None:
    looks = [_look(cycle, threads=1, private=10**8 + 11_000 * cycle) for cycle in (0, last // 2, last)]
    assert bool(list(rising(looks, killed=False))) == is_seen
