"""The example that predicts: its table, its plot, and that it goes by the costs of the system."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from examples import simulate
from raycollect.group import link_costs

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


def test_the_plot_is_written(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "plot.png"
    program = [sys.executable, str(ROOT / "examples/simulate.py"), "--output", str(path)]
    environ = {"PYTHONPATH": str(ROOT), "XDG_CONFIG_HOME": str(tmp_path), "HOME": str(tmp_path)}
    subprocess.run(program, env=environ, capture_output=True, timeout=60, check=True)
    assert path.read_bytes().startswith(b"\x89PNG")
