"""Clocks of two processes, compared by messages."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raycollect.observe.clocks import Alignment, Fix, Sample, clock_id, fix


class Clocks:
    """Two clocks: one's own, and another that is ahead and goes at another rate."""

    def __init__(self, ahead_s: float, drift: float) -> None:
        self.now_s, self.ahead_s, self.drift = 1000.0, ahead_s, drift

    def remote(self, at_s: float) -> float:
        return at_s + self.ahead_s + (at_s - 1000.0) * self.drift

    def trip(self, there_s: float, back_s: float) -> Sample:
        sent_s = self.now_s
        self.now_s += there_s
        remote_s = self.remote(self.now_s)
        self.now_s += back_s
        return Sample(sent_s=sent_s, remote_s=remote_s, received_s=self.now_s)


_DELAYS = st.tuples(st.floats(1e-5, 0.05), st.floats(1e-5, 0.05))


@settings(max_examples=60)
@given(
    ahead_s=st.floats(-1e6, 1e6),
    drift=st.floats(-2e-4, 2e-4),
    first=st.lists(_DELAYS, min_size=1, max_size=8),
    last=st.lists(_DELAYS, min_size=1, max_size=8),
    between_s=st.floats(2.0, 5000.0),
    share=st.floats(0, 1),
)
def test_times_of_another_host_are_right_within_what_is_said(
    ahead_s: float, drift: float, first: list[Any], last: list[Any], between_s: float, share: float
) -> None:
    """However the delays of the two ways differ."""
    clocks = Clocks(ahead_s, drift)
    first_fix = fix([clocks.trip(*delays) for delays in first])
    assert first_fix is not None
    clocks.now_s += between_s
    two = fix([clocks.trip(*delays) for delays in last])
    assert two is not None
    aligned = Alignment(first=first_fix, last=two)
    at_s = first_fix.at_s + share * (two.at_s - first_fix.at_s)
    slack_s = 1e-6 + 2e-4 * 0.1  # the drift during a round trip
    assert abs(aligned.local(clocks.remote(at_s)) - at_s) <= aligned.uncertainty_s + slack_s
    assert abs(aligned.drift - drift) <= 2 * (aligned.uncertainty_s + slack_s) / (two.at_s - first_fix.at_s)


def test_the_shortest_round_trip_counts() -> None:
    clocks = Clocks(5.0, 0.0)
    best = fix([clocks.trip(0.4, 0.0), clocks.trip(0.001, 0.003), clocks.trip(0.0, 0.2)])
    assert best is not None
    assert best.offset_s == pytest.approx(4.999, abs=1e-9)  # wrong by half of the difference of the ways
    assert best.uncertainty_s == pytest.approx(0.002)


def test_one_clock_needs_no_fix_and_close_ones_tell_no_drift() -> None:
    assert Alignment().local(12.5) == 12.5
    assert Alignment().uncertainty_s == 0.0
    first = Fix(at_s=10.0, offset_s=5.0, uncertainty_s=0.01)
    two = Fix(at_s=10.1, offset_s=5.02, uncertainty_s=0.001)
    both = Alignment(first=first, last=two)
    assert both.drift == 0.0
    assert both.local(20.02) == pytest.approx(15.0), "the better of the two"
    assert Alignment(first=first).local(15.0) == 10.0
    vague = Alignment(
        first=Fix(at_s=10.0, offset_s=5.0, uncertainty_s=0.9), last=Fix(at_s=12.0, offset_s=4.0, uncertainty_s=0.9)
    )
    assert vague.drift == 0.0
    assert fix([]) is None


def test_processes_of_one_host_name_one_clock() -> None:
    assert clock_id() == clock_id() != ""
