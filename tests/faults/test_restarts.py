"""Actors that Ray restarts, methods that it retries: nobody gets the data of another process, or of no attempt."""

from __future__ import annotations

import os

import numpy as np
import pytest
import ray

import raycollect as col
from raycollect import errors
from tests.faults.groups import process_of, restart
from tests.support.actors import Buffers, Worker, block
from tests.support.waiting import wait_until

PATIENT_S = 20.0


# ---------------------------------------------------------------------------------------------- old refs


def get(old, other):
    col.get(old)


def free(old, other):
    col.free(old)


def fetch(old, other):
    """By the handle, which has been here since before."""
    np.asarray(other.handle)


def argument(old, other):
    """Ray passes on what the method raised there."""
    raise refused(other.keeper.is_tensor, old)


def to_itself(old, other):
    raise refused(other.restarted.is_tensor, old)


def call(old, other):
    col.allreduce_refs([old, other.ref], timeout_s=PATIENT_S)


def batch(old, other):
    with col.batch():
        col.allreduce_refs([other.ref, other.fresh], timeout_s=PATIENT_S)
        col.allreduce_refs([old, other.ref], timeout_s=PATIENT_S)


def step(old, other):
    with col.capture(timeout_s=PATIENT_S) as captured:
        col.allreduce_refs([old, other.ref])
    captured.run()


def output(old, other):
    col.broadcast_refs([other.ref, old], 0, timeout_s=PATIENT_S)


def refused(method, ref):
    with pytest.raises(ray.exceptions.RayTaskError) as caught:
        ray.get(method.remote(ref))
    return caught.value.cause


class Tensors(Buffers):
    """Says what has become of its arguments."""

    @col.by_value
    def is_tensor(self, value):
        return isinstance(value, np.ndarray)


Tensor = ray.remote(Tensors)
USES = {
    get: "get",
    free: "free",
    fetch: "get",
    argument: "get",
    to_itself: "get",
    call: "allreduce",
    batch: "batch",
    step: "capture",
    output: "broadcast",
}
"""How a ref may be used, and what then is refused."""


class Restarted:
    """An actor that was restarted, what is left of its first process, and an actor that was not.

    Attributes:
        old: A ref that its first process returned.
        handle: What stands for that.
        fresh: A ref that its second one did.
        ref: A ref of the other actor.
        told: What one heard who used their group after that.
    """

    def __init__(self):
        self.restarted, self.keeper = [Tensor.options(num_cpus=0, max_restarts=1).remote() for _ in range(2)]
        self.old, self.ref = self.restarted.get_buffer.remote(), self.keeper.get_buffer.remote()
        self.handle = ray.get(self.old)
        group = col.declare_collective_group([self.restarted, self.keeper], group_name="restarted")
        col.allreduce_refs([self.old, self.ref], "restarted")
        restart(self.restarted)
        with pytest.raises(errors.RaycollectError) as caught:
            col.allreduce_refs([self.old, self.ref], "restarted")
        self.told = caught.value
        group.destroy()
        self.fresh = self.restarted.get_buffer.remote()
        assert ray.get(self.fresh).incarnation != self.handle.incarnation

    def close(self):
        for one in (self.restarted, self.keeper):
            ray.kill(one)


@pytest.fixture(scope="module")
def other(cluster):
    one = Restarted()
    yield one
    one.close()


@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_refs_of_the_previous_process_are_lost(other, tidy, use):
    """The second process returns its buffer by a ref of the same actor; none of the two is taken for the other."""
    before = ray.get([other.keeper.read.remote(), other.restarted.read.remote()])
    with pytest.raises(errors.TensorLostError) as caught:
        use(other.old, other)
    (violation,) = caught.value.violations
    assert violation.ref == other.old.hex()
    assert violation.actor == other.handle.actor
    assert caught.value.op.startswith(USES[use])
    if USES[use] in ("get", "free"):
        assert other.handle.incarnation[:6] in str(caught.value), "which of its processes it was"
        assert "no restart of the actor brings back" in str(caught.value)
    after = ray.get([other.keeper.read.remote(), other.restarted.read.remote()])
    np.testing.assert_array_equal(before, after)


def test_restart_breaks_the_old_group_and_a_new_one_works(other, tidy):
    """Where a member died, nobody works on in its name."""
    assert isinstance(other.told, errors.GroupBrokenError)
    assert "died" in str(other.told)
    refs = [other.restarted.get_buffer.remote(), other.ref]
    before = col.get(refs)
    col.allreduce_refs(refs, timeout_s=PATIENT_S)
    np.testing.assert_array_equal(col.get(refs), [sum(before)] * 2)


def die_with_open_connections(self):
    """Ends its process, whose TCP connections another one keeps open for a while, so that nobody sees their end.

    By the other sockets, Ray sees the end of the process. A fork without exec would not do: the interpreter lock, and
    others, may be held by threads that a fork lacks, and it would keep all sockets open for ever.
    """
    import socket
    import stat
    import subprocess
    from contextlib import suppress
    from pathlib import Path

    def is_connection(number):
        return stat.S_ISSOCK(os.fstat(number).st_mode) and socket.socket(fileno=os.dup(number)).family == socket.AF_INET

    kept = set()
    for number in [int(one.name) for one in Path("/proc/self/fd").iterdir()]:
        with suppress(OSError):
            kept |= {number} if is_connection(number) else set()
    subprocess.Popen(["sleep", "30"], pass_fds=kept, start_new_session=True)  # Ray ends its group
    os._exit(1)


def test_an_actor_that_ray_restarts_breaks_its_groups_before_it_is_leased_again(actors):
    """Though the connection to its first process is still open. A plan of them would go to the second one."""
    (restarted, other), (third,) = actors(Worker, 2, max_restarts=1), actors(Worker, 1)
    old = col.declare_collective_group([restarted, other], group_name="old")
    refs = [one.get_buffer.remote() for one in (restarted, other)]
    col.allreduce_refs(refs, "old", timeout_s=PATIENT_S)
    pid = process_of(restarted)
    restarted.call.options(max_task_retries=0).remote(die_with_open_connections)
    assert wait_until(lambda: process_of(restarted) not in (0, pid))
    assert old.status(timeout_s=0).state == "alive", "else this shows nothing"
    new = col.declare_collective_group([restarted, third], group_name="new", timeout_s=PATIENT_S)
    assert old.status(timeout_s=0).state == "broken"
    with pytest.raises(errors.GroupBrokenError) as caught:
        col.allreduce_refs([one.get_buffer.remote() for one in (restarted, other)], "old", timeout_s=PATIENT_S)
    assert caught.value.group_name == "old"
    col.allreduce_refs([one.get_buffer.remote() for one in (restarted, third)], "new", timeout_s=PATIENT_S)
    new.destroy()
    old.rebuild(timeout_s=PATIENT_S)
    col.allreduce_refs([one.get_buffer.remote() for one in (restarted, other)], "old", timeout_s=PATIENT_S)


# ---------------------------------------------------------------------------------------------- retries


def dies_once(self, path):
    """Ends its process in the first attempt."""
    if not os.path.exists(path):  # noqa: PTH110 - it is pickled without this module's imports
        open(path, "w").close()  # noqa: PTH123
        os._exit(1)
    return np.full(4, 7.0)


def test_plan_waits_for_a_method_that_ray_retries_in_another_process(actors, tmp_path):
    first, second = actors(Worker, 2, max_restarts=1, max_task_retries=1)
    refs = [first.make.remote(dies_once, str(tmp_path / "died")), second.make.remote(lambda self: np.ones(4))]
    for expected in (8, 16):
        col.allreduce_refs(refs, timeout_s=PATIENT_S)
        for found in col.get(refs):
            np.testing.assert_array_equal(found, np.full(4, expected))


class Flaky(Buffers):
    """Its methods raise until they are asked for the third time."""

    asked = 0

    def flaky(self):
        self.asked += 1
        if self.asked < 3:
            raise ValueError(f"attempt {self.asked}")
        return np.full(4, self.asked * 1.0)

    @ray.method(max_task_retries=3, retry_exceptions=[ValueError])
    def declared(self):
        return self.flaky()

    @col.by_value
    def get_asked(self):
        return self.asked


class AsyncFlaky(Flaky):
    """The same, in a loop."""

    async def flaky(self):
        return super().flaky()


@pytest.mark.parametrize(("kind", "inplace"), [(Flaky, True), (AsyncFlaky, False)])
def test_plan_waits_for_a_method_that_ray_retries_after_an_exception(actors, gate, kind, inplace):
    """In program order: behind its last try, and before the methods that are called later."""
    (flaky,), (other,) = actors(ray.remote(kind), 1), actors(Worker, 1)
    col.declare_collective_group([flaky, other])
    blocked = block(other, gate)  # until the collective is in its queue: Ray may retry at once, or in a second
    refs = [
        flaky.flaky.options(max_task_retries=3, retry_exceptions=True).remote(),
        other.make.remote(lambda self: np.ones(4)),
    ]
    work = col.allreduce_refs(refs, inplace=inplace, async_op=True, timeout_s=PATIENT_S)
    asked = flaky.get_asked.remote()
    ray.get([gate.open.remote(), blocked])
    work.wait()
    np.testing.assert_array_equal(col.get(work.refs, PATIENT_S), np.full((2, 4), 4))
    assert ray.get(asked) == 3 or kind is AsyncFlaky
    col.allreduce_refs(refs, timeout_s=PATIENT_S)
    np.testing.assert_array_equal(col.get(refs), np.full((2, 4), 8 if inplace else 4))


def test_plan_of_a_derived_group_waits_for_a_method_whose_class_says_that_ray_retries_it(actors):
    flaky = actors(ray.remote(Flaky), 2)
    refs = [actor.declared.remote() for actor in flaky]
    col.allreduce_refs(refs, timeout_s=PATIENT_S)
    np.testing.assert_array_equal(col.get(refs), np.full((2, 4), 6))


@pytest.mark.parametrize(
    ("options", "inplace"),
    [({"max_task_retries": 1}, True), ({"max_task_retries": 3, "retry_exceptions": [KeyError]}, False)],
)
def test_plan_fails_with_the_last_try_and_the_next_one_runs(actors, options, inplace):
    (flaky,), (other,) = actors(ray.remote(Flaky), 1), actors(Worker, 1)
    col.declare_collective_group([flaky, other])
    good = [flaky.get_buffer.remote(), other.get_buffer.remote()]
    tried = 1 + ("retry_exceptions" not in options)
    bad = flaky.flaky.options(**{"retry_exceptions": True, **options}).remote()
    with pytest.raises(errors.ProducerFailedError, match=f"ValueError: attempt {tried}"):
        col.allreduce_refs([bad, good[1]], inplace=inplace, timeout_s=PATIENT_S)
    col.allreduce_refs(good, timeout_s=PATIENT_S)
    np.testing.assert_array_equal(ray.get(flaky.read.remote()), np.full(10, 2))
    assert ray.get(flaky.get_asked.remote()) == tried
