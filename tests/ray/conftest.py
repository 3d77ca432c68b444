"""One Ray for the session. Every test leaves no group, no lease and no flight behind."""

from __future__ import annotations

import pytest
import ray

from raycollect.controller import Controller


@pytest.fixture(scope="session")
def cluster():
    ray.init(
        address="local",
        num_cpus=16,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=1 << 30,
        configure_logging=False,
    )
    yield
    ray.shutdown()


@pytest.fixture(autouse=True)
def tidy(cluster):
    """Gives back what a test has declared, and checks that nothing is in flight."""
    yield
    controller = Controller.current()
    flights = [flight for flight in controller.flights() if not flight.resolved]
    controller.close()
    Controller._current = None
    assert not flights, f"still in flight: {flights}"


@pytest.fixture
def actors():
    """Starts actors, and ends them with the test."""
    started = []

    def start(cls, count, *args, **options):
        made = [cls.options(num_cpus=0, **options).remote(*args) for _ in range(count)]
        started.extend(made)
        return made

    yield start
    for actor in started:
        ray.kill(actor)
