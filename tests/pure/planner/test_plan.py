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
    assert (caught.value.op, caught.value.group_name) == (request.kind.value, "ring")
    return {(v.kind, v.rank, v.field) for v in caught.value.violations}


WRONG: dict[str, tuple[Request, set[tuple[str, int, str]]]] = {
    "a destination below the group": (send(3, 1, -1, operands=given_by((1,))), {("argument", -1, "destination rank")}),
    "a destination above the group": (send(3, 1, 3, operands=given_by((1,))), {("argument", -1, "destination rank")}),
    "a send to oneself": (send(3, 1, 1, operands=given_by((1,))), {("argument", -1, "destination rank")}),
    "a time limit of zero": (allreduce(2, timeout_s=0.0), {("argument", -1, "timeout_s")}),
    "a time limit that is no number": (barrier(2, timeout_s=float("nan")), {("argument", -1, "timeout_s")}),
    "a receive alone": (
        allreduce(2, kind=OpKind.RECV),
        {("argument", -1, "op")},
    ),
    "several kinds": (
        broadcast(4, 9, operands=given_by((0, 2, 2, 8)), timeout_s=-1),
        {
            ("missing", 1, "operand"),
            ("missing", 3, "operand"),
            ("not_member", 8, "rank"),
            ("duplicate", 2, "operand"),
            ("argument", -1, "src_rank"),
            ("argument", -1, "timeout_s"),
        },
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_request_is_refused_with_all_reasons(name: str) -> None:
    request, expected = WRONG[name]
    assert _violations(request) == expected


def test_the_error_is_of_the_class_of_its_violations() -> None:
    request = allreduce(3, operands=given_by((0, 1, 1, 1, 2)))
    assert _violations(request) == {("duplicate", 1, "operand")}
    with pytest.raises(DuplicateActorError):
        plan_part(request)
    with pytest.raises(RefusedError) as caught:
        plan_part(WRONG["several kinds"][0])
    assert type(caught.value) is RefusedError


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
