"""Tensors without elements, anywhere in what collectives are given: 2,000 draws, spread over the backends."""

from __future__ import annotations

import pytest

from tests.pure.empties import BACKENDS_HERE, check_draws, teams
from tests.pure.empty_scenes import WORLDS

DRAWS = 2_000


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("backend", BACKENDS_HERE)
def test_empty_tensors_change_nothing_for_the_others(backend: str) -> None:
    with teams(backend) as found:
        check_draws(found, examples=-(-DRAWS // len(BACKENDS_HERE)), worlds=WORLDS)
