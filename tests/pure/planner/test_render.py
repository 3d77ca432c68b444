"""Explanations: what they say follows from the plan, and their text and HTML are as kept in `tests/golden`.

`RAYCOLLECT_UPDATE_GOLDEN=1` rewrites these files; read the difference before you keep it.
"""

from __future__ import annotations

import html.parser
import json
import os
import random
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import ml_dtypes  # noqa: F401 - numpy knows bfloat16 by it
import numpy as np
import pytest

from raycollect.core.model import GroupSpec, OpKind, ReduceOp, TensorInfo
from raycollect.planner import GpuLists, Inner, Link, Made, Request, Roster, Topology, plan
from raycollect.planner.explain import Planned, explain, explain_step
from raycollect.planner.fusion import PACKED_UP_TO_NBYTES, buckets, offered
from raycollect.planner.pricing import packing
from raycollect.planner.render import MOST_ACTORS, MOST_ACTS
from raycollect.planner.report import Invoked, Methods
from raycollect.planner.sizes import Sizes
from raycollect.planner.wording import nbytes_words, ranks_words, seconds_words

GOLDEN = Path(__file__).parents[2] / "golden"

# ---------------------------------------------------------------------------------------------- plans


def group(name, count, backend="shm", ops=None):
    given = {} if ops is None else {"ops": tuple(one.value for one in ops)}
    return GroupSpec(name=name, group_id=f"id of {name}", backend=backend, world_size=count, **given)


def roster(hosts, *, name="default", backend="shm", bitwise=True, inner=False, ops=None, first=0):
    """A group whose rank r is on host ``hosts[r]``; its members are named by their numbers from `first` on."""
    topology = Topology.of(
        hosts, inside=Link(latency_s=1e-5, bandwidth=8e9), between=Link(latency_s=5e-5, bandwidth=1e9)
    )
    spec = group(name, len(hosts), backend, ops)
    members = tuple(f"member {first + rank}" for rank in range(len(hosts)))
    groups = [topology.on(host) for host in range(topology.host_count)]
    leaders = tuple(ranks[0] for ranks in groups)
    made = {
        "hosts": tuple(
            Inner(spec=group(f"{name}/host-{host}", len(ranks)), ranks=ranks) for host, ranks in enumerate(groups)
        ),
        "leaders": Inner(spec=group(f"{name}/leaders", len(leaders), backend), ranks=leaders),
    }
    return Roster(spec=spec, members=members, topology=topology, bitwise=bitwise, **(made if inner else {}))


def info(size, dtype="float32", itemsize=4):
    return (TensorInfo(shape=(size,), dtype=dtype, itemsize=itemsize),)


def each(there, source):
    """The operands of an operation to which every rank gives one."""
    return tuple((rank, source(rank), None) for rank in range(there.spec.world_size))


def allreduce(there, tag="x", op=ReduceOp.SUM, **more):
    return Request(kind=OpKind.ALLREDUCE, group=there.spec, operands=each(there, lambda r: (tag, r)), op=op, **more)


def gathering(kind, there, tag="x"):
    return Request(kind=kind, group=there.spec, operands=each(there, lambda r: (tag, r)))


def broadcast(there, root=0, tag="x"):
    operands = [(r, (tag, r), None) if r == root else (r, None, (tag, r)) for r in range(there.spec.world_size)]
    return Request(kind=OpKind.BROADCAST, group=there.spec, operands=tuple(operands), root=root)


def send(there, root, peer, tag="x", into=None):
    operands = sorted([(root, (tag, root), None), (peer, None, into)])
    return Request(kind=OpKind.SEND, group=there.spec, operands=tuple(operands), root=root, peer=peer)


def told(requests, rosters, held, **more):
    """The explanation of a plan in which a source ``(tag, rank)`` holds ``held[tag]``."""
    rosters = rosters if isinstance(rosters, list) else [rosters] * len(requests)
    planned = plan(requests, rosters, **more)
    return explain(planned, {source: held[source[0]] for source in planned.uses()})


def native():
    there = roster([0] * 4)
    return told([allreduce(there)], there, {"x": info(1 << 18)})


def fused():
    there = roster([0] * 4)
    tags = ["a", "b", "c", "d", "large"]
    held = {tag: info(1000 + at) for at, tag in enumerate(tags)} | {"large": info(1 << 20)}
    return told([allreduce(there, tag) for tag in tags], there, held)


def hierarchical():
    there = roster([0] * 3 + [1] * 3 + [2] * 2, backend="gloo", bitwise=False, inner=True)
    return told([allreduce(there)], there, {"x": info(1 << 24)})


def in_order():
    there = roster([0] * 3 + [1] * 3 + [2] * 2, backend="tcp", inner=True)
    requests = [broadcast(there, 4, "large"), broadcast(there, 0, "small")]
    return told(requests, there, {"large": info(1 << 24), "small": info(10)})


def mixed():
    there = roster([0, 0, 1, 1], backend="tcp")
    requests = [
        broadcast(there, 1, "weights"),
        send(there, 0, 3, "message"),
        allreduce(there, "loss", ReduceOp.MAX),
        send(there, 3, 2, "message", ("answer", 2)),
    ]
    held = {"weights": info(1 << 20), "message": info(7), "loss": info(1, "float64", 8), "answer": info(7)}
    return told(requests, there, held)


def pairwise():
    there = roster([0] * 3, backend="sends_only", ops=[OpKind.SEND, OpKind.RECV])
    return told([gathering(OpKind.ALLTOALL, there)], there, {"x": info(300)})


def ring():
    there = roster([0, 0, 1], backend="sends_only", ops=[OpKind.SEND, OpKind.RECV])
    return told([gathering(OpKind.ALLGATHER, there)], there, {"x": info(300)})


def dependent():
    there = roster([0] * 2)
    pieces = Request(kind=OpKind.ALLREDUCE, group=there.spec, operands=each(there, lambda _: Made(0)), op=ReduceOp.MIN)
    requests = [
        gathering(OpKind.ALLGATHER, there),
        pieces,
        allreduce(there, inplace=False),
        replace(pieces, operands=each(there, lambda _: Made(2)), op=ReduceOp.PRODUCT),
        broadcast(there, 1),
    ]
    return told(requests, there, {"x": info(12, "float16", 2)})


def overlapping():
    left, right = roster([0, 0], name="left <&>"), roster([0, 0], name="right", first=1)
    requests = [broadcast(left, 0, at) for at in range(100)] + [broadcast(right, 1, at) for at in range(100, 150)]
    return told(requests, [left] * 100 + [right] * 50, {at: info(1024) for at in range(150)}, staging=100 << 10)


def on(device, size, library="cupy"):
    return (replace(info(size)[0], device=device, library=library),)


def working_in(memory, there):
    """The same group, and those inside it, with a backend that works in some memory."""
    inner = [replace(one, spec=replace(one.spec, memory=memory)) for one in there.hosts]
    leaders = there.leaders and replace(there.leaders, spec=replace(there.leaders.spec, memory=memory))
    return replace(there, spec=replace(there.spec, memory=memory), hosts=tuple(inner), leaders=leaders)


def brought():
    there = working_in("cpu", roster([0] * 4))
    requests = [allreduce(there, "gradient"), gathering(OpKind.ALLGATHER, there, "loss"), send(there, 1, 0, "row")]
    planned = plan(requests, [there] * 3)
    held = {("gradient", rank): on(device, 1 << 20) for rank, device in enumerate(["cuda:0", "cuda:1", "cuda:0"])}
    held |= {("gradient", 3): info(1 << 20), ("row", 1): info(300)}
    held |= {("loss", rank): on("cuda:0", 8) if rank == 2 else info(8) for rank in range(4)}
    return explain(planned, held)


def several_gpus():
    """Lists with a tensor of each of two GPUs; some outputs are made, and the group works on one of the GPUs."""
    there = working_in("cuda", roster([0] * 2, backend="nccl", bitwise=False))
    lists = GpuLists(src_tensor=1, dst_tensor=1)
    requests = [
        replace(allreduce(there, "gradient"), lists=lists),
        replace(broadcast(there, 1, "weights"), lists=lists),
        replace(gathering(OpKind.ALLGATHER, there, "loss"), lists=lists),
        replace(send(there, 0, 1, "row", ("row", 1)), lists=lists),
    ]
    held = {name: on("cuda:0", size) + on("cuda:1", size) for name, size in [("gradient", 1 << 20), ("loss", 8)]}
    held |= {name: on("cuda:0", size) + on("cuda:1", size) for name, size in [("weights", 1 << 18), ("row", 300)]}
    return told(requests, there, held)


PLANS = {
    one.__name__: one
    for one in (
        native,
        fused,
        hierarchical,
        in_order,
        mixed,
        pairwise,
        ring,
        dependent,
        overlapping,
        brought,
        several_gpus,
    )
}


def methods(first, *names, after=()):
    """A call of each method of each of some actors."""
    each = [(f"Trainer<{at}>", name) for name, count in names for at in range(count)]
    return Methods(
        calls=tuple(
            Invoked(call=first + at, actor=actor, method=name, after=after if at < names[0][1] else ())
            for at, (actor, name) in enumerate(each)
        )
    )


def captured(first, requests, there, held, fixed=0):
    planned = plan(requests, [there] * len(requests))
    return Planned(plan=planned, given={source: held[source[0]] for source in planned.uses()}, first=first, fixed=fixed)


def step():
    there = roster([0] * 6, name="digits")
    asked = [gathering(OpKind.ALLGATHER, there), allreduce(there, "x", ReduceOp.MAX)]
    stages = [
        methods(0, ("gradient", 6)),
        captured(6, [allreduce(there, tag) for tag in "ab"], there, {"a": info(650), "b": info(10)}),
        methods(8, ("apply", 6), ("loss", 2), after=(6,)),
        captured(16, asked, there, {"x": info(1 << 16)}, fixed=6),
    ]
    return explain_step(stages, 6)


def methods_only():
    return explain_step([replace(methods(0, ("count", 1)), fixed=1)], 1)


STEPS = {one.__name__: one for one in (step, methods_only)}
SHOWN = {**PLANS, **STEPS}


# ---------------------------------------------------------------------------------------------- golden files


@pytest.mark.parametrize("form", ["txt", "html"])
@pytest.mark.parametrize("name", SHOWN)
def test_it_is_shown_as_it_was(name, form):
    found = SHOWN[name]()
    shown = found.explain() if form == "txt" else found._repr_html_()
    path = GOLDEN / f"{name}.{form}"
    if os.environ.get("RAYCOLLECT_UPDATE_GOLDEN"):
        path.write_text(shown, encoding="utf-8")
        pytest.skip(f"{path.name} was rewritten")
    assert shown == path.read_text(encoding="utf-8")


def test_every_golden_file_has_its_plan():
    assert {path.name for path in GOLDEN.iterdir()} == {f"{name}.{form}" for name in SHOWN for form in ("txt", "html")}


@pytest.mark.parametrize("name", SHOWN)
def test_text_is_ascii_and_has_no_loose_ends(name):
    lines = SHOWN[name]().explain().split("\n")
    assert "".join(lines).isascii()
    assert lines == [line.rstrip() for line in lines]
    assert lines[-1] == ""


class Page(html.parser.HTMLParser):
    """Checks that tags are closed in order, and keeps the text."""

    def __init__(self):
        super().__init__()
        self.open, self.text = [], []

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


@pytest.mark.parametrize("name", SHOWN)
def test_html_is_well_formed_and_what_the_user_named_is_escaped(name):
    shown = SHOWN[name]()._repr_html_()
    page = Page()
    page.feed(shown)
    page.close()
    assert page.open == []
    assert "<&>" not in shown
    if name == "overlapping":
        assert any("left <&>" in text for text in page.text)
    if name in STEPS:
        assert any("Trainer<0>" in text for text in page.text)
        assert "<0>" not in shown


@pytest.mark.parametrize("name", SHOWN)
def test_it_becomes_json_and_a_short_repr(name):
    found = SHOWN[name]()
    assert json.loads(json.dumps(found.to_dict())) == found.to_dict()
    assert len(repr(found)) < 150
    assert str(found) == found.explain()


@pytest.mark.parametrize("name", PLANS)
def test_its_rows_are_in_the_dict_and_its_name_in_the_repr(name):
    found = PLANS[name]()
    assert found.to_dict()["rows"][0]["algorithm"] == found.rows[0].algorithm
    assert found.name in repr(found)


# ---------------------------------------------------------------------------------------------- what it says


def test_rows_are_the_calls_in_their_order():
    found = mixed()
    assert [row.call for row in found.rows] == [0, 1, 2, 3]
    assert [row.op for row in found.rows] == [
        "broadcast from rank 1",
        "send from rank 0 to rank 3",
        "allreduce max",
        "send from rank 3 to rank 2",
    ]
    assert [row.nbytes for row in found.rows] == [4 << 20, 28, 8, 28]


def test_sizes_of_what_is_made_follow_from_the_operations():
    there = roster([0] * 3)
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


def test_uneven_pieces_are_counted_by_the_rank_that_gives_most():
    there = roster([0] * 2)
    planned = plan([gathering(OpKind.ALLGATHER, there)], [there])
    found = explain(planned, {("x", 0): info(5), ("x", 1): info(9)})
    assert (found.rows[0].nbytes, found.rows[0].made_nbytes) == (36, 56)


def test_what_an_operand_holds_has_to_be_known():
    there = roster([0] * 2)
    with pytest.raises(KeyError):
        explain(plan([allreduce(there)], [there]), {("x", 0): info(5)})


def test_what_ranks_bring_to_where_the_backend_works_is_told_by_rank():
    rows = brought().rows
    kib = 1 << 10
    assert [(one.ranks, one.device, one.nbytes_there, one.nbytes_back) for one in rows[0].brought] == [
        ((0, 2), "cuda:0", 4096 * kib, 4096 * kib),
        ((1,), "cuda:1", 4096 * kib, 4096 * kib),
    ]
    assert [(one.ranks, one.nbytes_there, one.nbytes_back) for one in rows[1].brought] == [((2,), 32, 4 * 32)]
    assert rows[2].brought == ()
    assert brought().memory.stand_ins == 4096 * kib + 32 + 4 * 32


def test_what_lies_in_the_host_is_brought_to_a_backend_on_gpus_where_nothing_is_packed():
    there = working_in("cuda", roster([0] * 3, backend="nccl", bitwise=False))
    requests = [allreduce(there, tag) for tag in "ab"] + [broadcast(there, 2, "c")]
    planned = plan(requests, [there] * 3)
    given = {source: info(100) if source[1] == 1 else on("cuda:0", 100) for source in planned.uses()}
    rows = explain(planned, given).rows
    assert [row.packed[0] for row in rows] == [0, 0, 0]
    for row, (there_nbytes, back) in zip(rows, [(400, 400), (400, 400), (0, 400)], strict=True):
        (only,) = row.brought
        assert (only.ranks, only.device, only.memory) == ((1,), "cpu", "cuda")
        assert (only.nbytes_there, only.nbytes_back) == (there_nbytes, back)
    assert "rank 1 from the host's memory to its GPU: 0 B, and 400 B back" in explain(planned, given).explain()


def test_each_step_of_an_algorithm_brings_what_it_works_on():
    there = working_in("cpu", roster([0] * 3 + [1] * 3, backend="gloo", bitwise=False, inner=True))
    planned = plan([allreduce(there)], [there])
    found = explain(planned, {("x", rank): on("cuda:0", 1 << 24) for rank in range(6)})
    assert found.rows[0].algorithm == "hierarchical"
    whole = 1 << 26
    assert {one.ranks: (one.nbytes_there // whole, one.nbytes_back // whole) for one in found.rows[0].brought} == {
        (0, 3): (3, 2),
        (1, 2, 4, 5): (1, 1),
    }


def test_nothing_is_told_to_be_brought_where_the_backend_takes_tensors_wherever_they_are():
    there = roster([0] * 2)
    found = explain(plan([allreduce(there)], [there]), {("x", rank): on("cuda:0", 9) for rank in range(2)})
    assert found.rows[0].brought == ()
    assert "stand-ins" not in found.explain()


def test_what_can_not_be_cut_is_refused():
    there = roster([0] * 3)
    planned = plan([gathering(OpKind.ALLTOALL, there)], [there])
    with pytest.raises(ValueError, match="can't be cut into 3 pieces"):
        explain(planned, {("x", rank): info(10) for rank in range(3)})


def test_the_cheaper_algorithm_is_taken_from_its_size_on_and_the_times_say_so():
    there = roster([0] * 3 + [1] * 3 + [2] * 3, backend="gloo", bitwise=False, inner=True)
    choices = plan([allreduce(there)], [there]).parts[0].choices
    assert len(choices) > 1
    limit = choices[1].at_least
    for size, name in ((limit // 4 - 1, "native"), (-(-limit // 4), choices[1].name), (limit, choices[-1].name)):
        (row,) = told([allreduce(there)], there, {"x": info(size)}).rows
        assert row.algorithm == name
        assert row.way.time_s == min(way.time_s for way in row.ways)


def test_narrow_floats_do_not_take_what_folds_by_steps():
    there = roster([0] * 3 + [1] * 3, backend="gloo", bitwise=False, inner=True)
    (wide,) = told([allreduce(there)], there, {"x": info(1 << 26)}).rows
    (narrow,) = told([allreduce(there)], there, {"x": info(1 << 27, "float16", 2)}).rows
    assert (wide.algorithm, narrow.algorithm) == ("hierarchical", "native")
    assert "less than 32 bits" in narrow.why


def test_calls_of_a_bundle_choose_by_their_bytes_together():
    there = roster([0] * 3 + [1] * 3, backend="gloo", bitwise=False, inner=True)
    limit = plan([allreduce(there)], [there]).parts[0].choices[1].at_least
    held = {tag: info(limit // 8 // 4) for tag in range(9)}
    alone = told([allreduce(there, 0)], there, held).rows
    many = told([allreduce(there, tag) for tag in range(9)], there, held).rows
    assert {row.algorithm for row in alone} == {"native"}
    assert {row.algorithm for row in many} == {"hierarchical"}


def test_why_there_is_one_way():
    (lonely,) = native().rows
    assert lonely.why == "the only one here"
    there = roster([0] * 2, backend="half", ops=[OpKind.GATHER, OpKind.BROADCAST])
    (made_of,) = told([gathering(OpKind.ALLGATHER, there)], there, {"x": info(3)}).rows
    assert made_of.why == "backend half has no allgather: broadcast and gather instead"
    assert [len(act.steps) for act in made_of.acts] == [2, 2]


def test_bits_are_told_of_reductions_only():
    assert native().rows[0].bits == "the left fold in rank order"
    assert hierarchical().rows[0].bits == "equal on all ranks"
    assert {row.bits for row in mixed().rows if row.op.startswith(("send", "broadcast"))} == {""}


def test_dependencies_are_told():
    assert [row.after for row in dependent().rows] == [(), (0,), (), (2,), (0, 2)]


def test_times_go_on_where_all_who_take_part_are_free():
    found = overlapping()
    ends = {}
    for lane in found.lanes:
        for one, other in zip(lane.bars, lane.bars[1:], strict=False):
            assert one.ends_s <= other.begins_s
        for position in lane.participants:
            ends[position] = lane.bars[-1].ends_s
    assert sorted(ends) == [0, 1, 2]
    assert found.time_s == max(ends.values())
    assert found.door == "the controller"


def test_independent_groups_run_side_by_side():
    left, right = roster([0, 0], name="left"), roster([0, 0], name="right", first=2)
    both = told([allreduce(left), allreduce(right, "y")], [left, right], {"x": info(1000), "y": info(1000)})
    alone = told([allreduce(left)], left, {"x": info(1000)})
    assert both.time_s == pytest.approx(alone.time_s)
    assert len(both.lanes) == 2


def test_many_parts_of_ranks_are_counted():
    there = roster([0] * 9, backend="sends_only", ops=[OpKind.SEND, OpKind.RECV])
    found = told([gathering(OpKind.ALLTOALL, there)], there, {"x": info(9)})
    assert len(found.rows[0].acts) > MOST_ACTS
    assert f"and {len(found.rows[0].acts) - MOST_ACTS} more parts" in found.explain()


def test_a_thousand_ranks_are_told_in_few_lines():
    there = roster([host for host in range(128) for _ in range(8)], backend="gloo", bitwise=False, inner=True)
    shown = told([broadcast(there)], there, {"x": info(1 << 20)}).explain()
    assert "0, 8, 16" in shown
    assert ", ...:" in shown
    assert len(shown.splitlines()) < 30
    assert max(map(len, shown.splitlines())) < 200


@pytest.mark.parametrize(
    ("backend", "module", "chunks"),
    [
        ("shm", "shm.staged", 2),
        ("tcp", "tcp.run", 6),
        ("gloo", "gloo.communicator", 8),
        ("torch:gloo", "torch_dist.run", 4),
    ],
)
def test_the_chunks_of_a_backend_are_those_that_it_says(backend, module, chunks):
    if backend.startswith("torch:"):
        pytest.importorskip("torch")
    there = roster([0] * 2, backend=backend)
    memory = told([allreduce(there)], there, {"x": info(1)}).memory
    expected = chunks * import_module(f"raycollect.backends.{module}").CHUNK_NBYTES
    assert memory.chunks == (("default", expected),)


# ---------------------------------------------------------------------------------------------- captured steps


def test_the_calls_of_a_step_are_numbered_over_all_stages():
    found = step()
    gradient, summed, applied, asked = found.stages
    assert [call.call for call in gradient.calls] == list(range(6))
    assert [row.call for row in summed.rows] == [6, 7]
    assert [call.call for call in applied.calls] == list(range(8, 16))
    assert [row.call for row in asked.rows] == [16, 17]
    assert asked.rows[1].after == (16,)
    assert {call.after for call in applied.calls} == {(6,), ()}
    assert (found.calls, found.participants) == (18, 6)
    assert sorted(call for lane in asked.lanes for bar in lane.bars for call in bar.calls) == [16, 17]


def test_a_stage_is_as_the_plan_alone_but_for_its_numbers():
    there = roster([0, 0, 1, 1], backend="tcp")
    requests = [broadcast(there, 1, "a"), allreduce(there, "a"), allreduce(there, "b")]
    held = {"a": info(100), "b": info(7)}
    (_, stage) = explain_step([methods(0, ("begin", 3)), captured(3, requests, there, held)], 4).stages
    alone = told(requests, there, held)
    moved = [replace(row, call=row.call - 3, after=tuple(one - 3 for one in row.after)) for row in stage.rows]
    assert tuple(moved) == alone.rows
    assert (stage.time_s, stage.memory, stage.launches) == (alone.time_s, alone.memory, alone.launches)


def test_a_step_takes_what_its_plans_take():
    found = step()
    plans = [found.stages[1], found.stages[3]]
    assert found.time_s == pytest.approx(sum(one.time_s for one in plans))
    assert found.launches == sum(one.launches for one in plans)
    assert found.nbytes_inside == sum(one.nbytes_inside for one in plans)
    assert found.memory.outputs == sum(one.memory.outputs for one in plans) > 0
    assert found.memory.packing == max(one.memory.packing for one in plans)
    assert found.memory.chunks == (("digits", 2 << 20),)


def test_a_step_of_methods_alone_needs_no_launch():
    found = methods_only()
    assert (found.launches, found.time_s, found.memory.outputs, found.memory.chunks) == (0, 0.0, 0, ())
    assert "launches" not in found.explain()


@pytest.mark.parametrize("count", [1, MOST_ACTORS, MOST_ACTORS + 3])
def test_many_actors_of_a_method_are_counted(count):
    shown = explain_step([methods(0, ("gradient", count))], count).explain()
    assert (f"and {count - MOST_ACTORS} more" in shown) == (count > MOST_ACTORS)
    assert shown.count("Trainer<") == min(count, MOST_ACTORS)


# ---------------------------------------------------------------------------------------------- packing


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_each_tensor_is_packed_or_run_together_or_goes_alone(seed, backend):
    rng = random.Random(seed)
    staging = rng.choice([0, 100, 1 << 12, 100 << 10, 32 << 20])
    limit = PACKED_UP_TO_NBYTES
    sizes = [
        (rng.choice(["float32", "int8"]), rng.choice([0, 4, 60, 4096, limit - 1, limit, limit + 1]))
        for _ in range(rng.randrange(60))
    ]
    found = packing(OpKind.ALLREDUCE, backend, sizes, staging)
    large = set(offered([nbytes for _, nbytes in sizes])) if backend == "shm" else set()
    rest = [one for at, one in enumerate(sizes) if at not in large]
    packed = [bucket for bucket in buckets(rest, staging) if len(bucket) > 1]
    assert (found.kernels, found.tensors, found.together) == (len(packed), sum(map(len, packed)), len(large))
    assert found.nbytes == max((sum(rest[at][1] for at in bucket) for bucket in packed), default=0) <= staging


def test_large_tensors_of_one_machine_are_told_to_run_together():
    there = roster([0] * 2, backend="shm")
    requests = [allreduce(there, tag) for tag in "abcd"]
    found = told(requests, there, {"a": info(10), "b": info(1 << 20), "c": info(10_000), "d": info(20)})
    assert {(row.packed, row.together) for row in found.rows} == {((2, 4, 1), 2)}
    assert "2 of 4 tensors with one meeting of the ranks" in found.explain()


def test_without_staging_nothing_is_packed():
    there = roster([0] * 2)
    requests = [allreduce(there, tag) for tag in "ab"]
    held = {tag: info(10) for tag in "ab"}
    assert [row.packed for row in told(requests, there, held).rows] == [(2, 2, 1)] * 2
    assert [row.packed for row in told(requests, there, held, staging=0).rows] == [(0, 2, 0)] * 2


# ---------------------------------------------------------------------------------------------- wording


@pytest.mark.parametrize(
    ("nbytes", "words"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (1048572, "1 MiB"),
        (5 << 20, "5 MiB"),
        (3 << 40, "3 TiB"),
    ],
)
def test_bytes_in_words(nbytes, words):
    assert nbytes_words(nbytes) == words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0, "0 us"), (1.5e-7, "0.15 us"), (3.1e-3, "3.1 ms"), (0.99999e-3, "1 ms"), (12e-6, "12 us"), (75.0, "75 s")],
)
def test_seconds_in_words(seconds, words):
    assert seconds_words(seconds) == words


@pytest.mark.parametrize(
    ("ranks", "words"),
    [((), ""), ((3,), "3"), ((0, 1), "0-1"), ((0, 1, 2, 5, 7, 8), "0-2, 5, 7-8"), (tuple(range(1024)), "0-1023")],
)
def test_ranks_in_words(ranks, words):
    assert ranks_words(ranks) == words


def test_kernels_that_are_not_packed_cost_their_start():
    there = roster([0] * 2)
    requests = [allreduce(there, tag) for tag in range(10)]
    held = {tag: info(10) for tag in range(10)}
    packed, loose = told(requests, there, held), told(requests, there, held, staging=0)
    assert loose.time_s > 5 * packed.time_s


PIECED = (OpKind.ALLGATHER, OpKind.GATHER, OpKind.SCATTER, OpKind.REDUCESCATTER, OpKind.ALLTOALL)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kind", [OpKind.ALLREDUCE, *PIECED])
def test_the_staging_of_a_tensor_is_what_the_executor_counts(kind, seed):
    from raycollect.engine.fusion_buffer import Item, size_of

    rng = random.Random(seed)
    count = rng.randrange(2, 6)
    there = roster([0] * count)
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
    assert Sizes(plan([request], [there]), held).staged(0) == [("float32", expected)]


@pytest.mark.parametrize(
    "dtype", ["float16", "bfloat16", "float8_e4m3fn", "float32", "float64", "int8", "int16", "bool"]
)
def test_narrow_floats_are_those_that_are_folded_wider(dtype):
    from raycollect.backends import folds

    there = roster([0] * 3 + [1] * 3, backend="gloo", bitwise=False, inner=True)
    itemsize = np.dtype(dtype).itemsize
    (row,) = told([allreduce(there)], there, {"x": info((1 << 28) // itemsize, dtype, itemsize)}).rows
    assert (row.algorithm == "native") == folds.is_widened(np.dtype(dtype))
