"""Random functions as steps, against the same functions through Ray; see `tests/ray/step_programs.py`."""

from __future__ import annotations

import pytest
import ray
from hypothesis import HealthCheck, given, settings

from tests.ray.step_programs import Crew, Node, check, programs

FEW, MANY = 12, 1000


@pytest.mark.parametrize(
    ("count", "replaces"),
    [
        (FEW, False),
        (2, True),
        *[pytest.param(MANY - 100, False, marks=pytest.mark.full), pytest.param(100, True, marks=pytest.mark.full)],
    ],
)
@pytest.mark.timeout(4 * 3600)
def test_functions_do_as_steps_what_they_do_through_ray(actors, count, replaces):
    made = ray.remote(num_cpus=0)(Node)
    crews = [Crew(lambda number: actors(made, 1, number)[0], name) for name in ("captured", "eager")]

    @settings(max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(programs(replaces=replaces))
    def run(program):
        check(crews, program)

    run()
