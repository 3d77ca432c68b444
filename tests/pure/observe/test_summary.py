"""A timeline in numbers."""

from __future__ import annotations

import json

import pytest

from raycollect.observe.summary import bus_factor, summarize
from raycollect.observe.trace import (
    CHECK,
    COLLECTIVE,
    KERNEL,
)
from raycollect.observe.whole import Missing, Process
from tests.pure.observe.recorded import OF_G, a_process, a_span, a_trace, two_ranks


@pytest.mark.parametrize(
    ("op", "ranks", "factor"),
    [
        ("allreduce", 2, 1.0),
        ("allreduce", 8, 1.75),
        ("allgather", 4, 0.75),
        ("reducescatter", 4, 0.75),
        ("alltoall", 2, 0.5),
        ("broadcast", 8, 1.0),
        ("reduce", 8, 1.0),
        ("send", 2, 1.0),
        ("barrier", 4, 0.0),
        ("batch", 4, 0.0),
        ("allreduce", 1, 0.0),
    ],
)
def test_bus_bandwidth_is_that_of_nccl_tests(op: str, ranks: int, factor: float) -> None:
    assert bus_factor(op, ranks) == pytest.approx(factor)


def test_a_row_says_what_its_calls_took_and_who_was_last() -> None:
    (row,) = summarize(two_ranks()).rows
    assert (row.group, row.op, row.backend, row.ranks, row.calls) == ("default", "allreduce", "shm", 2, 2)
    assert row.nbytes == 8_000_000
    assert row.median_s == pytest.approx(0.010)
    assert row.p99_s == pytest.approx(0.010)
    assert row.algorithm_bandwidth == pytest.approx(8_000_000 / 0.020)
    assert row.bus_bandwidth == pytest.approx(row.algorithm_bandwidth)
    waited, worked = 8 + 4 + 2 + 6, 10 + 10 + 10 + 6
    assert row.waiting == pytest.approx(waited / (waited + worked))
    assert row.worst_skew_s == pytest.approx(0.004)
    assert row.skew_s == pytest.approx(0.002)


def test_the_rank_that_was_last_most_often_is_named() -> None:
    processes = []
    for rank in range(3):
        spans = []
        for seq in range(1, 11):
            came_ms = 10 * seq + (3 if rank == (2 if seq <= 7 else 0) else rank / 10)
            same = {**OF_G, "rank": rank, "seq": seq, "ranks": 3}
            spans += [a_span(CHECK, came_ms, 10 * seq + 5, **same)]
            spans += [a_span(KERNEL, 10 * seq + 5, 10 * seq + 6, calls=1, nbytes=1000, **same)]
        processes.append(a_process(f"W{rank}", 20 + rank, spans))
    (row,) = summarize(a_trace(*processes)).rows
    assert (row.last_rank, row.last_share) == (2, pytest.approx(0.7))
    assert row.bus_bandwidth == pytest.approx(row.algorithm_bandwidth * 4 / 3)


def test_members_own_calls_and_those_of_another_controller_are_not_mixed() -> None:
    spans = [a_span(KERNEL, 1, 2, seq=1, calls=1, nbytes=8, rank=0, **OF_G)]
    own = [a_span(KERNEL, 3, 7, seq=1, calls=1, nbytes=8, rank=0, meeting="ab", **OF_G)]
    other = Process(name="W", host="h", pid=3, leader="M", spans=tuple(spans))
    (row,) = summarize(a_trace(a_process("W", 2, spans + own), other)).rows
    assert row.calls == 3
    assert row.p99_s == pytest.approx(0.004)
    assert (row.last_rank, row.waiting) == (-1, 0.0)


def test_batches_have_a_row_and_so_have_their_calls() -> None:
    batch = {**OF_G, "op": "batch"}
    spans = [
        a_span(CHECK, 0, 1, seq=1, **batch),
        a_span(COLLECTIVE, 1, 9, seq=1, calls=1, nbytes=30, **batch),
        a_span(COLLECTIVE, 1, 4, seq=1, calls=2, nbytes=20, **OF_G),
        a_span(COLLECTIVE, 4, 6, seq=1, calls=3, nbytes=10, **OF_G),
        a_span(KERNEL, 1, 2, seq=1, nbytes=20, **OF_G),
        a_span(KERNEL, 6, 7, seq=1, calls=1, nbytes=10, error="KernelError", **OF_G),
    ]
    rows = {row.op: row for row in summarize(a_trace(a_process("W", 1, spans))).rows}
    assert (rows["batch"].calls, rows["batch"].nbytes, rows["batch"].bus_bandwidth) == (1, 30, 0.0)
    assert (rows["allreduce"].calls, rows["allreduce"].nbytes) == (5, 30)
    assert rows["allreduce"].waiting == 0.0


def test_a_summary_is_shown_aligned_and_escaped() -> None:
    trace = two_ranks()
    text = str(summarize(a_trace(*trace.processes, missing=(Missing(name="<W9>", host="h", pid=1, why="gone"),))))
    title, head, row, note = text.splitlines()
    assert title == "timeline of 1 s, 3 processes"
    assert head.split()[:3] == ["group", "op", "backend"]
    for word in ("calls", "median", "algbw"):
        at = head.index(word) + len(word)
        assert row[at - 1] != " ", "numbers stand to the right"
        assert row[at : at + 1] in ("", " ")
    assert note == "missing: <W9> (h, pid 1): gone"
    shown = summarize(a_trace(*trace.processes, missing=(Missing(name="<W9>", host="h", pid=1, why="gone"),)))
    assert "&lt;W9&gt;" in shown._repr_html_()
    assert "<td" in shown._repr_html_()
    assert repr(shown) == str(shown)


def test_a_summary_is_plain_values_and_an_empty_one_says_so() -> None:
    values = json.loads(json.dumps(summarize(two_ranks()).to_dict()))
    assert values["rows"][0]["op"] == "allreduce"
    assert values["processes"] == 3
    empty = summarize(a_trace(a_process("W", 1, [], dropped=3)))
    assert str(empty).splitlines()[0] == "timeline of 1 s, 1 process"
    assert "no collective has ended" in str(empty)
    assert "3 entries were overwritten" in str(empty)
