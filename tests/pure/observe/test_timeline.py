"""Timelines without Ray: the ring, the clocks, the file, the numbers."""

from __future__ import annotations

import gzip
import itertools
import json
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raycollect.observe import Label, Place, Ring, Tracer, chrome
from raycollect.observe.clocks import Alignment, Fix, Sample, clock_id, fix
from raycollect.observe.summary import bus_factor, summarize
from raycollect.observe.trace import (
    AGAIN,
    COLLECTIVE,
    DOOR,
    KERNEL,
    METHOD,
    PART,
    PLAN,
    RUN,
    WAIT,
    Recorded,
    Span,
    decode_recorded,
    encode_recorded,
)
from raycollect.observe.whole import Missing, Process, Slice, Thread, Trace, process_of

LABEL = Label(op="allreduce", group_id="g1", rank=1, ranks=2, nbytes=4096, calls=1)


# ---------------------------------------------------------------------------------------------- the ring


def test_a_ring_keeps_the_newest_and_counts_the_others() -> None:
    ring = Ring(limit=3)
    for number in range(5):
        ring.add(METHOD, f"m{number}", number, number + 0.5)
    found = ring.read()
    assert [one.name for one in found.spans] == ["m2", "m3", "m4"]
    assert found.dropped == 2


def test_what_many_threads_note_is_all_there_with_their_names() -> None:
    ring, begin = Ring(limit=10_000), threading.Barrier(4)

    def work() -> None:
        begin.wait()
        for number in range(500):
            ring.add(METHOD, "m", number, number + 1, label=Label(op=f"op{number % 7}"))

    threads = [threading.Thread(target=work, name=f"worker {at}") for at in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    found = ring.read()
    assert (len(found.spans), found.dropped) == (2000, 0)
    assert {found.threads[one.thread][1] for one in found.spans} == {f"worker {at}" for at in range(4)}
    assert all(one.label.op == f"op{int(one.begin_s) % 7}" for one in found.spans)


def test_a_run_of_a_loop_is_one_entry_and_three_spans() -> None:
    ring = Ring()
    thread, label = ring.meet(), ring.label(LABEL)
    ring.entries.append((next(ring.numbers), AGAIN, "", 1.0, 3.0, thread, 7, label, "", 2.0))
    ring.entries.append((next(ring.numbers), AGAIN, "", 4.0, 5.0, thread, 8, label, "PlanAbortedError", 0.0))
    spans = ring.read().spans
    assert [(one.kind, one.name, one.begin_s, one.end_s, one.error) for one in spans] == [
        (PART, "allreduce", 1.0, 3.0, ""),
        (DOOR, "door", 1.0, 2.0, ""),
        (KERNEL, "allreduce", 2.0, 3.0, ""),
        (PART, "allreduce", 4.0, 5.0, "PlanAbortedError"),
        (DOOR, "door", 4.0, 5.0, "PlanAbortedError"),
    ]
    assert {one.label for one in spans} == {LABEL}


def test_what_comes_again_is_labelled_once_and_what_is_gone_gives_no_other_its_label() -> None:
    ring = Ring()
    numbers = {ring.label_of(lambda at=at: Label(op=f"op{at}"), object()) for at in range(3000)}  # type: ignore[misc]
    assert len(numbers) == 3000
    assert len(ring.labelled) <= 1024
    assert all(tuple(map(id, things)) == ids for ids, (things, _) in ring.labelled.items())
    one, other = object(), object()
    number = ring.label_of(lambda: LABEL, one, other)
    assert ring.label_of(lambda: pytest.fail("it is known"), one, other) == number
    assert ring.label_of(lambda: Label(op="another"), other, one) != number


def test_short_waits_are_none() -> None:
    times = iter([1.0, 2.0, 2.000_01])
    ring = Ring(clock=lambda: next(times))
    ring.waited("a", 0.5)
    ring.waited("b", 2.0 - 1e-6)
    ring.waited("c", 2.0)
    assert [one.name for one in ring.read().spans] == ["a"]


def test_who_follows_a_ring_sees_each_span_once() -> None:
    ring = Ring(limit=100)
    mark, seen = 0, list[str]()
    for number in range(10):
        ring.add(METHOD, str(number), number, number + 1)
        if number % 3 == 0:
            mark, spans = ring.since(mark)
            seen += [one.name for one in spans]
    _, spans = ring.since(mark)
    assert seen + [one.name for one in spans] == list(map(str, range(10)))
    assert ring.since(mark + 100) == (mark + 100, [])


def test_one_records_at_a_time() -> None:
    tracer = Tracer()
    ring = tracer.begin("one")
    assert ring is not None
    assert tracer.begin("two") is None
    assert (tracer.end("two"), tracer.of("two"), tracer.of("one")) == (None, None, ring)
    assert tracer.begin("one") is not ring
    assert tracer.end("one") is not None
    assert (tracer.ring, tracer.holder) == (None, "")
    assert tracer.begin("two") is not None


def recorded() -> Recorded:
    ring = Ring(limit=6)
    ring.groups["g1"] = Place("default", "shm", 1, 2)
    for at in range(8):
        ring.add(METHOD if at % 2 else KERNEL, f"m{at}", at, at + 0.25, at, LABEL if at % 3 else Label(), "")
    return ring.read()


def test_what_a_ring_held_survives_the_wire() -> None:
    assert decode_recorded(encode_recorded(recorded())) == recorded()


def test_a_large_ring_travels_in_less_than_a_link_may_queue() -> None:
    ring = Ring()
    for at in range(1000):
        ring.add(KERNEL, "allreduce", 1e5 + at, 1e5 + at + 1e-4, at, LABEL)
    assert len(encode_recorded(ring.read())) < 50 * 1000 + 1000


@pytest.mark.parametrize(
    "change",
    [
        lambda doc: doc[:3],
        lambda doc: [[["nonsense", "x", ""]] * 9, *doc[1:]],
        lambda doc: [doc[0], [["op", [], 1, 2, 3, 4, ""]] * 9, *doc[2:]],
        lambda doc: [doc[0], doc[1], [[0, 2.0, 1.0, 1, 1, 0]], *doc[3:]],
        lambda doc: [doc[0], doc[1], [[0, float("nan"), 1.0, 1, 1, 0]], *doc[3:]],
        lambda doc: [doc[0], doc[1], [[0, 1.0, float("inf"), 1, 1, 0]], *doc[3:]],
        lambda doc: [doc[0], doc[1], [[99, 1.0, 2.0, 1, 1, 0]], *doc[3:]],
        lambda doc: [doc[0], doc[1], [7], *doc[3:]],
        lambda doc: [*doc[:4], [[1, 2, 3]], doc[5]],
        lambda doc: [*doc[:5], {"g": ["x"]}],
        lambda doc: [*doc[:5], 7],
        lambda doc: 7,
    ],
)
def test_spans_that_make_no_sense_are_refused(change: Any) -> None:
    document = msgpack.unpackb(encode_recorded(recorded()), strict_map_key=False)
    with pytest.raises(ValueError, match="malformed spans"):
        decode_recorded(msgpack.packb(change(document)))


@pytest.mark.parametrize("junk", [b"", b"\xc1", b"\x93\x01", b"x" * 50])
def test_junk_is_no_recording(junk: bytes) -> None:
    with pytest.raises(ValueError, match="malformed spans"):
        decode_recorded(junk)


# ---------------------------------------------------------------------------------------------- clocks


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


@settings(deadline=None, max_examples=60)
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
    one = fix([clocks.trip(*delays) for delays in first])
    assert one is not None
    clocks.now_s += between_s
    two = fix([clocks.trip(*delays) for delays in last])
    assert two is not None
    aligned = Alignment(first=one, last=two)
    at_s = one.at_s + share * (two.at_s - one.at_s)
    slack_s = 1e-6 + 2e-4 * 0.1  # the drift during a round trip
    assert abs(aligned.local(clocks.remote(at_s)) - at_s) <= aligned.uncertainty_s + slack_s
    assert abs(aligned.drift - drift) <= 2 * (aligned.uncertainty_s + slack_s) / (two.at_s - one.at_s)


def test_the_shortest_round_trip_counts() -> None:
    clocks = Clocks(5.0, 0.0)
    found = fix([clocks.trip(0.4, 0.0), clocks.trip(0.001, 0.003), clocks.trip(0.0, 0.2)])
    assert found is not None
    assert found.offset_s == pytest.approx(4.999, abs=1e-9)  # wrong by half of the difference of the ways
    assert found.uncertainty_s == pytest.approx(0.002)


def test_a_slow_way_back_does_not_look_like_an_offset_of_its_length() -> None:
    clocks = Clocks(0.0, 0.0)
    found = fix([clocks.trip(0.001, 0.1)])
    assert found is not None
    assert abs(found.offset_s) <= found.uncertainty_s


def test_one_clock_needs_no_fix_and_close_ones_tell_no_drift() -> None:
    assert Alignment().local(12.5) == 12.5
    assert Alignment().uncertainty_s == 0.0
    one = Fix(at_s=10.0, offset_s=5.0, uncertainty_s=0.01)
    two = Fix(at_s=10.1, offset_s=5.02, uncertainty_s=0.001)
    both = Alignment(first=one, last=two)
    assert both.drift == 0.0
    assert both.local(20.02) == pytest.approx(15.0), "the better of the two"
    assert Alignment(first=one).local(15.0) == 10.0
    vague = Alignment(
        first=Fix(at_s=10.0, offset_s=5.0, uncertainty_s=0.9), last=Fix(at_s=12.0, offset_s=4.0, uncertainty_s=0.9)
    )
    assert vague.drift == 0.0
    assert fix([]) is None


def test_processes_of_one_host_name_one_clock() -> None:
    assert clock_id() == clock_id() != ""


# ---------------------------------------------------------------------------------------------- the file


def a_slice(kind: str, begin_ms: float, end_ms: float, thread: int = 1, **more: Any) -> Slice:
    name = more.pop("name", kind)
    return Slice(kind, name, 50 + begin_ms / 1e3, 50 + end_ms / 1e3, thread, **more)


def a_process(name: str, pid: int, slices: list[Slice], **more: Any) -> Process:
    threads = {one.thread: Thread(pid + one.thread - 1, f"thread {one.thread}") for one in slices}
    return Process(name=name, host="h", pid=pid, clock="c", leader="L", threads=threads, slices=tuple(slices), **more)


def a_trace(*processes: Process, missing: tuple[Missing, ...] = ()) -> Trace:
    return Trace(began_s=50.0, ended_s=51.0, clock="c", processes=processes, missing=missing)


OF_G = {"op": "allreduce", "group_id": "g", "ranks": 2, "group": "default", "backend": "shm"}


def two_ranks() -> Trace:
    """A driver with two plans that overlap, and two ranks."""
    plans = [a_slice(PLAN, 0, 30, seq=1), a_slice(RUN, 10, 40, seq=2)]
    ranks = []
    for rank, late_ms in ((0, 0.0), (1, 4.0)):
        same = {**OF_G, "rank": rank}
        slices = [
            a_slice(METHOD, 0.5, 1, name="get"),
            a_slice(PART, 2 + late_ms, 20, seq=1, **same),
            a_slice(DOOR, 2 + late_ms, 10, seq=1, **same),
            a_slice(KERNEL, 10, 20, seq=1, nbytes=4_000_000, calls=1, **same),
            a_slice(PART, 21, 39, 2, seq=2, **same),
            a_slice(DOOR, 22, 24 + late_ms, 2, seq=2, **same),
            a_slice(KERNEL, 24 + late_ms, 34, 2, seq=2, nbytes=4_000_000, calls=1, **same),
        ]
        ranks.append(a_process(f"W{rank}", 20 + 10 * rank, slices, ranks=(("default", rank),)))
    return a_trace(a_process("driver", 10, plans, leads=True), *ranks)


def check(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Raises unless a document is what the Trace Event Format asks for; gives its complete events."""
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    rows = defaultdict[tuple[int, int], list[dict[str, Any]]](list)
    flows = defaultdict[tuple[str, str, int], list[dict[str, Any]]](list)
    named = set[tuple[int, int]]()
    for event in document["traceEvents"]:
        assert type(event["pid"]) is type(event["tid"]) is int
        assert event["ph"] in ("M", "X", "s", "f")
        if event["ph"] == "M":
            named.add((event["pid"], event["tid"]))
            continue
        assert isinstance(event["ts"], (int, float))
        assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
            rows[event["pid"], event["tid"]].append(event)
        else:
            flows[event["cat"], event["name"], event["id"]].append(event)
    assert set(rows) <= named, "every row has a name"
    owners = defaultdict[int, set[int]](set)
    for pid, tid in rows:
        owners[tid].add(pid)
    assert all(len(pids) == 1 for pids in owners.values()), "a row belongs to one process"
    for row in rows.values():
        for one, other in itertools.combinations(row, 2):
            (_, e1), (b2, e2) = sorted((_span(one), _span(other)), key=lambda span: (span[0], -span[1]))
            assert b2 >= e1 - 1e-6 or e2 <= e1 + 1e-6, f"{one} and {other} overlap in part"
    for ends in flows.values():
        assert [event["ph"] for event in ends] == ["s", "f"]
        assert ends[0]["ts"] <= ends[1]["ts"]
        assert ends[1]["bp"] == "e"
        for event in ends:
            inside = [_span(one) for one in rows[event["pid"], event["tid"]]]
            assert any(begin <= event["ts"] <= end for begin, end in inside), "a flow binds to a slice"
    return [event for row in rows.values() for event in row]


def _span(event: dict[str, Any]) -> tuple[float, float]:
    return event["ts"], event["ts"] + event["dur"]


def test_the_check_of_these_tests_sees_what_is_wrong() -> None:
    document = chrome.document(two_ranks())
    check(document)
    for spoil in (
        lambda events: next(one for one in events if one["ph"] == "f").update(ts=1e9),
        lambda events: next(one for one in events if one["ph"] == "X").update(dur=25_000.0, tid=next(_tids(events))),
        lambda events: events.remove(next(one for one in events if one["ph"] == "s")),
        lambda events: events[0].update(pid="10"),
    ):
        spoilt = json.loads(json.dumps(document))
        spoil(spoilt["traceEvents"])
        with pytest.raises((AssertionError, KeyError)):
            check(spoilt)


def _tids(events: list[dict[str, Any]]) -> Iterator[int]:
    return (one["tid"] for one in events if one["ph"] == "X" and one["cat"] == RUN)


def test_a_file_has_rows_spans_and_arrows() -> None:
    document = chrome.document(two_ranks())
    events = check(document)
    assert len(events) == 2 + 2 * 7
    heads = {one["args"]["name"] for one in document["traceEvents"] if one["name"] == "process_name"}
    assert heads == {"driver (h, pid 10)", "W0: rank 0 of default (h, pid 20)", "W1: rank 1 of default (h, pid 30)"}
    arrows = [one for one in document["traceEvents"] if one["ph"] == "f"]
    assert sorted((one["pid"], one["ts"]) for one in arrows) == [(20, 2e3), (20, 21e3), (30, 6e3), (30, 21e3)]
    plans = {one["tid"] for one in events if one["cat"] in (PLAN, RUN)}
    assert len(plans) == 2, "plans that overlap have rows of their own"


@settings(deadline=None, max_examples=40)
@given(
    st.lists(
        st.tuples(
            st.sampled_from((METHOD, WAIT, KERNEL, PLAN)), st.integers(0, 60), st.integers(0, 30), st.integers(1, 3)
        ),
        max_size=25,
    )
)
def test_spans_of_any_shape_never_overlap_in_part(given_: list[tuple[str, int, int, int]]) -> None:
    slices = [a_slice(kind, at / 7, (at + length) / 7, thread) for kind, at, length, thread in given_]
    events = check(chrome.document(a_trace(a_process("async", 10, slices, leads=True))))
    assert len(events) == len(slices)


def test_processes_of_two_hosts_with_one_pid_stay_apart() -> None:
    slices = [a_slice(METHOD, 0, 1)]
    document = chrome.document(a_trace(a_process("a", 7, slices), a_process("b", 7, slices)))
    events = check(document)
    assert len({one["pid"] for one in events}) == 2
    assert len({one["tid"] for one in events}) == 2


def test_an_arrow_never_points_back_where_clocks_differ_a_little() -> None:
    driver = a_process("driver", 10, [a_slice(PLAN, 5, 9, seq=1)], leads=True)
    early = a_process("early", 20, [a_slice(PART, 4.9, 8, seq=1)])
    before = a_process("before", 30, [a_slice(PART, 1, 2, seq=1)])
    document = chrome.document(a_trace(driver, early, before))
    check(document)
    assert [one["pid"] for one in document["traceEvents"] if one["ph"] == "f"] == [20]


def _order(one: Slice) -> tuple[object, ...]:
    return round(one.begin_s, 6), round(one.end_s, 6), one.kind


@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_a_file_is_read_as_it_was_written(tmp_path: Path, name: str) -> None:
    gone = Missing(name="W2", host="h", pid=40, why="it did not answer in time")
    broken = a_process("W", 50, [a_slice(KERNEL, 1, 2, name="reduce", error="KernelError", rank=3)], dropped=5)
    trace = two_ranks()
    trace = a_trace(*trace.processes, broken, missing=(gone,))
    path = tmp_path / name
    chrome.write(trace, path)
    assert (path.read_bytes()[:2] == b"\x1f\x8b") == name.endswith(".gz")
    found = chrome.read(path)
    assert (found.missing, found.dropped, found.clock) == ((gone,), 5, "c")
    assert [(one.title, one.leader, one.leads) for one in found.processes] == [
        (one.title, one.leader, one.leads) for one in trace.processes
    ]
    for one, other in zip(found.processes, trace.processes, strict=True):
        assert dict(one.threads) == dict(other.threads)
        assert len(one.slices) == len(other.slices)
        pairs = zip(sorted(one.slices, key=_order), sorted(other.slices, key=_order), strict=True)
        for mine, theirs in pairs:
            assert mine._replace(begin_s=0, end_s=0) == theirs._replace(begin_s=0, end_s=0)
            assert mine.begin_s == pytest.approx(theirs.begin_s, abs=1e-8)
    assert [path.name for path in tmp_path.iterdir()] == [name], "nothing else stays behind"


def test_a_file_that_can_not_be_written_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "t.json").mkdir()
    with pytest.raises(OSError, match=r"t\.json"):
        chrome.write(two_ranks(), tmp_path / "t.json")
    assert [path.name for path in tmp_path.iterdir()] == ["t.json"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{}",
        b'{"otherData": {"raycollect": {"format": 99}}}',
        b"\x1f\x8bxxxx",
        gzip.compress(b"7", mtime=0),
        gzip.compress(b"7" * 100, mtime=0)[:15] + bytes(10),
        gzip.compress(b"[" * 100_000, mtime=0),
        b'{"otherData": {"raycollect": {"format": ' + b"1" * 4000 + b"}}}",
        b'{"otherData": {"raycollect": {"format": ' + b"1" * 5000 + b"}}}",
        b'{"otherData": {"raycollect": {"format": "' + b"x" * 100_000 + b'"}}}',
        b'{"otherData": {"raycollect": {"format": 1, "began_s": NaN}}}',
        b'{"otherData": {"raycollect": {"format": 1, "began_s": 0, "processes": [{"id": Infinity}]}}}',
        b'{"otherData": {"raycollect": {"format": 1, "began_s": ' + b"1" * 400 + b"}}}",
        b"{" + b'"x":1,' * 5 + b'"otherData": []}',
    ],
)
def test_other_files_are_no_timelines(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="no timeline of raycollect") as caught:
        chrome.read(path)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_a_file_that_is_too_long_unpacked_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pack: Callable[[bytes], bytes]
) -> None:
    monkeypatch.setattr(chrome, "MOST_NBYTES", 1000)
    path = tmp_path / "t.json"
    path.write_bytes(pack(b" " * 1001))
    with pytest.raises(ValueError, match="longer than 1000 bytes"):
        chrome.read(path)


def test_timelines_of_one_host_are_merged_and_others_are_not() -> None:
    one = two_ranks()
    own = Process(name="W3", host="h", pid=90, clock="c", slices=(a_slice(METHOD, -20, -10),))
    other = Trace(began_s=49.9, ended_s=50.5, clock="c", processes=(own,))
    merged = Trace.merged([one, other])
    assert (merged.began_s, merged.ended_s, len(merged.processes)) == (49.9, 51.0, 4)
    check(chrome.document(merged))
    for clock in ("d", ""):
        strange = Trace(began_s=0, ended_s=1, clock=clock, processes=())
        with pytest.raises(ValueError, match="different hosts"):
            Trace.merged([strange, one])
    unknown = Trace(began_s=0, ended_s=1, clock="", processes=())
    with pytest.raises(ValueError, match="different hosts"):
        Trace.merged([unknown, unknown])


def test_a_process_takes_over_times_groups_and_ranks() -> None:
    spans = (Span(KERNEL, "allreduce", 100.0, 100.5, 1, 3, LABEL), Span(METHOD, "get", 101.0, 102.0, 1))
    groups = {"g1": Place("default", "shm", 1, 2), "g2": Place("inner", "shm", -1, 2)}
    found = process_of(
        Recorded(spans, 4, {1: (77, "MainThread")}, groups),
        Process(name="W", host="h", pid=7, clock="other"),
        Alignment(first=Fix(at_s=10.0, offset_s=90.0, uncertainty_s=0.25)),
    )
    assert (found.ranks, found.dropped, found.uncertainty_s) == ((("default", 1),), 4, 0.25)
    assert [(one.begin_s, one.end_s) for one in found.slices] == [(10.0, 10.5), (11.0, 12.0)]
    assert (found.slices[0].group, found.slices[0].backend, found.slices[1].group) == ("default", "shm", "")


# ---------------------------------------------------------------------------------------------- the numbers


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
        slices = []
        for seq in range(1, 11):
            came_ms = 10 * seq + (3 if rank == (2 if seq <= 7 else 0) else rank / 10)
            same = {**OF_G, "rank": rank, "seq": seq, "ranks": 3}
            slices += [a_slice(DOOR, came_ms, 10 * seq + 5, **same)]
            slices += [a_slice(KERNEL, 10 * seq + 5, 10 * seq + 6, calls=1, nbytes=1000, **same)]
        processes.append(a_process(f"W{rank}", 20 + rank, slices))
    (row,) = summarize(a_trace(*processes)).rows
    assert (row.last_rank, row.last_share) == (2, pytest.approx(0.7))
    assert row.bus_bandwidth == pytest.approx(row.algorithm_bandwidth * 4 / 3)


def test_members_own_calls_and_those_of_another_controller_are_not_mixed() -> None:
    slices = [a_slice(KERNEL, 1, 2, seq=1, calls=1, nbytes=8, rank=0, **OF_G)]
    own = [a_slice(KERNEL, 3, 7, seq=1, calls=1, nbytes=8, rank=0, meeting="ab", **OF_G)]
    other = Process(name="W", host="h", pid=3, leader="M", slices=tuple(slices))
    (row,) = summarize(a_trace(a_process("W", 2, slices + own), other)).rows
    assert row.calls == 3
    assert row.p99_s == pytest.approx(0.004)
    assert (row.last_rank, row.waiting) == (-1, 0.0)


def test_batches_have_a_row_and_so_have_their_calls() -> None:
    batch = {**OF_G, "op": "batch"}
    slices = [
        a_slice(DOOR, 0, 1, seq=1, **batch),
        a_slice(COLLECTIVE, 1, 9, seq=1, calls=1, nbytes=30, **batch),
        a_slice(COLLECTIVE, 1, 4, seq=1, calls=2, nbytes=20, **OF_G),
        a_slice(COLLECTIVE, 4, 6, seq=1, calls=3, nbytes=10, **OF_G),
        a_slice(KERNEL, 1, 2, seq=1, nbytes=20, **OF_G),
        a_slice(KERNEL, 6, 7, seq=1, calls=1, nbytes=10, error="KernelError", **OF_G),
    ]
    rows = {row.op: row for row in summarize(a_trace(a_process("W", 1, slices))).rows}
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
    found = json.loads(json.dumps(summarize(two_ranks()).to_dict()))
    assert found["rows"][0]["op"] == "allreduce"
    assert found["processes"] == 3
    empty = summarize(a_trace(a_process("W", 1, [], dropped=3)))
    assert str(empty).splitlines()[0] == "timeline of 1 s, 1 process"
    assert "no collective has ended in it" in str(empty)
    assert "3 entries were overwritten" in str(empty)
