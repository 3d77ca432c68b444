"""verl's workers on CPUs: trainers with a sharded model, and rollout workers that keep what they load."""

from __future__ import annotations

import asyncio
import os
import signal

import ray
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from verl.checkpoint_engine import CheckpointEngineManager, CheckpointEngineRegistry, CheckpointEngineWorker
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils.distributed import initialize_global_process_group_ray
from verl.utils.import_utils import import_external_libs
from verl.workers.config import CheckpointEngineConfig, HFModelConfig, RolloutConfig
from verl.workers.rollout import BaseRollout, RolloutReplica

BUCKET_MB = 1


def weights(version, scale=1):
    """Full tensors of several dtypes; one is larger than a bucket, and one has an odd length."""
    generator = torch.Generator().manual_seed(version)
    return {
        "embed": torch.randn(700 * scale, 512, generator=generator),
        "odd": torch.randint(0, 100, (3,), dtype=torch.uint8, generator=generator),
        **{f"layer.{i}": torch.randn(128 * scale, 256, generator=generator).bfloat16() for i in range(40)},
        "scalar": torch.tensor(float(version)),
    }


class Trainer(Worker):
    """As verl's trainer of FSDP: a parameter is gathered by all trainers when it is its turn."""

    def __init__(self, config, scale):
        super().__init__()
        initialize_global_process_group_ray(backend="cpu:gloo")
        import_external_libs(config.custom_backend_module)
        kwargs = {"is_master": True} if self.rank == 0 else {}
        kwargs.update(config.engine_kwargs.get(config.backend, {}))
        bucket_size = config.update_weights_bucket_megabytes << 20
        self.checkpoint_engine = CheckpointEngineRegistry.new(config.backend, bucket_size=bucket_size, **kwargs)
        self.mesh = init_device_mesh("cpu", (self.world_size,))
        self.scale = scale
        self.busy = asyncio.Lock()  # the next step is after the update, also if another rank fails first

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def train(self, version, fails=False, kills=0):
        """Makes the weights of a version, and what happens when half of them are sent."""
        async with self.busy:
            self._train(version, fails, kills)

    def _train(self, version, fails, kills):
        self.fails, self.kills = fails, kills
        self.params = {
            name: distribute_tensor(tensor, self.mesh, [Shard(0)]) if tensor.dim() else tensor
            for name, tensor in weights(version, self.scale).items()
        }

    def per_tensor_param(self):
        for name, param in self.params.items():
            if name == "layer.20" and self.fails:
                raise ValueError(name)
            if name == "layer.20" and self.kills and self.rank == 0:
                os.kill(self.kills, signal.SIGKILL)
            yield name, param.full_tensor() if hasattr(param, "full_tensor") else param

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps=None, mode="auto"):
        async with self.busy:
            return await self.checkpoint_engine.send_weights(self.per_tensor_param(), global_steps=global_steps) or {}

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    def execute_checkpoint_engine(self, method, *args, **kwargs):
        return getattr(self.checkpoint_engine, method)(*args, **kwargs)


class Adapter(BaseRollout):
    """A server adapter that loads into a dict."""

    replica_rank = 0
    is_leader_rank = True

    def __init__(self, config, model_config):
        super().__init__(config, model_config, device_mesh=None)
        self.loaded, self.global_steps = {}, None

    async def resume(self, tags):
        pass

    async def release(self):
        pass

    async def update_weights(self, weights, global_steps=None, **kwargs):
        async for name, weight in weights:
            self.loaded[name] = weight.clone()
        self.global_steps = global_steps


class Rollout(CheckpointEngineWorker):
    def __init__(self, rollout_config, model_config):
        super().__init__(rollout_config, model_config, Adapter(rollout_config, model_config))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def check(self, version, scale=1):
        """Whether the weights are those of a version, bit by bit."""
        expected, loaded = weights(version, scale), self.server_adapter.loaded
        return list(expected) == list(loaded) and all(torch.equal(loaded[name], expected[name]) for name in expected)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def pid_and_steps(self):
        return os.getpid(), self.server_adapter.global_steps


class Replica(RolloutReplica):
    """A replica of one worker, without a server."""

    def __init__(self, replica_rank, config, model_config, worker):
        super().__init__(replica_rank, config, model_config)
        self.workers = [worker]

    def get_ray_class_with_init_args(self):
        raise NotImplementedError

    async def launch_servers(self):
        raise NotImplementedError

    async def abort_all_requests(self, **kwargs):
        pass

    async def resume_generation(self):
        pass

    async def release_kv_cache(self):
        pass

    async def resume_kv_cache(self):
        pass


def group(cls, count, **kwargs):
    pool = RayResourcePool(process_on_nodes=[count], use_gpu=False, max_colocate_count=1)
    init = RayClassWithInitArgs(cls=ray.remote(cls), **kwargs)
    return RayWorkerGroup(resource_pool=pool, ray_cls_with_init=init, device_name="cpu", use_gpu=False)


class Job:
    """A trainer's group, rollout workers, each of them a replica, and verl's manager."""

    def __init__(
        self,
        folder,
        trainers,
        rollouts,
        backend="raycollect",
        module="raycollect.verl",
        scale=1,
        bucket_mb=BUCKET_MB,
        **engine_kwargs,
    ):
        self.config = CheckpointEngineConfig(
            backend=backend,
            update_weights_bucket_megabytes=bucket_mb,
            engine_kwargs={backend: engine_kwargs},
            custom_backend_module=module,
        )
        self.model_config = HFModelConfig(path=str(folder), load_tokenizer=False)
        self.rollout_config = RolloutConfig(name="vllm", checkpoint_engine=self.config)
        self.trainers = group(Trainer, trainers, config=self.config, scale=scale)
        self.rollouts, replicas = self.more(rollouts)
        self.manager = CheckpointEngineManager(self.config, self.trainers, replicas)

    def more(self, count):
        """Further rollout workers, and their replicas."""
        rollouts = group(Rollout, count, rollout_config=self.rollout_config, model_config=self.model_config)
        replicas = [
            Replica(rank, self.rollout_config, self.model_config, worker)
            for rank, worker in enumerate(rollouts.workers)
        ]
        return rollouts, replicas


def execute(workers, method):
    """Calls a method of each engine."""
    return ray.get(workers.execute_checkpoint_engine([method] * workers.world_size))
