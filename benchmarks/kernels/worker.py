"""What each process of a team runs: waits for the coordinator, does what it says, answers.

It is started as ``python -m benchmarks.kernels.worker CONTENDER RANK RANKS DIRECTORY``. Where mpiexec starts the
processes, it tells each its rank, whatever RANK is.
"""

from __future__ import annotations

import os
import socket
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.interleave import timed
from benchmarks.kernels.operands import Operands
from benchmarks.kernels.player import Place, Player
from benchmarks.kernels.roster import ROSTER
from benchmarks.report import Skipped

SOCKET = "coordinator"
"""The name of the coordinator's socket in the team's directory."""


class Worker:
    """One rank of one contender; each method is something that the coordinator may ask for."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._player: Player | None = None
        self._operands: Operands | None = None
        self._once: Callable[[], Any] = lambda: None
        self._runs = 0

    def join(self, contender: str) -> None:
        """Makes the player; the players of all ranks meet here."""
        self._player = ROSTER[contender].load()(self._place)

    def prepare(self, op: str, nbytes: int) -> None:
        """Makes operands, in place of those there were."""
        assert self._player is not None
        self._once, self._operands = (lambda: None), None
        rank, ranks = self._place.rank, self._place.ranks
        self._operands = Operands.make(op, rank, ranks, nbytes, self._player.empty)
        self._once = self._player.bind(self._operands)

    def fill(self) -> None:
        """Sets the operands to their first values."""
        assert self._operands is not None
        self._operands.fill()
        self._runs = 0

    def run(self, count: int) -> list[float]:
        """Does it once to get going, then so many times; gives the seconds of those."""
        self._once()
        self._runs += count + 1
        return timed(self._once, count)

    def check(self) -> None:
        """Raises unless the operands are as they must be."""
        assert self._operands is not None
        self._operands.check(self._runs)

    def close(self) -> None:
        """Leaves."""
        self._once, self._operands = (lambda: None), None
        if self._player is not None:
            self._player.close()


def serve(connection: Connection, worker: Worker) -> None:
    """Does what it is told until it has closed, or nobody is there any more."""
    while True:
        try:
            command, arguments = connection.recv()
        except (EOFError, OSError):
            return
        try:
            answer = ("done", getattr(worker, command)(*arguments))
        except (Skipped, ImportError) as exc:
            answer = ("skipped", str(exc))
        except Exception:  # noqa: BLE001 - the coordinator raises it
            answer = ("failed", traceback.format_exc())
        connection.send(answer)
        if command == "close":
            return


def main(contender: str, rank: str, ranks: str, directory: str) -> None:
    """Connects to the coordinator and serves it."""
    if ROSTER[contender].by_mpiexec:
        rank = os.environ["PMI_RANK"]
    place = Place(int(rank), int(ranks), Path(directory))
    line = socket.socket(socket.AF_UNIX)
    line.connect(str(place.directory / SOCKET))
    connection = Connection(line.detach())
    connection.send(place.rank)
    serve(connection, Worker(place))


if __name__ == "__main__":
    main(*sys.argv[1:])
