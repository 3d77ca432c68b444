"""Measures the links between ranks over their connections, before the first launch of a group.

The lower rank of a pair asks. Small frames go to and fro, of which the quickest tells the latency; then bursts go each
way, and their receivers note when each piece has come. The bandwidth of a burst is that of its second half: the first
bytes of a shaped link go at any speed. But it is at most that of all bytes both ways, as pieces that have waited for a
receiver without a core come all at once. The slower direction is the link's. A rank that loses its core makes a burst
look slow, and little makes it look fast: so the best one counts, of up to `BURSTS`, until two are alike.

A burst has `BURST_NBYTES` each way. A pair has `PAIR_S` for all: a link that would take longer is said to be as slow as
that. It begins no further burst after `AGAIN_S`, so that slow links carry one, nor after half of `TOTAL_S`. A rank
gives up its other pairs where one fails, and after `TOTAL_S`. Pairs of one turn share no rank. The frames are of launch
0, and their step is the turn, so that a rank need not take part in all.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from raycollect.backends.arrays import Array
from raycollect.backends.tcp.link import Link
from raycollect.backends.tcp.peer import Batch
from raycollect.core.model import Launch
from raycollect.errors import RaycollectError

PIECE_NBYTES = 64 << 10
PIECES = 12
BURST_NBYTES = PIECES * PIECE_NBYTES
PINGS = 4
BURSTS = 4
ALIKE = 0.9  # A burst with this part of the best one's bandwidth is like it
PAIR_S = 0.5
AGAIN_S = 0.2
TOTAL_S = 2.0
_LEAST_S = 1e-6  # Less than any time of a burst that is not noise


def probe(link: Link, turns: Sequence[tuple[int, int]]) -> list[tuple[int, float, float]]:
    """Measures the links to other ranks, given as (turn, from 1 on; rank) in ascending order. Never raises.

    Returns:
        (rank, latency in seconds, bytes per second) where this rank asked, as far as there was time.
    """
    found, until_s = list[tuple[int, float, float]](), time.monotonic() + TOTAL_S
    for at, (turn, other) in enumerate(turns):
        pair = _Pair(link, turn, other)
        try:
            pair.meet(until_s)
            pair.measure()
        except RaycollectError:
            left = (link.rank, *(rank for _, rank in turns[at:]))
            link.end(Launch(seq=0, ranks=left, timeout_s=0.0), ok=False)
        if pair.asks and pair.latency_s:
            found.append((other, pair.latency_s, pair.bandwidth))
        if not pair.is_done:
            break
    return found


class _Pair:
    """Two ranks that measure their link; at first `bandwidth` is what a link has at most that is not done in time."""

    def __init__(self, link: Link, turn: int, other: int) -> None:
        self.asks = link.rank < other
        self.latency_s = 0.0
        self.bandwidth = BURST_NBYTES / PAIR_S
        self.is_done = False
        self._link = link
        self._other = other
        self._launch = Launch(seq=0, ranks=(link.rank, other), timeout_s=PAIR_S)
        self._turn = turn
        self._until_s = self._again_until_s = 0.0

    def meet(self, until_s: float) -> None:
        """Waits for the other rank."""
        self._link.begin(self._launch, self._turn)
        batch, self._until_s, self._again_until_s = Batch(), until_s, until_s - TOTAL_S / 2
        self._link.greet((self._other,), batch)
        self._wait(batch)

    def measure(self) -> None:
        """Does this rank's part, in a time of its own."""
        begun_s = time.monotonic()
        self._until_s = begun_s + PAIR_S
        again = np.ones(1)
        if self.asks:
            trips = [self._ping() for _ in range(PINGS)]
            self.latency_s = min(trips) / 2
            again_until_s, bursts = min(begun_s + AGAIN_S, self._again_until_s), list[float]()
            while again[0]:
                bursts.append(self._exchanged(min(trips)))
                self.bandwidth = max(self.bandwidth, *bursts)
                alike = sum(one >= ALIKE * self.bandwidth for one in bursts)
                again[0] = alike < 2 and len(bursts) < BURSTS and time.monotonic() < again_until_s
                self._send(again)
        else:
            for _ in range(PINGS):
                self._receive(np.zeros(1))
                self._send(np.zeros(1))
            while again[0]:
                told = np.full(1, self._received())
                self._send(np.zeros(BURST_NBYTES, np.uint8), PIECES)
                self._send(told)
                self._receive(again)
        self.is_done = True

    def _exchanged(self, trip_s: float) -> float:
        """Sends a burst and receives one; returns the bandwidth of the slower direction."""
        begun_s, told = time.monotonic(), np.zeros(1)
        self._send(np.zeros(BURST_NBYTES, np.uint8), PIECES)
        here = self._received()
        both_s = time.monotonic() - begun_s
        both_s = max(both_s - trip_s, both_s / 2)  # the pings may have waited for a core, too
        self._receive(told)
        return min(here, float(told[0]), 2 * BURST_NBYTES / both_s)

    def _ping(self) -> float:
        begun_s = time.monotonic()
        self._send(np.zeros(1))
        self._receive(np.zeros(1))
        return max(time.monotonic() - begun_s, _LEAST_S)

    def _received(self) -> float:
        """Receives a burst; returns the bandwidth of its second half."""
        into, batches, came_s = np.empty((PIECES, PIECE_NBYTES), np.uint8), [Batch() for _ in range(PIECES)], []
        for piece, batch in zip(into, batches, strict=True):
            self._link.receive(self._other, piece, batch)
        for batch in batches:
            self._wait(batch)
            came_s.append(time.monotonic())
        half = PIECES // 2
        return half * PIECE_NBYTES / max(came_s[-1] - came_s[half - 1], _LEAST_S)

    def _send(self, array: Array, pieces: int = 1) -> None:
        batch = Batch()
        for piece in array.reshape(pieces, -1):
            self._link.send(self._other, piece, batch)
        self._wait(batch)

    def _receive(self, array: Array) -> None:
        batch = Batch()
        self._link.receive(self._other, array, batch)
        self._wait(batch)

    def _wait(self, batch: Batch) -> None:
        self._link.wait(batch, self._launch, self._until_s)
