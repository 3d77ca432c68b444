"""raycollect's backends as players: through the communicator contract, the consistency check included."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import raycollect as col
from benchmarks.kernels.operands import Array, Operands
from benchmarks.kernels.player import TIMEOUT_S, FileRendezvous, Place, UnixStar, ordinary
from benchmarks.report import Skipped
from raycollect import backends
from raycollect.backends import arrays
from raycollect.core.model import TENSOR, GroupSpec, Kernel, Launch, OpKind, ReduceOp
from raycollect.core.protocols import Joining, NoSegments, SegmentSource
from raycollect.engine.agreement import Arrival, Side, Spec, encode_arrival
from raycollect.errors import BackendNotInstalledError, UnknownBackendError

_KINDS = {
    "allreduce": OpKind.ALLREDUCE,
    "broadcast": OpKind.BROADCAST,
    "allgather": OpKind.ALLGATHER,
    "alltoall": OpKind.ALLTOALL,
}


class RaycollectPlayer:
    """One rank of one backend.

    Args:
        place: Which rank.
        backend: The backend.
        arena: Whether its arrays lie in the shared arena.

    Raises:
        Skipped: This raycollect has no such backend, or no arena.
    """

    def __init__(self, place: Place, *, backend: str, arena: bool = False) -> None:
        if arena and not hasattr(col, "empty"):
            raise Skipped("this raycollect has no arena (raycollect.empty)")
        try:
            create = backends.load(backend)
        except (BackendNotInstalledError, UnknownBackendError) as exc:
            raise Skipped(str(exc)) from exc
        self._arena = arena
        self._seqs = itertools.count(1)
        self._ranks = tuple(range(place.ranks))
        spec = GroupSpec(
            name="benchmark",
            group_id=f"benchmark-{place.directory.name}",
            backend=backend,
            world_size=place.ranks,
            ops=backends.ops_of(backend),
        )
        rendezvous, star = FileRendezvous(place.directory), UnixStar(place)
        self._communicator = create(Joining(spec, place.rank, rendezvous, star, segments=_segments()))

    def empty(self, size: int) -> Array:
        """An array in ordinary memory, or in the arena."""
        return col.empty(size, dtype="float32") if self._arena else ordinary(size)

    def bind(self, operands: Operands) -> Callable[[], Any]:
        """One launch of one kernel, as `raycollect.engine.run` runs a program."""
        communicator, ranks, seqs = self._communicator, self._ranks, self._seqs
        kernel, most = _kernel(operands)
        whole = replace(kernel, most=most)
        arrival = _arrival(operands)

        def once() -> None:
            launch = Launch(seq=next(seqs), ranks=ranks, timeout_s=TIMEOUT_S)
            arrivals = communicator.agree(launch, arrival, kernel)
            if len(set(map(bytes, arrivals))) != 1:
                raise AssertionError("the ranks disagree")
            communicator.launch(launch, (whole,))
            communicator.end(launch, True)

        return once

    def close(self) -> None:
        """Leaves the group."""
        self._communicator.close()


def _segments() -> SegmentSource:
    """The shared memory of this process, as a participant has it."""
    try:
        from raycollect.pos.segments import Segments
    except ImportError:
        return NoSegments()
    return Segments.current()


def _kernel(operands: Operands) -> tuple[Kernel, int]:
    """The kernel, and the size of its largest piece, which is known after the check."""
    op, rank, src, dst = operands.op, operands.rank, operands.src, operands.dst
    if op == "send":
        kind = OpKind.RECV if rank else OpKind.SEND
        return Kernel(kind=kind, src=None if rank else src, dst=dst if rank else None, peer=1 - rank), 0
    if op == "broadcast":
        return Kernel(kind=_KINDS[op], src=None if rank else src, dst=dst if rank else None, peer=0), 0
    if op == "allgather":
        return Kernel(kind=_KINDS[op], src=src, dst=operands.pieces(dst)), src.size
    if op == "alltoall":
        given, taken = operands.pieces(src), operands.pieces(dst)
        return Kernel(kind=_KINDS[op], src=given, dst=taken), given[0].size
    return Kernel(kind=_KINDS[op], src=src, dst=dst, op=ReduceOp.SUM), 0


def _arrival(operands: Operands) -> bytes:
    """What a rank brings to the check in such a plan; only that all ranks bring the same is looked at here."""
    gives = Side(structure=TENSOR, tensors=(arrays.info(operands.src),))
    return encode_arrival(Arrival(spec=Spec(op=operands.op, reduce_op="SUM", gives=gives)))
