"""What stands for vLLM's workers, for the model's source and for the client of an inference server, in tests."""

from __future__ import annotations

import importlib
import sys
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import torch

from tests.support import fake_vllm

SHAPES = {"embed": (50, 7), "layers.0.up": (33, 5), "layers.0.scale": (), "layers.0.none": (0, 3), "head": (4,)}
DTYPES = {"embed": "bfloat16", "layers.0.up": "float32", "layers.0.scale": "float32", "head": "int64"}

_mine: dict[str, Any] = {}
"""What this process has, as a worker."""


def values(version):
    """The tensors of a version: each element is its number."""
    return {
        name: torch.full(shape, version, dtype=getattr(torch, DTYPES.get(name, "float16")))
        for name, shape in SHAPES.items()
    }


def shown(state):
    return {
        name: (str(tensor.dtype), tuple(tensor.shape), tensor.float().unique().tolist())
        for name, tensor in state.items()
    }


# ---------------------------------------------------------------------------------------------- in a worker


def begin(rank, world_size):
    """Makes this process a worker of vLLM, as far as the engine sees it."""
    fake_vllm.install()
    vllm = importlib.import_module("raycollect.vllm")
    vllm.register()
    parallel = SimpleNamespace(data_parallel_index=0, world_size=world_size, rank=rank)
    config = SimpleNamespace(parallel_config=parallel, model_config="config")
    loaded: dict[str, Any] = {}
    model = SimpleNamespace(load_weights=loaded.update)
    make = fake_vllm.WeightTransferEngineFactory.create_engine
    _mine.update(engine=make(SimpleNamespace(backend="raycollect"), config, "cpu", model), loaded=loaded, version=None)


def end():
    _mine["engine"].shutdown()
    for name in ("raycollect.vllm", *fake_vllm.modules()):
        sys.modules.pop(name)


def init_weight_transfer_engine(init_info):
    _mine["engine"].init_transfer_engine(_mine["engine"].parse_init_info(init_info))


def start_weight_update():
    _mine["engine"].start_weight_update()


def update_weights(update_info):
    _mine["engine"].update_weights(update_info)


def finish_weight_update(weight_version):
    _mine["engine"].finish_weight_update()
    if weight_version is not None:
        _mine["version"] = weight_version


def look():
    """What is loaded, its label, and how many updates were begun and ended."""
    reload = sys.modules[fake_vllm.RELOAD]
    return shown(_mine["loaded"]), _mine["version"], len(reload.begun), len(reload.ended)


def spoil():
    """Flips a bit of the next message when it has landed."""
    group = _mine["engine"]._group
    broadcast = group.broadcast

    def spoiled(message):
        broadcast(message)
        message[3] ^= 1
        group.broadcast = broadcast

    group.broadcast = spoiled


# ---------------------------------------------------------------------------------------------- in the trainer


class Client(fake_vllm.VLLMWeightSyncClient):
    """Calls all workers, as a server of vLLM does."""

    def __init__(self, workers):
        self.workers = workers

    def _all(self, function, *args):
        calls = [worker.start(function, *args) for worker in self.workers]
        for call in calls:
            call.result(60)

    def init_weight_transfer_engine(self, init_info):
        self._all(init_weight_transfer_engine, init_info)

    def start_weight_update(self):
        self._all(start_weight_update)

    def update_weights(self, update_info):
        self._all(update_weights, update_info)

    def finish_weight_update(self, weight_version=None):
        self._all(finish_weight_update, weight_version)


class Source(fake_vllm.WeightSource):
    """Gives what `version` says, less the first few tensors, and more of them behind the last; counts its ends."""

    def __init__(self, version=0, leaves_out=0, more=()):
        self.version, self.leaves_out, self.more, self.given, self.ended = version, leaves_out, more, 0, 0

    @cached_property
    def metadata(self):
        return [fake_vllm.ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in values(0).items()]

    def iter_full(self):
        for name, tensor in list(values(self.version).items())[self.leaves_out :]:
            self.given += 1
            yield name, tensor
        yield from ((name, torch.zeros(3)) for name in self.more)
        self.ended += 1
