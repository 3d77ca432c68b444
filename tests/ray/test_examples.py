"""Every program in examples/ runs, on small data, and its own checks hold."""

from __future__ import annotations

from importlib import import_module

import numpy as np
import pytest

from examples import digits, quickstart

pytestmark = pytest.mark.usefixtures("tidy")

WORKLOADS = {
    "weight_sync": ({"workers": 2, "rounds": 12}, ["torch"]),
    "torch_ddp": ({"actors": 2, "steps": 75, "batch": 51}, ["torch"]),  # 26 and 25 images of a batch
    "zero1": ({"actors": 3, "steps": 20, "width": 17}, ["torch"]),  # parts of unequal size
    "pipeline": ({"stages": 3, "batches": 5}, []),
    "rllib": ({"runners": 2, "rounds": 3}, ["torch", "gymnasium", "tree"]),
}
"""Module -> small arguments, and the libraries that it needs."""


@pytest.mark.timeout(400)
@pytest.mark.filterwarnings("ignore")  # RLlib's own
@pytest.mark.full
@pytest.mark.parametrize("name", WORKLOADS)
def test_the_checks_of_a_workload_hold(name):
    arguments, libraries = WORKLOADS[name]
    for library in libraries:
        pytest.importorskip(library)
    checks = import_module(f"examples.workloads.{name}").main(**arguments)
    assert checks
    assert [check for check, holds in checks.items() if not holds] == []


def test_quickstart_leaves_the_sum_in_both_buffers():
    for buffer in quickstart.main():
        np.testing.assert_array_equal(buffer, np.full(10, 2, np.float32))


@pytest.mark.parametrize("actors", [pytest.param(2, marks=pytest.mark.full), 3])  # three shards are of unequal size
def test_digits_learn_the_same_in_actors_as_in_one_process(actors):
    result = digits.main(steps=60, actors=actors)
    assert result.accuracy >= digits.MIN_ACCURACY
    assert result.ok
