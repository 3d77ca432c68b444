"""The costs of links: the line through times, what is measured on this host, and the file that holds it."""

from __future__ import annotations

import math
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raycollect.cli import calibrate
from raycollect.cli.calibrate import SIZES, line_of
from raycollect.errors import InvalidArgumentError, KernelError
from raycollect.group import link_costs
from raycollect.group.link_costs import Costs, MeasuredLink
from raycollect.planner.topology import BETWEEN, INSIDE

SHM = MeasuredLink(place="inside", backend="shm", latency_s=1e-5, bandwidth=8e9, how="measured: so")
TCP = MeasuredLink(place="inside", backend="tcp", latency_s=3e-5, bandwidth=2e9)
NETWORK = MeasuredLink(place="between", backend="tcp", latency_s=5e-5, bandwidth=3e9)


def nowhere(folder):
    return {"XDG_CONFIG_HOME": str(folder)}


# ---------------------------------------------------------------------------------------------- the line
@given(latency=st.floats(1e-7, 1e-2), bandwidth=st.floats(1e6, 1e12), count=st.integers(2, len(SIZES)))
def test_times_on_a_line_give_that_line(latency, bandwidth, count):
    times = {n: latency + n / bandwidth for n in SIZES[: count - 1] + SIZES[-1:]}
    line = line_of("shm", times).link
    for n, time_s in times.items():
        assert line.latency_s + n / line.bandwidth == pytest.approx(time_s, rel=1e-3)


def test_a_latency_below_zero_becomes_none():
    line = line_of("shm", {1000: 1e-6, 2000: 2.5e-6})
    assert line.latency_s == 0
    assert line.bandwidth > 0


@pytest.mark.parametrize(
    ("times", "says"),
    [
        ({}, "no line through"),
        ({64: 1e-5}, "no line through"),
        ({64: 1e-5, 128: 0.0}, "no line through"),
        ({64: 1e-5, 128: math.inf}, "no line through"),
        ({64: math.nan, 128: 1e-5}, "no line through"),
        ({64: 1e-3, 1 << 20: 1e-5}, "do not grow"),
        ({64: 1e-5, 4096: 1e-2, 1 << 20: 1.1e-4}, "times off any line"),
    ],
)
def test_times_without_a_line_are_refused(times, says):
    with pytest.raises(KernelError, match=says):
        line_of("shm", times)


# ---------------------------------------------------------------------------------------------- measuring


@pytest.mark.parametrize("backend", calibrate.BACKENDS)
def test_a_link_of_this_host_is_measured(backend):
    link = calibrate.measure(backend, (64, 1 << 24))  # so far apart that other work can not hide it
    assert (link.place, link.backend) == ("inside", backend)
    assert 0 <= link.link.latency_s < 0.1
    assert 1e7 < link.link.bandwidth < 1e12
    assert link.how.startswith("measured: ")


def test_a_rank_that_fails_is_told_with_what_it_said():
    with pytest.raises(KernelError, match="UnknownBackendError") as caught:
        calibrate.measure("smoke_signals", (64, 128), timeout_s=30)
    assert caught.value.group_name == "smoke_signals"


def test_a_measurement_has_a_time_limit():
    with pytest.raises(KernelError, match=r"not done within 0\.01 s"):
        calibrate.measure("tcp", timeout_s=0.01)


# ---------------------------------------------------------------------------------------------- the file


def test_where_the_file_is(tmp_path, monkeypatch):
    assert link_costs.default_path({"RAYCOLLECT_COSTS": "/x/y.json", "XDG_CONFIG_HOME": "/z"}).as_posix() == "/x/y.json"
    assert link_costs.default_path({"XDG_CONFIG_HOME": "/z"}).as_posix() == "/z/raycollect/costs.json"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert link_costs.default_path({}) == tmp_path / ".config/raycollect/costs.json"


def test_without_a_file_the_defaults_stand(tmp_path):
    assert link_costs.current(nowhere(tmp_path)) == Costs(inside=INSIDE, between=BETWEEN)


@pytest.mark.parametrize(
    ("links", "inside", "between"),
    [
        ([SHM], SHM.link, BETWEEN),
        ([TCP], TCP.link, BETWEEN),
        ([TCP, SHM], SHM.link, BETWEEN),
        ([NETWORK], INSIDE, NETWORK.link),
        ([SHM, TCP, NETWORK], SHM.link, NETWORK.link),
    ],
)
def test_what_is_written_is_read(tmp_path, links, inside, between):
    path = tmp_path / "deep" / "costs.json"
    link_costs.write(path, links)
    costs = link_costs.read(path)
    assert (costs.inside, costs.between, costs.measured) == (inside, between, tuple(links))
    assert link_costs.current({"RAYCOLLECT_COSTS": str(path)}) == costs
    assert [file.name for file in path.parent.iterdir()] == ["costs.json"]


LINK = '{"place": "inside", "backend": "shm", "latency_s": 1e-6, "bandwidth": 1e9, "how": "so"}'


def _links(*links):
    return '{"version": 1, "links": [' + ", ".join(links) + "]}"


BROKEN = [
    "{",
    "[]",
    "null",
    '{"version": 2, "links": []}',
    '{"version": 1}',
    _links('{"place": "inside", "backend": "shm"}'),
    _links(LINK.replace("inside", "mars")),
    _links(LINK.replace("1e-6", "-1")),
    _links(LINK.replace("1e-6", '"fast"')),
    "[" * 100_000,
    '{"version": ' + "1" * 4000 + "}",
    '{"version": ' + "1" * 5000 + "}",
    '{"version": "' + "x" * 100_000 + '"}',
    _links(LINK.replace("1e9", "1" * 400)),
    _links(LINK.replace("inside", "x" * 100_000)),
    " " * (1 << 20) + "{}",
    b"\xff\xfe\x00",
]


@pytest.mark.parametrize("content", BROKEN, ids=range(len(BROKEN)))
def test_a_broken_file_that_was_named_is_refused_with_its_path(tmp_path, content):
    path = tmp_path / "costs.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InvalidArgumentError, match="RAYCOLLECT_COSTS") as caught:
        link_costs.current({"RAYCOLLECT_COSTS": str(path)})
    assert "not a file of costs" in str(caught.value)
    assert repr(str(path)) in str(caught.value)
    assert len(str(caught.value)) < 3000


def test_a_named_file_that_is_missing_is_refused(tmp_path):
    with pytest.raises(InvalidArgumentError, match="can't be read"):
        link_costs.current({"RAYCOLLECT_COSTS": str(tmp_path / "none.json")})


def test_a_broken_file_at_the_default_place_is_told_and_the_defaults_stand(tmp_path):
    path = tmp_path / "raycollect" / "costs.json"
    path.parent.mkdir()
    path.write_text("{")
    with pytest.warns(RuntimeWarning, match=r"costs\.json"):
        costs = link_costs.current(nowhere(tmp_path))
    assert costs == Costs()


def test_reading_costs_loads_no_array_library():
    import subprocess

    code = "import sys; from raycollect.group import link_costs; link_costs.current(); print('numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"
