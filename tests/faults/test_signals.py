"""Calls that real signals interrupt at random times: no value is wrong, and nothing is left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ray

ROOT = Path(__file__).parents[2]


def interrupted(backend: str, seed: int, calls: int) -> dict[str, Any]:
    """What a driver of its own has counted, as its handlers raise."""
    address = ray.get_runtime_context().gcs_address
    options = ["--address", address, "--backend", backend, "--seed", str(seed), "--calls", str(calls)]
    driver = subprocess.run(
        [sys.executable, "-m", "tests.faults.interrupted", *options],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert driver.returncode == 0, driver.stderr
    found: dict[str, Any] = json.loads(driver.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize(
    ("backend", "seed", "calls"),
    [
        ("shm", 0, 200),
        *[
            pytest.param(backend, seed, 2500, marks=[pytest.mark.full, pytest.mark.timeout(900)])
            for backend in ("shm", "tcp")
            for seed in range(1, 5)
        ],
    ],
)
def test_calls_under_signals(cluster: None, backend: str, seed: int, calls: int) -> None:
    found = interrupted(backend, seed, calls)
    assert found["failures"] == []
    assert len(found["ray"]) <= calls / 500
    interrupts = sum(kind.get("SIGINT", 0) + kind.get("SIGALRM", 0) for kind in found["calls"].values())
    assert interrupts > calls / 10
