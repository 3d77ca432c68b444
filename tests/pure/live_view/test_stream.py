"""The shares of time in a stream."""

from __future__ import annotations

import random

import pytest

from raycollect.live_view.stream import ACTIVITIES, SLOT_S, SLOTS, Streams
from raycollect.observe.trace import CALL, CHECK, COLLECTIVE, KERNEL, KINDS, METHOD, PART, WAIT, Span

NOW_S = 1000.0


def span(kind, begin, end):
    """A span between two time slots before now; slots count from 0 to `SLOTS`."""
    first_s = NOW_S - SLOTS * SLOT_S
    return Span(kind, "", first_s + begin * SLOT_S, first_s + end * SLOT_S, 1)


def streamed(*spans):
    streams = Streams()
    streams.add("a", spans)
    return streams.of("a", NOW_S)


def test_spans_fill_their_slots():
    shares = streamed(span(METHOD, 3, 4.5), span(CHECK, 4.5, 4.75), span(KERNEL, 4.75, 5), span(WAIT, 6.5, 7))
    assert shares[2] == (0, 0, 0, 0)
    assert shares[3] == (1, 0, 0, 0)
    assert shares[4] == (0.5, 0, 0.25, 0.25)
    assert shares[6] == (0, 0.5, 0, 0)
    assert len(shares) == SLOTS


def test_a_method_without_the_checks_and_kernels_inside():
    inside = span(CHECK, 10.1, 10.3), span(KERNEL, 10.3, 10.4)
    elsewhere = span(KERNEL, 10.05, 10.15)._replace(thread=2)
    call = span(CALL, 10.1, 10.4)
    assert streamed(*inside, elsewhere, call, span(METHOD, 10, 10.5))[10] == (0.2, 0, 0.2, 0.2)
    assert streamed(*inside, span(METHOD, 10.5, 11))[10] == (0.5, 0, 0.2, 0.1)  # a later method has none of them


def test_spans_that_consist_of_others_count_nothing():
    assert streamed(span(PART, 5, 7), span(COLLECTIVE, 5, 7)) == [(0,) * len(ACTIVITIES)] * SLOTS


def test_what_is_older_than_the_stream_is_forgotten():
    streams = Streams()
    streams.add("a", [span(METHOD, 0, SLOTS), span(KERNEL, -5 * SLOTS, -4 * SLOTS)])
    assert streams.of("a", NOW_S)[0][0] == 1
    streams.forget(NOW_S + SLOTS * SLOT_S)
    assert streams.of("a", NOW_S) == streams.of("another", NOW_S) == [(0,) * len(ACTIVITIES)] * SLOTS


@pytest.mark.parametrize("seed", range(20))
def test_shares_never_exceed_the_whole(seed):
    chance = random.Random(seed)
    spans = []
    for _ in range(300):
        begin = chance.uniform(-10, SLOTS)
        spans.append(span(chance.choice(KINDS), begin, min(begin + chance.expovariate(0.5), SLOTS)))
    for shares in streamed(*spans):
        assert all(share >= 0 for share in shares)
        assert sum(shares) <= 1.01
