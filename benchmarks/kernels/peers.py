"""What people use today, as players: torch's gloo, pygloo and xoscar's fork of it, MPI."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from typing import Any

from benchmarks.kernels.operands import Array, Operands
from benchmarks.kernels.player import TIMEOUT_S, Place, ordinary


class TorchPlayer:
    """`torch.distributed` over gloo on 127.0.0.1, called directly."""

    def __init__(self, place: Place) -> None:
        torch: Any = import_module("torch")
        dist: Any = import_module("torch.distributed")
        torch.set_num_threads(1)
        self._torch, self._dist = torch, dist
        store = dist.FileStore(str(place.directory / "store"), place.ranks)
        timeout = timedelta(seconds=TIMEOUT_S)
        dist.init_process_group("gloo", store=store, rank=place.rank, world_size=place.ranks, timeout=timeout)

    def empty(self, size: int) -> Array:
        """An array in ordinary memory; torch gets a tensor on it."""
        return ordinary(size)

    def bind(self, operands: Operands) -> Callable[[], Any]:
        """One call; without ``async_op``, it returns when it is done here."""
        dist = self._dist
        src, dst = self._torch.from_numpy(operands.src), self._torch.from_numpy(operands.dst)
        calls: dict[str, Callable[[], Any]] = {
            "allreduce": lambda: dist.all_reduce(dst),
            "broadcast": lambda: dist.broadcast(dst, 0),
            "allgather": lambda: dist.all_gather_into_tensor(dst, src),
            "alltoall": lambda: dist.all_to_all_single(dst, src),
            "send": (lambda: dist.recv(dst, 0)) if operands.rank else (lambda: dist.send(src, 1)),
        }
        return calls[operands.op]

    def close(self) -> None:
        """Leaves the process group."""
        self._dist.destroy_process_group()


class GlooPlayer:
    """`pygloo`, or xoscar's fork of it, on 127.0.0.1, called directly; the allreduce is its ring.

    Args:
        place: Which rank.
        module: Which of the two.
    """

    def __init__(self, place: Place, *, module: str) -> None:
        gloo = import_module(module)
        self._gloo = gloo
        if hasattr(gloo, "GlooDataType_t"):  # the fork has other spellings
            self._dtype, self._ring = gloo.GlooDataType_t.glooFloat32, gloo.AllreduceAlgorithm.RING
        else:
            self._dtype, self._ring = gloo.glooDataType_t.glooFloat32, gloo.allreduceAlgorithm.RING
        self._context = gloo.rendezvous.Context(place.rank, place.ranks)
        device = gloo.transport.tcp.CreateDevice(gloo.transport.tcp.attr("127.0.0.1"))
        self._files = gloo.rendezvous.FileStore(str(place.directory))  # the prefix store does not hold it
        self._store = gloo.rendezvous.PrefixStore("benchmark", self._files)
        self._context.connectFullMesh(self._store, device)

    def empty(self, size: int) -> Array:
        """An array in ordinary memory."""
        return ordinary(size)

    def bind(self, operands: Operands) -> Callable[[], Any]:
        """One call, with pointers."""
        gloo, context, dtype, ring, add = self._gloo, self._context, self._dtype, self._ring, self._gloo.ReduceOp.SUM
        src, dst = operands.src.ctypes.data, operands.dst.ctypes.data
        given, size = operands.src.size, operands.dst.size
        calls: dict[str, Callable[[], Any]] = {
            "allreduce": lambda: gloo.allreduce(context, src, dst, size, dtype, add, ring),
            "broadcast": lambda: gloo.broadcast(context, src, dst, size, dtype, 0),
            "allgather": lambda: gloo.allgather(context, src, dst, given, dtype),
            "alltoall": lambda: gloo.all_to_all(context, src, dst, size, dtype),
            "send": (lambda: gloo.recv(context, dst, size, dtype, 0))
            if operands.rank
            else (lambda: gloo.send(context, src, size, dtype, 1)),
        }
        return calls[operands.op]

    def close(self) -> None:
        """Drops the context, then the stores."""
        del self._context


class MpiPlayer:
    """MPI through mpi4py, started by ``mpiexec``, called directly with buffers."""

    def __init__(self, place: Place) -> None:
        from mpi4py import MPI

        self._mpi, self._world = MPI, MPI.COMM_WORLD

    def empty(self, size: int) -> Array:
        """An array in ordinary memory."""
        return ordinary(size)

    def bind(self, operands: Operands) -> Callable[[], Any]:
        """One call."""
        mpi, world, src, dst = self._mpi, self._world, operands.src, operands.dst
        calls: dict[str, Callable[[], Any]] = {
            "allreduce": lambda: world.Allreduce(mpi.IN_PLACE, dst),
            "broadcast": lambda: world.Bcast(dst, 0),
            "allgather": lambda: world.Allgather(src, dst),
            "alltoall": lambda: world.Alltoall(src, dst),
            "send": (lambda: world.Recv(dst, 0)) if operands.rank else (lambda: world.Send(src, 1)),
        }
        return calls[operands.op]

    def close(self) -> None:
        """Finalizes MPI, which waits for all ranks."""
        self._mpi.Finalize()
