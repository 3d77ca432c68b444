"""Nobody sleeps through a ring: at the meeting of a launch, in the ledger, and at the doorbell."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest

from raycollect.backends.shm import meeting as _meeting
from raycollect.channel import doorbell
from raycollect.core.model import Launch
from tests.pure.channel.bells import take
from tests.pure.communicators import ProcessTeam, Workers
from tests.pure.watched import WAIT_S

ROUNDS = 50
"""How often it is tried to have enough of them asleep: on a busy machine they find each other awake, and again."""

LATE = 0.1
"""How often one comes late, by some tens of microseconds."""

PATIENT_S = 5.0
"""How long one sleeps through a ring that is lost: far longer than a busy machine keeps anybody waiting."""


class Ear:
    """Counts the sleeps that no ring has ended."""

    def __init__(self, bell: Any) -> None:
        self.sleeps = self.lost = 0
        wait = bell.wait

        def counted(*args: Any) -> bool:
            woken = wait(*args)
            self.sleeps += 1
            self.lost += not woken and args[-1] > 1  # how long it may take
            return bool(woken)

        bell.wait = counted


class asleep:
    """Whoever waits goes to sleep at once, and sleeps long."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __enter__(self) -> None:
        self._saved = self._module.YIELD_S, self._module._SLICE_S
        self._module.YIELD_S, self._module._SLICE_S = 0.0, PATIENT_S

    def __exit__(self, *exc: object) -> None:
        self._module.YIELD_S, self._module._SLICE_S = self._saved


def _late(rng: random.Random) -> None:
    """Leaves its core, and the interpreter's lock, now and then, so that the others get as far as to sleep."""
    if rng.random() < LATE:
        time.sleep(1e-4 * rng.random())


def _dawdle(rng: random.Random) -> None:
    """Takes up to some tens of microseconds, mostly none."""
    _late(rng)
    until_s = time.perf_counter() + rng.choice((0.0, 0.0, 1e-5, 5e-5)) * rng.random()
    while time.perf_counter() < until_s:
        pass


def body_barriers(communicator: Any, launches: list[Launch], barriers: int, seed: int) -> tuple[int, int]:
    """Comes to barriers in many launches; gives how often it slept, and how often through a ring."""
    meeting, rng = communicator._parts.meeting, random.Random(seed * 10 + communicator.rank)
    ear = Ear(meeting._semaphore)
    with asleep(_meeting):
        for launch in launches:
            meeting.enter(launch, time.monotonic() + WAIT_S)
            for _ in range(barriers):
                _dawdle(rng)
                meeting.barrier(launch, time.monotonic() + WAIT_S)
            if rng.random() < 0.3:
                meeting.abort(launch.seq - 1)  # a ring that means nothing
            meeting.end(launch, True)
    del meeting._semaphore.wait
    return ear.sleeps, ear.lost


@pytest.mark.parametrize("seed", range(2))
def test_no_ring_is_lost_between_processes(workers: Workers, seed: int) -> None:
    team = ProcessTeam("shm", 3, workers(3))
    counts: list[tuple[int, int]] = []
    for _ in range(ROUNDS):
        launches = [team.launch() for _ in range(60)]
        counts += team.must(body_barriers, launches, 30, seed)
        if sum(sleeps for sleeps, _ in counts) > 1000:
            break
    team.close()
    assert not any(lost for _, lost in counts)
    assert sum(sleeps for sleeps, _ in counts) > 1000


def body_serve(communicator: Any, segment: Any, slot: int, runs: int, seed: int) -> tuple[int, int]:
    """Answers runs from one seat of a doorbell, backwards; gives how often it slept, and how often through a ring."""
    rng = random.Random(seed * 10 + slot)
    with asleep(doorbell):
        post = doorbell.DoorbellClient(segment, slot)
        ear = Ear(post._futex)
        for run in range(runs):
            entry = take(post)
            assert (entry.seq, entry.predecessor) == (run + 1, run)
            _dawdle(rng)
            assert post.answer(entry.number, entry.payload[::-1])
        post.close()
    return ear.sleeps, ear.lost


@pytest.mark.parametrize("seed", range(2))
def test_no_run_and_no_answer_waits_for_a_ring_that_is_lost(workers: Workers, seed: int) -> None:
    rng, runs, slots = random.Random(seed), 1200, 3
    team = ProcessTeam("shm", slots, workers(slots))
    with asleep(doorbell):
        bell = doorbell.Doorbell(slots)
        ear = Ear(bell._semaphore)
        serving = [team.start(slot, body_serve, bell.segment, slot, runs, seed) for slot in range(slots)]
        begun: list[tuple[int, list[bytes]]] = []
        for turn in range(runs):
            number = bell.begin()
            payloads = [rng.randbytes(rng.choice((0, 1, 17, doorbell.INLINE_NBYTES))) for _ in range(slots)]
            begun.append((number, payloads))
            for slot, payload in enumerate(payloads):
                bell.runs[slot].write(number, turn + 1, turn, payload)
            bell.ring(number)
            keep = rng.randrange(doorbell.IN_FLIGHT) if turn + 1 < runs else 0
            while len(begun) > keep:
                (number, payloads), until_s = begun.pop(0), time.monotonic() + WAIT_S
                while None in (results := bell.answers(number, range(slots))):
                    assert time.monotonic() < until_s
                    bell.wait(WAIT_S)
                assert results == [payload[::-1] for payload in payloads]
        bell.close()
    results = [future.result(WAIT_S) for future in serving]
    team.close()
    assert [lost for _, lost in results] == [0] * slots
    assert ear.lost == 0
    assert ear.sleeps > 100
