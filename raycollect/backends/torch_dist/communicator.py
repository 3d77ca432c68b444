"""Backend `torch:<name>`: any backend of `torch.distributed`, by its name there.

Theory, for w ranks and n bytes. In CPU memory the library reduces and broadcasts large arrays: ALLREDUCE where it
reduces as numpy does (`is_native`: no other dtypes, no 16-bit floats, no MIN and MAX of floats because of NaN, no
bitwise ops), by gloo's ring with 2 (w - 1) / w x n, and BROADCAST. Everything else, and small arrays, travel on the
mesh (`meshed`), by the kernels of backend `tcp`. In device memory each operation is the library's own, on chunks of
`CHUNK_NBYTES` of bytes, which every library moves; it reduces any dtype.

gloo works in the user's arrays: copying in and out takes half as long as an allreduce. A kernel that timed out may
still run in a thread of the library, and must not write to a tensor that the user has back. So the library's
connections are shut down, which ends the kernel, and this rank waits for its end. If they can't be shut down, data is
received in a separate buffer and copied out when complete. A large array is reduced in parts (`PART_NBYTES`), several
of them at the same time.

Pieces of several sizes, in device memory: ALLTOALL moves exactly them, and the others pad each chunk to the largest
piece.

Waiting releases the GIL and notices an abort, which breaks the group. Extra memory: at most 4 x `CHUNK_NBYTES` per rank
(P8), and a copy of each device tensor that has gaps.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial

from raycollect.backends.capabilities import RINGS_OF_TORCH
from raycollect.backends.in_use import InUse
from raycollect.backends.kernels import translated
from raycollect.backends.meshed import Meshed, descriptors
from raycollect.backends.tcp.communicator import TcpCommunicator, check_descriptors, connect
from raycollect.backends.torch_dist.calls import Calls, Library
from raycollect.backends.torch_dist.group import make
from raycollect.backends.torch_dist.run import is_native, run
from raycollect.backends.torch_dist.severed import sever
from raycollect.core import threads
from raycollect.core.model import Kernel, Launch, OpKind
from raycollect.core.protocols import Joining
from raycollect.errors import KernelError

JOIN_TIMEOUT_S = 60.0
# With these a wait that times out leaves the collective running; with others it may end the whole group
PATIENT = frozenset({"torch:gloo", "torch:mpi", "torch:ucc"})
CLOSE_TIMEOUT_S = 1.0  # How long to wait until the library has shut down
_LACKING = re.compile(r"(not|n't) (yet )?(support|implement)(ed)?", re.IGNORECASE)


def create(joining: Joining) -> TorchCommunicator:
    """Joins the group; returns when this rank has met all others.

    Raises:
        BackendNotInstalledError: torch has no such backend here.
        InvalidGroupError: The options don't fit.
        BackendUnavailableError: The members can't connect, or this process has too few descriptors.
        CollectiveTimeoutError: A member did not join in time.
    """
    spec, rank = joining.spec, joining.rank
    check_descriptors(spec, rank, descriptors(spec.world_size))
    mesh = connect(joining)
    try:
        backend, published = make(spec, rank, joining.rendezvous, host=joining.host, timeout_s=JOIN_TIMEOUT_S)
        library = Library(
            backend=backend,
            rank=rank,
            world_size=spec.world_size,
            group_name=spec.name,
            is_patient=spec.backend in PATIENT,
            sever=partial(sever, published) if published else None,
        )
        communicator = TorchCommunicator(library, joining, mesh)
        if OpKind.BARRIER.value in spec.ops:
            communicator.meet()
    except BaseException:
        mesh.close()
        raise
    return communicator


class TorchCommunicator(Meshed):
    """One rank's membership. An abort also wakes a rank inside a kernel; a library kernel then breaks the group."""

    def __init__(self, library: Library, joining: Joining, mesh: TcpCommunicator) -> None:
        super().__init__(joining, mesh, RINGS_OF_TORCH, is_native)
        self._backend = joining.spec.backend
        self._use = InUse(library, _shut_down, self._group_name)

    def meet(self) -> None:
        """Runs a first barrier: some libraries connect at their first operation, when the rendezvous may have ended."""
        everyone = Launch(seq=0, ranks=tuple(range(self.world_size)), timeout_s=JOIN_TIMEOUT_S)
        self._run(everyone, Kernel(kind=OpKind.BARRIER))

    def _run(self, launch: Launch, kernel: Kernel) -> None:
        self._use.call(self._run_in, launch, kernel)

    def _run_in(self, library: Library, launch: Launch, kernel: Kernel) -> None:
        calls = Calls(library, launch, self._check_going)
        with self._failing(kernel, calls, launch), translated(kernel.kind, self._group_name, self.rank):
            run(calls, launch, kernel)

    def close(self) -> None:
        """Shuts the library down, once a running kernel has noticed."""
        super().close()
        self._use.close()

    @contextmanager
    def _failing(self, kernel: Kernel, calls: Calls, launch: Launch) -> Iterator[None]:
        # A failed kernel leaves the library unusable, unless the library refused to begin.
        kind = kernel.kind.value
        try:
            yield
        except BaseException as exc:  # also a signal: the other ranks are in the kernel
            said = str(exc.__cause__) if isinstance(exc, KernelError) else ""
            if not calls.has_begun and _LACKING.search(said):
                actual = f"{kind}, of which torch says: {said}"
                expected = f"an operation that backend {self._backend!r} has for such tensors"
                raise self._refused(kernel, "op", actual, expected) from exc
            self._broken = self._broken or f"{kind} of launch {launch.seq} failed in mid-kernel: {exc}"
            if calls.library.sever is not None:
                calls.library.sever()  # wakes ranks that wait for this one inside the library
            raise self._failed(exc, launch, kernel) from exc.__cause__


def _shut_down(library: Library) -> None:
    def shut_down() -> None:
        with suppress(AttributeError, RuntimeError):  # some backends only end with the last reference
            library.backend.shutdown()

    threads.bounded(shut_down, CLOSE_TIMEOUT_S)
