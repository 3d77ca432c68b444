"""What one hears of a participant that is late: who it is, since which plan, in which method, and where (P4)."""

from __future__ import annotations

import numpy as np
import pytest
import ray

import raycollect as col
from raycollect import errors
from raycollect.driver import stall_report
from raycollect.group import watchdog
from tests.faults import inject
from tests.faults.groups import refs_of
from tests.support.actor_pool import reusable
from tests.support.actors import Buffers, Gate, Plain, Worker
from tests.support.waiting import stopped, wait_until


def inner(gate, begun):
    ray.get([begun.open.remote(), gate.wait.remote()])


def hold(self, gate, begun):
    """Takes until the gate opens, a call deep in the actor's own code."""
    inner(gate, begun)


@pytest.fixture
def gate(actors):
    """What holds up a method; and what tells that one is held up."""
    return actors(Gate, 2, max_concurrency=8)


@pytest.fixture
def held(gate):
    """Holds up an actor; returns the ref of its method, which has begun."""

    def start(worker):
        ref = worker.call.remote(hold, *gate)
        ray.get(gate[1].wait.remote())
        return ref

    return start


def assert_told(report, actor):
    """A report of a rank that `hold` holds up."""
    assert (report.rank, report.actor) == (1, actor)
    assert report.answers
    assert not report.has_begun
    assert "call (" in report.doing, "the method of the actor"
    assert any("test_stalls.py" in line and line.endswith("inner(gate, begun)") for line in report.stack)


@pytest.mark.parametrize("backend", ["shm", *(pytest.param(one, marks=pytest.mark.full) for one in ("tcp", "gloo"))])
def test_timeout_reports_the_activity_of_the_late_rank(actors, gate, held, backend):
    workers = actors(Worker, 3)
    group = col.declare_collective_group(workers, backend=backend)
    refs = refs_of(workers)
    col.allreduce_refs(refs)
    blocked = held(workers[1])
    with pytest.raises(errors.CollectiveTimeoutError) as caught:
        col.allreduce_refs(refs, timeout_s=6)
    error = caught.value
    assert error.missing == (1,)
    (report,) = error.reports
    assert_told(report, group.status(0).members[1].actor)
    assert report.ended in (1, 2)  # the second once it heard of the abort
    assert 0.5 <= report.awaited_s < 30, "from the first arrival on"
    assert report.step == ""
    assert any("plan 1" in line for line in report.story)
    assert str(report) in str(error)
    ray.get(gate[0].open.remote())
    ray.get(blocked)
    col.allreduce_refs(refs)
    np.testing.assert_array_equal(col.get(refs[1]), np.full(10, 9))


def test_long_wait_is_logged_and_the_status_is_live(actors, gate, held, monkeypatch, caplog):
    monkeypatch.setattr(stall_report, "QUIET_S", 0.2)
    workers = actors(Worker, 2)
    group = col.declare_collective_group(workers)
    refs = refs_of(workers)
    assert not any(member.doing for member in group.status().members)
    blocked = held(workers[1])
    work = col.allreduce_refs(refs, async_op=True)
    with pytest.raises(errors.CollectiveTimeoutError, match="goes on") as caught:
        work.wait(3)
    late = next(report for report in caught.value.reports if report.rank == 1)
    first, second = group.status().members
    assert_told(late, second.actor)
    assert caught.value.reports[0] is late, "whoever has not begun it comes first"
    assert first.plans == second.plans == (work._tracker.seq,)
    assert (first.steps, second.steps) == (("in the consistency check",), ("",))
    assert first.awaited_s == 0
    assert second.awaited_s > late.awaited_s > 0
    assert [report.step for report in caught.value.reports] == ["", "in the consistency check"]
    assert (second.answers, second.doing, second.stack) == (True, late.doing, late.stack)
    assert "call (" in repr(group.status())
    (record,) = [one for one in caplog.records if "still under way after 0.2 s" in one.getMessage()]
    assert str(late).splitlines()[0].partition("; awaited for ")[0] in record.getMessage()
    ray.get(gate[0].open.remote())
    ray.get(blocked)
    work.wait()
    np.testing.assert_array_equal(col.get(refs[0]), np.full(10, 2))


def test_a_process_that_is_stopped_gives_no_answer_and_is_not_taken_for_dead(actors):
    workers = actors(Worker, 2)
    group = col.declare_collective_group(workers)
    refs = refs_of(workers)
    pid = group.status(0).members[1].pid
    with stopped(pid):
        assert wait_until(lambda: [one.answers for one in group.status(timeout_s=0.3).members] == [True, False])
        with pytest.raises(errors.CollectiveTimeoutError) as caught:
            col.allreduce_refs(refs, timeout_s=1)
        assert [(one.rank, one.answers) for one in caught.value.reports] == [(1, False)]
        assert "gives no answer" in str(caught.value)
    assert group.status().state == "alive"
    col.allreduce_refs(refs)
    np.testing.assert_array_equal(col.get(refs[0]), np.full(10, 2))


def test_members_without_the_mixin_report_their_activity(actors, gate):
    workers = actors(Plain, 2)
    group = col.declare_collective_group(workers)
    blocked = workers[0].call.remote(hold, *gate)
    ray.get(gate[1].wait.remote())
    with pytest.raises(errors.CollectiveTimeoutError) as caught:
        col.barrier(timeout_s=1)
    assert [report.rank for report in caught.value.reports] == [0]
    assert any("inner(gate, begun)" in line for line in caught.value.reports[0].stack)
    assert group.status().members[0].doing
    ray.get(gate[0].open.remote())
    ray.get(blocked)
    col.barrier()


def test_timeout_ends_the_wait_for_a_rank_stuck_after_the_others(actors):
    """Under shm nobody waits for a rank that has brought all it has: the limit of the collective holds all the same."""
    workers = actors(Worker, 3)
    col.declare_collective_group(workers, backend="shm")
    refs = [worker.get_buffer.remote() for worker in workers]
    ray.get(workers[1].call.remote(inject.put, "end", "stall"))
    with pytest.raises(errors.CollectiveTimeoutError) as caught:
        col.allreduce_refs(refs, timeout_s=1)
    assert (caught.value.missing, caught.value.timeout_s) == ((1,), 1)
    (report,) = caught.value.reports
    assert report.rank == 1
    assert report.has_begun
    ray.kill(workers[1])  # which is held for a minute


@reusable
@ray.remote
class Stepping(Buffers):
    """Waits in a method of a captured step."""

    def keep(self, gate, begun):
        self.gates = gate, begun

    def pause(self):
        inner(*self.gates)


@pytest.mark.parametrize("held_by", ["batch", "method"])
def test_the_status_names_the_step_of_a_captured_run(actors, gate, held, held_by):
    workers = actors(Stepping, 2)
    group = col.declare_collective_group(workers)
    ray.get(workers[0].keep.remote(*gate))
    refs = refs_of(workers)
    with col.capture() as step:
        col.allreduce_refs(refs)
        if held_by == "method":
            step.call(workers[0].pause)
        col.allreduce_refs(refs)
    blocked = held(workers[1]) if held_by == "batch" else None
    run = step.run(async_op=True)
    if blocked is None:
        ray.get(gate[1].wait.remote())
    expected = ("calls 0, 1 of the step, batch, in the consistency check", "")  # the other is behind the method
    if held_by == "method":
        expected = ("call 1 of the step, method pause", "call 2 of the step, allreduce, in the consistency check")
    late = 0 if held_by == "method" else 1

    def is_told():
        members = group.status().members
        return [one.steps for one in members] == [(one,) for one in expected] and members[late].awaited_s > 0

    assert wait_until(is_told), group.status()
    assert group.status().members[1 - late].awaited_s == 0
    assert bool(group.status().members[1].doing) == (held_by == "batch")
    if held_by == "method":
        assert "(call 1 of the step, method pause)" in repr(group.status())
    ray.get(gate[0].open.remote())
    run.wait()
    if blocked is not None:
        ray.get(blocked)


def late(self):
    """Sums up where somebody does not come; gives the error."""
    before, watchdog.LATE_ANSWER_S = watchdog.LATE_ANSWER_S, 20  # what is told is looked at, not how fast
    try:
        col.allreduce(self.buffer, timeout_s=0.3)
    except errors.CollectiveTimeoutError as exc:
        return exc
    finally:
        watchdog.LATE_ANSWER_S = before


def test_error_of_a_member_call_reports_the_activity_of_the_late_rank(actors, gate, held):
    workers = actors(Worker, 2)
    group = col.declare_collective_group(workers)
    name = group.status(0).members[1].actor
    error = ray.get(workers[0].call.remote(late))
    (report,) = error.reports
    assert (report.rank, report.actor, report.answers, report.has_begun) == (1, name, True, False)
    assert (report.doing, report.stack) == ("", ()), "it is in no method, and its threads wait"
    assert f"rank 1 ({name}) has not begun it, and is in no method; awaited for " in str(error)
    blocked = held(workers[1])
    error = ray.get(workers[0].call.remote(late))
    assert error.missing == (1,)
    (report,) = error.reports
    assert_told(report, name)
    assert 0.3 <= report.awaited_s < 30
    assert str(report) in str(error)
    ray.get(gate[0].open.remote())
    ray.get(blocked)
    ray.get([worker.call.remote(lambda self: col.allreduce(self.buffer)) for worker in workers])
