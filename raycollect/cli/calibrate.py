"""Measures what moving bytes costs on this host: two processes send arrays to and fro, over `shm` and over `tcp`.

A link is ``latency_s + n / bandwidth`` (Hockney: "The communication challenge for MPP: Intel Paragon and Meiko CS-2",
1994). For several sizes n, the median of many round trips is halved; the line through these times has the least sum of
squared relative errors, so that small sizes, which tell the latency, count as much as large ones.

The two ranks are processes of their own, without Ray; rank 0 keeps the time. The link between hosts can't be measured
on one host: it keeps its default, unless it is given.
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
from raycollect.group.link_costs import Measured
from raycollect.planner.topology import Link

BACKENDS = ("shm", "tcp")  # what is measured, inside this host
SIZES = (64, 4 << 10, 64 << 10, 1 << 20, 8 << 20)  # the bytes that are sent
MISFIT = 4.0  # the largest factor between a time and its line with which the line is written
_TIMEOUT_S = 60.0
_SECONDS_PER_SIZE = 0.15
_TRIPS = (9, 400)  # the least and the most round trips that are timed
_BLOCK = 5  # round trips of which the median is taken
_POLL_S = 0.002


def fit(times: Mapping[int, float]) -> tuple[Link, float]:
    """The line of the least sum of squared relative errors whose latency is not below zero, from bytes -> seconds.

    Returns:
        The line, and the largest factor between a time and the line.

    Raises:
        ValueError: There are fewer than two sizes, a time is not above zero, or times do not grow with the bytes.
    """
    if len(times) < 2 or not all(0 < time_s < float("inf") for time_s in times.values()):
        raise ValueError(f"no line through {dict(times)}")
    nbytes, seconds = np.array(list(times), float), np.array(list(times.values()), float)
    slope, latency = np.polyfit(nbytes, seconds, 1, w=1 / seconds).tolist()
    if latency < 0:  # through the origin, then
        relative = nbytes / seconds
        latency, slope = 0.0, float(relative.sum() / (relative @ relative))
    if slope <= 0:
        raise ValueError(f"times do not grow with the bytes: {dict(times)}")
    link = Link(latency_s=latency, bandwidth=1 / slope)
    return link, max(max(t / link.time_s(n), link.time_s(n) / t) for n, t in times.items())


def measure(backend: str, sizes: Sequence[int] = SIZES, *, timeout_s: float = _TIMEOUT_S) -> Measured:
    """Measures the link between two processes of this host, by sending `sizes` bytes, two sizes at least.

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
        except Exception as exc:
            raise failed(detail=f"{type(exc).__name__}: {exc}") from exc
    return line_of(backend, times)


def line_of(backend: str, times: Mapping[int, float]) -> Measured:
    """The link that takes these times, bytes -> seconds; KernelError: they are too far from any line."""
    try:
        link, misfit = fit(times)
        if misfit > MISFIT:
            raise ValueError(f"times are up to {misfit:.1f} times off any line: is the machine busy? {times}")
    except ValueError as exc:
        raise KernelError(op="calibrate", group_name=backend, detail=str(exc)) from exc
    how = (
        f"measured: half of the least median of {_BLOCK} round trips between two processes of one host, "
        f"{min(times)} to {max(times)} bytes; times are within a factor of {misfit:.2f} of the line"
    )
    return Measured(place="inside", backend=backend, latency_s=link.latency_s, bandwidth=link.bandwidth, how=how)


# ---------------------------------------------------------------------------------------------- in the two processes


def _times(backend: str, folder: str, sizes: Sequence[int], rank: int) -> dict[int, float]:
    """Runs one of the two ranks; rank 0 returns the seconds by bytes."""
    path = Path(folder)
    ops = backends.ops_of(backend)
    spec = GroupSpec(name="calibrate", group_id=f"calibrate-{path.name}", backend=backend, world_size=2, ops=ops)
    nobody = cast(Any, None)  # the ranks of `shm` and `tcp` meet by themselves
    communicator = backends.load(backend)(Joining(spec, rank, _Folder(path), nobody))
    try:
        times = {n: _one_way_s(communicator, seq, n) for seq, n in enumerate(sizes, 1)}
    finally:
        communicator.close()
    return {} if rank else times


def _one_way_s(communicator: Communicator, seq: int, nbytes: int) -> float:
    """Returns the time in one direction; rank 0 says how many round trips there are."""
    rank = communicator.rank
    array = np.zeros(nbytes, np.uint8)
    launch = Launch(seq=seq, ranks=(0, 1), timeout_s=_TIMEOUT_S)
    there = _kernel(OpKind.RECV if rank else OpKind.SEND, array, 1 - rank)
    back = _kernel(OpKind.SEND if rank else OpKind.RECV, array, 1 - rank)
    count = np.zeros(1, np.int64)
    tell = _kernel(OpKind.RECV if rank else OpKind.SEND, count, 1 - rank)
    communicator.agree(launch, b"")

    def run(kernel: Kernel) -> None:
        communicator.launch(launch, (kernel,))

    def trip() -> float:
        begun = time.perf_counter()
        run(there)
        run(back)
        return time.perf_counter() - begun

    warm = [trip() for _ in range(3)]
    least, most = _TRIPS
    count[0] = min(most, max(least, int(_SECONDS_PER_SIZE / min(warm))))
    run(tell)
    times = [trip() for _ in range(int(count[0]))]
    communicator.end(launch, True)
    # Other work on the machine only adds to times: the quietest few trips tell most about the link.
    return min(statistics.median(times[at : at + _BLOCK]) for at in range(0, len(times), _BLOCK)) / 2


def _kernel(kind: OpKind, array: np.ndarray[tuple[int], np.dtype[np.generic]], peer: int) -> Kernel:
    sends = kind is OpKind.SEND
    return Kernel(kind=kind, src=array if sends else None, dst=None if sends else array, peer=peer)


class _Folder:
    """A `Rendezvous` in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, name: str, value: bytes) -> None:
        files.write(self._folder / f"value.{name}", value)

    def get(self, name: str, timeout_s: float) -> bytes:
        until_s = time.monotonic() + timeout_s
        while time.monotonic() < until_s:
            try:
                return (self._folder / f"value.{name}").read_bytes()
            except FileNotFoundError:
                time.sleep(_POLL_S)
        raise CollectiveTimeoutError(detail=f"nobody published {name}", timeout_s=timeout_s)
