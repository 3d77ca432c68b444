"""Communicators of ranks that are threads of one process. They define the semantics of every operation, for tests.

In each operation every rank provides a value, gets those of all ranks in rank order, and applies plain numpy to them.
Nothing is chunked or overlapped. Memory: one copy of what each rank provides.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from raycollect.backends.arrays import Array, Flat
from raycollect.backends.folds import fold
from raycollect.backends.kernels import absent, movement, recognized, reduce_op, translated
from raycollect.core.model import Kernel, Launch, OpKind
from raycollect.core.operations import OPERATIONS, PARTIAL_FOLDS
from raycollect.errors import GroupBrokenError, InternalError, PlanAbortedError

OUTCOMES = 64  # How many ended launches are kept for slower peers to query


class LocalWorld:
    """The shared state of the ranks of one process: their progress, and the values they provide."""

    def __init__(self, world_size: int, group_name: str = "local") -> None:
        self.world_size = world_size
        self.group_name = group_name
        self.changed: threading.Condition = threading.Condition()
        self._given: dict[tuple[int, int], dict[int, Any]] = {}  # (seq, phase) -> rank -> value
        self._taken: dict[tuple[int, int], set[int]] = {}
        self._left: list[dict[int, int]] = [{} for _ in range(world_size)]  # rank -> seq -> phases got through
        self._entered = [0] * world_size  # rank -> the latest launch it is or was in

    def meet(self, launch: Launch, rank: int, phase: int, value: Any, stopped: Callable[[], str]) -> list[Any]:
        """Provides a value and returns those of `launch.ranks`, in their order.

        `phase` counts the exchanges of the launch from 1; `stopped` says why the wait must end, or "".

        Raises:
            CollectiveTimeoutError: Not all came within `launch.timeout_s`.
            PlanAbortedError: It was stopped, or a rank has left the launch.
        """
        key = (launch.seq, phase)
        with self.changed:
            self._entered[rank] = launch.seq
            given = self._given.setdefault(key, {})
            given[rank] = value
            self.changed.notify_all()
            came = self.changed.wait_for(lambda: self._may_go(launch, phase, stopped), launch.timeout_s)
            if why := stopped():
                raise PlanAbortedError(group_name=self.group_name, rank=rank, detail=why)
            gone = self._gone(launch, phase)
            if gone:
                detail = f"rank {gone[0]} has left launch {launch.seq}"
                raise PlanAbortedError(group_name=self.group_name, rank=gone[0], detail=detail)
            if not came:
                missing = tuple(r for r in launch.ranks if r not in given)
                raise absent(self.group_name, launch, missing)
            values = [given[r] for r in launch.ranks]
            self._take(key, rank, launch.ranks)
            return values

    def leave(self, launch: Launch, rank: int, passed: int) -> None:
        """Records that a rank has left a launch after `passed` exchanges, and frees values nobody needs any more."""
        with self.changed:
            left = self._left[rank]
            left[launch.seq] = passed
            for seq in [seq for seq in left if len(left) > OUTCOMES and seq < launch.seq][: len(left) - OUTCOMES]:
                del left[seq]
            if all(launch.seq in self._left[r] for r in launch.ranks):
                for key in [key for key in self._given if key[0] == launch.seq]:
                    self._given.pop(key)
                    self._taken.pop(key, None)
            self.changed.notify_all()

    def _may_go(self, launch: Launch, phase: int, stopped: Callable[[], str]) -> bool:
        given = self._given.get((launch.seq, phase), {})
        return bool(stopped()) or all(r in given for r in launch.ranks) or bool(self._gone(launch, phase))

    def _gone(self, launch: Launch, phase: int) -> list[int]:
        # The ranks that have left without passing this exchange.
        seq = launch.seq
        return [r for r in launch.ranks if self._left[r].get(seq, -1 if self._entered[r] > seq else phase) < phase]

    def _take(self, key: tuple[int, int], rank: int, ranks: Sequence[int]) -> None:
        taken = self._taken.setdefault(key, set())
        taken.add(rank)
        if taken.issuperset(ranks):
            self._given.pop(key, None)
            self._taken.pop(key, None)


class LocalCommunicator:
    """One rank's membership, a `Communicator`."""

    def __init__(self, world: LocalWorld, rank: int) -> None:
        self.rank = rank
        self.world_size: int = world.world_size
        self._world = world
        self._seq = 0
        self._phase = 0
        self._passed = 0
        self._aborted: set[int] = set()
        self._closed = False

    def agree(
        self, launch: Launch, arrival: bytes, kernel: Kernel | None = None, expected: Sequence[bytes] | None = None
    ) -> Sequence[bytes]:
        """Brings `launch.ranks` together."""
        self._check_open()
        if launch.seq < self._seq:
            raise InternalError(detail=f"launch {launch.seq} after {self._seq}")
        if launch.seq > self._seq:
            self._seq, self._phase, self._passed = launch.seq, 0, 0
        return recognized(self._meet(launch, arrival), expected)

    def launch(self, launch: Launch, kernels: Sequence[Kernel]) -> None:
        """Runs kernels in the caller's thread."""
        self._check_open()
        for kernel in kernels:
            with translated(kernel.kind, self._world.group_name, self.rank):
                _KERNELS[kernel.kind](self, launch, kernel)

    def end(self, launch: Launch, ok: bool, owed: Sequence[Kernel] = ()) -> tuple[int, ...]:
        """Leaves the launch."""
        if launch.seq > self._seq:
            self._seq, self._passed = launch.seq, 0
        for seq in tuple(self._aborted):
            if seq <= self._seq:
                self._aborted.discard(seq)
        self._world.leave(launch, self.rank, 1 << 62 if ok else self._passed)
        return ()

    def abort(self, seq: int) -> None:
        """Makes this rank's waits in that launch raise."""
        with self._world.changed:
            self._aborted.add(seq)
            self._world.changed.notify_all()

    def lost(self, rank: int) -> bool:
        """Returns False: a rank is a thread, which sees of others what they have left."""
        return False

    def close(self) -> None:
        """Makes all waits of this rank raise."""
        with self._world.changed:
            self._closed = True
            self._world.changed.notify_all()

    def _check_open(self) -> None:
        if self._closed:
            raise GroupBrokenError(group_name=self._world.group_name, detail="the communicator was closed")

    def _meet(self, launch: Launch, value: Any) -> list[Any]:
        self._phase += 1
        values = self._world.meet(launch, self.rank, self._phase, value, self._stopped)
        self._passed = self._phase
        return values

    def _stopped(self) -> str:
        if self._closed:
            return "the communicator was closed"
        return f"launch {self._seq} was aborted" if self._seq in self._aborted else ""

    def _give(self, launch: Launch, src: Any) -> list[Any]:
        return self._meet(launch, tuple(map(_copied, src)) if type(src) is tuple else _copied(src))

    def _barrier(self, launch: Launch, kernel: Kernel) -> None:
        self._give(launch, None)

    def _allreduce(self, launch: Launch, kernel: Kernel) -> None:
        _write(kernel.dst, _folded(kernel, self._give(launch, kernel.src)))

    def _reduce(self, launch: Launch, kernel: Kernel) -> None:
        parts = self._give(launch, kernel.src)
        if self.rank == kernel.peer:
            _write(kernel.dst, _folded(kernel, parts))

    def _copy(self, launch: Launch, kernel: Kernel) -> None:
        # A broadcast, or a send and its receive.
        root = self.rank if kernel.kind is OpKind.SEND else kernel.peer
        src, dst, _ = movement(kernel, is_root=self.rank == root)
        given = self._meet(launch, None if src is None else np.array(src.read(0, src.size)))
        if dst is not None:
            dst.write(0, dst.size, given[launch.ranks.index(root)])

    def _allgather(self, launch: Launch, kernel: Kernel) -> None:
        _write_each(kernel.dst, self._give(launch, kernel.src))

    def _gather(self, launch: Launch, kernel: Kernel) -> None:
        given = self._give(launch, kernel.src)
        if self.rank == kernel.peer:
            _write_each(kernel.dst, given)

    def _scatter(self, launch: Launch, kernel: Kernel) -> None:
        given = self._give(launch, kernel.src if self.rank == kernel.peer else None)
        _write(kernel.dst, given[launch.ranks.index(kernel.peer)][launch.ranks.index(self.rank)])

    def _reducescatter(self, launch: Launch, kernel: Kernel) -> None:
        mine = launch.ranks.index(self.rank)
        _write(kernel.dst, _folded(kernel, [given[mine] for given in self._give(launch, kernel.src)]))

    def _scan(self, launch: Launch, kernel: Kernel) -> None:
        parts, position = self._give(launch, kernel.src), launch.ranks.index(self.rank)
        _write(kernel.dst, _folded(kernel, [parts[at] for at in OPERATIONS[kernel.kind].sources(position, len(parts))]))

    def _alltoall(self, launch: Launch, kernel: Kernel) -> None:
        mine = launch.ranks.index(self.rank)
        _write_each(kernel.dst, [given[mine] for given in self._give(launch, kernel.src)])


_KERNELS: dict[OpKind, Callable[[LocalCommunicator, Launch, Kernel], None]] = {
    OpKind.ALLREDUCE: LocalCommunicator._allreduce,
    OpKind.REDUCE: LocalCommunicator._reduce,
    OpKind.BROADCAST: LocalCommunicator._copy,
    OpKind.ALLGATHER: LocalCommunicator._allgather,
    OpKind.GATHER: LocalCommunicator._gather,
    OpKind.SCATTER: LocalCommunicator._scatter,
    OpKind.REDUCESCATTER: LocalCommunicator._reducescatter,
    OpKind.ALLTOALL: LocalCommunicator._alltoall,
    **dict.fromkeys(PARTIAL_FOLDS, LocalCommunicator._scan),
    OpKind.SEND: LocalCommunicator._copy,
    OpKind.RECV: LocalCommunicator._copy,
    OpKind.BARRIER: LocalCommunicator._barrier,
}
KINDS = tuple(_KERNELS)


def _copied(array: Array | None) -> Array | None:
    return None if array is None else np.array(Flat(array).read(0, array.size))


def _folded(kernel: Kernel, parts: Sequence[Array]) -> Array:
    out = np.empty_like(parts[0])
    fold(reduce_op(kernel), parts, out)
    return out


def _write(dst: Array, values: Array) -> None:
    flat = Flat(dst)
    if flat.size != values.size or flat.dtype != values.dtype:
        raise InternalError(detail=f"{values.size} x {values.dtype} for an array of {flat.size} x {flat.dtype}")
    flat.write(0, flat.size, values)


def _write_each(dst: Sequence[Array], given: Sequence[Array]) -> None:
    for array, values in zip(dst, given, strict=True):
        _write(array, values)
