"""Fixtures of the pure tests."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from raycollect.channel import Mailbox
from tests.fake_cupy import Fake
from tests.pure.closing import closing_all
from tests.pure.communicators import Workers
from tests.pure.fleet import Fleet, MakeFleet
from tests.pure.mixed import Mixed, faked, mixing
from tests.pure.processes import Crew


@pytest.fixture
def fleet() -> Iterator[MakeFleet]:
    """Makes fleets, and ends them with the test."""
    with closing_all(Fleet) as make:
        yield make


@pytest.fixture
def fake(request: pytest.FixtureRequest) -> Iterator[Fake]:
    """GPUs that there are not, one for each rank; the parameter is the seed of their order."""
    with faked(getattr(request, "param", 0)) as made:
        yield made


@pytest.fixture
def mixed(fake: Fake) -> Iterator[Callable[[str], Mixed]]:
    """Makes fleets on a backend, whose tensors lie on devices of different kinds."""
    with mixing(fake) as make:
        yield make


@pytest.fixture
def mailbox() -> Iterator[Mailbox]:
    """A controller's mailbox."""
    made = Mailbox()
    yield made
    made.close()


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


@pytest.fixture(scope="session")
def processes() -> Iterator[Crew]:
    """Processes that become members of groups; each takes a second to start, so all files use them."""
    crew = Crew()
    yield crew
    crew.close()


@pytest.fixture(scope="session")
def workers() -> Iterator[Workers]:
    """Processes that hold ranks of teams."""
    made = Workers()
    yield made
    made.close()


@pytest.fixture
def crew(processes: Crew, tmp_path: Path) -> Iterator[Crew]:
    """The same, with a rendezvous directory in which nothing may stay."""
    path = tmp_path / "rendezvous"
    path.mkdir(mode=0o700)
    processes.rendezvous = f"file://{path}"
    yield processes
    processes.rest()
    assert not list(path.iterdir()), "a record stayed behind"
