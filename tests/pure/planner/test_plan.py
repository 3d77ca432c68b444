"""The planner: what each operation becomes, what is refused, and which plans verification catches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raycollect.core.model import GroupSpec, Key, OpKind, ReduceOp, task_key
from raycollect.errors import (
    DuplicateActorError,
    InternalError,
    InvalidArgumentError,
    MissingMemberError,
    NotAMemberError,
    RefusedError,
)
from raycollect.planner import Buffer, Part, Request, Role, Step, Template, plan, plan_part
from raycollect.planner.verify import _run, verify

CALM = settings(deadline=None)  # the machine's load is none of these tests' business

WORLDS = range(1, 9)
OPERAND = Buffer(role=Role.OPERAND)
LEARNED = Buffer(role=Role.LEARNED)
Operands = tuple[int, Key | None, Key | None]


def _key(rank: int, salt: int = 0) -> Key:
    return task_key(bytes([rank % 256, salt]) * 12, 1)


def _group(world: int) -> GroupSpec:
    return GroupSpec(name="ring", group_id="0123", backend="local", world_size=world)


def _operands(ranks: Any, salt: int = 0) -> tuple[Operands, ...]:
    """Each rank gives something, and takes nothing else."""
    return tuple((rank, _key(rank, salt), None) for rank in ranks)


def _rooted(ranks: Any, root: int) -> tuple[Operands, ...]:
    """The root gives something, the others take it."""
    return tuple((r, _key(r), None) if r == root else (r, None, _key(r)) for r in ranks)


def _allreduce(world: int, **changes: Any) -> Request:
    request = Request(kind=OpKind.ALLREDUCE, group=_group(world), operands=_operands(range(world)), op=ReduceOp.SUM)
    return replace(request, **changes)


def _broadcast(world: int, root: int = 0, **changes: Any) -> Request:
    request = Request(kind=OpKind.BROADCAST, group=_group(world), operands=_rooted(range(world), root), root=root)
    return replace(request, **changes)


def _barrier(world: int, **changes: Any) -> Request:
    operands = tuple((rank, None, None) for rank in range(world))
    return replace(Request(kind=OpKind.BARRIER, group=_group(world), operands=operands), **changes)


def _send(world: int, root: int, peer: int, *, given: bool = True, **changes: Any) -> Request:
    operands = _rooted(sorted((root, peer)), root)
    if not given:
        operands = tuple((rank, src, None) for rank, src, _ in operands)
    request = Request(kind=OpKind.SEND, group=_group(world), operands=operands, root=root, peer=peer)
    return replace(request, **changes)


# ---------------------------------------------------------------------------------------------- what becomes of it


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("op", ReduceOp)
def test_allreduce_in_place_reads_and_writes_one_operand(world: int, op: ReduceOp) -> None:
    request = _allreduce(world, op=op)
    made, uses = plan_part(request), plan([request]).uses()
    assert made.ranks == tuple(range(world))
    assert made.rounds == 1
    for rank in range(world):
        assert made.template(rank) == Template(
            buffers=(OPERAND,), steps=(Step(kind=OpKind.ALLREDUCE, src=0, dst=0, op=op),), src=0, result=0
        )
        assert uses[_key(rank)]
        assert made.outputs(rank) == 0


@pytest.mark.parametrize("world", WORLDS)
def test_allreduce_not_in_place_writes_an_output_like_the_operand(world: int) -> None:
    request = _allreduce(world, inplace=False)
    made, uses = plan_part(request), plan([request]).uses()
    for rank in range(world):
        assert made.template(rank) == Template(
            buffers=(OPERAND, Buffer(role=Role.LIKE, source=0)),
            steps=(Step(kind=OpKind.ALLREDUCE, src=0, dst=1, op=ReduceOp.SUM),),
            src=0,
            result=1,
        )
        assert not uses[_key(rank)]
        assert made.outputs(rank) == 1


@pytest.mark.parametrize(("world", "root"), [(world, root) for world in WORLDS for root in range(world)])
def test_broadcast_reads_on_the_root_and_overwrites_the_others_unread(world: int, root: int) -> None:
    request = _broadcast(world, root)
    made, uses = plan_part(request), plan([request]).uses()
    assert made.rounds == 1
    for rank in range(world):
        (step,) = made.template(rank).steps
        assert (step.kind, step.peer) == (OpKind.BROADCAST, root)
        assert (step.src, step.dst) == ((0, -1) if rank == root else (-1, 0))
        assert uses[_key(rank)] == (rank != root)
        assert made.template(rank).result == 0


@pytest.mark.parametrize("world", WORLDS)
def test_barrier_has_no_buffers_and_no_keys(world: int) -> None:
    made, whole = plan_part(_barrier(world)), plan([_barrier(world)])
    for rank in range(world):
        assert made.template(rank) == Template(buffers=(), steps=(Step(kind=OpKind.BARRIER),))
        assert whole.sources(rank) == ()
        assert whole.program(rank).keys == 0
    assert whole.uses() == {}


_PAIRS = [(world, root, peer) for world in WORLDS for root in range(world) for peer in range(world) if root != peer]


@pytest.mark.parametrize("given_there", [True, False])
def test_send_pairs_one_send_with_one_receive(given_there: bool) -> None:
    for world, root, peer in _PAIRS:
        request = _send(world, root, peer, given=given_there)
        made = plan_part(request)
        assert made.ranks == tuple(sorted((root, peer)))
        assert made.template(root).steps == (Step(kind=OpKind.SEND, src=0, peer=peer),)
        assert made.template(peer).steps == (Step(kind=OpKind.RECV, dst=0, peer=root),)
        landing = OPERAND if given_there else LEARNED
        assert made.template(peer).buffers == (landing,)
        assert made.rounds == (1 if given_there else 2)
        assert made.outputs(peer) == (0 if given_there else 1)
        assert plan([request]).uses() == {_key(root): False} | ({_key(peer): True} if given_there else {})


def test_ranks_with_the_same_part_share_one_template() -> None:
    made = plan_part(_allreduce(64))
    assert len(made.templates) == 1
    assert made.parts == (0,) * 64


def test_a_program_carries_the_ranks_half() -> None:
    request = _broadcast(5, 3, timeout_s=2.5)
    part, whole = plan_part(request), plan([request])
    for rank in range(5):
        program = whole.program(rank)
        (share,) = program.shares
        assert (share.op, share.rank, program.door.rank) == ("broadcast", rank, rank)
        assert (share.ranks, share.root, share.reduce_op) == ((0, 1, 2, 3, 4), 3, None)
        assert (share.group_id, program.timeout_s, program.rounds) == ("0123", 2.5, 1)
        assert whole.sources(rank) == (_key(rank),)
        assert program.keys == 1
        assert share.template is part.template(rank)
        assert program == plan([request]).program(rank), "the same whenever the same request is planned again"


def test_the_plan_of_one_call_runs_in_the_doors_launch() -> None:
    """The door is the group's own, and there is nothing but its launch."""
    for request in (_allreduce(5), _broadcast(3, 1), _barrier(4), _send(6, 4, 2)):
        whole = plan([request])
        assert (whole.width, whole.alone, whole.everyone) == (1, (0,), ())
        for position, rank in enumerate(plan_part(request).ranks):
            program = whole.program(position)
            (task,), (bundle,) = program.tasks, program.bundles
            assert (task.share, task.request, task.round, task.alone) == (0, 0, 0, 0)
            assert (bundle.tasks, bundle.base) == ((0,), (0,))
            assert (program.door.group_id, program.door.rank) == ("0123", rank)
            assert program.door.ranks == plan_part(request).ranks


def test_a_program_for_a_learned_output_has_no_key() -> None:
    whole = plan([_send(4, 3, 1, given=False)])
    assert whole.participants == ("1", "3")
    assert [whole.sources(position) for position in range(2)] == [(), (_key(3),)]
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
        request = _allreduce(4, operands=_operands(r for r in range(4) if r != absent))
        assert _violations(request) == {("missing", absent, "operand")}
        with pytest.raises(MissingMemberError):
            plan_part(request)


def test_a_rank_outside_the_group_is_named() -> None:
    request = _allreduce(3, operands=_operands((0, 1, 2, 7)))
    assert _violations(request) == {("not_member", 7, "rank")}
    with pytest.raises(NotAMemberError):
        plan_part(request)


def test_a_rank_given_twice_is_named_once() -> None:
    request = _allreduce(3, operands=_operands((0, 1, 1, 1, 2)))
    assert _violations(request) == {("duplicate", 1, "operand")}
    with pytest.raises(DuplicateActorError):
        plan_part(request)


def test_a_third_rank_has_no_part_in_a_send() -> None:
    assert _violations(_send(4, 0, 2, operands=((0, _key(0), None), (1, _key(1), None), (2, None, _key(2))))) == {
        ("not_member", 1, "rank")
    }


@pytest.mark.parametrize("root", [-1, 3, 100])
def test_a_root_outside_the_group_is_no_argument(root: int) -> None:
    assert _violations(_broadcast(3, root)) == {("argument", -1, "src_rank")}
    with pytest.raises(InvalidArgumentError, match="from 0 to 2"):
        plan_part(_broadcast(3, root))


@pytest.mark.parametrize("peer", [-1, 3])
def test_a_destination_outside_the_group_is_no_argument(peer: int) -> None:
    request = _send(3, 1, peer, operands=_operands((1,)))
    assert _violations(request) == {("argument", -1, "destination rank")}


def test_sending_to_oneself_is_no_argument() -> None:
    request = _send(3, 1, 1, operands=_operands((1,)))
    assert _violations(request) == {("argument", -1, "destination rank")}


def test_an_allreduce_needs_a_reduce_op() -> None:
    assert _violations(_allreduce(2, op=None)) == {("argument", -1, "op")}


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("nan"), float("-inf")])
@pytest.mark.parametrize("make", [_allreduce, _broadcast, _barrier])
def test_a_timeout_is_a_positive_number(make: Any, timeout_s: float) -> None:
    assert _violations(make(2, timeout_s=timeout_s)) == {("argument", -1, "timeout_s")}


def test_only_the_destination_of_a_send_may_ask_for_an_output() -> None:
    for rank in range(3):
        operands = tuple((r, None if r == rank else _key(r), None) for r in range(3))
        assert _violations(_allreduce(3, operands=operands)) == {("missing", rank, "operand")}
        rooted = tuple((r, None, None) if r == rank else one for r, one in enumerate(_rooted(range(3), 0)))
        assert _violations(_broadcast(3, operands=rooted)) == {("missing", rank, "operand")}
    assert _violations(_send(2, 0, 1, operands=((0, None, None), (1, None, _key(1))))) == {("missing", 0, "operand")}


def test_a_receive_alone_is_no_request() -> None:
    assert ("argument", -1, "op") in _violations(_allreduce(2, kind=OpKind.RECV))


def test_all_violations_come_in_one_error() -> None:
    request = _broadcast(4, 9, operands=_operands((0, 2, 2, 8)), timeout_s=-1)
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
        _group(0)


# ---------------------------------------------------------------------------------------------- properties


@st.composite
def _requests(draw: st.DrawFn) -> Request:
    """Requests that make sense."""
    world = draw(st.integers(1, 12))
    ranks = st.integers(0, world - 1)
    kind = draw(st.sampled_from([OpKind.ALLREDUCE, OpKind.BROADCAST, OpKind.BARRIER, OpKind.SEND]))
    if kind is OpKind.ALLREDUCE:
        return _allreduce(world, op=draw(st.sampled_from(ReduceOp)), inplace=draw(st.booleans()))
    if kind is OpKind.BROADCAST:
        return _broadcast(world, draw(ranks))
    if kind is OpKind.BARRIER or world == 1:
        return _barrier(world)
    root, peer = draw(st.lists(ranks, min_size=2, max_size=2, unique=True))
    return _send(world, root, peer, given=draw(st.booleans()))


@CALM
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
_WILD_KEYS = st.sampled_from([None, _key(0), _key(1), _key(2)])


def _wild_operands(ranks: Any) -> st.SearchStrategy[Any]:
    chosen = sorted(ranks)
    keys = st.tuples(*[st.tuples(_WILD_KEYS, _WILD_KEYS)] * len(chosen))
    return keys.map(lambda pairs: tuple((rank, *pair) for rank, pair in zip(chosen, pairs, strict=True)))


_WILD = st.builds(
    Request,
    kind=st.sampled_from(OpKind),
    group=st.integers(1, 4).map(_group),
    operands=st.integers(1, 4).flatmap(lambda world: _wild_operands(range(world)))
    | st.lists(_WILD_RANKS, max_size=6).flatmap(_wild_operands),
    op=st.none() | st.sampled_from(ReduceOp),
    root=_WILD_RANKS,
    peer=_WILD_RANKS,
    inplace=st.booleans(),
    timeout_s=st.sampled_from([60.0, 1e-3, 0.0, -1.0, float("nan")]),
)


@CALM
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


# ---------------------------------------------------------------------------------------------- what is caught


def _bad(request: Request, *templates: Template, parts: tuple[int, ...] | None = None) -> Part:
    chosen = parts if parts is not None else (0,) * len(request.operands)
    return Part(request=request, templates=templates, parts=chosen)


def _template(*steps: Step, buffers: tuple[Buffer, ...] = (OPERAND,), src: int = 0, result: int = 0) -> Template:
    return Template(buffers=buffers, steps=steps, src=src, result=result)


SUM = Step(kind=OpKind.ALLREDUCE, src=0, dst=0, op=ReduceOp.SUM)
OUTPUT = Buffer(role=Role.LIKE, source=0)
BAD: dict[str, tuple[Part, str]] = {
    "a step is missing on one rank": (
        _bad(_allreduce(3), _template(SUM), _template(), parts=(0, 1, 0)),
        "deadlock",
    ),
    "a step too many on one rank": (
        _bad(_allreduce(3), _template(SUM), _template(SUM, Step(kind=OpKind.BARRIER)), parts=(0, 0, 1)),
        "deadlock",
    ),
    "ranks reduce with different ops": (
        _bad(_allreduce(2), _template(SUM), _template(replace(SUM, op=ReduceOp.MAX)), parts=(0, 1)),
        "deadlock",
    ),
    "ranks have different roots": (
        _bad(
            _broadcast(2),
            _template(Step(kind=OpKind.BROADCAST, src=0, dst=0, peer=0)),
            _template(Step(kind=OpKind.BROADCAST, src=0, dst=0, peer=1)),
            parts=(0, 1),
        ),
        "deadlock",
    ),
    "ranks run different kernels": (
        _bad(_barrier(2), _template(Step(kind=OpKind.BARRIER)), _template(SUM), parts=(0, 1)),
        "deadlock",
    ),
    "all agree on the wrong root": (
        _bad(_broadcast(3, 2), _template(Step(kind=OpKind.BROADCAST, src=0, dst=0, peer=1))),
        "leaves",
    ),
    "nothing is reduced": (_bad(_allreduce(3), _template()), "leaves"),
    "it is reduced twice": (_bad(_allreduce(3), _template(SUM, SUM)), "leaves"),
    "a reduction where a broadcast is meant": (_bad(_broadcast(3), _template(SUM)), "leaves"),
    "the result buffer is never written": (
        _bad(_allreduce(3, inplace=False), _template(SUM, buffers=(OPERAND, OUTPUT), result=1)),
        "leaves None",
    ),
    "an output is read before it is written": (
        _bad(
            _allreduce(3, inplace=False),
            _template(Step(kind=OpKind.ALLREDUCE, src=1, dst=1, op=ReduceOp.SUM), buffers=(OPERAND, OUTPUT), result=1),
        ),
        r"leaves \(\)",
    ),
    "one rank's result is the wrong buffer": (
        _bad(
            _allreduce(2, inplace=False),
            _template(replace(SUM, dst=1), buffers=(OPERAND, OUTPUT), result=1),
            _template(replace(SUM, dst=1), buffers=(OPERAND, OUTPUT), result=0),
            parts=(0, 1),
        ),
        "on rank 1",
    ),
    "a barrier claims a result": (_bad(_barrier(2), _template(Step(kind=OpKind.BARRIER))), "leaves"),
    "a send without a receive": (
        _bad(_send(2, 0, 1), _template(Step(kind=OpKind.SEND, src=0, peer=1)), _template(), parts=(0, 1)),
        "deadlock",
    ),
    "a receive without a send": (
        _bad(_send(2, 0, 1), _template(), _template(Step(kind=OpKind.RECV, dst=0, peer=0), src=-1), parts=(0, 1)),
        "deadlock",
    ),
    "both ranks send first": (
        _bad(
            _send(2, 0, 1),
            _template(Step(kind=OpKind.SEND, src=0, peer=1), Step(kind=OpKind.RECV, dst=0, peer=1)),
            _template(Step(kind=OpKind.SEND, src=0, peer=0), Step(kind=OpKind.RECV, dst=0, peer=0)),
            parts=(0, 1),
        ),
        "deadlock",
    ),
    "it is sent the wrong way": (
        _bad(
            _send(2, 0, 1),
            _template(Step(kind=OpKind.RECV, dst=0, peer=1), src=-1),
            _template(Step(kind=OpKind.SEND, src=0, peer=0)),
            parts=(0, 1),
        ),
        "leaves",
    ),
    "it is sent to a rank that takes no part": (
        _bad(_send(3, 0, 1), _template(Step(kind=OpKind.SEND, src=0, peer=2)), _template(), parts=(0, 1)),
        "deadlock",
    ),
    "it is received from itself": (
        _bad(
            _send(2, 0, 1),
            _template(Step(kind=OpKind.SEND, src=0, peer=1)),
            _template(Step(kind=OpKind.RECV, dst=0, peer=1), src=-1),
            parts=(0, 1),
        ),
        "deadlock",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_verification_catches(name: str) -> None:
    wrong, why = BAD[name]
    with pytest.raises(InternalError, match=why) as caught:
        verify(wrong)
    assert wrong.request.kind.value in str(caught.value)
    assert str(wrong.ranks) in str(caught.value)


def test_verification_proves_more_than_our_own_templates() -> None:
    """A broadcast made of sends, and an allreduce followed by a broadcast of its result, mean what they should."""
    relay = _bad(
        _broadcast(3, 0),
        _template(Step(kind=OpKind.SEND, src=0, peer=1), Step(kind=OpKind.SEND, src=0, peer=2)),
        _template(Step(kind=OpKind.RECV, dst=0, peer=0), src=-1),
        parts=(0, 1, 1),
    )
    verify(relay)
    twice = _bad(_allreduce(3), _template(SUM, Step(kind=OpKind.BROADCAST, src=0, dst=0, peer=2)))
    verify(twice)


@pytest.mark.parametrize("seed", range(3))
def test_removing_any_rank_from_a_kernel_is_caught(seed: int) -> None:
    world = 4 + seed
    for make in (_allreduce, _broadcast, _barrier):
        good = plan_part(make(world))
        for rank in range(world):
            idle = replace(good.template(rank), steps=())
            parts = tuple(len(good.templates) if r == rank else part for r, part in enumerate(good.parts))
            with pytest.raises(InternalError, match="deadlock"):
                verify(replace(good, templates=(*good.templates, idle), parts=parts))


# ---------------------------------------------------------------------------------------------- cost


def test_a_form_is_planned_and_verified_once_and_remembered() -> None:
    first = plan_part(_allreduce(64))
    before = _run.cache_info()
    for salt in range(1, 50):
        again = plan_part(_allreduce(64, operands=_operands(range(64), salt), timeout_s=float(salt)))
        assert again is first, "whatever its tensors"
    assert _run.cache_info() == before
    other = replace(_group(64), group_id="4567")
    assert plan_part(_allreduce(64, group=other)) is not first
    assert _run.cache_info().hits == before.hits + 1, "another group, but the form is the same"
    plan_part(_allreduce(64, inplace=False, operands=_operands(range(64), 77)))
    plan_part(_allreduce(63))
    assert _run.cache_info().misses == before.misses + 2
