"""Tensors without elements, anywhere in what collectives are given: some of those that `tests/full` draws."""

from __future__ import annotations

import pytest

from tests.pure.empties import BACKENDS_HERE, check_draws, teams


@pytest.mark.parametrize("backend", BACKENDS_HERE)
def test_empty_tensors_change_nothing_for_the_others(backend: str) -> None:
    with teams(backend) as found:
        check_draws(found, examples=12, worlds=(2, 3))
