"""Explanations: what they say follows from the plan."""

from __future__ import annotations

import random
from importlib import import_module

import ml_dtypes  # noqa: F401 - numpy knows bfloat16 by it
import numpy as np
import pytest

from raycollect.core.model import OpKind, ReduceOp
from raycollect.core.operations import PARTIAL_FOLDS
from raycollect.engine.fusion_buffer import Item, size_of
from raycollect.planner import Link, Made, Request, plan
from raycollect.planner.explain import explain
from raycollect.planner.report import MOST_ACTORS
from raycollect.planner.sizes import Sizes
from raycollect.planner.wording import counted, nbytes_words, ranks_words, seconds_words
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
    step_of,
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
    assert found.memory.device_staging == (4 << 20) + 32 + 4 * 32
    made_of = membership([0] * 2, backend="half", ops=[OpKind.REDUCE, OpKind.SCATTER])
    made_of = replace(made_of, spec=replace(made_of.spec, memory="cpu"))
    asked = replace(gathering(OpKind.REDUCESCATTER, made_of), op=ReduceOp.SUM)
    found = explain(plan([asked], [made_of]), {("x", rank): on("cuda:0", 8) for rank in range(2)})
    assert found.memory.device_staging == 32 + 32 + 16, "of the root: what it gives, the sums, and its own"


def test_what_can_not_be_cut_is_refused():
    there = membership([0] * 3)
    planned = plan([gathering(OpKind.ALLTOALL, there)], [there])
    with pytest.raises(ValueError):
        explain(planned, {("x", rank): info(10) for rank in range(3)})


def test_the_cheaper_algorithm_is_taken_from_its_size_on():
    there = distant()
    choices = plan([broadcast(there)], [there]).parts[0].choices
    assert [one.name for one in choices] == ["native", "tree", "native"]
    limit = choices[2].at_least
    for size, name in ((1, "tree"), (limit // 4 - 1, "tree"), (limit // 4, "native"), (limit, "native")):
        (row,) = told([broadcast(there)], there, {"x": info(size)}).rows
        assert row.algorithm == name


def test_a_substitute_has_the_steps_of_its_kernels():
    there = membership([0] * 2, backend="half", ops=[OpKind.GATHER, OpKind.BROADCAST])
    (made_of,) = told([gathering(OpKind.ALLGATHER, there)], there, {"x": info(3)}).rows
    assert made_of.acts == (((0, 1), ("gather to rank 0", "broadcast from rank 0")),)


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
        for kind in (OpKind.ALLREDUCE, *PARTIAL_FOLDS)
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
    assert inside == ("inside", there.topology.inside)
    assert (between, between[1].source) == (("between", named), "from the file")
    alone = membership([0, 1])
    assert [place for place, _ in told([allreduce(alone)], alone, {"x": info(1)}).links] == ["between"]


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
    (_, stage) = step_of((methods(0, ("begin", 3)), 0), captured(3, requests, there, held)).stages
    alone = told(requests, there, held)
    moved = [replace(row, call=row.call - 3, after=tuple(one - 3 for one in row.after)) for row in stage.rows]
    assert tuple(moved) == alone.rows
    assert (stage.time_s, stage.memory, stage.launches) == (alone.time_s, alone.memory, alone.launches)


@pytest.mark.parametrize("count", [1, MOST_ACTORS, MOST_ACTORS + 3])
def test_many_actors_of_a_method_are_counted(count):
    shown = step_of((methods(0, ("gradient", count)), 0)).explain()
    assert (f"and {count - MOST_ACTORS} more" in shown) == (count > MOST_ACTORS)
    assert shown.count("Trainer<") == min(count, MOST_ACTORS)


def test_large_tensors_of_one_machine_are_told_to_run_together():
    there = membership([0] * 2, backend="shm")
    requests = [allreduce(there, tag) for tag in "abcd"]
    found = told(requests, there, {"a": info(10), "b": info(1 << 20), "c": info(10_000), "d": info(20)})
    assert {(row.packed, row.together) for row in found.rows} == {((2, 4, 1), 2)}


WORDS = {
    nbytes_words: {0: "0 B", 1023: "1023 B", 1024: "1 KiB", 1536: "1.5 KiB", 1048572: "1 MiB", 3 << 40: "3 TiB"},
    seconds_words: {0: "0 us", 1.5e-7: "0.15 us", 3.1e-3: "3.1 ms", 0.99999e-3: "1 ms", 12e-6: "12 us", 75.0: "75 s"},
    ranks_words: {(): "", (3,): "3", (0, 1): "0-1", (0, 1, 2, 5, 7, 8): "0-2, 5, 7-8"},
    lambda pair: counted(*pair): {
        (1, "box"): "1 box",
        (2, "box"): "2 boxes",
        (0, "process"): "0 processes",
        (3, "call"): "3 calls",
    },
}


@pytest.mark.parametrize(("words", "cases"), WORDS.items())
def test_quantities_and_ranks_in_words(words, cases):
    assert {value: words(value) for value in cases} == cases


def test_kernels_that_are_not_packed_cost_their_start():
    there = membership([0] * 2)
    requests = [allreduce(there, tag) for tag in range(10)]
    held = {tag: info(10) for tag in range(10)}
    packed, loose = told(requests, there, held), told(requests, there, held, staging=0)
    assert loose.time_s > 5 * packed.time_s


PIECED = (OpKind.ALLGATHER, OpKind.GATHER, OpKind.SCATTER, OpKind.REDUCESCATTER, OpKind.ALLTOALL)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kind", [OpKind.ALLREDUCE, *PIECED])
def test_the_staging_of_a_tensor_is_what_the_executor_counts(kind, seed):
    rng = random.Random(seed)
    count = rng.randrange(2, 6)
    there = membership([0] * count)
    sizes = [rng.randrange(50) for _ in range(count)]  # of the piece of, or for, each rank
    in_pieces = kind in PIECED[2:]
    whole = tuple(info(size)[0] for size in sizes)
    held = {("x", rank): whole if in_pieces else info(sizes[rank] if kind in PIECED else 7) for rank in range(count)}
    rooted = kind in (OpKind.GATHER, OpKind.SCATTER)
    operands = tuple((r, None if kind is OpKind.SCATTER and r else ("x", r), None) for r in range(count))
    op = ReduceOp.SUM if kind in (OpKind.ALLREDUCE, OpKind.REDUCESCATTER) else None
    request = Request(kind=kind, group=there.spec, operands=operands, op=op, root=0 if rooted else -1)
    array = np.empty(7, np.float32)
    expected = size_of(kind, Item((array,), (array,), max(sizes)) if kind in PIECED else Item(array, array), count)
    assert Sizes(plan([request], [there]), held).packed(0) == [("float32", expected)]
