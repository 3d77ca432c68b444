"""Every program in examples/ runs, on small data, and its own checks hold."""

from __future__ import annotations

from importlib import import_module

import numpy as np
import pytest

from examples import digits, quickstart
from examples.documents import declarative, groups, point_to_point

pytestmark = pytest.mark.usefixtures("tidy")

WORKLOADS = {
    "weight_sync": ({"workers": 2, "rounds": 10, "widths": [8], "layers": 2}, 7, ["torch"]),
    "torch_ddp": ({"actors": 2, "steps": 75, "batch": 51, "widths": [64]}, 5, ["torch"]),  # 26 and 25 images of a batch
    "zero1": ({"actors": 3, "steps": 20, "widths": [17]}, 3, ["torch"]),  # parts of unequal size
    "pipeline": ({"stages": 3, "batches": 5, "rows": [8]}, 7, ["torch"]),  # the gloo of ray.util.collective
    "megatron": ({"tp": 2, "steps": 5, "width": 32}, 4, ["torch"]),
    "rllib": ({"runners": 2, "rounds": 3, "widths": [64]}, 4, ["torch", "gymnasium", "tree"]),
}
"""Module -> small arguments, how many ways it compares, and the libraries that it needs."""


@pytest.mark.timeout(400)
@pytest.mark.filterwarnings("ignore")  # RLlib's own
@pytest.mark.full
@pytest.mark.parametrize("name", WORKLOADS)
def test_the_checks_of_a_workload_hold(name):
    arguments, ways, libraries = WORKLOADS[name]
    for library in libraries:
        pytest.importorskip(library)
    report = import_module(f"examples.workloads.{name}").main(runs=1, **arguments)
    assert report.ok, report.text()
    assert {len(timing.ms) for timing in report.timings} == {ways}
    assert all(min(timing.ms.values()) > 0 for timing in report.timings)


def test_quickstart_leaves_the_sum_in_both_buffers():
    for buffer in quickstart.main():
        np.testing.assert_array_equal(buffer, np.full(10, 2, np.float32))


@pytest.mark.parametrize("actors", [pytest.param(2, marks=pytest.mark.full), 3])  # three shards are of unequal size
def test_digits_learn_the_same_in_actors_as_in_one_process(actors):
    result = digits.main(steps=60, actors=actors, runs=2)
    assert result.accuracy >= digits.MIN_ACCURACY
    assert result.ok


@pytest.mark.full
def test_the_documents_two_ways_to_form_a_group():
    for results in (groups.imperative(), groups.declarative()):
        assert len(results) == 2
        for result in results:
            np.testing.assert_array_equal(result, np.full(4, 2, np.float32))


@pytest.mark.full
def test_the_documents_send_arrives_and_its_anti_pattern_is_an_error():
    received, error = point_to_point.main()
    np.testing.assert_array_equal(received, np.full(10, 3, np.float32))
    assert "rank 1" in error
    assert "0.5 s" in error


def test_the_documents_declarative_call():
    for buffer in declarative.main():
        np.testing.assert_array_equal(buffer, np.full(10, 2, np.float32))


@pytest.mark.full
def test_the_timeline_of_the_page_shows_plans_checks_and_kernels(tmp_path):
    pytest.importorskip("matplotlib")
    from examples import timeline

    timeline.record(tmp_path / "timeline.json")
    assert timeline.draw(tmp_path / "timeline.json", str(tmp_path / "timeline.png")) >= 3 + 9 + 9 + 9
