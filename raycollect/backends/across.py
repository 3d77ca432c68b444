"""Tensors on several devices of one process: brought to one of them, folded there, and copied back.

All of it is enqueued on the caller's streams, those of cupy, and on each device behind all that the caller has enqueued
there (`streams.follow`). Bytes go from device to device without the host, where the devices reach each other; else the
driver takes them through its memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any, cast

import numpy as np

from raycollect.model import ReduceOp, TensorInfo

from . import arrays
from .device_arrays import DeviceArray, bits_view, cupy_view, device_id
from .folds import FOLDS, is_widened, refusal_reason
from .streams import follow, has_run, wait

__all__ = ["bring", "brought", "ended", "fold", "folded", "objection", "room", "spread"]

_NCCLS = {ReduceOp.MIN: "fmin", ReduceOp.MAX: "fmax"}
"""Where NCCL, which comes next, has another rule for NaN: a NaN from here, it would drop with the numbers behind it."""


def objection(op: ReduceOp, dtype: np.dtype[Any], count: int) -> str | None:
    """Why tensors of so many devices can't be folded; None: they can."""
    reason = refusal_reason(op, dtype.name)
    if reason is None and count > 1 and dtype in arrays.NARROW:
        reason = f"{op.name} of {dtype.name}: cupy has no such type, and so can't fold the tensors of several GPUs"
    return reason


def room(
    like: DeviceArray, home: int, count: int, allocate: Callable[[TensorInfo], Any] | None = None
) -> tuple[DeviceArray, ...]:
    """Makes tensors on a device, one behind the other, of one's shape, dtype and library.

    Args:
        like: The one.
        home: The device.
        count: How many.
        allocate: Makes a tensor; None: `arrays.empty`.

    Raises:
        MemoryError: There is no memory for them.
    """
    info = replace(arrays.info(like, like.library), shape=(count, *like.shape), device=f"cuda:{home}")
    made = (allocate or arrays.empty)(info)
    return tuple(_seen(made[at]) for at in range(count))


def brought(sources: Sequence[DeviceArray], home: int) -> tuple[DeviceArray, ...]:
    """Copies tensors of one shape and dtype to a device, from whichever they are on.

    Raises:
        MemoryError: There is no memory for the copies.
    """
    made = room(sources[0], home, len(sources))
    bring(sources, made)
    return made


def bring(sources: Sequence[DeviceArray], targets: Sequence[DeviceArray]) -> None:
    """Copies tensors, from whichever devices they are on, to as many of one device that have no gaps."""
    for source, target in zip(sources, targets, strict=True):
        _bring([source], [target], _device(target))


def folded(lists: Sequence[Sequence[DeviceArray]], op: ReduceOp, home: int) -> tuple[DeviceArray, ...]:
    """Reduces the tensors of several devices elementwise, in the order of the devices.

    Args:
        lists: For each device the same number of tensors, all of one shape and dtype.
        op: How; it has a meaning for them, and cupy has their dtype. AVG: over the devices.
        home: The device where it is done.

    Returns:
        As many tensors, on `home`, one behind the other. As much memory again is used meanwhile.

    Raises:
        MemoryError: There is no memory for them.
    """
    count = len(lists[0])
    made = room(lists[0][0], home, count)
    with import_module("cupy").cuda.Device(home):
        incoming = room(made[0], home, count) if len(lists) > 1 else ()
    fold(lists, op, made, incoming)
    return made


def fold(
    lists: Sequence[Sequence[DeviceArray]],
    op: ReduceOp,
    targets: Sequence[DeviceArray],
    incoming: Sequence[DeviceArray],
) -> None:
    """The same, into memory that is there.

    Args:
        lists: See `folded`.
        op: See there.
        targets: On one device, one behind the other: where the result goes.
        incoming: As many on the same device, for what arrives; nothing where there is one list.
    """
    cupy, home = import_module("cupy"), _device(targets[0])
    first, *others = lists
    _bring(first, targets, home)
    if not others:
        return
    total, arrived = _line(targets), _line(incoming)
    divides_first = op is ReduceOp.AVG and is_widened(total.dtype)  # as NCCL: the sum may be beyond 16 bits
    with cupy.cuda.Device(home):
        if divides_first:
            cupy.true_divide(total, len(lists), out=total)
        for arriving in others:
            _bring(arriving, incoming, home)
            if divides_first:
                cupy.true_divide(arrived, len(lists), out=arrived)
            getattr(cupy, _NCCLS.get(op) or FOLDS[op].__name__)(total, arrived, out=total)
        if op is ReduceOp.AVG and not divides_first:
            cupy.true_divide(total, len(lists), out=total)


def spread(sources: Sequence[DeviceArray], targets: Sequence[DeviceArray]) -> None:
    """Copies tensors of one device to another, after all that the caller has enqueued on both; does not wait for it."""
    if not targets:
        return
    cupy = import_module("cupy")
    here, there = _device(sources[0]), _device(targets[0])
    with cupy.cuda.Device(here):
        follow(here)
        lines = [cupy.ascontiguousarray(bits_view(one)) for one in sources]
    stream = follow(there, [here])
    try:
        with cupy.cuda.Device(there):
            for line, target in zip(lines, targets, strict=True):
                if target.shadow.flags.c_contiguous:
                    _copy(target.address, line.data.ptr, target.nbytes, stream)
                    continue
                row = cupy.empty(target.shape, line.dtype)
                _copy(row.data.ptr, line.data.ptr, target.nbytes, stream)
                bits_view(target)[...] = row
    finally:  # what was enqueued before a failure still reads the lines
        follow(here, [there])  # the lines were allocated there


def ended(devices: Sequence[int], check: Callable[[], None] | None = None) -> None:
    """Waits until all has ended that was enqueued here on some devices.

    Args:
        devices: The devices.
        check: Asked while they are waited for, and may raise; None: nothing ends the wait.

    Raises:
        Exception: A device has failed, cupy's own; or what `check` raises.
    """
    cuda = import_module("cupy").cuda
    for device in dict.fromkeys(devices):
        with cuda.Device(device):
            stream = cuda.get_current_stream(device)
            if check is not None:
                wait(partial(has_run, stream.ptr), check)
            stream.synchronize()


def _bring(sources: Sequence[DeviceArray], targets: Sequence[DeviceArray], home: int) -> None:
    """Copies tensors of one device to as many on `home` that have no gaps, and lets the stream there follow."""
    cupy, device = import_module("cupy"), _device(sources[0])
    stream = follow(device, [home])
    try:
        with cupy.cuda.Device(device):
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
    """Tensors that lie one behind the other, as one row of cupy."""
    cupy, first = import_module("cupy"), cupy_view(made[0])
    return cupy.ndarray((len(made) * first.size,), first.dtype, memptr=first.data)


def _device(array: DeviceArray) -> int:
    return device_id(array.device)


def _seen(tensor: Any) -> DeviceArray:
    return cast("DeviceArray", arrays.memory(tensor))
