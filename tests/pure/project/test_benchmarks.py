"""The benchmarks: who is timed when, what becomes of the times, who has reached what; and the processes of `kernel`."""

from __future__ import annotations

import json
import multiprocessing
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("rich", reason="the benchmarks need what `make bench` installs")

from benchmarks import doorless, names, tables
from benchmarks.interleave import RUNS_PER_ROUND, interleave, timed
from benchmarks.kernels import roster
from benchmarks.kernels.operands import MOST_RUNS, OPS, Operands
from benchmarks.kernels.ours import RaycollectPlayer
from benchmarks.kernels.player import Place
from benchmarks.kernels.team import Team, TeamFailed
from benchmarks.kernels.worker import serve
from benchmarks.report import Peak, Report, Skip, Skipped, rows_of, size, summarise
from benchmarks.suite import Choice, close, entry, gather
from benchmarks.suites import captured, training
from benchmarks.suites.kernel import BURSTS
from benchmarks.suites.plan import Planner
from benchmarks.targets import MB, TARGETS, Ceiling, Share, Target, judge
from raycollect.core.model import OpKind
from tests.pure.communicators import ThreadTeam


class Clock:
    """Time that passes only when somebody works."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Fake:
    """Adds one per run, takes a known time, and tells everybody's story."""

    def __init__(self, name, story, clock, cost_s, *, wrong=False):
        self.name, self._story, self._clock, self._cost_s, self._wrong = name, story, clock, cost_s, wrong
        self.value = None
        self.closed = False

    def prepare(self, nbytes):
        self._story.append(("prepare", self.name, nbytes))

    def fill(self):
        self._story.append(("fill", self.name))
        self.value = 0

    def run(self, count):
        self._story.append(("run", self.name))
        return timed(self._work, count, self._clock)

    def _work(self):
        self._clock.now_s += self._cost_s
        self.value += 2 if self._wrong else 1

    def check(self, runs):
        if self.value != runs:
            raise AssertionError(f"{self.name}: {self.value} after {runs} runs")

    def close(self):
        self.closed = True


def _fakes(*costs_s, **options):
    story, clock = [], Clock()
    return story, [Fake(chr(ord("a") + at), story, clock, cost, **options) for at, cost in enumerate(costs_s)]


# ---------------------------------------------------------------------------------------------- interleave


def test_each_contender_is_timed_so_many_times_and_alone():
    _, fakes = _fakes(0.001, 0.25, 3.0)
    times = interleave(fakes, nbytes=4, runs=19)
    assert {name: len(spent) for name, spent in times.items()} == {"a": 19, "b": 19, "c": 19}
    assert times["a"] == pytest.approx([1.0] * 19)
    assert times["b"] == pytest.approx([250.0] * 19)
    assert times["c"] == pytest.approx([3000.0] * 19)


def test_nobody_always_follows_the_same_one():
    """What one leaves behind is paid for by whoever comes next: by each of the others now and then."""
    story, fakes = _fakes(1.0, 1.0, 1.0)
    interleave(fakes, nbytes=4, runs=40, warmup=0)
    ran = "".join(name for what, name, *_ in story if what == "run")
    turns = [ran[at : at + 3] for at in range(0, len(ran), 3)]
    assert all(sorted(turn) == ["a", "b", "c"] for turn in turns)
    assert {turn[0] for turn in turns} == {"a", "b", "c"}
    assert {turn[at : at + 2] for turn in turns for at in (0, 1)} == {"ab", "ac", "ba", "bc", "ca", "cb"}


def test_operands_are_filled_before_every_round():
    story, fakes = _fakes(1.0, 1.0)
    interleave(fakes, nbytes=4, runs=2 * RUNS_PER_ROUND + 1, warmup=0)
    assert story.count(("fill", "a")) == story.count(("fill", "b")) == 3
    assert story[:4] == [("prepare", "a", 4), ("prepare", "b", 4), ("fill", "a"), ("fill", "b")]


def test_the_warmup_is_not_timed():
    story, fakes = _fakes(1.0)
    assert len(interleave(fakes, nbytes=4, runs=5, warmup=7)["a"]) == 5
    assert story.count(("run", "a")) == 12


def test_a_burst_is_one_turn():
    story, fakes = _fakes(0.5, 1.0)
    times = interleave(fakes, nbytes=4, runs=25, warmup=1, burst=10)
    assert [len(spent) for spent in times.values()] == [30, 30]
    assert story.count(("run", "a")) == 4


@pytest.mark.parametrize("runs", [1, RUNS_PER_ROUND, 30])
def test_a_wrong_result_ends_the_measurement(runs):
    _, fakes = _fakes(1.0, wrong=True)
    with pytest.raises(AssertionError, match="a: "):
        interleave(fakes, nbytes=4, runs=runs)


# ---------------------------------------------------------------------------------------------- suite and report


def test_who_is_not_installed_is_named_with_the_reason():
    _, (fake,) = _fakes(1.0)

    def missing(name):
        raise Skipped("it is not there")

    def broken(name):
        raise ModuleNotFoundError("No module named 'pygloo'")

    made, skipped = gather("kernel", [entry("x", missing), entry("a", lambda name: fake), entry("y", broken)])
    assert made == [fake]
    assert skipped == [
        Skip(suite="kernel", contender="x", reason="it is not there"),
        Skip(suite="kernel", contender="y", reason="No module named 'pygloo'"),
    ]
    close(made)
    assert fake.closed


def test_who_fails_to_start_is_not_taken_for_skipped_and_the_others_are_closed():
    _, (fake,) = _fakes(1.0)

    def failing(name):
        raise ValueError("no port")

    with pytest.raises(ValueError, match="no port"):
        gather("kernel", [entry("a", lambda name: fake), entry("z", failing)])
    assert fake.closed


def test_all_are_closed_though_one_fails_to():
    _, fakes = _fakes(1.0, 1.0, 1.0)

    def refuse():
        raise OSError("stuck")

    fakes[1].close = refuse
    with pytest.raises(OSError, match="stuck"):
        close(fakes)
    assert fakes[0].closed
    assert fakes[2].closed


def test_what_was_chosen_wins():
    assert Choice(runs=7).runs_or(1, 2) == Choice(runs=7, quick=True).runs_or(1, 2) == 7
    assert Choice(quick=True).runs_or(1, 2) == 1
    assert Choice().runs_or(1, 2) == 2


def _row(contender, median_ms, **changes):
    row = summarise([median_ms], suite="kernel", op="allreduce", ranks=2, nbytes=4, contender=contender)
    return replace(row, **changes)


def test_a_row_has_the_median_and_what_nine_in_ten_stay_below():
    row = summarise(
        [9.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 100.0], suite="s", op="o", ranks=2, nbytes=4, contender="c"
    )
    assert (row.median_ms, row.p90_ms, row.runs) == (5.5, 100.0, 10)
    assert summarise([3.0], suite="s", op="o", ranks=2, nbytes=4, contender="c").p90_ms == 3.0


def test_the_document_holds_every_record_and_the_machine(tmp_path):
    report = Report({"cpu": "one"})
    rows = rows_of({"a": [1.0, 2.0], "b": [3.0]}, suite="kernel", op="send", ranks=2, nbytes=64)
    skip = Skip(suite="kernel", contender="c", reason="none")
    peak = Peak(op="allreduce", ranks=2, nbytes=64, contender="a", extra_nbytes=(1, 2))
    for record in (*rows, skip, skip, peak):
        report.add(record)
    report.write(tmp_path / "new" / "all.json")
    document = json.loads((tmp_path / "new" / "all.json").read_text())
    assert document["machine"] == {"cpu": "one"}
    assert [row["contender"] for row in document["rows"]] == ["a", "b"]
    assert set(document["rows"][0]) == {"suite", "op", "ranks", "nbytes", "contender", "median_ms", "p90_ms", "runs"}
    assert document["skipped"] == [{"suite": "kernel", "contender": "c", "reason": "none"}]
    assert document["memory"][0]["extra_nbytes"] == [1, 2]


@pytest.mark.parametrize(
    ("nbytes", "said"), [(4, "4 B"), (65536, "64 KB"), (5200, "5.078 KB"), (3 << 19, "1.5 MB"), (1 << 30, "1 GB")]
)
def test_sizes_as_a_person_reads_them(nbytes, said):
    assert size(nbytes) == said


# ---------------------------------------------------------------------------------------------- targets

TARGET = Target(suite="kernel", op="allreduce", ranks=2, nbytes=4, contender="a", peer="b", ratio=2.0)
SHARE = Share(suite="kernel", op="allreduce", ranks=2, nbytes=4, contender="a", without="b", most=0.3)
CEILING = Ceiling(op="allreduce", nbytes=4, contender="a", most_nbytes=100)


def _judged(*records, target=TARGET):
    report = Report({})
    for record in records:
        report.add(record)
    return judge(report, [target])


@pytest.mark.parametrize(("theirs_ms", "reached"), [(1.9, False), (2.0, True), (2.5, True)])
def test_a_target_is_a_ratio_of_medians(theirs_ms, reached):
    (verdict,) = _judged(_row("a", 1.0), _row("b", theirs_ms))
    assert verdict.found == theirs_ms
    assert verdict.reached is reached


@pytest.mark.parametrize(("without_ms", "reached"), [(6.9, False), (7.1, True), (10.0, True), (11.0, True)])
def test_a_share_is_what_a_part_adds_to_the_time(without_ms, reached):
    (verdict,) = _judged(_row("a", 10.0), _row("b", without_ms), target=SHARE)
    assert verdict.found == pytest.approx(1 - without_ms / 10)
    assert verdict.reached is reached


def test_a_share_needs_both():
    for one in ("a", "b"):
        (verdict,) = _judged(_row(one, 10.0), target=SHARE)
        assert verdict.found is None
        assert not verdict.reached
    assert _judged(_row("a", 10.0, ranks=4), target=SHARE) == []


@pytest.mark.parametrize("change", [{"suite": "driver"}, {"op": "send"}, {"ranks": 4}, {"nbytes": 8}])
def test_rows_of_another_case_do_not_count(change):
    (verdict,) = _judged(_row("a", 1.0), _row("b", 9.0, **change))
    assert verdict.found is None
    assert not verdict.reached


def test_a_case_that_nobody_measured_is_not_judged():
    assert _judged(_row("a", 1.0, ranks=4), _row("b", 1.0, ranks=4)) == []
    assert _judged(target=CEILING) == []


def _peak(contender, *extra):
    return Peak(op="allreduce", ranks=len(extra), nbytes=4, contender=contender, extra_nbytes=extra)


@pytest.mark.parametrize(("extra", "reached"), [((100, 3), True), ((3, 101), False)])
def test_the_worst_rank_counts_for_memory(extra, reached):
    (verdict,) = _judged(_peak("a", *extra), _peak("b", 10**6), target=CEILING)
    assert verdict.found == max(extra)
    assert verdict.reached is reached


def test_memory_of_others_alone_does_not_pass():
    (verdict,) = _judged(_peak("b", 1), target=CEILING)
    assert not verdict.reached


def test_every_contender_of_the_kernel_targets_is_on_the_roster():
    wanted = {
        name
        for one in TARGETS
        if isinstance(one, Target) and one.suite == "kernel"
        for name in (one.contender, one.peer)
    }
    assert wanted <= set(roster.ROSTER)
    assert names.LIMIT in wanted


def test_tables_say_what_was_found(capsys):
    console = tables.Console(width=120, no_color=True)
    limit = replace(TARGET, peer=names.LIMIT, ratio=0.85)
    rows = [_row("a", 1.0), _row("b", 1.5), _row(names.LIMIT, 0.9)]
    tables.show_rows(console, rows, title="numbers", reference="b")
    for one in (TARGET, limit, replace(TARGET, peer="nobody")):
        tables.show_verdicts(console, _judged(*rows, target=one))
    tables.show_verdicts(console, _judged(_peak("a", 3 * MB), target=CEILING))
    tables.show_verdicts(console, _judged(_row("a", 1.0), _row("b", 0.75), target=SHARE))
    said = capsys.readouterr().out
    assert "1.50 x" in said
    assert "MISSED  kernel allreduce, 2 ranks, 4 B, a: 1.50 times faster than b (target 2)" in said
    assert "reached  kernel allreduce, 2 ranks, 4 B, a: 90% of the limit (target 85%)" in said
    assert "NOT MEASURED  kernel allreduce, 2 ranks, 4 B, a: ? times faster than nobody" in said
    assert "a: 3.0 MB extra" in said
    assert "reached  kernel allreduce, 2 ranks, 4 B, a: 25% of the time (target at most 30%)" in said


# ---------------------------------------------------------------------------------------------- pictures


def test_every_case_is_drawn(tmp_path):
    plots = pytest.importorskip("benchmarks.plots", reason="no matplotlib")
    report = Report({})
    for nbytes in (4, 1024):
        report.add(_row("a", 1.0, nbytes=nbytes))
    for ranks in (2, 4, 8):
        report.add(_row("a", 1.0, op="grow", ranks=ranks))
    report.add(_row("a", 1.0, op="all of 64"))
    drawn = plots.draw(report, tmp_path)
    assert [path.name for path in drawn] == ["kernel-allreduce-2.png", "kernel-grow.png", "kernel-all-of-64-2.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)


# ---------------------------------------------------------------------------------------------- kernel


def _operate(op, parts):
    """One operation on the operands of all ranks, in this process."""
    if op == "allreduce":
        total = sum(part.src for part in parts)
        for part in parts:
            part.dst[...] = total
    elif op in ("broadcast", "send"):
        for part in parts[1:]:
            part.dst[...] = parts[0].src
    else:
        for part in parts:
            for other, piece in zip(parts, part.pieces(part.dst), strict=True):
                piece[...] = other.src if op == "allgather" else other.pieces(other.src)[part.rank]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("ranks", [2, 3, 16])
def test_operands_hold_what_the_operation_means_and_nothing_else(op, ranks):
    parts = [Operands.make(op, rank, ranks, 4096, lambda count: np.empty(count, np.float32)) for rank in range(ranks)]
    for part in parts:
        part.fill()
    with pytest.raises(AssertionError):
        for part in parts:
            part.check(1)
    for _ in range(MOST_RUNS):
        _operate(op, parts)
    for part in parts:
        part.check(MOST_RUNS)
    parts[1].dst[-1] *= 1.001
    with pytest.raises(AssertionError, match=op):
        parts[1].check(MOST_RUNS)


def test_a_burst_and_its_lead_in_stay_within_float32():
    assert max(count for _, count in BURSTS) < MOST_RUNS


def test_two_teams_of_processes_take_turns_and_their_results_are_right():
    teams, skipped = gather("kernel", [entry(name, Team, 2) for name in (names.SHM, names.LIMIT)])
    assert not skipped
    try:
        for nbytes in (4, 4096):
            times = interleave(teams, nbytes=nbytes, runs=6, warmup=1, burst=3)
            assert {name: len(spent) for name, spent in times.items()} == {names.SHM: 6, names.LIMIT: 6}
            assert all(spent_ms > 0 for spent in times.values() for spent_ms in spent)
        teams[0].op = "alltoall"
        assert len(interleave(teams[:1], nbytes=64, runs=2, warmup=0, burst=2)[names.SHM]) == 2
    finally:
        close(teams)


def test_a_backend_that_is_not_there_is_skipped(tmp_path):
    with pytest.raises(Skipped, match="no backend 'abacus'"):
        RaycollectPlayer(Place(0, 1, tmp_path), backend="abacus")


def test_a_worker_tells_why_it_can_not_play_and_what_went_wrong():
    ours, theirs = multiprocessing.Pipe()

    class Reluctant:
        def join(self):
            raise Skipped("there is no mpiexec")

        def run(self, count):
            raise ValueError(f"not {count} times")

        def close(self):
            return None

    for command in [("join", ()), ("run", (3,)), ("close", ())]:
        ours.send(command)
    serve(theirs, Reluctant())
    assert ours.recv() == ("skipped", "there is no mpiexec")
    kind, said = ours.recv()
    assert kind == "failed"
    assert "ValueError: not 3 times" in said
    assert ours.recv() == ("done", None)


def test_a_team_that_fails_says_what_its_rank_said():
    team = Team(names.SHM, 2)
    try:
        with pytest.raises(TeamFailed, match="KeyError: 'reduce'"):
            team.op = "reduce"
            team.prepare(4)
    finally:
        team.close()


# ---------------------------------------------------------------------------------------------- plan


@pytest.mark.parametrize("fresh", [True, False])
def test_the_planner_is_checked_too(fresh):
    planner = Planner("p", 3, fresh=fresh)
    times = interleave([planner], nbytes=0, runs=4)
    assert len(times["p"]) == 4
    planner.fill()
    with pytest.raises(AssertionError, match="0 programs"):
        planner.check(1)


# ---------------------------------------------------------------------------------------------- captured, training


@pytest.mark.parametrize("ranks", [2, 3])
def test_without_the_door_a_collective_is_the_same(fleet, ranks):
    made, team = fleet(ranks), ThreadTeam("shm", ranks)
    made.communicators = team.communicators
    held = [np.full(1, rank + 1, np.float32) for rank in range(ranks)]
    keys = made.keep_all(held)
    try:
        made.must(OpKind.ALLREDUCE, keys)
        for at, there in enumerate([False, True, False, False, True], 1):
            before = doorless.left_out()
            doorless.set_door(there)
            made.must(OpKind.ALLREDUCE, keys)
            assert (doorless.left_out() > before) is not there
            total = ranks * (ranks + 1) / 2 * ranks**at
            assert [array.tolist() for array in held] == [[total]] * ranks
    finally:
        doorless.set_door(True)
        team.close()


def test_without_the_door_operands_of_another_shape_still_agree(fleet):
    made, team = fleet(2), ThreadTeam("shm", 2)
    made.communicators = team.communicators
    doorless.set_door(False)
    try:
        before = doorless.left_out()
        for size in (1, 2, 3):
            held = [np.ones(size, np.float32), np.ones(size, np.float32)]
            made.must(OpKind.ALLREDUCE, made.keep_all(held))
            assert [array.tolist() for array in held] == [[2.0] * size] * 2
        assert doorless.left_out() == before
    finally:
        doorless.set_door(True)
        team.close()


def test_a_burst_of_the_captured_suite_stays_within_float32():
    for ranks in (2, 4, 16):
        assert ranks * (ranks + 1) / 2 * float(ranks) ** (captured.BURST - 1) < np.finfo(np.float32).max


def test_an_iteration_is_its_share_of_the_burst():
    class Three(training.Training):
        def __init__(self):
            self.done = []

        def operate(self):
            self.done.append("iteration")

        def finish(self):
            self.done.append("finish")

    three = Three()
    times = three.run(3)
    assert three.done == ["iteration"] * 3 + ["finish"]
    assert len(times) == 3
    assert len(set(times)) == 1


def test_the_gradient_of_the_training_target_is_that_of_the_example():
    digits = pytest.importorskip("examples.digits", reason="no scikit-learn")
    nbytes = {one.nbytes for one in TARGETS if isinstance(one, Target) and one.suite == "training"}
    assert nbytes == {digits.train_in_one_process(digits.load()[0], 1).nbytes}
