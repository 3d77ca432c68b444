"""raycollect as a backend of torch.distributed: a group whose ranks are those of a torch process group.

torch's classes for backends can't be derived from in Python, only `ProcessGroup`; the group that
`torch.distributed.init_process_group` makes is therefore replaced by the one here, as torch does it for such classes.
Each call of torch is one call of a member, with the same agreement and the same errors (`torch_calls`).
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from importlib import import_module
from typing import Any

from raycollect.core import ray_internals
from raycollect.core.model import OpKind
from raycollect.group.coordinator import ALL
from raycollect.member.call import ME
from raycollect.member.init import init_collective_group
from raycollect.member.torch_calls import TorchCalls, TorchWork

torch: Any = import_module("torch")
distributed: Any = import_module("torch.distributed")

NAME = "raycollect"

Tensors = Sequence[Any]
"""Tensors of torch."""


def register() -> None:
    """Makes the name ``"raycollect"`` known to `torch.distributed.init_process_group`; may be called again."""
    if NAME.upper() not in distributed.Backend._plugins:
        distributed.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu"])


def create(given: Any, options: Any) -> TorchProcessGroup:
    """Joins a group, as torch asks for it.

    Args:
        given: torch's options: store, rank, size, timeout and id of the group.
        options: The `pg_options` of the caller, or None: a dict, passed through to the backend, in which ``"backend"``
            names that one. By default it is ``"auto"``.

    Raises:
        RaycollectError: As `init_collective_group`.
    """
    passed = dict(options or {})
    name = f"torch:{given.group_id}"
    timeout_s = given.timeout.total_seconds()
    init_collective_group(
        given.group_size,
        given.group_rank,
        passed.pop("backend", "auto"),
        name,
        timeout_s * 1000,
        pg_options=passed,
        rendezvous=TorchStore(given.store),
    )
    return TorchProcessGroup(given.group_rank, given.group_size, TorchCalls(name))


class TorchStore:
    """A `BootstrapStore` in a store of torch, which has a prefix for each group."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.host: str = _own_address(store)

    def post(self, name: str, record: bytes) -> bool:
        """Posts a record; False if there is one. Only rank 0 posts."""
        if self._store.check([name]):
            return False
        self._store.set(name, record)
        return True

    def replace(self, name: str, record: bytes) -> None:
        """Posts a record in place of another."""
        self._store.set(name, record)

    def read(self, name: str) -> bytes | None:
        """The record of that name, or None."""
        return bytes(self._store.get(name)) if self._store.check([name]) else None

    def remove(self, name: str, record: bytes) -> None:
        """Removes the record, once all have joined."""
        with suppress(RuntimeError):  # not all stores can
            self._store.delete_key(name)

    def where(self, name: str) -> str:
        """What a person calls the place of the record."""
        return f"the key {name!r} of torch's store"


def _own_address(store: Any) -> str:
    """This process's address for the others: the one from which it reaches torch's store, if that is a server."""
    while hasattr(store, "underlying_store"):  # a prefix
        store = store.underlying_store
    if not isinstance(store, distributed.TCPStore):
        return ray_internals.node_address() if ray_internals.is_worker() else "127.0.0.1"
    kind, _, _, _, address = socket.getaddrinfo(store.host, store.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(kind, socket.SOCK_DGRAM) as route:
        route.connect(address)  # sends nothing
        return str(route.getsockname()[0])


class _Named(distributed.ProcessGroup):  # type: ignore[misc]
    """What torch asks of a process group besides calls."""

    def __init__(self, rank: int, size: int, calls: TorchCalls) -> None:
        super().__init__(rank, size)
        self._rank = rank
        self._size = size
        self._calls = calls
        self._group_name = self._group_desc = ""

    def size(self) -> int:
        """The number of ranks."""
        return self._size

    def rank(self) -> int:
        """This process's rank."""
        return self._rank

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """The name by which it is registered."""
        return NAME

    name = getBackendName

    @property
    def group_name(self) -> str:
        """Torch's name of the group."""
        return self._group_name

    def _set_group_name(self, name: str) -> None:
        self._group_name = name

    @property
    def group_desc(self) -> str:
        """What torch says of the group."""
        return self._group_desc

    def _set_group_desc(self, text: str) -> None:
        self._group_desc = text

    @property
    def _device_types(self) -> list[Any]:
        return [torch.device("cpu")]

    @property
    def shares_memory(self) -> bool:
        """Whether its ranks work on each other's tensors in shared memory."""
        return self._calls.shares_memory

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets how long later calls wait for the other ranks."""
        self._calls.set_timeout(timeout)

    def shutdown(self) -> None:
        """Leaves the group once its calls have ended; may be called twice."""
        self._calls.close(drains=True)

    def abort(self) -> None:
        """Leaves the group at once: calls under way fail."""
        self._calls.close(drains=False)


class TorchProcessGroup(_Named):
    """A process group of torch whose calls are those of a member of a group.

    Tensors lie in the memory of the host. Point-to-point calls match by their order alone: tags are refused, and so is
    a receive from any rank.
    """

    # ------------------------------------------------------------------------------------------ collectives

    def allreduce(self, tensors: Tensors, opts: Any = None) -> TorchWork:
        """Reduces tensors over all ranks, in place."""
        opts = opts or distributed.AllreduceOptions()
        call = self._calls.call(OpKind.ALLREDUCE, [("tensor", _one(tensors))], opts, op=_op(opts))
        return self._calls.start("allreduce", ALL, [call], list(tensors), opts)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Tensors, opts: Any = None) -> TorchWork:
        """Reduces a tensor over all ranks into that of one rank."""
        opts = opts or distributed.ReduceOptions()
        call = self._calls.call(OpKind.REDUCE, [("tensor", _one(tensors))], opts, op=_op(opts), root=opts.rootRank)
        return self._calls.start("reduce", ALL, [call], list(tensors), opts)

    def broadcast(self, tensors: Tensors, opts: Any = None) -> TorchWork:
        """Overwrites every rank's tensor with that of one rank."""
        opts = opts or distributed.BroadcastOptions()
        call = self._calls.call(OpKind.BROADCAST, [("tensor", _one(tensors))], opts, root=opts.rootRank)
        return self._calls.start("broadcast", ALL, [call], list(tensors), opts)

    def allgather(self, output_tensors: Sequence[Tensors], input_tensors: Tensors, opts: Any = None) -> TorchWork:
        """Gives every rank the tensors of all ranks, whose sizes may differ."""
        outputs = list(output_tensors[0])
        return self._allgather([(outputs, input_tensors[0])], outputs, opts)

    def allgather_coalesced(self, output_lists: Sequence[Tensors], input_list: Tensors, opts: Any = None) -> TorchWork:
        """Gives every rank the lists of tensors of all ranks, by rank."""
        outputs = [list(one) for one in output_lists]
        return self._allgather([(outputs, list(input_list))], [one for some in outputs for one in some], opts)

    def all_gather_single(self, output: Any, input: Any, opts: Any = None) -> TorchWork:
        """Gives every rank the tensors of all ranks, one behind the other in one tensor."""
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> TorchWork:
        """Like `all_gather_single`, for several tensors."""
        pairs = [(_flat(output), one) for output, one in zip(outputs, inputs, strict=True)]
        return self._allgather(pairs, list(outputs), opts)

    def reduce_scatter(self, output_tensors: Tensors, input_tensors: Sequence[Tensors], opts: Any = None) -> TorchWork:
        """Reduces lists of tensors over all ranks, and gives each rank its item of the result."""
        return self._reduce_scatter([(output_tensors[0], list(input_tensors[0]))], opts)

    def reduce_scatter_single(self, output: Any, input: Any, opts: Any = None) -> TorchWork:
        """Reduces a tensor over all ranks, and gives each rank its part of the result."""
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> TorchWork:
        """Like `reduce_scatter_single`, for several tensors."""
        return self._reduce_scatter([(output, _flat(one)) for output, one in zip(outputs, inputs, strict=True)], opts)

    def gather(self, output_tensors: Sequence[Tensors], input_tensors: Tensors, opts: Any = None) -> TorchWork:
        """Gives one rank the tensors of all ranks."""
        opts = opts or distributed.GatherOptions()
        outputs = list(output_tensors[0]) if self._rank == opts.rootRank else []
        values = [("tensor", input_tensors[0]), *([("tensor_list", outputs)] if outputs else [])]
        call = self._calls.call(OpKind.GATHER, values, opts, root=opts.rootRank)
        return self._calls.start("gather", ALL, [call], outputs, opts)

    def scatter(self, output_tensors: Tensors, input_tensors: Sequence[Tensors], opts: Any = None) -> TorchWork:
        """Gives each rank its item of one rank's list."""
        opts = opts or distributed.ScatterOptions()
        given = [("tensor_list", list(input_tensors[0]))] if self._rank == opts.rootRank else []
        call = self._calls.call(OpKind.SCATTER, [*given, ("tensor", output_tensors[0])], opts, root=opts.rootRank)
        return self._calls.start("scatter", ALL, [call], list(output_tensors), opts)

    def alltoall(self, output_tensors: Tensors, input_tensors: Tensors, opts: Any = None) -> TorchWork:
        """Gives each rank its item of every rank's list."""
        return self._alltoall(list(output_tensors), list(input_tensors), list(output_tensors), opts)

    def all_to_all_single(
        self,
        output: Any,
        input: Any,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any = None,
    ) -> TorchWork:
        """Gives each rank its part of every rank's tensor, which is cut along its first dimension."""
        taken, given = _cut(output, output_split_sizes), _cut(input, input_split_sizes)
        return self._alltoall(taken, given, [output], opts)

    def send(self, tensors: Tensors, dst_rank: int, tag: int = 0) -> TorchWork:
        """Sends a tensor to one rank."""
        call = self._calls.call(OpKind.SEND, [("tensor", _one(tensors))], root=ME, peer=dst_rank)
        communicator = self._calls.pair("send", self._rank, dst_rank, tag)
        return self._calls.start("send", communicator, [call], list(tensors))

    def recv(self, tensors: Tensors, src_rank: int, tag: int = 0) -> TorchWork:
        """Overwrites a tensor with what one rank sends."""
        call = self._calls.call(OpKind.SEND, [("tensor", _one(tensors))], root=src_rank, peer=ME)
        communicator = self._calls.pair("recv", src_rank, self._rank, tag)
        return self._calls.start("recv", communicator, [call], list(tensors), source=src_rank)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> TorchWork:
        """Refuses: a rank receives from a rank that it names."""
        raise self._calls.unsupported("recv", "source rank", "missing", "the rank to receive from")

    def barrier(self, opts: Any = None) -> TorchWork:
        """Waits until all ranks have called it."""
        return self._calls.start("barrier", ALL, [self._calls.call(OpKind.BARRIER, [], opts)], [], opts)

    # what torch called them before 2.10
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # ------------------------------------------------------------------------------------------ one call

    def _allgather(self, pairs: Sequence[tuple[Any, Any]], result: list[Any], opts: Any) -> TorchWork:
        calls = [
            self._calls.call(OpKind.ALLGATHER, [("tensor", given), ("tensor_list", taken)], opts)
            for taken, given in pairs
        ]
        return self._calls.start("all_gather", ALL, calls, result, opts)

    def _reduce_scatter(self, pairs: Sequence[tuple[Any, Any]], opts: Any) -> TorchWork:
        opts = opts or distributed.ReduceScatterOptions()
        calls = [
            self._calls.call(OpKind.REDUCESCATTER, [("tensor_list", given), ("tensor", taken)], opts, op=_op(opts))
            for taken, given in pairs
        ]
        return self._calls.start("reduce_scatter", ALL, calls, [taken for taken, _ in pairs], opts)

    def _alltoall(self, taken: Any, given: Any, result: list[Any], opts: Any) -> TorchWork:
        values = [("tensor_list_in", given), ("tensor_list_out", taken)]
        return self._calls.start("all_to_all", ALL, [self._calls.call(OpKind.ALLTOALL, values, opts)], result, opts)


def _one(tensors: Tensors) -> Any:
    return tensors[0] if len(tensors) == 1 else list(tensors)


def _op(opts: Any) -> str:
    return str(opts.reduceOp.op.name)


def _flat(tensor: Any) -> Any:
    """One dimension, which the ranks can divide whatever its shape; what is not contiguous is refused by the call."""
    return tensor.view(-1) if tensor.is_contiguous() else tensor


def _cut(tensor: Any, sizes: Sequence[int]) -> Any:
    return list(tensor.split(list(sizes))) if sizes else _flat(tensor)
