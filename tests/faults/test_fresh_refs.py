"""Results of methods that a collective takes and nobody keeps: a hundred thousand of them leave nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import ray

import raycollect as col
from tests.faults import growth, soak
from tests.faults.growth import grown

FRESH_REFS, WARM_REFS = 100_000, 20_000


@pytest.fixture
def actors(tidy: Any) -> Iterator[Any]:
    made = soak.start_lasting()
    ray.get([actor.call.remote(growth.fill_memory) for actor in made])
    yield made
    for actor in made:
        ray.kill(actor)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_a_hundred_thousand_fresh_refs_leave_nothing(actors: Any) -> None:
    """What is private may grow by 40 bytes for each."""
    group = col.declare_collective_group(actors, group_name="fresh")
    looks = []
    for until in (WARM_REFS, FRESH_REFS):
        for _ in range((until - (looks[0].cycle if looks else 0)) // len(actors)):
            col.allreduce_refs([actor.ones.remote(1) for actor in actors], group)
        looks.append(growth.look(until, actors))
    assert list(grown(*looks)) == []
    first, last = (look.figures for look in looks)
    grew = {process: last[process]["private"] - first[process]["private"] for process in first}
    assert max(grew.values()) < 40 * (FRESH_REFS - WARM_REFS), grew
    col.destroy_collective_group("fresh")
