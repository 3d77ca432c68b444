"""raycollect as a backend of torch.distributed: a group whose ranks are those of a torch process group.

Python can't subclass torch's classes for backends, only `ProcessGroup`. Torch therefore replaces the group that
`torch.distributed.init_process_group` makes by the group of this module, as for other such subclasses. Each call of
torch is one call of a member, with the same agreement and the same errors.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from functools import partial
from importlib import import_module
from time import monotonic
from typing import Any

from raycollect import backends
from raycollect.backends import arrays, streams
from raycollect.backends.streams import Mark
from raycollect.core.model import OpKind
from raycollect.engine.run import Outcome
from raycollect.errors import RaycollectError, Violation, refusal
from raycollect.group.call_queue import CallQueue
from raycollect.group.coordinator import ALL, name_of_ranks
from raycollect.member.call import ME, MemberCall
from raycollect.member.init import destroy_collective_group, get_group_handle, init_collective_group
from raycollect.member.torch.work import TorchWork
from raycollect.member.work import MemberWork
from raycollect.ray_bridge import ray_session

_log = logging.getLogger("raycollect")

torch: Any = import_module("torch")
distributed: Any = import_module("torch.distributed")

NAME = "raycollect"

_Values = Sequence[tuple[str, Any]]
"""The operands of a member's call, by name."""

Tensors = Sequence[Any]
"""Tensors of torch."""


def create(given: Any, options: Any) -> TorchProcessGroup:
    """Joins a group, at torch's request.

    Args:
        given: torch's options: store, rank, size, timeout and id of the group.
        options: The `pg_options` of the caller, or None: a dict for the backend, in which ``"backend"`` names the
            backend, by default ``"auto"``.

    Raises:
        RaycollectError: As `init_collective_group`.
    """
    if not torch.cuda.is_available():  # a build for CUDA without a GPU: torch gathers on the first other device
        distributed.Backend.backend_capability[NAME] = ["cpu"]
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
    return TorchProcessGroup(given.group_rank, given.group_size, name)


class TorchStore:
    """A `BootstrapStore` in a store of torch, with a prefix per group."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.host: str = _own_address(store)

    def post(self, name: str, record: bytes, *, replace: bool = False) -> bool:
        """Posts a record; False if one exists, and `replace` is False. Only rank 0 posts."""
        if not replace and self._store.check([name]):
            return False
        self._store.set(name, record)
        return True

    def read(self, name: str) -> bytes | None:
        """The record of that name, or None."""
        return bytes(self._store.get(name)) if self._store.check([name]) else None

    def remove(self, name: str) -> None:
        """Removes the record, once all have joined."""
        with suppress(RuntimeError):  # some stores can't
            self._store.delete_key(name)

    def where(self, name: str) -> str:
        """The location of the record, for a message."""
        return f"the key {name!r} of torch's store"


def _own_address(store: Any) -> str:
    """This process's address for the others: its source address towards torch's store, if that is a server."""
    while hasattr(store, "underlying_store"):  # a prefix
        store = store.underlying_store
    if not isinstance(store, distributed.TCPStore):
        return ray_session.node_address() if ray_session.is_worker() else "127.0.0.1"
    kind, _, _, _, address = socket.getaddrinfo(store.host, store.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(kind, socket.SOCK_DGRAM) as route:
        route.connect(address)  # sends nothing
        return str(route.getsockname()[0])


class _Named(distributed.ProcessGroup):  # type: ignore[misc]
    """Torch's interface of a process group, without collectives; `member_group` is the name of raycollect's group."""

    def __init__(self, rank: int, size: int, member_group: str) -> None:
        super().__init__(rank, size)
        self._rank = rank
        self._size = size
        self._member_group = member_group
        self._place = get_group_handle(member_group)
        self._queues: dict[str, CallQueue] = {}  # by communicator
        self._group_name = self._group_desc = ""

    def size(self) -> int:
        """The number of ranks."""
        return self._size

    def rank(self) -> int:
        """This process's rank."""
        return self._rank

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """The name of the registered backend."""
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
        """Torch's description of the group."""
        return self._group_desc

    def _set_group_desc(self, text: str) -> None:
        self._group_desc = text

    @property
    def _device_types(self) -> list[Any]:
        # torch picks the CPU for objects if it is among them.
        return list(map(torch.device, distributed.Backend.backend_capability[NAME]))

    def _get_backend(self, device: Any) -> Any:
        # torch asks the result only whether it can split, coalesce or allocate.
        return self if device.type in ("cpu", "cuda") else super()._get_backend(device)

    supports_splitting = supports_coalescing = supports_time_estimate = False

    def supports_tensor_alloc(self, device: Any) -> bool:
        """Whether it allocates memory that it moves faster."""
        return False

    @property
    def shares_memory(self) -> bool:
        """Whether its ranks work on each other's tensors in shared memory."""
        return backends.get(self._place.backend).pricing.transport == "memory"

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets how long later calls wait for the other ranks."""
        self._place.timeout_s = timeout.total_seconds()

    def shutdown(self) -> None:
        """Leaves the group after the end of its calls, such as a send without a wait; may be called twice."""
        until_s = monotonic() + self._place.timeout_s
        for queue in self._queues.values():
            queue.close()
        for queue in self._queues.values():
            if not queue.drain(until_s - monotonic()):
                _log.warning("group %r: destroyed while %d calls were in progress", self._member_group, queue.pending)
        self.abort()

    def abort(self) -> None:
        """Leaves the group at once: calls in progress fail."""
        for queue in self._queues.values():
            queue.close()
        with suppress(RaycollectError):  # it has left before
            destroy_collective_group(self._member_group)


class TorchProcessGroup(_Named):
    """A process group of torch whose calls are those of a member of a group. Any thread may call it.

    Tensors may be in host memory or on GPUs, as those of a member's call. A call ends before `wait` returns, so the
    caller's later work, on any stream, follows it. Point-to-point calls match by their order alone: tags are refused,
    and so is a receive from any rank.
    """

    # ------------------------------------------------------------------------------------------ collectives

    def allreduce(self, tensors: Tensors, opts: Any = None) -> TorchWork:
        """Reduces tensors over all ranks, in place."""
        opts = opts or distributed.AllreduceOptions()
        return self._start(OpKind.ALLREDUCE, [[("tensor", _operand(tensors))]], tensors, opts, op=_op(opts))

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Tensors, opts: Any = None) -> TorchWork:
        """Reduces a tensor over all ranks into that of one rank."""
        opts = opts or distributed.ReduceOptions()
        values = [("tensor", _operand(tensors))]
        return self._start(OpKind.REDUCE, [values], tensors, opts, op=_op(opts), root=opts.rootRank)

    def broadcast(self, tensors: Tensors, opts: Any = None) -> TorchWork:
        """Overwrites every rank's tensor with that of one rank."""
        opts = opts or distributed.BroadcastOptions()
        return self._start(OpKind.BROADCAST, [[("tensor", _operand(tensors))]], tensors, opts, root=opts.rootRank)

    def allgather(self, output_tensors: Sequence[Tensors], input_tensors: Tensors, opts: Any = None) -> TorchWork:
        """Gives every rank the tensors of all ranks, whose sizes may differ."""
        outputs = list(output_tensors[0])
        return self._allgather([(outputs, input_tensors[0])], outputs, opts)

    def allgather_coalesced(self, output_lists: Sequence[Tensors], input_list: Tensors, opts: Any = None) -> TorchWork:
        """Gives every rank the lists of tensors of all ranks, by rank."""
        outputs = [list(tensors) for tensors in output_lists]
        return self._allgather([(outputs, list(input_list))], [tensor for some in outputs for tensor in some], opts)

    def all_gather_single(self, output: Any, input: Any, opts: Any = None) -> TorchWork:
        """Gives every rank the tensors of all ranks, one behind the other in one tensor."""
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> TorchWork:
        """Like `all_gather_single`, for several tensors."""
        pairs = [(_flat(output), input_tensor) for output, input_tensor in zip(outputs, inputs, strict=True)]
        return self._allgather(pairs, list(outputs), opts)

    def reduce_scatter(self, output_tensors: Tensors, input_tensors: Sequence[Tensors], opts: Any = None) -> TorchWork:
        """Reduces lists of tensors over all ranks, and gives each rank its item of the result."""
        return self._reduce_scatter([(output_tensors[0], list(input_tensors[0]))], opts)

    def reduce_scatter_single(self, output: Any, input: Any, opts: Any = None) -> TorchWork:
        """Reduces a tensor over all ranks, and gives each rank its part of the result."""
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> TorchWork:
        """Like `reduce_scatter_single`, for several tensors."""
        return self._reduce_scatter(
            [(output, _flat(input_tensor)) for output, input_tensor in zip(outputs, inputs, strict=True)], opts
        )

    def gather(self, output_tensors: Sequence[Tensors], input_tensors: Tensors, opts: Any = None) -> TorchWork:
        """Gives one rank the tensors of all ranks."""
        opts = opts or distributed.GatherOptions()
        outputs = list(output_tensors[0]) if self._rank == opts.rootRank else []
        values = [("tensor", input_tensors[0]), *([("tensor_list", outputs)] if outputs else [])]
        return self._start(OpKind.GATHER, [values], outputs, opts, root=opts.rootRank)

    def scatter(self, output_tensors: Tensors, input_tensors: Sequence[Tensors], opts: Any = None) -> TorchWork:
        """Gives each rank its item of one rank's list."""
        opts = opts or distributed.ScatterOptions()
        given = [("tensor_list", list(input_tensors[0]))] if self._rank == opts.rootRank else []
        values = [*given, ("tensor", output_tensors[0])]
        return self._start(OpKind.SCATTER, [values], output_tensors, opts, root=opts.rootRank)

    def alltoall(self, output_tensors: Tensors, input_tensors: Tensors, opts: Any = None) -> TorchWork:
        """Gives each rank its item of every rank's list."""
        values = [("tensor_list_in", list(input_tensors)), ("tensor_list_out", list(output_tensors))]
        return self._start(OpKind.ALLTOALL, [values], output_tensors, opts)

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
        return self._start(OpKind.ALLTOALL, [[("tensor_list_in", given), ("tensor_list_out", taken)]], [output], opts)

    def send(self, tensors: Tensors, dst_rank: int, tag: int = 0) -> TorchWork:
        """Sends a tensor to one rank."""
        self._check_tag("send", tag)
        values, pair = [("tensor", _operand(tensors))], name_of_ranks(self._rank, dst_rank)
        return self._start(OpKind.SEND, [values], tensors, communicator=pair, root=ME, peer=dst_rank)

    def recv(self, tensors: Tensors, src_rank: int, tag: int = 0) -> TorchWork:
        """Receives a tensor from one rank, in place."""
        self._check_tag("recv", tag)
        values, pair = [("tensor", _operand(tensors))], name_of_ranks(src_rank, self._rank)
        return self._start(OpKind.SEND, [values], tensors, communicator=pair, source=src_rank, root=src_rank, peer=ME)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> TorchWork:
        """Raises: a receive has to name its source rank."""
        raise self._unsupported("recv", "source rank", "missing", "the rank to receive from")

    def barrier(self, opts: Any = None) -> TorchWork:
        """Waits until all ranks have called it."""
        return self._start(OpKind.BARRIER, [[]], [], opts)

    # torch's names before 2.10
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # ------------------------------------------------------------------------------------------ one call

    def _allgather(self, pairs: Sequence[tuple[Any, Any]], result: Tensors, opts: Any) -> TorchWork:
        calls = [[("tensor", given), ("tensor_list", taken)] for taken, given in pairs]
        return self._start(OpKind.ALLGATHER, calls, result, opts)

    def _reduce_scatter(self, pairs: Sequence[tuple[Any, Any]], opts: Any) -> TorchWork:
        opts = opts or distributed.ReduceScatterOptions()
        calls = [[("tensor_list", given), ("tensor", taken)] for taken, given in pairs]
        return self._start(OpKind.REDUCESCATTER, calls, [taken for taken, _ in pairs], opts, op=_op(opts))

    def _start(
        self,
        kind: OpKind,
        calls: Sequence[_Values],
        tensors: Tensors,
        opts: Any = None,
        *,
        communicator: str = ALL,
        source: int = -1,
        **arguments: Any,
    ) -> TorchWork:
        """Makes calls one after the other: in this thread if the caller waits, after the calls in progress.

        `opts` are torch's options, `arguments` those of `MemberCall`, and `tensors` the result of the work.
        """
        given_s = opts.timeout.total_seconds() if opts is not None else 0.0
        timeout_s = given_s if given_s > 0 else None  # torch passes -1 ms by default

        def run() -> Outcome:
            for values in calls:
                MemberCall.of(kind, self._member_group, **arguments).run(values, async_op=False, timeout_s=timeout_s)
            return Outcome()

        def run_for(caller: Mark) -> Outcome:
            with streams.after(caller):
                return run()

        queue, place = self._queues.get(communicator), self._place
        future: Future[Outcome] = Future()
        is_here = not getattr(opts, "asyncOp", True)  # a signal that interrupts `drain` leaves no call behind
        if is_here and (queue is None or not queue.pending or queue.drain()):
            future.set_result(run())
        else:
            if queue is None:
                name = f"{self._member_group}-{communicator}"
                new_queue = CallQueue(name, place.broken)
                queue = self._queues.setdefault(communicator, new_queue)
            caller = _mark(calls)
            future = queue.submit(run if caller is None else partial(run_for, caller))
        op = kind.value if source < 0 else OpKind.RECV.value
        return TorchWork(MemberWork(place, op, future, is_heard=True), future, tensors, source)

    def _check_tag(self, op: str, tag: int) -> None:
        if tag:
            raise self._unsupported(op, "tag", str(tag), "0: calls between two ranks match by their order")

    def _unsupported(self, op: str, field: str, actual: str, expected: str) -> RaycollectError:
        wrong = Violation(kind="unsupported", rank=self._rank, field=field, found=actual, expected=expected)
        return refusal(op, self._member_group, (wrong,))


def _mark(calls: Sequence[_Values]) -> Mark | None:
    """The position of the calling thread's streams on the GPUs of tensors; None for tensors in host memory."""
    tensors = [tensor for values in calls for _, value in values for tensor in _tensors(value)]
    return streams.mark([arrays.describe(tensor) for tensor in tensors if tensor.is_cuda])


def _tensors(value: Any) -> Iterator[Any]:
    if isinstance(value, list):
        for item in value:
            yield from _tensors(item)
    else:
        yield value


def _operand(tensors: Tensors) -> Any:
    return tensors[0] if len(tensors) == 1 else list(tensors)


def _op(opts: Any) -> str:
    return str(opts.reduceOp.op.name)


def _flat(tensor: Any) -> Any:
    """A view with one dimension, for the ranks to divide; the call refuses tensors that are not contiguous."""
    return tensor.view(-1) if tensor.is_contiguous() else tensor


def _cut(tensor: Any, sizes: Sequence[int]) -> Any:
    return list(tensor.split(list(sizes))) if sizes else _flat(tensor)
