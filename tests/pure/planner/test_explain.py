"""Explanations: what they say follows from the plan."""

from __future__ import annotations

import re
from importlib import import_module

import ml_dtypes  # noqa: F401 - numpy knows bfloat16 by it
import pytest

from raycollect.core.model import OpKind, ReduceOp
from raycollect.core.operations import PREFIXES
from raycollect.planner import Link, Made, Request, plan
from raycollect.planner.explain import explain, explain_step
from raycollect.planner.report import MOST_ACTORS
from tests.pure.planner.explained import (
    allreduce,
    broadcast,
    captured,
    distant,
    each,
    gathering,
    info,
    membership,
    methods,
    mixed,
    native,
    on,
    overlapping,
    send,
    told,
)
from tests.support.values import replace


def test_sizes_of_what_is_made_follow_from_the_operations():
    there = membership([0] * 3)
    gather = Request(kind=OpKind.GATHER, group=there.spec, root=1, operands=each(there, lambda r: ("x", r)))
    taken = ((0, None, None), (1, None, None), (2, ("y", 2), None))
    scatter = Request(kind=OpKind.SCATTER, group=there.spec, root=2, operands=taken)
    requests = [
        gathering(OpKind.ALLGATHER, there),
        gather,
        scatter,
        Request(kind=OpKind.REDUCESCATTER, group=there.spec, operands=each(there, lambda r: ("y", r)), op=ReduceOp.SUM),
        gathering(OpKind.ALLTOALL, there, "y"),
        allreduce(there, inplace=False),
        send(there, 0, 1),
        Request(kind=OpKind.ALLREDUCE, group=there.spec, operands=each(there, lambda _: Made(3)), op=ReduceOp.SUM),
        Request(kind=OpKind.ALLREDUCE, group=there.spec, operands=each(there, lambda _: Made(4)), op=ReduceOp.SUM),
    ]
    rows = told(requests, there, {"x": info(10), "y": info(30)}).rows
    assert [row.made_nbytes for row in rows] == [120, 120, 40, 40, 120, 40, 40, 0, 0]
    assert [row.nbytes for row in rows] == [40, 40, 120, 120, 120, 40, 40, 40, 120]
    assert [row.tensors for row in rows[-2:]] == [1, 3]


def test_what_an_operand_holds_has_to_be_known():
    there = membership([0] * 2)
    with pytest.raises(KeyError):
        explain(plan([allreduce(there)], [there]), {("x", 0): info(5)})


def test_copies_of_tensors_that_lie_elsewhere_count_as_memory():
    requests = [allreduce(membership([0] * 4), "x"), gathering(OpKind.ALLGATHER, membership([0] * 4), "y")]
    there = membership([0] * 4)
    there = replace(there, spec=replace(there.spec, memory="cpu"))
    requests = [replace(one, group=there.spec) for one in requests]
    held = {("x", rank): on("cuda:0", 1 << 20) if rank % 2 else info(1 << 20) for rank in range(4)}
    held |= {("y", rank): on("cuda:1", 8) if rank == 1 else info(8) for rank in range(4)}
    found = explain(plan(requests, [there] * 2), held)
    assert found.memory.stand_ins == (4 << 20) + 32 + 4 * 32
    assert "stand-ins" in found.explain()
    assert "stand-ins" not in native().explain()
    made_of = membership([0] * 2, backend="half", ops=[OpKind.REDUCE, OpKind.SCATTER])
    made_of = replace(made_of, spec=replace(made_of.spec, memory="cpu"))
    asked = replace(gathering(OpKind.REDUCESCATTER, made_of), op=ReduceOp.SUM)
    found = explain(plan([asked], [made_of]), {("x", rank): on("cuda:0", 8) for rank in range(2)})
    assert found.memory.stand_ins == 32 + 32 + 16, "of the root: what it gives, the sums, and its own"


def test_what_can_not_be_cut_is_refused():
    there = membership([0] * 3)
    planned = plan([gathering(OpKind.ALLTOALL, there)], [there])
    with pytest.raises(ValueError, match="can't be cut into 3 pieces"):
        explain(planned, {("x", rank): info(10) for rank in range(3)})


def test_the_cheaper_algorithm_is_taken_from_its_size_on_and_the_times_say_so():
    there = distant()
    choices = plan([broadcast(there)], [there]).parts[0].choices
    assert [one.name for one in choices] == ["native", "tree", "native"]
    limit = choices[2].at_least
    for size, name in ((1, "tree"), (limit // 4 - 1, "tree"), (limit // 4, "native"), (limit, "native")):
        (row,) = told([broadcast(there)], there, {"x": info(size)}).rows
        side, other = ("below", "native") if name == "tree" else ("from", "tree")
        assert row.algorithm == name
        found = re.fullmatch(rf"cheaper {side} 46.88 KiB( on)?: ([0-9.]+) ms against ([0-9.]+) ms by {other}", row.why)
        assert found is not None
        assert float(found[2]) <= float(found[3])


def test_an_algorithm_that_is_the_cheapest_at_any_size_is_told_so():
    there = distant()
    planned = plan([broadcast(there)], [there])
    (part,) = planned.parts
    always = replace(
        part, choices=part.choices[:2], templates=tuple(replace(one, others=one.others[:1]) for one in part.templates)
    )
    base = tuple(replace(one, base=one.base[:2]) for one in planned.order)
    (row,) = explain(replace(planned, parts=(always,), order=base), {("x", 0): info(1 << 20)}).rows
    assert re.fullmatch(r"cheaper at any size: [0-9.]+ ms against [0-9.]+ ms by native", row.why)


def test_why_there_is_one_way():
    (lonely,) = native().rows
    assert lonely.why == "the only one here"
    there = membership([0] * 2, backend="half", ops=[OpKind.GATHER, OpKind.BROADCAST])
    (made_of,) = told([gathering(OpKind.ALLGATHER, there)], there, {"x": info(3)}).rows
    assert made_of.why == "backend half has no allgather: broadcast and gather instead"
    assert [len(steps) for _, steps in made_of.acts] == [2, 2]


def test_bits_are_told_of_reductions_only():
    assert native().rows[0].bits == "the left fold in rank order"
    there = membership([0] * 2, backend="gloo", bitwise=False)
    assert told([allreduce(there)], there, {"x": info(1)}).rows[0].bits == "equal on all ranks"
    there = membership([0, 0, 1, 1], backend="gloo", bitwise=False)
    there = replace(there, spec=replace(there.spec, hosts=(0, 0, 1, 1)))
    assert told([allreduce(there)], there, {"x": info(1)}).rows[0].bits == "equal on all ranks"
    assert {row.bits for row in mixed().rows if row.op.startswith(("send", "broadcast"))} == {""}


def test_between_hosts_of_several_ranks_only_scans_are_told_to_fold_in_rank_order():
    there = membership([0, 0, 1, 1], backend="tcp", bitwise=False)
    there = replace(there, spec=replace(there.spec, hosts=(0, 0, 1, 1)))
    bits = {
        kind: told([replace(allreduce(there), kind=kind)], there, {"x": info(9)}).rows[0].bits
        for kind in (OpKind.ALLREDUCE, *PREFIXES)
    }
    assert bits.pop(OpKind.ALLREDUCE) == "the left fold over hosts, in rank order inside each"
    assert set(bits.values()) == {"the left fold in rank order"}


def test_calls_that_share_a_participant_run_one_after_the_other():
    found = overlapping()
    bundles = {row.bundle: row.time_s for row in found.rows}
    assert found.time_s == pytest.approx(sum(bundles.values()))
    assert found.agreement == "the controller"


def test_independent_groups_run_side_by_side():
    left, right = membership([0, 0], name="left"), membership([0, 0], name="right", first=2)
    both = told([allreduce(left), allreduce(right, "y")], [left, right], {"x": info(1000), "y": info(1000)})
    alone = told([allreduce(left)], left, {"x": info(1000)})
    assert both.time_s == pytest.approx(alone.time_s)


def test_what_links_cost_and_who_says_so_is_told():
    there = membership([0, 0, 1, 1, 2])
    named = Link(latency_s=1e-3, bandwidth=2e7, source="from the file")
    there = replace(there, topology=replace(there.topology, between=named))
    inside, between = told([allreduce(there)], there, {"x": info(1)}).links
    assert (inside.place, inside.source) == ("inside", "assumed")
    assert (between.place, between.source) == ("between", "from the file")
    assert "1 ms and 0.02 GB/s, from the file" in told([allreduce(there)], there, {"x": info(1)}).explain()
    alone = membership([0, 1])
    assert [one.place for one in told([allreduce(alone)], alone, {"x": info(1)}).links] == ["between"]


def test_a_thousand_ranks_are_told_in_few_lines():
    there = membership([host for host in range(128) for _ in range(8)], backend="gloo", bitwise=False)
    shown = told([broadcast(there, 7)], there, {"x": info(1 << 20)}).explain()
    assert "ranks 0-1023: " in shown
    assert len(shown.splitlines()) < 30
    assert max(map(len, shown.splitlines())) < 200


@pytest.mark.parametrize(
    ("backend", "module", "chunks"),
    [
        ("shm", "shm.staged", 2),
        ("tcp", "tcp.run", 6),
        ("gloo", "gloo.communicator", 3),
        ("torch:gloo", "torch_dist.run", 4),
    ],
)
def test_the_chunks_of_a_backend_are_those_that_it_says(backend, module, chunks):
    if backend.startswith("torch:"):
        pytest.importorskip("torch")
    there = membership([0] * 2, backend=backend)
    memory = told([allreduce(there)], there, {"x": info(1)}).memory
    expected = chunks * import_module(f"raycollect.backends.{module}").CHUNK_NBYTES
    assert memory.chunks == (("default", expected),)


def test_a_stage_is_as_the_plan_alone_but_for_its_numbers():
    there = membership([0, 0, 1, 1], backend="tcp")
    requests = [broadcast(there, 1, "a"), allreduce(there, "a"), allreduce(there, "b")]
    held = {"a": info(100), "b": info(7)}
    (_, stage) = explain_step([(methods(0, ("begin", 3)), 0), captured(3, requests, there, held)], 4).stages
    alone = told(requests, there, held)
    moved = [replace(row, call=row.call - 3, after=tuple(one - 3 for one in row.after)) for row in stage.rows]
    assert tuple(moved) == alone.rows
    assert (stage.time_s, stage.memory, stage.launches) == (alone.time_s, alone.memory, alone.launches)


@pytest.mark.parametrize("count", [1, MOST_ACTORS, MOST_ACTORS + 3])
def test_many_actors_of_a_method_are_counted(count):
    shown = explain_step([(methods(0, ("gradient", count)), 0)], count).explain()
    assert (f"and {count - MOST_ACTORS} more" in shown) == (count > MOST_ACTORS)
    assert shown.count("Trainer<") == min(count, MOST_ACTORS)
