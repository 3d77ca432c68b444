"""How a rank joins NCCL: its device, the checks among the members, and the communicator, which waits for all ranks."""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

from raycollect.backends.cuda_driver import RelaxedCapture
from raycollect.backends.gpus import SHARING, first_use, may_share, name_of, sharing_fault
from raycollect.backends.joining import gathered, not_joined
from raycollect.core import threads
from raycollect.core.codec import Codec, Wire
from raycollect.core.model import GroupSpec
from raycollect.core.protocols import Rendezvous
from raycollect.errors import BackendUnavailableError, CollectiveTimeoutError, InvalidGroupError
from raycollect.errors.text import listed

HINT = "NCCL_DEBUG=INFO in the environment of the actors makes NCCL tell more"
# Status -> its meaning, if some cupy versions have no text for it
_STATUSES = {
    6: "a remote rank has failed or exited",
    7: "an operation is still in progress",
    8: "an operation exceeded a limit of NCCL",
}

# Of `cudaDeviceAttr`, the numbers of the compute capability: major, minor; cupy has no names for them
_CAPABILITY = 75, 76

_log = logging.getLogger("raycollect")


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclEndpoint:
    """A rank's end of NCCL."""

    communicator: Any  # cupy's
    device: int  # the device's number in this process
    version: int  # NCCL's, as 22803 for 2.28.3
    capability: int  # the least compute capability in the group, as 90 for sm_90


class _RankGpu(Wire, frozen=True, kw_only=True):
    """A rank's GPU, as it publishes it."""

    gpu: str  # its host, and its name there
    version: int  # NCCL's
    may_share: bool  # whether its NCCL allows sharing that GPU
    capability: int  # its compute capability


_RANK_GPUS = Codec[_RankGpu](_RankGpu, "GPU of a rank")


def join(spec: GroupSpec, rank: int, rendezvous: Rendezvous, *, host: str, timeout_s: float) -> NcclEndpoint:
    """Makes this rank's communicator, on the device of option ``device`` or the calling thread's current one."""
    cupy = import_module("cupy")
    nccl = import_module("cupy.cuda.nccl")
    device = _device(cupy, spec)
    version = int(nccl.get_version())
    gpu = f"{host}/{name_of(cupy.cuda.runtime, device)}"
    capability = _capability(cupy.cuda.runtime, device)
    here = _RankGpu(gpu=gpu, version=version, may_share=may_share(), capability=capability)
    rendezvous.put(f"nccl.place.{rank}", _RANK_GPUS.encode(here))
    until_s = time.monotonic() + timeout_s
    rank_gpus = list(gathered(_RANK_GPUS, rendezvous, spec, "nccl.place", range(spec.world_size), timeout_s).values())
    _check(spec, rank_gpus)
    if rank == 0:
        rendezvous.put("nccl.id", unique_id(nccl))
    try:
        unique = rendezvous.get("nccl.id", max(until_s - time.monotonic(), 0.001))
    except CollectiveTimeoutError as exc:  # rank 0 published its GPU, and has died or hangs since
        raise not_joined(spec, (0,), timeout_s) from exc
    # In a helper thread, as the call blocks until all ranks have joined
    making = threads.call_in_helper(_connect, cupy, nccl, device, (spec.world_size, unique, rank))
    communicator = _await_communicator(making, spec, rank, timeout_s)
    least = min(rank_gpu.capability for rank_gpu in rank_gpus)
    return NcclEndpoint(communicator=communicator, device=device, version=version, capability=least)


def unique_id(nccl: Any) -> bytes:
    """Draws the id of a new communicator: 128 bytes. cupy 14 gives bytes, older ones a tuple of C's signed chars."""
    return bytes(char & 0xFF for char in nccl.get_unique_id())


def connected(nccl: Any, world_size: int, unique: bytes, rank: int) -> Any:
    """Makes a communicator of cupy's on the current device; blocks until all ranks have joined."""
    try:
        return nccl.NcclCommunicator(world_size, unique, rank)
    except TypeError as exc:
        if "expected tuple" not in str(exc):  # the message of cupy before 14
            raise
        signed = tuple(byte - 256 if byte > 127 else byte for byte in unique)
        return nccl.NcclCommunicator(world_size, signed, rank)


def free(communicator: Any, *, is_quiet: bool) -> None:
    """Ends a communicator of cupy's: after its work if `is_quiet`, else at once."""
    with RelaxedCapture():
        if is_quiet:
            communicator.destroy()
        else:
            communicator.abort()


def said(exc: BaseException) -> str:
    """Describes cupy's exception; cupy raises KeyError for statuses that are newer than its table."""
    if isinstance(exc, KeyError) and exc.args and exc.args[0] in _STATUSES:
        return f"NCCL status {exc.args[0]}: {_STATUSES[exc.args[0]]}; {HINT}"
    return f"{type(exc).__name__}: {exc}; {HINT}"


def _device(cupy: Any, spec: GroupSpec) -> int:
    options = dict(spec.options)
    chosen = options.pop("device", None)
    if options:
        detail = f"backend 'nccl' takes the option 'device', and got {listed(sorted(options))}"
        raise InvalidGroupError(group_name=spec.name, detail=detail)
    try:
        count = int(cupy.cuda.runtime.getDeviceCount())
    except Exception as exc:
        raise BackendUnavailableError(group_name=spec.name, detail=f"backend 'nccl': no GPU here: {exc}") from exc
    device = int(cupy.cuda.runtime.getDevice()) if chosen is None else chosen
    if type(device) is not int or not 0 <= device < count:
        detail = f"backend 'nccl': there is no device {chosen!r} here; this process sees {count}"
        raise InvalidGroupError(group_name=spec.name, detail=detail)
    return device


def _capability(runtime: Any, device: int) -> int:
    # Not `Device.compute_capability`, which makes contexts.
    major, minor = (int(runtime.deviceGetAttribute(attribute, device)) for attribute in _CAPABILITY)
    return 10 * major + minor


def _check(spec: GroupSpec, rank_gpus: Sequence[_RankGpu]) -> None:
    # Refuses placements that NCCL refuses or hangs on; lets ranks share a GPU if NCCL can.

    def refuse(why: str) -> BackendUnavailableError:
        return BackendUnavailableError(group_name=spec.name, detail=f"backend 'nccl': {why}")

    if len({rank_gpu.version for rank_gpu in rank_gpus}) > 1:  # NCCL requires equal releases
        releases = listed(f"rank {rank} has {rank_gpu.version}" for rank, rank_gpu in enumerate(rank_gpus))
        raise refuse(f"the members have different releases of NCCL: {releases}")
    shared = [gpu for gpu, count in Counter(rank_gpu.gpu for rank_gpu in rank_gpus).items() if count > 1]
    if not shared:
        return
    if why := sharing_fault({gpu: _ranks_on(rank_gpus, gpu) for gpu in shared}, rank_gpus[0].version):
        raise refuse(f"{why}. Give each member a GPU of its own, or use 'shm' or 'tcp', through the memory of the host")
    unwilling = [rank for rank, rank_gpu in enumerate(rank_gpus) if not rank_gpu.may_share]
    ranks = _ranks_on(rank_gpus, shared[0])
    if unwilling:
        why = f"ranks {ranks} share the GPU {shared[0]}, and {SHARING} of ranks {unwilling} forbids it"
        raise refuse(f"{why}: it has to be 1 in the environment of the process before that first uses NCCL")
    os.environ[SHARING] = "1"
    _log.info("ranks %s of group %r share the GPU %s; %s=1 lets NCCL do that", ranks, spec.name, shared[0], SHARING)


def _ranks_on(rank_gpus: Sequence[_RankGpu], gpu: str) -> list[int]:
    return [rank for rank, rank_gpu in enumerate(rank_gpus) if rank_gpu.gpu == gpu]


def _connect(cupy: Any, nccl: Any, device: int, arguments: tuple[Any, ...]) -> Any:
    try:
        cupy.cuda.Device(device).use()
        if arguments[0] > 1:
            first_use()
        with RelaxedCapture():
            return connected(nccl, *arguments)
    except Exception as exc:
        if not isinstance(exc, RuntimeError):  # all errors of cupy are
            threads.failed("making a communicator of NCCL", exc)
        raise


def _await_communicator(making: Future[Any], spec: GroupSpec, rank: int, timeout_s: float) -> Any:
    """Waits for a communicator; a late one is aborted."""
    if not threads.has_ended(making, timeout_s):
        making.add_done_callback(_abort)
        detail = f"NCCL did not connect all {spec.world_size} ranks within {timeout_s:g} s; {HINT}"
        raise CollectiveTimeoutError(group_name=spec.name, timeout_s=timeout_s, detail=detail)
    error = making.exception()
    if error is not None:
        detail = f"backend 'nccl': rank {rank} can't join: {said(error)}"
        raise BackendUnavailableError(group_name=spec.name, detail=detail) from error.with_traceback(None)
    return making.result()


def _abort(making: Future[Any]) -> None:
    if making.exception() is None:
        threads.survives(partial(free, making.result(), is_quiet=False))
