"""Ranks of the fake's NCCL for tests: a thread, a device and a stream each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.fake_cupy import Fake, installed

WAIT_S = 20.0
SUM, PROD, MAX, MIN, AVG = range(5)
CODES = {
    "int8": 0,
    "uint8": 1,
    "int32": 2,
    "uint32": 3,
    "int64": 4,
    "uint64": 5,
    "float16": 6,
    "float32": 7,
    "float64": 8,
    "bfloat16": 9,
    "float8_e4m3fn": 10,
    "float8_e5m2": 11,
}


class Rank:
    """One rank: its communicator, and a stream of its own."""

    def __init__(self, fake: Fake, world: int, unique: tuple[int, ...], rank: int, device: int) -> None:
        self.fake, self.cupy, self.rank, self.world, self.device = fake, fake.cupy, rank, world, device
        with self.cupy.cuda.Device(device):
            self.comm = self.cupy.cuda.nccl.NcclCommunicator(world, unique, rank)
            self.stream = self.cupy.cuda.Stream(non_blocking=True)

    def put(self, values: Any) -> Any:
        """An array on its device, written on its stream."""
        with self.cupy.cuda.Device(self.device), self.stream:
            return self.cupy.asarray(values)

    def get(self, array: Any) -> Any:
        with self.cupy.cuda.Device(self.device):
            return array.get(self.stream)


class Ranks:
    """All of them, each in a thread."""

    def __init__(self, fake: Fake, world: int, device_of: Callable[[int], int] = lambda rank: rank) -> None:
        self.threads = ThreadPoolExecutor(world)
        unique = fake.cupy.cuda.nccl.get_unique_id()
        made = [self.threads.submit(Rank, fake, world, unique, rank, device_of(rank)) for rank in range(world)]
        try:
            self.all: list[Rank] = [future.result(WAIT_S) for future in made]
        except BaseException:
            self.threads.shutdown()
            raise

    def start(self, body: Callable[[Rank], Any]) -> list[Future[Any]]:
        return [self.threads.submit(body, rank) for rank in self.all]

    def run(self, body: Callable[[Rank], Any]) -> list[Any]:
        return [future.result(WAIT_S) for future in self.start(body)]


@contextmanager
def ranks(world: int, seed: int = 0, **how: Any) -> Iterator[Ranks]:
    with installed(world, seed=seed, **how) as fake:
        team = Ranks(fake, world)
        try:
            yield team
        finally:
            team.run(lambda rank: rank.comm.abort())
            team.threads.shutdown()


@contextmanager
def refused(fake: Fake, status: int) -> Iterator[None]:
    with pytest.raises(fake.cupy.cuda.nccl.NcclError) as caught:
        yield
    assert caught.value.status == status


def error_of(rank: Rank) -> int:
    try:
        rank.comm.check_async_error()
    except rank.cupy.cuda.nccl.NcclError as exc:
        return int(exc.status)
    return 0


def numbers(seed: int, world: int, count: int, dtype: str) -> Any:
    """Small whole numbers for each rank, [world, count]."""
    return np.random.default_rng(seed).integers(1, 4, (world, count)).astype(getattr(ml_dtypes, dtype, dtype))
