"""The mesh: sockets of backend `tcp` that communicators of libraries for CPU memory use beside the library.

=====================  ================================================================================================
agreement              names missing ranks, and an abort wakes waiting ranks
kernels up to          they are faster without a library's rounds and threads
`MESH_UP_TO_NBYTES`
kernels that the       the GIL is free, an abort wakes, and elements are folded in rank order; a broadcast between hosts
library does worse     enters each host once: in gloo's tree, most ranks get it from another host
a kernel that fails    unresponsive ranks are found (`silent`): the library does not name them
=====================  ================================================================================================
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from raycollect.backends.device_arrays import DeviceArray
from raycollect.backends.exchanged import Exchanged
from raycollect.backends.tcp.communicator import TcpCommunicator
from raycollect.core.model import Kernel, Launch, OpKind, ReduceOp
from raycollect.core.protocols import Joining
from raycollect.errors import CollectiveTimeoutError, KernelError, PlanAbortedError

# (world size, bytes): the size up to which arrays of groups of at most so many ranks travel on the mesh, as measured
# on one host: at 64 MB it is 1.6 to 2.2 times as fast as torch's and xoscar's gloo with two ranks, 1.4 with four.
MESH_UP_TO_NBYTES: tuple[tuple[int, int], ...] = ((4, 64 << 20), (1 << 30, 4 << 20))
ANSWER_S = 1.0  # How long ranks may take to answer after a kernel's time limit; the others are named
_REDUCTIONS = (OpKind.ALLREDUCE, OpKind.REDUCE)
_ARITHMETIC = (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.AVG)
_ORDERED = (ReduceOp.MIN, ReduceOp.MAX)
_TIMED_OUT = re.compile(r"timed? ?out", re.IGNORECASE)
# gloo's messages for a connection whose peer has ended it; they name neither rank nor cause
_PEER_GONE = re.compile(r"closed by peer|reset by peer|broken pipe|read error|write error", re.IGNORECASE)


def descriptors(world_size: int) -> int:
    """Returns how many descriptors a rank needs for the mesh and gloo: connections, listeners and pollers.

    gloo ends the process if one of its threads can't open one.
    """
    return 2 * world_size + 8


def is_as_numpy(op: ReduceOp, dtype: str) -> bool:
    """Tells whether a library that has the dtype, and reduces by a ring, has numpy's results.

    MIN and MAX of floats differ: whether a comparison keeps a NaN depends on its position in the ring.
    """
    return op in _ARITHMETIC or (op in _ORDERED and not dtype.startswith("float"))


class Meshed(Exchanged):
    """The part of a `Communicator` that runs on the mesh.

    `native` are the operations that the library runs, on larger arrays; `is_native` tells whether it reduces elements
    of a dtype as numpy does.
    """

    sees_departures: bool = True

    def __init__(
        self,
        joining: Joining,
        mesh: TcpCommunicator,
        native: frozenset[OpKind],
        is_native: Callable[[ReduceOp, str], bool],
    ) -> None:
        super().__init__(replace(joining, exchange=mesh))
        self._mesh = mesh
        self._native = native - {OpKind.BROADCAST} if joining.spec.hosts else native
        self._mesh_nbytes = next(most for world, most in MESH_UP_TO_NBYTES if self.world_size <= world)
        self._is_native = is_native

    def agree(
        self, launch: Launch, arrival: bytes, kernel: Kernel | None = None, expected: Sequence[bytes] | None = None
    ) -> Sequence[bytes]:
        """Exchanges arrivals on the mesh, which may send small data ahead."""
        self._check_going(launch)
        if kernel is not None and self._is_for_library(launch, kernel):
            kernel = None
        return self._mesh.agree(launch, arrival, kernel, expected)

    def launch(self, launch: Launch, kernels: Sequence[Kernel]) -> None:
        """Runs kernels in the caller's thread."""
        self._check_whole()
        for kernel in kernels:
            if self._is_for_library(launch, kernel):
                self._run(launch, kernel)
            else:
                self._mesh.launch(launch, (kernel,))

    def end(self, launch: Launch, ok: bool, owed: Sequence[Kernel] = ()) -> tuple[int, ...]:
        """Leaves the launch; tells the others if this rank has not run all of it."""
        self._mesh.end(launch, ok, owed)
        return super().end(launch, ok, owed)

    def close(self) -> None:
        """Closes the mesh; the subclass closes the library."""
        super().close()
        self._mesh.close()

    def lost(self, rank: int) -> bool:
        """Ends waits on the mesh for a rank whose process has ended; the library notices by itself."""
        return self._mesh.lost(rank)

    def _is_for_library(self, launch: Launch, kernel: Kernel) -> bool:
        # The same on all ranks of the launch. Other kernels run on the mesh.
        sample = kernel.sample
        if isinstance(sample, DeviceArray):
            return True
        if kernel.kind not in self._native or len(launch.ranks) < self.world_size or sample.nbytes <= self._mesh_nbytes:
            return False
        op = kernel.op
        return kernel.kind not in _REDUCTIONS or op is None or self._is_native(op, sample.dtype.name)

    def _failed(self, exc: BaseException, launch: Launch, kernel: Kernel) -> BaseException:
        # The error to raise for a failed kernel of the library, which is now unusable.
        group_name, limit_s = self._group_name, launch.timeout_s
        said = str(exc.__cause__) if isinstance(exc, KernelError) else ""
        if _PEER_GONE.search(said):
            return PlanAbortedError(group_name=group_name, detail=f"a connection has ended: {said}")
        late = exc if isinstance(exc, CollectiveTimeoutError) else None
        if _TIMED_OUT.search(said):
            late = CollectiveTimeoutError(op=kernel.kind.value, group_name=group_name, timeout_s=limit_s, detail=said)
        if late is None:
            return exc
        late.within = tuple(rank for rank in launch.ranks if rank != self.rank)
        late.missing = self._mesh.silent(launch, ANSWER_S)
        return late
