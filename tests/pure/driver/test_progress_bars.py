"""Progress as participants are asked for it, and as bars."""

from __future__ import annotations

import math
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest

from raycollect.channel.messages import Measured
from raycollect.driver import progress as gauge
from raycollect.driver import stall_report
from raycollect.driver.progress import Progress, ProgressProbe
from raycollect.errors import InvalidArgumentError, KernelError, ProgressError
from tests.pure.driver.flights import Flying


class Told:
    """Participants that say what a test says; who is in `mute` says nothing."""

    def __init__(self, *said: dict[str, Any]) -> None:
        self.participants = self
        self.said = list(said)
        self.mute: set[int] = set()
        self.open: dict[int, list[Future[Any]]] = {}
        self.asked: list[int] = []

    def measure(self, member: Any, seq: int) -> Future[Any] | None:
        assert seq == 7
        self.asked.append(member.rank)
        future = Future[Any]()
        if member.rank in self.mute:
            self.open.setdefault(member.rank, []).append(future)
        else:
            future.set_result(answer(**self.said[member.rank]))
        return future


def answer(
    done: int = 0, total: int = 0, lent: int = 0, *, has_begun: bool = True, has_ended: bool = False
) -> Measured:
    return Measured(request=1, has_begun=has_begun, has_ended=has_ended, done=done, total=total, lent=lent)


@pytest.fixture
def tracker() -> Flying:
    found = Flying()
    found.pending = {0, 1, 2}
    return found


def gauge_of(tracker: Flying, told: Told) -> ProgressProbe:
    return ProgressProbe(told, cast(Any, tracker), tracker.clock.now_s, tracker.clock.monotonic)


def look(one: ProgressProbe) -> Progress:
    one.ask()
    one.hear()
    return one.read()


def test_bytes_are_summed_over_all_ranks_and_the_rate_is_the_recent_one(tracker: Flying) -> None:
    told = Told({"done": 10, "total": 100}, {"done": 20, "total": 100}, {"done": 60, "total": 100})
    one = gauge_of(tracker, told)
    tracker.clock.now_s += 2.0
    far = look(one)
    assert (far.done_nbytes, far.total_nbytes, far.elapsed_s, far.fraction) == (90, 300, 2.0, 0.3)
    assert [(rank.rank, rank.done_nbytes, rank.total_nbytes) for rank in far.ranks] == [
        (0, 10, 100),
        (1, 20, 100),
        (2, 60, 100),
    ]
    assert str(far.laggard) == "rank 0 is at 10 %"
    assert (far.rate, far.left_s) == (45.0, pytest.approx(210 / 45))
    assert str(far) == "90 B of 300 B (30 %), 45 B/s, 4.67 s left"
    for _ in range(10):
        tracker.clock.now_s += 1.0
        far = look(one)
    assert (far.rate, far.left_s) == (0.0, None), "it stands still"


def test_no_bytes_are_known_before_the_check_and_the_wait_for_it_is_not_in_the_rate(tracker: Flying) -> None:
    told = Told({}, {"has_begun": False}, {})
    one = gauge_of(tracker, told)
    tracker.clock.now_s += 60.0
    far = look(one)
    assert (far.done_nbytes, far.total_nbytes, far.rate, far.left_s, far.fraction) == (0, 0, 0.0, None, 0.0)
    assert str(far.laggard) == "rank 1 has not begun"
    assert str(far.ranks[0]) == str(far.ranks[2]).replace("2", "0") == "rank 0 is in the consistency check"
    assert str(far) == "nobody has told of bytes, after 60 s"
    told.said = [{"done": 50, "total": 100}] * 3
    tracker.clock.now_s += 1.0
    assert look(one).rate == 150.0


def test_silent_rank_counts_at_its_last_position(tracker: Flying) -> None:
    told = Told(*[{"done": 50, "total": 100}] * 3)
    one = gauge_of(tracker, told)
    look(one)
    told.mute, told.said = {2}, [{"done": 90, "total": 100}, {"done": 40, "total": 100}, {}]
    tracker.clock.now_s += 0.2
    look(one)
    tracker.clock.now_s += gauge.SILENT_S + 0.1
    far = look(one)
    assert far.done_nbytes == 90 + 50 + 50, "numbers never go back"
    assert str(far.laggard) == "rank 2 gives no answer"
    assert told.asked.count(2) == 2, "one question at a time"
    told.open[2][0].set_result(answer(95, 100))
    assert str(look(one).laggard) == "rank 1 is at 50 %"


@pytest.mark.parametrize("odd", [answer(-1, 100), answer(1, -100), answer(0, 100, -5), "nonsense", None])
def test_a_rank_that_was_not_heard_of_counts_like_the_others(tracker: Flying, odd: Any) -> None:
    """Also where its report is malformed, or its connection has ended, which is None."""
    told = Told(*[{"done": 50, "total": 100}] * 3)
    told.mute = {1}
    one = gauge_of(tracker, told)
    far = look(one)
    assert (far.done_nbytes, far.total_nbytes, far.laggard) == (100, 300, None)
    assert str(far.ranks[1]) == "rank 1 was not heard of yet"
    told.open[1][0].set_result(odd)
    far = look(one)
    assert (far.done_nbytes, far.ranks[1].is_heard) == (100, False)


def test_the_end_is_full_and_a_failure_stays(tracker: Flying) -> None:
    told = Told(*[{"done": 50, "total": 100}] * 3)
    one, other = gauge_of(tracker, told), gauge_of(tracker, told)
    look(one)
    look(other)
    tracker.clock.now_s += 2.0
    tracker.error = KernelError(detail="x")
    assert other.read().done_nbytes == 150
    assert not any(rank.has_ended for rank in other.read().ranks)
    tracker.error, tracker.ends_s = None, tracker.clock.now_s
    far = one.read()
    assert (far.done_nbytes, far.fraction, far.rate, far.left_s, far.laggard) == (300, 1.0, 150.0, 0.0, None)
    tracker.clock.now_s += 60.0
    assert one.read().elapsed_s == 2.0


class Drawn:
    """In place of tqdm."""

    made: list[Drawn]

    def __init__(self, **given: Any) -> None:
        self.given, self.total, self.n, self.lines, self.postfix = given, given["total"], 0, list[Any](), ""
        self.is_closed = False
        self.leave = True
        type(self).made.append(self)

    def set_postfix_str(self, text: str, *, refresh: bool) -> None:
        self.postfix = text

    def refresh(self) -> None:
        self.lines.append((self.n, self.total, self.postfix))

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch, tracker: Flying) -> list[Drawn]:
    Drawn.made = []
    clock = SimpleNamespace(monotonic=tracker.clock.monotonic, time=lambda: 0.0)
    for module in (gauge, stall_report):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(gauge, "_tqdm", lambda: Drawn)
    return Drawn.made


def wait(tracker: Flying, told: Told, timeout_s: float | None = None, **arguments: Any) -> bool:
    return stall_report.wait(cast(Any, told), cast(Any, tracker), timeout_s, **arguments)


@pytest.mark.parametrize(("said", "leaves"), [({"done": 40, "total": 100}, True), ({}, False)])
def test_a_wait_that_lasts_shows_a_bar_that_ends_full(
    tracker: Flying, drawn: list[Drawn], said: dict[str, int], leaves: bool
) -> None:
    """And is removed where nobody has told of bytes; a short one shows none."""
    told = Told(*[said] * 3)
    tracker.ends_s = tracker.clock.now_s + 0.25
    assert wait(tracker, told, progress=True)
    assert (drawn, told.asked) == ([], [])
    tracker.ends_s = tracker.clock.now_s + 0.8
    assert wait(tracker, told, progress=True)
    (bar,) = drawn
    assert bar.given == {"desc": "allreduce", "unit": "B", "unit_scale": True, "total": 300 if said else None}
    if said:
        assert bar.lines == [*[(120, 300, "")] * 2, (300, 300, "")]
    assert (bar.is_closed, bar.leave) == (True, leaves)


def test_waits_in_a_block_show_bars_unless_they_say_otherwise(tracker: Flying, drawn: list[Drawn]) -> None:
    told = Told(*[{}] * 3)
    for within, asked, count in ((False, None, 0), (True, False, 0), (True, None, 1)):
        tracker.ends_s = tracker.clock.now_s + 0.8
        with gauge.progress(after_s=0.1) if within else nullcontext():
            assert wait(tracker, told, progress=asked)
        assert len(drawn) == count


def test_a_block_of_one_thread_is_none_of_another() -> None:
    bars, began, has_ended = gauge.progress(), threading.Event(), threading.Event()

    def other() -> tuple[object, object]:
        with bars:
            began.set()
            assert has_ended.wait(20)
            within = gauge.around_s.get()
        return within, gauge.around_s.get()

    outside = gauge.around_s.get()
    with ThreadPoolExecutor(1) as pool:
        with bars:
            asked = pool.submit(other)
            assert began.wait(20)
        here = gauge.around_s.get()
        has_ended.set()
        within, after = asked.result(20)
    assert here == after == outside != within


def test_a_wait_that_is_over_leaves_its_bar(tracker: Flying, drawn: list[Drawn]) -> None:
    told = Told({"done": 90, "total": 100}, {"done": 90, "total": 100}, {})
    told.mute = {2}
    assert not wait(tracker, told, 2.0, progress=True)
    (bar,) = drawn
    assert bar.lines[-1] == (180, 300, "rank 2 gives no answer")
    assert bar.is_closed


def test_a_signal_ends_the_bar(tracker: Flying, drawn: list[Drawn], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: Drawn) -> None:
        self.lines.append("signal")
        if len(self.lines) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(Drawn, "refresh", interrupted)
    with pytest.raises(KeyboardInterrupt):
        wait(tracker, Told(*[{}] * 3), progress=True)
    assert drawn[0].is_closed


def test_a_bar_that_can_not_be_drawn_does_not_end_the_wait(
    tracker: Flying, drawn: list[Drawn], monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(self: Drawn) -> None:
        raise ValueError("I/O operation on closed file")

    monkeypatch.setattr(Drawn, "refresh", closed)
    tracker.ends_s = tracker.clock.now_s + 5.0
    told = Told(*[{}] * 3)
    assert wait(tracker, told, progress=True)
    assert len(drawn) == 1
    assert told.asked == [0, 1, 2], "nobody looks any more"


@pytest.mark.parametrize("ask", [lambda one: gauge.progress(), lambda one: wait(one, Told(), progress=True)])
def test_without_tqdm_it_is_refused_at_once(tracker: Flying, monkeypatch: pytest.MonkeyPatch, ask: Any) -> None:
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    tracker.ends_s = 0.0  # even though nothing is to be waited for
    with pytest.raises(ProgressError, match=r"pip install 'raycollect\[progress\]'"):
        ask(tracker)


@pytest.mark.parametrize("after_s", [-1, math.inf, math.nan, "x", None])
def test_unreasonable_progress_delay_is_refused(after_s: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"after_s is .*, expected a number of seconds"):
        gauge.progress(after_s=after_s)


def test_bar_shows_its_rate(capsys: pytest.CaptureFixture[str]) -> None:
    made = gauge._tqdm()(desc="x", unit="B", unit_scale=True, total=100)
    made.n, made.rate = 50, 25.0
    made.refresh()
    made.rate = 0.0
    made.refresh()
    made.close()
    out, err = capsys.readouterr()
    assert "25.0B/s" in err
    assert "<00:02" in err
    assert "?B/s" in err
    assert out == ""
