"""Tensors on several devices of one process: brought to one of them, folded there, and copied back.

All of it is enqueued on the caller's streams, those of cupy, and on each device behind all that the caller has enqueued
there (`streams.follow`). Bytes go from device to device without the host, where the devices reach each other; else the
driver takes them through its memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any, cast

from raycollect.model import ReduceOp

from . import arrays
from .device_arrays import DeviceArray, bits_view, cupy_view, device_id
from .folds import FOLDS
from .streams import follow

__all__ = ["brought", "ended", "folded", "room", "spread"]


def room(like: DeviceArray, home: int, count: int) -> tuple[DeviceArray, ...]:
    """Allocates tensors on a device, one behind the other, of one's shape, dtype and library.

    Raises:
        MemoryError: There is no memory for them.
    """
    info = replace(arrays.info(like, like.library), shape=(count, *like.shape), device=f"cuda:{home}")
    made = arrays.empty(info)
    return tuple(_seen(made[at]) for at in range(count))


def brought(sources: Sequence[DeviceArray], home: int) -> tuple[DeviceArray, ...]:
    """Copies tensors of one shape and dtype to a device, from whichever they are on.

    Raises:
        MemoryError: There is no memory for the copies.
    """
    made = room(sources[0], home, len(sources))
    for source, target in zip(sources, made, strict=True):
        _bring([source], [target], home)
    return made


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
    cupy = import_module("cupy")
    first, *others = lists
    made = room(first[0], home, len(first))
    _bring(first, made, home)
    total = _line(made)
    with cupy.cuda.Device(home):
        if others:
            incoming = room(made[0], home, len(first))
        for arriving in others:
            _bring(arriving, incoming, home)
            getattr(cupy, FOLDS[op].__name__)(total, _line(incoming), out=total)
        if op is ReduceOp.AVG:
            cupy.true_divide(total, len(lists), out=total)
    return made


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
    with cupy.cuda.Device(there):
        for line, target in zip(lines, targets, strict=True):
            if target.shadow.flags.c_contiguous:
                _copy(target.address, line.data.ptr, target.nbytes, stream)
                continue
            row = cupy.empty(target.shape, line.dtype)
            _copy(row.data.ptr, line.data.ptr, target.nbytes, stream)
            bits_view(target)[...] = row
    follow(here, [there])  # the lines were allocated there


def ended(devices: Sequence[int]) -> None:
    """Waits until all has ended that was enqueued here on some devices."""
    cuda = import_module("cupy").cuda
    for device in set(devices):
        with cuda.Device(device):
            cuda.get_current_stream(device).synchronize()


def _bring(sources: Sequence[DeviceArray], targets: Sequence[DeviceArray], home: int) -> None:
    """Copies tensors of one device to as many on `home` that have no gaps, and lets the stream there follow."""
    cupy, device = import_module("cupy"), _device(sources[0])
    stream = follow(device, [home])
    with cupy.cuda.Device(device):
        for source, target in zip(sources, targets, strict=True):
            line = cupy.ascontiguousarray(bits_view(source))
            _copy(target.address, line.data.ptr, target.nbytes, stream)
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
