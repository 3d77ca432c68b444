"""The checkpoint engine in the real verl, on CPUs: its manager, its worker groups and its rollout workers.

`make test-verl` installs verl into an environment of its own; elsewhere these tests are skipped.
"""

from __future__ import annotations

import json

import pytest

pytest.importorskip("verl", exc_type=ImportError)

import ray

from raycollect import errors
from tests.verl.workers import Job, execute

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]

CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8, "num_attention_heads": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    ray.init(num_cpus=16, include_dashboard=False, log_to_driver=False)
    yield folder
    ray.shutdown()


@pytest.fixture(scope="module")
def job(folder):
    return Job(folder, 2, 2, backend="flipping", module="tests.verl.flipping")


def steps(rollouts):
    return [steps for _, steps in rollouts.pid_and_steps()]


def test_all_rollout_workers_load_the_same_bits_and_the_trainer_has_a_receipt(job):
    for version in (1, 2, 3):
        job.trainers.train(version)
        metrics = job.manager.update_weights(global_steps=version)
        assert job.rollouts.check(version) == [True, True]
        assert steps(job.rollouts) == [version, version]

        receipt, none = execute(job.trainers, "receipt")
        assert none is None
        assert receipt.version.number == version
        assert [rank.rank for rank in receipt.ranks] == [1, 2]
        assert receipt.ranks[0].digests == receipt.ranks[1].digests
        assert metrics["checkpoint_engine/payload_mbytes"] * 2 * (1 << 20) == receipt.nbytes
        assert execute(job.rollouts, "receipt")[1].ranks == receipt.ranks


def test_no_rollout_worker_loads_an_update_of_which_one_has_other_bits(job):
    job.trainers.train(1)
    job.manager.update_weights(global_steps=1)
    ray.get(job.rollouts.workers[1].execute_checkpoint_engine.remote("flip"))
    job.trainers.train(2)
    with pytest.raises(errors.VersionNotWholeError) as raised:
        job.manager.update_weights(global_steps=2)
    assert raised.value.cause.rank == 2  # Ray's error is of both classes
    assert job.rollouts.check(1) == [True, True]
    job.manager.update_weights(global_steps=2)
    assert job.rollouts.check(2) == [True, True]


def test_an_update_whose_source_fails_is_not_loaded(job):
    job.trainers.train(1)
    job.manager.update_weights(global_steps=1)
    job.trainers.train(2, fails=True)
    with pytest.raises((ValueError, errors.VersionNotWholeError), match="layer"):  # of the trainer, or of a worker
        job.manager.update_weights(global_steps=2)
    assert job.rollouts.check(1) == [True, True]
    job.trainers.train(2)
    job.manager.update_weights(global_steps=2)
    assert job.rollouts.check(2) == [True, True]


def test_replicas_come_and_die(job):
    more, replicas = job.more(1)
    job.manager.add_replicas(replicas)
    job.trainers.train(4)
    job.manager.update_weights(global_steps=4)
    assert [*job.rollouts.check(4), *more.check(4)] == [True] * 3

    ((pid, _),) = more.pid_and_steps()
    job.trainers.train(5, kills=pid)
    with pytest.raises((ray.exceptions.RayActorError, errors.RaycollectError)):
        job.manager.update_weights(global_steps=5)
    assert job.rollouts.check(4) == [True, True]

    job.manager.remove_replicas(replicas)
    job.trainers.train(5)
    job.manager.update_weights(global_steps=5)
    assert job.rollouts.check(5) == [True, True]


def test_trainers_gather_all_weights_when_an_update_fails_early(folder):
    job = Job(folder, 2, 1, scale=16)  # some ten buckets follow
    more, replicas = job.more(1)
    job.manager.add_replicas(replicas)
    job.trainers.train(1)
    job.manager.update_weights(global_steps=1)
    ((pid, _),) = more.pid_and_steps()
    job.trainers.train(2, kills=pid)
    with pytest.raises((ray.exceptions.RayActorError, errors.RaycollectError)):
        job.manager.update_weights(global_steps=2)
    job.manager.remove_replicas(replicas)
    for version in (3, 4):
        job.trainers.train(version)
        job.manager.update_weights(global_steps=version)
        assert job.rollouts.check(version, 16) == [True]


def test_buckets_are_loaded_as_they_come(folder):
    job = Job(folder, 1, 1, whole=False, transport="tcp")
    for version in (1, 2):
        job.trainers.train(version)
        job.manager.update_weights(global_steps=version)
        assert job.rollouts.check(version) == [True]
