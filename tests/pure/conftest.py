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


def _has_ray() -> bool:
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


@pytest.fixture(autouse=True)
def no_ray() -> Iterator[None]:
    """Pure tests start no Ray: those that want one of their own would find it."""
    before = _has_ray()
    yield
    if _has_ray() and not before:
        sys.modules["ray"].shutdown()
        raise AssertionError("the test has started Ray")
