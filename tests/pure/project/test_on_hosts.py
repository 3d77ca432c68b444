"""The benchmarks over several hosts, as far as that needs none: what is skipped, what is drawn, what is kept."""

from __future__ import annotations

import json
from dataclasses import asdict
from importlib import import_module

import pytest

from benchmarks import on_hosts
from benchmarks.report import Report, Row, Skip, Traffic
from benchmarks.suite import Choice

TRAFFIC = Traffic(op="broadcast", ranks=6, nbytes=4, contender="a", sent_nbytes=9, least_nbytes=4)
ROW = Row(suite="hosts", op="o", ranks=6, nbytes=4, contender="a", median_ms=1.0, p90_ms=2.0, runs=3)


def test_without_hosts_the_suite_is_skipped_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_hosts, "shaping_objection", lambda: "network namespaces need root")
    found = list(import_module("benchmarks.suites.hosts").measure(Choice()))
    assert found == [Skip(suite="hosts", contender="all", reason="network namespaces need root")]


def test_records_come_back_from_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hosts:
        def __init__(self, count: int) -> None:
            assert count == on_hosts.HOSTS

        def __enter__(self) -> Hosts:  # noqa: PYI034 - `Self` is newer than Python 3.10
            return self

        def __exit__(self, *exc: object) -> None:
            pass

        def driver(self, command: list[str], *, timeout_s: float) -> str:
            assert command[-1:] == [json.dumps({"quick": True, "sizes": [4], "runs": 2})]
            told = [json.dumps([type(one).__name__, asdict(one)]) for one in (ROW, TRAFFIC)]
            return "\n".join(["something else", *(f"record {line}" for line in told)])

    monkeypatch.setattr(on_hosts, "shaping_objection", lambda: "")
    monkeypatch.setattr(on_hosts, "Cluster", Hosts)
    report = Report({})
    for record in on_hosts.measured("hosts", Choice(quick=True, sizes=(4,), runs=2)):
        report.add(record)
    assert (report.rows, report.traffic) == ([ROW], [TRAFFIC])
