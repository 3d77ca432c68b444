"""The whole product: every backend x kernel x dtype x world x elements x root, in place or not, bit for bit.

About 32,000 launches per backend, one per case; `tests/pure/backends/test_conformance.py` has some of them. Only
`make test-full` runs it. A test is all cases of a backend, a world size and a dtype; it names every case that fails.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.pure.communicators import ProcessTeam, Team, ThreadTeam, Worker
from tests.pure.conformance import BACKENDS, DTYPES, IN_THREADS, SIZES, WORLDS, check_cases, every_case, is_absent

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    if absent := is_absent(request.param):
        pytest.skip(absent)
    return request.param


@pytest.fixture(scope="module", params=WORLDS)
def team(request: pytest.FixtureRequest, backend: str) -> Iterator[Team]:
    """One team at a time: its processes keep their operands."""
    world, workers = request.param, []
    if backend in IN_THREADS:
        made: Team = ThreadTeam(backend, world)
    else:
        workers = [Worker() for _ in range(world)]
        made = ProcessTeam(backend, world, workers)
    yield made
    made.close()
    for worker in workers:
        worker.close()


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_case(team: Team, dtype: str) -> None:
    for size in SIZES:  # those that need the same operands together
        check_cases(team, list(every_case(dtype, team.world_size, (size,))), staged=size % 2 == 0, timeout_s=120)
