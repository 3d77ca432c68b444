"""Starts and answers runs of a captured step on one host: cells in shared memory, a futex, and a semaphore.

The controller makes the memory; each participant maps it and has one slot. Each slot has two rings of `IN_FLIGHT`
cells: runs, which the controller writes, and answers, which the participant writes. Run n uses cell n, modulo the
ring. A cell's number is written last, when the cell is complete; the controller reuses a cell only after its run has
ended. So cells are never reset, and a superfluous wake-up only costs a check.

The controller writes the cells of all participants and then wakes all at once (`core.futex`). A participant reads the
futex's word, then its cell, and sleeps only while the word is unchanged. A wake-up may be lost if several processes
change the word at once, so a sleep lasts at most `_SLICE_S`.

The participant with the last answer wakes the controller; earlier wake-ups would be in vain. A participant writes its
own answer, calls libc, which is a full barrier, and then reads the answers of the others: of two that answer at once at
least one sees both.

A waiter yields its core for `YIELD_S` before it sleeps: in a hot loop the next run begins within that time, and a
wake-up costs more than the run itself. A participant that had slept before a run yields as soon as it has answered:
others on its core may not have begun, and its remaining work can wait.

The memory is as trustworthy as the processes of this user. Messages that don't fit are sent over the channel, and their
cell is marked so.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable, Collection
from functools import partial
from typing import NamedTuple

from raycollect.core import shared_memory
from raycollect.core.cpu_affinity import YIELD_S, CorePin, current_core
from raycollect.core.futex import FUTEX_NBYTES, STORES_IN_ORDER, Futex
from raycollect.core.model import TASK_NBYTES, Segment
from raycollect.core.semaphores import SEM_NBYTES, semaphores
from raycollect.core.signals import waiting

IN_FLIGHT = 16  # the most concurrent runs of one capture
_NAME = "raycollect-doorbell"
_CELL_NBYTES = 4096
_HEAD_WORDS = 4 + TASK_NBYTES // 8  # number, seq, predecessor, length, and the preceding task
INLINE_NBYTES = _CELL_NBYTES - 8 * _HEAD_WORDS  # the longest message that fits into a cell

_BY_CHANNEL = 1 << 63  # the length of a message that does not fit
_BEHIND = 1 << 62  # added to the length of a run with a preceding task
_PRESENT_NBYTES = 8
_PRESENT = 1  # marks a taken slot; its core is added, counted from 1
_BELLS = 2  # the controller's, and one that is never posted
_CELL_WORDS = _CELL_NBYTES // 8
_WOKEN = 1 << 31  # in the futex's word, flipped by participants; numbers of runs are lower
_SLICE_S = 0.5  # the longest sleep before the cells are read again, in case a wake-up is lost
_RINGS_KEPT = 64


def _cells_at(slots: int) -> int:
    # After the token, the semaphores, the futex, and the words of taken slots.
    nbytes = 64 + _BELLS * SEM_NBYTES + FUTEX_NBYTES + slots * _PRESENT_NBYTES
    return -(-nbytes // _CELL_NBYTES) * _CELL_NBYTES


class Entry(NamedTuple):
    """A run, as a participant receives it."""

    number: int  # of the doorbell's runs
    seq: int  # its number in the controller's order
    predecessor: int
    payload: bytes | None  # its arguments; None: they are sent over the channel
    after: bytes = b""  # the task of the preceding call; empty: none


class CellRing:
    """One slot's cells for runs, or for answers: run n uses cell n, modulo the ring.

    Args:
        memory: All cells, of all slots.
        first: The first word of this ring.
        fence: A full barrier, a function of libc.
    """

    def __init__(self, memory: memoryview, first: int, fence: Callable[[], int]) -> None:
        self.words: memoryview = memory.cast("Q")
        self._bytes = memory
        # By run, modulo the ring: the first word of its cell, which has the number of the run
        self.cells: tuple[int, ...] = tuple(range(first, first + IN_FLIGHT * _CELL_WORDS, _CELL_WORDS))
        self._fence = fence

    def write(self, number: int, seq: int, predecessor: int, payload: bytes, after: bytes = b"") -> bool:
        """Fills a run's cell; False if the message does not fit, which the cell then records. Wakes no process."""
        words, nbytes, cell = self.words, len(payload), self.cells[number % IN_FLIGHT]
        fits = nbytes <= INLINE_NBYTES
        words[cell + 1] = seq
        words[cell + 2] = predecessor
        words[cell + 3] = nbytes if fits else _BY_CHANNEL
        if after:
            words[cell + 3] |= _BEHIND
            start = 8 * (cell + _HEAD_WORDS)
            self._bytes[start - TASK_NBYTES : start] = after
        if nbytes and fits:
            start = 8 * (cell + _HEAD_WORDS)
            self._bytes[start : start + nbytes] = payload
        if not STORES_IN_ORDER:
            self._fence()
        words[cell] = number
        return fits

    def read(self, cell: int) -> bytes | None:
        """The message of a written cell; None if it is sent over the channel."""
        if not STORES_IN_ORDER:
            self._fence()
        nbytes = self.words[cell + 3] & ~_BEHIND
        start = 8 * (cell + _HEAD_WORDS)
        return bytes(self._bytes[start : start + nbytes]) if nbytes <= INLINE_NBYTES else None

    def task(self, cell: int) -> bytes:
        """The task of the call that precedes the run of a cell; empty: none. Called after `read`."""
        start = 8 * (cell + _HEAD_WORDS)
        return bytes(self._bytes[start - TASK_NBYTES : start]) if self.words[cell + 3] & _BEHIND else b""


class _Memory:
    """The cells and bells, as both ends see them; `init`: in the process that created them."""

    def __init__(self, mapped: mmap.mmap, slots: int, *, init: bool) -> None:
        whole = memoryview(mapped)
        futex_at = 64 + _BELLS * SEM_NBYTES
        present_at = futex_at + FUTEX_NBYTES
        self.controller, never_posted = semaphores(whole[64:futex_at], _BELLS, init=init)
        self.futex = Futex(whole[futex_at:present_at])  # on which all participants sleep
        self.fence = fence = never_posted.take
        self.slots = slots
        self.present = whole[present_at : present_at + slots * _PRESENT_NBYTES].cast("Q")
        cells, ring = whole[_cells_at(slots) :], IN_FLIGHT * _CELL_WORDS
        self.runs = [CellRing(cells, 2 * at * ring, fence) for at in range(slots)]
        self.answers = [CellRing(cells, (2 * at + 1) * ring, fence) for at in range(slots)]


class Doorbell:
    """The controller's end, with a slot for each participant. Any thread may call it.

    Raises:
        OSError: This system has no anonymous shared memory, or no futex that is known here.
    """

    def __init__(self, slots: int) -> None:
        nbytes = _cells_at(slots) + slots * 2 * IN_FLIGHT * _CELL_NBYTES
        self._own = shared_memory.OwnSegment(_NAME, nbytes)
        self.segment: Segment = self._own.segment  # how participants of this host find it
        memory = _Memory(self._own.mapped, slots, init=True)
        self.runs: list[CellRing] = memory.runs  # by slot: written runs begin with `ring`
        self._answers = memory.answers
        self._semaphore = memory.controller
        self._futex, self._fence = memory.futex, memory.fence
        self._number = 0
        # If slots outnumber the cores, participants need the cores: the controller sleeps until all have answered.
        self._awake_s = YIELD_S if slots <= len(os.sched_getaffinity(0)) else 0.0
        self._awake_until_s = 0.0
        self._asleep = threading.Lock()  # held by the one thread that sleeps, or takes posts
        self._taken = 0  # the number of takes of posts, which may have been for another thread
        self._seen = threading.local()

    def begin(self) -> int:
        """Returns the number of the next run, from 1. Run ``number - IN_FLIGHT`` must have ended."""
        self._number += 1
        self._awake_until_s = time.monotonic() + self._awake_s
        if self._number % _RINGS_KEPT == 0 and self._asleep.acquire(blocking=False):
            self._semaphore.drain()
            self._taken += 1
            self._asleep.release()
        return self._number

    def ring(self, number: int) -> None:
        """Wakes all participants, after this run was written for all of them."""
        if not STORES_IN_ORDER:
            self._fence()
        self._futex.word[0] = number % _WOKEN
        self._futex.wake()

    def answers(self, number: int, slots: Collection[int]) -> list[bytes | None]:
        """Returns the answer of each of these slots to a run; None: not yet, or over the channel."""
        payloads: list[bytes | None] = []
        for slot in slots:
            ring = self._answers[slot]
            words, cell = ring.words, ring.cells[number % IN_FLIGHT]
            if words[cell] != number:
                payloads.append(None)
            else:
                payloads.append(b"" if STORES_IN_ORDER and not words[cell + 3] else ring.read(cell))
        return payloads

    def wait(self, timeout_s: float, number: int = 0, slots: Collection[int] = ()) -> None:
        """Waits until a participant may have answered, or `wake` was called; it may return earlier.

        It only yields in the first `YIELD_S` after the beginning of a run, until these slots have answered run
        `number`, and sleeps later. `slots`: those whose answers the caller has not taken yet.
        """
        is_missing = has_come = False
        for slot in slots:
            ring = self._answers[slot]
            words, cell = ring.words, ring.cells[number % IN_FLIGHT]
            while words[cell] != number and time.monotonic() < self._awake_until_s:
                os.sched_yield()
            if words[cell] != number:
                is_missing = True
            elif words[cell + 3] != _BY_CHANNEL:
                has_come = True
        if has_come and not is_missing:
            return
        now_s = time.monotonic()
        if now_s < self._awake_until_s:  # missing answers are sent over the channel
            os.sched_yield()
            return
        seen, until_s = self._seen, now_s + min(timeout_s, _SLICE_S)
        if getattr(seen, "taken", -1) == self._taken and waiting(partial(self._asleep.acquire, True), until_s - now_s):
            try:
                if seen.taken == self._taken:
                    self._semaphore.wait(max(until_s - time.monotonic(), 0))
                    self._taken += 1
            finally:
                self._asleep.release()
        seen.taken = self._taken  # the caller reads the answers afterwards, so it misses no earlier post

    def wake(self) -> None:
        """Wakes waiting threads, so that they check again."""
        self._semaphore.ring()

    def close(self) -> None:
        """Closes the descriptor; the memory lives as long as one end."""
        self._own.close()


class DoorbellClient:
    """A participant's end. One thread takes runs and answers them; any thread may call `wake`.

    Args:
        segment: The controller's `Doorbell.segment`.
        slot: Its own slot.
        keeps_core: Whether the thread that takes runs may pin itself to a core while runs follow each other closely; it
            does so if slots and controller outnumber the cores.

    Raises:
        OSError: The controller has ended, or does not allow access to its memory; or this system has no known futex.
        ValueError: The slot does not exist.
    """

    def __init__(self, segment: Segment, slot: int, *, keeps_core: bool = False) -> None:
        with shared_memory.opened(segment, _NAME, os.O_RDWR) as fd:
            mapped = mmap.mmap(fd, segment.nbytes)
        slots = _slots_of(segment.nbytes)
        if not 0 <= slot < slots:
            raise ValueError(f"no slot {slot} at a doorbell of {slots}")
        self._memory = memory = _Memory(mapped, slots, init=False)
        self._slot = slot
        self._runs, self._answers, self._futex = memory.runs[slot], memory.answers[slot], memory.futex
        self._others = [(other, ring) for other, ring in enumerate(memory.answers) if other != slot]
        self._number = 1
        self._awake_until_s = 0.0
        self._woken = False
        self._has_slept = False  # before the last run that it took
        is_crowded = slots > 1 and len(os.sched_getaffinity(0)) <= slots
        self._core_pin = CorePin() if keeps_core and is_crowded else None
        self._cores: list[int] = []  # the cores of all when it chose its own
        self._show(current_core())

    def take(self, timeout_s: float) -> Entry | None:
        """Waits for the next run; returns None after a timeout or `wake`."""
        memory, ring, number = self._memory, self._runs, self._number
        words, cell = ring.words, ring.cells[number % IN_FLIGHT]
        awake_until_s, until_s = self._awake_until_s, 0.0
        is_unsettled, has_slept = self._core_pin is not None, False
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
                    if memory.present.tolist() != self._cores:  # a thread has moved since
                        self._settle()
                os.sched_yield()
            else:
                if self._core_pin is not None:
                    self._leave()
                seen, has_slept = self._futex.word[0], True
                memory.fence()
                if words[cell] != number and not self._woken:
                    self._futex.wait(seen, min(until_s - now_s, _SLICE_S))
        self._number += 1
        self._has_slept = has_slept
        if STORES_IN_ORDER and not words[cell + 3]:
            return Entry(number, words[cell + 1], words[cell + 2], b"")
        payload = ring.read(cell)
        return Entry(number, words[cell + 1], words[cell + 2], payload, ring.task(cell))

    def answer(self, number: int, payload: bytes) -> bool:
        """Answers a successful run; returns False if the results have to be sent over the channel."""
        memory = self._memory
        fits = self._answers.write(number, 0, 0, payload)
        memory.fence()
        at, present = number % IN_FLIGHT, memory.present
        for slot, ring in self._others:
            if ring.words[ring.cells[at]] != number and present[slot]:
                break
        else:
            memory.controller.ring()
        self._awake_until_s = time.monotonic() + YIELD_S
        if self._has_slept:
            os.sched_yield()
        return fits

    def wake(self) -> None:
        """Makes `take` return, now or when it is next called."""
        self._woken = True
        self._futex.word[0] ^= _WOKEN
        self._futex.wake()

    def close(self) -> None:
        """Releases the slot. Called by the thread that takes runs, or after its end."""
        self._leave()
        self._memory.present[self._slot] = 0

    def _show(self, core: int) -> None:
        # Marks the slot as taken, with the core of its thread.
        self._memory.present[self._slot] = _PRESENT + core

    def _settle(self) -> None:
        present = self._memory.present
        if self._core_pin is not None:
            self._show(self._core_pin.take([max(core - _PRESENT, 0) for core in present], self._slot))
            self._cores = present.tolist()

    def _leave(self) -> None:
        if self._core_pin is not None:
            self._cores = []
            self._core_pin.leave()


def _slots_of(nbytes: int) -> int:
    per_slot = 2 * IN_FLIGHT * _CELL_NBYTES
    slots = nbytes // per_slot
    while slots > 0 and _cells_at(slots) + slots * per_slot > nbytes:
        slots -= 1
    return slots
