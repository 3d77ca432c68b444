"""The planner: every operation, native and made of others; who brings what; and that broken plans are caught."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from raycollect.core.model import PREFIXES, GroupSpec, Key, OpKind, ReduceOp, task_key
from raycollect.errors import InternalError, RefusedError, UnsupportedError
from raycollect.planner import Local, Request, Role, Step, decode_program, encode_program, plan, plan_part
from raycollect.planner.algorithms import STAND_INS
from raycollect.planner.ir import Part
from raycollect.planner.lower import SUBSTITUTES
from raycollect.planner.template import Template
from raycollect.planner.verify import verify
from tests.pure.meaning import KINDS, REDUCTIONS, ROOTED, roots_of, takers
from tests.support.values import replace

ALL_OPS = tuple(kind.value for kind in OpKind)
MADE = (OpKind.ALLGATHER, OpKind.REDUCESCATTER, OpKind.GATHER, OpKind.SCATTER, OpKind.ALLTOALL, OpKind.SEND)


def _key(rank: int, side: int) -> Key:
    return task_key(bytes([rank, side]) * 12, 1)


def _givers(kind: OpKind, world: int, root: int) -> list[int]:
    if kind is OpKind.BARRIER:
        return []
    return [root] if kind in (OpKind.BROADCAST, OpKind.SCATTER, OpKind.SEND) else list(range(world))


def _request(
    kind: OpKind, world: int, root: int = -1, peer: int = -1, *, given: bool = True, ops: tuple[str, ...] = ALL_OPS
) -> Request:
    """A request that makes sense; `given`: whoever may bring an output does."""
    gives, takes = _givers(kind, world, root), takers(kind, world, root, peer)
    ranks = sorted((root, peer)) if kind is OpKind.SEND else range(world)
    brings = [rank for rank in takes if given or kind is OpKind.BROADCAST]
    return Request(
        kind=kind,
        group=GroupSpec(name="ring", group_id="0123", backend="local", world_size=world, ops=ops),
        operands=tuple(
            (rank, _key(rank, 0) if rank in gives else None, _key(rank, 1) if rank in brings else None)
            for rank in ranks
        ),
        op=ReduceOp.SUM if kind in REDUCTIONS else None,
        root=root,
        peer=peer,
        inplace=given,
    )


def _requests(kind: OpKind, world: int, **arguments: Any) -> Iterator[Request]:
    for (root, peer), given in itertools.product(roots_of(kind, world), (True, False)):
        yield _request(kind, world, root, peer, given=given, **arguments)


def _asks(request: Request, rank: int, dst: Key | None) -> bool:
    """Whether a rank gets an output that the plan makes."""
    if request.kind in MADE:
        return dst is None and rank in takers(request.kind, request.group.world_size, request.root, request.peer)
    return not request.inplace and (
        request.kind in (OpKind.ALLREDUCE, OpKind.SCAN, OpKind.EXSCAN)
        or (request.kind is OpKind.REDUCE and rank == request.root)
    )


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
        assert made.outputs(rank) == _asks(request, rank, dst)
        for step in template.steps:
            assert step.kind is Local.COPY or step.kind.value in request.group.ops
            assert step.op in (None, request.op)


# ---------------------------------------------------------------------------------------------- every operation


@pytest.mark.parametrize("world", range(1, 9))
@pytest.mark.parametrize("kind", KINDS)
def test_every_operation_is_planned_for_every_root_and_survives_the_wire(kind: OpKind, world: int) -> None:
    for request in _requests(kind, world):
        made = plan_part(request)
        _check(made, request)
        uses = plan([request]).uses()
        for rank, src, dst in request.operands:
            in_place = request.inplace and (
                kind in (OpKind.ALLREDUCE, OpKind.SCAN, OpKind.EXSCAN)
                or (kind is OpKind.REDUCE and rank == request.root)
            )
            assert {key: uses.pop(key) for key in (src, dst) if key} == {
                key: key is dst or in_place for key in (src, dst) if key
            }, "what is given is written only in place"
        assert uses == {}


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_meet_twice_where_an_output_must_be_learned(kind: OpKind) -> None:
    learned = kind in MADE and kind is not OpKind.REDUCESCATTER
    for request in _requests(kind, 3):
        assert plan_part(request).rounds == (2 if learned and not request.inplace else 1)


def test_an_output_that_one_rank_brings_is_used_and_the_others_are_made() -> None:
    request = _request(OpKind.ALLGATHER, 3)
    request = replace(request, operands=(request.operands[0], *((r, _key(r, 0), None) for r in (1, 2))))
    made = plan_part(request)
    verify(made)
    assert [made.outputs(rank) for rank in range(3)] == [0, 1, 1]
    assert made.rounds == 2
    assert plan([request]).program(0).rounds == 2


def test_one_key_may_be_given_and_taken() -> None:
    operands = tuple((rank, _key(rank, 0), _key(rank, 0)) for rank in range(2))
    whole = plan([replace(_request(OpKind.ALLTOALL, 2), operands=operands)])
    assert whole.sources(0) == (_key(0, 0),)
    program = whole.program(0)
    assert (program.keys, program.tasks[0].inputs) == (1, (0, 0)), "one key, given and taken"
    assert whole.uses() == {_key(0, 0): True, _key(1, 0): True}


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
        request = _request(kind, 4, root, peer)
        for rank in _givers(kind, 4, root):
            assert _violations(_without(request, rank, 0)) == [("missing", rank, "operand", "one ref")]


@pytest.mark.parametrize("kind", KINDS)
def test_who_brings_what_it_has_no_part_in_is_named_with_who_has(kind: OpKind) -> None:
    for (root, peer), side in itertools.product(roots_of(kind, 4), (0, 1)):
        request = _request(kind, 4, root, peer)
        due = _givers(kind, 4, root) if side == 0 else takers(kind, 4, root, peer)
        for at, (rank, *keys) in enumerate(request.operands):
            if rank in due:
                continue
            keys[side] = _key(rank, side)
            operands = (*request.operands[:at], (rank, *keys), *request.operands[at + 1 :])
            expected = "none" if not due else f"kept by rank {due[0]}" if len(due) == 1 else f"kept by one of {due}"
            found = _violations(replace(request, operands=operands))
            assert found == [("mismatch", rank, ("input", "output")[side], expected)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_too_many_or_too_few_is_named_once(kind: OpKind) -> None:
    root, peer = roots_of(kind, 4)[0]
    request = _request(kind, 4, root, peer)
    stranger = replace(request, operands=(*request.operands, (9, _key(9, 0), _key(9, 1))))
    assert [found[:3] for found in _violations(stranger)] == [("not_member", 9, "rank")]
    assert [found[:3] for found in _violations(replace(request, operands=request.operands[:-1]))] == [
        ("missing", request.operands[-1][0], "operand")
    ]


@pytest.mark.parametrize("kind", ROOTED)
@pytest.mark.parametrize("root", [-1, 4])
def test_a_root_that_is_nobody_is_the_only_thing_that_is_wrong(kind: OpKind, root: int) -> None:
    field = "src_rank" if kind in (OpKind.BROADCAST, OpKind.SCATTER) else "dst_rank"
    request = replace(_request(kind, 4, 0), root=root)
    assert _violations(request) == [("argument", -1, field, "a rank from 0 to 3")]


@pytest.mark.parametrize("kind", REDUCTIONS)
def test_a_reduction_needs_a_reduce_op(kind: OpKind) -> None:
    request = replace(_request(kind, 2, 0 if kind in ROOTED else -1), op=None)
    assert _violations(request) == [("argument", -1, "op", "a ReduceOp")]


# ---------------------------------------------------------------------------------------------- substitutes


@pytest.mark.parametrize("world", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("kind", SUBSTITUTES)
def test_what_a_backend_lacks_is_made_of_what_it_has(kind: OpKind, world: int) -> None:
    for request in _requests(kind, world, ops=tuple(other.value for other in SUBSTITUTES[kind][0])):
        _check(plan_part(request), request)


@pytest.mark.parametrize("world", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("kind", STAND_INS)
def test_what_a_backend_lacks_is_made_of_sends_and_receives(kind: OpKind, world: int) -> None:
    for request in _requests(kind, world, ops=("send", "recv")):
        made = plan_part(request)
        _check(made, request)
        (choice,) = made.choices
        assert choice.name == STAND_INS[kind].name


def test_substitutes_are_preferred_to_sends_and_receives() -> None:
    for kind in SUBSTITUTES.keys() & STAND_INS.keys():
        ops = ("send", "recv", *(other.value for other in SUBSTITUTES[kind][0]))
        for request in _requests(kind, 3, ops=ops):
            made = plan_part(request)
            kinds = {step.kind for template in made.templates for step in template.steps}
            assert kinds == set(SUBSTITUTES[kind][0])


@pytest.mark.parametrize("kind", KINDS)
def test_what_can_not_be_made_is_refused_naming_backend_operation_and_what_there_is(kind: OpKind) -> None:
    needed = SUBSTITUTES[kind][0] if kind in SUBSTITUTES else ()
    if kind is OpKind.BARRIER:
        return
    for lacking, half in itertools.product(needed or (kind,), ("send", "recv")):
        stands_in = {half} if kind in STAND_INS else set()
        ops = tuple(op for op in ALL_OPS if op not in {kind.value, lacking.value} | stands_in)
        root, peer = roots_of(kind, 3)[0]
        with pytest.raises(UnsupportedError) as caught:
            plan_part(_request(kind, 3, root, peer, ops=ops))
        (violation,) = caught.value.violations
        assert violation.found == f"{kind.value}, which backend 'local' does not have"
        can = set(violation.expected.removeprefix("one of ").split(", "))
        assert set(ops) <= can
        assert kind.value not in can


def test_what_sends_and_receives_can_stand_for_is_named() -> None:
    with pytest.raises(UnsupportedError) as caught:
        plan_part(_request(OpKind.ALLREDUCE, 3, ops=("send", "recv")))
    (violation,) = caught.value.violations
    assert violation.expected == "one of allgather, alltoall, barrier, broadcast, gather, recv, scatter, send"


@pytest.mark.parametrize("half", ["send", "recv"])
def test_a_send_needs_a_receive(half: str) -> None:
    with pytest.raises(UnsupportedError):
        plan_part(_request(OpKind.SEND, 2, 0, 1, ops=(half,)))


def test_a_backend_without_send_receive_and_reduce_scatter_does_the_rest() -> None:
    ops = tuple(op for op in ALL_OPS if op not in ("send", "recv", "reducescatter"))
    for kind in KINDS:
        for request in _requests(kind, 4, ops=ops):
            if kind is OpKind.SEND:
                with pytest.raises(UnsupportedError, match="send"):
                    plan_part(request)
            else:
                _check(plan_part(request), request)


def test_scratch_is_no_output() -> None:
    lacking = {OpKind.REDUCE: "reduce", OpKind.GATHER: "gather", OpKind.REDUCESCATTER: "reducescatter"}
    for kind, name in lacking.items():
        ops = tuple(op for op in ALL_OPS if op != name)
        made = plan_part(_request(kind, 3, 0 if kind in ROOTED else -1, ops=ops))
        assert any(buffer.scratch for template in made.templates for buffer in template.buffers)
        assert [made.outputs(rank) for rank in range(3)] == [0, 0, 0]


# ---------------------------------------------------------------------------------------------- what is caught


def with_template(made: Part, rank: int, template: Template) -> Part:
    """The plan with another part for one rank."""
    parts = tuple(len(made.templates) if r == rank else p for r, p in zip(made.ranks, made.parts, strict=True))
    return replace(made, templates=(*made.templates, template), parts=parts)


def with_steps(made: Part, rank: int, steps: Sequence[Step]) -> Part:
    """The plan with other steps for one rank."""
    return with_template(made, rank, replace(made.template(rank), steps=tuple(steps)))


def _everywhere(made: Part, change: Callable[[Step], tuple[Step, ...]]) -> Part:
    """The plan with each step replaced."""
    templates = (replace(t, steps=tuple(new for step in t.steps for new in change(step))) for t in made.templates)
    return replace(made, templates=tuple(templates))


def _drop(template: Template, at: int) -> Template:
    return replace(template, steps=template.steps[:at] + template.steps[at + 1 :])


def _change(template: Template, index: int, **fields: Any) -> Template:
    steps = list(template.steps)
    steps[index] = replace(steps[index], **fields)
    return replace(template, steps=tuple(steps))


def _broken_steps(made: Part, rank: int) -> Iterator[tuple[str, Part]]:
    """(what was done to one rank's steps, the plan): wrong for any operation among two ranks or more."""
    template = made.template(rank)
    for at, step in enumerate(template.steps):
        yield f"rank {rank} without step {at}", with_template(made, rank, _drop(template, at))
        yield f"rank {rank} in a launch that there is not", with_template(made, rank, _change(template, at, at=5))
        if step.peer >= 0:
            for peer in {(step.peer + 1) % made.request.group.world_size, -1} - {step.peer}:
                yield f"rank {rank} with peer {peer}", with_template(made, rank, _change(template, at, peer=peer))
        if step.op is not None:
            yield f"rank {rank} reduces otherwise", with_template(made, rank, _change(template, at, op=ReduceOp.MAX))
        if step.src >= 0:
            yield f"rank {rank} reads nothing", with_template(made, rank, _change(template, at, src=-1))
        if step.dst >= 0 and not template.buffers[step.dst].scratch:
            yield f"rank {rank} writes nothing", with_template(made, rank, _change(template, at, dst=-1))
        if step.dst == 1 and template.result == 1:
            yield f"rank {rank} overwrites what it gives", with_template(made, rank, _change(template, at, dst=0))


def _broken_parts(made: Part, rank: int) -> Iterator[tuple[str, Part]]:
    """The same, for one rank's part as a whole."""
    template = made.template(rank)
    if template.result >= 0:
        yield f"rank {rank} without result", with_template(made, rank, replace(template, result=-1))
    if template.result == 1:
        yield f"rank {rank} with what it gave as result", with_template(made, rank, replace(template, result=0))
    yield f"rank {rank} does all twice", with_template(made, rank, replace(template, steps=template.steps * 2))


def _broken_everywhere(made: Part) -> Iterator[tuple[str, Part]]:
    """The same, for all ranks alike, so that none waits for another."""
    steps = [step for template in made.templates for step in template.steps]
    if made.request.kind is not OpKind.BARRIER:
        yield "nobody does anything", _everywhere(made, lambda step: ())
    if any(len(template.steps) > 1 for template in made.templates):
        turned = (replace(template, steps=template.steps[::-1]) for template in made.templates)
        yield "all begin at the end", replace(made, templates=tuple(turned))
    if any(step.op for step in steps):
        yield "all reduce otherwise", _everywhere(made, lambda step: (replace(step, op=step.op and ReduceOp.MAX),))
    if made.request.kind in ROOTED and any(step.peer >= 0 for step in steps):
        world = len(made.ranks)
        yield "all have another root", _everywhere(made, lambda step: (replace(step, peer=(step.peer + 1) % world),))


def _broken(made: Part) -> Iterator[tuple[str, Part]]:
    for rank in made.ranks:
        for what, part in (*_broken_steps(made, rank), *_broken_parts(made, rank)):
            if not _is_harmless(made, rank, what):
                yield what, part
    yield from _broken_everywhere(made)


def _is_harmless(made: Part, rank: int, what: str) -> bool:
    """In a scan the first rank has its result from the start, and nobody needs what the last one gives to an exscan."""
    kind, is_inplace = made.request.kind, made.template(rank).src == made.template(rank).result
    if kind not in PREFIXES:
        return False
    if rank == 0 and what.endswith("writes nothing" if is_inplace else "with what it gave as result"):
        return True
    return kind is OpKind.EXSCAN and rank == made.ranks[-1] and what.endswith("reads nothing")


@pytest.mark.parametrize("lacking", [False, True], ids=["native", "substitute"])
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_every_broken_plan_is_caught(kind: OpKind, world: int, lacking: bool) -> None:
    ops = tuple(op for op in ALL_OPS if not lacking or op != kind.value)
    if lacking and (kind not in SUBSTITUTES or kind is OpKind.BARRIER):
        return
    for request in _requests(kind, world, ops=ops):
        made = plan_part(request)
        verify(made)
        for what, wrong in _broken(made):
            with pytest.raises(InternalError):
                verify(wrong)
                pytest.fail(f"{request.kind} with root {request.root}: {what} was not caught")


def test_only_the_root_has_what_is_reduced_or_gathered() -> None:
    """A kernel may leave anything in what another rank calls its target."""
    request = _request(OpKind.ALLREDUCE, 3)
    made = plan_part(request)
    verify(made)
    with pytest.raises(InternalError, match="on rank 1"):
        verify(_everywhere(made, lambda step: (replace(step, kind=OpKind.REDUCE, peer=0),)))
    made = plan_part(_request(OpKind.ALLGATHER, 3))
    with pytest.raises(InternalError, match="on rank 0"):
        verify(_everywhere(made, lambda step: (replace(step, kind=OpKind.GATHER, peer=2),)))


def test_one_buffer_is_not_one_value_and_all_pieces_at_once() -> None:
    made = plan_part(_request(OpKind.ALLGATHER, 3))
    one = replace(made.templates[0], buffers=made.templates[0].buffers[:1], dst=-1, result=0)
    with pytest.raises(InternalError):
        verify(replace(made, templates=(replace(one, steps=(replace(one.steps[0], dst=0),)),)))


def test_a_source_that_is_no_operand_is_caught() -> None:
    made = plan_part(_request(OpKind.ALLREDUCE, 2, given=False))
    with pytest.raises(InternalError):
        verify(replace(made, templates=(replace(made.templates[0], src=1),)))
