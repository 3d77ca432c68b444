"""A plan under way: events in, messages out; whatever happens, it ends with the first cause."""

from __future__ import annotations

import gc
import random
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest

from raycollect.channel.messages import Arrive
from raycollect.core.model import OpKind, task_key
from raycollect.driver.dispatch import prepare
from raycollect.driver.plan_tracker import PlanTracker
from raycollect.driver.work import Work
from raycollect.errors import (
    CollectiveTimeoutError,
    DispatchError,
    GroupBrokenError,
    KernelError,
    MismatchError,
    ParticipantDiedError,
    PlanAbortedError,
    ProtocolError,
    RaycollectError,
    RefusedError,
    TensorFreedError,
    Violation,
    refusal,
)
from raycollect.planner import Made, Request
from tests.pure.driver.tracked_plans import (
    SEQ,
    asked,
    flying,
    group,
    key_of,
    refs_of,
    tracked,
    tracking,
    who_aborted,
)
from tests.support.values import replace

WAIT_S = 20.0
MISMATCH = Violation(kind="mismatch", rank=1, field="shape", found="[3]", expected="[4]")


@pytest.fixture
def chain() -> PlanTracker:
    """Actors 5, 6, 7 in the group "left", then 7, 8 in "right": no group has all, and there are several launches."""
    left, right = group("left", (5, 6, 7)), group("right", (8, 7))
    return flying(asked(left, (0, 1, 2)), asked(right, (4, 3)))


def position(tracker: PlanTracker, number: int) -> int:
    return tracker.plan.positions[f"{number:032x}"]


# ---------------------------------------------------------------------------------------------- events


@pytest.mark.parametrize("is_chain", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_any_sequence_of_events_ends_with_the_first_cause(chain: PlanTracker, seed: int, is_chain: bool) -> None:
    """Whoever still runs it is told to abort, once. An abort that another failure led to is an echo, and no cause."""
    rng = random.Random(seed)
    world = 4 if is_chain else rng.randint(1, 6)
    tracker = chain if is_chain else tracked(world)
    running, told = set(range(world)), set[int]()
    first: RaycollectError | None = None
    cause: RaycollectError | None = None
    seen: list[Any] = []
    tracker.when_resolved(lambda: seen.append((tracker.resolved, tracker.error)))
    while running:
        at, event = rng.randrange(world), rng.choice(["done"] * 4 + ["some", "fail", "echo", "lost", "cancel"])
        if at not in running and event not in ("done", "lost"):  # the last is heard, and nothing of it counts
            continue
        was_resolved, error = tracker.resolved, None
        if event == "cancel":
            error = PlanAbortedError(detail="cancelled")
            orders = tracker.fail(error)
        elif event == "lost":
            orders, error = tracker.lost(at, "killed"), ParticipantDiedError() if at in running else None
            running.discard(at)
        else:
            error = {"fail": KernelError(detail="x"), "echo": PlanAbortedError(detail="an echo")}.get(event)
            others = rng.sample(range(world), rng.randint(0, world)) if event == "some" else ()
            orders = tracker.done(at, error, [], others=others)
            running -= {at, *others}
        first = first or (error if event in ("fail", "echo") else None)
        if not was_resolved and event in ("fail", "lost", "cancel"):
            cause = cause or error
        if not was_resolved and not running:
            cause = cause or (error if event == "echo" and not is_chain else first)
        aborts = not told and error is not None and (event != "echo" or is_chain or was_resolved)
        assert set(who_aborted(orders)) == (running if aborts else set())
        told |= set(who_aborted(orders))
        assert [tracker.is_pending(one) for one in range(world)] == [one in running for one in range(world)]
        assert tracker.has_ended == (not running)
        assert tracker.resolved == tracker.wait(0) == (cause is not None or not running)
        assert type(tracker.error) is type(cause)
        if isinstance(cause, (KernelError, PlanAbortedError)):
            assert tracker.error is cause
    assert seen == [(True, tracker.error)], "watchers are called once, with the outcome known"


@pytest.mark.parametrize("ends", ["", "it is cancelled", "an echo comes"])
def test_all_take_their_results_once_all_have_them_and_no_abort_has_come(ends: str) -> None:
    tracker = flying(
        asked(group("left", (5, 6, 7)), (0, 1, 2), snapshot=True), asked(group("right", (8, 7)), (4, 3), snapshot=True)
    )
    at_check = Arrive(group_id="", seq=SEQ, round=0, ranks=[0, 1, 2, 3], rank=0, blob=b"")
    for turn, blob in ((0, b"an arrival"), (1, b"")):
        for rank in range(3):
            assert tracker.arrive(rank, replace(at_check, round=turn, rank=rank, blob=blob)) == []
        if turn == 0:
            assert [at for at, _ in tracker.arrive(3, replace(at_check, rank=3, blob=blob))] == [0, 1, 2, 3]
            assert not tracker.is_committed
    for wrong in ({"round": 1 << 20}, {"seq": SEQ + tracker.plan.width}, {"ranks": [3, 2, 1, 0]}, {"rank": 1}):
        with pytest.raises(ProtocolError):
            tracker.arrive(3, replace(at_check, **{"round": 1, "rank": 3, **wrong}))
    if ends == "it is cancelled":
        tracker.fail(PlanAbortedError(detail="cancelled"))
    elif ends:
        tracker.done(0, PlanAbortedError(detail="rank 1 has left"), [])
    answers = tracker.arrive(3, replace(at_check, round=1, rank=3))
    assert [at for at, _ in answers] == ([] if ends else [0, 1, 2, 3])
    assert tracker.is_committed is not bool(ends)
    asked_for = [(at, message.reason) for at, message in tracker.fail(KernelError(detail="late"))]
    assert asked_for == ([] if ends else [(at, "") for at in range(4)]), "nobody waits for others any more"


def test_after_a_commit_and_a_death_the_refs_are_held_until_those_that_live_have_told_their_ends() -> None:
    """The last to end well tells it for all: here there is none."""
    tracker = flying(asked(group("team", (5, 6, 7)), (0, 1, 2), snapshot=True), refs=3)
    for rank in range(3):
        tracker.arrive(rank, Arrive(group_id="", seq=SEQ, round=0, ranks=[0, 1, 2], rank=rank, blob=b""))
    assert tracker.is_committed
    asked_for = tracker.lost(2, "killed")
    assert [(at, message.reason) for at, message in asked_for] == [(0, ""), (1, "")]
    assert tracker.fail(KernelError(detail="its group was destroyed")) == [], "they are asked once"
    for rank in range(2):
        assert len(tracker.refs) == 3
        assert tracker.done(rank, None, []) == []
    assert tracker.has_ended
    assert not tracker.refs
    assert isinstance(tracker.error, ParticipantDiedError)


def test_the_controllers_own_failures_abort_whoever_got_it() -> None:
    """As when a rank waits for a value that Ray knows will not come: the ranks don't know."""
    tracker = tracked(3)
    assert who_aborted(tracker.fail(refusal("allreduce", "", (MISMATCH,)))) == [0, 1, 2]
    assert isinstance(tracker.error, MismatchError)
    tracker, error = tracked(4), DispatchError(rank=2, detail="the queue is full")
    assert who_aborted(tracker.fail(error, unsent=(2, 3))) == [0, 1]
    assert tracker.error is error
    assert (error.rank, error.actor) == (2, "Worker(2)")
    assert [tracker.is_pending(rank) for rank in range(4)] == [True, True, False, False]
    tracker = tracked(2)
    assert tracker.fail(DispatchError(detail="x"), unsent=(0, 1)) == []
    assert tracker.has_ended


def test_watchers_may_ask_and_watch_again_and_are_called_at_once_after_the_end() -> None:
    tracker = tracked(1)
    seen: list[str] = []
    tracker.when_resolved(lambda: tracker.when_resolved(lambda: seen.append("inner")))
    tracker.done(0, None, [])
    assert seen == ["inner"], "no lock is held while watchers run"


@pytest.mark.parametrize("seed", range(10))
def test_events_from_many_threads_resolve_it_once_and_wake_all_who_wait(seed: int) -> None:
    tracker, rng = tracked(8), random.Random(seed)
    errors: list[RaycollectError | None] = [rng.choice([None, KernelError(detail=str(r))]) for r in range(8)]
    barrier, calls = threading.Barrier(11), []
    tracker.when_resolved(lambda: calls.append(tracker.error))

    def end(rank: int) -> None:
        barrier.wait(WAIT_S)
        tracker.done(rank, errors[rank], [])

    def wait() -> bool:
        barrier.wait(WAIT_S)
        return tracker.wait(WAIT_S)

    with ThreadPoolExecutor(11) as threads:
        waiting = [threads.submit(wait) for _ in range(3)]
        for future in [threads.submit(end, rank) for rank in range(8)]:
            future.result(WAIT_S)
        assert all(one.result(WAIT_S) for one in waiting)
    assert tracker.has_ended
    assert calls == [tracker.error]
    assert (tracker.error is None) == all(error is None for error in errors)


# ---------------------------------------------------------------------------------------------- who is named


def test_a_failure_names_the_rank_its_actor_and_what_it_told() -> None:
    tracker = tracked(4)
    orders = tracker.done(1, KernelError(detail="it broke"), ["1.0 start", "2.0 failed"])
    assert "KernelError" in orders[0][1].reason
    assert "rank 1" in orders[0][1].reason
    error = tracker.error
    assert isinstance(error, KernelError)
    assert (error.op, error.group_name, error.rank, error.actor) == ("allreduce", "ring", 1, "Worker(1)")
    assert (error.detail, error.story) == ("it broke", ("1.0 start", "2.0 failed"))
    tracker = tracked(3)
    tracker.done(0, KernelError(detail="x", rank=2, actor="Theirs(2)", story=("its own",)), ["mine"])
    assert isinstance(tracker.error, KernelError)
    assert (tracker.error.rank, tracker.error.actor, tracker.error.story) == (2, "Theirs(2)", ("its own",))
    tracker, broken = tracked(2), GroupBrokenError(group_name="0123", detail="this participant left the group")
    assert who_aborted(tracker.done(0, broken, [])) == [1]
    assert tracker.error is broken, "it is of no kind that names ranks"


def test_a_lost_participant_is_a_rank_of_its_first_request(chain: PlanTracker) -> None:
    orders = chain.lost(position(chain, 8), "reset by peer")
    assert {at for at, _ in orders} == {position(chain, number) for number in (5, 6, 7)}
    assert all("Worker(8)" in message.reason for _, message in orders)
    error = chain.error
    assert isinstance(error, ParticipantDiedError)
    assert (error.op, error.group_name, error.rank, error.actor) == ("batch", "right", 0, "Worker(8)")
    assert "under way (reset by peer)" in error.detail


@pytest.mark.parametrize(
    ("error", "number", "expected"),
    [
        (KernelError(detail="x", op="allreduce", rank=1, group_name="id of right"), 7, ("right", 1, "Worker(7)")),
        (KernelError(detail="x", group_name="id of left"), 7, ("left", 2, "Worker(7)")),
        (KernelError(detail="x", group_name="right"), 8, ("right", 0, "Worker(8)")),
        (KernelError(detail="x"), 6, ("left", 1, "Worker(6)")),
    ],
)
def test_an_error_is_located_in_the_group_that_it_names(
    chain: PlanTracker, error: KernelError, number: int, expected: tuple[str, int, str]
) -> None:
    op = error.op or "batch"
    chain.done(position(chain, number), error, ["a story"])
    assert chain.error is error
    assert (error.group_name, error.rank, error.actor) == expected
    assert (error.op, error.story) == (op, ("a story",))


def test_a_batch_names_all_its_groups_and_blames_the_one_that_an_error_names(chain: PlanTracker) -> None:
    assert chain.plan.agreement is None
    assert chain.group_name == "left, right"
    assert chain.plan.width > 1
    found = [SEQ + at in chain.launches for at in (-1, 0, chain.plan.width - 1, chain.plan.width)]
    assert found == [False, True, True, False]
    for name, blamed in (("id of right", ["right"]), ("left", ["left"]), ("unknown", ["left", "right"])):
        assert [one.spec.name for one in chain.location.blamed(GroupBrokenError(group_name=name))] == blamed
    assert [chain.location.first_use(key_of(place)) for place in (1, 3, 4)] == [(0, 1), (1, 1), (1, 0)]
    chain.fail(PlanAbortedError(detail="cancelled by its caller"))
    assert isinstance(chain.error, PlanAbortedError)
    assert (chain.error.op, chain.error.group_name, chain.error.rank) == ("batch", "left, right", -1)


def test_a_refusal_gets_the_groups_name_the_actor_and_the_ref_and_keeps_its_class() -> None:
    tracker = tracked(3)
    known = Violation(kind="mismatch", rank=2, field="dtype", found="x", actor="Mine(1)", ref="abcd")
    nobody = Violation(kind="mismatch", rank=-1, field="op", found="y")
    tracker.done(0, refusal("allreduce", "", (MISMATCH, known, nobody)), [])
    assert isinstance(tracker.error, MismatchError)
    assert (tracker.error.op, tracker.error.group_name) == ("allreduce", "ring")
    first, second, third = tracker.error.violations
    assert first == replace(MISMATCH, actor="Worker(1)", ref=key_of(1).hex())
    assert second == known, "what the rank itself knew stays"
    assert (third.actor, third.ref) == ("", "")
    for kinds, cls in ((("freed",), TensorFreedError), (("freed", "dirty"), RefusedError)):
        tracker = tracked(2)
        wrong = tuple(Violation(kind=kind, rank=0, field="operand", found="x") for kind in kinds)
        tracker.done(0, refusal("allreduce", "", wrong), [])
        assert type(tracker.error) is cls


@pytest.mark.parametrize(
    ("rank", "field", "side"),
    [
        (0, "shape", 0),
        (0, "dtype of input 1", 0),
        (1, "dtype of output 0", 1),
        (1, "shape of output", 1),
        (1, "op", 0),
        (2, "shape of output 1", 1),
        (2, "shape", 1),
    ],
)
def test_a_violation_gets_the_ref_of_the_end_that_it_is_about(rank: int, field: str, side: int) -> None:
    keys = [(task_key(bytes([r, 0]) * 12, 1), task_key(bytes([r, 1]) * 12, 1)) for r in range(3)]
    membership = group("ring", range(3))
    places = [(2 * r, 2 * r + 1) for r in range(3)]
    request = Request(kind=OpKind.ALLGATHER, group=membership.spec, operands=tuple((r, *places[r]) for r in range(3)))
    if rank == 2:
        operands = ((0, *places[0]), *((r, None, places[r][1]) for r in (1, 2)))
        request = replace(request, kind=OpKind.SCATTER, root=0, operands=operands)
    tracker = tracking(request, membership, dict.fromkeys(key for pair in keys for key in pair))
    tracker.done(rank, refusal("x", "", (Violation(kind="mismatch", rank=rank, field=field, found="x"),)), [])
    assert isinstance(tracker.error, RefusedError)
    assert tracker.error.violations[0].ref == keys[rank][side].hex()


def test_violations_name_the_ref_and_actor_of_their_call(chain: PlanTracker) -> None:
    odd = Violation(kind="mismatch", rank=0, field="shape", found="x", call=7)
    wrong = [replace(odd, rank=rank, call=call) for call, rank in ((0, 2), (1, 0), (1, 1))]
    for at in range(4):
        assert chain.done(at, refusal("batch", "", (*wrong, odd)), []) == []
    assert isinstance(chain.error, RefusedError)
    assert [one.actor for one in chain.error.violations] == ["Worker(7)", "Worker(8)", "Worker(7)", ""]
    assert [one.ref for one in chain.error.violations] == [*(key_of(place).hex() for place in (2, 4, 3)), ""]
    assert (chain.error.op, chain.error.group_name) == ("batch", "left, right")


def test_a_rank_without_operand_has_no_ref() -> None:
    membership = group("ring", range(2))
    request = Request(kind=OpKind.BARRIER, group=membership.spec, operands=((0, None, None), (1, None, None)))
    tracker = tracking(request, membership, {})
    tracker.done(0, refusal("barrier", "", (MISMATCH,)), [])
    assert isinstance(tracker.error, RefusedError)
    assert tracker.error.violations[0].ref == ""


# ---------------------------------------------------------------------------------------------- agreements


def _learning(world: int) -> PlanTracker:
    """An allgather whose outputs are made: the ranks meet twice in its consistency check."""
    membership = group("ring", range(world))
    operands = tuple((rank, rank, None) for rank in range(world))
    request = Request(kind=OpKind.ALLGATHER, group=membership.spec, operands=operands)
    tracker = tracking(request, membership, refs_of(world))
    assert tracker.plan.rounds == 2
    return tracker


def _come(tracker: PlanTracker, rank: int, turn: int, blob: bytes = b"") -> list[tuple[int, Any]]:
    """One of a group comes to the consistency check of all who take part in the plan's first request."""
    ranks = [one for one, *_ in tracker.plan.requests[0].operands]
    message = Arrive(group_id="id of ring", seq=SEQ, round=turn, ranks=ranks, rank=rank, blob=blob)
    return tracker.arrive(tracker.plan.positions.get(f"{rank:032x}", -1), message)


def test_a_rank_at_the_check_twice_or_a_stranger_breaks_the_protocol() -> None:
    tracker = tracked(6, ranks=(5, 2))
    assert _come(tracker, 5, 0, b"five") == []
    for rank in (5, 3):
        with pytest.raises(ProtocolError):
            _come(tracker, rank, 0)
    at_check = Arrive(group_id="id of ring", seq=SEQ, round=0, ranks=[2, 5], rank=2, blob=b"two")
    for wrong in (
        {"rank": 5},  # it is rank 2
        {"ranks": []},
        {"ranks": [2, 3]},  # rank 3 has no part
        {"ranks": [2, 9]},
        {"group_id": "of another plan"},
        {"group_id": "", "ranks": [0, 1], "rank": 1},  # it is at position 0
        {"ranks": [3, 5]},
        {"ranks": [5, 2]},
        {"ranks": [2, 2, 5]},
        {"round": 1 << 20},
        {"round": -1},
        {"seq": SEQ + 1},
        {"seq": SEQ - 1},
    ):
        with pytest.raises(ProtocolError):
            tracker.arrive(0, replace(at_check, **wrong))
    with pytest.raises(ProtocolError):
        tracked(6, ranks=(5, 2)).arrive(0, replace(at_check, rank=5))  # who has not come itself
    orders = tracker.arrive(0, at_check)
    assert [(at, message.blobs) for at, message in orders] == [(0, [b"two", b"five"]), (1, [b"two", b"five"])]


def test_a_timeout_names_who_is_missing_from_the_latest_agreement(chain: PlanTracker) -> None:
    tracker = tracked(4)
    error = CollectiveTimeoutError(missing=(1, 3, 4, -1), timeout_s=2.5)
    assert who_aborted(tracker.done(0, error, [])) == [1, 2, 3]
    assert isinstance(tracker.error, CollectiveTimeoutError)
    assert tracker.error.missing == (1, 3), "there is no other"
    for part in ("2.5 s", "rank 1 (Worker(1))", "rank 3 (Worker(3))"):
        assert part in str(tracker.error)
    assert "Worker(2)" not in str(tracker.error)

    tracker = tracked(4)
    tracker.fail(CollectiveTimeoutError(missing=(1,), timeout_s=2.5))
    assert "rank 1 (Worker(1))" in str(tracker.error), "also where the controller says so"

    for came, missing in (([(0, 0), (2, 0)], (1,)), ([(0, 0), (1, 0), (2, 0), (2, 1)], (0, 1)), ([], ())):
        tracker = _learning(3)
        for rank, turn in came:
            _come(tracker, rank, turn)
        tracker.done(2, CollectiveTimeoutError(timeout_s=1.0), [])
        assert isinstance(tracker.error, CollectiveTimeoutError)
        assert tracker.error.missing == missing

    for at in (0, 2):
        chain.arrive(at, Arrive(group_id="", seq=SEQ, round=0, ranks=[0, 1, 2, 3], rank=at, blob=b""))
    chain.done(0, CollectiveTimeoutError(timeout_s=2.0), [])
    assert isinstance(chain.error, CollectiveTimeoutError)
    for number in (5, 6, 7, 8):
        assert (f"Worker({number})" in chain.error.detail) == (position(chain, number) in (1, 3))


# ---------------------------------------------------------------------------------------------- refs


class _Ref:
    """An operand ref, of which can be told whether it lives."""


def _watched(world: int) -> tuple[PlanTracker, list[weakref.ref[_Ref]]]:
    """An allreduce that alone holds its refs."""
    refs = {key_of(rank): _Ref() for rank in range(world)}
    weak = [weakref.ref(one) for one in refs.values()]
    return tracked(world, refs=refs), weak


def _alive(refs: list[weakref.ref[_Ref]]) -> list[int]:
    gc.collect()
    return [rank for rank, ref in enumerate(refs) if ref() is not None]


@pytest.mark.parametrize("world", [1, 3, 4])
@pytest.mark.parametrize("first", [None, KernelError(detail="x"), PlanAbortedError(detail="an echo"), "lost"])
def test_refs_live_as_long_as_anyone_runs_it(world: int, first: RaycollectError | str | None) -> None:
    tracker, refs = _watched(world)
    for rank in range(world):
        assert _alive(refs) == list(range(world))
        if first == "lost":
            tracker.lost(rank, "killed")
        else:
            tracker.done(rank, None if rank or isinstance(first, str) else first, [])
    assert tracker.has_ended
    assert _alive(refs) == []
    assert [tracker.location.first_use(key_of(rank)) for rank in range(world)] == [(-1, rank) for rank in range(world)]
    assert tracker.writes[key_of(0)] is True
    tracker, refs = _watched(world)
    tracker.fail(DispatchError(detail="x"), unsent=range(world))
    assert _alive(refs) == []


def test_refs_of_lost_operands_are_kept_until_explained() -> None:
    tracker, refs = _watched(4)
    wrong = [Violation(kind=kind, rank=rank, field="operand", found="x") for kind, rank in (("lost", 2), ("dirty", 1))]
    for rank in range(4):
        tracker.done(rank, refusal("allreduce", "", tuple(wrong)), [])
    assert _alive(refs) == [2]
    assert list(tracker.refs) == [key_of(2)]
    explained = refusal("allreduce", "", (replace(wrong[0], kind="producer_failed", ref=key_of(2).hex()),))
    tracker.explain(explained)
    assert tracker.error is explained
    assert _alive(refs) == []
    tracker, refs = _watched(2)
    tracker.done(0, refusal("allreduce", "", (replace(wrong[0], rank=0),)), [])
    tracker.explain(explained)
    assert _alive(refs) == [0, 1], "rank 1 still runs it"
    tracker.done(1, explained, [])
    assert _alive(refs) == []


def test_a_batch_knows_the_refs_it_writes() -> None:
    left = group("left", (5, 6))
    read = asked(left, (0, 1), inplace=False)
    tracker = flying(read, asked(left, (Made(0), Made(0))), asked(left, (2, 1)))
    assert [tracker.writes.get(key_of(place)) for place in range(4)] == [False, True, True, None]


# ---------------------------------------------------------------------------------------------- nobody waits


@pytest.mark.parametrize("first", ["failure", "abandon"])
@pytest.mark.parametrize("is_dropped", [False, True])
def test_an_abandoned_failure_is_logged_once(first: str, is_dropped: bool, caplog: pytest.LogCaptureFixture) -> None:
    tracker = tracked(2)
    steps: list[Callable[[], object]] = [
        (lambda: Work(cast(Any, None), tracker, None)) if is_dropped else tracker.abandon,
        lambda: tracker.fail(KernelError(detail="it broke")),
    ]
    for step in steps if first == "abandon" else reversed(steps):
        step()
    (line,) = [record.getMessage() for record in caplog.records if record.name == "raycollect"]
    assert "allreduce failed, and nobody waited for it" in line
    assert "it broke" in line


def test_an_abandoned_success_or_cancellation_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    well, cancelled = tracked(1), tracked(2)
    well.done(0, None, ())
    cancelled.fail(PlanAbortedError(detail="cancelled by its caller"))
    for tracker in (well, cancelled):
        tracker.abandon()
    assert not [record for record in caplog.records if record.name == "raycollect"]


# ---------------------------------------------------------------------------------------------- remembered plans


def test_plans_are_remembered_by_form_and_not_by_refs() -> None:
    left = group("left", (1, 2, 3))
    calls = tuple(asked(left, (3 * at, 3 * at + 1, 3 * at + 2), inplace=bool(at % 2)) for at in range(5))
    first = prepare(calls, 1 << 20, ())
    assert prepare(tuple(call._replace() for call in calls), 1 << 20, ()) is first
    assert prepare(calls, 0, ()) is not first
    assert first.plan.staging == 1 << 20
    assert first.outputs == ((0, 2, 4),) * 3
    assert [sorted(places) for places in first.sources] == [[at, at + 3, at + 6, at + 9, at + 12] for at in range(3)]
    assert len(set(first.programs)) == 3
    other = group("left", (1, 2, 3))
    assert prepare(tuple(call._replace(group=other) for call in calls), 1 << 20, ()) is not first, "another group"


def test_violations_of_all_calls_are_one_error() -> None:
    left = group("left", (1, 2, 3))
    fine, bad = asked(left, (0, 1, 2)), asked(left, (0, 1, None))
    for calls, op, wrong in (
        ((fine, bad, fine._replace(kind=OpKind.REDUCE, root=5), fine), "batch", [1, 2]),
        ((bad,), "allreduce", [-1]),
    ):
        with pytest.raises(RefusedError) as caught:
            prepare(calls, 0, [key_of(at) for at in range(3)])
        assert caught.value.op == op
        assert sorted({violation.call for violation in caught.value.violations}) == wrong
