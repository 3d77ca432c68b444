"""Letters of a controller to the participants of its host, in one segment of shared memory: plans without outputs.

Each participant has a slot: a ring of `CELLS` cells, which the controller writes. Letter n uses cell n, modulo the
ring. Its number is written last, when the cell is complete. The participant marks the cell with the letter's number:
when it has taken the letter, and, if the letter requests it, when all participants have completed the plan
successfully. So cells are not reset while the slot is in use, and a late end, when the cell has a newer letter, is not
marked. Other ends, such as failures, are reported over the channel.

The controller wakes each participant as soon as its letter is written, so that it begins while the letters of others
are encoded. Waking all by one call at the end took 1.3 times as long with two participants, and was no faster with
sixteen. A participant reads the word on which it sleeps, then its cell, and sleeps only while the word is unchanged.
Threads of the controller do the same with their own word. Each process writes values that other processes hardly ever
write, so that a reader of the word sees every change.

A letter without a free cell, or one that is too long, is sent over the channel instead. It may overtake other letters
or be overtaken: the participant orders plans by their tickets.

The memory is as trustworthy as the processes of this user.
"""

from __future__ import annotations

import itertools
import mmap
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable
from typing import NamedTuple

from raycollect.core import shared_memory
from raycollect.core.futex import FUTEX_NBYTES, STORES_IN_ORDER, Futex
from raycollect.core.model import Segment

CELLS = 16
"""The most pending letters of one participant."""

SLOTS = 1024
"""The most participants with a slot; unused slots take no memory."""

_NAME = "raycollect-mailbox"
_CELL_NBYTES = 4096
_HEAD_WORDS = 4  # number, mark, flags and length of the first part, length
INLINE_NBYTES = _CELL_NBYTES - 8 * _HEAD_WORDS
"""The longest letter, in bytes."""

_CELL_WORDS = _CELL_NBYTES // 8
_FENCE_AT = 64  # after the token: a word on which no process sleeps
_WORD_AT = _FENCE_AT + FUTEX_NBYTES  # on which threads of the controller sleep
_WORDS_AT = _WORD_AT + FUTEX_NBYTES  # on which participants sleep
_USED_AT = _WORDS_AT + SLOTS * FUTEX_NBYTES
_CELLS_AT = -(-(_USED_AT + 8 * SLOTS) // _CELL_NBYTES) * _CELL_NBYTES
NBYTES = _CELLS_AT + SLOTS * CELLS * _CELL_NBYTES

IN_ORDER, AWAITED = 1, 2
"""Flags of letters: `Order.in_order`; a thread waits for the mark of its end."""

_TAKEN, _ENDED = 1, 2  # a cell's mark: the letter's number, shifted, and one of these
_SHIFT = 2

_SLICE_S = 0.5  # the longest sleep before the cells are read again, in case a wake-up is lost
_WRITER = 1 << 21  # the values of one writer of the words: a slot, counted from 1, or the controller, 0


def _cells_of(slot: int) -> tuple[int, ...]:
    """The first word of each cell of a slot, by letter, modulo the ring."""
    first = slot * CELLS * _CELL_WORDS
    return tuple(range(first, first + CELLS * _CELL_WORDS, _CELL_WORDS))


class _Words:
    """The segment as both ends see it."""

    def __init__(self, mapped: mmap.mmap) -> None:
        self.whole: memoryview = memoryview(mapped)
        self.fence: Callable[[], object] = self.futex(_FENCE_AT).wake  # a full barrier
        self.done: Futex = self.futex(_WORD_AT)
        self.used: memoryview = self.whole[_USED_AT : _USED_AT + 8 * SLOTS].cast("Q")
        self.cells: memoryview = self.whole[_CELLS_AT:].cast("Q")
        self.bytes: memoryview = self.whole[_CELLS_AT:]

    def futex(self, at: int) -> Futex:
        return Futex(self.whole[at : at + FUTEX_NBYTES])

    def slot_futex(self, slot: int) -> Futex:
        return self.futex(_WORDS_AT + slot * FUTEX_NBYTES)


class Letters:
    """The letters of one plan to its participants.

    Args:
        mailbox: Their mailbox.
        look: Set if a thread waits for the marks of their ends; called if one of the cells is needed, and closes the
            letters if the wait is over. None: no thread waits.

    Attributes:
        mailbox: As above.
        look: As above; None after `close`: no thread waits any more, and their cells may be reused.
    """

    __slots__ = ("__weakref__", "_marks", "_words", "look", "mailbox")

    def __init__(self, mailbox: Mailbox, look: Callable[[], object] | None = None) -> None:
        self.mailbox: Mailbox = mailbox
        self.look: Callable[[], object] | None = look
        self._words = mailbox.words
        self._marks: list[tuple[int, int]] = []  # each letter's word of the mark, and its value when all have ended

    def close(self) -> None:
        """Ends the wait for their ends."""
        self.look = None

    def wrote(self, mark_at: int, ended: int) -> None:
        """Records a written letter: the word of its mark, and its value when all have ended."""
        self._marks.append((mark_at, ended))  # another thread may read it

    @property
    def have_ended(self) -> bool:
        """Whether a participant has marked that all have completed the plan successfully."""
        words = self._words
        for mark_at, ended in self._marks:  # noqa: SIM110 - called in each wait, and a generator is slower
            if words[mark_at] == ended:
                return True
        return False


class Slot:
    """The controller's end of one participant's slot. Used under the lock under which plans are sent.

    Attributes:
        at: Its index.
        number: The number of the last letter, from 1.
    """

    def __init__(self, words: _Words, at: int) -> None:
        self.at: int = at
        self.number: int = 0
        self._futex = words.slot_futex(at)
        self._words, self._bytes, self._fence = words.cells, words.bytes, words.fence
        self._cells = _cells_of(at)
        # By cell: the letters that it belongs to, if their ends are awaited
        self._before: list[weakref.ref[Letters] | None] = [None] * CELLS
        for cell in self._cells:
            self._words[cell] = self._words[cell + 1] = 0

    def write(self, letters: Letters, first: bytes, rest: bytes, flags: int = 0) -> bool:
        """Writes a letter, of two parts, and wakes its participant; False if it has to be sent over the channel."""
        number = self.number + 1
        at, split, nbytes = number % CELLS, len(first), len(first) + len(rest)
        cell, written, words = self._cells[at], self._before[at], self._words
        before = None if written is None else written()
        is_free = number <= CELLS or words[cell + 1] >> _SHIFT == number - CELLS
        if not is_free or nbytes > INLINE_NBYTES:
            return False
        look = None if before is None else before.look  # another thread may close the letters
        if before is not None and look is not None:
            look()
            if before.look is not None:
                return False
        self.number = number
        if letters.look is None:
            self._before[at] = None
        else:
            self._before[at] = weakref.ref(letters)
            flags |= AWAITED
        words[cell + 2] = flags << 32 | split
        words[cell + 3] = nbytes
        start = 8 * (cell + _HEAD_WORDS)
        if split:
            self._bytes[start : start + split] = first
        self._bytes[start + split : start + nbytes] = rest
        letters.wrote(cell + 1, number << _SHIFT | _ENDED)
        if not STORES_IN_ORDER:
            self._fence()
        words[cell] = number
        letters.mailbox.wake(self._futex)
        return True


class Mailbox:
    """The controller's end. Any thread may call it.

    Attributes:
        segment: Its description for participants of this host.
        words: All cells.

    Raises:
        OSError: This system has no anonymous shared memory, or no futex that is known here.
    """

    def __init__(self) -> None:
        self._own = shared_memory.OwnSegment(_NAME, NBYTES, _CELLS_AT)
        self.segment: Segment = self._own.segment
        self._map = _Words(self._own.mapped)
        self.words: memoryview = self._map.cells
        self._done = self._map.done
        self._values = itertools.count(1)
        self._lock = threading.Lock()
        # The last owner of each slot, as long as its participant is leased or may live
        self._slots: weakref.WeakValueDictionary[int, Slot] = weakref.WeakValueDictionary()

    def take_slot(self) -> Slot | None:
        """A slot for a participant, until that returns it (`MailboxClient.close`); None if all are taken."""
        used = self._map.used
        with self._lock:
            at = next((at for at in range(SLOTS) if not used[at]), None)
            if at is None:
                return None
            try:
                self._own.back(_CELLS_AT + at * CELLS * _CELL_NBYTES, CELLS * _CELL_NBYTES)
            except OSError:  # no memory left
                return None
            used[at] = 1
            slot = self._slots[at] = Slot(self._map, at)
            return slot

    def give_back(self, slot: Slot) -> None:
        """Returns the slot of a process that has died, or has not taken it."""
        with self._lock:
            if self._slots.get(slot.at) is slot:  # else it was returned before
                self._map.used[slot.at] = 0

    def seen(self) -> int:
        """The argument of `wait`; called before the letters are checked."""
        seen = int(self._done.word[0])
        if not STORES_IN_ORDER:
            self._map.fence()
        return seen

    def wait(self, seen: int, timeout_s: float) -> None:
        """Waits until a participant marks an end, or `wake` is called, since `seen`; it may return earlier."""
        self._done.wait(seen, min(timeout_s, _SLICE_S))

    def wake(self, futex: Futex | None = None) -> None:
        """Wakes the sleepers on a futex of the mailbox; by default all threads in `wait`, so that they check again."""
        futex = futex or self._done
        if not STORES_IN_ORDER:
            self._map.fence()
        futex.word[0] = next(self._values) % _WRITER
        futex.wake()

    def close(self) -> None:
        """Closes the descriptor; the memory lives as long as one end."""
        self._own.close()


class Received(NamedTuple):
    """A letter, as a participant receives it: its two parts, and its number, for `MailboxClient.ended`."""

    number: int
    flags: int
    first: bytes
    rest: bytes


class MailboxClient:
    """A participant's end. One thread takes letters and marks them; any thread may call `wake`.

    Args:
        segment: The controller's `Mailbox.segment`.
        slot: Its own slot.

    Raises:
        OSError: The controller has ended, or does not allow access to its memory; or this system has no known futex.
        ValueError: The slot does not exist.
    """

    def __init__(self, segment: Segment, slot: int) -> None:
        if segment.nbytes != NBYTES or not 0 <= slot < SLOTS:
            raise ValueError(f"no slot {slot} in {segment.nbytes} bytes")
        with shared_memory.opened(segment, _NAME, os.O_RDWR) as fd:
            words = _Words(mmap.mmap(fd, NBYTES))
        self._words, self._bytes, self._fence = words.cells, words.bytes, words.fence
        self._used, self._slot, self._done = words.used, slot, words.done
        self._futex = words.slot_futex(slot)
        self._cells = _cells_of(slot)
        self._first_value = _WRITER * (slot + 1)
        self._values = itertools.count(secrets.randbelow(_WRITER))  # the slot may have had another owner
        self._number = 1
        self._woken = False

    def take(self, timeout_s: float) -> Received | None:
        """Waits for the next letter; returns None after a timeout or `wake`."""
        words, number, futex = self._words, self._number, self._futex
        cell, until_s = self._cells[number % CELLS], time.monotonic() + timeout_s
        while True:
            seen = futex.word[0]
            if not STORES_IN_ORDER:
                self._fence()
            if words[cell] == number:
                break
            if self._woken:
                self._woken = False
                return None
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                return None
            futex.wait(seen, min(left_s, _SLICE_S))
        self._number = number + 1
        if not STORES_IN_ORDER:
            self._fence()
        head, start = words[cell + 2], 8 * (cell + _HEAD_WORDS)
        split, end = start + (head & 0xFFFFFFFF), start + words[cell + 3]
        first, rest = bytes(self._bytes[start:split]), bytes(self._bytes[split:end])
        if not STORES_IN_ORDER:
            self._fence()
        words[cell + 1] = number << _SHIFT | _TAKEN
        return Received(number, head >> 32, first, rest)

    def ended(self, number: int) -> None:
        """Marks that all participants have completed a letter's plan; called by the thread that takes letters."""
        words, mark_at = self._words, self._cells[number % CELLS] + 1
        if words[mark_at] >> _SHIFT == number:  # else the wait has ended, and the cell has had a later letter
            words[mark_at] = number << _SHIFT | _ENDED
            self._change(self._done)

    def wake(self) -> None:
        """Makes `take` return, now or when it is next called."""
        self._woken = True
        self._change(self._futex)

    def close(self) -> None:
        """Returns the slot. Called by the thread that takes letters, or after its end."""
        self._used[self._slot] = 0

    def _change(self, futex: Futex) -> None:
        if not STORES_IN_ORDER:
            self._fence()
        futex.word[0] = self._first_value + next(self._values) % _WRITER
        futex.wake()
