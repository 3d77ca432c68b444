"""What becomes of the times of the benchmarks: rows, targets, tables and pictures."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("rich", reason="the benchmarks need what `make bench` installs")

from benchmarks import names, tables
from benchmarks.kernels import roster
from benchmarks.report import Peak, Report, Skip, rows_of, size, summarise
from benchmarks.targets import MB, TARGETS, Ceiling, Share, Target, judge

ROOT = Path(__file__).parents[3]

# ---------------------------------------------------------------------------------------------- report


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
    assert document["judged"] == []
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
    for one in (TARGET, limit, replace(TARGET, peer="nobody"), replace(TARGET, ratio=0.8)):
        tables.show_verdicts(console, _judged(*rows, target=one))
    tables.show_verdicts(console, _judged(_peak("a", 3 * MB), target=CEILING))
    tables.show_verdicts(console, _judged(_row("a", 1.0), _row("b", 0.75), target=SHARE))
    said = capsys.readouterr().out
    assert "1.50 x" in said
    assert "MISSED  kernel allreduce, 2 ranks, 4 B, a: 1.50 times faster than b (target 2)" in said
    assert "reached  kernel allreduce, 2 ranks, 4 B, a: 90% of the limit (target 85%)" in said
    assert "NOT MEASURED  kernel allreduce, 2 ranks, 4 B, a: ? times faster than nobody" in said
    assert "reached  kernel allreduce, 2 ranks, 4 B, a: 0.67 times as long as b (target at most 1.25)" in said
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


def test_no_two_lines_of_a_plot_look_alike():
    plots = pytest.importorskip("benchmarks.plots", reason="no matplotlib")
    shown = {}
    for path in (ROOT / "benchmarks" / "results").glob("*.json"):
        for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
            if row["suite"] not in plots._TABLES_ONLY:
                shown.setdefault((row["suite"], row["op"]), set()).add(row["contender"])
    assert len(shown) > 10
    for case, contenders in shown.items():
        styles = [plots._style(one) for one in contenders]
        assert len({one["color"] for one in styles}) == len({one["marker"] for one in styles}) == len(styles), case
