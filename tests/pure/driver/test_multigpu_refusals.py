"""What collectives of lists with a tensor of each GPU refuse, and what their plans are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from raycollect.backends import arrays
from raycollect.core.model import GroupSpec, Key, OpKind, ReduceOp
from raycollect.driver.dry_run import _Estimated
from raycollect.errors import (
    AliasError,
    AllocationError,
    InternalError,
    InvalidArgumentError,
    MismatchError,
    MissingMemberError,
    RefusedError,
    UnsupportedError,
)
from raycollect.planner import (
    CROSSINGS,
    GpuLists,
    Local,
    Made,
    Plan,
    Request,
    Role,
    brought,
    decode_program,
    encode_program,
    plan,
    plan_part,
)
from raycollect.planner.explain import explain
from raycollect.planner.ir import Part
from raycollect.planner.listed import listed
from raycollect.planner.verify import verify
from tests.pure import memberships
from tests.pure.driver.multigpu_calls import LISTS, Gpus, gpus, refused, values
from tests.pure.fleet import contain
from tests.pure.mixed import WORLD, host, same
from tests.pure.planner.test_operations import with_steps

__all__ = ["gpus"]  # fixtures


def test_all_ranks_have_as_many(gpus: Gpus) -> None:
    for kind in (OpKind.ALLREDUCE, OpKind.BROADCAST, OpKind.REDUCE, OpKind.ALLGATHER):
        lists = gpus.lists([0, 1])
        lists[1].append(gpus.put(values(1, 2, (5,)), 2))
        before = [host(row) for row in lists]
        root: dict[str, Any] = {"root": 0} if kind in (OpKind.BROADCAST, OpKind.REDUCE) else {}
        message = refused(gpus.run(kind, lists, **root), MismatchError)
        assert "rank 1" in message
        if kind is not OpKind.ALLGATHER:
            assert "3 GPUs" in message
        same(lists, before)
    gpus.must(OpKind.ALLREDUCE, gpus.lists([0, 1]))  # the group works on


BAD: dict[str, tuple[Callable[[Gpus, list[Any]], Any], type[RefusedError]]] = {
    "two on one GPU": (lambda gpus, mine: [mine[0], gpus.put(np.ones(5, "f4"), 0)], InvalidArgumentError),
    "no list": (lambda gpus, mine: mine[0], InvalidArgumentError),
    "a dict": (lambda gpus, mine: {"a": mine[0], "b": mine[1]}, InvalidArgumentError),
    "a list of lists": (lambda gpus, mine: [[one] for one in mine], InvalidArgumentError),
    "on the host": (lambda gpus, mine: [np.ones(5, "f4"), np.ones(5, "f4")], UnsupportedError),
    "one on the host": (lambda gpus, mine: [mine[0], np.ones(5, "f4")], UnsupportedError),
    "two shapes": (lambda gpus, mine: [mine[0], mine[1][:3]], MismatchError),
    "two dtypes": (lambda gpus, mine: [mine[0], gpus.put(np.ones(5, "i4"), 1)], MismatchError),
    "other shapes than the others'": (lambda gpus, mine: [one[:3] for one in mine], MismatchError),
    "other dtypes than the others'": (lambda gpus, mine: [gpus.put(np.ones(5), at) for at in range(2)], MismatchError),
    "self-overlapping": (lambda gpus, mine: [mine[0], repeated(gpus, 1)], AliasError),
}


def repeated(gpus: Gpus, device: int) -> Any:
    with gpus.cupy.cuda.Device(device):
        one = gpus.cupy.full(1, 1, np.float32)
        return gpus.cupy.ndarray((5,), one.dtype, memptr=one.data, strides=(0,))


@pytest.mark.parametrize(("change", "error"), BAD.values(), ids=BAD.keys())
def test_violation_on_one_rank_is_raised_on_all(
    gpus: Gpus, change: Callable[[Gpus, list[Any]], Any], error: type[RefusedError]
) -> None:
    lists = gpus.lists([0, 1])
    before = [host(row) for row in lists]
    given = [change(gpus, row) if rank == 1 else row for rank, row in enumerate(lists)]
    keys = gpus.fleet.keep_all(given)
    message = refused(gpus.fleet.run(OpKind.ALLREDUCE, keys, lists=LISTS), error)
    assert "rank 1" in message
    assert keys[1].hex()[:8] in message or error is MismatchError  # the consistency check's own words name no ref
    same(lists, before)
    assert gpus.fleet.dirty == [0] * WORLD
    gpus.must(OpKind.ALLREDUCE, lists)


def test_lists_of_lists_have_to_fit(gpus: Gpus) -> None:
    given = gpus.lists([0, 1])

    def room() -> list[list[Any]]:
        return [[gpus.put(np.zeros(5, "f4"), at) for _ in range(2 * WORLD)] for at in range(2)]

    changes: list[tuple[Callable[[list[Any]], Any], type[RefusedError]]] = [
        (lambda taken: taken[:1], InvalidArgumentError),
        (lambda taken: [taken[0], taken[1][:3]], InvalidArgumentError),
        (lambda taken: [taken[1], taken[0]], InvalidArgumentError),
        (lambda taken: [taken[0], taken[0]], InvalidArgumentError),
        (lambda taken: taken[0], InvalidArgumentError),
        (lambda taken: [taken[0], [*taken[1][:5], taken[1][0]]], AliasError),
        (lambda taken: [[*taken[0][:5], taken[0][5][:2]], taken[1]], MismatchError),
        (lambda taken: [[*taken[0][:5], np.zeros(5, "f4")], taken[1]], UnsupportedError),
    ]
    for change, error in changes:
        taken: list[Any] = [room() for _ in range(WORLD)]
        taken[2] = change(taken[2])
        assert "rank 2" in refused(gpus.run(OpKind.ALLGATHER, given, taken), error)
        same(taken[0], [[np.zeros(5)] * 2 * WORLD] * 2)
    taken = [room() for _ in range(WORLD)]
    taken[1][1][3] = given[1][1]
    assert "overlapping" in refused(gpus.run(OpKind.ALLGATHER, given, taken), AliasError)
    scattered = gpus.lists([1, 0])
    refused(gpus.run(OpKind.REDUCESCATTER, [room() for _ in range(WORLD)], scattered), InvalidArgumentError)
    gpus.must(OpKind.ALLGATHER, given, [room() for _ in range(WORLD)])


@pytest.mark.parametrize(
    ("dtype", "op"),
    [
        ("int32", ReduceOp.AVG),
        ("float32", ReduceOp.BAND),
        ("complex64", ReduceOp.MAX),
        (ml_dtypes.bfloat16, ReduceOp.SUM),
    ],
)
def test_a_reduction_without_a_meaning_is_refused(gpus: Gpus, dtype: Any, op: ReduceOp) -> None:
    lists = gpus.lists([0, 2], (3,), dtype)
    message = refused(gpus.run(OpKind.ALLREDUCE, lists, op=op), UnsupportedError)
    assert op.name in message
    assert message.count(op.name + " of") == WORLD  # once for each rank
    same(lists, [[values(rank, at, (3,), dtype) for at in range(2)] for rank in range(WORLD)])


@pytest.mark.parametrize(("kind", "index"), [(OpKind.REDUCE, "dst_tensor"), (OpKind.BROADCAST, "src_tensor")])
def test_indexes_have_to_be_there(gpus: Gpus, kind: OpKind, index: str) -> None:
    lists = gpus.lists([0, 1])
    where = GpuLists(**{index: 2})
    assert "one of 0 to 1" in refused(gpus.run(kind, lists, root=1, lists=where), InvalidArgumentError)
    gpus.must(kind, lists, root=1, lists=GpuLists(**{index: 1}))


def test_allocation_failure_is_raised_on_all_ranks(gpus: Gpus) -> None:
    lists = gpus.lists([0, 1], (1 << 12,))
    before = [host(row) for row in lists]
    fake = gpus.fake
    fake.limit(fake.allocated(2) + 1000, 2)
    outcomes = gpus.run(OpKind.ALLREDUCE, lists)
    fake.limit(1 << 40, 2)
    assert "on GPU 2" in refused(outcomes, AllocationError)
    same(lists, before)
    gpus.must(OpKind.ALLREDUCE, lists)


KINDS = (
    OpKind.ALLREDUCE,
    OpKind.REDUCE,
    OpKind.BROADCAST,
    OpKind.ALLGATHER,
    OpKind.REDUCESCATTER,
    OpKind.SEND,
)


def request_of(kind: OpKind, world: int = 3, *, is_made: bool = False, **more: Any) -> Request:
    """A request of lists, with what each rank can bring."""
    spec = GroupSpec(name="gpus", group_id="id", backend="nccl", world_size=world, memory="cuda")
    reduces = kind in (OpKind.ALLREDUCE, OpKind.REDUCE, OpKind.REDUCESCATTER)
    found = Request(
        kind=kind,
        group=spec,
        operands=(),
        op=ReduceOp.SUM if reduces else None,
        root=1 if kind in (OpKind.REDUCE, OpKind.BROADCAST, OpKind.SEND) else -1,
        peer=0 if kind is OpKind.SEND else -1,
        **({"lists": GpuLists(src_tensor=1, dst_tensor=2)} | more),
    )
    operands = [(r, src and ("in", r), None if is_made else dst and ("out", r)) for r, src, dst in brought(found, "x")]
    return replace(found, operands=tuple(operands))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_made", [False, True], ids=["given", "made"])
def test_programs_travel(kind: OpKind, is_made: bool) -> None:
    is_made = is_made and kind in (OpKind.ALLGATHER, OpKind.REDUCESCATTER)
    planned = plan([request_of(kind, is_made=is_made)])
    for position in range(len(planned.participants)):
        program = planned.program(position)
        assert decode_program(encode_program(program)) == program
        template = program.shares[0].template
        assert template.is_listed
        assert program.rounds == 1  # the shapes of all that is made follow from what the rank has
        for step in template.steps:  # kernels touch nothing that a user has
            touched = {index for index in (step.src, step.dst) if index >= 0}
            if isinstance(step.kind, OpKind):
                assert {template.buffers[index].role for index in touched} == {Role.HOME}


def _mutants(part: Part) -> Iterator[tuple[str, Part]]:
    for rank in part.ranks:
        steps = part.template(rank).steps
        for at, step in enumerate(steps):
            if step.kind in OpKind:
                continue
            yield f"no {step.kind} on {rank}", with_steps(part, rank, steps[:at] + steps[at + 1 :])
            wrong = [("src", replace(step, src_piece=step.src_piece + 1))]
            wrong.append(("dst", replace(step, dst_piece=step.dst_piece + 1)))
            if step.kind is not Local.SPREAD:
                other = Local.BRING if step.kind is Local.FOLD else Local.FOLD
                wrong.append((f"kind {other}", replace(step, kind=other, op=part.request.op)))
            if step.op is not None:
                wrong.append(("op", replace(step, op=ReduceOp.MAX)))
            for what, one in wrong:
                told = f"another {what} of {step.kind} on {rank}"
                yield told, with_steps(part, rank, (*steps[:at], one, *steps[at + 1 :]))


@pytest.mark.parametrize("kind", KINDS)
def test_every_broken_step_is_caught(kind: OpKind) -> None:
    part = plan_part(request_of(kind))
    verify(part, bitwise=False)
    mutants = list(_mutants(part))
    assert len(mutants) >= 6
    for name, mutant in mutants:
        with pytest.raises(InternalError):
            verify(mutant, bitwise=False)
            raise AssertionError(name)


def test_kernels_on_the_lists_themselves_are_caught() -> None:
    part = plan_part(request_of(OpKind.ALLREDUCE))
    (template,) = part.templates
    kernel = replace(template.steps[1], src=0, dst=0)
    for steps in ((kernel,), (template.steps[0], kernel, template.steps[2])):
        with pytest.raises(InternalError, match="on a list"):
            verify(replace(part, templates=(replace(template, steps=steps),)), bitwise=False)
    plain = plan_part(request_of(OpKind.ALLREDUCE, lists=None))
    (other,) = plain.templates
    with pytest.raises(InternalError, match="fold"):
        step = replace(other.steps[0], kind=Local.FOLD)
        verify(replace(plain, templates=(replace(other, steps=(step, *other.steps)),)), bitwise=False)


@pytest.mark.parametrize(("name", "kind"), [one for one in memberships.MADE if one[1] in KINDS])
def test_lists_go_by_other_algorithms_too(name: str, kind: OpKind) -> None:
    """None of them is cheaper on NCCL so far."""
    there = memberships.membership("aabbc", bitwise=False, backend="nccl")
    plain = memberships.request(kind, there)
    one = replace(plain, lists=LISTS)
    made = memberships.built(name, there, plain)
    assert made is not None
    part = listed(made, one)
    verify(part, bitwise=False)
    for rank in part.ranks:
        template = part.template(rank)
        kernels = [step for step in template.steps if step.kind not in CROSSINGS]
        assert [step.kind for step in kernels] == [step.kind for step in made.template(rank).steps]
        gives = kind is not OpKind.BROADCAST or rank == one.root
        first = [Local.FOLD if kind is OpKind.ALLREDUCE else Local.BRING] if gives else []
        assert [step.kind for step in template.steps if step not in kernels] == [*first, Local.SPREAD]


@pytest.mark.parametrize("kind", KINDS)
def test_another_backend_is_refused_before_anything_is_sent(kind: OpKind) -> None:
    one = request_of(kind)
    for backend in ("shm", "tcp", "gloo", "local", "torch:nccl"):
        with pytest.raises(UnsupportedError, match="nccl"):
            plan([replace(one, group=replace(one.group, backend=backend))])


def test_invalid_requests_are_refused_before_sending() -> None:
    for kind in (OpKind.GATHER, OpKind.ALLTOALL, OpKind.BARRIER):
        with pytest.raises(UnsupportedError, match="lists"):
            plan([replace(request_of(kind), root=0 if kind is OpKind.GATHER else -1)])
    for kind, index in [(OpKind.REDUCE, "dst_tensor"), (OpKind.BROADCAST, "src_tensor"), (OpKind.SEND, "src_tensor")]:
        with pytest.raises(InvalidArgumentError, match="0 or more"):
            plan([request_of(kind, lists=GpuLists(**{index: -1}))])
        with pytest.raises(InvalidArgumentError, match=index if kind is not OpKind.SEND else "gpu index"):
            plan([request_of(kind, lists=GpuLists(**{index: 1 << 70}))])
    with pytest.raises(InvalidArgumentError, match="there already"):
        plan([request_of(OpKind.SEND, is_made=True)])
    with pytest.raises(InvalidArgumentError, match="one tensor of a list"):
        plan([request_of(OpKind.REDUCE, inplace=False)])
    with pytest.raises(MissingMemberError):
        one = request_of(OpKind.ALLREDUCE)
        plan([replace(one, operands=one.operands[:2])])


def test_a_plan_can_be_explained(gpus: Gpus) -> None:
    held = [contain(row) for row in gpus.lists([2, 0, 3], (1000,))]
    infos = _infos(held[0].tensors)
    planned = plan([request_of(OpKind.ALLREDUCE), request_of(OpKind.ALLGATHER, is_made=True)])
    explained = explain(planned, dict.fromkeys(planned.uses(), infos))
    text = explained.explain()
    assert "allreduce_multigpu sum" in text
    assert "fold sum over the GPUs of the rank" in text
    assert "copy to the GPUs of the rank" in text
    first, second = explained.rows
    assert (first.tensors, first.nbytes) == (1, 4000)  # between ranks goes what one GPU each would send
    assert (first.scratch_nbytes, first.made_nbytes) == (8000, 0)
    assert (second.tensors, second.nbytes) == (3, 12000)
    assert (second.scratch_nbytes, second.made_nbytes) == (12 * 4000, 27 * 4000)
    for kind, words in [
        (OpKind.BROADCAST, ("tensor at place 1 to the group's GPU", "copy to the other GPUs")),
        (OpKind.REDUCE, ("copy to the tensor at place 2",)),
        (OpKind.SEND, ("the tensor on GPU 1", "copy to the tensor on GPU 2")),
        (OpKind.REDUCESCATTER, ("fold sum",)),
    ]:
        one = plan([request_of(kind)])
        many = infos if kind is not OpKind.REDUCESCATTER else tuple(info for info in infos for _ in range(9))
        text = explain(one, dict.fromkeys(one.uses(), many)).explain()
        assert f"{kind.value}_multigpu" in text
        assert all(word in text for word in words), text


def _infos(tensors: Sequence[Any]) -> Any:
    return tuple(map(arrays.describe, tensors))


def test_mismatches_are_predicted_from_handles(gpus: Gpus) -> None:
    def judged(planned: Plan, lists: dict[Any, Any]) -> None:
        held = {source: contain(one) for source, one in lists.items()}
        handles: Any = {
            source: SimpleNamespace(structure=one.structure, infos=_infos(one.tensors)) for source, one in held.items()
        }
        _Estimated(planned, handles).judge()

    rows = gpus.lists([0, 1])
    planned = plan([replace(request_of(OpKind.ALLREDUCE), operands=tuple((r, r, None) for r in range(WORLD)))])
    judged(planned, dict(enumerate(rows)))
    for change, error in BAD.values():
        if error is not AliasError:  # memory is not looked at
            with pytest.raises(error):
                judged(planned, {0: rows[0], 1: change(gpus, rows[1]), 2: rows[2]})
    chain = plan(
        [
            replace(request_of(OpKind.ALLGATHER), operands=tuple((r, r, None) for r in range(WORLD))),
            replace(request_of(OpKind.REDUCESCATTER), operands=tuple((r, Made(0), None) for r in range(WORLD))),
            replace(request_of(OpKind.ALLREDUCE), inplace=False, operands=tuple((r, r, None) for r in range(WORLD))),
            replace(request_of(OpKind.BROADCAST), operands=((0, None, 0), (1, Made(2), None), (2, None, 2))),
        ]
    )
    judged(chain, dict(enumerate(rows)))
    with pytest.raises(MismatchError):
        judged(chain, {0: rows[0], 1: rows[1], 2: [*rows[2], gpus.put(np.ones(5, "f4"), 2)]})


def test_keys_are_those_of_the_lists(gpus: Gpus) -> None:
    keys: list[Key] = gpus.fleet.keep_all(gpus.lists([0, 1]))
    planned = gpus.fleet.plan(OpKind.ALLREDUCE, keys, lists=LISTS)
    assert [planned.sources(at) for at in range(WORLD)] == [(key,) for key in keys]
    assert planned.uses() == dict.fromkeys(keys, True)
