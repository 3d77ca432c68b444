"""Groups of actors that other parts of Ray start: Ray Train, Ray Tune, placement groups."""

from __future__ import annotations

import json
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

import raycollect as col
from raycollect import errors
from tests.support.actors import Buffers, filled


@pytest.fixture
def signals():
    """Ray Tune takes Ctrl-C for itself, and never gives it back."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


GroupWorker = ray.remote(Buffers)


@ray.remote(num_cpus=0, max_concurrency=4)
class Meeting:
    """Lets those who come go on when all are there."""

    def __init__(self, count):
        self.barrier = threading.Barrier(count)

    def come(self):
        self.barrier.wait(60)


# ---------------------------------------------------------------------------------------------- Ray Train


def train_together(config):
    """What each worker of a training run does."""
    import ray.train

    context = ray.train.get_context()
    rank, world_size = context.get_world_rank(), context.get_world_size()
    col.init_collective_group(world_size, rank, group_name="train")
    gradient = np.full(5, rank + 1.0, np.float32)
    for _ in range(config["steps"]):
        col.allreduce(gradient, "train")
    found = [np.zeros(1, np.int64) for _ in range(world_size)]
    col.allgather(found, np.full(1, rank), "train")
    col.destroy_collective_group("train")
    said = {"sum": float(gradient[0]), "ranks": [int(one[0]) for one in found]}
    Path(config["folder"], f"{rank}.json").write_text(json.dumps(said), encoding="utf-8")


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:`use_.*` is deprecated:DeprecationWarning")  # Ray Data, of its own defaults
def test_workers_of_ray_train_make_a_group_of_their_own(cluster, tmp_path):
    from ray.train import RunConfig, ScalingConfig
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer  # that of TorchTrainer, without torch

    trainer = DataParallelTrainer(
        train_together,
        train_loop_config={"steps": 2, "folder": str(tmp_path)},
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(name="train", storage_path=str(tmp_path / "results")),
    )

    result = trainer.fit()

    assert result.error is None
    said = [json.loads((tmp_path / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(2)]
    assert said == [{"sum": 6.0, "ranks": [0, 1]}] * 2  # (1 + 2) * 2


def train_with_torch(config):
    """What each worker of a training run of torch does; it names no package but torch."""
    import torch
    from ray.train.torch import prepare_model

    torch.manual_seed(0)
    model = prepare_model(torch.nn.Linear(4, 1))
    rank = torch.distributed.get_rank()
    model(torch.full((2, 4), rank + 1.0)).sum().backward()
    said = [torch.distributed.get_backend(), model.module.weight.grad.tolist()]
    Path(config["folder"], f"{rank}.json").write_text(json.dumps(said), encoding="utf-8")


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:`use_.*` is deprecated:DeprecationWarning")
def test_a_torch_trainer_selects_the_backend_by_name(cluster, tmp_path):
    pytest.importorskip("torch")
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    trainer = TorchTrainer(
        train_with_torch,
        train_loop_config={"folder": str(tmp_path)},
        torch_config=TorchConfig(backend="raycollect"),
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(name="torch", storage_path=str(tmp_path / "results")),
    )

    result = trainer.fit()

    assert result.error is None
    said = [json.loads((tmp_path / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(2)]
    assert said == [["raycollect", [[3.0] * 4]]] * 2  # the mean of 2 and 4


# ---------------------------------------------------------------------------------------------- Ray Tune


def try_together(config):
    """What each trial does: it drives a group of its own actors."""
    from ray import tune

    workers = [GroupWorker.options(num_cpus=0).remote() for _ in range(2)]
    group = col.declare_collective_group(workers, group_name="trial")
    ray.get(config["meeting"].come.remote())  # both trials have a group of that name
    refs = filled(workers, [config["value"], 10 * config["value"]])
    col.allreduce_refs(refs, "trial")
    members = sorted(member.pid for member in group.status().members)
    ray.get(config["meeting"].come.remote())
    found = [int(array[0]) for array in col.get(refs)]
    col.destroy_collective_group("trial")
    tune.report({"found": found, "members": members})


@pytest.mark.full
def test_trials_of_ray_tune_have_groups_of_one_name(cluster, tmp_path, signals):
    from ray import tune

    meeting = Meeting.remote(2)
    tuner = tune.Tuner(
        tune.with_resources(try_together, {"cpu": 1}),
        param_space={"value": tune.grid_search([1, 2]), "meeting": meeting},
        run_config=tune.RunConfig(name="tune", storage_path=str(tmp_path), verbose=0),
    )

    results = tuner.fit()

    assert not results.errors
    assert {one.config["value"]: one.metrics["found"] for one in results} == {1: [11, 11], 2: [22, 22]}
    first, second = (set(one.metrics["members"]) for one in results)
    assert not first & second


# ---------------------------------------------------------------------------------------------- placement groups


class Leader(Buffers):
    """Starts members of its own, and drives them."""

    @col.by_value
    def lead(self, count):
        from ray.util import get_current_placement_group

        workers = [GroupWorker.options(num_cpus=0).remote() for _ in range(count)]
        homes = ray.get([worker.call.remote(lambda _: get_current_placement_group().id.hex()) for worker in workers])
        col.declare_collective_group(workers, group_name="led")
        refs = filled(workers, range(count))
        col.allreduce_refs(refs, "led")
        sums = [float(array[0]) for array in col.get(refs)]
        col.destroy_collective_group("led")
        return homes, sums


@pytest.fixture(params=[pytest.param("STRICT_PACK", marks=pytest.mark.full), "SPREAD"])
def placed(request, tidy):
    """A placement group of two bundles."""
    made = placement_group([{"CPU": 1}, {"CPU": 1}], strategy=request.param)
    ray.get(made.ready(), timeout=60)
    yield made
    remove_placement_group(made)


def in_bundles(cls, placed):
    """An actor in each bundle, whose own actors are placed there, too."""
    return [
        ray.remote(cls)
        .options(
            num_cpus=1,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placed, placement_group_bundle_index=index, placement_group_capture_child_tasks=True
            ),
        )
        .remote()
        for index in range(placed.bundle_count)
    ]


def test_members_in_a_placement_group(placed):
    workers = in_bundles(Leader, placed)
    col.declare_collective_group(workers)
    refs = filled(workers, [1, 2])

    col.allreduce_refs(refs)

    assert [array.tolist() for array in col.get(refs)] == [[3.0] * 7] * 2
    homes, sums = ray.get(workers[0].lead.remote(2))  # a member that drives a group of children, in the same place
    assert homes == [placed.id.hex()] * 2
    assert sums == [1.0, 1.0]

    remove_placement_group(placed)

    with pytest.raises((errors.ParticipantDiedError, errors.GroupBrokenError), match="Leader"):
        while True:  # Ray ends them in its own time: until then they work
            col.allreduce_refs(refs)
