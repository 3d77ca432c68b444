"""Synchronization of ranks that share memory: words that only grow, and semaphores.

Each rank has one 8-byte word that only it writes: ``seq << 24 | phase``. `seq` is its current launch, `phase` counts
its barriers in that launch: 0 on entering, `CLOSED` once it has left. A rank arrives at a barrier by storing its word
and posting the semaphores of sleeping ranks; it waits until every word is at least as high. So words are never
reset, an abort or a timeout leaves a consistent state, and a spurious wake-up costs one check. Next to the word are the
rank's last known core, its process id, and the rank for which it sleeps: a post costs a call, and most ranks are awake.

A rank that sleeps names the highest of the ranks that it waits for, and only that rank posts its semaphore. Otherwise
each arrival would wake all earlier ranks, in vain: w ranks would wake w * w / 2 times in a barrier. A rank that leaves
a launch too early posts for all sleepers, as none of them can continue.

A rank that leaves a launch first records its progress: ``seq << 24 | passed`` in a ring of `OUTCOMES` cells, where
`passed` is the last barrier that it passed (`CLOSED` if it ran everything). A rank that waits for it at a later barrier
raises; a rank that is late at a barrier which the other rank passed continues. A rank that ran everything also reads
the records of the others, between its own record and its word: of all that did so, the last one sees all. Until that
word is stored, the others have a debt, so they do not overwrite their records.

Each arrival has a cell: the number of the rank's arrival, and its length. A rank that repeats an arrival leaves both
unchanged, so that the others recognize it without reading it.

Areas of shared memory (arrivals, slots) are written by one rank and read by others. A rank writes its areas in a launch
only after all possible readers of its earlier launches have closed these ("debts"), which rarely takes a wait.

Memory order. Words are 8 bytes, aligned, and stored by one instruction. Data is written before the word, and `sem_post`
and `sem_wait` are full barriers in glibc, so a rank woken by a semaphore sees the data. If a rank sees
the word without waiting: on x86-64 loads are in order; elsewhere the order comes from releasing and re-taking the GIL,
or a lock, in the ctypes call that each arrival makes before it reads, and from `Semaphore.drain` if an outcome seems to
be missing. A rank that is about to sleep announces it, and reads the words again; a rank that arrives stores its word,
and then looks for sleepers. Between the two steps each makes a libc call, a full barrier, so that at least one of them
sees the other. The same holds for two ranks that store their records, and then read each other's.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from raycollect.backends import kernels
from raycollect.backends.kernels import check_arrival, late
from raycollect.core.cpu_affinity import YIELD_S, Seeker
from raycollect.core.model import Launch
from raycollect.core.protocols import ARRIVAL_NBYTES
from raycollect.core.semaphores import SEM_NBYTES, semaphores
from raycollect.errors import InternalError, PlanAbortedError

_PHASE_BITS = 24
CLOSED = (1 << _PHASE_BITS) - 1
_SEQ_LIMIT = 1 << (63 - _PHASE_BITS)
OUTCOMES = 64
_WORD_STRIDE = 8  # in words: a cache line each
_ASLEEP = 3  # The index of the word that names the rank for which it sleeps: that rank + 1; 0: it is awake
_SLICE_S = 0.5  # The longest sleep before the words are read again, in case a wake-up is lost
_PARITIES = 2
_LENGTH_BITS = 24  # The low bits of an arrival's cell hold its length, the others count its rank's arrivals
_LENGTH = (1 << _LENGTH_BITS) - 1


def control_nbytes(world_size: int) -> int:
    """Returns the shared memory that synchronizing `world_size` ranks takes; a multiple of the page size."""
    per_rank = SEM_NBYTES + 8 * (_WORD_STRIDE + OUTCOMES + _PARITIES) + _PARITIES * ARRIVAL_NBYTES
    return -(-world_size * per_rank // mmap.PAGESIZE) * mmap.PAGESIZE


def prepare(segment: memoryview, world_size: int) -> None:
    """Initializes the semaphores in zeroed memory; called by its creator, before others map it."""
    semaphores(segment[: world_size * SEM_NBYTES], world_size, init=True)


class _Expected(NamedTuple):
    """Arrivals that matched the expected ones, by their cells."""

    blobs: Sequence[bytes]  # the expected arrivals; compared by identity
    ranks: tuple[int, ...]
    cells: list[tuple[int, int]]  # (place, content)


class Meeting:
    """One rank's end of the synchronization.

    One thread at a time calls `agree`, `barrier` and `end`; any thread calls `abort` and `close`.
    """

    def __init__(self, segment: memoryview, rank: int, world_size: int, group_name: str) -> None:
        self.rank = rank
        self._group_name = group_name
        cells_at = world_size * SEM_NBYTES
        self._semaphores = semaphores(segment[:cells_at], world_size, init=False)
        self._semaphore = self._semaphores[rank]  # its own
        areas_at = cells_at + world_size * 8 * (_WORD_STRIDE + OUTCOMES + _PARITIES)
        cells = segment[cells_at:areas_at].cast("Q")
        self._words = cells[: world_size * _WORD_STRIDE]
        self._outcomes = cells[world_size * _WORD_STRIDE : world_size * (_WORD_STRIDE + OUTCOMES)]
        self._cells = cells[world_size * (_WORD_STRIDE + OUTCOMES) :]
        self._arrivals = segment[areas_at : areas_at + world_size * _PARITIES * ARRIVAL_NBYTES]
        self._words[rank * _WORD_STRIDE + 2] = os.getpid()
        self._seq = 0
        self._phase = 0
        self._passed = 0
        self._agreed = 0
        self._arrived = 0  # the number of different arrivals of this rank
        self._brought: list[bytes | None] = [None] * _PARITIES  # the content of its areas
        self._expected: list[_Expected | None] = [None] * _PARITIES  # the last matches
        self._seeker = Seeker()
        self._debts: dict[int, int] = {}
        self._aborted: set[int] = set()
        self._dead: frozenset[int] = frozenset()  # ranks whose processes have ended: their words are final
        self._closed = False

    def agree(
        self, launch: Launch, arrival: bytes, until_s: float, expected: Sequence[bytes] | None = None
    ) -> Sequence[bytes]:
        """Exchanges arrivals among `launch.ranks`, in a launch that was entered; see `Communicator.agree`."""
        parity = self._bring(launch, arrival, until_s)
        ranks, cells, matched = launch.ranks, self._cells, self._expected[parity]
        if expected is None:
            return [bytes(self._read(rank, parity)) for rank in ranks]
        if matched is not None and matched.blobs is expected and matched.ranks == ranks:
            for place, content in matched.cells:
                if cells[place] != content:
                    break
            else:
                return expected
        now = [(place, cells[place]) for place in (rank * _PARITIES + parity for rank in ranks)]
        for rank, blob in zip(ranks, expected, strict=True):
            if self._read(rank, parity) != blob:
                return [bytes(self._read(other, parity)) for other in ranks]
        self._expected[parity] = _Expected(expected, ranks, now)
        return expected

    def _bring(self, launch: Launch, arrival: bytes, until_s: float) -> int:
        # Two areas alternate: no rank enters agreement k+1 of a launch before it has read agreement k.
        parity = self._agreed % _PARITIES
        if arrival != self._brought[parity]:
            check_arrival(arrival, self._group_name, self.rank)
            self._brought[parity] = None  # an interrupt may leave a half-written arrival
            mine = self._area(self.rank, parity)
            self._arrivals[mine : mine + len(arrival)] = arrival
            self._arrived += 1
            self._cells[self.rank * _PARITIES + parity] = self._arrived << _LENGTH_BITS | len(arrival)
            self._brought[parity] = arrival
        self._agreed += 1
        self.barrier(launch, until_s)
        return parity

    def barrier(
        self,
        launch: Launch,
        until_s: float,
        *,
        waiting: Sequence[int] | None = None,
        waits_for: Sequence[int] | None = None,
    ) -> None:
        """Waits for all of `launch.ranks`; or for `waits_for` only, while `waiting` wait for this rank.

        Raises:
            CollectiveTimeoutError: Names the ranks that had not arrived by `until_s` of the monotonic clock.
            PlanAbortedError: The launch was aborted here, or a rank has left it.
        """
        self._phase += 1
        if self._phase >= CLOSED:
            raise InternalError(detail=f"more than {CLOSED} barriers in one launch")
        target = self._words[self.rank * _WORD_STRIDE] = self._seq << _PHASE_BITS | self._phase
        ranks = launch.ranks
        self._ring(ranks if waiting is None else waiting)
        awaited = ranks if waits_for is None else waits_for
        if awaited:
            self._wait(launch, dict.fromkeys(awaited, target), until_s)
        self._passed = self._phase

    def check(self, launch: Launch, ranks: Sequence[int], until_s: float) -> None:
        """Raises like `barrier`, but never waits."""
        self._check_aborted(launch)
        for rank in ranks:
            self._has_come(rank, self._seq << _PHASE_BITS | self._phase + 1)
        if time.monotonic() > until_s:
            raise late(self._group_name, launch)

    def closing(self, launch: Launch) -> dict[int, int]:
        """Returns the words of the other ranks once they have left a launch; see `owing`."""
        return dict.fromkeys((r for r in launch.ranks if r != self.rank), launch.seq << _PHASE_BITS | CLOSED)

    def owing(self, words: dict[int, int]) -> bool:
        """Tells whether one of these ranks is alive and has not reached its word."""
        late = (rank for rank, word in words.items() if self._words[rank * _WORD_STRIDE] < word)
        return any(_is_alive(self._words[rank * _WORD_STRIDE + 2]) for rank in late)

    def end(self, launch: Launch, ok: bool) -> tuple[int, ...]:
        """Leaves the launch; never waits, never raises.

        Returns:
            The ranks known to have run all of it; empty unless `ok`. The last of these ranks to leave sees all.
        """
        if launch.seq < self._seq:
            return ()
        if launch.seq > self._seq:  # it did not reach the agreement
            self._seq, self._phase, self._passed = launch.seq, 0, 0
        seq, words, outcomes, ranks = self._seq, self._words, self._outcomes, launch.ranks
        closed, at = seq << _PHASE_BITS | CLOSED, seq % OUTCOMES
        ended: list[int] = []
        if ok:
            outcomes[self.rank * OUTCOMES + at] = closed
            self._semaphore.take()  # a barrier
            for rank in ranks:
                if outcomes[rank * OUTCOMES + at] == closed:
                    ended.append(rank)  # noqa: PERF401 - called in each run, and a comprehension is slower
        else:
            words[self.rank * _WORD_STRIDE + _ASLEEP] = 0  # a wait that raised may have set it
            if not self._debts:  # otherwise it passed no barrier, and others may still read the cell's earlier record
                outcomes[self.rank * OUTCOMES + at] = seq << _PHASE_BITS | self._passed
        words[self.rank * _WORD_STRIDE] = closed
        self._ring(ranks, all_sleepers=not ok)
        if self._phase:
            arrived = seq << _PHASE_BITS | 1
            for rank in ranks:
                # A rank that has not arrived by now sees that this rank has left, and never reads its data: no debt.
                if rank != self.rank and words[rank * _WORD_STRIDE] >= arrived:
                    self._debts[rank] = closed
        for other in tuple(self._aborted) if self._aborted else ():  # in place: another thread may add to it
            if other <= seq:
                self._aborted.discard(other)
        return tuple(ended)

    def abort(self, seq: int) -> None:
        """Makes this rank's waits in that launch raise."""
        self._aborted.add(seq)
        self._semaphore.ring()

    def lost(self, rank: int) -> None:
        """Makes waits raise for a rank whose process has ended before it arrived; see `Communicator.lost`."""
        self._dead |= {rank}
        self._semaphore.ring()

    def close(self) -> None:
        """Makes all waits of this rank raise, now and later."""
        self._closed = True
        self._semaphore.ring()

    def leave(self) -> None:
        """Leaves all launches, also future ones; called after `close`, when no thread of this rank is in a launch."""
        self._words[self.rank * _WORD_STRIDE] = _SEQ_LIMIT - 1 << _PHASE_BITS | CLOSED
        self._ring(range(len(self._words) // _WORD_STRIDE), all_sleepers=True)

    def enter(self, launch: Launch, until_s: float) -> None:
        """Begins a launch unless it has begun: waits for readers of this rank's earlier data."""
        if launch.seq == self._seq:
            return
        if not self._seq < launch.seq < _SEQ_LIMIT:
            raise InternalError(detail=f"launch {launch.seq} after {self._seq}")
        self._seq, self._phase, self._passed, self._agreed = launch.seq, 0, 0, 0
        # The word closes all earlier launches before this rank waits for other ranks to close them: no cycle of debts.
        self._words[self.rank * _WORD_STRIDE] = self._seq << _PHASE_BITS
        for rank, owed in tuple(self._debts.items()):
            if self._words[rank * _WORD_STRIDE] >= owed:
                del self._debts[rank]
        if self._debts:
            self._ring(self._debts)
            self._wait(launch, self._debts, until_s)
            self._debts = {}

    def _check_aborted(self, launch: Launch) -> None:
        if self._closed or launch.seq in self._aborted:
            detail = f"launch {launch.seq} was aborted" if not self._closed else "the communicator was closed"
            raise PlanAbortedError(group_name=self._group_name, rank=self.rank, detail=detail)

    def _wait(self, launch: Launch, targets: dict[int, int], until_s: float) -> None:
        until_asleep_s, mine, announced, has_yielded = 0.0, self.rank * _WORD_STRIDE, 0, False
        absent: Collection[int] = targets
        words = self._words
        while True:
            if self._aborted or self._closed:
                self._check_aborted(launch)
            missing: list[int] = []
            for rank in absent:  # arrived ranks are not checked again
                word, target = words[rank * _WORD_STRIDE], targets[rank]
                is_beyond = word >= target | CLOSED  # that launch
                if word < target or (is_beyond and not self._has_come(rank, target)):
                    missing.append(rank)
            absent = missing
            if absent and self._dead:
                absent = self._await_living(launch, absent, targets)
            if not absent:
                words[mine + _ASLEEP] = 0
                return
            if not has_yielded:  # at once: an absent rank may be ready to run on this core
                has_yielded = True
                os.sched_yield()
                continue
            now_s = time.monotonic()
            if not until_asleep_s:
                until_asleep_s = now_s + YIELD_S
                cores = self._words[1::_WORD_STRIDE].tolist()
                awaited = [cores[rank] for rank in absent]
                del cores[self.rank]
                self._words[mine + 1] = self._seeker.seek(awaited, cores, now_s)
            if now_s < min(until_asleep_s, until_s):
                os.sched_yield()
                continue
            left_s = until_s - now_s
            if left_s <= 0:
                raise kernels.absent(self._group_name, launch, absent)
            if announced != (sleeps_for := max(absent) + 1):  # also if that rank has arrived meanwhile
                self._words[mine + _ASLEEP] = announced = sleeps_for
                self._semaphore.take()  # a barrier
                continue
            self._semaphore.wait(min(left_s, _SLICE_S))
            self._words[mine + _ASLEEP] = announced = 0

    def _await_living(self, launch: Launch, absent: Iterable[int], targets: dict[int, int]) -> list[int]:
        # Drops dead ranks that arrived in time; a rank does not wait for a dead rank to finish reading.
        dead = self._dead  # read before the words: those of dead ranks are final
        for rank in dead.intersection(absent):
            if targets[rank] & CLOSED != CLOSED and not self._has_come(rank, targets[rank]):
                detail = f"the process of rank {rank} has ended in launch {launch.seq}"
                raise PlanAbortedError(group_name=self._group_name, rank=rank, detail=detail)
        return [rank for rank in absent if rank not in dead]

    def _has_come(self, rank: int, target: int) -> bool:
        word = self._words[rank * _WORD_STRIDE]
        if word < target or rank == self.rank:
            return word >= target
        closed, seq = target | CLOSED, target >> _PHASE_BITS
        if target == closed or word < closed:
            return True
        # The last barrier of that launch that it passed before it left, unless the record was overwritten.
        outcomes, at = self._outcomes, rank * OUTCOMES + seq % OUTCOMES
        if not target <= outcomes[at] <= closed:
            self._semaphore.drain()  # a barrier: the outcome was stored before the word
            if not target <= outcomes[at] <= closed:
                detail = f"rank {rank} has left launch {seq}"
                raise PlanAbortedError(group_name=self._group_name, rank=rank, detail=detail)
        return True

    def _ring(self, ranks: Iterable[int], *, all_sleepers: bool = False) -> None:
        # Wakes ranks that sleep for this rank; `all_sleepers`: for any rank.
        self._semaphore.take()  # a barrier
        words, mine = self._words, self.rank + 1
        for rank in ranks:
            sleeps_for = words[rank * _WORD_STRIDE + _ASLEEP]
            if sleeps_for and (sleeps_for == mine or all_sleepers) and rank != self.rank:
                self._semaphores[rank].ring()

    def _area(self, rank: int, parity: int) -> int:
        return (rank * _PARITIES + parity) * ARRIVAL_NBYTES

    def _read(self, rank: int, parity: int) -> memoryview:
        start = self._area(rank, parity)
        return self._arrivals[start : start + (self._cells[rank * _PARITIES + parity] & _LENGTH)]


def _is_alive(pid: int) -> bool:
    # True if unknown, such as for pid 0.
    try:
        os.kill(pid, 0) if pid else None
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
