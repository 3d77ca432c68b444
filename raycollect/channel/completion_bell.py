"""Tells the thread that waits for a plan that it has ended, past the controller's hub: words and a semaphore.

The participant that sees that all have ended a plan writes the plan's number into its own word, and posts the
semaphore. So the caller wakes at once, where a `Done` over the channel wakes the hub's thread first, which reads,
checks and decodes it. It only ever says that a plan went well everywhere. All else travels over the channel, and the
hub wakes the caller then.

One plan at a time may be told of so. Its caller claims the bell before the plan is sent, and looks at the words itself.

The memory is as trustworthy as the processes of this user.
"""

from __future__ import annotations

import itertools
import mmap
import os
import threading
from collections.abc import Iterable

from raycollect.core import shared_memory
from raycollect.core.model import Segment
from raycollect.core.semaphores import SEM_NBYTES, semaphores

_NAME = "raycollect-bell"
_NBYTES = 64 << 10
_WORDS_AT = 128  # after the token and the semaphore
SLOTS = (_NBYTES - _WORDS_AT) // 8
"""How many participants get a word. No word is given out twice: who had it before might write it late."""

_SLICE_S = 0.5  # the longest sleep before the words are looked at again, in case a wake-up is lost


class _Memory:
    """The semaphore and the words, as both ends see them."""

    def __init__(self, mapped: mmap.mmap, *, init: bool) -> None:
        whole = memoryview(mapped)
        (self.semaphore,) = semaphores(whole[64 : 64 + SEM_NBYTES], 1, init=init)
        self.words = whole[_WORDS_AT:].cast("Q")


class CompletionBell:
    """The controller's end. Any thread may call it.

    Raises:
        OSError: This system has no anonymous shared memory.
    """

    def __init__(self) -> None:
        self._own = shared_memory.OwnSegment(_NAME, _NBYTES)
        self.segment: Segment = self._own.segment  # how participants of this host find it
        self._memory = _Memory(self._own.mapped, init=True)
        self._claimed = threading.Lock()
        self._owner = 0  # the thread that has claimed it
        self._slots = itertools.count()

    def take_slot(self) -> int:
        """A word for a participant; -1: there are no more."""
        slot = next(self._slots)
        return slot if slot < SLOTS else -1

    def claim(self) -> bool:
        """Claims the bell for the next plan that this thread sends and waits for; False: another one has it."""
        if not self._claimed.acquire(blocking=False):
            return False
        self._owner = threading.get_ident()
        self._memory.semaphore.drain()  # posts for plans before
        return True

    def release(self) -> None:
        """Ends a claim."""
        self._owner = 0
        self._claimed.release()

    @property
    def is_mine(self) -> bool:
        """Whether the calling thread has claimed it."""
        return self._owner == threading.get_ident()

    def has_rung(self, seq: int, slots: Iterable[int]) -> bool:
        """Whether one of these participants has said that all have ended a plan."""
        words = self._memory.words
        for slot in slots:  # noqa: SIM110 - it is in each wait, and a generator takes longer
            if slot >= 0 and words[slot] == seq:
                return True
        return False

    def wait(self, timeout_s: float) -> None:
        """Waits until a participant may have rung, or `wake` was called; it may return earlier."""
        self._memory.semaphore.wait(min(timeout_s, _SLICE_S))

    def wake(self) -> None:
        """Wakes whoever waits, so that it looks again."""
        self._memory.semaphore.ring()

    def close(self) -> None:
        """Closes the descriptor; the memory lives until both ends are gone."""
        self._own.close()


class CompletionBellClient:
    """A participant's end; for one thread at a time.

    Args:
        segment: The controller's `CompletionBell.segment`.
        slot: Its own word.

    Raises:
        OSError: The controller is gone, or does not let this process see its memory.
        ValueError: There is no such word.
    """

    def __init__(self, segment: Segment, slot: int) -> None:
        if segment.nbytes != _NBYTES or not 0 <= slot < SLOTS:
            raise ValueError(f"no word {slot} in {segment.nbytes} bytes")
        with shared_memory.opened(segment, _NAME, os.O_RDWR) as fd:
            self._memory = _Memory(mmap.mmap(fd, _NBYTES), init=False)
        self._slot = slot

    def ring(self, seq: int) -> None:
        """Says that all participants have ended a plan."""
        self._memory.words[self._slot] = seq  # before the post, which is a full barrier
        self._memory.semaphore.ring()
