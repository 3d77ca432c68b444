"""The file of a timeline."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raycollect.observe import chrome
from raycollect.observe.summary import summarize
from raycollect.observe.trace import (
    KERNEL,
    METHOD,
    PART,
    PLAN,
    RUN,
    WAIT,
)
from raycollect.observe.whole import Missing
from tests.pure.observe.chrome_files import check
from tests.pure.observe.recorded import a_process, a_span, a_trace, two_ranks


def test_a_file_has_rows_spans_and_arrows() -> None:
    document = chrome.document(two_ranks())
    events = check(document)
    assert len(events) == 2 + 2 * 7
    heads = {event["args"]["name"] for event in document["traceEvents"] if event["name"] == "process_name"}
    assert heads == {"driver (h, pid 10)", "W0: rank 0 of default (h, pid 20)", "W1: rank 1 of default (h, pid 30)"}
    arrows = [event for event in document["traceEvents"] if event["ph"] == "f"]
    assert sorted((event["pid"], event["ts"]) for event in arrows) == [(2, 2e3), (2, 21e3), (3, 6e3), (3, 21e3)]
    plans = {event["tid"] for event in events if event["cat"] in (PLAN, RUN)}
    assert len(plans) == 2, "plans that overlap have rows of their own"


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(
            st.sampled_from((METHOD, WAIT, KERNEL, PLAN)), st.integers(0, 60), st.integers(0, 30), st.integers(1, 3)
        ),
        max_size=25,
    )
)
def test_spans_of_any_shape_never_overlap_in_part(given_: list[tuple[str, int, int, int]]) -> None:
    spans = [a_span(kind, at / 7, (at + length) / 7, thread) for kind, at, length, thread in given_]
    events = check(chrome.document(a_trace(a_process("async", 10, spans, leads=True))))
    assert len(events) == len(spans)


def test_processes_of_two_hosts_with_one_pid_stay_apart() -> None:
    spans = [a_span(METHOD, 0, 1)]
    document = chrome.document(a_trace(a_process("a", 7, spans), a_process("b", 7, spans)))
    events = check(document)
    assert len({event["pid"] for event in events}) == 2
    assert len({event["tid"] for event in events}) == 2


def test_an_arrow_never_points_back_where_clocks_differ_a_little() -> None:
    driver = a_process("driver", 10, [a_span(PLAN, 5, 9, seq=1)], leads=True)
    early = a_process("early", 20, [a_span(PART, 4.9, 8, seq=1)])
    before = a_process("before", 30, [a_span(PART, 1, 2, seq=1)])
    document = chrome.document(a_trace(driver, early, before))
    check(document)
    assert [event["pid"] for event in document["traceEvents"] if event["ph"] == "f"] == [2]


@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_a_file_says_who_is_missing_and_how_exact_it_is_and_has_the_summary(tmp_path: Path, name: str) -> None:
    gone = Missing(name="W2", host="h", pid=40, why="it did not answer in time")
    broken = a_process(
        "W", 50, [a_span(KERNEL, 1, 2, name="reduce", error="KernelError", rank=3)], dropped=5, uncertainty_s=0.25
    )
    trace = a_trace(*two_ranks().processes, broken, missing=(gone,))
    path = tmp_path / name
    chrome.write(trace, path)
    data = path.read_bytes()
    assert (data[:2] == b"\x1f\x8b") == name.endswith(".gz")
    document = json.loads(gzip.decompress(data) if name.endswith(".gz") else data)
    assert document == json.loads(json.dumps(chrome.document(trace)))
    own = document["otherData"]["raycollect"]
    assert (own["began_s"], own["ended_s"], own["dropped"]) == (50.0, 51.0, 5)
    assert own["missing"] == [{"name": "W2", "host": "h", "pid": 40, "why": "it did not answer in time"}]
    assert [process["name"] for process in own["processes"]] == ["driver", "W0", "W1", "W"]
    assert own["processes"][-1]["uncertainty_s"] == 0.25
    assert own["summary"] == json.loads(json.dumps(summarize(trace).to_dict()))
    failed = next(event for event in document["traceEvents"] if event["name"] == "reduce (KernelError)")
    assert failed["args"] == {"rank": 3, "error": "KernelError"}
    assert [path.name for path in tmp_path.iterdir()] == [name], "nothing else stays behind"
