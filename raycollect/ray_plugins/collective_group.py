"""A backend of `ray.util.collective`: its calls become calls of this package's members."""

from __future__ import annotations

from collections.abc import Sequence
from mmap import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray
from ray.util.collective.collective_group.base_collective_group import BaseGroup
from ray.util.collective.types import (
    AllReduceOptions,
    BroadcastOptions,
    ReduceOptions,
    ReduceScatterOptions,
)

from raycollect.core.model import name_of
from raycollect.errors import Violation, refusal
from raycollect.member import operations
from raycollect.member.init import JOB, destroy_collective_group, get_group_handle, init_collective_group
from raycollect.ray_plugins import NAME


class CollectiveGroup(BaseGroup):
    """One rank of a group that `ray.util.collective` forms, in the process of the rank.

    Raises:
        RaycollectError: As `init_collective_group` of this package.
    """

    def __init__(self, world_size: int, rank: int, group_name: str) -> None:
        super().__init__(world_size, rank, group_name)
        name = f"ray.util.collective: {group_name}"  # apart from the groups that this package's users name
        init_collective_group(world_size, rank, group_name=name, rendezvous=JOB)
        self._group = get_group_handle(name)

    @classmethod
    def backend(cls) -> str:
        """The name in Ray's registry."""
        return NAME

    @classmethod
    def check_backend_availability(cls) -> bool:
        """True: shared memory and sockets are always available."""
        return True

    def destroy_group(self) -> None:
        """Leaves the group."""
        destroy_collective_group(self._group)

    def allreduce(self, tensor: Any, allreduce_options: Any = AllReduceOptions) -> None:
        """Reduces a tensor over all ranks, in place."""
        operations.allreduce(self._written("allreduce", tensor), self._group, allreduce_options.reduceOp)

    def barrier(self, barrier_options: Any = None) -> None:
        """Waits for all ranks."""
        operations.barrier(self._group)

    def reduce(self, tensor: Any, reduce_options: Any = ReduceOptions) -> None:
        """Reduces a tensor over all ranks, in place on the root."""
        root, op = reduce_options.root_rank, reduce_options.reduceOp
        operations.reduce(self._written("reduce", tensor), root, self._group, op)

    def broadcast(self, tensor: Any, broadcast_options: Any = BroadcastOptions) -> None:
        """Overwrites the tensor of each rank by that of the root."""
        operations.broadcast(self._written("broadcast", tensor), broadcast_options.root_rank, self._group)

    def allgather(self, tensor_list: Any, tensor: Any, allgather_options: Any = None) -> None:
        """Fills a list with the tensors of all ranks."""
        into, mine = self._written("allgather", tensor_list), self._single("allgather", tensor)
        operations.allgather(into, mine, self._group)

    def reducescatter(self, tensor: Any, tensor_list: Any, reducescatter_options: Any = ReduceScatterOptions) -> None:
        """Reduces a list over all ranks, and gives each rank its element."""
        into, mine = self._written("reducescatter", tensor), self._single("reducescatter", tensor_list)
        operations.reducescatter(into, mine, self._group, reducescatter_options.reduceOp)

    def send(self, tensor: Any, send_options: Any) -> None:
        """Sends a tensor to a rank."""
        operations.send(self._single("send", tensor), send_options.dst_rank, self._group)

    def recv(self, tensor: Any, recv_options: Any) -> None:
        """Receives a tensor from a rank."""
        operations.recv(self._written("recv", tensor), recv_options.src_rank, self._group)

    def _single(self, op: str, tensors: Sequence[Any]) -> Any:
        """The only tensor, or the only list."""
        if len(tensors) != 1:
            actual, expected = f"{len(tensors)} tensors per rank", "one, or raycollect's *_multigpu on backend 'nccl'"
            violation = Violation(kind="unsupported", rank=self.rank, field="tensors", found=actual, expected=expected)
            raise refusal(op, name_of(self._group), (violation,))
        return tensors[0]

    def _written(self, op: str, tensors: Sequence[Any]) -> Any:
        """The only tensor, or the only list, as one that can be written."""
        only = self._single(op, tensors)
        return [_writable(tensor) for tensor in only] if isinstance(only, list) else _writable(only)


class _Unlocked:
    """The memory of a read-only array, as one that can be written."""

    def __init__(self, array: NDArray[Any]) -> None:
        self._array = array  # keeps the memory
        interface = array.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}


def _writable(tensor: Any) -> Any:
    """A view that can be written, of an array that Ray has passed as an argument, which it makes read-only.

    Programs of Ray's backends reduce such arguments in place. Read-only files and bytes stay as they are.
    """
    if not isinstance(tensor, np.ndarray) or tensor.flags.writeable:
        return tensor
    base: Any = tensor
    while isinstance(base, np.ndarray):
        base = base.base
    owner = base.obj if isinstance(base, memoryview) else base
    return tensor if isinstance(owner, bytes | mmap) else np.asarray(_Unlocked(tensor)).view(tensor.dtype)
