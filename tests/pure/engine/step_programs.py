"""Programs of captured steps, and what runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.pure.teams import Team

MakeTeam = Callable[..., Team]


@pytest.fixture
def team() -> Iterator[MakeTeam]:
    teams: list[Team] = []

    def make(world: int, scripts: Any = None) -> Team:
        teams.append(Team(world, scripts))
        return teams[-1]

    yield make
    for team in teams:
        for replay in team.replays:
            replay.abort()
        team.close()


def every(slots: list[int]) -> dict[int, int]:
    return dict(enumerate(slots))
