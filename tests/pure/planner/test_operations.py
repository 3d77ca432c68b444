"""The planner: every operation, native and made of others; who brings what; and that broken plans are caught."""

from __future__ import annotations

import itertools

import pytest

from raycollect.core.model import Key, OpKind
from raycollect.core.operations import OPERATIONS, PAIR
from raycollect.errors import RefusedError, UnsupportedError
from raycollect.planner import Local, Request, Role, decode_program, encode_program, plan, plan_part
from raycollect.planner.algorithms import ALGORITHMS
from raycollect.planner.ir import Part
from raycollect.planner.verify import verify
from tests.pure.meaning import KINDS, REDUCTIONS, ROOTED, roots_of, takers, takes_in_place
from tests.pure.planner.requests import (
    ALL_OPS,
    COLLECTIVE_SUBSTITUTES,
    SUBSTITUTES,
    givers,
    key_of,
    request_of,
    requests_of,
)
from tests.support.values import replace

MADE = tuple(kind for kind, spec in OPERATIONS.items() if spec.outputs and spec.makes)


def _asks(request: Request, rank: int, dst: Key | None) -> bool:
    """Whether a rank gets an output that the plan makes."""
    if request.kind in MADE:
        return dst is None and rank in takers(request.kind, request.group.world_size, request.root, request.peer)
    return not request.inplace and takes_in_place(request.kind, rank, request.root)


def _check(made: Part, request: Request) -> None:
    """What every part fulfils."""
    verify(made)
    whole = plan([request])
    for position, (rank, src, dst) in enumerate(request.operands):
        template, program = made.template(rank), whole.program(position)
        assert decode_program(encode_program(program)) == program
        assert whole.sources(position) == tuple(key for key in (src, dst) if key is not None)
        assert program.tasks[0].inputs == tuple(range(program.keys))
        operands = [at for at, buffer in enumerate(template.buffers) if buffer.role is Role.OPERAND]
        assert operands == list(range(program.keys)), "operands come first, in the order of their keys"
        assert [at for at in (template.src, template.dst) if at in operands] == operands
        assert made.template(rank).makes == _asks(request, rank, dst)
        for step in template.steps:
            assert step.kind is Local.COPY or step.kind.value in request.group.ops
            assert step.op in (None, request.op)


# ---------------------------------------------------------------------------------------------- every operation


@pytest.mark.parametrize("world", range(1, 9))
@pytest.mark.parametrize("kind", KINDS)
def test_every_operation_is_planned_for_every_root_and_survives_the_wire(kind: OpKind, world: int) -> None:
    for request in requests_of(kind, world):
        made = plan_part(request)
        _check(made, request)
        is_alone = world == 1 and kind is OpKind.SCATTER  # which has what it takes
        is_learned = kind in MADE and kind is not OpKind.REDUCESCATTER and not request.inplace and not is_alone
        assert made.rounds == 1 + is_learned, "ranks meet twice where one learns the shape of its output"
        uses = plan([request]).uses()
        for rank, src, dst in request.operands:
            in_place = request.inplace and takes_in_place(kind, rank, request.root)
            assert {key: uses.pop(key) for key in (src, dst) if key} == {
                key: key is dst or in_place for key in (src, dst) if key
            }, "what is given is written only in place"
        assert uses == {}


def test_an_output_that_one_rank_brings_is_used_and_the_others_are_made() -> None:
    request = request_of(OpKind.ALLGATHER, 3)
    request = replace(request, operands=(request.operands[0], *((r, key_of(r, 0), None) for r in (1, 2))))
    made = plan_part(request)
    verify(made)
    assert [made.template(rank).makes for rank in range(3)] == [0, 1, 1]
    assert made.rounds == 2
    assert plan([request]).program(0).rounds == 2


# ---------------------------------------------------------------------------------------------- who brings what


def _violations(request: Request) -> list[tuple[str, int, str, str]]:
    with pytest.raises(RefusedError) as caught:
        plan_part(request)
    return [(v.kind, v.rank, v.field, v.expected) for v in caught.value.violations]


def _without(request: Request, rank: int, side: int) -> Request:
    operands = [list(one) for one in request.operands]
    next(one for one in operands if one[0] == rank)[1 + side] = None
    return replace(request, operands=tuple(map(tuple, operands)))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind is not OpKind.BARRIER])
def test_who_gives_nothing_is_named(kind: OpKind) -> None:
    for root, peer in roots_of(kind, 4):
        request = request_of(kind, 4, root, peer)
        for rank in givers(kind, 4, root):
            assert _violations(_without(request, rank, 0)) == [("missing", rank, "operand", "one ref")]


@pytest.mark.parametrize("kind", KINDS)
def test_who_brings_what_it_has_no_part_in_is_named_with_who_has(kind: OpKind) -> None:
    for (root, peer), side in itertools.product(roots_of(kind, 4), (0, 1)):
        request = request_of(kind, 4, root, peer)
        due = givers(kind, 4, root) if side == 0 else takers(kind, 4, root, peer)
        for at, (rank, *keys) in enumerate(request.operands):
            if rank in due:
                continue
            keys[side] = key_of(rank, side)
            operands = (*request.operands[:at], (rank, *keys), *request.operands[at + 1 :])
            expected = "none" if not due else f"kept by rank {due[0]}" if len(due) == 1 else f"kept by one of {due}"
            found = _violations(replace(request, operands=operands))
            assert found == [("mismatch", rank, ("input", "output")[side], expected)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_too_many_or_too_few_is_named_once(kind: OpKind) -> None:
    root, peer = roots_of(kind, 4)[0]
    request = request_of(kind, 4, root, peer)
    stranger = replace(request, operands=(*request.operands, (9, key_of(9, 0), key_of(9, 1))))
    assert [found[:3] for found in _violations(stranger)] == [("not_member", 9, "rank")]
    assert [found[:3] for found in _violations(replace(request, operands=request.operands[:-1]))] == [
        ("missing", request.operands[-1][0], "operand")
    ]


@pytest.mark.parametrize("kind", ROOTED)
@pytest.mark.parametrize("root", [-1, 4])
def test_a_root_that_is_nobody_is_the_only_thing_that_is_wrong(kind: OpKind, root: int) -> None:
    field = "src_rank" if kind in (OpKind.BROADCAST, OpKind.SCATTER) else "dst_rank"
    request = replace(request_of(kind, 4, 0), root=root)
    assert _violations(request) == [("argument", -1, field, "a rank from 0 to 3")]


@pytest.mark.parametrize("kind", REDUCTIONS)
def test_a_reduction_needs_a_reduce_op(kind: OpKind) -> None:
    request = replace(request_of(kind, 2, 0 if kind in ROOTED else -1), op=None)
    assert _violations(request) == [("argument", -1, "op", "a ReduceOp")]


# ---------------------------------------------------------------------------------------------- substitutes


@pytest.mark.parametrize("world", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("kind", SUBSTITUTES)
def test_what_a_backend_lacks_is_made_of_what_it_has(kind: OpKind, world: int) -> None:
    for needs in SUBSTITUTES[kind]:
        for request in requests_of(kind, world, ops=tuple(other.value for other in needs)):
            made = plan_part(request)
            _check(made, request)
            if needs == PAIR:
                (choice,) = made.choices
                assert kind in ALGORITHMS[choice.name].kinds


def test_substitutes_are_preferred_to_sends_and_receives() -> None:
    for kind, needs in COLLECTIVE_SUBSTITUTES.items():
        for request in requests_of(kind, 3, ops=("send", "recv", *(other.value for other in needs))):
            kinds = {step.kind for template in plan_part(request).templates for step in template.steps}
            assert kinds == set(needs)


@pytest.mark.parametrize("kind", KINDS)
def test_what_can_not_be_made_is_refused_naming_backend_operation_and_what_there_is(kind: OpKind) -> None:
    needed = COLLECTIVE_SUBSTITUTES.get(kind, ())
    if kind is OpKind.BARRIER:
        return
    for lacking, half in itertools.product(needed or (kind,), ("send", "recv")):
        stands_in = {half} if PAIR in SUBSTITUTES.get(kind, ()) else set()
        ops = tuple(op for op in ALL_OPS if op not in {kind.value, lacking.value} | stands_in)
        root, peer = roots_of(kind, 3)[0]
        with pytest.raises(UnsupportedError) as caught:
            plan_part(request_of(kind, 3, root, peer, ops=ops))
        (violation,) = caught.value.violations
        assert violation.found == f"{kind.value}, which backend 'local' does not have"
        can = set(violation.expected.removeprefix("one of ").split(", "))
        assert set(ops) <= can
        assert kind.value not in can
