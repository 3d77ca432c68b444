"""Captured steps that can't be recorded, or whose runs fail: a typed error, no hang, and others go on."""

from __future__ import annotations

import os
import pickle

import numpy as np
import pytest
import ray

import raycollect as col
from raycollect import errors
from raycollect.driver.controller import Controller
from tests.faults import inject
from tests.ray.batching import found, hold, nothing_sent, spread
from tests.ray.capturing import Learner, captured_here
from tests.ray.workers import Plain, Worker, wait_until


@pytest.fixture
def trio(actors):
    """Three actors in a declared group, and in one of the first two."""
    workers = [actors(Learner, 1, seed)[0] for seed in range(3)]
    col.declare_collective_group(workers)
    col.declare_collective_group(workers[:2], group_name="pair")
    return workers


@pytest.fixture
def pipe(tmp_path):
    """A named pipe; the function ends the stalls of all who read it, now or later, or so many of them."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    fd = os.open(path, os.O_RDWR)  # with both ends here no open waits
    yield str(path), lambda count=100: os.write(fd, bytes(count))
    os.close(fd)


def is_broken(step, match="one of its runs failed", **arguments):
    """Later runs are refused, with the reason."""
    with pytest.raises(errors.CaptureBrokenError, match=match):
        step.run(**arguments)
    assert "broken by" in repr(step)
    return True


def works_on(workers):
    """A captured step of these actors' groups runs."""
    refs = spread(workers, lambda rank: [rank + 1])
    with col.capture() as step:
        col.allreduce_refs(refs)
        step.returns([step.call(worker, "steady") for worker in workers])
    total = sum(range(1, len(workers) + 1))
    assert [one.tolist() for one in step.run()] == [[1]] * len(workers)
    assert found(refs) == [[total]] * len(workers)
    step.close()
    return True


def all_landed():
    """Whether nobody runs anything any more, or soon will not."""
    trackers = Controller.current().trackers
    landed = wait_until(lambda: not trackers())
    assert landed, [(tracker.seq, tracker._pending, tracker.error) for tracker in trackers()]
    return True


# ---------------------------------------------------------------------------------------------- runs that fail


@pytest.mark.parametrize("carrier", ["doorbell", "channel"])
def test_a_method_that_raises_breaks_the_step_and_nothing_else(trio, request, pipe, carrier):
    if carrier == "channel":
        request.getfixturevalue("by_channel")
    path, let_go = pipe
    refs = spread(trio, lambda rank: [1])
    with col.capture() as step:
        col.allreduce_refs(refs)
        step.call(trio[1], "stall", path)
        made = [
            step.call(trio[1], "fail_at", 3),
            *(step.call(trio[at], "echo", np.zeros(2, np.float32)) for at in (0, 2)),
        ]
        col.allreduce_refs(made)
    let_go(2)
    step.run()
    step.run()
    behind = [step.run(async_op=True) for _ in range(4)]
    let_go()  # not before all have begun: once the first has failed, others are refused
    with pytest.raises(errors.MethodError, match="call 3 of them") as caught:
        behind[0].wait()
    error = caught.value
    assert (error.op, error.call, error.raised, error.rank) == ("fail_at", 2, "ValueError", 1)
    assert error.actor.startswith("Learning(")
    assert "fail_at" in error.trace
    for work in behind[1:]:
        with pytest.raises(errors.PlanAbortedError, match="failed before"):
            work.wait()
    assert is_broken(step, "MethodError")
    assert all_landed()
    assert col.get(refs[1])[0] == 27, "what came before the method is done on its actor"
    step.close()
    assert works_on(trio)


def test_a_shape_that_changes_is_refused_at_the_door(trio):
    with col.capture() as step:
        made = [step.call(trio[0], "grow"), step.call(trio[1], "steady"), step.call(trio[2], "steady")]
        col.allreduce_refs(made)
        step.call(trio[2], "note")
    step.run()
    with pytest.raises(errors.MismatchError, match=r"\[2\]") as caught:
        step.run()
    assert {violation.rank for violation in caught.value.violations} <= {0, 1, 2}
    assert is_broken(step, "MismatchError")
    assert all_landed()
    assert len(ray.get(trio[2].noted.remote())) == 1, "what came after it was not done"
    assert works_on(trio)


def test_refusal_reaches_participants_of_other_plans(trio):
    """The third actor waits in a plan that will not come: it was not at the door that refused."""
    with col.capture() as step:
        col.allreduce_refs([step.call(trio[0], "grow"), step.call(trio[1], "steady")], "pair")
        col.allreduce_refs([step.call(worker, "steady") for worker in trio])
    step.run()
    with pytest.raises(errors.MismatchError) as caught:
        step.run()
    assert caught.value.group_name.startswith(("pair", "default"))
    assert all_landed(), "before any time limit"
    assert works_on(trio)


def test_a_method_that_gives_no_tensor_is_refused_at_the_door(trio):
    with col.capture() as step:
        col.allreduce_refs([step.call(worker, "loss") for worker in trio])
    with pytest.raises(errors.NotATensorError):
        step.run()
    assert is_broken(step)
    assert works_on(trio)


@pytest.mark.parametrize("carrier", ["doorbell", "channel"])
def test_a_participant_that_dies_in_a_run(trio, request, pipe, carrier):
    if carrier == "channel":
        request.getfixturevalue("by_channel")
    path, let_go = pipe
    with col.capture() as step:
        step.call(trio[2], "stall", path)
        step.call(trio[2], "die")
        col.allreduce_refs([step.call(worker, "steady") for worker in trio])
    works = [step.run(async_op=True) for _ in range(2)]
    let_go()  # not before both have begun: once it is dead, runs are refused
    with pytest.raises(errors.ParticipantDiedError, match="Learning") as caught:
        works[0].wait()
    assert caught.value.rank == 2
    with pytest.raises(errors.PlanAbortedError):
        works[1].wait()
    with pytest.raises((errors.CaptureBrokenError, errors.GroupBrokenError)):
        step.run()
    assert all_landed()
    refs = spread(trio[:2])
    col.allreduce_refs(refs, "pair")
    assert found(refs) == [[1]] * 2


def test_a_participant_that_dies_between_runs(trio, submits):
    refs = spread(trio[:2])
    with col.capture() as step:
        col.allreduce_refs([step.call(worker, "steady") for worker in trio])
    with col.capture() as other:
        col.allreduce_refs(refs, "pair")
    step.run()
    before = Controller.current().revision
    ray.kill(trio[2])
    assert wait_until(lambda: Controller.current().revision is not before)  # before that a run may still be sent
    with nothing_sent(submits), pytest.raises(errors.GroupBrokenError, match="died"):
        step.run()
    other.run()
    assert found(refs) == [[1]] * 2
    step.close()
    other.run()


def test_a_destroyed_group_is_refused_before_anything_is_sent(trio, submits):
    refs = spread(trio[:2])
    with col.capture() as step:
        col.allreduce_refs(refs, "pair")
    step.run()
    col.destroy_collective_group("pair")
    for _ in range(2):
        with nothing_sent(submits), pytest.raises(errors.UnknownGroupError, match="destroyed"):
            step.run()
    step.close()
    assert works_on(trio)


@pytest.mark.parametrize("carrier", ["doorbell", "channel"])
def test_a_participant_that_stalls_is_named(trio, request, pipe, carrier):
    """Where others wait for it at a door, they tell; where nobody does, the run's own limit ends it."""
    if carrier == "channel":
        request.getfixturevalue("by_channel")
    path, let_go = pipe
    with col.capture() as step:
        step.call(trio[1], "stall", path)
        col.allreduce_refs([step.call(worker, "steady") for worker in trio], timeout_s=3)  # in which the others come
    with col.capture() as lone:
        lone.call(trio[1], "stall", path)
    with pytest.raises(errors.CollectiveTimeoutError, match="Learning") as caught:
        step.run()
    assert caught.value.missing == (1,)
    assert is_broken(step, "Timeout")
    with pytest.raises(errors.CollectiveTimeoutError, match="Learning") as caught:
        lone.run(timeout_s=0.3)
    assert caught.value.timeout_s == 0.3
    assert is_broken(lone, "Timeout")
    lone.close()
    let_go()
    assert all_landed()
    assert works_on(trio)


def test_cancel_and_waits_that_end(trio, pipe):
    path, let_go = pipe
    refs = spread(trio, lambda rank: [1])
    with col.capture() as step:
        step.call(trio[0], "stall", path)
        col.allreduce_refs(refs)
    works = [step.run(async_op=True) for _ in range(3)]
    with pytest.raises(errors.CollectiveTimeoutError, match="goes on"):
        works[0].wait(0.05)
    assert not works[0].done()
    assert "under way" in repr(works[0])
    assert works[0].cancel()
    assert not works[0].cancel()
    for work in works:
        with pytest.raises(errors.PlanAbortedError):
            work.wait()
    assert is_broken(step, "cancelled")
    (first,) = (one for one in Controller.current().trackers() if one.seq == works[0]._tracker.seq)
    assert wait_until(lambda: not any(map(first.is_pending, (1, 2)))), "they have left the door"
    let_go()
    assert all_landed()
    assert found(refs) == [[1]] * 3
    assert works_on(trio)


def test_close_aborts_the_runs_under_way(trio, pipe):
    path, let_go = pipe
    refs = spread(trio, lambda rank: [1])
    with col.capture() as step:
        step.call(trio[0], "stall", path)
        col.allreduce_refs(refs)
    works = [step.run(async_op=True) for _ in range(3)]
    step.close()
    for work in works:
        assert work.done()
        with pytest.raises(errors.PlanAbortedError, match="closed"):
            work.wait()
    let_go()
    assert all_landed()
    col.allreduce_refs(refs)
    assert found(refs) == [[3]] * 3, "plans after it do not wait for runs that never come"
    assert wait_until(lambda: ray.get([worker.call.remote(captured_here) for worker in trio]) == [0] * 3)


@pytest.mark.parametrize("point", ["before_door", "before_kernel"])
def test_a_fault_of_a_kernel(trio, point):
    refs = spread(trio, lambda rank: [1])
    ray.get(trio[1].call.remote(inject.put, point, "raise"))
    with col.capture() as step:
        col.allreduce_refs(refs)
        step.call(trio[0], "note")
    with pytest.raises(errors.KernelError, match="injected") as caught:
        step.run()
    assert caught.value.rank in (-1, 1)
    assert ray.get(trio[1].call.remote(inject.was_consumed))
    assert is_broken(step, "KernelError")
    assert all_landed()
    if point == "before_door":
        assert ray.get(trio[0].noted.remote()) == []


def test_unawaited_failure_is_logged(trio, caplog):
    with col.capture() as step:
        step.call(trio[0], "fail_at", 1)
    step.run(async_op=True)
    assert wait_until(lambda: "nobody waited for it" in caplog.text)
    assert "ValueError" in caplog.text
    assert is_broken(step)


# ---------------------------------------------------------------------------------------------- blocks that fail


def refused(kind, match, record):
    """A block is refused, and holds no group."""
    with pytest.raises(kind, match=match) as caught, col.capture() as step:
        record(step)
    assert not Controller.current().groups.in_use
    with pytest.raises(errors.CaptureError, match="can't run"):
        step.run()
    return caught.value


def test_refused_arguments(trio, submits):
    own = hold(trio[0], [1])
    ray.get(own)

    def wrong(*args, actor=trio[0], method="note", **kwargs):
        return lambda step: step.call(actor, method, *args, **kwargs)

    with nothing_sent(submits):
        refused(errors.InvalidArgumentError, "pass a ref", wrong({1, 2}))
        refused(errors.InvalidArgumentError, "other", wrong(1, other=[object()]))
        refused(errors.InvalidArgumentError, "handle of a participant", wrong(actor="a"))
        refused(errors.InvalidArgumentError, "its name", wrong(method=3))
        refused(errors.InvalidArgumentError, "'nothing', which Learning.* lacks.*steady", wrong(method="nothing"))
        refused(errors.NotAMemberError, "send_ref it first", wrong(own, actor=trio[1]))
        refused(
            errors.NotAMemberError,
            "send_ref it first",
            lambda step: step.call(trio[1], "note", step.call(trio[0], "loss")),
        )
        refused(errors.RefusedError, "argument 0", wrong([own]))


def test_refused_names_of_arguments(trio):
    for name in ("fence", "async_op", "timeout_s", "not a name", 3, None):
        refused(errors.InvalidArgumentError, "name", lambda step, name=name: step.argument(name))
    refused(errors.InvalidArgumentError, "declared once", lambda step: (step.argument("a"), step.argument("a")))
    refused(errors.InvalidArgumentError, "before the run", lambda step: step.argument("a", default=object()))
    with col.capture() as step:
        rate = step.argument("rate")
        step.call(trio[0], "note", rate)
    for given, match in (
        ({}, "missing"),
        ({"rate": 1, "other": 2}, "one of rate"),
        ({"rate": {1}}, "type set.*before the run"),
    ):
        with pytest.raises(errors.InvalidArgumentError, match=match):
            step.run(**given)
    with pytest.raises(errors.InvalidArgumentError, match=r"rate 1\d{6}\).*at most"):
        step.run(rate=np.zeros(1 << 20, np.uint8))
    step.run(rate=2)
    assert ray.get(trio[0].noted.remote()) == [((2,), {})], "no refused run was begun"


def test_results_that_are_too_long(trio):
    with col.capture() as step:
        step.returns([step.call(trio[0], "note"), step.call(trio[1], "grow_to", step.argument("size"))])
    assert step.run(size=10)[1].shape == (10,)
    with pytest.raises(errors.CaptureError, match="let methods return refs instead"):
        step.run(size=1 << 20)
    assert is_broken(step, size=1)
    assert works_on(trio)


def test_refused_returns(trio):
    ref = hold(trio[0], [1])
    refused(errors.InvalidArgumentError, "type set", lambda step: step.returns([step.call(trio[0], "loss"), {1}]))
    refused(
        errors.InvalidArgumentError,
        r"the value\['a'\]\[0\] is used by no call of the step, .*read it with raycollect.get\(ref\)",
        lambda step: (step.call(trio[0], "loss"), step.returns({"a": (ref,)})),
    )
    refused(errors.CaptureError, "before", lambda step: (step.returns([]), step.returns([])))
    refused(errors.CaptureError, "nothing was recorded", lambda step: None)


def test_refused_calls_of_verbs(trio):
    refs = spread(trio)
    refused(errors.InvalidArgumentError, "the whole of it", lambda step: col.allreduce_refs(refs, async_op=True))
    refused(errors.MissingMemberError, "rank 2", lambda step: col.allreduce_refs(refs[:2]))
    error = refused(
        errors.InvalidArgumentError,
        "src_rank is 7",
        lambda step: (col.allreduce_refs(refs), step.call(trio[0], "loss"), col.broadcast_refs(refs, 7)),
    )
    assert [violation.call for violation in error.violations] == [2], "among verbs and methods"
    assert "call 2 of the step" in str(error)
    with pytest.raises(errors.ForeignRefError, match="ClassMethodNode"), col.batch():
        col.allreduce_refs([worker.gradient.bind() for worker in trio])


def test_actors_that_can_not_take_part(actors, trio):
    plain, dead = actors(Plain, 1)[0], actors(Worker, 1)[0]
    ray.get(dead.read.remote())
    ray.kill(dead)
    refused(errors.NotAParticipantError, "Plain", lambda step: step.call(plain, "get_buffer"))
    refused(errors.ActorGoneError, "dead", lambda step: step.call(dead, "get_buffer"))
    assert works_on(trio)


def test_refs_of_failed_methods_are_refused(trio):
    def fail(self):
        raise ValueError("no tensor today")

    bad = trio[0].make.remote(fail)
    error = refused(errors.ProducerFailedError, "no tensor today", lambda step: step.call(trio[0], "note", bad))
    assert error.violations[0].ref == bad.hex()
    refused(errors.ProducerFailedError, "no tensor today", lambda step: step.call(trio[1], "note", bad))
    freed = hold(trio[0], [1])
    col.free(freed)
    refused(errors.TensorFreedError, "freed", lambda step: step.call(trio[0], "note", freed))
    assert wait_until(lambda: ray.get([worker.call.remote(captured_here) for worker in trio]) == [0] * 3)
    assert works_on(trio)


def test_a_participant_that_is_not_ready_in_time(trio, pipe):
    ref, (path, let_go) = hold(trio[0], [1]), pipe
    ray.get(ref)
    blocked = trio[1].stall.remote(path)
    with pytest.raises(errors.CollectiveTimeoutError, match="Learning") as caught, col.capture(timeout_s=5) as step:
        step.call(trio[0], "note", ref)
        col.barrier("pair")
        step.call(trio[1], "note")
    assert caught.value.missing == (1,)
    let_go()
    ray.get(blocked)
    assert wait_until(lambda: ray.get([worker.call.remote(captured_here) for worker in trio]) == [0] * 3)
    assert works_on(trio)


# ---------------------------------------------------------------------------------------------- misuse


def test_placeholders_outside_of_their_block(trio):
    refs = spread(trio)
    with col.capture() as step:
        rate = step.argument("rate", 1)
        made = col.allreduce_refs(refs, inplace=False)
        loss = step.call(trio[0], "note", made[0], rate)
        for use in (
            lambda: made[0].ref,
            lambda: col.get(made[0]),
            lambda: col.free(loss),
            lambda: col.plan(col.barrier) and loss.ref,
        ):
            with pytest.raises(errors.CaptureError, match="only while it runs"):
                use()
    for use in (
        lambda: made[0].ref,
        lambda: col.get(made),
        lambda: col.free(loss),
        lambda: col.allreduce_refs(made),
        lambda: pickle.loads(pickle.dumps(loss)),
        lambda: pickle.loads(pickle.dumps(rate)),
    ):
        with pytest.raises(errors.CaptureError, match="only while it runs"):
            use()
    with pytest.raises(errors.CaptureError, match="only while it runs"), col.capture() as other:
        other.call(trio[0], "note", made[0])
    with pytest.raises(errors.CaptureError, match="another one"), col.capture() as other:
        other.call(trio[0], "note", rate)
    with pytest.raises(errors.CaptureError, match="only while it runs"), col.batch():
        col.broadcast_refs(made)
    step.run()


def test_blocks_in_blocks(trio, submits):
    refs = spread(trio)
    with col.capture() as step:
        col.allreduce_refs(refs)
        for use in (step.run, lambda: col.capture().__enter__(), step.__enter__):
            with pytest.raises(errors.CaptureError):
                use()
    with col.batch():
        with pytest.raises(errors.CaptureError, match="inside a batch"):
            step.run()
        with pytest.raises(errors.CaptureError, match="inside a batch"), col.capture():
            pass
    for use in (lambda: step.call(trio[0], "loss"), lambda: step.argument("a"), lambda: step.returns([])):
        with pytest.raises(errors.CaptureError, match="belongs into the block"):
            use()
    with pytest.raises(errors.CaptureError, match="not entered"):
        col.capture().run()
    with nothing_sent(submits), pytest.raises(ZeroDivisionError), col.capture() as failed:
        col.allreduce_refs(refs)
        raise ZeroDivisionError
    with pytest.raises(errors.CaptureError, match="block failed"):
        failed.run()
    assert "block failed" in repr(failed)
    failed.close()
    for wrong in ({"staging_nbytes": 3}, {"timeout_s": -1}):
        with pytest.raises(errors.InvalidArgumentError):
            col.capture(**wrong)
    step.run()
    assert found(refs) == [[3]] * 3
