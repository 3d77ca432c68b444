"""Fixtures of the pure tests."""

from __future__ import annotations

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
