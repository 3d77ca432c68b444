"""`raycollect bench` between actors."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

import raycollect as col
from raycollect.cli import measuring
from raycollect.cli.bench import OPERATIONS, WAYS
from raycollect.cli.commands import main
from raycollect.errors import ArenaFullError, KernelError

TINY = {"operation": "allreduce", "ranks": 3, "sizes": (100,), "backend": "auto", "runs": 1, "ways": WAYS}


@pytest.mark.usefixtures("tidy")
def test_an_allreduce_is_timed():
    args = ["bench", "--sizes", "4,4K", "--runs", "6", "--json"]
    result = CliRunner().invoke(main, args, catch_exceptions=False)
    assert result.exit_code == 0
    told = json.loads(result.stdout)
    rows = told.pop("rows")
    assert told == {"operation": "allreduce", "ranks": 2, "backend": "shm", "dtype": "float32", "runs": 6}
    assert [(row["way"], row["nbytes"]) for row in rows] == [(way, nbytes) for way in WAYS for nbytes in (4, 4096)]
    for row in rows:
        assert 0 < row["median_s"] <= row["p90_s"] < 30
        assert row["algorithm_bandwidth"] == pytest.approx(row["nbytes"] / row["median_s"])
        assert row["bus_bandwidth"] == pytest.approx(row["algorithm_bandwidth"])  # 2 (n - 1) / n


@pytest.mark.full
@pytest.mark.usefixtures("tidy")
@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_operation_is_right_in_every_way(operation):
    whole = measuring.whole_of(operation, TINY["ranks"], 100)
    _, rows = measuring.measure(**{**TINY, "operation": operation})
    assert [(row.way, row.nbytes) for row in rows] == [(way, whole * 4) for way in WAYS]
    assert all(0 < row.median_s <= row.p90_s for row in rows)


@pytest.mark.usefixtures("tidy")
def test_failures_are_raised_and_leave_no_group(monkeypatch):
    with pytest.raises(ArenaFullError, match=r"^the arena has no room for") as raised:
        measuring.measure(**{**TINY, "sizes": (1 << 50,)})
    assert type(raised.value) is ArenaFullError, "and not Ray's wrapper with its traceback"

    monkeypatch.setattr(col, "allreduce_refs", lambda given, group: col.barrier(group))  # which moves nothing
    with pytest.raises(KernelError, match=r"refs: 75 elements are wrong, by rank: \[25, 25, 25\]"):
        measuring.measure(**{**TINY, "ways": ("refs",)})
