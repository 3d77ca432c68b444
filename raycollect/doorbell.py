"""How runs of a captured step are started and answered on one host: cells in shared memory, and bells.

The controller makes the memory, the participants ("seats") map it. Each seat has two rings of `IN_FLIGHT` cells: runs,
which the controller writes and the seat reads, and answers, the other way round. Run n uses the n-th cell, modulo the
ring. A cell's number is written last, and says that the rest is there; no cell is written again before its run has
ended, which is for the controller to see to. So nothing is ever reset, and a ring too many only costs a look.

The seat whose answer to a run completes those of all seats rings the controller: the others would only wake it to go
back to sleep. After it has written its own answer and made a call of libc, which is a full barrier, a seat looks at
those of the others: of two that answer at once one at least sees both.

Whoever waits first offers its core to others for `YIELD_S`, ready to go on: in a hot loop the next run comes within
that time, and being woken costs more than the run itself.

The memory is as trustworthy as the processes of this user. Messages that don't fit go over the channel instead; their
cell says so.
"""

from __future__ import annotations

import mmap
import os
import platform
import secrets
import threading
import time
import weakref
from contextlib import suppress
from typing import NamedTuple

from raycollect import memfd
from raycollect.bells import SEM_NBYTES, Bells
from raycollect.cores import YIELD_S, Berth, current_core
from raycollect.model import Segment

__all__ = ["INLINE_NBYTES", "IN_FLIGHT", "Doorbell", "Entry", "Post"]

IN_FLIGHT = 16
"""How many runs of one capture may be under way."""

_NAME = "raycollect-doorbell"
_CELL_NBYTES = 4096
_HEAD_WORDS = 4  # number, seq, predecessor, length
INLINE_NBYTES = _CELL_NBYTES - 8 * _HEAD_WORDS
"""The longest message that fits into a cell."""

_IN_ORDER = platform.machine() in ("x86_64", "AMD64")
"""Whether processors see each other's stores in the order in which they were made."""
_BY_CHANNEL = 1 << 63
"""The length of a message that does not."""
_PRESENT_NBYTES = 8
_PRESENT = 1
"""What says that a seat is taken; the core that it is on comes on top, counted from 1."""
_MORE_BELLS = 2
"""Besides those of the seats: that of the controller, and one that is never rung."""
_WORDS = _CELL_NBYTES // 8
_SLICE_S = 0.5
"""The longest sleep before the cells are looked at again, should a ring ever be lost."""
_RINGS_KEPT = 64


def _cells_at(seats: int) -> int:
    """Where the cells begin: after the token, the bells, and what says which seats are taken."""
    nbytes = 64 + (seats + _MORE_BELLS) * SEM_NBYTES + seats * _PRESENT_NBYTES
    return -(-nbytes // _CELL_NBYTES) * _CELL_NBYTES


class Entry(NamedTuple):
    """A run, as a seat is told of it.

    Attributes:
        number: Which of the doorbell's runs.
        seq: Its place in the controller's order.
        predecessor: See `Ticket`.
        payload: Its arguments; None: they come over the channel.
    """

    number: int
    seq: int
    predecessor: int
    payload: bytes | None


class _Memory:
    """The cells and bells, as both ends see them.

    Args:
        mapped: All of the memory.
        seats: How many seats there are.
        init: True in the process that made it.
    """

    def __init__(self, mapped: mmap.mmap, seats: int, *, init: bool) -> None:
        whole = memoryview(mapped)
        bells_at, present_at = 64, 64 + (seats + _MORE_BELLS) * SEM_NBYTES
        self.seats = seats
        self.bells = Bells(whole[bells_at:present_at], seats + _MORE_BELLS, init=init)
        self.present = whole[present_at : present_at + seats * _PRESENT_NBYTES].cast("Q")
        self.bytes = whole[_cells_at(seats) :]
        self.words = self.bytes.cast("Q")

    def _fence(self) -> None:
        """A full barrier: a call of libc, around which the interpreter's lock is given up and taken again."""
        self.bells.take(self.seats + 1)  # which nobody rings

    def run(self, seat: int, number: int) -> int:
        """The first word of a seat's cell for a run."""
        return ((2 * seat) * IN_FLIGHT + number % IN_FLIGHT) * _WORDS

    def answer(self, seat: int, number: int) -> int:
        """The first word of a seat's cell for its answer."""
        return ((2 * seat + 1) * IN_FLIGHT + number % IN_FLIGHT) * _WORDS

    def write(self, cell: int, number: int, seq: int, predecessor: int, payload: bytes) -> bool:
        """Fills a cell; False where the message does not fit, which the cell then says."""
        words, nbytes = self.words, len(payload)
        fits = nbytes <= INLINE_NBYTES
        words[cell + 1] = seq
        words[cell + 2] = predecessor
        words[cell + 3] = nbytes if fits else _BY_CHANNEL
        if nbytes and fits:
            start = 8 * (cell + _HEAD_WORDS)
            self.bytes[start : start + nbytes] = payload
        if not _IN_ORDER:
            self._fence()
        words[cell] = number
        return fits

    def read(self, cell: int) -> bytes | None:
        """The message in a cell; None where it goes over the channel."""
        if not _IN_ORDER:
            self._fence()
        nbytes = self.words[cell + 3]
        if not nbytes:
            return b""
        start = 8 * (cell + _HEAD_WORDS)
        return bytes(self.bytes[start : start + nbytes]) if nbytes <= INLINE_NBYTES else None


class Doorbell:
    """The controller's end. Any thread may call it.

    Args:
        seats: How many participants it reaches.

    Attributes:
        segment: How participants of this host find it.

    Raises:
        OSError: This system has no memory that processes can share without a name.
    """

    def __init__(self, seats: int) -> None:
        nbytes = _cells_at(seats) + seats * 2 * IN_FLIGHT * _CELL_NBYTES
        try:
            fd = memfd.create(_NAME, nbytes)
        except AttributeError as exc:
            raise OSError(str(exc)) from exc
        self._closing = weakref.finalize(self, _close, fd, os.getpid())
        os.posix_fallocate(fd, 0, nbytes)  # a lack of memory shows here, not as SIGBUS later
        mapped = mmap.mmap(fd, nbytes)
        self.segment: Segment = Segment(os.getpid(), fd, secrets.token_bytes(memfd.TOKEN_NBYTES), nbytes)
        self._memory = _Memory(mapped, seats, init=True)
        mapped[: memfd.TOKEN_NBYTES] = self.segment.token
        self._number = 0
        # Where seats outnumber the cores it is they who need these: then the controller sleeps until all have answered.
        self._awake_s = YIELD_S if seats <= len(os.sched_getaffinity(0)) else 0.0
        self._awake_until_s = 0.0
        self._asleep = threading.Lock()  # held by the one thread that sleeps, or takes rings
        self._sleeper = 0  # that thread
        self._taken = 0  # how often rings were taken: what they told of may be for another thread
        self._seen = threading.local()

    def begin(self) -> int:
        """Gives the number of the next run, from 1. Before it, run ``number - IN_FLIGHT`` has ended."""
        self._number += 1
        self._awake_until_s = time.monotonic() + self._awake_s
        if self._number % _RINGS_KEPT == 0 and self._asleep.acquire(blocking=False):
            self._memory.bells.drain(self._memory.seats)
            self._taken += 1
            self._asleep.release()
        return self._number

    def ring(self, seat: int, number: int, seq: int, predecessor: int, payload: bytes) -> bool:
        """Tells a seat of a run.

        Args:
            seat: The seat.
            number: What `begin` gave.
            seq: The run's place in the controller's order.
            predecessor: See `Ticket`.
            payload: Its arguments.

        Returns:
            False where the arguments have to go over the channel, as the seat has been told.
        """
        memory = self._memory
        fits = memory.write(memory.run(seat, number), number, seq, predecessor, payload)
        memory.bells.ring(seat)
        return fits

    def answer(self, seat: int, number: int) -> bytes | None:
        """What a seat has given back for a run; None: nothing yet, or it goes over the channel."""
        memory = self._memory
        cell = memory.answer(seat, number)
        return memory.read(cell) if memory.words[cell] == number else None

    def wait(self, timeout_s: float) -> None:
        """Waits until somebody may have answered, or `wake` was called; it may return earlier.

        It only lets others run in the first `YIELD_S` after a run was begun, and sleeps later.
        """
        now_s = time.monotonic()
        if now_s < self._awake_until_s:
            os.sched_yield()
            return
        seen, until_s = self._seen, now_s + min(timeout_s, _SLICE_S)
        if getattr(seen, "taken", -1) == self._taken and self._asleep.acquire(timeout=max(until_s - now_s, 0)):
            try:
                self._sleeper = threading.get_ident()
                if seen.taken == self._taken:
                    self._memory.bells.wait(self._memory.seats, max(until_s - time.monotonic(), 0))
                    self._taken += 1
            finally:  # a signal may raise
                self._sleeper = 0
                with suppress(RuntimeError):  # it was taken for forgotten
                    self._asleep.release()
        elif not self._sleeper and time.monotonic() >= until_s:
            with suppress(RuntimeError):  # a signal came after it was taken, and nobody has it
                self._asleep.release()
        seen.taken = self._taken  # after it the caller looks, so that it misses nothing that was taken before

    def wake(self) -> None:
        """Ends the sleep of whoever waits, so that it looks again."""
        self._memory.bells.ring(self._memory.seats)

    def close(self) -> None:
        """Lets go of the descriptor; the memory lives on until the last seat, and this end, are gone."""
        self._closing()


def _close(fd: int, pid: int) -> None:
    if os.getpid() == pid:  # in a forked child the number may be another file's by now
        os.close(fd)


class Post:
    """A participant's end. One thread takes runs and answers them; any thread may call `wake`.

    Args:
        segment: The controller's `Doorbell.segment`.
        seat: One's own seat.
        keeps_core: Whether the thread that takes runs may keep to one core, while one soon follows the other: where
            seats and controller outnumber the cores it then does.

    Raises:
        OSError: The controller is gone, or does not let this process see its memory.
        ValueError: There is no such seat.
    """

    def __init__(self, segment: Segment, seat: int, *, keeps_core: bool = False) -> None:
        with memfd.opened(segment, _NAME, os.O_RDWR) as fd:
            mapped = mmap.mmap(fd, segment.nbytes)
        seats = _seats_of(segment.nbytes)
        if not 0 <= seat < seats:
            raise ValueError(f"no seat {seat} at a doorbell of {seats}")
        self._memory = _Memory(mapped, seats, init=False)
        self._seat = seat
        self._answers = self._memory.answer(seat, 0)
        self._others = [(one, self._memory.answer(one, 0)) for one in range(seats) if one != seat]
        self._number = 1
        self._awake_until_s = 0.0
        self._woken = False
        is_crowded = seats > 1 and len(os.sched_getaffinity(0)) <= seats
        self._berth = Berth() if keeps_core and is_crowded else None
        self._cores: list[int] = []  # on which cores all were when it found its own
        self._show(current_core())

    def take(self, timeout_s: float) -> Entry | None:
        """Waits for the next run.

        Returns:
            None where the time is over, or `wake` was called.
        """
        memory, number = self._memory, self._number
        words, cell = memory.words, memory.run(self._seat, number)
        awake_until_s, until_s = self._awake_until_s, 0.0
        is_unsettled = self._berth is not None
        while words[cell] != number:
            if self._woken:
                self._woken = False
                return None
            now_s = time.monotonic()
            until_s = until_s or now_s + timeout_s
            if now_s >= until_s:
                return None
            if now_s < awake_until_s:
                if is_unsettled:
                    is_unsettled = False  # once is enough
                    self._settle()
                os.sched_yield()
            else:
                self._leave()
                memory.bells.wait(self._seat, min(until_s - now_s, _SLICE_S))
        self._number += 1
        return Entry(number, words[cell + 1], words[cell + 2], memory.read(cell))

    def answer(self, number: int, payload: bytes) -> bool:
        """Tells the controller that a run went well, and what it gives back.

        Returns:
            False where that has to go over the channel.
        """
        memory, at = self._memory, number % IN_FLIGHT * _WORDS
        words, present = memory.words, memory.present
        fits = memory.write(self._answers + at, number, 0, 0, payload)
        memory.bells.take(self._seat)  # that of this run, if it came without a sleep; and a full barrier
        for seat, answers in self._others:
            if words[answers + at] != number and present[seat]:
                break
        else:
            memory.bells.ring(memory.seats)
        self._awake_until_s = time.monotonic() + YIELD_S
        return fits

    def wake(self) -> None:
        """Makes `take` return, now or when it is next called."""
        self._woken = True
        self._memory.bells.ring(self._seat)

    def close(self) -> None:
        """Gives up the seat: nobody waits for its answers. Called by the thread that takes runs, or after its end."""
        self._leave()
        self._memory.present[self._seat] = 0

    def _show(self, core: int) -> None:
        """Says that the seat is taken, and on which core."""
        self._memory.present[self._seat] = _PRESENT + core

    def _settle(self) -> None:
        """Finds a core to keep to, where somebody has moved since it was found last."""
        present = self._memory.present
        cores = present.tolist()
        if cores != self._cores and self._berth is not None:
            self._show(self._berth.take([max(core - _PRESENT, 0) for core in cores], self._seat))
            self._cores = present.tolist()

    def _leave(self) -> None:
        if self._berth is not None:
            self._cores = []
            self._berth.leave()


def _seats_of(nbytes: int) -> int:
    """How many seats memory of that size has."""
    per_seat = 2 * IN_FLIGHT * _CELL_NBYTES
    seats = nbytes // per_seat
    while seats > 0 and _cells_at(seats) + seats * per_seat > nbytes:
        seats -= 1
    return seats
