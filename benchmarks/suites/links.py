"""The kernels alone, without Ray, and collectives over three hosts.

In table `kernel` each contender has a process per rank (`benchmarks.kernels`); the times of a burst are those of the
rank where it took longest. In table `hosts`, `raycollect bench` runs in a cluster of network namespaces of this
machine, two actors on each of three hosts. The kernel shapes their links, without a delay; so it needs root.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.kernels import PLAYERS, SOCKET
from benchmarks.report import Record, Row, Skip
from benchmarks.suite import KB, MB, Choice, Table, entry, sweep
from raycollect.cli.harness import Skipped

KERNEL = Table("kernel", "allreduce without Ray, float32, in place", "torch gloo")
HOSTS = Table("hosts", "over three hosts with two actors each, float32, called from the driver")
TABLES = (KERNEL, HOSTS)
NEEDS_RAY = False  # the hosts have a cluster of their own

SIZES = (4, 64 * KB, MB, 16 * MB, 64 * MB)
ROOT = Path(__file__).resolve().parents[2]
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
_ANSWER_S = 120.0


class Team:
    """A contender with a process per rank, all blocked on their sockets unless they are asked for something."""

    def __init__(self, name: str, ranks: int) -> None:
        self.name, self._runs = name, 0
        self._connections: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._folder = Path(tempfile.mkdtemp(prefix="raycollect-bench-"))
        try:
            self._start(ranks)
            self._ask("join", name)
        except BaseException:
            self._end()
            raise

    def prepare(self, nbytes: int) -> None:
        """Makes operands on all ranks."""
        self._ask("prepare", nbytes)

    def fill(self) -> None:
        """Sets them to their first values."""
        self._ask("fill")
        self._runs = 0

    def run(self, count: int) -> Sequence[float]:
        """Runs a burst; who is late in one run is short in the next, so the times are those of the slowest rank."""
        self._runs += count + 1
        burst: list[float] = max(self._ask("run", count), key=sum)
        return burst

    def check(self, runs: int) -> None:
        """Looks at the operands."""
        self._ask("check", self._runs)

    def close(self) -> None:
        """Ends the processes."""
        self._ask("close")
        self._end()

    def _start(self, ranks: int) -> None:
        worker = [sys.executable, "-m", "benchmarks.kernels", self.name]
        place = [str(ranks), str(self._folder)]
        commands = [[*worker, str(rank), *place] for rank in range(ranks)]
        if self.name == "MPICH":
            beside = Path(sys.executable).with_name("mpiexec")  # where pip puts that of `mpich`
            mpiexec = str(beside) if beside.exists() else shutil.which("mpiexec")
            if mpiexec is None:
                raise Skipped("there is no mpiexec (pip install mpich mpi4py)")
            commands = [[mpiexec, "-n", str(ranks), *worker, "-1", *place]]
        environment = {**os.environ, **_ONE_THREAD, "PYTHONPATH": str(ROOT)}
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(self._folder / SOCKET))
            listener.listen(ranks)
            listener.settimeout(_ANSWER_S)
            self._processes = [subprocess.Popen(command, env=environment) for command in commands]
            lines = [Connection(listener.accept()[0].detach()) for _ in range(ranks)]
        by_rank = {line.recv(): line for line in lines}
        self._connections = [by_rank[rank] for rank in range(ranks)]

    def _ask(self, command: str, *arguments: Any) -> list[Any]:
        """Has all ranks do something at once; returns their answers."""
        for connection in self._connections:
            connection.send((command, arguments))
        return [self._answer(command, rank) for rank in range(len(self._connections))]

    def _answer(self, command: str, rank: int) -> Any:
        if not self._connections[rank].poll(_ANSWER_S):
            raise TimeoutError(f"{self.name}: rank {rank} does not answer {command!r}")
        kind, answer = self._connections[rank].recv()
        if kind == "skipped":
            raise Skipped(answer)
        if kind == "failed":
            raise RuntimeError(f"{self.name}: rank {rank} in {command!r}: {answer}")
        return answer

    def _end(self) -> None:
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.terminate()  # mpiexec ends its ranks, then itself
                process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


def _below(table: Sequence[tuple[float, int]], nbytes: int) -> int:
    return next(value for limit, value in table if nbytes < limit)


BURSTS = (
    (MB, 40),
    (16 * MB, 10),
    (64 * MB, 3),
    (math.inf, 2),
)  # (below how many bytes, runs); one more goes before them
QUICK = ((MB, 400), (16 * MB, 100), (64 * MB, 21), (math.inf, 10))
FULL = ((MB, 1200), (16 * MB, 300), (64 * MB, 60), (math.inf, 24))


def measure(choice: Choice) -> Iterator[Record]:
    """Measures the kernels over 2 and 4 processes, then the hosts."""
    for ranks in choice.ranks or ((2,) if choice.quick else (2, 4)):
        makers = [entry(name, Team, ranks) for name in PLAYERS]
        runs = lambda nbytes: (_below(QUICK, nbytes), _below(FULL, nbytes))  # noqa: E731
        burst = partial(_below, BURSTS)
        yield from sweep(KERNEL, choice, makers, op="allreduce", ranks=ranks, sizes=SIZES, runs=runs, burst=burst)
    yield from hosts(choice)


def hosts(choice: Choice) -> Iterator[Record]:
    """Runs `raycollect bench` on three hosts, over links of two bandwidths."""
    from tests.hosts.cluster import Cluster
    from tests.hosts.namespaces import shaping_objection

    if reason := shaping_objection():
        yield Skip(suite=HOSTS.name, contender="all", reason=reason)
        return
    names = {"refs": "raycollect tcp", "ray.util.collective": "ray.util.collective", "object-store": "object store"}
    sizes = ",".join(map(str, choice.sizes or (4, MB, 64 * MB)))
    for links, rate in (("1 Gbit per s", "1gbit"), ("10 Gbit per s", "10gbit")):
        with Cluster(3, rate=rate) as cluster:
            for op in ("allreduce", "broadcast"):
                runs = str(choice.runs or (3 if choice.quick else 16))
                command = [sys.executable, "-m", "raycollect", "bench", op, "--ranks", "6", "--sizes", sizes]
                command += ["--runs", runs, "--ways", ",".join(names), "--json"]
                printed = cluster.driver(command, timeout_s=900)
                for row in json.JSONDecoder().raw_decode(printed[printed.index("{\n") :])[0]["rows"]:
                    median_ms, p90_ms = 1e3 * row["median_s"], 1e3 * row["p90_s"]
                    case = {"op": f"{op}, {links}", "ranks": 6, "nbytes": row["nbytes"], "contender": names[row["way"]]}
                    yield Row(suite=HOSTS.name, **case, median_ms=median_ms, p90_ms=p90_ms, runs=int(runs))
