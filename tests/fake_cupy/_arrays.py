"""`cupy.ndarray`: arrays in a device's memory, which the host can only look at by copying them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from . import _runtime
from ._memory import Span
from ._pointers import MemoryPointer, UnownedMemory, alloc
from ._state import current
from ._streams import Device, get_current_stream

Host = np.ndarray[Any, np.dtype[Any]]


class ndarray:
    """An array over device memory. Whatever reads or writes elements is enqueued on the caller's stream."""

    __module__ = "cupy"
    __array_ufunc__ = None  # numpy leaves the arithmetic to this class, which refuses numpy's arrays
    __array_priority__ = 100

    def __init__(
        self,
        shape: Any,
        dtype: Any = float,
        memptr: MemoryPointer | None = None,
        strides: Sequence[int] | None = None,
        order: str = "C",
    ) -> None:
        self.shape = tuple(map(operator.index, shape)) if isinstance(shape, list | tuple) else (operator.index(shape),)
        self.dtype = np.dtype(dtype)
        self.ndim = len(self.shape)
        self.size = int(np.prod(self.shape, dtype=np.int64))
        self.itemsize = self.dtype.itemsize
        self.nbytes = self.size * self.itemsize
        self.strides = _strides(self.shape, self.itemsize, order) if strides is None else tuple(map(int, strides))
        self.data = alloc(self.nbytes) if memptr is None else memptr
        self.base: ndarray | None = None

    # ------------------------------------------------------------------------------------------ what it is

    @property
    def device(self) -> Device:
        return self.data.device

    @property
    def flags(self) -> SimpleNamespace:
        c, f = (self._view_of(order) for order in "CF")
        return SimpleNamespace(c_contiguous=c, f_contiguous=f, forc=c or f, fnc=f and not c, owndata=self.base is None)

    def _view_of(self, order: str) -> bool:
        wanted = _strides(self.shape, self.itemsize, order)
        return not self.size or all(
            n == 1 or mine == its for n, mine, its in zip(self.shape, self.strides, wanted, strict=True)
        )

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "descr": self.dtype.descr,
            "version": 3,
            "strides": None if self.flags.c_contiguous else self.strides,
            "data": (self.data.ptr if self.size else 0, False),
            "stream": get_current_stream().ptr or _runtime.streamLegacy,
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, self.data.device_id)

    def __dlpack__(self, *, stream: int | None = None, **_: Any) -> Any:
        """Lets the consumer's stream wait for this thread's own; -1: it needn't."""
        machine, device = current(), self.data.device_id
        mine = machine.queue(get_current_stream(device).ptr, device)
        theirs = machine.queue(stream or 0, device) if stream != -1 else mine
        if theirs is not mine:
            machine.enqueue(theirs, machine.work("a wait", None), [mine.mark()])
        return SimpleNamespace(array=self)

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError(
            "Implicit conversion to a NumPy array is not allowed. Please use `.get()` to construct a NumPy array"
            " explicitly."
        )

    def __len__(self) -> int:
        return self.shape[0]

    __hash__ = None  # type: ignore[assignment]

    # -------------------------------------------------------------------------------------------- elements

    def _host(self) -> Host:
        """The elements where they are; only work that runs on a stream may read or write them."""
        if not self.size:
            return np.empty(self.shape, self.dtype)
        offset = self.data.ptr - self.data.mem.ptr
        return np.ndarray(self.shape, self.dtype, self.data.mem._bytes(), offset, self.strides)

    def _spans(self) -> list[Span]:
        if not self.size:
            return []
        reach = [(n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True)]
        low, high = sum(r for r in reach if r < 0), sum(r for r in reach if r > 0)
        return [(self.data.ptr + low, high - low + self.itemsize)]

    def get(self, stream: Any = None, order: str = "C", out: Host | None = None, blocking: bool = True) -> Host:
        """Copies to the host, and waits for it."""
        copied = np.empty(self.shape, self.dtype, order=order) if out is None else out  # type: ignore[call-overload]
        with self.device:
            chosen = get_current_stream() if stream is None else stream
            source = self._host()
            if source.size:
                _launch("get", lambda: np.copyto(copied, source), self, stream=chosen)
            if blocking:
                chosen.synchronize()
        return copied

    def set(self, arr: Host, stream: Any = None) -> None:
        """Copies from the host, which may change its array at once."""
        if not isinstance(arr, np.ndarray):
            raise TypeError("Only numpy.ndarray can be set to cupy.ndarray")
        if arr.shape != self.shape or arr.dtype != self.dtype:
            raise ValueError(f"{arr.shape} of {arr.dtype} can't be set to {self.shape} of {self.dtype}")
        given, mine = arr.copy(), self._host()
        with self.device:
            _launch("set", lambda: np.copyto(mine, given), self, stream=stream)

    def fill(self, value: Any) -> None:
        mine = self._host()
        _launch("fill", lambda: mine.fill(value), self)

    def copy(self, order: str = "C") -> ndarray:
        made = ndarray(self.shape, self.dtype, order=order)
        _copy(made, self)
        return made

    # ----------------------------------------------------------------------------------------------- views

    def _derive(self, seen: Host) -> ndarray:
        """An array over what numpy made of `_host`."""
        base = self.data.mem._bytes().ctypes.data if seen.size else 0
        offset = seen.__array_interface__["data"][0] - base if seen.size else 0
        made = ndarray(seen.shape, seen.dtype, MemoryPointer(self.data.mem, offset), seen.strides)
        made.base = self if self.base is None else self.base
        return made

    def reshape(self, *shape: Any, order: str = "C") -> ndarray:
        mine = self._host()
        seen = mine.reshape(*shape, order=order)  # type: ignore[call-overload]
        if seen.size and not np.may_share_memory(seen, mine):
            return self.copy().reshape(*shape)
        return self._derive(seen)

    def view(self, dtype: Any = None) -> ndarray:
        return self._derive(self._host().view(self.dtype if dtype is None else dtype))

    def transpose(self, *axes: Any) -> ndarray:
        return self._derive(self._host().transpose(*axes))

    @property
    def T(self) -> ndarray:
        return self.transpose()

    def __getitem__(self, index: Any) -> ndarray:
        chosen = index if isinstance(index, tuple) else (index,)
        for one in chosen:
            if not (one is None or one is Ellipsis or isinstance(one, slice)):
                operator.index(one)  # the fake has no other kinds
        if not any(one is Ellipsis for one in chosen):
            chosen = (*chosen, Ellipsis)  # numpy would give a scalar
        return self._derive(self._host()[chosen])

    def __setitem__(self, index: Any, value: Any) -> None:
        _copy(self[index], value if isinstance(value, ndarray) or np.isscalar(value) else asarray(value))

    @property
    def real(self) -> ndarray:
        return self._derive(self._host().real)

    @real.setter
    def real(self, value: ndarray) -> None:
        _copy(self.real, value)

    @property
    def imag(self) -> ndarray:
        return self._derive(self._host().imag)

    @imag.setter
    def imag(self, value: ndarray) -> None:
        _copy(self.imag, value)

    # ------------------------------------------------------------------------------------------- arithmetic

    def __add__(self, other: Any) -> ndarray:
        return add(self, other)

    def __iadd__(self, other: Any) -> ndarray:  # noqa: PYI034 - 3.10 has no Self
        return add(self, other, out=self)

    def __isub__(self, other: Any) -> ndarray:  # noqa: PYI034 - 3.10 has no Self
        return subtract(self, other, out=self)

    def __mul__(self, other: Any) -> ndarray:
        return multiply(self, other)

    def __imul__(self, other: Any) -> ndarray:  # noqa: PYI034 - 3.10 has no Self
        return multiply(self, other, out=self)


def _strides(shape: Sequence[int], itemsize: int, order: str) -> tuple[int, ...]:
    strides, step = [], itemsize
    for n in reversed(shape) if order != "F" else shape:
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides) if order != "F" else strides)


def _launch(name: str, run: Callable[[], None], *arrays: ndarray, stream: Any = None, peers: bool = False) -> None:
    """Enqueues work on arrays on the caller's stream.

    Raises:
        ValueError: An array of another device.
    """
    machine = current()
    queue = machine.current_queue() if stream is None else machine.queue(stream.ptr)
    for array in arrays:
        if not peers and array.size and array.data.device_id != queue.device:
            raise ValueError(
                f"Array device must be same as the current device: array device = {array.data.device_id} while current"
                f" = {queue.device}"
            )
    spans = [span for array in arrays for span in array._spans()]
    memories = [array.data.mem for array in arrays if isinstance(array.data.mem, UnownedMemory)]
    keep = [memory for memory in memories if machine.heap.find(memory.ptr) is None]  # the fake's own can tell
    machine.enqueue(queue, machine.work(f"cupy.{name}", run, spans, keep))


def _copy(to: ndarray, given: Any) -> None:
    """Enqueues a copy, from a scalar or an array that may be on another device."""
    arrays = [to, given] if isinstance(given, ndarray) else [to]
    values = given._host() if isinstance(given, ndarray) else given
    mine = to._host()
    np.broadcast_shapes(np.shape(values), mine.shape)
    if np.broadcast_shapes(np.shape(values), mine.shape) != mine.shape:
        raise ValueError(f"could not broadcast input array from shape {np.shape(values)} into shape {mine.shape}")
    if mine.size:
        _launch("copy", lambda: np.copyto(mine, values, casting="unsafe"), *arrays, peers=True)


def asarray(a: Any, dtype: Any = None, order: str | None = None) -> ndarray:
    """Makes it an array of the current device; what describes device memory is looked at, not copied."""
    if isinstance(a, ndarray):
        assert dtype in (None, a.dtype), "the fake casts nothing"
        return a
    interface = getattr(a, "__cuda_array_interface__", None)
    if interface is not None:
        assert dtype is None, "the fake casts nothing"
        return _described(interface, a)
    host = np.asarray(a, dtype=dtype)
    if host.dtype == object:
        raise ValueError(f"Unsupported dtype {host.dtype}")
    made = ndarray(host.shape, host.dtype)
    made.set(host)
    return made


def _described(interface: dict[str, Any], owner: Any) -> ndarray:
    shape, dtype = tuple(interface["shape"]), np.dtype(interface["typestr"])
    if interface.get("stream") is not None and interface["version"] >= 3:
        _runtime.streamSynchronize(interface["stream"])
    strides = interface.get("strides") or _strides(shape, dtype.itemsize, "C")
    reach = sum((n - 1) * max(stride, 0) for n, stride in zip(shape, strides, strict=True))
    nbytes = reach + dtype.itemsize if 0 not in shape else 0
    memory = UnownedMemory(interface["data"][0], nbytes, owner)
    return ndarray(shape, dtype, MemoryPointer(memory, 0), strides)


def ufunc(rule: Any) -> Callable[..., ndarray]:
    """numpy's function of that name, on devices."""

    def call(x1: Any, x2: Any, out: ndarray | None = None) -> ndarray:
        given = [_operand(value) for value in (x1, x2)]
        likes = [np.ones((1,) * value.ndim, value.dtype) if isinstance(value, ndarray) else value for value in given]
        shape = np.broadcast_shapes(*(value.shape if isinstance(value, ndarray) else () for value in given))
        if out is None:
            out = ndarray(shape, rule(*likes).dtype)
        elif np.broadcast_shapes(shape, out.shape) != out.shape:
            raise ValueError(f"non-broadcastable output operand with shape {out.shape} for {shape}")
        else:
            rule(*likes, out=np.ones((1,) * out.ndim, out.dtype))  # whether elements can be cast to the output's
        values = [value._host() if isinstance(value, ndarray) else value for value in given]
        result, arrays = out._host(), [value for value in (*given, out) if isinstance(value, ndarray)]
        _launch(rule.__name__, lambda: _flushing(rule, values, result), *arrays)
        return out

    call.__name__ = rule.__name__
    return call


def _flushing(rule: Any, values: Sequence[Any], result: Host) -> None:
    """Applies numpy's function as cupy's kernels do, which are compiled with `-ftz=true`."""
    rule(*(flushed(value) if isinstance(value, np.ndarray) else value for value in values), out=result)
    result[...] = flushed(result)


def flushed(values: Any) -> Any:
    """The same without subnormal numbers of 32 bits, in whose place there are zeros of their sign."""
    found = np.asarray(values)
    if found.dtype == np.complex64:
        return flushed(np.ascontiguousarray(found).view(np.float32)).view(np.complex64)
    if found.dtype != np.float32:
        return values
    return np.where(np.abs(found) < np.finfo(np.float32).smallest_normal, np.copysign(np.float32(0), found), found)


def _operand(value: Any) -> Any:
    if isinstance(value, ndarray) or np.isscalar(value):
        return value
    raise TypeError(f"Unsupported type {type(value)}")


add, multiply, subtract = ufunc(np.add), ufunc(np.multiply), ufunc(np.subtract)
