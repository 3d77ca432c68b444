"""The example that predicts: its table, its plot, and that it goes by the costs of the system."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from examples import simulate
from raycollect.group import link_costs
from raycollect.group.link_costs import Measured
from raycollect.planner import Link

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def defaults(monkeypatch, tmp_path):
    monkeypatch.delenv(link_costs.ENVIRONMENT_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


def test_the_table_has_every_size_and_number_of_hosts(capsys):
    simulate.main([])
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split()[:3] == ["bytes", "hosts", "ranks"]
    asked = {(line[:8].strip(), int(line.split()[2])) for line in lines}
    assert len(asked) == len(simulate.SIZES) * len(simulate.HOSTS)
    assert all("native" in line for line in lines)


def test_more_bytes_take_longer_and_one_host_sends_nothing_between_hosts():
    found = list(simulate.rows())
    times = {}
    for nbytes, hosts, backend, one in found:
        times.setdefault((hosts, backend, one.name), []).append((nbytes, one.time_s))
        assert (one.nbytes_between == 0) == (hosts == 1)
    for series in times.values():
        assert series == sorted(series)
        assert series[0][1] < series[-1][1]


def test_it_goes_by_the_costs_that_are_named(monkeypatch, tmp_path):
    before = next(simulate.rows())[3].time_s
    path = tmp_path / "slow.json"
    link_costs.write(path, [Measured(place="inside", backend="shm", link=Link(latency_s=1.0, bandwidth=1e3))])
    monkeypatch.setenv(link_costs.ENVIRONMENT_VARIABLE, str(path))
    assert next(simulate.rows())[3].time_s > 100 * before


def test_the_plot_is_written(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "plot.png"
    program = [sys.executable, str(ROOT / "examples/simulate.py"), "--output", str(path)]
    environ = {"PYTHONPATH": str(ROOT), "XDG_CONFIG_HOME": str(tmp_path), "HOME": str(tmp_path)}
    subprocess.run(program, env=environ, capture_output=True, timeout=60, check=True)
    assert path.read_bytes().startswith(b"\x89PNG")
