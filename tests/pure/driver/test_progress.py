"""How far a collective is: what kernels tell, what it comes to, what is asked of participants, and what a bar shows."""

from __future__ import annotations

import math
import sys
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from raycollect.backends.completion import chunks, metered
from raycollect.channel.messages import Measured
from raycollect.core import kernel_progress
from raycollect.core.kernel_progress import LENT, KernelProgress
from raycollect.core.model import Kernel, Launch, OpKind, ReduceOp
from raycollect.core.protocols import Communicator, Together
from raycollect.driver import progress as gauge
from raycollect.driver import progress_bar, stall_report
from raycollect.driver.progress import Progress, ProgressProbe
from raycollect.engine.execution import Execution
from raycollect.engine.kernel_schedule import KernelSchedule, LaunchStep, ScheduledBundle
from raycollect.engine.progress import NOWHERE, ByteMap, BytesDone
from raycollect.errors import InvalidArgumentError, KernelError, ProgressError
from raycollect.pos import tensors
from tests.pure.communicators import ThreadTeam
from tests.pure.conformance import run_launch
from tests.pure.driver.test_stall_report import Flying
from tests.pure.fleet import MakeFleet, numbers
from tests.pure.teams import Team

MB = 1 << 20

# ---------------------------------------------------------------------------------------------- in kernels


@pytest.mark.parametrize(("size", "step"), [(0, 3), (1, 3), (3, 3), (7, 3), (9, 3), (2, 0)])
def test_metered_chunks_equal_plain_chunks(size: int, step: int) -> None:
    kernel_progress.here().clear()
    assert list(metered(size, step)) == list(chunks(size, step))
    assert kernel_progress.here().part == (1.0 if size > max(step, 1) else 0.0), "one chunk is not worth a note"


def test_a_chunk_counts_once_the_next_is_asked_for() -> None:
    meter = kernel_progress.here()
    meter.cover(2.0, 2.0)
    found = [meter.part for _ in metered(8, 2)]
    assert found == [2.0, 2.5, 3.0, 3.5]
    assert meter.part == 4.0
    meter.clear()
    assert (meter.part, meter.base, meter.span) == (0.0, 0.0, 1.0)


def run_metered(communicator: Communicator, launch: Launch, kernels: list[list[Kernel]]) -> list[float]:
    """Runs kernels, together where there are several; what the meter showed on the way, and at the end."""
    meter, mine = Recording(), kernels[communicator.rank]
    kernel_progress._local.kernel_progress = meter
    try:
        if len(mine) == 1:
            run_launch(communicator, launch, mine[0])
        else:
            assert isinstance(communicator, Together)
            communicator.agree(launch, b"")
            assert communicator.launch_together(launch, mine) == len(mine)
            communicator.end(launch, True)
    finally:
        del kernel_progress._local.kernel_progress
    return meter.shown


class Recording(KernelProgress):
    """A meter that remembers."""

    __slots__ = ("shown",)

    def __init__(self) -> None:
        object.__setattr__(self, "shown", [])
        super().__init__()

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "part" and value:
            self.shown.append(value)


def allreduces(count: int, nbytes: int, make: Any) -> list[list[Kernel]]:
    arrays = [[make(nbytes // 4) for _ in range(count)] for _ in range(2)]
    return [[Kernel(kind=OpKind.ALLREDUCE, src=one, dst=one, op=ReduceOp.SUM) for one in some] for some in arrays]


def plain(size: int) -> Any:
    return np.ones(size, np.float32)


def shared(size: int) -> Any:
    return tensors.ones(size, np.float32)


@pytest.mark.parametrize(
    ("backend", "make", "count"),
    [("shm", plain, 1), ("shm", shared, 1), ("shm", plain, 3), ("shm", shared, 3), ("tcp", plain, 1)],
)
def test_kernels_report_their_progress(backend: str, make: Any, count: int) -> None:
    team = ThreadTeam(backend, 2)
    try:
        for shown in team.must(run_metered, team.launch(), allreduces(count, 8 * MB, make)):
            assert shown == sorted(shown)
            assert len(shown) >= 4
            assert count * 0.75 <= shown[-1] <= count
    finally:
        team.close()


@pytest.mark.parametrize("make", [plain, shared])
def test_lent_array_is_reported(make: Any) -> None:
    team = ThreadTeam("shm", 2)
    arrays = [make(4 * MB) for _ in range(2)]
    kernels = [
        [Kernel(kind=OpKind.BROADCAST, src=arrays[0], peer=0)],
        [Kernel(kind=OpKind.BROADCAST, dst=arrays[1], peer=0)],
    ]
    try:
        root, other = team.must(run_metered, team.launch(), kernels)
    finally:
        team.close()
    assert (root == [LENT]) is (make is shared)
    assert other[-1] == 1.0


# ---------------------------------------------------------------------------------------------- in scripts


def move(*sizes: int, **others: Any) -> LaunchStep:
    kernels = tuple(Kernel(kind=OpKind.ALLREDUCE, src=np.zeros(size, np.uint8)) for size in sizes)
    return LaunchStep(0, "g", (0, 1), kernels, **others)


def script(*bundles: tuple[int, tuple[LaunchStep, ...]]) -> KernelSchedule:
    """Bundles, each of one call of so many bytes."""
    share = SimpleNamespace(op="allreduce", group_id="g", rank=0, ranks=(0, 1))
    stretches = []
    for nbytes, moves in bundles:
        gives = SimpleNamespace(tensors=(SimpleNamespace(nbytes=nbytes),))
        agreed = (SimpleNamespace(specs=(SimpleNamespace(gives=gives),)),)
        stretches.append(ScheduledBundle(cast(Any, share), 1, moves, (), (), (), cast(Any, agreed)))
    return KernelSchedule(tuple(stretches), ())


def test_a_bundle_counts_with_its_collectives_and_kernels_share_that() -> None:
    first, second, third = move(100), move(50, 150), move(60)
    extent = ByteMap(script((100, (first,)), (1000, (move(), second, third))))
    scale = 1000 / 260
    assert extent.total == 1100
    assert extent.at(None, 0, 0.0) == BytesDone(0, 1100)
    assert extent.at(first, 1, 0.25) == BytesDone(25, 1100)
    assert extent.at(first, 0, 0.0) == BytesDone(100, 1100)
    assert extent.at(second, 2, 0.5) == BytesDone(int(100 + 25 * scale), 1100)
    assert extent.at(second, 2, 1.5) == BytesDone(int(100 + 125 * scale), 1100), "a kernel, and half of the next"
    assert extent.at(second, 1, 0.5) == BytesDone(int(100 + 125 * scale), 1100)
    assert extent.at(third, 0, 0.0) == BytesDone(1100, 1100)
    assert extent.at(third, 1, 99.0) == BytesDone(1100, 1100)
    assert extent.at(second, 1, LENT) == BytesDone(int(100 + 50 * scale), 1100, int(150 * scale))
    assert extent.at(move(7), 1, 0.5) == BytesDone(0, 1100), "of another script"


def test_replacement_moves_count_for_the_offered_ones() -> None:
    packed = (move(30), move(70))
    extent = ByteMap(script((100, (move(10, 20, 70, instead=packed),)), (50, (move(50),))))
    assert [extent.at(one, 1, 0.5).done for one in packed] == [15, 65]


def test_a_barrier_has_no_bytes() -> None:
    nothing = LaunchStep(0, "g", (0, 1), (Kernel(kind=OpKind.BARRIER),))
    assert ByteMap(script((0, (nothing,)))).at(nothing, 1, 0.5) == NOWHERE
    assert NOWHERE.fraction == 0.0


def test_execution_can_be_queried_at_every_point(fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[tuple[str, int], BytesDone] = {}
    at = Execution._at

    def asks(self: Execution, point: str) -> None:
        found[point, self._program.door.rank] = self.bytes_done()
        at(self, point)

    monkeypatch.setattr(Execution, "_at", asks)
    one = fleet(2)
    one.must(OpKind.ALLREDUCE, one.keep_all(numbers(0, 2, (100,))))
    for rank in range(2):
        said = [found[point, rank] for point in ("before_door", "after_door", "before_kernel", "after_kernel", "end")]
        assert said == [NOWHERE, BytesDone(0, 800), BytesDone(0, 800), BytesDone(800, 800), BytesDone(800, 800)]


def test_a_run_knows_all_of_its_plans_from_the_second_on() -> None:
    one = Team(2)
    told: list[BytesDone | None] = []

    def look() -> None:
        replay = one.replays[0]
        told.append(replay.bytes_done(replay._seq))

    values = [[np.ones(100), np.ones(300)] for _ in range(2)]
    for rank, part in enumerate(one.scripts):
        one.actors[rank].methods = {
            "first": lambda rank=rank: values[rank][0],
            "second": lambda rank=rank: values[rank][1],
            "look": look if rank == 0 else lambda: None,
        }
        part.call("first")
        part.call("second")
    try:
        first = one.collective(OpKind.ALLREDUCE, {0: 0, 1: 0})
        assert first == [[], []]
        for part in one.scripts:
            part.call("look")
        one.collective(OpKind.ALLREDUCE, {0: 1, 1: 1})
        for _ in range(4):
            one.run()
        assert told == [BytesDone(800, 800), *[BytesDone(800, 3200)] * 3]
        assert [one.replays[0].bytes_done(seq) for seq in (0, 12345)] == [None, None]
    finally:
        one.close()


# ---------------------------------------------------------------------------------------------- asked of participants


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


def test_bytes_are_summed_over_all_ranks(tracker: Flying) -> None:
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


def test_no_bytes_are_known_before_the_door(tracker: Flying) -> None:
    told = Told({}, {"has_begun": False}, {})
    far = look(gauge_of(tracker, told))
    assert (far.done_nbytes, far.total_nbytes, far.rate, far.left_s, far.fraction) == (0, 0, 0.0, None, 0.0)
    assert str(far.laggard) == "rank 1 has not begun"
    assert list(map(str, far.ranks)) == ["rank 0 is at the door", "rank 1 has not begun", "rank 2 is at the door"]
    assert str(far) == "nobody has told of bytes, after 0 us"


def test_the_wait_for_late_ranks_is_not_counted_in_the_rate(tracker: Flying) -> None:
    told = Told({}, {}, {})
    one = gauge_of(tracker, told)
    tracker.clock.now_s += 60.0
    look(one)
    told.said = [{"done": 50, "total": 100}] * 3
    tracker.clock.now_s += 1.0
    assert look(one).rate == 150.0


def test_rate_is_the_recent_one(tracker: Flying) -> None:
    told = Told(*[{"done": 100, "total": 1000}] * 3)
    one = gauge_of(tracker, told)
    for _ in range(10):
        tracker.clock.now_s += 1.0
        far = look(one)
    assert (far.rate, far.left_s) == (0.0, None), "it stands still"


def test_silent_rank_counts_at_its_last_position(tracker: Flying) -> None:
    told = Told(*[{"done": 50, "total": 100}] * 3)
    one = gauge_of(tracker, told)
    look(one)
    told.mute, told.said = {2}, [{"done": 90, "total": 100}] * 3
    tracker.clock.now_s += 0.2
    look(one)
    tracker.clock.now_s += gauge.SILENT_S + 0.1
    far = look(one)
    assert far.done_nbytes == 90 + 90 + 50
    assert str(far.laggard) == "rank 2 gives no answer"
    assert told.asked.count(2) == 2, "one question at a time"
    told.open[2][0].set_result(answer(95, 100))
    assert str(look(one).laggard) == "None"


def test_unheard_rank_counts_like_the_others(tracker: Flying) -> None:
    told = Told(*[{"done": 50, "total": 100}] * 3)
    told.mute = {1}
    far = look(gauge_of(tracker, told))
    assert (far.done_nbytes, far.total_nbytes, far.laggard) == (100, 300, None)
    assert str(far.ranks[1]) == "rank 1 was not heard of yet"


def test_dead_participant_is_not_queried(tracker: Flying) -> None:
    told = Told(*[{"done": 50, "total": 100}] * 3)
    told.mute = {1}
    one = gauge_of(tracker, told)
    look(one)
    told.open[1][0].set_result(None)  # its connection has ended
    assert look(one).done_nbytes == 100


def test_numbers_never_go_back(tracker: Flying) -> None:
    told = Told(*[{"done": 50, "total": 100}] * 3)
    one = gauge_of(tracker, told)
    look(one)
    told.said[0] = {"done": 40, "total": 100}
    assert look(one).done_nbytes == 150


@pytest.mark.parametrize("odd", [answer(-1, 100), answer(1, -100), answer(0, 100, -5), "nonsense", None])
def test_malformed_reports_are_ignored(tracker: Flying, odd: Any) -> None:
    told = Told(*[{"done": 50, "total": 100}] * 3)
    told.mute = {0}
    one = gauge_of(tracker, told)
    look(one)
    told.open[0][0].set_result(odd)
    one.hear()
    assert (one.read().done_nbytes, one.read().ranks[0].is_heard) == (100, False)


def test_lending_rank_counts_like_the_others(tracker: Flying) -> None:
    told = Told({"total": 100, "lent": 100}, {"done": 40, "total": 100}, {"done": 60, "total": 100})
    far = look(gauge_of(tracker, told))
    assert (far.done_nbytes, far.ranks[0].done_nbytes, far.laggard) == (150, 50, None)


def test_ended_rank_counts_as_complete(tracker: Flying) -> None:
    told = Told(*[{"done": 50, "total": 100}] * 3)
    one = gauge_of(tracker, told)
    look(one)
    told.said[1] = {"has_ended": True}
    tracker.pending.discard(2)
    far = look(one)
    assert [rank.done_nbytes for rank in far.ranks] == [50, 100, 100]
    assert far.total_nbytes == 300


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


# ---------------------------------------------------------------------------------------------- bars


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
    for module in (progress_bar, stall_report, gauge):
        monkeypatch.setattr(module, "monotonic", tracker.clock.monotonic, raising=False)
    clock = SimpleNamespace(monotonic=tracker.clock.monotonic, time=lambda: 0.0)
    monkeypatch.setattr(progress_bar, "time", clock)
    monkeypatch.setattr(stall_report, "time", clock)
    monkeypatch.setattr(
        progress_bar,
        "ProgressProbe",
        lambda told, tracker, began_s: ProgressProbe(told, tracker, began_s, clock.monotonic),
    )
    monkeypatch.setattr(progress_bar, "_tqdm", lambda: Drawn)
    return Drawn.made


def wait(tracker: Flying, told: Told, timeout_s: float | None = None, **arguments: Any) -> bool:
    return stall_report.wait(cast(Any, told), cast(Any, tracker), timeout_s, **arguments)


def test_a_wait_that_lasts_shows_a_bar_that_ends_full(tracker: Flying, drawn: list[Drawn]) -> None:
    told = Told(*[{"done": 40, "total": 100}] * 3)
    tracker.ends_s = tracker.clock.now_s + 0.8
    assert wait(tracker, told, progress=True)
    (bar,) = drawn
    assert bar.given == {"desc": "allreduce", "unit": "B", "unit_scale": True, "total": 300}
    assert bar.lines == [*[(120, 300, "")] * 2, (300, 300, "")]
    assert bar.is_closed
    assert bar.leave


def test_short_wait_shows_no_bar(tracker: Flying, drawn: list[Drawn]) -> None:
    told = Told(*[{}] * 3)
    tracker.ends_s = tracker.clock.now_s + 0.4
    assert wait(tracker, told, progress=True)
    assert (drawn, told.asked) == ([], [])


@pytest.mark.parametrize(("shows", "count"), [(None, 1), (True, 1), (False, 0)])
def test_a_block_shows_bars_of_all_waits_in_it(
    tracker: Flying, drawn: list[Drawn], shows: bool | None, count: int
) -> None:
    told = Told(*[{"done": 40, "total": 100}] * 3)
    tracker.ends_s = tracker.clock.now_s + 0.45
    with progress_bar.progress(after_s=0.1) as block:
        assert wait(tracker, told, progress=shows)
        with block:
            pass
    assert len(drawn) == count
    tracker.ends_s = tracker.clock.now_s + 0.45
    assert wait(tracker, told)
    assert len(drawn) == count, "the block has ended"


def test_a_bar_stays_where_it_is_where_the_collective_fails(tracker: Flying, drawn: list[Drawn]) -> None:
    told = Told(*[{"done": 40, "total": 100}] * 3)

    def fail(one: Any, seq: int, measure: Any = told.measure) -> Any:
        if len(told.asked) > 9:
            tracker.error = KernelError(detail="x")
        return measure(one, seq)

    told.measure = fail  # type: ignore[method-assign]
    assert wait(tracker, told, progress=True)
    (bar,) = drawn
    assert bar.lines[-1] == (120, 300, "")
    assert bar.is_closed


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


def test_bar_without_reported_bytes_is_removed(tracker: Flying, drawn: list[Drawn]) -> None:
    tracker.ends_s = tracker.clock.now_s + 0.8
    assert wait(tracker, Told(*[{}] * 3), progress=True)
    assert not drawn[0].leave


@pytest.mark.parametrize("ask", [lambda one: progress_bar.progress(), lambda one: wait(one, Told(), progress=True)])
def test_without_tqdm_it_is_refused_at_once(tracker: Flying, monkeypatch: pytest.MonkeyPatch, ask: Any) -> None:
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    tracker.ends_s = 0.0  # even though nothing is to be waited for
    with pytest.raises(ProgressError, match=r"pip install 'raycollect\[progress\]'"):
        ask(tracker)


@pytest.mark.parametrize("after_s", [-1, math.inf, math.nan, "x", None])
def test_unreasonable_progress_delay_is_refused(after_s: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"after_s is .*, expected a number of seconds"):
        progress_bar.progress(after_s=after_s)


def test_bar_shows_its_rate(capsys: pytest.CaptureFixture[str]) -> None:
    made = progress_bar._tqdm()(desc="x", unit="B", unit_scale=True, total=100)
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
