"""Measures what moving bytes costs on this host: two processes send arrays to and fro, over `shm` and over `tcp`.

A link is ``latency_s + n / bandwidth`` (Hockney: "The communication challenge for MPP: Intel Paragon and Meiko CS-2",
1994). For several sizes n, the median of many round trips is halved; the line through these times has the least sum of
squared relative errors, so that small sizes, which tell the latency, count as much as large ones.

The two ranks are processes of their own, without Ray; rank 0 keeps the time. The link between hosts can't be measured
on one host: it keeps its default, unless it is given.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from raycollect import backends
from raycollect.core import files
from raycollect.core.model import GroupSpec, Kernel, Launch, OpKind
from raycollect.core.protocols import Communicator
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A line through times; `misfit` is the largest factor between a time and the line."""

    link: Link
    misfit: float


def fit(times: Mapping[int, float]) -> Fit:
    """The line of the least sum of squared relative errors whose latency is not below zero, from bytes -> seconds.

    Raises:
        ValueError: There are fewer than two sizes, a time is not above zero, or times do not grow with the bytes.
    """
    if len(times) < 2 or not all(0 < time_s < float("inf") for time_s in times.values()):
        raise ValueError(f"no line through {dict(times)}")
    # Weighted normal equations of a + b n ~ t, with weights 1 / t^2.
    weights = {n: t**-2 for n, t in times.items()}
    w, wn = sum(weights.values()), sum(weight * n for n, weight in weights.items())
    wnn = sum(weight * n * n for n, weight in weights.items())
    wt, wnt = sum(weights[n] * t for n, t in times.items()), sum(weights[n] * n * t for n, t in times.items())
    slope = (w * wnt - wn * wt) / (w * wnn - wn * wn)
    latency = (wt - slope * wn) / w
    if latency < 0:  # through the origin, then
        latency, slope = 0.0, wnt / wnn
    if slope <= 0:
        raise ValueError(f"times do not grow with the bytes: {dict(times)}")
    link = Link(latency_s=latency, bandwidth=1 / slope)
    misfit = max(max(t / link.time_s(n), link.time_s(n) / t) for n, t in times.items())
    return Fit(link=link, misfit=misfit)


def measure(backend: str, sizes: Sequence[int] = SIZES, *, timeout_s: float = _TIMEOUT_S) -> Measured:
    """Measures the link between two processes of this host, by sending `sizes` bytes, two sizes at least.

    Raises:
        KernelError: A process failed, or took too long, or the times are too far from any line.
    """
    times = _timed(backend, sizes, timeout_s)
    try:
        line = fit(times)
    except ValueError as exc:
        raise KernelError(op="calibrate", group_name=backend, detail=str(exc)) from exc
    if line.misfit > MISFIT:
        detail = f"times are up to {line.misfit:.1f} times off any line: is the machine busy? {times}"
        raise KernelError(op="calibrate", group_name=backend, detail=detail)
    how = (
        f"measured: half of the least median of {_BLOCK} round trips between two processes of one host, "
        f"{min(sizes)} to {max(sizes)} "
        f"bytes; times are within a factor of {line.misfit:.2f} of the line"
    )
    return Measured(place="inside", backend=backend, link=line.link, how=how)


def _timed(backend: str, sizes: Sequence[int], timeout_s: float) -> dict[int, float]:
    code = "import sys; from raycollect.cli.calibrate import rank_main; rank_main(*sys.argv[1:])"
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}  # this very package
    with tempfile.TemporaryDirectory(prefix="raycollect-calibrate-") as directory:
        commands = [
            [sys.executable, "-c", code, backend, str(rank), directory, json.dumps(list(sizes))] for rank in range(2)
        ]
        ranks = [
            subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            for command in commands
        ]
        until_s = time.monotonic() + timeout_s
        try:
            while any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks):
                if time.monotonic() > until_s:
                    detail = f"not done within {timeout_s:g} s"
                    raise KernelError(op="calibrate", group_name=backend, detail=detail)
                time.sleep(_POLL_S)
            failed = next((number for number, rank in enumerate(ranks) if rank.poll()), None)
        finally:
            for rank in ranks:
                rank.kill()
            told = [rank.communicate() for rank in ranks]
    if failed is not None:
        raise KernelError(op="calibrate", group_name=backend, rank=failed, detail=told[failed][1].strip()[-2000:])
    try:
        return {int(n): float(time_s) for n, time_s in json.loads(told[0][0].strip().rpartition("\n")[2]).items()}
    except (ValueError, TypeError, AttributeError, OverflowError) as exc:
        detail = f"rank 0 gives no times: {told[0][0].strip()[-200:]!r}"
        raise KernelError(op="calibrate", group_name=backend, rank=0, detail=detail) from exc


# ---------------------------------------------------------------------------------------------- in the two processes


def rank_main(backend: str, rank: str, directory: str, sizes: str) -> None:
    """Runs one of the two ranks; rank 0 prints ``{bytes: seconds}`` as JSON. All arguments are strings from argv."""
    spec = GroupSpec(
        name="calibrate",
        group_id=f"calibrate-{Path(directory).name}",
        backend=backend,
        world_size=2,
        ops=backends.ops_of(backend),
    )
    create = backends.load(backend)
    communicator = create(spec, int(rank), _Folder(Path(directory)), _NoExchange(), host="127.0.0.1")
    try:
        times = {n: _one_way_s(communicator, seq, n) for seq, n in enumerate(json.loads(sizes), 1)}
    finally:
        communicator.close()
    if communicator.rank == 0:
        print(json.dumps(times))


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
        communicator.launch(launch, kernel).wait(_TIMEOUT_S)

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


class _NoExchange:
    """For backends whose ranks meet by themselves: `shm` and `tcp` do."""

    def __call__(self, launch: Launch, arrival: bytes) -> Sequence[bytes]:
        raise NotImplementedError("this backend needs an exchange")

    def abort(self, seq: int) -> None:
        pass
