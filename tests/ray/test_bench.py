"""`raycollect bench` between actors."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from raycollect.cli import contenders, measuring
from raycollect.cli.commands import main
from raycollect.cli.options import OPERATIONS, WAYS
from raycollect.errors import ArenaFullError, KernelError

pytestmark = pytest.mark.usefixtures("tidy")

TINY = {"operation": "allreduce", "ranks": 3, "sizes": (100,), "backend": "auto", "runs": 1, "ways": WAYS}


def test_an_allreduce_is_timed_beside_others():
    pytest.importorskip("torch")
    args = ["bench", "--sizes", "4,4K", "--runs", "6", "--json"]
    result = CliRunner().invoke(main, args, catch_exceptions=False)
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    rows = report.pop("rows")
    assert set(report.pop("units")) == set(rows[0]) - {"way", "timed_in"}
    head = {"operation": "allreduce", "ranks": 2, "backend": "shm", "dtype": "float32", "runs": 6, "skipped": {}}
    assert report == head
    assert [(row["way"], row["nbytes"]) for row in rows] == [(way, nbytes) for way in WAYS for nbytes in (4, 4096)]
    for row in rows:
        assert 0 < row["median_s"] <= row["p90_s"]
        assert row["algorithm_bandwidth"] == pytest.approx(row["nbytes"] / row["median_s"])
        assert row["bus_bandwidth"] == pytest.approx(row["algorithm_bandwidth"])  # 2 (n - 1) / n


@pytest.mark.full
@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_operation_is_right_in_every_way(operation):
    whole = contenders.whole_of(operation, TINY["ranks"], 100)
    _, rows, skipped = measuring.measure(**{**TINY, "operation": operation})
    assert [(row.way, row.nbytes) for row in rows] == [(way, whole * 4) for way in WAYS if way not in skipped]
    assert set(skipped) <= {"ray.util.collective"}


def test_an_error_in_an_actor_is_raised_as_itself():
    with pytest.raises(ArenaFullError):
        measuring.measure(**{**TINY, "sizes": (1 << 50,), "ways": ("refs",)})


def test_a_wrong_result_is_an_error():
    refs = contenders.Refs("refs", "allreduce", 2)
    refs.prepare(100)
    refs.fill()
    with pytest.raises(KernelError):
        refs.check(1)
    refs.run(2)
    refs.check(2)
    refs.close()
