"""Groups over three hosts with links of their own: what comes out, what the links carry, what faults do.

What is not marked `full` is in `make test`; all of it is `make test-hosts`.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.hosts.cluster import ROOT, Cluster
from tests.hosts.namespaces import objection

pytestmark = pytest.mark.timeout(400)


TOGETHER = [
    pytest.param(
        names, marks=[pytest.mark.full] * ("bits" not in names and names != "link"), id=names.replace(" ", "-")
    )
    for at, names in enumerate(
        (
            "bits minimum links places views",  # every way of calling gives the same bits, and links carry the minimum
            "link",  # it is named, and its group works on once it is whole
            "host_heals link_heals one_way_heals",  # cuts of five seconds in a kernel are not noticed
            "link_in_plan one_way one_way_in_plan",
            "link_of_gloo",
            "host host_in_plan",  # it is back after 25 seconds
            "versions",
            "versions_cut",
            "versions_delta versions_shared",
            "silent",
            "paused",
        )
    )
]
"""Programs that share a cluster."""

ALONE = ["host_for_a_minute", "after", "raylet", "versions_raylet", "head"]
"""What takes Ray itself away, or, to Ray, a host: two such cuts in turn are one that lasts too long."""


@pytest.mark.parametrize("names", TOGETHER)
def test_programs_on_three_hosts(play, names):
    play(*names.split())


@pytest.mark.full
@pytest.mark.parametrize("name", ALONE)
def test_programs_that_need_a_cluster_of_their_own(name):
    if objection():
        pytest.skip(objection())
    with Cluster(3) as cluster:
        printed = cluster.driver([sys.executable, "-m", "tests.hosts.programs", name])
        assert f"{name}: done" in printed, printed


# ------------------------------------------------------------------------------------------ the tool


@pytest.fixture
def _possible() -> None:
    if objection():
        pytest.skip(objection())


_MAKE = """
import sys
from tests.hosts.namespaces import Namespaces
with Namespaces(2, rate="") as hosts:
    print(*hosts._inits, flush=True)
    sys.stdin.read()
"""


@pytest.mark.usefixtures("_possible")
def test_nothing_is_left_when_the_process_that_made_hosts_is_killed():
    maker = subprocess.Popen(
        [sys.executable, "-c", _MAKE], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert maker.stdout is not None
    inits = [int(one) for one in maker.stdout.readline().split()]
    assert len(inits) == 3
    maker.send_signal(signal.SIGKILL)
    maker.communicate()
    until_s = time.monotonic() + 30
    while any(Path(f"/proc/{one}/ns/net").exists() for one in inits):
        assert time.monotonic() < until_s, "a host is still there"
