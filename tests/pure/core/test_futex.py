"""A word in shared memory that wakes all who sleep there."""

from __future__ import annotations

import mmap
import platform
import threading
import time

import pytest

from raycollect.core.futex import FUTEX_NBYTES, Futex


@pytest.fixture
def futex() -> Futex:
    return Futex(memoryview(mmap.mmap(-1, mmap.PAGESIZE))[64 : 64 + FUTEX_NBYTES])


def test_one_wake_wakes_all(futex: Futex) -> None:
    woken: list[bool] = []
    threads = [threading.Thread(target=lambda: woken.append(futex.wait(0, 60.0))) for _ in range(3)]
    for thread in threads:
        thread.start()
    futex.word[0] = 1
    until_s = time.monotonic() + 20.0
    while any(thread.is_alive() for thread in threads) and time.monotonic() < until_s:
        futex.wake()  # those that come later find the word changed
    for thread in threads:
        thread.join(1.0)
    assert woken == [True] * 3


def test_who_has_seen_another_word_does_not_sleep(futex: Futex) -> None:
    futex.word[0] = 1 << 31
    assert futex.wait(0, 60.0)


def test_a_sleep_has_an_end(futex: Futex) -> None:
    futex.word[0] = (1 << 31) + 7
    assert not futex.wait((1 << 31) + 7, 0.001)


def test_of_other_processors_no_number_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "pdp11")
    with pytest.raises(OSError, match="pdp11"):
        Futex(memoryview(bytearray(FUTEX_NBYTES)))
