"""Backends made of classes in the shape of `ray.util.collective`'s `BaseGroup`: `register_collective_backend`.

Such a class is built as ``group_cls(world_size, rank, group_name)`` and works in place on lists of tensors, with all
ranks at once. So this adapter copies where source and destination differ, pads pieces of different sizes to the
largest, and passes copies where a class might write to an array that a kernel may only read (Ray's gloo does so in
reducescatter). Memory: up to one copy of the operands. A call of the class can't be interrupted, and a failure leaves
the members in an unknown state, so the group is broken then. Nothing of Ray is imported.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import new_class
from typing import Any

import numpy as np

from raycollect import backends
from raycollect.backends.arrays import Array
from raycollect.backends.capabilities import Capabilities
from raycollect.backends.completion import DONE, reduce_op, translated
from raycollect.backends.exchanged import Exchanged
from raycollect.backends.folds import finish
from raycollect.backends.in_use import InUse
from raycollect.backends.options import (
    AllGatherOptions,
    AllReduceOptions,
    BarrierOptions,
    BroadcastOptions,
    RecvOptions,
    ReduceOptions,
    ReduceScatterOptions,
    SendOptions,
)
from raycollect.core import threads
from raycollect.core.model import GroupSpec, Kernel, Launch, OpKind, ReduceOp
from raycollect.core.protocols import Completion, Exchange, Rendezvous, SegmentSource
from raycollect.errors import BackendUnavailableError
from raycollect.errors.text import shown

# The operations of a `BaseGroup`
METHODS: dict[OpKind, str] = {
    OpKind.ALLREDUCE: "allreduce",
    OpKind.BARRIER: "barrier",
    OpKind.REDUCE: "reduce",
    OpKind.ALLGATHER: "allgather",
    OpKind.BROADCAST: "broadcast",
    OpKind.REDUCESCATTER: "reducescatter",
    OpKind.SEND: "send",
    OpKind.RECV: "recv",
}

# Such a class knows the first four. AVG is a sum, divided here.
REDUCE_OPS = frozenset({ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.AVG})
CLOSE_TIMEOUT_S = 1.0  # How long to wait until the class has destroyed its group
_RAY_BASE = "ray.util.collective.collective_group.base_collective_group"
_RAY_TYPES = "ray.util.collective.types"


def register_collective_backend(name: str, group_cls: type[Any]) -> None:
    """Makes a class in the shape of Ray's `BaseGroup` a backend of this process; each process of a group needs it.

    Only the operations that the class overrides are the backend's; the planner makes some others of these.
    """
    backends.register(adopt(name, group_cls))


def adopt(name: str, group_cls: type[Any]) -> Capabilities:
    """Makes the capability line of a class in the shape of `BaseGroup`."""
    ops = frozenset(kind for kind, method in METHODS.items() if _overrides(group_cls, method))
    if not isinstance(group_cls, type) or not ops or not _overrides(group_cls, "check_backend_availability"):
        raise TypeError(
            f"{shown(group_cls)} is no collective group: it needs a classmethod check_backend_availability, and some "
            f"of {', '.join(METHODS.values())}, with the arguments of ray.util.collective's BaseGroup"
        )
    adoption = Adoption(group_cls)
    return Capabilities(
        name=backends.canonical(name),
        factory=adoption,
        probe=adoption.missing,
        ops=ops,
        reduce_ops=REDUCE_OPS,
        interruptible=False,
        bitwise=False,
        cross_host=True,
    )


def _overrides(group_cls: type[Any], method: str) -> bool:
    found = getattr(group_cls, method, None)
    return callable(found) and not getattr(found, "__isabstractmethod__", False)


@dataclass(frozen=True, slots=True)
class Adoption:
    """Creates communicators over one class, as a `raycollect.core.protocols.CommunicatorFactory`."""

    group_cls: type[Any]

    def missing(self) -> str:
        """Says why the class does not work here, or ""."""
        asked = f"{self.group_cls.__name__}.check_backend_availability()"
        try:
            return "" if self.group_cls.check_backend_availability() else f"{asked} says no"
        except Exception as exc:  # noqa: BLE001 - code of others, asked whether it works: it does not
            return f"{asked}: {type(exc).__name__}: {exc}"

    def __call__(
        self,
        spec: GroupSpec,
        rank: int,
        rendezvous: Rendezvous,
        exchange: Exchange,
        *,
        host: str = "",
        segments: SegmentSource | None = None,
    ) -> AdoptedCommunicator:
        """Builds the class's group; `spec.options` are its further keyword arguments."""
        # Several communicators of one group live at once, and later groups may have its name: a nonce keeps them apart.
        name = re.sub(r"[^\w.-]+", "-", f"{spec.name}.{spec.group_id}")
        try:
            group = _concrete(self.group_cls)(spec.world_size, rank, name, **dict(spec.options))
        except Exception as exc:
            made = f"{self.group_cls.__name__}({spec.world_size}, {rank}, {name!r})"
            detail = f"backend {spec.backend!r}: {made} failed: {type(exc).__name__}: {exc}"
            raise BackendUnavailableError(group_name=spec.name, detail=detail) from exc
        return AdoptedCommunicator(group, spec, rank, exchange)


def _concrete(group_cls: type[Any]) -> type[Any]:
    # Abstract methods that the class leaves out are never called.
    if not getattr(group_cls, "__abstractmethods__", None):
        return group_cls
    made: type[Any] = new_class(group_cls.__name__, (group_cls,))
    made.__abstractmethods__ = frozenset()
    return made


class AdoptedCommunicator(Exchanged):
    """One rank's membership. An abort wakes it during the agreement only; a kernel runs to its end."""

    def __init__(self, group: Any, spec: GroupSpec, rank: int, exchange: Exchange) -> None:
        super().__init__(spec, rank, exchange)
        self._use = InUse(group, _destroy, spec.name)
        self._backend = spec.backend
        self._ops = {kind for kind, method in METHODS.items() if _overrides(type(group), method)}
        self._reduce_ops = _reduce_ops(type(group))

    def stage(self, launch: Launch, kernel: Kernel) -> None:
        """Checks before the agreement that the class supports the kernel."""
        self._check_supported(launch, kernel)

    def launch(self, launch: Launch, kernel: Kernel) -> Completion:
        """Runs a kernel in the caller's thread."""
        self._check_supported(launch, kernel)
        self._check_going(launch)
        with self._use as group:
            self._run(group, launch, kernel)
        return DONE

    def _run(self, group: Any, launch: Launch, kernel: Kernel) -> None:
        try:
            with translated(kernel.kind, self._group_name, self.rank):
                _KERNELS[kernel.kind](self, group, kernel, timedelta(seconds=launch.timeout_s))
        except BaseException as exc:
            self._broken = self._broken or f"{kernel.kind.value} of launch {launch.seq} failed in mid-kernel: {exc}"
            raise

    def close(self) -> None:
        """Lets the class destroy its group, at once or at the end of the running kernel."""
        self._broken = self._broken or "the communicator was closed"
        self._use.close()

    def _check_supported(self, launch: Launch, kernel: Kernel) -> None:
        pair, runs = kernel.kind in (OpKind.SEND, OpKind.RECV), f"what backend {self._backend!r} runs"
        if kernel.kind not in self._ops:
            known = ", ".join(sorted(kind.value for kind in self._ops))
            raise self._refused(kernel, "op", kernel.kind.value, f"{runs}: {known}")
        if kernel.op is not None and kernel.op not in self._reduce_ops:
            known = ", ".join(op.name for op in self._reduce_ops)
            raise self._refused(kernel, "reduce op", kernel.op.name, f"{runs}: {known}")
        if not pair and len(launch.ranks) != self.world_size:
            raise self._refused(kernel, "list of ranks", str(list(launch.ranks)), f"{runs}: all of the group")

    def _allreduce(self, group: Any, kernel: Kernel, left: timedelta) -> None:
        lent = _Lent(kernel.dst, kernel.src.shape, holding=kernel.src)
        if lent.size:
            group.allreduce([lent.tensor], AllReduceOptions(reduceOp=self._named(kernel), timeout_ms=left))
        lent.give_back(kernel.op, self.world_size)

    def _barrier(self, group: Any, kernel: Kernel, left: timedelta) -> None:
        group.barrier(BarrierOptions(timeout_ms=left))

    def _reduce(self, group: Any, kernel: Kernel, left: timedelta) -> None:
        lent = (
            _Lent(kernel.dst, kernel.src.shape, holding=kernel.src)
            if self.rank == kernel.peer
            else _Lent.copy(kernel.src)
        )
        if lent.size:
            named = self._named(kernel)
            options = ReduceOptions(reduceOp=named, root_rank=kernel.peer, timeout_ms=left)
            group.reduce([lent.tensor], options)
        if self.rank == kernel.peer:
            lent.give_back(kernel.op, self.world_size)

    def _broadcast(self, group: Any, kernel: Kernel, left: timedelta) -> None:
        root = self.rank == kernel.peer
        lent = _Lent.to_read(kernel.dst if kernel.src is None else kernel.src) if root else _Lent(kernel.dst)
        if lent.size:
            group.broadcast([lent.tensor], BroadcastOptions(root_rank=kernel.peer, timeout_ms=left))
        if not root:
            lent.give_back()
        elif kernel.dst is not None and kernel.dst is not kernel.src:
            _copy(lent.tensor, kernel.dst)

    def _allgather(self, group: Any, kernel: Kernel, left: timedelta) -> None:
        shape = _row(kernel.dst)
        pieces = [_Lent(piece, shape) for piece in kernel.dst]
        own = _Lent.copy(kernel.src, shape)  # it may lie in pieces[own rank], which the class may clear first
        if own.size:
            group.allgather([[piece.tensor for piece in pieces]], [own.tensor], AllGatherOptions(timeout_ms=left))
        for piece in pieces:
            piece.give_back()

    def _reducescatter(self, group: Any, kernel: Kernel, left: timedelta) -> None:
        shape = _row(kernel.src)
        pieces = [_Lent.copy(piece, shape) for piece in kernel.src]
        lent = _Lent(kernel.dst, shape)
        if lent.size:
            options = ReduceScatterOptions(reduceOp=self._named(kernel), timeout_ms=left)
            group.reducescatter([lent.tensor], [[piece.tensor for piece in pieces]], options)
        lent.give_back(kernel.op, self.world_size)

    def _send(self, group: Any, kernel: Kernel, left: timedelta) -> None:
        lent = _Lent.to_read(kernel.src)
        if lent.size:
            group.send([lent.tensor], SendOptions(dst_rank=kernel.peer, timeout_ms=left))

    def _recv(self, group: Any, kernel: Kernel, left: timedelta) -> None:
        lent = _Lent(kernel.dst)
        if lent.size:
            group.recv([lent.tensor], RecvOptions(src_rank=kernel.peer, timeout_ms=left))
        lent.give_back()

    def _named(self, kernel: Kernel) -> Any:
        return self._reduce_ops[reduce_op(kernel)]


def _destroy(group: Any) -> None:
    destroy = getattr(group, "destroy_group", None)
    if destroy is not None:
        threads.bounded(destroy, CLOSE_TIMEOUT_S)


_KERNELS: dict[OpKind, Callable[[AdoptedCommunicator, Any, Kernel, timedelta], None]] = {
    OpKind.ALLREDUCE: AdoptedCommunicator._allreduce,
    OpKind.BARRIER: AdoptedCommunicator._barrier,
    OpKind.REDUCE: AdoptedCommunicator._reduce,
    OpKind.ALLGATHER: AdoptedCommunicator._allgather,
    OpKind.BROADCAST: AdoptedCommunicator._broadcast,
    OpKind.REDUCESCATTER: AdoptedCommunicator._reducescatter,
    OpKind.SEND: AdoptedCommunicator._send,
    OpKind.RECV: AdoptedCommunicator._recv,
}


def _reduce_ops(group_cls: type[Any]) -> dict[ReduceOp, Any]:
    # Ray's enum where the class derives from Ray's: members of two enums are never equal.
    theirs: Any = ReduceOp
    if any(base.__module__ == _RAY_BASE for base in group_cls.__mro__):
        theirs = sys.modules[_RAY_TYPES].ReduceOp
    return {op: theirs["SUM" if op is ReduceOp.AVG else op.name] for op in ReduceOp if op in REDUCE_OPS}


def _row(pieces: Sequence[Array]) -> tuple[int]:
    # All ranks see the same largest piece, but shapes may differ between ranks.
    return (max(piece.size for piece in pieces),)


class _Lent:
    """An array as the class gets it: C order, native byte order, writable and of the requested shape."""

    __slots__ = ("_array", "size", "tensor")

    def __init__(self, array: Array, shape: tuple[int, ...] | None = None, *, holding: Array | None = None) -> None:
        shape = array.shape if shape is None else shape
        native = array.dtype.isnative
        suits = array.flags.carray and native and array.shape == shape
        # the array itself if it qualifies, else a temporary until `give_back`
        self.tensor = array if suits else np.zeros(shape, array.dtype if native else array.dtype.newbyteorder("="))
        self.size = self.tensor.size
        self._array = array
        if holding is not None and holding is not self.tensor:
            _copy(holding, self.tensor)

    @classmethod
    def copy(cls, array: Array, shape: tuple[int, ...] | None = None) -> _Lent:
        own = np.zeros(array.shape if shape is None else shape, array.dtype)
        _copy(array, own)
        return cls(own, holding=own)

    @classmethod
    def to_read(cls, array: Array) -> _Lent:
        return cls(array, holding=array)

    def give_back(self, op: ReduceOp | None = None, world_size: int = 1) -> None:
        if op is not None:
            finish(op, self.tensor, world_size)
        if self.tensor is not self._array:
            _copy(self.tensor, self._array)


def _copy(source: Array, target: Array) -> None:
    # One of them may be padded: copies the first elements, in flat order.
    size = min(source.size, target.size)
    if source.shape == target.shape:
        target[...] = source
    elif source.size >= target.size:
        target[...] = source.reshape(-1)[:size].reshape(target.shape)
    else:
        target.reshape(-1)[:size] = source.reshape(-1)  # a padded row, which is contiguous
