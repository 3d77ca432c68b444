"""`raycollect status` and `doctor` beside a cluster that runs, as another process sees it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import ray

import raycollect as col
from raycollect import backends
from raycollect.cli import doctor
from raycollect.group import cluster_registry
from tests.support.actors import Plain, Worker

ROOT = Path(col.__file__).parents[1]


def _start(*args, **options):
    """A command in a process of its own, which knows the cluster by its address alone."""
    environ = {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-m", "raycollect", *args],
        cwd=ROOT,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def _run(*args):
    process = _start(*args)
    out, err = process.communicate(timeout=100)
    return process.returncode, out, err


@pytest.fixture
def reader(tidy):
    """What a stranger sees; in this process, which takes no second to start."""
    return cluster_registry.ClusterReader(ray.get_runtime_context().gcs_address)


def _settled():
    """Returns when the cluster has all that this process has posted so far."""
    cluster_registry._posting.submit(int).result(timeout=60)


def _named(reader, name):
    _settled()
    return [one for one in reader.groups() if one.name == name]


def test_a_declared_group_is_seen_by_another_process_until_it_ends(actors):
    workers = actors(Worker, 2)
    group = col.declare_collective_group(workers, group_name="seen")
    _settled()
    code, out, err = _run("status", "seen", "--json")
    assert code == 0, err
    [told] = json.loads(out)
    assert (told["name"], told["backend"], told["pid"]) == ("seen", "shm", os.getpid())
    assert told["summary"] == "all members alive"
    pids = ray.get([worker.call.remote(lambda self: os.getpid()) for worker in workers])
    assert [one["pid"] for one in told["members"]] == pids
    assert [one["actor_id"] for one in told["members"]] == [worker._actor_id.hex() for worker in workers]

    group.destroy()
    _settled()
    code, out, err = _run("status", "seen")
    assert (code, out) == (1, "")
    assert err.startswith("Error: group 'seen': no process of ")


def _declare_twice(self, members):
    col.declare_collective_group(members, group_name="twice")


def test_two_controllers_may_have_a_group_of_one_name_and_one_that_dies_leaves_nothing(actors, reader):
    mine, others = actors(Worker, 1), actors(Plain, 1)
    [driving] = actors(Plain, 1)
    col.declare_collective_group(mine, group_name="twice")
    ray.get(driving.call.remote(_declare_twice, others))
    while len(_named(reader, "twice")) < 2:  # polls for what another process does
        pass
    assert {one.actor_id for one in _named(reader, "twice")} == {"", driving._actor_id.hex()}

    ray.kill(driving)
    while len(_named(reader, "twice")) == 2:  # polls for what another process does
        pass
    [left] = _named(reader, "twice")
    assert left.pid == os.getpid()
    col.destroy_collective_group("twice")


def test_status_is_watched_until_ctrl_c(cluster):
    process = _start("status", "--watch", "0.1", "--json")
    lines = [process.stdout.readline() for _ in range(3)]
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "Interrupted.\n")
    assert all(isinstance(json.loads(line), list) for line in lines)


def test_doctor_has_what_is_required_and_sees_the_cluster(cluster):
    code, out, err = _run("doctor", "--json")
    assert code == 0, err
    said = json.loads(out)
    assert said["ok"] is True
    rows = {row["check"]: row for row in said["findings"]}
    assert [row["check"] for row in said["findings"] if row["section"] == "backends"] == list(backends.names())
    required = {check for check, row in rows.items() if row["required"]}
    assert required == {"memfd", *doctor.requirements()}
    found = rows["Ray cluster"]
    assert found["state"] == doctor.OK
    assert f" {ray.get_runtime_context().gcs_address}: 1 node, " in found["found"]
