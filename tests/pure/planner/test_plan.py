"""The planner: what each operation becomes, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raycollect.core.model import OpKind, ReduceOp
from raycollect.errors import DuplicateActorError, MissingMemberError, NotAMemberError, RefusedError
from raycollect.planner import Request, Role, Step, plan, plan_part
from raycollect.planner.template import Buffer, Template
from raycollect.planner.verify import _run, verify
from tests.pure.planner.requests import allreduce, barrier, broadcast, given_by, key_of, ring, rooted_at, send
from tests.support.values import replace

WORLDS = range(1, 9)
OPERAND = Buffer(role=Role.OPERAND)
LEARNED = Buffer(role=Role.LEARNED)


# ---------------------------------------------------------------------------------------------- what becomes of it


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("op", ReduceOp)
def test_allreduce_in_place_reads_and_writes_one_operand(world: int, op: ReduceOp) -> None:
    request = allreduce(world, op=op)
    made, uses = plan_part(request), plan([request]).uses()
    assert made.ranks == tuple(range(world))
    assert made.rounds == 1
    for rank in range(world):
        assert made.template(rank) == Template(
            buffers=(OPERAND,), steps=(Step(kind=OpKind.ALLREDUCE, src=0, dst=0, op=op),), src=0, result=0
        )
        assert uses[key_of(rank)]
        assert made.outputs(rank) == 0


@pytest.mark.parametrize("world", WORLDS)
def test_allreduce_not_in_place_writes_an_output_like_the_operand(world: int) -> None:
    request = allreduce(world, inplace=False)
    made, uses = plan_part(request), plan([request]).uses()
    for rank in range(world):
        assert made.template(rank) == Template(
            buffers=(OPERAND, Buffer(role=Role.LIKE, source=0)),
            steps=(Step(kind=OpKind.ALLREDUCE, src=0, dst=1, op=ReduceOp.SUM),),
            src=0,
            result=1,
        )
        assert not uses[key_of(rank)]
        assert made.outputs(rank) == 1


@pytest.mark.parametrize(("world", "root"), [(world, root) for world in WORLDS for root in range(world)])
def test_broadcast_reads_on_the_root_and_overwrites_the_others_unread(world: int, root: int) -> None:
    request = broadcast(world, root)
    made, uses = plan_part(request), plan([request]).uses()
    assert made.rounds == 1
    for rank in range(world):
        (step,) = made.template(rank).steps
        assert (step.kind, step.peer) == (OpKind.BROADCAST, root)
        assert (step.src, step.dst) == ((0, -1) if rank == root else (-1, 0))
        assert uses[key_of(rank)] == (rank != root)
        assert made.template(rank).result == 0


@pytest.mark.parametrize("world", WORLDS)
def test_barrier_has_no_buffers_and_no_keys(world: int) -> None:
    made, whole = plan_part(barrier(world)), plan([barrier(world)])
    for rank in range(world):
        assert made.template(rank) == Template(buffers=(), steps=(Step(kind=OpKind.BARRIER),))
        assert whole.sources(rank) == ()
        assert whole.program(rank).keys == 0
    assert whole.uses() == {}


_PAIRS = [(world, root, peer) for world in WORLDS for root in range(world) for peer in range(world) if root != peer]


@pytest.mark.parametrize("given_there", [True, False])
def test_send_pairs_one_send_with_one_receive(given_there: bool) -> None:
    for world, root, peer in _PAIRS:
        request = send(world, root, peer, given=given_there)
        made = plan_part(request)
        assert made.ranks == tuple(sorted((root, peer)))
        assert made.template(root).steps == (Step(kind=OpKind.SEND, src=0, peer=peer),)
        assert made.template(peer).steps == (Step(kind=OpKind.RECV, dst=0, peer=root),)
        landing = OPERAND if given_there else LEARNED
        assert made.template(peer).buffers == (landing,)
        assert made.rounds == (1 if given_there else 2)
        assert made.outputs(peer) == (0 if given_there else 1)
        assert plan([request]).uses() == {key_of(root): False} | ({key_of(peer): True} if given_there else {})


def test_ranks_with_the_same_part_share_one_template() -> None:
    made = plan_part(allreduce(64))
    assert len(made.templates) == 1
    assert made.parts == (0,) * 64


def test_a_program_carries_the_ranks_half() -> None:
    request = broadcast(5, 3, timeout_s=2.5)
    part, whole = plan_part(request), plan([request])
    for rank in range(5):
        program = whole.program(rank)
        (share,) = program.shares
        assert (share.op, share.rank, program.agreement.rank) == ("broadcast", rank, rank)
        assert (share.ranks, share.root, share.reduce_op) == ((0, 1, 2, 3, 4), 3, None)
        assert (share.group_id, program.timeout_s, program.rounds) == ("0123", 2.5, 1)
        assert whole.sources(rank) == (key_of(rank),)
        assert program.keys == 1
        assert share.template is part.template(rank)
        assert program == plan([request]).program(rank), "the same whenever the same request is planned again"


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


def test_a_member_without_operand_is_named() -> None:
    for absent in range(4):
        request = allreduce(4, operands=given_by(r for r in range(4) if r != absent))
        assert _violations(request) == {("missing", absent, "operand")}
        with pytest.raises(MissingMemberError):
            plan_part(request)


def test_a_rank_outside_the_group_is_named() -> None:
    request = allreduce(3, operands=given_by((0, 1, 2, 7)))
    assert _violations(request) == {("not_member", 7, "rank")}
    with pytest.raises(NotAMemberError):
        plan_part(request)


def test_a_rank_given_twice_is_named_once() -> None:
    request = allreduce(3, operands=given_by((0, 1, 1, 1, 2)))
    assert _violations(request) == {("duplicate", 1, "operand")}
    with pytest.raises(DuplicateActorError):
        plan_part(request)


def test_a_third_rank_has_no_part_in_a_send() -> None:
    assert _violations(send(4, 0, 2, operands=((0, key_of(0), None), (1, key_of(1), None), (2, None, key_of(2))))) == {
        ("not_member", 1, "rank")
    }


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
        rooted = tuple((r, None, None) if r == rank else one for r, one in enumerate(rooted_at(range(3), 0)))
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


@st.composite
def _requests(draw: st.DrawFn) -> Request:
    """Requests that make sense."""
    world = draw(st.integers(1, 12))
    ranks = st.integers(0, world - 1)
    kind = draw(st.sampled_from([OpKind.ALLREDUCE, OpKind.BROADCAST, OpKind.BARRIER, OpKind.SEND]))
    if kind is OpKind.ALLREDUCE:
        return allreduce(world, op=draw(st.sampled_from(ReduceOp)), inplace=draw(st.booleans()))
    if kind is OpKind.BROADCAST:
        return broadcast(world, draw(ranks))
    if kind is OpKind.BARRIER or world == 1:
        return barrier(world)
    root, peer = draw(st.lists(ranks, min_size=2, max_size=2, unique=True))
    return send(world, root, peer, given=draw(st.booleans()))


@given(_requests())
def test_a_request_that_makes_sense_is_planned_and_its_programs_fit_together(request: Request) -> None:
    made, whole = plan_part(request), plan([request])
    verify(made)
    keys = {rank: {src, dst} for rank, src, dst in request.operands}
    for position, rank in enumerate(made.ranks):
        program = whole.program(position)
        template = program.shares[0].template
        operands = [buffer for buffer in template.buffers if buffer.role is Role.OPERAND]
        assert len(program.tasks[0].inputs) == len(operands), "a key for each operand"
        assert len(whole.sources(position)) == program.keys
        assert set(whole.sources(position)) <= keys[rank]
        for step in template.steps:
            assert max(step.src, step.dst) < len(template.buffers)
        assert program.rounds == made.rounds


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
