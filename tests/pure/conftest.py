"""Fixtures of the pure tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from .fleet import Fleet, MakeFleet


@pytest.fixture
def fleet() -> Iterator[MakeFleet]:
    """Makes fleets, and ends them with the test."""
    made: list[Fleet] = []

    def make(world: int) -> Fleet:
        made.append(Fleet(world))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture(autouse=True)
def no_ray() -> Iterator[None]:
    """Pure tests start no Ray: those that need one would find it."""
    yield
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        ray.shutdown()
        raise AssertionError("the test has started Ray")
