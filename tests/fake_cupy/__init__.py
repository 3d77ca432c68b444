"""A fake of cupy, with streams and NCCL, for machines without a GPU.

Device memory is memory of the host. What is enqueued on streams runs later, in an order that depends on the seed
wherever nothing orders it; ranks of NCCL are threads of this process. What no program may do is a violation.

The driver's own functions are called without cupy; so they are replaced in the room that calls them.
"""

from __future__ import annotations

import sys
import threading
import types
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from raycollect.backends import cuda_driver, gpus, streams

from . import _functions, _nccl, _pointers, _runtime, _state, _streams, _world
from ._machine import Machine
from ._queues import Queue

__all__ = ["Fake", "installed"]


class Fake:
    """What a test sees of the fake, and does to it.

    Attributes:
        cupy: The module.
        counts: How often what was called: functions of the runtime by their names (``eventRecord``,
            ``deviceSynchronize``), methods of communicators as ``nccl.allReduce``, ``alloc``.
        violations: What no program may do; `installed` fails if there are any in the end. A test that provokes one
            clears them.
    """

    def __init__(self, machine: Machine, cupy: types.ModuleType) -> None:
        self._machine = machine
        self.cupy = cupy
        self.counts: Counter[str] = machine.counts
        self.violations: list[str] = machine.violations

    @property
    def contexts(self) -> set[int]:
        """The devices on which anything was made or enqueued."""
        return set(self._machine.contexts)

    @property
    def streams(self) -> int:
        """How many streams there are, besides the default ones."""
        return sum(isinstance(one, Queue) for one in list(self._machine.handles.values()))

    @property
    def events(self) -> int:
        """How many events there are."""
        return sum(isinstance(one, _runtime.EventState) for one in list(self._machine.handles.values()))

    def allocated(self, device: int = 0) -> int:
        """How many bytes of a device are in use."""
        with self._machine.lock:
            self._machine.bury()
            return self._machine.heap.allocated[device]

    def limit(self, nbytes: int, device: int = 0) -> None:
        """Gives a device so much memory and no more; -1: so much of the host's that can be page-locked at a time."""
        self._machine.heap.limits[device] = nbytes

    def split(self, *uuids: bytes) -> None:
        """Makes the first devices the parts, with these UUIDs, that MIG has made of one GPU."""
        for device, uuid in enumerate(uuids):
            self._machine.buses[device], self._machine.uuids[device] = "0000:10:00.0", uuid

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Lets the calling thread alone run work: what nothing orders comes in an order that the seed alone decides."""
        self._machine.drain()
        self._machine.alone = threading.get_ident()
        try:
            yield
        finally:
            self._machine.alone = None

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Lets the calling thread capture a graph in mode "global", which forbids others what is unsafe meanwhile."""
        self._machine.capturing = threading.get_ident()
        try:
            yield
        finally:
            self._machine.capturing = None

    def hold(self, stream: Any) -> None:
        """Stops a stream (cupy's, or a pointer), until it is released."""
        self._queue(stream).held = True

    def release(self, stream: Any) -> None:
        """Lets a stream go on."""
        with self._machine.lock:
            self._queue(stream).held = False
            self._machine.wake()

    def pending(self, stream: Any) -> int:
        """How many items of a stream are not done."""
        return len(self._queue(stream).items)

    def drain(self) -> None:
        """Runs all that can be run now; nothing is running any more when this returns."""
        self._machine.drain()

    def fail_next(self, comm: Any, status: int, *, at_call: bool = False) -> None:
        """Lets a communicator's next operation fail: the call itself, or when it runs, by an async error; it hangs."""
        comm._there().failing = (status, at_call)

    def _queue(self, stream: Any) -> Queue:
        device = getattr(stream, "device_id", -1)
        return self._machine.queue(int(getattr(stream, "ptr", stream)), None if device == -1 else device)


@contextmanager
def installed(
    devices: int = 1, *, nccl_version: int = 22803, cupy_version: str = "14.2.0", seed: int = 0
) -> Iterator[Fake]:
    """Puts the fake in the place of cupy.

    Args:
        devices: How many GPUs there are.
        nccl_version: NCCL's version, such as 22803.
        cupy_version: cupy's; 13 and 14 differ in the ids of communicators.
        seed: What the order of what nothing orders depends on.

    Raises:
        AssertionError: In the end, if there were violations and the block raised nothing.
    """
    _state.check_free()
    _forget()
    modules = _modules(cupy_version)
    before = {name: sys.modules.get(name) for name in modules}
    machine = Machine(devices, seed)
    driver = {name: getattr(cuda_driver, name) for name in ("exchange_capture_mode", "uuid_of")}
    nccl_read, gpus._read = gpus._read, None
    cuda_driver.exchange_capture_mode = machine.exchange_capture_mode
    cuda_driver.uuid_of = lambda device: machine.uuids.get(device, b"")
    _state.install(machine)
    has_bytes = int(cupy_version.partition(".")[0]) >= 14
    _world.install(_world.World(machine, nccl_version, seed, has_bytes=has_bytes))
    sys.modules.update(modules)
    try:
        yield Fake(machine, modules["cupy"])
    finally:
        _forget()
        try:
            machine.close()
        finally:
            cuda_driver.__dict__.update(driver)
            gpus._read = nccl_read
            _state.remove()
            _world.install(None)
            for name, module in before.items():
                if module is None:
                    sys.modules.pop(name, None)
                else:
                    sys.modules[name] = module
    assert not machine.violations, "\n".join(machine.violations)


def _forget() -> None:
    """Lets the package forget events and streams of the fake before."""
    streams._free.clear()
    staging = sys.modules.get("raycollect.engine.device_staging")
    if staging is not None:
        staging._idle.clear()


def _modules(version: str) -> dict[str, types.ModuleType]:
    cupy, cuda, memory = (types.ModuleType(name) for name in ("cupy", "cupy.cuda", "cupy.cuda.memory"))
    cupy.__path__ = cuda.__path__ = []  # packages, for whoever imports what is in them
    memory.__dict__.update({name: getattr(_pointers, name) for name in _pointers.__all__})
    cuda.__dict__.update(
        {name: getattr(_pointers, name) for name in ("MemoryPointer", "UnownedMemory", "alloc_pinned_memory")},
        **{name: getattr(_streams, name) for name in ("Device", "Event", "Stream", "get_current_stream")},
        memory=memory,
        runtime=_runtime,
        nccl=_nccl,
    )
    cupy.__dict__.update(_functions.FUNCTIONS, cuda=cuda, __version__=f"{version}+fake")
    named = {module.__name__: module for module in (cupy, cuda, memory)}
    return {**named, "cupy.cuda.runtime": _runtime, "cupy.cuda.nccl": _nccl}
