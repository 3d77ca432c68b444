"""Random programs over Ray, against what they would do one after the other (P2); see `tests/ray/random_programs.py`.

The controller is the driver, an actor or a task. ``RAYCOLLECT_TEST_ORDER=20`` runs twenty times as many programs.
"""

from __future__ import annotations

import pytest
import ray
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.pure.driver.order_model import MUCH
from tests.ray.random_programs import Bystander, Crew, Ordered, check, check_restart, threads_of

FEW, MANY = 20, 2500
"""Programs for each kind of controller in every run of the tests, and in a full one."""


def few(count):
    # Also in actors, which know nothing of the profile of the tests.
    return settings(max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck))


def search(crew, threads, count):
    """Declares the groups in this process, and looks for a program that goes wrong; hypothesis makes it short."""
    crew.declare()

    @few(count)
    @given(threads_of(threads))
    def programs(program):
        check(crew, program)

    programs()


@ray.remote(num_cpus=0)
class Controlling:
    def search(self, *args):
        search(*args)


search_in_task = ray.remote(num_cpus=0)(search)


@pytest.fixture
def make_crew(actors):
    def make(**options):
        workers = [actors(ray.remote(Ordered), 1, number, **options)[0] for number in range(3)]
        return Crew(workers, actors(Bystander, 1)[0])

    return make


@pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=[pytest.mark.full, pytest.mark.timeout(4 * 3600)])])
@pytest.mark.parametrize("controller", ["driver", "two threads", "actor", "task"])
def test_programs_do_what_they_would_do_one_after_the_other(make_crew, actors, controller, count):
    crew, count = make_crew(), count * MUCH
    if controller == "actor":
        ray.get(actors(Controlling, 1)[0].search.remote(crew, 1, count))
    elif controller == "task":
        ray.get(search_in_task.remote(crew, 1, count))
    else:
        search(crew, 2 if controller == "two threads" else 1, count)


@pytest.mark.parametrize("count", [2, pytest.param(100, marks=[pytest.mark.full, pytest.mark.timeout(3600)])])
def test_programs_go_on_after_a_restart(make_crew, count):
    crew = make_crew(max_restarts=-1, max_task_retries=-1)
    crew.declare()
    program = threads_of(1).map(lambda threads: threads[0])

    @few(count * MUCH)
    @given(program, st.integers(0, 2), st.lists(st.integers(2, 5), min_size=1, max_size=4), program)
    def restarts(before, victim, methods, after):
        check_restart(crew, before, victim, methods, after)

    restarts()
