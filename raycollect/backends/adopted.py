"""Backends made of classes in the shape of `ray.util.collective`'s `BaseGroup`: `register_collective_backend`.

Such a class is built as ``group_cls(world_size, rank, group_name)`` and works in place on lists of tensors, with all
ranks at once. It may write to its inputs (Ray's gloo does so in reducescatter), so it gets copies: arrays in C order
and native byte order, pieces padded to the largest. Memory: one copy of the operands. A call of the class can't be
interrupted, and a failure leaves the members in an unknown state and the group broken. Ray is not imported.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from types import new_class
from typing import Any

import numpy as np

from raycollect import backends
from raycollect.backends import options
from raycollect.backends.arrays import Array, native
from raycollect.backends.capabilities import Capabilities
from raycollect.backends.exchanged import Exchanged
from raycollect.backends.folds import finish
from raycollect.backends.in_use import InUse
from raycollect.backends.kernels import translated
from raycollect.core import threads
from raycollect.core.model import Kernel, Launch, OpKind, ReduceOp
from raycollect.core.protocols import Joining
from raycollect.errors import BackendUnavailableError
from raycollect.errors.text import shown

# The operations of a `BaseGroup`, whose names are the same there, and the options of each: by reduce op, peer and limit
_OPTIONS: dict[OpKind, Callable[[Any, int, timedelta], Any]] = {
    OpKind.ALLREDUCE: lambda op, peer, left: options.AllReduceOptions(reduceOp=op, timeout_ms=left),
    OpKind.BARRIER: lambda op, peer, left: options.BarrierOptions(timeout_ms=left),
    OpKind.REDUCE: lambda op, peer, left: options.ReduceOptions(reduceOp=op, root_rank=peer, timeout_ms=left),
    OpKind.ALLGATHER: lambda op, peer, left: options.AllGatherOptions(timeout_ms=left),
    OpKind.BROADCAST: lambda op, peer, left: options.BroadcastOptions(root_rank=peer, timeout_ms=left),
    OpKind.REDUCESCATTER: lambda op, peer, left: options.ReduceScatterOptions(reduceOp=op, timeout_ms=left),
    OpKind.SEND: lambda op, peer, left: options.SendOptions(dst_rank=peer, timeout_ms=left),
    OpKind.RECV: lambda op, peer, left: options.RecvOptions(src_rank=peer, timeout_ms=left),
}

# Such a class has the first four. AVG is a sum, divided here.
REDUCE_OPS = frozenset({ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.AVG})
CLOSE_TIMEOUT_S = 1.0  # How long to wait until the class has destroyed its group
_RAY_BASE = "ray.util.collective.collective_group.base_collective_group"
_RAY_TYPES = "ray.util.collective.types"


def register_collective_backend(name: str, group_cls: type[Any]) -> None:
    """Makes a class in the shape of Ray's `BaseGroup` a backend of this process; each process of a group needs it.

    The backend has the operations that the class overrides; the planner builds others.
    """
    backends.register(adopt(name, group_cls))


def adopt(name: str, group_cls: type[Any]) -> Capabilities:
    """Makes the capability line of a class in the shape of `BaseGroup`."""
    ops = _ops(group_cls)
    if not isinstance(group_cls, type) or not ops or not _overrides(group_cls, "check_backend_availability"):
        raise TypeError(
            f"{shown(group_cls)} is no collective group: it needs a classmethod check_backend_availability, and some "
            f"of {', '.join(kind.value for kind in _OPTIONS)}, with the arguments of ray.util.collective's BaseGroup"
        )
    return Capabilities(
        name=backends.canonical(name),
        factory=_Factory(group_cls),
        probe=partial(_missing, group_cls),
        ops=ops,
        reduce_ops=REDUCE_OPS,
        interruptible=False,
        bitwise=False,
        cross_host=True,
    )


def _ops(group_cls: type[Any]) -> frozenset[OpKind]:
    return frozenset(kind for kind in _OPTIONS if _overrides(group_cls, kind.value))


def _overrides(group_cls: type[Any], method: str) -> bool:
    attribute = getattr(group_cls, method, None)
    return callable(attribute) and not getattr(attribute, "__isabstractmethod__", False)


def _missing(group_cls: type[Any]) -> str:
    """Says why the class does not work here, or ""."""
    call = f"{group_cls.__name__}.check_backend_availability()"
    try:
        return "" if group_cls.check_backend_availability() else f"{call} says no"
    except Exception as exc:  # noqa: BLE001 - foreign code may fail in any way: it does not work
        return f"{call}: {type(exc).__name__}: {exc}"


@dataclass(frozen=True, slots=True)
class _Factory:
    """A `CommunicatorFactory`, equal for the same class, so that it may be registered again."""

    group_cls: type[Any]

    def __call__(self, joining: Joining) -> AdoptedCommunicator:
        """Builds the class's group; `spec.options` are its further keyword arguments."""
        spec, rank, group_cls = joining.spec, joining.rank, self.group_cls
        # Communicators of one group coexist, and later groups may reuse its name: a nonce makes each name unique.
        name = re.sub(r"[^\w.-]+", "-", f"{spec.name}.{spec.group_id}")
        if getattr(group_cls, "__abstractmethods__", None):  # abstract methods are never called
            group_cls = new_class(group_cls.__name__, (group_cls,))
            group_cls.__abstractmethods__ = frozenset()
        try:
            group = group_cls(spec.world_size, rank, name, **dict(spec.options))
        except Exception as exc:  # the class is not ours
            call = f"{group_cls.__name__}({spec.world_size}, {rank}, {name!r})"
            detail = f"backend {spec.backend!r}: {call} failed: {type(exc).__name__}: {exc}"
            raise BackendUnavailableError(group_name=spec.name, detail=detail) from exc
        return AdoptedCommunicator(group, joining)


class AdoptedCommunicator(Exchanged):
    """One rank's membership. An abort interrupts the agreement only; a kernel runs to its end."""

    def __init__(self, group: Any, joining: Joining) -> None:
        super().__init__(joining)
        self._use = InUse(group, _destroy, self._group_name)
        self._backend = joining.spec.backend
        self._ops = _ops(type(group))
        self._reduce_ops = _reduce_ops(type(group))

    def close(self) -> None:
        """Destroys the class's group, at once or at the end of the running kernel."""
        super().close()
        self._use.close()

    def _run(self, launch: Launch, kernel: Kernel) -> None:
        self._check_kernel(launch, kernel)
        try:
            with translated(kernel.kind, self._group_name, self.rank):
                self._use.call(self._call, kernel, timedelta(seconds=launch.timeout_s))
        except BaseException as exc:
            self._broken = self._broken or f"{kernel.kind.value} of launch {launch.seq} failed in mid-kernel: {exc}"
            raise

    def _check_kernel(self, launch: Launch, kernel: Kernel) -> None:
        pair, runs = kernel.kind in (OpKind.SEND, OpKind.RECV), f"what backend {self._backend!r} runs"
        if kernel.kind not in self._ops:
            supported = ", ".join(sorted(kind.value for kind in self._ops))
            raise self._refused(kernel, "op", kernel.kind.value, f"{runs}: {supported}")
        if kernel.op is not None and kernel.op not in self._reduce_ops:
            supported = ", ".join(op.name for op in self._reduce_ops)
            raise self._refused(kernel, "reduce op", kernel.op.name, f"{runs}: {supported}")
        if not pair and len(launch.ranks) != self.world_size:
            raise self._refused(kernel, "list of ranks", str(list(launch.ranks)), f"{runs}: all of the group")

    def _call(self, group: Any, kernel: Kernel, left: timedelta) -> None:
        kind, src, dst = kernel.kind, kernel.src, kernel.dst
        op = None if kernel.op is None else self._reduce_ops[kernel.op]
        how = _OPTIONS[kind](op, kernel.peer, left)
        call, is_root = getattr(group, kind.value), self.rank == kernel.peer
        # Sizes of pieces may differ, but the largest is the same on all ranks
        if kind is OpKind.BARRIER:
            call(how)
        elif kind is OpKind.ALLGATHER:
            most = max(piece.size for piece in dst)
            row = [_padded(piece, most) for piece in dst]
            if most:
                call([row], [_padded(src, most)], how)
            for piece, values in zip(dst, row, strict=True):
                self._give(values, piece)
        elif kind is OpKind.REDUCESCATTER:
            most = max(piece.size for piece in src)
            own = _padded(dst, most)
            if most:
                call([own], [[_padded(piece, most) for piece in src]], how)
            self._give(own, dst, kernel.op)
        else:
            given = dst if src is None else src
            tensor = np.array(given, native(given.dtype), order="C")
            if tensor.size:
                call([tensor], how)
            is_giver = kind is OpKind.SEND or (kind is OpKind.REDUCE and not is_root)
            if not is_giver and dst is not None and not (kind is OpKind.BROADCAST and is_root and dst is src):
                self._give(tensor, dst, kernel.op)

    def _give(self, values: Array, target: Array, op: ReduceOp | None = None) -> None:
        # The values may be padded.
        if op is not None:
            finish(op, values, self.world_size)
        target[...] = values.reshape(-1)[: target.size].reshape(target.shape)


def _padded(array: Array, size: int) -> Array:
    padded: Array = np.zeros(size, native(array.dtype))
    padded[: array.size] = array.reshape(-1)
    return padded


def _destroy(group: Any) -> None:
    destroy = getattr(group, "destroy_group", None)
    if destroy is not None:
        threads.bounded(destroy, CLOSE_TIMEOUT_S)


def _reduce_ops(group_cls: type[Any]) -> dict[ReduceOp, Any]:
    # Classes derived from Ray's get Ray's enum: members of two enums are never equal.
    theirs: Any = ReduceOp
    if any(base.__module__ == _RAY_BASE for base in group_cls.__mro__):
        theirs = sys.modules[_RAY_TYPES].ReduceOp
    return {op: theirs["SUM" if op is ReduceOp.AVG else op.name] for op in ReduceOp if op in REDUCE_OPS}
