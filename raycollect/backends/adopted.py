"""Groups in the shape of `ray.util.collective`'s `BaseGroup` as backends: `register_collective_backend`.

Such a class is built as ``group_cls(world_size, rank, group_name)`` and works on lists of tensors, in place, all ranks
at once. So this adapter copies where a kernel's arrays are apart, pads pieces of different sizes to the largest, and
gives copies where a class might write what a kernel may only read (as Ray's own gloo does in reducescatter).
Memory: up to one copy of the operands. What the class does can't be interrupted, and after a failure nobody knows where
its members are: the group is broken then. Nothing of Ray is imported.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import new_class
from typing import Any

import numpy as np

from raycollect import backends
from raycollect.contracts import Completion, Exchange, Rendezvous, SegmentSource
from raycollect.errors import (
    BackendUnavailableError,
    Violation,
    refusal,
)
from raycollect.model import GroupSpec, Kernel, Launch, OpKind, ReduceOp

from ._exchanged import Exchanged
from .arrays import Array
from .capabilities import Capabilities
from .completion import DONE, reduce_op, translated
from .folds import finish
from .options import (
    AllGatherOptions,
    AllReduceOptions,
    BarrierOptions,
    BroadcastOptions,
    RecvOptions,
    ReduceOptions,
    ReduceScatterOptions,
    SendOptions,
)

__all__ = ["AdoptedCommunicator", "Adoption", "adopt", "register_collective_backend"]

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
"""The operations of a `BaseGroup`."""

REDUCE_OPS = frozenset({ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.AVG})
"""The four that such a class knows, and the average, which is a sum divided here."""

_RAY_BASE = "ray.util.collective.collective_group.base_collective_group"
_RAY_TYPES = "ray.util.collective.types"


def register_collective_backend(name: str, group_cls: type[Any]) -> None:
    """Makes a class in the shape of Ray's `BaseGroup` a backend of this process; each process of a group needs it.

    Only the operations that the class overrides are the backend's; the planner makes some others of these.

    Args:
        name: What the backend will be called, in any case.
        group_cls: The class. It sees numpy arrays, and options of `raycollect.types`.

    Raises:
        TypeError: It lacks `check_backend_availability`, or has no operation at all.
        ValueError: Another backend has that name.
    """
    backends.register(adopt(name, group_cls))


def adopt(name: str, group_cls: type[Any]) -> Capabilities:
    """Makes the capability line of a class in the shape of `BaseGroup`.

    Raises:
        TypeError: The class has not that shape.
        ValueError: The name can't be one.
    """
    ops = frozenset(kind for kind, method in METHODS.items() if _overrides(group_cls, method))
    if not isinstance(group_cls, type) or not ops or not _overrides(group_cls, "check_backend_availability"):
        raise TypeError(
            f"{group_cls!r} is no collective group: it needs a classmethod check_backend_availability, and some of "
            f"{', '.join(METHODS.values())}, with the arguments of ray.util.collective's BaseGroup"
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
    """The factory of communicators over one class; see `raycollect.contracts.CommunicatorFactory`.

    Attributes:
        group_cls: The class.
    """

    group_cls: type[Any]

    def missing(self) -> str:
        """Says that the class can't work here, or ""."""
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
        """Builds the class's group; `spec.options` are its further keyword arguments.

        Raises:
            BackendUnavailableError: The class's constructor failed.
        """
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
    """The class, free of abstract methods: those that it leaves out are never called."""
    if not getattr(group_cls, "__abstractmethods__", None):
        return group_cls
    made: type[Any] = new_class(group_cls.__name__, (group_cls,))
    made.__abstractmethods__ = frozenset()
    return made


class AdoptedCommunicator(Exchanged):
    """One rank's membership. An abort wakes it at the door; a kernel runs to its end."""

    def __init__(self, group: Any, spec: GroupSpec, rank: int, exchange: Exchange) -> None:
        super().__init__(spec, rank, exchange)
        self._group = group
        self._spec = spec
        self._ops = {kind for kind, method in METHODS.items() if _overrides(type(group), method)}
        self._reduce_ops = _reduce_ops(type(group))
        self._closed = False
        self._busy = threading.Lock()
        self._kernels: dict[OpKind, Callable[[Kernel, timedelta], None]] = {
            OpKind.ALLREDUCE: self._allreduce,
            OpKind.BARRIER: lambda kernel, left: self._group.barrier(BarrierOptions(timeout_ms=left)),
            OpKind.REDUCE: self._reduce,
            OpKind.ALLGATHER: self._allgather,
            OpKind.BROADCAST: self._broadcast,
            OpKind.REDUCESCATTER: self._reducescatter,
            OpKind.SEND: self._send,
            OpKind.RECV: self._recv,
        }

    def stage(self, launch: Launch, kernel: Kernel) -> None:
        """Moves nothing; refuses before the door what the class can't do."""
        self._check_supported(launch, kernel)

    def launch(self, launch: Launch, kernel: Kernel) -> Completion:
        """Runs a kernel in the caller's thread."""
        self._check_supported(launch, kernel)
        with self._busy:
            self._check_going(launch)
            try:
                with translated(kernel.kind, self._spec.name, self.rank):
                    self._kernels[kernel.kind](kernel, timedelta(seconds=launch.timeout_s))
            except BaseException as exc:
                self._broken = f"{kernel.kind.value} of launch {launch.seq} failed in mid-kernel: {exc}"
                raise
        if self._closed:
            self.close()
        return DONE

    def close(self) -> None:
        """Lets the class destroy its group; where a kernel is under way, when that has ended."""
        self._broken = self._broken or "the communicator was closed"
        self._closed = True
        if self._busy.acquire(blocking=False):
            try:
                group, self._group = self._group, None
                destroy = getattr(group, "destroy_group", None)
                if destroy is not None:
                    destroy()
            finally:
                self._busy.release()

    def _check_supported(self, launch: Launch, kernel: Kernel) -> None:
        pair = kernel.kind in (OpKind.SEND, OpKind.RECV)
        if kernel.kind not in self._ops:
            self._refuse(kernel, "op", kernel.kind.value, ", ".join(sorted(kind.value for kind in self._ops)))
        if kernel.op is not None and kernel.op not in self._reduce_ops:
            self._refuse(kernel, "reduce op", kernel.op.name, ", ".join(op.name for op in self._reduce_ops))
        if not pair and len(launch.ranks) != self.world_size:
            self._refuse(kernel, "ranks", str(list(launch.ranks)), "all of the group")

    def _refuse(self, kernel: Kernel, field: str, found: str, expected: str) -> None:
        violation = Violation(
            kind="unsupported",
            rank=self.rank,
            field=field,
            found=found,
            expected=f"what backend {self._spec.backend!r} runs: {expected}",
        )
        raise refusal(kernel.kind.value, self._spec.name, (violation,))

    # ------------------------------------------------------------------------------------------ kernels

    def _allreduce(self, kernel: Kernel, left: timedelta) -> None:
        lent = _Lent(kernel.dst, kernel.src.shape, holding=kernel.src)
        if lent.size:
            self._group.allreduce([lent.tensor], AllReduceOptions(reduceOp=self._named(kernel), timeout_ms=left))
        lent.give_back(kernel.op, self.world_size)

    def _reduce(self, kernel: Kernel, left: timedelta) -> None:
        lent = (
            _Lent(kernel.dst, kernel.src.shape, holding=kernel.src)
            if self.rank == kernel.peer
            else _Lent.copy(kernel.src)
        )
        if lent.size:
            named = self._named(kernel)
            options = ReduceOptions(reduceOp=named, root_rank=kernel.peer, timeout_ms=left)
            self._group.reduce([lent.tensor], options)
        if self.rank == kernel.peer:
            lent.give_back(kernel.op, self.world_size)

    def _broadcast(self, kernel: Kernel, left: timedelta) -> None:
        root = self.rank == kernel.peer
        lent = _Lent.to_read(kernel.dst if kernel.src is None else kernel.src) if root else _Lent(kernel.dst)
        if lent.size:
            self._group.broadcast([lent.tensor], BroadcastOptions(root_rank=kernel.peer, timeout_ms=left))
        if not root:
            lent.give_back()
        elif kernel.dst is not None and kernel.dst is not kernel.src:
            _copy(lent.tensor, kernel.dst)

    def _allgather(self, kernel: Kernel, left: timedelta) -> None:
        shape = _row(kernel.dst)
        pieces = [_Lent(piece, shape) for piece in kernel.dst]
        own = _Lent.copy(kernel.src, shape)  # it may lie in pieces[own rank], which the class may clear first
        if own.size:
            self._group.allgather([[piece.tensor for piece in pieces]], [own.tensor], AllGatherOptions(timeout_ms=left))
        for piece in pieces:
            piece.give_back()

    def _reducescatter(self, kernel: Kernel, left: timedelta) -> None:
        shape = _row(kernel.src)
        pieces = [_Lent.copy(piece, shape) for piece in kernel.src]
        lent = _Lent(kernel.dst, shape)
        if lent.size:
            options = ReduceScatterOptions(reduceOp=self._named(kernel), timeout_ms=left)
            self._group.reducescatter([lent.tensor], [[piece.tensor for piece in pieces]], options)
        lent.give_back(kernel.op, self.world_size)

    def _send(self, kernel: Kernel, left: timedelta) -> None:
        lent = _Lent.to_read(kernel.src)
        if lent.size:
            self._group.send([lent.tensor], SendOptions(dst_rank=kernel.peer, timeout_ms=left))

    def _recv(self, kernel: Kernel, left: timedelta) -> None:
        lent = _Lent(kernel.dst)
        if lent.size:
            self._group.recv([lent.tensor], RecvOptions(src_rank=kernel.peer, timeout_ms=left))
        lent.give_back()

    def _named(self, kernel: Kernel) -> Any:
        """The reduce op as the class knows it."""
        return self._reduce_ops[reduce_op(kernel)]


def _reduce_ops(group_cls: type[Any]) -> dict[ReduceOp, Any]:
    """Our reduce ops, and what the class compares them with: its base's, as members of two enums are never equal."""
    theirs: Any = ReduceOp
    if any(base.__module__ == _RAY_BASE for base in group_cls.__mro__):
        theirs = sys.modules[_RAY_TYPES].ReduceOp
    return {op: theirs["SUM" if op is ReduceOp.AVG else op.name] for op in ReduceOp if op in REDUCE_OPS}


def _row(pieces: Sequence[Array]) -> tuple[int]:
    """The shape of a row that holds the largest piece: the same on all ranks, whose shapes may differ."""
    return (max(piece.size for piece in pieces),)


class _Lent:
    """An array as the class gets it: C order, native, writable and of the shape asked for.

    Attributes:
        tensor: The array itself where it is all that, else one that stands for it until `give_back`.
        size: The number of its elements.
    """

    __slots__ = ("_array", "size", "tensor")

    def __init__(self, array: Array, shape: tuple[int, ...] | None = None, *, holding: Array | None = None) -> None:
        shape = array.shape if shape is None else shape
        native = array.dtype.isnative
        suits = array.flags.carray and native and array.shape == shape
        self.tensor = array if suits else np.zeros(shape, array.dtype if native else array.dtype.newbyteorder("="))
        self.size = self.tensor.size
        self._array = array
        if holding is not None and holding is not self.tensor:
            _copy(holding, self.tensor)

    @classmethod
    def copy(cls, array: Array, shape: tuple[int, ...] | None = None) -> _Lent:
        """A copy, which the class may write."""
        own = np.zeros(array.shape if shape is None else shape, array.dtype)
        _copy(array, own)
        return cls(own, holding=own)

    @classmethod
    def to_read(cls, array: Array) -> _Lent:
        """An array that is not given back."""
        return cls(array, holding=array)

    def give_back(self, op: ReduceOp | None = None, world_size: int = 1) -> None:
        """Brings what the class wrote to the array, as an average where that was asked for."""
        if op is not None:
            finish(op, self.tensor, world_size)
        if self.tensor is not self._array:
            _copy(self.tensor, self._array)


def _copy(source: Array, target: Array) -> None:
    """Copies in flat order as many elements as both have: one of them may be padded."""
    size = min(source.size, target.size)
    if source.shape == target.shape:
        target[...] = source
    elif source.size >= target.size:
        target[...] = source.reshape(-1)[:size].reshape(target.shape)
    else:
        target.reshape(-1)[:size] = source.reshape(-1)  # a padded row, which is contiguous
