"""The soak in short: thirty groups come and go, three actors are killed, and nothing is left; and what it would see."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import ray

import raycollect as col
from tests.faults import growth, soak
from tests.faults.growth import grown
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
    group = col.declare_collective_group(lasting, group_name="fresh")

    def after(count: int, before: growth.Look | None = None) -> growth.Look:
        for _ in range(5_000):
            col.allreduce_refs([actor.ones.remote(1) for actor in lasting], group)
        return growth.look(count, lasting, before=before)

    first = after(15_000)
    last = after(30_000, first)
    group.destroy()
    assert list(grown(first, last)) == []
    for process, before in first.figures.items():
        grew = last.figures[process]["private"] - before["private"]
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
