"""Tensors on several devices of one process: copied to one device, folded there, and copied back.

All work is enqueued on cupy's current streams of the calling thread, after the caller's earlier work on each device
(`streams.follow`). Copies go directly between devices with peer access; else the driver stages them in host
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

# NCCL reduces next, and drops a NaN in favor of a number, so this fold must, too
_NCCLS = {ReduceOp.MIN: "fmin", ReduceOp.MAX: "fmax"}


def objection(op: ReduceOp, dtype: np.dtype[Any], count: int) -> str | None:
    """Says why the tensors of `count` devices can't be folded, or None if they can."""
    reason = refusal_reason(op, dtype.name)
    if reason is None and count > 1 and dtype in arrays.NARROW:
        reason = f"{op.name} of {dtype.name}: cupy lacks this type, and can't fold the tensors of several GPUs"
    return reason


def room(like: DeviceArray, home: int, count: int) -> tuple[DeviceArray, ...]:
    """Allocates `count` consecutive tensors like `like` on device `home`; may raise MemoryError."""
    info = replace(arrays.info(like, like.library), shape=(count, *like.shape), device=f"cuda:{home}")
    tensors = arrays.empty(info)
    return tuple(cast("DeviceArray", arrays.memory(tensors[at])) for at in range(count))


def brought(sources: Sequence[DeviceArray], home: int) -> tuple[DeviceArray, ...]:
    """Copies tensors of one shape and dtype to device `home`, from any device; may raise MemoryError."""
    copies = room(sources[0], home, len(sources))
    for source, target in zip(sources, copies, strict=True):
        _bring([source], [target], home)
    return copies


def folded(lists: Sequence[Sequence[DeviceArray]], op: ReduceOp, home: int) -> tuple[DeviceArray, ...]:
    """Reduces the tensors of several devices elementwise, in device order.

    Each list has the tensors of one device, all of one shape and dtype. AVG is over the devices. Returns consecutive
    tensors on `home`; allocates as much memory again for a time. May raise MemoryError.
    """
    cupy, count = import_module("cupy"), len(lists[0])
    result = room(lists[0][0], home, count)
    first, *others = lists
    with on_device(home):
        incoming = room(result[0], home, count) if others else ()
    _bring(first, result, home)
    if not others:
        return result
    total, arrived = _line(result), _line(incoming)
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
    return result


def spread(sources: Sequence[DeviceArray], targets: Sequence[DeviceArray]) -> None:
    """Enqueues copies of one device's tensors to another, after the caller's work on both; does not wait."""
    if not targets:
        return
    cupy = import_module("cupy")
    here, there = _device(sources[0]), _device(targets[0])
    with on_device(here):
        follow(here)
        lines = [cupy.ascontiguousarray(bits_view(source)) for source in sources]
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
    finally:  # copies enqueued before a failure still read the lines
        follow(here, [there])  # where the lines were allocated


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
    finally:  # copies enqueued before a failure still write there
        if device != home:
            follow(home, [device])


def _copy(to: int, source: int, nbytes: int, stream: int) -> None:
    runtime = import_module("cupy").cuda.runtime
    if nbytes and to != source:
        runtime.memcpyAsync(to, source, nbytes, runtime.memcpyDefault, stream)


def _line(tensors: Sequence[DeviceArray]) -> Any:
    cupy, first = import_module("cupy"), cupy_view(tensors[0])
    return cupy.ndarray((len(tensors) * first.size,), first.dtype, memptr=first.data)


def _device(array: DeviceArray) -> int:
    return device_id(array.device)
