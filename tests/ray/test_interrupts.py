"""What interrupts a call, at any place of it: handlers of signals, which may raise, and finalizers, which may call."""

from __future__ import annotations

import faulthandler
import gc
import random
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import raycollect as col
from raycollect import errors
from raycollect.driver.batch import current
from raycollect.driver.controller import Controller
from tests.support.actors import Worker, filled
from tests.support.waiting import at_step, wait_until

WAIT_S = 60.0


class Alarm(TimeoutError):
    """What the handler of SIGALRM raises, as in programs that limit a call by `signal.alarm`."""


def _alarm(number: int, frame: Any) -> None:
    raise Alarm


@pytest.fixture(autouse=True)
def _alarms() -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, _alarm)
    faulthandler.dump_traceback_later(6 * WAIT_S, exit=True)  # a deadlock in this thread ends no test by itself
    yield
    faulthandler.cancel_dump_traceback_later()
    signal.signal(signal.SIGALRM, before)


def places(count: int, most: int, seed: int) -> list[int]:
    """Some of the places of a call."""
    draw = random.Random(seed)
    return sorted(draw.sample(range(1, count + 1), min(most, count)))


def left() -> list[Any]:
    controller = Controller.current()
    wait_until(lambda: not controller.plans.trackers())
    return controller.plans.trackers()


class Scene:
    """Three workers in a group, and calls of all kinds on them."""

    def __init__(self, actors: Any, backend: str = "auto", **options: Any) -> None:
        self.workers = actors(Worker, 3, **options)
        self.group = col.declare_collective_group(self.workers, group_name="scene", backend=backend)
        self.refs, self.others = filled(self.workers, (1, 2, 4)), filled(self.workers, (1, 2, 4))
        with col.capture() as self.step:
            col.allreduce_refs(self.others, "scene", "max")
        self.calls: dict[str, Callable[[], Any]] = {
            "known": lambda: col.allreduce_refs(self.refs, "scene", "max"),
            "async": lambda: col.allreduce_refs(self.refs, "scene", "max", async_op=True).wait(),
            "outputs": lambda: col.allgather_refs(None, self.refs, "scene"),
            "batch": self.batch,
            "run": self.step.run,
            "get": lambda: col.get(self.refs),
            "status": self.group.status,
            "cancel": lambda: col.broadcast_refs(self.refs, 0, "scene", async_op=True).cancel(),
        }

    def batch(self) -> None:
        with col.batch():
            col.allreduce_refs(self.refs, "scene", "max")
            col.broadcast_refs(self.refs, 1, "scene")

    def works(self) -> None:
        """All that a driver can do that was never interrupted."""
        assert left() == []
        refs = filled(self.workers, (5, 6, 7))
        assert col.allreduce_refs(refs, "scene") == refs
        assert [float(one[0]) for one in col.get(refs)] == [18.0] * 3
        self.step.run()


@pytest.fixture
def scene(actors: Any, request: pytest.FixtureRequest) -> Scene:
    return Scene(actors, **getattr(request, "param", {}))


SCENES = [{"backend": "shm"}, {"backend": "tcp"}, {"backend": "shm", "max_concurrency": 4}]


# A connection for data that was just opened as a signal came: the last reference to it closes it, and warns
@pytest.mark.filterwarnings("ignore:Exception ignored in. <socket:pytest.PytestUnraisableExceptionWarning")
# Python itself drops what comes up in a destructor, as the end of a call may run one
@pytest.mark.filterwarnings("ignore:Exception ignored in. <function .*__del__:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("most", [6, pytest.param(400, marks=[pytest.mark.full, pytest.mark.timeout(900)])])
@pytest.mark.parametrize("scene", SCENES, indirect=True, ids=["shm", "tcp", "threaded"])
def test_a_signal_at_any_place_of_a_call(scene: Scene, most: int) -> None:
    """Its handler's own exception comes up, the next calls work, and the group and its actors are as they were."""
    for kind, call in scene.calls.items():
        call()
        count = at_step(0, int, call)
        for at in places(count, most, seed=count):
            number, raised = random.Random(at).choice([(signal.SIGINT, KeyboardInterrupt), (signal.SIGALRM, Alarm)])
            came: list[BaseException] = []
            scene.refs = filled(scene.workers, (1, 2, 4))  # an aborted call may leave the old values half-written
            try:
                at_step(at, lambda number=number: signal.raise_signal(number), call)
            except (KeyboardInterrupt, Alarm) as exc:
                came.append(exc)
            assert left() == [], f"{kind}, {at} of {count}"
            assert all(isinstance(one, raised) for one in came), f"{kind}, {at} of {count}"
            assert current() is None, f"{kind}, {at} of {count}"
            if kind in ("known", "async", "batch") and not came:  # all of its work is done
                assert {float(one[0]) for one in col.get(scene.refs)} == {4.0}, f"{kind}, {at} of {count}"
        scene.works()
        assert scene.group.status().state == "alive", kind
    assert signal.getsignal(signal.SIGALRM) is _alarm


@pytest.mark.parametrize("most", [6, pytest.param(300, marks=[pytest.mark.full, pytest.mark.timeout(900)])])
def test_a_finalizer_at_any_place_of_a_call(scene: Scene, most: int) -> None:
    """Its own call works, or is refused at once where it interrupts another one in the middle."""
    outcomes: list[tuple[str, BaseException | None]] = []

    class Trash:
        """In a cycle, so that the collector of garbage finds it."""

        def __init__(self, kind: str) -> None:
            self.kind, self.me = kind, self

        def __del__(self) -> None:
            try:
                scene.calls[self.kind]()
            except BaseException as exc:
                outcomes.append((self.kind, exc))
            else:
                outcomes.append((self.kind, None))

    def collect(kind: str) -> None:
        Trash(kind)
        gc.collect()

    draw = random.Random(most)
    gc.collect()
    for outer in ("known", "outputs", "batch", "run", "status"):
        call = scene.calls[outer]
        count = at_step(0, int, call)
        for at in places(count, most, seed=count):
            inner = draw.choice(["known", "outputs", "run", "get", "status", "cancel", "async"])
            try:
                at_step(at, lambda inner=inner: collect(inner), call)
            except errors.CaptureError:
                assert inner == "run"
            assert left() == [], f"{inner} in {outer}, {at} of {count}"
    assert outcomes
    refused = [exc for _, exc in outcomes if exc is not None]
    told = (errors.ReentrantCallError, errors.CaptureError, errors.InvalidArgumentError)  # the last two in a batch
    strange = [one for one in refused if not isinstance(one, told)]
    assert strange == []
    assert len(refused) < len(outcomes)
    scene.works()


def test_a_finalizer_may_close_a_step_at_any_place(scene: Scene) -> None:
    class Trainer:
        """As many classes it is in a cycle with itself."""

        def __init__(self) -> None:
            with col.capture() as self.step:
                col.allreduce_refs(scene.refs, "scene", "max")
            self.me = self

        def __del__(self) -> None:
            self.step.close()

    call = scene.calls["known"]
    count = at_step(0, int, call)
    for at in places(count, 8, seed=count):
        Trainer()
        at_step(at, gc.collect, call)
    scene.works()


def threads_of(workers: Any) -> list[int]:
    """How many threads for captured steps each has."""

    def count(self: Any) -> int:
        return sum(one.name.startswith("raycollect-capture") for one in threading.enumerate())

    return list(col.get([one.call.remote(count) for one in workers]))


def test_dropped_steps_give_everything_back_at_once(scene: Scene) -> None:
    """Without another call of this driver, also where the last run of one has not been waited for."""
    before = threads_of(scene.workers)
    steps = []
    for _ in range(5):
        with col.capture() as step:
            col.allreduce_refs(scene.refs, "scene", "max")
        step.run()
        steps.append(step)
    assert threads_of(scene.workers) == [one + 5 for one in before]
    steps[0].run(async_op=True)
    del step
    steps.clear()
    gc.collect()
    assert wait_until(lambda: threads_of(scene.workers) == before)
    scene.works()


def test_many_steps_take_few_threads(scene: Scene) -> None:
    from raycollect.member.captured_steps import MOST_DOORBELLS

    steps = []
    for _ in range(MOST_DOORBELLS + 3):
        with col.capture() as step:
            col.allreduce_refs(scene.others, "scene", "max")
        steps.append(step)
    for _ in range(2):
        for step in steps:
            step.run()
    assert max(threads_of(scene.workers)) <= MOST_DOORBELLS + 1
    assert {float(one[0]) for one in col.get(scene.others)} == {4.0}
    for step in steps:
        step.close()
    assert wait_until(lambda: max(threads_of(scene.workers)) <= 2)
