"""Calls of lists with a tensor of each GPU, on a fake of cupy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from raycollect.core.model import OpKind
from raycollect.engine import device_staging
from raycollect.engine.execution import Outcome
from raycollect.errors import (
    RefusedError,
)
from raycollect.planner import (
    GpuLists,
    Membership,
    Request,
)
from tests.fake_cupy import Fake, installed
from tests.pure.fleet import Convoy
from tests.pure.mixed import WORLD, Mixed

GPUS = 4


SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in (1, 2))]
"""Of the orders in which what GPUs do is done."""


every_seed = pytest.mark.parametrize("gpus", SEEDS, indirect=True)


LISTS = GpuLists()


class Gpus(Mixed):
    """Ranks in threads, with as many of the fake's GPUs as their lists say; rank r's group works on GPU r."""

    def __init__(self, fake: Fake) -> None:
        super().__init__(fake, "nccl")
        self.fake = fake

    def lists(self, devices: Sequence[int], shape: Any = (5,), dtype: Any = "float32", **how: Any) -> list[list[Any]]:
        """For each rank a tensor on each of some GPUs."""
        return [
            [self.put(values(rank, at, shape, dtype), one, **how) for at, one in enumerate(devices)]
            for rank in range(WORLD)
        ]

    def run(self, kind: OpKind, src: Sequence[Any], dst: Sequence[Any] | None = None, **more: Any) -> list[Outcome]:
        """Runs a collective of lists, as it comes off the wire."""
        keys = [None if side is None else self.fleet.keep_all(side) for side in (src, dst)]
        return self.fleet.run(kind, *keys, **({"lists": LISTS} | more))  # type: ignore[arg-type]

    def must(self, kind: OpKind, src: Sequence[Any], dst: Sequence[Any] | None = None, **more: Any) -> list[Any]:
        """The same; gives what was made, by rank, or raises the first error."""
        outcomes = self.run(kind, src, dst, **more)
        for outcome in outcomes:
            if outcome.error is not None:
                raise outcome.error
        return [outcome.outputs[0].value if outcome.outputs else None for outcome in outcomes]


@pytest.fixture
def gpus(request: pytest.FixtureRequest) -> Iterator[Gpus]:
    device_staging._idle.clear()
    with installed(GPUS, seed=getattr(request, "param", 0)) as fake:
        made = Gpus(fake)
        yield made
        made.close()
        fake.drain()
        assert not fake.violations
    device_staging._idle.clear()


def values(rank: int, at: int, shape: Any, dtype: Any = "float32") -> Any:
    """Whole numbers that tell whose they are; sums of them are exact."""
    return (np.arange(np.prod(shape, dtype=int)).reshape(shape) % 5 + 1 + 2 * rank + 3 * at).astype(dtype)


def everyone(count: int, shape: Any = (5,), dtype: Any = "float32") -> Any:
    """What all GPUs of all ranks give, [ranks times GPUs, *shape]."""
    return np.stack([values(rank, at, shape, dtype) for rank in range(WORLD) for at in range(count)])


def refused(outcomes: Sequence[Outcome], error: type[RefusedError]) -> str:
    """All ranks were refused with one kind of error; its words."""
    found = [outcome.error for outcome in outcomes]
    assert [type(one) for one in found] == [error] * len(found), found
    return str(found[0])


@pytest.fixture
def convoy(gpus: Gpus) -> Iterator[Convoy]:
    """The same ranks, for programs of whole batches."""
    made = Convoy([range(WORLD)], lambda _: gpus.fleet.communicators)
    (membership,) = made.memberships
    made.memberships = [
        replace(membership, spec=replace(membership.spec, backend="nccl", memory="cuda"), bitwise=False)
    ]
    yield made
    made.close()


def asked(membership: Membership, kind: OpKind, sources: Sequence[Any], **more: Any) -> Request:
    operands = tuple((rank, one, None) for rank, one in enumerate(sources))
    return Request(kind=kind, group=membership.spec, operands=operands, timeout_s=20.0, **({"lists": LISTS} | more))
