"""Skips every test where there is no GPU, and says why; makes teams of ranks on those that there are."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from . import devices

if TYPE_CHECKING:
    from tests.pure.communicators import Team, Worker

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    why = devices.why_none()
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            item.add_marker(pytest.mark.filterwarnings("default"))  # cupy's and torch's are not ours
            if why:
                item.add_marker(pytest.mark.skip(reason=why))


@pytest.fixture(scope="session", autouse=True)
def gpus() -> Iterator[None]:
    """The GPUs; the fake's, where that is asked for."""
    if not devices.FAKE:
        yield
        return
    from tests.fake_cupy import installed

    with pytest.MonkeyPatch.context() as patch:
        for name, value in devices.environment_of(0).items():
            patch.setenv(name, value)
        yield from _faked(installed)


def _faked(installed: Callable[..., Any]) -> Iterator[None]:
    with installed(devices=devices.FAKE_DEVICES, nccl_version=devices.FAKE_NCCL):
        yield
        streams = sys.modules.get("raycollect.backends.streams")
        if streams is not None:
            streams._free.clear()  # the events go with their machine


@pytest.fixture(scope="session")
def workers(gpus: None) -> Iterator[Callable[[int], list[Worker]]]:
    """Gives processes; all of them end with the session."""
    from tests.pure.communicators import Worker

    made: list[Worker] = []

    def give(count: int) -> list[Worker]:
        made.extend(Worker() for _ in range(count - len(made)))
        return made[:count]

    yield give
    for worker in made:
        worker.close()


@pytest.fixture(scope="session")
def team_of(workers: Callable[[int], list[Worker]]) -> Iterator[Callable[[int], Team]]:
    """Gives the team of so many ranks, which lasts; the test is skipped where they can't be had."""
    from .teams import form

    teams: dict[int, Team] = {}
    failed: dict[int, BaseException] = {}

    def team(world_size: int) -> Team:
        if why := devices.why_not_so_many(world_size):
            pytest.skip(why)
        if world_size in failed:  # it may have taken its whole time limit
            pytest.fail(f"{world_size} ranks could not be brought together: {failed[world_size]!r}", pytrace=False)
        if getattr(teams.get(world_size), "spoiled", False):
            teams.pop(world_size).close()
        if world_size not in teams:
            try:
                teams[world_size] = form(world_size, workers)
            except BaseException as exc:
                failed[world_size] = exc
                raise
        return teams[world_size]

    yield team
    for made in teams.values():
        made.close()


@pytest.fixture
def fresh_team_of(gpus: None) -> Iterator[Callable[[int], Team]]:
    """Gives a team, in processes of its own, that the test may break."""
    from tests.pure.communicators import Worker

    from .teams import form

    teams: list[Team] = []
    started: list[Worker] = []

    def start(count: int) -> list[Worker]:
        started.extend(Worker() for _ in range(count))
        return started

    def team(world_size: int) -> Team:
        if why := devices.why_not_so_many(world_size):
            pytest.skip(why)
        teams.append(form(world_size, start))
        return teams[-1]

    yield team
    for made in teams:
        made.close()
    for worker in started:
        worker.close()
