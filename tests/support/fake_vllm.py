"""vLLM's weight transfer interface as far as an engine meets it, for tests without vLLM.

`INTERFACE` has what vLLM's own modules say, recorded from the release that its `source` names;
`tests/pure/weights/test_vllm.py` compares these classes with it.
"""

from __future__ import annotations

import json
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

BASE = "vllm.distributed.weight_transfer.base"
FACTORY = "vllm.distributed.weight_transfer.factory"
RELOAD = "vllm.model_executor.model_loader.reload"
INTERFACE = json.loads((Path(__file__).parents[1] / "pure/weights/vllm_interface.json").read_text())


@dataclass(frozen=True)
class ParamMeta:
    name: str
    dtype: Any
    shape: tuple[int, ...]
    owners: tuple[int, ...] | None = field(default=None, kw_only=True)
    mesh_shape: tuple[int, ...] | None = field(default=None, kw_only=True)
    placements: tuple[Any, ...] | None = field(default=None, kw_only=True)


class WeightSource(ABC):
    @property
    @abstractmethod
    def metadata(self): ...

    def owned_names(self, rank):
        return [one.name for one in self.metadata if one.owners is None or rank in one.owners]

    def implements_iter_full(self):
        return type(self).iter_full is not WeightSource.iter_full

    def implements_iter_local(self):
        return type(self).iter_local is not WeightSource.iter_local

    def iter_full(self):
        raise NotImplementedError

    def iter_local(self):
        raise NotImplementedError


@dataclass
class WeightTransferInitInfo(ABC):  # noqa: B024
    pass


@dataclass
class TrainerInitInfo:
    backend: ClassVar[str]

    rank: int = field(kw_only=True)

    @property
    def is_sender(self):
        return self.rank == 0


@dataclass
class WeightTransferUpdateInfo(ABC):  # noqa: B024
    pass


class WeightTransferEngine(ABC):
    init_info_cls: Any
    update_info_cls: Any
    supports_draft_weight_update: bool = True
    defers_processing: bool = False

    def drain_pending(self):
        return None

    def __init__(self, config, vllm_config, device, model):
        self.config, self.vllm_config, self.device, self.model = config, vllm_config, device, model
        self.parallel_config, self.model_config = vllm_config.parallel_config, vllm_config.model_config
        self._default = model, self.model_config

    def set_weight_update_target(self, model, model_config):
        self.model, self.model_config = model, model_config

    def reset_weight_update_target(self):
        self.model, self.model_config = self._default

    def parse_init_info(self, init_dict):
        return self.init_info_cls(**init_dict)

    def parse_update_info(self, update_dict):
        return self.update_info_cls(**update_dict)

    @abstractmethod
    def init_transfer_engine(self, init_info): ...

    @abstractmethod
    def start_weight_update(self): ...

    @abstractmethod
    def finish_weight_update(self): ...

    def update_weights(self, update_info):
        self.receive_weights(self.parse_update_info(update_info))

    @abstractmethod
    def receive_weights(self, update_info): ...

    @abstractmethod
    def shutdown(self): ...


class VLLMWeightSyncClient:
    def init_weight_transfer_engine(self, init_info): ...

    def start_weight_update(self): ...

    def update_weights(self, update_info): ...

    def finish_weight_update(self, weight_version=None): ...


class TrainerWeightTransferEngine(ABC):
    init_info_cls: Any

    def __init__(self, *, client, source=None, is_sender=True, rank=0):
        self.client, self.source, self.is_sender, self.rank = client, source, is_sender, rank

    @classmethod
    @abstractmethod
    def trainer_init(cls, init_info, *, client, source=None): ...

    @abstractmethod
    def send_weights(self): ...

    def shutdown(self):
        return None


class WeightTransferEngineFactory:
    _registry: dict[str, Any] = {}  # noqa: RUF012

    @classmethod
    def register_engine(cls, name, module_path_or_cls, class_name=None):
        cls._registry[name] = lambda: module_path_or_cls

    @classmethod
    def create_engine(cls, config, vllm_config, device, model):
        return cls._registry[config.backend]()(config, vllm_config, device, model)


class WeightTransferTrainerFactory:
    _registry: dict[str, Any] = {}  # noqa: RUF012

    @classmethod
    def register_engine(cls, name, module_path_or_cls, class_name=None):
        cls._registry[name] = lambda: module_path_or_cls

    @classmethod
    def trainer_init(cls, init_info, *, client, source=None):
        return cls._registry[init_info.backend]().trainer_init(init_info, client=client, source=source)


class Reload(ModuleType):
    """Counts the updates of each model that were begun and ended."""

    def __init__(self, name):
        super().__init__(name)
        self.begun, self.ended = [], []

    def initialize_layerwise_reload(self, model):
        self.begun.append(model)

    def finalize_layerwise_reload(self, model, model_config):
        self.ended.append((model, model_config))


def modules() -> dict[str, ModuleType]:
    """The modules by name, as `sys.modules` has them."""
    found: dict[str, ModuleType] = {RELOAD: Reload(RELOAD)}
    for name in (BASE, FACTORY):
        found[name] = ModuleType(name)
        for cls in INTERFACE["modules"][name]:
            setattr(found[name], cls, globals()[cls])
    return found


def install() -> None:
    """Lets this process, an actor of a test, import them."""
    sys.modules.update(modules())
