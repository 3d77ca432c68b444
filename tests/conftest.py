"""One Ray for the session, started when the first test asks for it; pure tests never do."""

from __future__ import annotations

import gc
import os
import signal
import sys
from contextlib import ExitStack, suppress

import pytest

from raycollect.backends import experimental
from raycollect.core import threads

with suppress(ImportError):  # those of the GPU do without it
    from hypothesis import HealthCheck, settings

    # How long an example takes on a machine that does other things, too, is no property of what is tested.
    settings.register_profile("raycollect", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("raycollect")

if "RAYCOLLECT_SWITCH_S" in os.environ:  # see CONTRIBUTING.md
    sys.setswitchinterval(float(os.environ["RAYCOLLECT_SWITCH_S"]))

# A shell ignores Ctrl-C in what it runs in the background, and processes inherit that; some tests press it.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Of the many thousand tests that are collected none is garbage; to look for some takes as long as all the rest."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.fixture(scope="module", autouse=True)
def frozen():
    """What is loaded by now stays; tests that collect garbage need not look through it, which takes half a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def warned(monkeypatch):
    """Tests know that GPUs are experimental; those of the warning itself let it come again."""
    monkeypatch.setattr(experimental, "_has_warned", True)


@pytest.fixture(autouse=True)
def untold():
    """What the log heard of threads in other tests is no reason to leave something out in this one."""
    threads._log_entries.clear()


@pytest.fixture(scope="session")
def cluster():
    """A Ray of our own, with room for many small actors."""
    import ray
    from ray._private import services
    from ray._private.node import Node

    from tests.support import forked_workers

    start_raylet = Node.start_raylet

    def start_forking(self, *args, **options):
        # The environment is now that of workers; Ray reads it as it is imported.
        patched.setattr(services, "_site_flags", lambda: ["-I", "-S"])
        self._ray_params.worker_path = serving.enter_context(forked_workers.serving())
        return start_raylet(self, *args, **options)

    with pytest.MonkeyPatch.context() as patched, ExitStack() as serving:
        patched.setattr(Node, "start_raylet", start_forking)
        # It reads the logs of all processes anew, and nobody reads what it sends: a twentieth of what the tests take.
        patched.setattr(Node, "start_log_monitor", lambda self: None)
        patched.setattr(Node, "start_monitor", lambda self: None)  # which would start further nodes
        ray.init(
            address="local",
            num_cpus=16,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=1 << 30,
            configure_logging=False,
        )
        patched.undo()
        yield
        ray.shutdown()


@pytest.fixture
def tidy(cluster):
    """Gives back what a test has declared, and checks that nothing of it is in flight."""
    from raycollect.driver.controller import Controller

    yield
    controller = Controller.current()
    trackers = [tracker for tracker in controller.plans.trackers() if not tracker.resolved]
    controller.close()
    Controller._current = None
    assert not trackers, f"still in flight: {trackers}"


@pytest.fixture(scope="session")
def idle(cluster):
    """Actors that wait for another test, by their class and the number of their threads."""
    return {}


@pytest.fixture(scope="module")
def idle_here(request, idle):
    """The same; those of classes of a test file end with it, as even an idle one takes half a percent of a core."""
    import ray

    yield idle
    for kind in list(idle):
        if kind[0].__ray_metadata__.modified_class.__module__ == request.module.__name__:
            for actor in idle.pop(kind):
                ray.kill(actor)


@pytest.fixture
def actors(tidy, idle_here):
    """Starts actors, and ends them with the test; those of some classes go on in another test, as good as new."""
    import ray

    from tests.support import actor_pool

    started, lasting = [], []

    def start(cls, count, *args, **options):
        if actor_pool.may_be_reused(cls, options):
            kind = cls, options.get("max_concurrency")
            waiting = idle_here.setdefault(kind, [])
            made = actor_pool.reset([waiting.pop() for _ in range(min(count, len(waiting)))], args)
            made += actor_pool.start(cls, count - len(made), args, **options)
            lasting.extend((kind, actor) for actor in made)
        else:
            made = [cls.options(num_cpus=0, **options).remote(*args) for _ in range(count)]
            started.extend(made)
        return made

    yield start
    for kind, actor in lasting:
        (idle_here[kind] if len(idle_here[kind]) < actor_pool.MOST_IDLE else started).append(actor)
    for actor in started:
        ray.kill(actor)


@pytest.fixture
def gate(actors):
    """Opened by `gate.open.remote()`, at the latest in the end; what `gate.wait.remote()` gives is not there before."""
    import ray

    from tests.support.actors import Gate

    (made,) = actors(Gate, 1, max_concurrency=32)
    yield made
    ray.get(made.open.remote())
