"""One rank of one contender of table `kernel`: ``python -m benchmarks.kernels CONTENDER RANK RANKS FOLDER``.

A process connects to the socket in the folder, and does what it is asked: it joins, makes operands, runs, checks. With
RANK -1, mpiexec tells each of its processes its rank. Contenders call their library directly, on float32 arrays in
place; raycollect's runs include the consistency check.
"""

from __future__ import annotations

import itertools
import mmap
import os
import socket
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

import raycollect as col
from raycollect import backends
from raycollect.cli.calibrate import FolderRendezvous
from raycollect.cli.harness import timed
from raycollect.core.model import TENSOR, GroupSpec, Kernel, Launch, OpKind, ReduceOp
from raycollect.core.protocols import Joining

TIMEOUT_S = 60.0
SOCKET = "coordinator"
_BLOCK = 64 << 10  # elements of a slice that stay in the cache of a core

Array = Any


class Player:
    """A rank of a library; `bind` returns a function that does an allreduce once on an array."""

    def __init__(self, rank: int, ranks: int, folder: Path) -> None:
        self.rank, self.ranks, self.folder = rank, ranks, folder
        self.join()

    def join(self) -> None:
        """Connects to the other ranks."""

    def empty(self, size: int) -> Array:
        """Makes an array in the memory that the contender works on."""
        return np.empty(size, np.float32)

    def bind(self, array: Array) -> Callable[[], object]:
        """Prepares an allreduce in place."""
        raise NotImplementedError

    def close(self) -> None:
        """Leaves."""


class Ours(Player):
    """A backend of raycollect, through its communicator."""

    backend, in_arena = "shm", False

    def join(self) -> None:
        """Makes the communicator."""
        from raycollect.pos.segments import Segments

        self._seqs, ops = itertools.count(1), backends.ops_of(self.backend)
        group_id = f"benchmark-{self.folder.name}"
        spec = GroupSpec(name="benchmark", group_id=group_id, backend=self.backend, world_size=self.ranks, ops=ops)
        no_exchange: Any = None  # shm and tcp agree by themselves
        joining = Joining(spec, self.rank, FolderRendezvous(self.folder), no_exchange, segments=Segments.current())
        self._communicator = backends.load(self.backend)(joining)

    def empty(self, size: int) -> Array:
        """An array in ordinary memory, or in the arena."""
        return col.empty(size, np.float32) if self.in_arena else super().empty(size)

    def bind(self, array: Array) -> Callable[[], object]:
        """Agrees on a launch, and runs its kernel."""
        kernel = Kernel(kind=OpKind.ALLREDUCE, src=array, dst=array, op=ReduceOp.SUM)
        arrival = _arrival(array)
        communicator, seqs, everyone = self._communicator, self._seqs, tuple(range(self.ranks))

        def once() -> None:
            launch = Launch(seq=next(seqs), ranks=everyone, timeout_s=TIMEOUT_S)
            arrivals = communicator.agree(launch, arrival, kernel)
            assert len(set(map(bytes, arrivals))) == 1
            communicator.launch(launch, (kernel,))
            communicator.end(launch, True)

        return once

    def close(self) -> None:
        """Leaves the group."""
        self._communicator.close()


def _arrival(array: Array) -> bytes:
    """What a rank brings to the check in a plan of one call."""
    from raycollect.backends import arrays
    from raycollect.engine.agreement import Arrival, Side, Spec, encode_arrival

    gives = Side(structure=TENSOR, tensors=(arrays.info(array),))
    return encode_arrival(Arrival(spec=Spec(op="allreduce", reduce_op="SUM", gives=gives)))


class OursInArena(Ours):
    """The same on arrays of the shared arena."""

    in_arena = True


class OursTcp(Ours):
    """The backend between hosts."""

    backend = "tcp"


class Torch(Player):
    """`torch.distributed` over gloo."""

    def join(self) -> None:
        """Makes the process group."""
        self._torch, self._dist = import_module("torch"), import_module("torch.distributed")
        self._torch.set_num_threads(1)
        timeout, store = timedelta(seconds=TIMEOUT_S), self._dist.FileStore(str(self.folder / "store"), self.ranks)
        self._dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.ranks, timeout=timeout)

    def bind(self, array: Array) -> Callable[[], object]:
        """One call; without `async_op` it returns when it is done here."""
        return partial(self._dist.all_reduce, self._torch.from_numpy(array))

    def close(self) -> None:
        """Leaves the process group."""
        self._dist.destroy_process_group()


class Xoscar(Player):
    """xoscar's fork of pygloo, on 127.0.0.1; the allreduce is its ring."""

    def join(self) -> None:
        """Connects the mesh."""
        gloo = self._gloo = import_module("xoscar.collective.xoscar_pygloo")
        self._context = gloo.rendezvous.Context(self.rank, self.ranks)
        device = gloo.transport.tcp.CreateDevice(gloo.transport.tcp.attr("127.0.0.1"))
        self._files = gloo.rendezvous.FileStore(str(self.folder))  # the prefix store does not hold it
        self._store = gloo.rendezvous.PrefixStore("benchmark", self._files)
        self._context.connectFullMesh(self._store, device)

    def bind(self, array: Array) -> Callable[[], object]:
        """One call, with pointers."""
        gloo, at = self._gloo, array.ctypes.data
        dtype, ring = gloo.GlooDataType_t.glooFloat32, gloo.AllreduceAlgorithm.RING
        return partial(gloo.allreduce, self._context, at, at, array.size, dtype, gloo.ReduceOp.SUM, ring)


class Mpi(Player):
    """MPI by mpi4py."""

    def join(self) -> None:
        """Initializes MPI."""
        from mpi4py import MPI

        self._mpi, self._world = MPI, MPI.COMM_WORLD

    def bind(self, array: Array) -> Callable[[], object]:
        """One call, with buffers."""
        return partial(self._world.Allreduce, self._mpi.IN_PLACE, array)

    def close(self) -> None:
        """Finalizes MPI, which waits for all ranks."""
        self._mpi.Finalize()


class Limit(Player):
    """The adding and copying of an allreduce alone, over the same bytes of shared memory, without any wait.

    Each rank reads and writes its slice of every array: 2 n bytes per rank, as any allreduce in place does at least.
    """

    def empty(self, size: int) -> Array:
        """An array in a file in memory that the others map."""
        self._path = Path("/dev/shm") / f"{self.folder.name}-{size}"
        own = Path(f"{self._path}-{self.rank}")
        own.write_bytes(bytes(max(4 * size, mmap.PAGESIZE)))
        return np.memmap(own, np.float32, "r+", shape=(size,))

    def bind(self, array: Array) -> Callable[[], object]:
        """One pass over the slice of this rank."""
        rendezvous = FolderRendezvous(self.folder)
        rendezvous.put(f"{array.size}.{self.rank}", b"written")
        parts = []
        for rank in range(self.ranks):
            rendezvous.get(f"{array.size}.{rank}", TIMEOUT_S)
            parts.append(np.memmap(f"{self._path}-{rank}", np.float32, "r+", shape=array.shape))
        low, high = (edge * array.size // self.ranks for edge in (self.rank, self.rank + 1))
        spans = [slice(at, min(at + _BLOCK, high)) for at in range(low, high, _BLOCK)]
        blocks = [[part[span] for part in parts] for span in spans]

        def once() -> None:
            for first, *others in blocks:
                for other in others:
                    np.add(first, other, out=first)
                for other in others:
                    other[...] = first

        return once

    def close(self) -> None:
        """Removes this rank's files."""
        for path in Path("/dev/shm").glob(f"{self.folder.name}-*-{self.rank}"):
            path.unlink()


PLAYERS: dict[str, type[Player]] = {
    "raycollect shm": Ours,
    "raycollect shm, arena": OursInArena,
    "raycollect tcp": OursTcp,
    "torch gloo": Torch,
    "xoscar gloo": Xoscar,
    "MPICH": Mpi,
    "limit": Limit,
}


class Worker:
    """A rank; each public method is a command."""

    def __init__(self, rank: int, ranks: int, folder: Path) -> None:
        self._place = rank, ranks, folder

    def join(self, contender: str) -> None:
        """Makes the player; the players of all ranks meet here."""
        self._player = PLAYERS[contender](*self._place)

    def prepare(self, nbytes: int) -> None:
        """Makes the operand."""
        self._once = self._array = None  # frees the last one first
        self._array = self._player.empty(max(1, nbytes // 4))
        self._once = self._player.bind(self._array)

    def fill(self) -> None:
        """Sets it to the rank + 1."""
        self._array.fill(self._place[0] + 1)

    def run(self, count: int) -> list[float]:
        """Runs once to get going, then `count` times; returns the seconds of those."""
        self._once()
        return timed(self._once, count)

    def check(self, runs: int) -> None:
        """Raises AssertionError unless the operand holds the result of so many runs."""
        ranks = self._place[1]
        value = ranks * (ranks + 1) / 2 * float(ranks) ** (runs - 1)
        assert np.allclose([self._array.min(), self._array.max()], value), f"not {value}: {self._array[:4]}"

    def close(self) -> None:
        """Leaves."""
        self._once = self._array = None
        self._player.close()


def main(contender: str, rank: str, ranks: str, folder: str) -> None:
    """Connects to the coordinator, and does what it asks until it has closed."""
    own = int(os.environ.get("PMI_RANK", rank) if rank == "-1" else rank)
    line = socket.socket(socket.AF_UNIX)
    line.connect(str(Path(folder) / SOCKET))
    connection = Connection(line.detach())
    connection.send(own)
    worker, command = Worker(own, int(ranks), Path(folder)), ""
    while command != "close":
        try:
            command, arguments = connection.recv()
        except EOFError:
            return
        try:
            answer = ("done", getattr(worker, command)(*arguments))
        except ImportError as exc:
            answer = ("skipped", str(exc))
        except Exception:  # noqa: BLE001 - the coordinator raises it
            answer = ("failed", traceback.format_exc())
        connection.send(answer)


if __name__ == "__main__":
    main(*sys.argv[1:])
