"""A flight of many requests: participants go by positions, errors by the ranks of the user's groups."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from raycollect.channel.messages import Abort, Arrivals, Arrive
from raycollect.core.model import GroupSpec, OpKind, ReduceOp
from raycollect.driver.dispatch import RequestKey, prepare
from raycollect.driver.plan_tracker import PlanTracker
from raycollect.errors import (
    CollectiveTimeoutError,
    DispatchError,
    GroupBrokenError,
    KernelError,
    ParticipantDiedError,
    PlanAbortedError,
    ProtocolError,
    RefusedError,
    Violation,
    refusal,
)
from raycollect.group.membership import membership_of
from raycollect.planner import Made, Membership, plan
from tests.pure.driver.tracked_plans import key_of, member_of, refs_of
from tests.support.values import replace

SEQ = 40


def group(name: str, numbers: Sequence[int], *, machines: str = "", backend: str = "tcp") -> Membership:
    """A group of actors by their numbers, each on the machine of its letter."""
    spec = GroupSpec(name=name, group_id=f"id of {name}", backend=backend, world_size=len(numbers))
    places = machines or "m" * len(numbers)
    members = tuple(
        replace(member_of(number), rank=rank, machine=place, node_id=place)
        for rank, (number, place) in enumerate(zip(numbers, places, strict=True))
    )
    return membership_of(spec, members)


def asked(membership: Membership, sources: Sequence[Any], **changes: Any) -> RequestKey:
    """An allreduce."""
    operands = tuple((rank, source, None) for rank, source in enumerate(sources))
    one = RequestKey(membership, OpKind.ALLREDUCE, operands, ReduceOp.SUM, -1, -1, True, 60.0)
    return one._replace(**changes)


def flying(*calls: RequestKey, refs: int = 10) -> PlanTracker:
    groups = [one.group for one in calls]
    planned = plan([one.request() for one in calls], groups)
    return PlanTracker(SEQ, planned, groups, refs_of(refs))


@pytest.fixture
def chain() -> PlanTracker:
    """Actors 5, 6, 7 in the group "left", then 7, 8 in "right": no group has all."""
    left, right = group("left", (5, 6, 7)), group("right", (8, 7))
    return flying(asked(left, (0, 1, 2)), asked(right, (4, 3)))


def position(tracker: PlanTracker, number: int) -> int:
    return tracker.plan.positions[f"{number:032x}"]


def test_all_participants_are_waited_for(chain: PlanTracker) -> None:
    assert len(chain.plan.participants) == 4
    assert chain.plan.agreement is None
    assert chain.group_name == "left, right"
    for number in (8, 5, 7):
        assert chain.done(position(chain, number), None, []) == []
    assert chain.is_pending(position(chain, 6))
    assert not chain.resolved
    chain.done(position(chain, 6), None, [])
    assert chain.has_ended
    assert chain.error is None


def test_batch_numbers_cover_all_its_launches(chain: PlanTracker) -> None:
    assert chain.plan.width > 1
    found = [SEQ + at in chain.launches for at in (-1, 0, chain.plan.width - 1, chain.plan.width)]
    assert found == [False, True, True, False]


def test_a_lost_participant_is_a_rank_of_its_first_request(chain: PlanTracker) -> None:
    orders = chain.lost(position(chain, 8), "killed")
    assert {at for at, _ in orders} == {position(chain, number) for number in (5, 6, 7)}
    assert all(type(message) is Abort and message.seq == SEQ and "Worker(8)" in message.reason for _, message in orders)
    error = chain.error
    assert isinstance(error, ParticipantDiedError)
    assert (error.op, error.group_name, error.rank, error.actor) == ("batch", "right", 0, "Worker(8)")


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


def test_controller_error_names_all_groups(chain: PlanTracker) -> None:
    chain.fail(PlanAbortedError(detail="cancelled by its caller"))
    assert isinstance(chain.error, PlanAbortedError)
    assert (chain.error.op, chain.error.group_name, chain.error.rank) == ("batch", "left, right", -1)


def test_unsent_ranks_of_a_batch_get_no_abort(chain: PlanTracker) -> None:
    orders = chain.fail(DispatchError(rank=0, actor="Worker(8)"), unsent=range(2, 4))
    assert [at for at, _ in orders] == [0, 1]


def test_violations_name_the_ref_and_actor_of_their_call(chain: PlanTracker) -> None:
    wrong = [
        Violation(kind="mismatch", rank=rank, field="shape", found="x", call=call)
        for call, rank in ((0, 2), (1, 0), (1, 1))
    ]
    for at in range(4):
        assert chain.done(at, refusal("batch", "", tuple(wrong)), []) == []
    assert isinstance(chain.error, RefusedError)
    assert [one.actor for one in chain.error.violations] == ["Worker(7)", "Worker(8)", "Worker(7)"]
    assert [one.ref for one in chain.error.violations] == [key_of(place).hex() for place in (2, 4, 3)]
    assert (chain.error.op, chain.error.group_name) == ("batch", "left, right")


def test_a_call_number_out_of_range_is_left_alone(chain: PlanTracker) -> None:
    odd = Violation(kind="mismatch", rank=0, field="shape", found="x", call=7)
    chain.done(0, refusal("batch", "", (odd,)), [])
    assert isinstance(chain.error, RefusedError)
    assert chain.error.violations == (odd,)


def test_the_first_use_of_a_ref_is_found(chain: PlanTracker) -> None:
    assert [chain.location.first_use(key_of(place)) for place in (1, 3, 4)] == [(0, 1), (1, 1), (1, 0)]
    left = group("left", (5, 6))
    assert flying(asked(left, (0, 1))).location.first_use(key_of(1)) == (-1, 1)


def test_batch_knows_the_refs_it_writes() -> None:
    left = group("left", (5, 6))
    read = asked(left, (0, 1), inplace=False)
    tracker = flying(read, asked(left, (Made(0), Made(0))), asked(left, (2, 1)))
    assert [tracker.writes.get(key_of(place)) for place in range(4)] == [False, True, True, None]


def test_the_time_limit_of_a_batch_is_the_longest_of_its_calls() -> None:
    left = group("left", (5, 6))
    for limits in ((2.0, 60.0), (60.0, 2.0), (0.5, 0.25)):
        calls = [asked(left, (at, at + 1), timeout_s=limit) for at, limit in enumerate(limits)]
        planned = flying(*calls).plan
        assert {planned.timeout_s, *(planned.program(at).timeout_s for at in range(2))} == {max(limits)}


# ---------------------------------------------------------------------------------------------- echoes


def echo(rank: int) -> PlanAbortedError:
    return PlanAbortedError(group_name="left", rank=rank, detail=f"the connection to rank {1 - rank} broke")


def test_a_link_that_breaks_between_two_that_live_ends_the_wait_of_all_others(chain: PlanTracker) -> None:
    """Actors 5 and 6 see their connection break; 8 waits for 7 in a launch that will not be opened."""
    orders = chain.done(position(chain, 5), echo(0), ["a story"])
    assert sorted(at for at, _ in orders) == sorted(position(chain, number) for number in (6, 7, 8))
    assert all(type(message) is Abort and "PlanAbortedError on Worker(5)" in message.reason for _, message in orders)
    assert not chain.resolved
    for number, rank in ((6, 1), (7, 2)):
        assert chain.done(position(chain, number), echo(rank), []) == [], "all are told once"
        assert not chain.resolved
    assert chain.done(position(chain, 8), PlanAbortedError(detail="the plan was aborted"), []) == []
    assert chain.has_ended
    assert isinstance(chain.error, PlanAbortedError)
    assert (chain.error.rank, chain.error.detail) == (0, "the connection to rank 1 broke")
    assert (chain.error.group_name, chain.error.story) == ("left", ("a story",))


@pytest.mark.parametrize("order", list(itertools.permutations((5, 6, 7))))
def test_cause_reported_after_echoes_is_the_outcome(chain: PlanTracker, order: Sequence[int]) -> None:
    cause = KernelError(detail="the cause", group_name="id of left", rank=1)
    told = []
    for number in order:
        told += chain.done(position(chain, number), cause if number == 6 else echo(0), [])
        assert chain.resolved == (6 in order[: order.index(number) + 1])
    chain.done(position(chain, 8), PlanAbortedError(detail="the plan was aborted"), [])
    assert chain.error is cause
    assert len({at for at, _ in told}) == len(told) == 3


def test_a_process_that_ended_is_the_cause_of_echoes(chain: PlanTracker) -> None:
    assert len(chain.done(position(chain, 5), echo(0), [])) == 3
    assert chain.lost(position(chain, 6), "killed") == []
    assert isinstance(chain.error, ParticipantDiedError)


def test_completion_after_an_echo_is_no_success(chain: PlanTracker) -> None:
    for number in (7, 5, 6, 8):
        chain.done(position(chain, number), echo(0) if number == 5 else None, [])
    assert isinstance(chain.error, PlanAbortedError)
    assert chain.error.rank == 0


# ---------------------------------------------------------------------------------------------- checks


def test_the_check_of_a_plan_without_a_group_of_all(chain: PlanTracker) -> None:
    everybody = [0, 1, 2, 3]

    def come(at: int, rank: int) -> list[tuple[int, Any]]:
        blob = bytes([rank])
        return chain.arrive(at, Arrive(group_id="", seq=SEQ, round=0, ranks=everybody, rank=rank, blob=blob))

    for at in (3, 0, 2):
        assert come(at, at) == []
    orders = come(1, 1)
    answer = Arrivals(group_id="", seq=SEQ, round=0, blobs=[bytes([at]) for at in everybody], more=False)
    assert orders == [(at, answer) for at in everybody]


def test_checks_of_several_launches_and_groups_stand_beside_each_other(chain: PlanTracker) -> None:
    def come(number: int, name: str, rank: int, ranks: list[int], seq: int) -> list[int]:
        message = Arrive(group_id=f"id of {name}", seq=seq, round=0, ranks=ranks, rank=rank, blob=b"")
        return [at for at, _ in chain.arrive(position(chain, number), message)]

    assert come(5, "left", 0, [0, 1, 2], SEQ + 1) == []
    assert come(7, "right", 1, [0, 1], SEQ + 2) == []
    assert come(6, "left", 1, [0, 1, 2], SEQ + 1) == []
    assert come(8, "right", 0, [0, 1], SEQ + 2) == [position(chain, 8), position(chain, 7)]
    assert come(7, "left", 2, [0, 1, 2], SEQ + 1) == [position(chain, number) for number in (5, 6, 7)]


def test_a_launch_of_its_own_has_one_round_and_the_checks_as_many_as_are_planned() -> None:
    left, right = group("left", (5, 6, 7)), group("right", (8, 7))
    gathering = asked(left, (0, 1, 2), kind=OpKind.ALLGATHER, op=None)
    tracker = flying(gathering, asked(right, (4, 3)))
    assert tracker.plan.rounds == 2
    common = Arrive(group_id="", seq=SEQ, round=0, ranks=[0, 1, 2, 3], rank=1, blob=b"")
    own = replace(common, group_id="id of left", seq=SEQ + 1, ranks=[0, 1, 2])
    for at_check, rounds in ((common, 2), (own, 1)):
        for turn in (-1, rounds, rounds + 5):
            with pytest.raises(ProtocolError, match="no round"):
                tracker.arrive(1, replace(at_check, round=turn))
        for turn in range(rounds):
            assert tracker.arrive(1, replace(at_check, round=turn)) == []
    with pytest.raises(ProtocolError, match="no round"):
        tracker.arrive(1, replace(own, seq=SEQ + tracker.plan.width))


def test_a_timeout_at_the_check_of_all_names_actors(chain: PlanTracker) -> None:
    for at in (0, 2):
        chain.arrive(at, Arrive(group_id="", seq=SEQ, round=0, ranks=[0, 1, 2, 3], rank=at, blob=b""))
    chain.done(0, CollectiveTimeoutError(timeout_s=2.0), [])
    assert isinstance(chain.error, CollectiveTimeoutError)
    missing = [number for number in (5, 6, 7, 8) if position(chain, number) in (1, 3)]
    for number in (5, 6, 7, 8):
        assert (f"Worker({number})" in chain.error.detail) == (number in missing)


# ---------------------------------------------------------------------------------------------- groups inside groups


@pytest.fixture
def nodes() -> PlanTracker:
    """Five actors on machines a, b, a, c, a."""
    whole = group("whole", (5, 6, 7, 8, 9), machines="abaca")
    return flying(asked(whole, range(5)), asked(whole, range(5, 10)))


def test_only_the_group_that_an_error_names_is_broken(chain: PlanTracker) -> None:
    for name, blamed in (("id of right", ["right"]), ("left", ["left"]), ("unknown", ["left", "right"])):
        found = chain.location.blamed(GroupBrokenError(group_name=name))
        assert [one.spec.name for one in found] == blamed


# ---------------------------------------------------------------------------------------------- remembered plans


def test_plans_are_remembered_by_form_and_not_by_refs() -> None:
    left = group("left", (1, 2, 3))
    calls = tuple(asked(left, (3 * at, 3 * at + 1, 3 * at + 2), inplace=bool(at % 2)) for at in range(5))
    first = prepare(calls, 1 << 20)
    assert prepare(tuple(call._replace() for call in calls), 1 << 20) is first
    assert prepare(calls, 0) is not first
    assert first.plan.staging == 1 << 20
    assert first.outputs == ((0, 2, 4),) * 3
    assert [sorted(places) for places in first.sources] == [[at, at + 3, at + 6, at + 9, at + 12] for at in range(3)]
    assert len(set(first.programs)) == 3
    other = group("left", (1, 2, 3))
    assert prepare(tuple(call._replace(group=other) for call in calls), 1 << 20) is not first, "another group"


def test_violations_of_all_calls_are_one_error() -> None:
    left = group("left", (1, 2, 3))
    fine = asked(left, (0, 1, 2))
    bad = asked(left, (0, 1, None))
    with pytest.raises(RefusedError) as caught:
        prepare((fine, bad, fine._replace(kind=OpKind.REDUCE, root=5), fine), 0)
    assert caught.value.op == "batch"
    assert sorted({violation.call for violation in caught.value.violations}) == [1, 2]
    with pytest.raises(RefusedError) as alone:
        prepare((bad,), 0)
    assert alone.value.op == "allreduce"
    assert [violation.call for violation in alone.value.violations] == [-1]
