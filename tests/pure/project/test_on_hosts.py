"""The benchmarks over several hosts, as far as that needs none: what is skipped, what is drawn, what is kept."""

from __future__ import annotations

import json
from dataclasses import asdict
from importlib import import_module

import pytest

from benchmarks import on_hosts
from benchmarks.report import Report, Row, Skip, Traffic
from benchmarks.suite import Choice
from docs import results

TRAFFIC = Traffic(op="broadcast", ranks=6, nbytes=4, contender="a", sent_nbytes=9, least_nbytes=4)
ROW = Row(suite="hosts", op="o", ranks=6, nbytes=4, contender="a", median_ms=1.0, p90_ms=2.0, runs=3)


@pytest.mark.parametrize("suite", ["hosts", "uneven"])
def test_without_hosts_a_suite_is_skipped_and_says_why(monkeypatch: pytest.MonkeyPatch, suite: str) -> None:
    monkeypatch.setattr(on_hosts, "shaping_objection", lambda: "network namespaces need root")
    found = list(import_module(f"benchmarks.suites.{suite}").measure(Choice()))
    assert found == [Skip(suite=suite, contender="all", reason="network namespaces need root")]


def test_records_come_back_from_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hosts:
        def __init__(self, count: int) -> None:
            assert count == on_hosts.HOSTS

        def __enter__(self) -> Hosts:  # noqa: PYI034 - `Self` is newer than Python 3.10
            return self

        def __exit__(self, *exc: object) -> None:
            pass

        def driver(self, command: list[str], *, timeout_s: float) -> str:
            assert command[-2:] == ["hosts", json.dumps({"quick": True, "sizes": [4], "runs": 2})]
            told = [json.dumps([type(one).__name__, asdict(one)]) for one in (ROW, TRAFFIC)]
            return "\n".join(["something else", *(f"record {line}" for line in told)])

    monkeypatch.setattr(on_hosts, "shaping_objection", lambda: "")
    monkeypatch.setattr(on_hosts, "Cluster", Hosts)
    report = Report({})
    for record in on_hosts.measured("hosts", Choice(quick=True, sizes=(4,), runs=2)):
        report.add(record)
    assert (report.rows, report.traffic) == ([ROW], [TRAFFIC])


def test_shapes_are_always_the_same_and_their_links_differ() -> None:
    shapes = [on_hosts.Shape.drawn(number) for number in range(on_hosts.SHAPES)]
    assert shapes == [on_hosts.Shape.drawn(number) for number in range(on_hosts.SHAPES)]
    assert all(len(set(shape.rates)) > 1 for shape in shapes)
    assert {shape.op for shape in shapes} == {"allreduce", "broadcast", "allgather"}
    kept = results.read("uneven")["rows"]
    assert {(row["op"], row["nbytes"]) for row in kept} == {(str(shape), shape.nbytes) for shape in shapes}
