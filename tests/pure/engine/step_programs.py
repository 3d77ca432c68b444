"""Programs of captured steps, and what runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.pure.teams import Team

MakeTeam = Callable[..., Team]


@pytest.fixture
def team() -> Iterator[MakeTeam]:
    made: list[Team] = []

    def make(world: int, scripts: Any = None) -> Team:
        made.append(Team(world, scripts))
        return made[-1]

    yield make
    for one in made:
        for replay in one.replays:
            replay.abort()
        one.close()


def every(slots: list[int]) -> dict[int, int]:
    return dict(enumerate(slots))
