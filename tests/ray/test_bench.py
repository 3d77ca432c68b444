"""`raycollect bench` between actors."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import ray
from click.testing import CliRunner

from raycollect.cli import bench
from raycollect.cli.bench import measuring, operations
from raycollect.cli.commands import main
from raycollect.errors import ArenaFullError, KernelError

WAYS = tuple(bench.WAYS)
TINY = bench.Settings(operation="allreduce", ranks=3, sizes=(100,), backend="auto", runs=1, ways=WAYS)


@pytest.mark.usefixtures("tidy")
def test_an_allreduce_is_timed_and_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "allreduce.svg"
    args = ["bench", "--sizes", "4,4K", "--runs", "6", "--json", "--plot", str(path)]
    result = CliRunner().invoke(main, args, catch_exceptions=False)
    assert result.exit_code == 0
    assert result.stderr.endswith(f"written to {path}\n"), "Ray may have warned before"
    told = json.loads(result.stdout)
    assert [told[name] for name in ("operation", "ranks", "backend", "dtype", "runs")] == [
        "allreduce",
        2,
        "shm",
        "float32",
        6,
    ]
    rows = told["rows"]
    assert [(row["way"], row["nbytes"], row["wrong"]) for row in rows] == [
        (way, nbytes, 0) for way in WAYS for nbytes in (4, 4096)
    ]
    for row in rows:
        assert 0 < row["median_s"] <= row["p90_s"] < 30
        assert row["algorithm_bandwidth"] == pytest.approx(row["nbytes"] / row["median_s"])
        assert row["bus_bandwidth"] == pytest.approx(row["algorithm_bandwidth"])  # 2 (n - 1) / n
    drawn = path.read_text()
    assert drawn.count("<svg ") == 1
    assert all(colour.lower() in drawn for colour, _ in bench.result._STYLES.values())


@pytest.fixture
def ranks(actors):
    """Three of its actors."""
    started = ray.remote(num_cpus=0)(operations.Rank)
    made = [started.remote(rank, TINY.ranks) for rank in range(TINY.ranks)]
    yield made
    for actor in made:
        ray.kill(actor)


@pytest.mark.full
def test_every_operation_is_right_in_every_way(ranks):
    for operation in bench.OPERATIONS:
        done = []
        settings = replace(TINY, operation=operation)
        result = measuring.between(ranks, settings, lambda done=done: done.append(1))
        assert len(done) == len(settings.wholes)
        assert [(row.way, row.nbytes) for row in result.rows] == [
            (way, whole * 4) for way in WAYS for whole in settings.wholes
        ]
        assert all(0 < row.median_s <= row.p90_s for row in result.rows)


def test_failures_are_raised_and_leave_no_group(ranks, monkeypatch):
    with pytest.raises(ArenaFullError, match=r"^the arena has no room for") as raised:
        measuring.between(ranks, replace(TINY, sizes=(1 << 50,)), list)
    assert type(raised.value) is ArenaFullError, "and not Ray's wrapper with its traceback"

    monkeypatch.setitem(bench.WAYS, "refs", lambda trial, count: [1.0] * count)  # does nothing
    with pytest.raises(KernelError, match=r"refs: 75 elements are not what numpy says, by rank: \[25, 25, 25\]"):
        measuring.between(ranks, replace(TINY, ways=("refs",)), list)
    measuring.between(ranks, replace(TINY, ways=("members",)), list)  # the group is gone, and its name free
