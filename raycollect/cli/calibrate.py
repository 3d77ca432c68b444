"""Measures the cost of moving bytes on this host: two processes exchange arrays, over `shm` and over `tcp`.

The time of a link is ``latency_s + n / bandwidth`` (Hockney: "The communication challenge for MPP: Intel Paragon and
Meiko CS-2", 1994). For several sizes n, the median of many round trips is halved; the line through these times has the
least sum of squared relative errors, so that small sizes, which determine the latency, count as much as large ones.

The two ranks are processes of their own, without Ray; rank 0 measures the time. The link between hosts can't be
measured on one host: it has its default, unless it is given.
"""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np

from raycollect import backends
from raycollect.core import files
from raycollect.core.model import GroupSpec, Kernel, Launch, OpKind
from raycollect.core.protocols import Communicator, Joining
from raycollect.errors import CollectiveTimeoutError, KernelError
from raycollect.group.link_costs import MeasuredLink

BACKENDS = ("shm", "tcp")  # the links inside this host
SIZES = (64, 4 << 10, 64 << 10, 1 << 20, 8 << 20)  # in bytes
MISFIT = 4.0  # the largest accepted factor between a time and the line
_TIMEOUT_S = 60.0
_TRIPS = (9, 400)  # the least and the most round trips that are timed
_NBYTES = 512 << 20  # about the total bytes of the trips of one size
_BLOCK = 5  # the median is taken over so many round trips
_POLL_S = 0.002


def measure(backend: str, sizes: Sequence[int] = SIZES, *, timeout_s: float = _TIMEOUT_S) -> MeasuredLink:
    """Measures the link between two processes of this host, by sending `sizes` bytes, at least two sizes.

    Raises:
        KernelError: A process failed, or took too long, or the times are too far from any line.
    """
    failed = partial(KernelError, op="calibrate", group_name=backend)
    times: dict[int, float] = {}
    until_s = time.monotonic() + timeout_s
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="raycollect-calibrate-") as folder, context.Pool(2) as pool:
        ranks = pool.imap_unordered(partial(_times, backend, folder, tuple(sizes)), range(2))
        try:
            for _ in range(2):
                times |= ranks.next(until_s - time.monotonic())
        except multiprocessing.TimeoutError as exc:
            raise failed(detail=f"not done within {timeout_s:g} s") from exc
        except Exception as exc:  # of the child process
            raise failed(detail=f"{type(exc).__name__}: {exc}") from exc
    return line_of(backend, times)


def line_of(backend: str, times: Mapping[int, float]) -> MeasuredLink:
    """Fits the line of the least sum of squared relative errors to bytes -> seconds, with a latency of at least zero.

    Raises:
        KernelError: There are fewer than two sizes, a time is not above zero, times do not grow with the bytes, or
            times are too far from the line.
    """
    failed = partial(KernelError, op="calibrate", group_name=backend)
    if len(times) < 2 or not all(0 < time_s < float("inf") for time_s in times.values()):
        raise failed(detail=f"no line through {dict(times)}")
    nbytes, seconds = np.array(list(times), float), np.array(list(times.values()), float)
    slope, latency_s = np.polyfit(nbytes, seconds, 1, w=1 / seconds).tolist()
    if latency_s < 0:  # through the origin, then
        relative = nbytes / seconds
        latency_s, slope = 0.0, float(relative.sum() / (relative @ relative))
    if slope <= 0:
        raise failed(detail=f"times do not grow with the bytes: {dict(times)}")
    line_s = latency_s + slope * nbytes
    misfit = float(np.maximum(seconds / line_s, line_s / seconds).max())
    if misfit > MISFIT:
        detail = f"times are up to {misfit:.1f} times off any line: is the machine busy? {dict(times)}"
        raise failed(detail=detail)
    how = (
        f"measured: half of the least median of {_BLOCK} round trips between two processes of one host, "
        f"{min(times)} to {max(times)} bytes; times are within a factor of {misfit:.2f} of the line"
    )
    return MeasuredLink(place="inside", backend=backend, latency_s=latency_s, bandwidth=1 / slope, how=how)


# ---------------------------------------------------------------------------------------------- in the two processes


def _times(backend: str, folder: str, sizes: Sequence[int], rank: int) -> dict[int, float]:
    """Runs one of the two ranks; rank 0 returns the seconds by bytes."""
    path = Path(folder)
    ops = backends.ops_of(backend)
    spec = GroupSpec(name="calibrate", group_id=f"calibrate-{path.name}", backend=backend, world_size=2, ops=ops)
    no_exchange = cast(Any, None)  # `shm` and `tcp` agree by themselves
    communicator = backends.load(backend)(Joining(spec, rank, FolderRendezvous(path), no_exchange))
    try:
        times = {n: _one_way_s(communicator, seq, n) for seq, n in enumerate(sizes, 1)}
    finally:
        communicator.close()
    return {} if rank else times


def _one_way_s(communicator: Communicator, seq: int, nbytes: int) -> float:
    """Returns the time of one direction."""
    rank = communicator.rank
    array = np.zeros(nbytes, np.uint8)
    launch = Launch(seq=seq, ranks=(0, 1), timeout_s=_TIMEOUT_S)
    kernels = _kernel(OpKind.SEND, array, 1 - rank), _kernel(OpKind.RECV, array, 1 - rank)
    there, back = reversed(kernels) if rank else kernels
    communicator.agree(launch, b"")

    def trip() -> float:
        begun = time.perf_counter()
        communicator.launch(launch, (there,))
        communicator.launch(launch, (back,))
        return time.perf_counter() - begun

    for _ in range(3):
        trip()
    times = [trip() for _ in range(min(max(_NBYTES // nbytes, _TRIPS[0]), _TRIPS[1]))]
    communicator.end(launch, True)
    # Other work on the machine only adds to times: the quietest few trips tell most about the link.
    return min(statistics.median(times[at : at + _BLOCK]) for at in range(0, len(times), _BLOCK)) / 2


def _kernel(kind: OpKind, array: np.ndarray[tuple[int], np.dtype[np.generic]], peer: int) -> Kernel:
    sends = kind is OpKind.SEND
    return Kernel(kind=kind, src=array if sends else None, dst=None if sends else array, peer=peer)


class FolderRendezvous:
    """A `Rendezvous` in a folder that all ranks share."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, name: str, value: bytes) -> None:
        """Publishes a value."""
        files.write(self._folder / f"value.{name}", value)

    def get(self, name: str, timeout_s: float) -> bytes:
        """Waits for a value."""
        until_s = time.monotonic() + timeout_s
        while time.monotonic() < until_s:
            try:
                return (self._folder / f"value.{name}").read_bytes()
            except FileNotFoundError:
                time.sleep(_POLL_S)
        raise CollectiveTimeoutError(detail=f"no rank has published {name}", timeout_s=timeout_s)
