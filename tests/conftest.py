"""One Ray for the session, started when the first test asks for it; pure tests never do."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def cluster():
    """A Ray of our own, with room for many small actors."""
    import ray

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


@pytest.fixture
def tidy(cluster):
    """Gives back what a test has declared, and checks that nothing of it is in flight."""
    from raycollect.controller import Controller

    yield
    controller = Controller.current()
    flights = [flight for flight in controller.flights() if not flight.resolved]
    controller.close()
    Controller._current = None
    assert not flights, f"still in flight: {flights}"


@pytest.fixture
def actors(tidy):
    """Starts actors, and ends them with the test."""
    import ray

    started = []

    def start(cls, count, *args, **options):
        made = [cls.options(num_cpus=0, **options).remote(*args) for _ in range(count)]
        started.extend(made)
        return made

    yield start
    for actor in started:
        ray.kill(actor)
