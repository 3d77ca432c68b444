"""What a process counts, and what of it reaches Ray's metrics."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import raycollect
from raycollect.observe import Counters
from raycollect.observe.counters import MOST_PAIRS, OTHER
from raycollect.observe.metrics import ENVIRONMENT_VARIABLE, EVERY_S, METRICS, TAGS, MetricsPublisher, publish

DOCS = Path(raycollect.__file__).parents[1] / "docs"


class Meters(dict[str, Any]):
    """Counters that only remember; those in `broken` raise once."""

    def __init__(self) -> None:
        super().__init__(dict.fromkeys(METRICS, self))
        self.given: list[tuple[str, float]] = []
        self.is_broken = False

    def __getitem__(self, name: str) -> Any:
        self._name = name
        return self

    def inc(self, value: float, tags: Mapping[str, str]) -> None:
        if self.is_broken:
            raise RuntimeError("no agent")
        assert tuple(tags) == TAGS
        assert value > 0, "Ray accepts no other"
        self.given.append((self._name, value))


class Process:
    """What a process counts, and who publishes it."""

    def __init__(self) -> None:
        self.is_connected = True
        self.meters = Meters()
        self.counters = Counters()
        self.publisher = MetricsPublisher(self.counters, lambda: self.meters, lambda: self.is_connected)
        self.wakes = 0
        self.counters.publish = self._wake
        self.tally = self.counters.of("g", "allreduce")

    def _wake(self) -> None:
        self.wakes += 1

    def run(self) -> None:
        """A run of one call, as the engine counts it."""
        self.tally.calls += 1
        self.tally.seconds += 0.5
        if self.counters.is_idle:
            self.counters.wake()


def test_only_what_changed_is_published_and_only_once() -> None:
    process = Process()
    process.run()
    assert process.publisher.look() == EVERY_S
    process.run()
    process.run()
    assert process.publisher.look() == EVERY_S
    assert process.publisher.look() == math.inf
    names = ["raycollect_calls_total", "raycollect_seconds_total"]
    assert process.meters.given == [*zip(names, (1, 0.5), strict=True), *zip(names, (2, 1.0), strict=True)]


def test_nobody_looks_while_nothing_changes_and_the_next_run_has_it_published() -> None:
    process = Process()
    for _ in range(5):
        process.run()
    assert process.wakes == 1
    assert process.publisher.look() == EVERY_S
    process.run()
    assert process.wakes == 1, "somebody looks again by itself"
    assert process.publisher.look() == EVERY_S
    assert process.publisher.look() == math.inf
    process.run()
    assert process.wakes == 2


def test_nothing_is_published_where_ray_does_not_run_and_everything_once_it_does() -> None:
    process = Process()
    process.is_connected = False
    process.run()
    process.publisher.wake()
    assert process.publisher.timer is None
    assert process.publisher.look() == math.inf
    process.run()
    assert (process.wakes, process.meters.given) == (1, [])
    process.is_connected = True
    process.counters.of("a group of the cluster", "allreduce")
    process.run()
    assert process.wakes == 2
    assert process.publisher.look() == EVERY_S
    assert ("raycollect_calls_total", 3) in process.meters.given


def test_what_ray_refuses_is_published_later() -> None:
    process = Process()
    process.run()
    process.meters.is_broken = True
    with pytest.raises(RuntimeError):
        process.publisher.look()
    process.meters.is_broken = False
    process.publisher.look()
    assert process.meters.given[0] == ("raycollect_calls_total", 1)


def test_the_number_of_pairs_is_bounded() -> None:
    counters = Counters()
    for at in range(3000):
        counters.of(f"g{at}", "allreduce").calls += 1
    assert counters.of("g0", "allreduce").calls == 1
    tallies = counters.tallies()
    assert len(tallies) == MOST_PAIRS
    assert sum(tally.calls for tally in tallies) == 3000
    assert [tally.calls for tally in tallies if (tally.group, tally.operation) == (OTHER, OTHER)] == [
        3000 - MOST_PAIRS + 1
    ]


def test_groups_of_one_name_are_counted_together() -> None:
    counters = Counters()
    publish(counters, lambda group_id: group_id.partition("/")[0])
    tally = counters.of("default/1", "allreduce")
    assert tally is counters.of("default/2", "allreduce")
    assert tally.group == "default"
    assert tally is not counters.of("default/1", "broadcast")


@pytest.mark.parametrize(("value", "is_on"), [("0", False), ("", False), ("1", True), (None, False)])
def test_the_environment_switches_it_on(monkeypatch: pytest.MonkeyPatch, value: str | None, is_on: bool) -> None:
    if value is None:
        monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)
    else:
        monkeypatch.setenv(ENVIRONMENT_VARIABLE, value)
    counters = Counters()
    idle = counters.publish
    publish(counters, str)
    assert (counters.publish is not idle) == is_on


def test_the_dashboard_queries_what_is_published() -> None:
    dashboard = json.loads((DOCS / "grafana" / "raycollect.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries += [variable["definition"] for variable in dashboard["templating"]["list"] if variable["type"] == "query"]
    queried = {name for query in queries for name in re.findall(r"\bray_\w+", query)}
    assert queried == {f"ray_{name}" for name in METRICS}
    labels = {
        label for query in queries for labels in re.findall(r"by \(([^)]*)\)", query) for label in labels.split(", ")
    }
    assert labels == set(TAGS)


def test_the_documentation_names_what_is_published() -> None:
    text = (DOCS / "timeline.md").read_text()
    assert set(re.findall(r"raycollect_\w+_total", text)) == set(METRICS)
