"""One contender of suite `kernel`: its processes, and the coordinator's end of them."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.kernels.roster import ROSTER
from benchmarks.kernels.worker import SOCKET
from benchmarks.report import Skipped

JOIN_TIMEOUT_S = 120.0
ANSWER_TIMEOUT_S = 300.0
_LOOK_S = 0.5
_ROOT = Path(__file__).resolve().parents[2]
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class TeamFailed(Exception):
    """A rank of a team raised, ended or does not answer; says what it said."""


class Team:
    """A contender: one process per rank, all blocked on their sockets unless they are asked for something.

    Args:
        name: The contender, one of the roster.
        ranks: How many processes.

    Attributes:
        name: The contender.
        op: The operation that `prepare` makes operands for.

    Raises:
        Skipped: It can't play here; says why.
        TeamFailed: It should, and does not.
    """

    def __init__(self, name: str, ranks: int) -> None:
        self.name = name
        self.op = "allreduce"
        self._connections: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._failing = False
        self._directory = Path(tempfile.mkdtemp(prefix="raycollect-bench-"))  # mode 0700
        try:
            self._start(ranks)
            self._ask("join", name)
        except BaseException:
            self._end()
            raise

    def prepare(self, nbytes: int) -> None:
        """Makes operands on all ranks."""
        self._ask("prepare", self.op, nbytes)

    def fill(self) -> None:
        """Sets them to their first values."""
        self._ask("fill")

    def run(self, count: int) -> Sequence[float]:
        """A burst; the times are those of the rank whose burst took longest.

        Operations run back to back: who is late in one is short in the next, so that to take the slowest rank of each
        would count lateness twice.
        """
        burst: list[float] = max(self._ask("run", count), key=sum)
        return burst

    def check(self, runs: int) -> None:
        """Looks at the operands; each rank knows how often it has run."""
        self._ask("check")

    def close(self) -> None:
        """Ends the processes; those of a team that has failed without asking them."""
        try:
            if not self._failing:
                self._ask("close")
        finally:
            self._end()

    # ------------------------------------------------------------------------------------------ the processes

    def _start(self, ranks: int) -> None:
        listener = socket.socket(socket.AF_UNIX)
        with listener:
            listener.bind(str(self._directory / SOCKET))
            listener.listen(ranks)
            listener.settimeout(_LOOK_S)
            worker = [sys.executable, "-m", "benchmarks.kernels.worker", self.name]
            if ROSTER[self.name].by_mpiexec:
                self._spawn([_mpiexec(), "-n", str(ranks), *worker, "-1", str(ranks), str(self._directory)])
            else:
                for rank in range(ranks):
                    self._spawn([*worker, str(rank), str(ranks), str(self._directory)])
            self._connections = self._accept(listener, ranks)

    def _spawn(self, command: list[str]) -> None:
        environment = os.environ | dict.fromkeys(_ONE_THREAD, "1")
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_ROOT), environment.get("PYTHONPATH")]))
        with (self._directory / "said").open("ab") as said:
            self._processes.append(
                subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, env=environment)
            )

    def _accept(self, listener: socket.socket, ranks: int) -> list[Connection]:
        came: dict[int, Connection] = {}
        until_s = time.monotonic() + JOIN_TIMEOUT_S
        while len(came) < ranks:
            try:
                line, _ = listener.accept()
            except TimeoutError:
                if time.monotonic() > until_s or any(process.poll() is not None for process in self._processes):
                    raise self._failed(f"{ranks - len(came)} of {ranks} processes did not come") from None
                continue
            connection = Connection(line.detach())
            came[connection.recv()] = connection
        return [came[rank] for rank in sorted(came)]

    def _ask(self, command: str, *arguments: Any) -> list[Any]:
        """Has all ranks do something, at once, and gives what they answer."""
        try:
            for connection in self._connections:
                connection.send((command, arguments))
            return [self._answer(command, rank) for rank in range(len(self._connections))]
        except (EOFError, OSError) as exc:
            raise self._failed(f"a process ended in {command!r}") from exc

    def _answer(self, command: str, rank: int) -> Any:
        connection = self._connections[rank]
        if not connection.poll(ANSWER_TIMEOUT_S):
            raise self._failed(f"rank {rank} does not answer {command!r}")
        kind, answer = connection.recv()
        if kind == "skipped":
            raise Skipped(answer)
        if kind == "failed":
            raise self._failed(f"rank {rank} in {command!r}: {answer}")
        return answer

    def _failed(self, what: str) -> TeamFailed:
        self._failing = True
        said = self._directory / "said"
        lines = said.read_text(encoding="utf-8", errors="replace") if said.exists() else ""
        return TeamFailed(f"{self.name}: {what}\n{lines[-2000:]}")

    def _end(self) -> None:
        for connection in self._connections:
            connection.close()
        self._connections = []
        for process in self._processes:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.terminate()  # mpiexec ends its ranks, then itself
                process.wait()
        shutil.rmtree(self._directory, ignore_errors=True)


def _mpiexec() -> str:
    """The mpiexec beside this Python, where pip puts that of `mpich`; else the system's."""
    beside = Path(sys.executable).with_name("mpiexec")
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if found is None:
        raise Skipped("there is no mpiexec (pip install mpich mpi4py)")
    return found
