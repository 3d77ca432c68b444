"""Tensors on several devices of one process: copied to one device, folded there, and copied back.

All work is enqueued on cupy's current streams of the calling thread, on each device after the caller's earlier work
there (`streams.follow`). Copies go directly between devices with peer access; else the driver stages them in host
memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any, cast

import numpy as np
from msgspec.structs import replace

from raycollect.backends import arrays
from raycollect.backends.device_arrays import DeviceArray, bits_view, cupy_view, device_id
from raycollect.backends.folds import FOLDS, is_widened, refusal_reason
from raycollect.backends.streams import follow, on_device
from raycollect.core.model import ReduceOp

# NCCL, which reduces next, drops a NaN in favor of a number, and so must this
_NCCLS = {ReduceOp.MIN: "fmin", ReduceOp.MAX: "fmax"}


def objection(op: ReduceOp, dtype: np.dtype[Any], count: int) -> str | None:
    """Says why the tensors of `count` devices can't be folded, or None if they can."""
    reason = refusal_reason(op, dtype.name)
    if reason is None and count > 1 and dtype in arrays.NARROW:
        reason = f"{op.name} of {dtype.name}: cupy has no such type, and so can't fold the tensors of several GPUs"
    return reason


def room(like: DeviceArray, home: int, count: int) -> tuple[DeviceArray, ...]:
    """Allocates `count` consecutive tensors like `like` on device `home`; may raise MemoryError."""
    info = replace(arrays.info(like, like.library), shape=(count, *like.shape), device=f"cuda:{home}")
    made = arrays.empty(info)
    return tuple(cast("DeviceArray", arrays.memory(made[at])) for at in range(count))


def brought(sources: Sequence[DeviceArray], home: int) -> tuple[DeviceArray, ...]:
    """Copies tensors of one shape and dtype to device `home`, from any device; may raise MemoryError."""
    made = room(sources[0], home, len(sources))
    for source, target in zip(sources, made, strict=True):
        _bring([source], [target], home)
    return made


def folded(lists: Sequence[Sequence[DeviceArray]], op: ReduceOp, home: int) -> tuple[DeviceArray, ...]:
    """Reduces the tensors of several devices elementwise, in device order.

    Each list has the tensors of one device, all of one shape and dtype. AVG is over the devices. Returns consecutive
    tensors on `home`; twice their memory is used meanwhile. May raise MemoryError.
    """
    cupy, count = import_module("cupy"), len(lists[0])
    made = room(lists[0][0], home, count)
    first, *others = lists
    with on_device(home):
        incoming = room(made[0], home, count) if others else ()
    _bring(first, made, home)
    if not others:
        return made
    total, arrived = _line(made), _line(incoming)
    divides_first = op is ReduceOp.AVG and is_widened(total.dtype)  # as NCCL: the sum may be beyond 16 bits
    with on_device(home):
        if divides_first:
            cupy.true_divide(total, len(lists), out=total)
        for arriving in others:
            _bring(arriving, incoming, home)
            if divides_first:
                cupy.true_divide(arrived, len(lists), out=arrived)
            getattr(cupy, _NCCLS.get(op) or FOLDS[op].__name__)(total, arrived, out=total)
        if op is ReduceOp.AVG and not divides_first:
            cupy.true_divide(total, len(lists), out=total)
    return made


def spread(sources: Sequence[DeviceArray], targets: Sequence[DeviceArray]) -> None:
    """Enqueues copies of one device's tensors to another, after the caller's work on both; does not wait."""
    if not targets:
        return
    cupy = import_module("cupy")
    here, there = _device(sources[0]), _device(targets[0])
    with on_device(here):
        follow(here)
        lines = [cupy.ascontiguousarray(bits_view(one)) for one in sources]
    stream = follow(there, [here])
    try:
        with on_device(there):
            for line, target in zip(lines, targets, strict=True):
                if target.shadow.flags.c_contiguous:
                    _copy(target.address, line.data.ptr, target.nbytes, stream)
                    continue
                row = cupy.empty(target.shape, line.dtype)
                _copy(row.data.ptr, line.data.ptr, target.nbytes, stream)
                bits_view(target)[...] = row
    finally:  # what was enqueued before a failure still reads the lines
        follow(here, [there])  # the lines were allocated there


def ended(devices: Sequence[int]) -> None:
    """Waits until all work that this thread has enqueued on `devices` has ended.

    Raises:
        Exception: A device has failed; cupy's own.
    """
    cuda = import_module("cupy").cuda
    for device in dict.fromkeys(devices):
        with on_device(device):
            cuda.get_current_stream(device).synchronize()


def _bring(sources: Sequence[DeviceArray], targets: Sequence[DeviceArray], home: int) -> None:
    cupy, device = import_module("cupy"), _device(sources[0])
    stream = follow(device, [home])
    try:
        with on_device(device):
            for source, target in zip(sources, targets, strict=True):
                line = cupy.ascontiguousarray(bits_view(source))
                _copy(target.address, line.data.ptr, target.nbytes, stream)
    finally:  # what was enqueued before a failure still writes there
        if device != home:
            follow(home, [device])


def _copy(to: int, source: int, nbytes: int, stream: int) -> None:
    runtime = import_module("cupy").cuda.runtime
    if nbytes and to != source:
        runtime.memcpyAsync(to, source, nbytes, runtime.memcpyDefault, stream)


def _line(made: Sequence[DeviceArray]) -> Any:
    cupy, first = import_module("cupy"), cupy_view(made[0])
    return cupy.ndarray((len(made) * first.size,), first.dtype, memptr=first.data)


def _device(array: DeviceArray) -> int:
    return device_id(array.device)
