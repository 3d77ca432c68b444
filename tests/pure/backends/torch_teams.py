"""Teams on the backends of torch.distributed, with options."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from torch import distributed
from torch.distributed import distributed_c10d as c10d

from raycollect.backends.torch_dist import communicator as torch_dist
from raycollect.core.model import GroupSpec, Kernel, Launch, OpKind, ReduceOp
from raycollect.core.protocols import Communicator, Joining
from tests.pure.closing import closing_all
from tests.pure.communicators import MemoryExchange, ThreadTeam
from tests.pure.conformance import run_launch


class OptionsTeam(ThreadTeam):
    """A team on any torch backend, with options."""

    def __init__(self, backend: str = "torch:gloo", world_size: int = 2, **options: Any) -> None:
        self.options = options
        super().__init__(backend, world_size)

    def _create(self, rank: int) -> Communicator:
        spec = GroupSpec(
            name="team",
            group_id=self.spec.group_id,
            backend=self.backend,
            world_size=self.world_size,
            options=tuple(self.options.items()),
        )
        return torch_dist.create(Joining(spec, rank, self.rendezvous, MemoryExchange(self.server, rank)))


@pytest.fixture
def teams() -> Iterator[Callable[..., OptionsTeam]]:
    """Makes teams, and ends them."""
    with closing_all(OptionsTeam) as make:
        yield make


def body_sum(communicator: Communicator, launch: Launch, value: int) -> int:
    array = np.full(3, value, np.int64)
    run_launch(communicator, launch, Kernel(kind=OpKind.ALLREDUCE, src=array, dst=array, op=ReduceOp.SUM))
    return int(array[0])


def gloo_of(store: Any, rank: int, world_size: int) -> Any:
    options = c10d.ProcessGroupGloo._Options()
    options._devices = [c10d.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    return c10d.ProcessGroupGloo(store, rank, world_size, options)


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Registers backends with torch, for one test."""
    monkeypatch.setattr(distributed.Backend, "_plugins", dict(distributed.Backend._plugins))
    for name in ("backend_list", "default_device_backend_map", "backend_capability", "backend_type_map"):
        table = getattr(distributed.Backend, name, None)
        if table is not None:
            monkeypatch.setattr(distributed.Backend, name, copy.copy(table))

    def register(name: str, creator: Callable[..., Any], *, extended_api: bool) -> None:
        monkeypatch.setattr(distributed.Backend, name.upper(), name, raising=False)  # so that it is undone
        delattr(distributed.Backend, name.upper())
        distributed.Backend.register_backend(name, creator, extended_api=extended_api, devices=["cpu"])

    return register
