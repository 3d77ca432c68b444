"""The workloads in examples/ do what they say, on small data; what their checks are made of can fail."""

from __future__ import annotations

import asyncio
import json
from functools import partial

import numpy as np
import pytest

from examples.workloads import embedding, evaluation, parameter_server
from examples.workloads.cartpole import CartPoles
from examples.workloads.report import Check, Report, Timing, compare


def told(report):
    """Asserts that all checks hold, and that each way was timed; gives the ways."""
    assert report.ok, report.text()
    ways = {way for timing in report.timings for way in timing.ms}
    assert all(set(timing.ms) == ways and min(timing.ms.values()) > 0 for timing in report.timings)
    assert json.loads(json.dumps(report.to_dict()))["timings"]
    return ways


# ---------------------------------------------------------------------------------------------- the programs


@pytest.mark.full
@pytest.mark.usefixtures("tidy")
def test_weights_reach_all_rollout_workers():
    pytest.importorskip("torch")
    from examples.workloads import weight_sync

    report = weight_sync.main(workers=2, rounds=10, runs=1, widths=[8], layers=2)

    assert len(told(report)) == 7
    assert {check.name for check in report.checks} >= {"a rollout sees, calls", "a rollout sees, captured"}


@pytest.mark.full
@pytest.mark.usefixtures("tidy")
def test_replicas_learn_the_same_as_one_process():
    pytest.importorskip("torch")
    from examples.workloads import torch_ddp

    report = torch_ddp.main(actors=2, steps=75, batch=51, runs=1, widths=[64])  # of each batch 26 and 25 images

    assert len(told(report)) == 5


@pytest.mark.full
@pytest.mark.usefixtures("tidy")
def test_a_sharded_optimizer_learns_the_same_as_a_whole_one():
    pytest.importorskip("torch")
    from examples.workloads import zero1

    report = zero1.main(actors=3, steps=20, runs=1, widths=[17])  # parts of unequal size

    assert len(told(report)) == 3


@pytest.mark.full
@pytest.mark.usefixtures("tidy")
def test_pipelines_compute_what_one_process_does():
    pytest.importorskip("torch")  # the gloo of ray.util.collective
    from examples.workloads import pipeline

    report = pipeline.main(stages=3, batches=5, runs=1, rows=[8])

    assert len(told(report)) == 7


@pytest.mark.usefixtures("tidy")
def test_gathered_scores_give_the_metrics_of_one_process():
    report = evaluation.main(actors=3, runs=1, rows=[100])

    assert len(told(report)) == 4


@pytest.mark.full
@pytest.mark.usefixtures("tidy")
def test_the_parameter_server_loses_no_update():
    report = parameter_server.main(workers=3, updates=25, slack=1, runs=1, features=[64])

    assert told(report) == set(parameter_server.WAYS)


@pytest.mark.full
@pytest.mark.usefixtures("tidy")
def test_a_sharded_table_is_as_good_as_a_whole_one():
    report = embedding.main(actors=4, rows=1003, runs=1, sizes=[64])  # shards of unequal size

    assert len(told(report)) == 3


@pytest.mark.full
@pytest.mark.usefixtures("tidy")
def test_engines_compute_what_the_trainer_does():
    pytest.importorskip("torch")
    from examples.workloads import megatron

    report = megatron.main(tp=2, steps=5, runs=1, width=32)

    assert len(told(report)) == 4


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.filterwarnings("ignore")  # RLlib's own
@pytest.mark.usefixtures("tidy")
def test_rllib_learns_the_same_with_our_weight_sync():
    pytest.importorskip("torch")
    pytest.importorskip("gymnasium")
    pytest.importorskip("tree")
    from examples.workloads import rllib

    report = rllib.main(runners=2, rounds=3, runs=1, widths=[64])

    assert len(told(report)) == 4


@pytest.mark.full
@pytest.mark.usefixtures("tidy")
def test_the_timeline_of_the_page_shows_plans_checks_and_kernels(tmp_path):
    pytest.importorskip("matplotlib")
    from examples import timeline

    timeline.record(tmp_path / "timeline.json")

    assert timeline.draw(tmp_path / "timeline.json", str(tmp_path / "timeline.png")) >= 3 + 9 + 9 + 9


# ---------------------------------------------------------------------------------------------- their parts


def test_report_shows_failed_checks():
    bad = Check(name="loss", found="rises", good=False)
    timing = Timing(what="1 MB", ms={"ours": 2.0, "theirs": 3.0})
    report = Report(title="title", unit="step", checks=(bad,), timings=(timing,))

    assert not report.ok
    assert timing.ratios == {"ours": 1.0, "theirs": 1.5}
    assert "NOT OK  loss" in report.text()
    assert "1.50 x" in report.text()
    assert report.to_dict()["checks"] == [{"name": "loss", "found": "rises", "good": False}]


def test_ways_are_timed_in_turns_of_drawn_order():
    calls = []

    spent = compare({name: partial(calls.append, name) for name in "abc"}, runs=9, warmup=1)

    turns = ["".join(calls[at : at + 3]) for at in range(0, len(calls), 3)]
    assert [sorted(turn) for turn in turns] == [["a", "b", "c"]] * 10
    assert len(set(turns)) > 1
    assert list(spent) == ["a", "b", "c"]


def test_a_pushed_cart_moves_as_the_equations_say():
    carts = CartPoles(2, np.random.default_rng(0))
    carts.states[...] = 0

    fallen = carts.step(np.array([1, 0]))

    turn = -(10 / 1.1) / (0.5 * (4 / 3 - 0.1 / 1.1))
    move = 10 / 1.1 - 0.05 * turn / 1.1
    np.testing.assert_allclose(carts.states[0], [0, 0.02 * move, 0, 0.02 * turn])
    np.testing.assert_allclose(carts.states[1], -carts.states[0])
    assert not fallen.any()
    assert [bool(carts.step(np.array([1, 0])).all()) for _ in range(20)][-1]


@pytest.mark.parametrize("slack", [0, 2])
def test_no_worker_exceeds_the_slack(slack):
    class Stalled:
        """Worker 0 does not move before it is told to."""

        def __init__(self):
            self.told = asyncio.Event()
            self.done = [0, 0, 0]

        async def begin(self, worker):
            if worker == 0:
                await self.told.wait()

        async def update(self, worker):
            self.done[worker] += 1

    async def scene():
        way = Stalled()
        running = asyncio.ensure_future(parameter_server.drive(way, 3, 10, slack))
        for _ in range(1000):  # more turns than all of it takes
            await asyncio.sleep(0)
        before = list(way.done)
        way.told.set()
        await running
        return before, way.done

    assert asyncio.run(scene()) == ([0, slack + 1, slack + 1], [10, 10, 10])


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_shards_without_ray_equal_the_whole_table(ranks):
    rows = 101
    shards = [embedding.Shard() for _ in range(ranks)]
    batches = embedding.strange_batches(ranks, rows)
    for rank, (shard, ids) in enumerate(zip(shards, batches, strict=True)):
        shard.begin(rank, ranks, rows)
        shard.set_ids(ids)
    table = embedding.make_rows(0, rows)

    def exchanged(pieces):
        return [list(column) for column in zip(*pieces, strict=True)]

    asked = exchanged([shard.requests() for shard in shards])
    answers = exchanged([shard.lookup(ids) for shard, ids in zip(shards, asked, strict=True)])
    found = [shard.assemble(rows) for shard, rows in zip(shards, answers, strict=True)]
    for shard, pieces in zip(shards, exchanged([shard.spread(2.0) for shard in shards]), strict=True):
        shard.collect(pieces)

    assert embedding.is_right(found, batches, table)
    expected = np.zeros_like(table)
    for ids in batches:
        np.add.at(expected, ids, 2 * table[ids])
    np.testing.assert_allclose(np.concatenate([shard.gradient for shard in shards]), expected, rtol=1e-5, atol=1e-6)
    found[0][0] += 1
    assert not embedding.is_right(found, batches, table)


def test_a_shared_module_is_the_module():
    torch = pytest.importorskip("torch")
    from examples.workloads import modules
    from examples.workloads.weight_sync import Transformer

    torch.manual_seed(0)
    module = Transformer(8, 2).eval()
    tokens = torch.arange(5)[None]
    before, held = module(tokens).detach(), modules.digest(modules.tensors(module))

    shared = modules.share(module)

    assert modules.digest(modules.tensors(module)) == held
    assert torch.equal(module(tokens), before)
    assert set(shared) == {"float32", "bfloat16", "int64"}
    assert module.output.weight is module.embedding.weight
    assert sum(map(torch.numel, shared.values())) == sum(map(torch.numel, modules.tensors(module).values()))
    shared["bfloat16"].zero_()
    shared["int64"] += 7
    assert not module.output.weight.any()
    assert int(module.version) == 7
    assert modules.digest(modules.tensors(module)) != held
    module.load_state_dict({name: torch.zeros_like(one) for name, one in module.state_dict().items()})
    assert not shared["int64"].any()


def test_gradients_of_parts_average_to_those_of_the_batch():
    torch = pytest.importorskip("torch")
    from examples.workloads import torch_ddp

    train, _ = torch_ddp.load()
    batch = (len(train.labels) - 1) // 3  # a fourth one has one image, which leaves two ranks with none

    def learner(rank, ranks):
        made = torch_ddp.Learner()
        made.begin(train, width=16, batch=batch, rank=rank, ranks=ranks)
        return made

    whole, parts = learner(0, 1), [learner(rank, 3) for rank in range(3)]
    for step in range(5):
        expected = whole.gradient()["float32"]
        found = [part.gradient()["float32"] for part in parts]
        torch.testing.assert_close(sum(found) / 3, expected, rtol=1e-4, atol=1e-7)
        assert [bool(one.any()) for one in found] == [True, step != 3, step != 3]
        for one in (whole, *parts):
            for gradients in one.gradients.values():
                gradients.copy_(expected)
            one.apply()
