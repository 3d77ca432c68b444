"""The planner: what each operation becomes, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raycollect.core.model import OpKind, ReduceOp
from raycollect.errors import DuplicateActorError, RefusedError
from raycollect.planner import Request, Role, plan, plan_part
from raycollect.planner.template import Buffer
from raycollect.planner.verify import _run
from tests.pure.planner.requests import allreduce, barrier, broadcast, given_by, key_of, ring, send
from tests.support.values import replace

OPERAND = Buffer(role=Role.OPERAND)
LEARNED = Buffer(role=Role.LEARNED)


# ---------------------------------------------------------------------------------------------- what becomes of it


def test_the_plan_of_one_call_runs_in_the_checks_launch() -> None:
    """The consistency check is the group's own, and there is nothing but its launch."""
    for request in (allreduce(5), broadcast(3, 1), barrier(4), send(6, 4, 2)):
        whole = plan([request])
        assert (whole.width, whole.alone, whole.everyone) == (1, (0,), ())
        for position, rank in enumerate(plan_part(request).ranks):
            program = whole.program(position)
            (task,), (bundle,) = program.tasks, program.bundles
            assert (task.share, task.request, task.round, task.alone) == (0, 0, 0, 0)
            assert (bundle.tasks, bundle.base) == ((0,), (0,))
            assert (program.agreement.group_id, program.agreement.rank) == ("0123", rank)
            assert program.agreement.ranks == plan_part(request).ranks


def test_a_program_for_a_learned_output_has_no_key() -> None:
    whole = plan([send(4, 3, 1, given=False)])
    assert whole.participants == ("1", "3")
    assert [whole.sources(position) for position in range(2)] == [(), (key_of(3),)]
    taker, giver = whole.program(0), whole.program(1)
    assert (taker.keys, giver.keys) == (0, 1)
    assert taker.rounds == 2
    assert giver.rounds == 2, "all ranks meet as often as the one that learns"


# ---------------------------------------------------------------------------------------------- what is refused


def _violations(request: Request) -> set[tuple[str, int, str]]:
    with pytest.raises(RefusedError) as caught:
        plan_part(request)
    assert caught.value.op == request.kind.value
    assert caught.value.group_name == "ring"
    return {(v.kind, v.rank, v.field) for v in caught.value.violations}


def test_a_rank_given_twice_is_named_once() -> None:
    request = allreduce(3, operands=given_by((0, 1, 1, 1, 2)))
    assert _violations(request) == {("duplicate", 1, "operand")}
    with pytest.raises(DuplicateActorError):
        plan_part(request)


@pytest.mark.parametrize("peer", [-1, 3])
def test_a_destination_outside_the_group_is_no_argument(peer: int) -> None:
    request = send(3, 1, peer, operands=given_by((1,)))
    assert _violations(request) == {("argument", -1, "destination rank")}


def test_sending_to_oneself_is_no_argument() -> None:
    request = send(3, 1, 1, operands=given_by((1,)))
    assert _violations(request) == {("argument", -1, "destination rank")}


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("nan"), float("-inf")])
@pytest.mark.parametrize("make", [allreduce, broadcast, barrier])
def test_a_timeout_is_a_positive_number(make: Any, timeout_s: float) -> None:
    assert _violations(make(2, timeout_s=timeout_s)) == {("argument", -1, "timeout_s")}


def test_only_the_destination_of_a_send_may_ask_for_an_output() -> None:
    for rank in range(3):
        operands = tuple((r, None if r == rank else key_of(r), None) for r in range(3))
        assert _violations(allreduce(3, operands=operands)) == {("missing", rank, "operand")}
        rooted = tuple((r, None, None) if r == rank else one for r, one in enumerate(broadcast(3).operands))
        assert _violations(broadcast(3, operands=rooted)) == {("missing", rank, "operand")}
    assert _violations(send(2, 0, 1, operands=((0, None, None), (1, None, key_of(1))))) == {("missing", 0, "operand")}


def test_a_receive_alone_is_no_request() -> None:
    assert ("argument", -1, "op") in _violations(allreduce(2, kind=OpKind.RECV))


def test_all_violations_come_in_one_error() -> None:
    request = broadcast(4, 9, operands=given_by((0, 2, 2, 8)), timeout_s=-1)
    expected = {
        ("missing", 1, "operand"),
        ("missing", 3, "operand"),
        ("not_member", 8, "rank"),
        ("duplicate", 2, "operand"),
        ("argument", -1, "src_rank"),
        ("argument", -1, "timeout_s"),
    }
    assert _violations(request) == expected
    with pytest.raises(RefusedError) as caught:
        plan_part(request)
    assert type(caught.value) is RefusedError, "violations of several kinds have no leaf in common"
    for part in ("rank 1", "rank 3", "rank 8", "rank 2", "src_rank is 9", "timeout_s is -1"):
        assert part in str(caught.value)


def test_a_group_has_at_least_one_rank() -> None:
    with pytest.raises(ValueError, match="at least one rank"):
        ring(0)


# ---------------------------------------------------------------------------------------------- properties


_WILD_RANKS = st.integers(-2, 6)
_WILD_KEYS = st.sampled_from([None, key_of(0), key_of(1), key_of(2)])


def _wild_operands(ranks: Any) -> st.SearchStrategy[Any]:
    chosen = sorted(ranks)
    keys = st.tuples(*[st.tuples(_WILD_KEYS, _WILD_KEYS)] * len(chosen))
    return keys.map(lambda pairs: tuple((rank, *pair) for rank, pair in zip(chosen, pairs, strict=True)))


_WILD = st.builds(
    Request,
    kind=st.sampled_from(OpKind),
    group=st.integers(1, 4).map(ring),
    operands=st.integers(1, 4).flatmap(lambda world: _wild_operands(range(world)))
    | st.lists(_WILD_RANKS, max_size=6).flatmap(_wild_operands),
    op=st.none() | st.sampled_from(ReduceOp),
    root=_WILD_RANKS,
    peer=_WILD_RANKS,
    inplace=st.booleans(),
    timeout_s=st.sampled_from([60.0, 1e-3, 0.0, -1.0, float("nan")]),
)


@given(_WILD)
def test_any_request_is_planned_or_refused_with_a_reason(request: Request) -> None:
    made, refused = None, None
    try:
        made = plan_part(request)
    except RefusedError as exc:
        refused = exc
    if made is None:
        assert refused is not None
        assert refused.violations
        assert str(refused)
    else:
        whole = plan([request])
        for position in range(len(made.ranks)):
            program = whole.program(position)
            buffers = program.shares[0].template.buffers
            assert len(program.tasks[0].inputs) == sum(b.role is Role.OPERAND for b in buffers)


# ---------------------------------------------------------------------------------------------- cost


def test_a_form_is_planned_and_verified_once_and_remembered() -> None:
    first = plan_part(allreduce(64))
    before = _run.cache_info()
    for salt in range(1, 50):
        again = plan_part(allreduce(64, operands=given_by(range(64), salt), timeout_s=float(salt)))
        assert again is first, "whatever its tensors"
    assert _run.cache_info() == before
    other = replace(ring(64), group_id="4567")
    assert plan_part(allreduce(64, group=other)) is not first
    assert _run.cache_info().hits == before.hits + 1, "another group, but the form is the same"
    plan_part(allreduce(64, inplace=False, operands=given_by(range(64), 77)))
    plan_part(allreduce(63))
    assert _run.cache_info().misses == before.misses + 2
