"""Without the cyclic garbage collector, on the driver and in participants: what has ended is freed at once."""

from __future__ import annotations

import asyncio
import gc
import weakref

import numpy as np
import pytest
import ray

import raycollect as col
from raycollect.driver.controller import Controller
from raycollect.errors import (
    BatchError,
    CaptureBrokenError,
    GroupBrokenError,
    MethodError,
    RaycollectError,
    RefusedError,
)
from raycollect.member.participant import Participant
from raycollect.member.runtime import this_runtime
from tests.support import cycles
from tests.support.actor_pool import reusable
from tests.support.waiting import wait_until

WAIT_S = 20.0


class Methods(col.CollectiveParticipant):
    """What the lives call."""

    def ones(self, n=3):
        return np.ones(n)

    def bump(self, array, by):
        array += by
        return array

    def fail(self):
        raise ValueError("a method of the user")

    @col.by_value
    def half(self):
        x = np.ones(3)
        col.allreduce(x, "g")


Worker = reusable(ray.remote(Methods))


# ---------------------------------------------------------------------------------------------- lives


def declared(workers):
    group = col.declare_collective_group(workers, group_name="g")
    refs = [one.ones.remote() for one in workers]
    col.allreduce_refs(refs, "g")
    made = col.allreduce_refs(refs, "g", inplace=False)
    ray.get([one.half.remote() for one in workers])
    col.get(made)
    repr(group), group._repr_html_(), group.statistics()
    group.destroy()
    cycles.fails(RaycollectError, group.destroy)


def derived(workers):
    refs = [one.ones.remote() for one in workers]
    col.allreduce_refs(refs)
    col.get(col.send_ref(refs[0], workers[1]))
    col.free(refs)
    cycles.fails(RefusedError, col.get, refs)


def refused(workers):
    group = col.declare_collective_group(workers, group_name="g")
    refs = [one.ones.remote(3 + at) for at, one in enumerate(workers)]
    for wrong in ([refs, "g"], [refs[:1], "g"], [[1, 2], "g"], [refs, "h"], [refs + refs, "g"]):
        cycles.fails(RaycollectError, col.allreduce_refs, *wrong)
    cycles.fails(RefusedError, col.allreduce_refs, [one.fail.remote() for one in workers], "g")
    cycles.fails(RaycollectError, col.declare_collective_group, workers, group_name="g")
    cycles.fails(RefusedError, col.plan, col.allreduce_refs, refs, "g")
    group.destroy()


def works(workers):
    group = col.declare_collective_group(workers, group_name="g")
    refs, others = ([one.ones.remote(3 + at * of) for at, one in enumerate(workers)] for of in (0, 1))

    async def wait():
        await col.allreduce_refs(refs, "g", async_op=True)
        try:
            await col.allreduce_refs(others, "g", async_op=True)
        except RefusedError:
            return

    col.allreduce_refs(refs, "g", async_op=True)  # nobody waits
    work = col.allreduce_refs(refs, "g", async_op=True)
    work.progress()
    work.wait(progress=True)
    for cancelled in (False, True):
        work = col.allreduce_refs(others, "g", async_op=True)
        if cancelled:
            work.cancel()
        for _ in range(2):
            cycles.fails(RaycollectError, work.wait)
        cycles.fails(RaycollectError, work.retry().wait)
        repr(work), work._repr_html_()
    asyncio.run(wait())
    with col.progress(after_s=0):
        col.allreduce_refs(refs, "g")
    group.destroy()


def batches(workers):
    group = col.declare_collective_group(workers, group_name="g")
    refs, others = ([one.ones.remote(3 + at * of) for at, one in enumerate(workers)] for of in (0, 1))
    with col.batch() as done:
        col.allreduce_refs(refs, "g")
        col.allreduce_refs(refs, "g", inplace=False)
    col.get(done.refs[1])
    for cancelled in (False, True):
        with col.batch(async_op=True) as failed:  # the one that is cancelled as well: it may have ended by then
            col.allreduce_refs(others, "g", inplace=False)
        if cancelled:
            failed.cancel()
        cycles.fails(RaycollectError, failed.wait)
    try:
        with col.batch() as never:
            col.allreduce_refs(refs, "g")
            raise ZeroDivisionError
    except ZeroDivisionError:
        cycles.fails(BatchError, lambda: never.refs)
    group.destroy()


def captured(workers):
    group = col.declare_collective_group(workers, group_name="g")
    refs = [one.ones.remote() for one in workers]
    with col.capture() as step:
        by = step.argument("by", 1.0)
        made = [step.call(one.bump, ref, by) for one, ref in zip(workers, refs, strict=True)]
        col.allreduce_refs(made, "g")
        step.returns([made[0], by])
    del made, by
    step.run()
    step.run(by=2.0)
    step.run(async_op=True).wait()
    step.explain()
    repr(step), step._repr_html_()
    step.close()
    with col.capture() as dropped:
        col.allreduce_refs(refs, "g")
    dropped.run()
    del dropped
    col.allreduce_refs(refs, "g")
    group.destroy()


def captures_that_fail(workers):
    group = col.declare_collective_group(workers, group_name="g")
    with col.capture() as step:
        step.call(workers[0].fail)
        step.call(workers[1].ones)
    run = step.run(async_op=True)
    for _ in range(2):
        cycles.fails(MethodError, run.wait)
    cycles.fails(CaptureBrokenError, step.run)
    step.close()
    another, failed = workers[1].ones.remote(), workers[0].fail.remote()
    mistakes = (
        lambda step: step.call(workers[0]),
        lambda step: step.call(workers[0].bump, another, 1),
        lambda step: step.call(workers[0].bump, workers[1].ones.remote(), 1),  # a call of the step, too
        lambda step: step.call(workers[0].bump, failed, 1),
        lambda step: None,
    )
    for mistake in mistakes:
        cycles.fails(RaycollectError, _capture, mistake)
    group.destroy()


def _capture(mistake):
    with col.capture() as step:
        mistake(step)


def recorded(workers):
    group = col.declare_collective_group(workers, group_name="g")
    with col.timeline() as timeline:
        col.allreduce_refs([one.ones.remote() for one in workers], "g")
        ray.get([one.half.remote() for one in workers])
    str(timeline.summary())
    group.destroy()


def fetched(workers):
    refs = [one.ones.remote(1 << 20) for one in workers]
    handles = ray.get(refs)
    repr(handles), handles[0]._repr_html_()
    arrays = col.get(refs)
    known = [weakref.ref(one) for one in arrays]
    del arrays
    assert all(one() is None for one in known)


LIVES = (declared, derived, refused, works, batches, captured, captures_that_fail, recorded, fetched)


# ---------------------------------------------------------------------------------------------- seeing them


def _begin(actor):
    cycles.begin()


def _end(actor):
    """What a participant leaves to the collector, once its lease has ended and the connection is closed."""
    here = this_runtime()._parts.get(Participant)
    if here is not None:
        assert wait_until(lambda: here._lease is None and len(here._server._loop.owned) <= 1)  # the server's own
    return cycles.end()


def _left_in(workers):
    found = ray.get([one.__ray_call__.remote(_end) for one in workers], timeout=WAIT_S)
    return [line for one in found for line in one]


def _ended():
    """The connections of the driver are closed."""
    hub = Controller.current().participants._hub
    assert wait_until(lambda: not hub._loop.owned)


def _live(life, workers):
    life(workers)
    groups = Controller.current().groups
    groups._ended += groups._derived.take(lambda _: True)  # which are kept for the next call
    groups._dissolve_ended()
    _ended()


@pytest.mark.parametrize("life", LIVES, ids=lambda one: one.__name__)
def test_nothing_is_left(actors, life):
    workers = actors(Worker, 2)
    ray.get([one.__ray_call__.remote(_begin) for one in workers])
    left = cycles.left(lambda: _live(life, workers))
    assert "\n".join([*left, *_left_in(workers)]) == ""


@pytest.mark.parametrize("is_rebuilt", [False, True])
def test_a_member_that_died_leaves_nothing(actors, is_rebuilt):
    workers = [*actors(Worker, 2), *actors(Worker, 1, name=f"dies-{is_rebuilt}")]
    ray.get([one.ones.remote() for one in workers])

    def life():
        group = col.declare_collective_group(workers, group_name="g")
        work = col.allreduce_refs([one.ones.remote() for one in workers], "g", async_op=True)
        before = Controller.current().plans.revision
        ray.kill(workers[2])
        try:
            work.wait()
        except RaycollectError:
            pass  # it was over before
        assert wait_until(lambda: Controller.current().plans.revision is not before)  # a plan may still be sent before
        cycles.fails(GroupBrokenError, col.barrier, "g")
        if is_rebuilt:
            group.rebuild()
            col.allreduce_refs([one.ones.remote() for one in group.actors], "g")
        group.destroy()
        del work  # the connections are open as long as somebody holds a value whose token was lent
        _ended()

    ray.get([one.__ray_call__.remote(_begin) for one in workers[:2]])
    left = cycles.left(life)
    assert "\n".join([*left, *_left_in(workers[:2])]) == ""


def test_nothing_holds_a_controller_that_has_ended(actors):
    """What it has lent to the actors of a group that was not destroyed held it, until another group was formed."""
    workers = actors(Worker, 2)
    col.declare_collective_group(workers, group_name="g")
    col.allreduce_refs([one.ones.remote() for one in workers], "g")
    controller = Controller.current()
    controller.close()
    Controller._current = None
    known = weakref.ref(controller)
    del controller
    gc.collect()
    assert known() is None


def test_destroyed_group_releases_its_actor_handles(tidy):
    """Ray ends them with their last handle: others wait for their CPUs."""
    workers = [Worker.options(num_cpus=0).remote() for _ in range(2)]
    known = [weakref.ref(one) for one in workers]
    cycles.begin()
    group = col.declare_collective_group(workers, group_name="g")
    ray.get([one.half.remote() for one in workers], timeout=WAIT_S)
    refs = [one.ones.remote() for one in workers]
    work = col.allreduce_refs(refs, "g", async_op=True)
    with col.capture() as step:
        col.allreduce_refs(refs, "g")
    step.run()
    step.close()
    work.wait()
    group.destroy()
    del workers, group
    assert all(one() is None for one in known), "though refs are left, and so the connections"
    assert "\n".join(cycles.end()) == ""
    assert (work.done(), repr(step)) == (True, repr(step))  # what is kept of them holds no actor
