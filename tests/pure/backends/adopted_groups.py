"""Groups of threads that meet, in the shape of `ray.util.collective`'s `BaseGroup`, as a backend."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from typing import Any, ClassVar

import numpy as np
import pytest

from raycollect import backends, types

WAIT_S = 20.0
UFUNCS = {
    types.ReduceOp.SUM: np.add,
    types.ReduceOp.PRODUCT: np.multiply,
    types.ReduceOp.MIN: np.minimum,
    types.ReduceOp.MAX: np.maximum,
}


class Meeting:
    """Where the ranks of one group come together."""

    def __init__(self, world_size: int) -> None:
        self.barrier = threading.Barrier(world_size, timeout=WAIT_S)
        self.slots: list[Any] = [None] * world_size
        self.pairs: dict[tuple[int, int], queue.Queue[np.ndarray]] = defaultdict(queue.Queue)


class Threads:
    """A `BaseGroup` whose ranks are threads. It is as careless with its inputs as its contract allows."""

    meetings: ClassVar[dict[str, Meeting]] = {}
    guard: ClassVar[threading.Lock] = threading.Lock()
    instances: ClassVar[list[Threads]] = []

    def __init__(self, world_size: int, rank: int, group_name: str, **options: Any) -> None:
        self.world_size, self.rank, self.group_name, self.options = world_size, rank, group_name, options
        self.calls: list[Any] = []
        self.destroyed = 0
        with self.guard:
            self.meeting = self.meetings.setdefault(group_name, Meeting(world_size))
            self.instances.append(self)

    @classmethod
    def check_backend_availability(cls) -> bool:
        return True

    def destroy_group(self) -> None:
        self.destroyed += 1

    def _meet(self, value: Any) -> list[Any]:
        self.meeting.barrier.wait()
        self.meeting.slots[self.rank] = value
        self.meeting.barrier.wait()
        values = list(self.meeting.slots)
        self.meeting.barrier.wait()
        return values

    def _fold(self, tensor: np.ndarray, op: types.ReduceOp) -> np.ndarray:
        parts = self._meet(tensor.copy())
        assert len({part.shape for part in parts}) == 1
        result = parts[0]
        for part in parts[1:]:
            result = UFUNCS[op](result, part)
        return result

    def _check(self, *tensors: np.ndarray) -> None:
        for tensor in tensors:
            assert type(tensor) is np.ndarray
            assert tensor.flags.carray
            assert tensor.dtype.isnative

    def allreduce(self, tensor: list[np.ndarray], options: types.AllReduceOptions) -> None:
        self._check(*tensor)
        self.calls.append(options)
        tensor[0][...] = self._fold(tensor[0], options.reduceOp)

    def barrier(self, options: types.BarrierOptions) -> None:
        self.calls.append(options)
        self._meet(None)

    def reduce(self, tensor: list[np.ndarray], options: types.ReduceOptions) -> None:
        self._check(*tensor)
        result = self._fold(tensor[0], options.reduceOp)
        tensor[0][...] = result if options.root_rank == self.rank else 77

    def broadcast(self, tensor: list[np.ndarray], options: types.BroadcastOptions) -> None:
        self._check(*tensor)
        tensor[0][...] = self._meet(tensor[0].copy())[options.root_rank]

    def allgather(
        self, tensor_list: list[list[np.ndarray]], tensor: list[np.ndarray], options: types.AllGatherOptions
    ) -> None:
        self._check(*tensor_list[0], *tensor)
        for target in tensor_list[0]:
            target[...] = 0
        for target, value in zip(tensor_list[0], self._meet(tensor[0].copy()), strict=True):
            assert target.shape == value.shape
            target[...] = value

    def reducescatter(
        self, tensor: list[np.ndarray], tensor_list: list[list[np.ndarray]], options: types.ReduceScatterOptions
    ) -> None:
        self._check(*tensor, *tensor_list[0])
        for piece in tensor_list[0]:
            piece[...] = self._fold(piece, options.reduceOp)
        tensor[0][...] = tensor_list[0][self.rank]

    def send(self, tensor: list[np.ndarray], options: types.SendOptions) -> None:
        self._check(*tensor)
        self.meeting.pairs[self.rank, options.dst_rank].put(tensor[0].copy())

    def recv(self, tensor: list[np.ndarray], options: types.RecvOptions) -> None:
        self._check(*tensor)
        tensor[0][...] = self.meeting.pairs[options.src_rank, self.rank].get(timeout=WAIT_S)


@pytest.fixture(autouse=True)
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is gone after it."""
    monkeypatch.setattr(backends, "BACKENDS", dict(backends.BACKENDS))
    monkeypatch.setattr(Threads, "meetings", {})
    monkeypatch.setattr(Threads, "instances", [])
