"""`timeline` and `summary` over real participants: what is in the file, who is left out; what Ray gets of counters."""

from __future__ import annotations

import json
import re
import urllib.request
from collections import Counter

import numpy as np
import pytest
import ray

import raycollect as col
from raycollect.errors import KernelError, MismatchError
from raycollect.member.runtime import this_runtime
from raycollect.observe.metrics import METRICS
from raycollect.observe.trace import CALL, CHECK, KERNEL, METHOD, PART, PLAN, RUN, STAGING
from tests.faults import inject
from tests.pure.observe.chrome_files import check
from tests.support.actors import Worker
from tests.support.waiting import stopped, wait_until

NBYTES = 10 * 4


@pytest.fixture(autouse=True)
def none_left():
    """No timeline goes on after a test, and none is remembered in the next."""
    yield
    timelines = this_runtime().timelines
    left, timelines.last = timelines.running, None
    if left is not None:
        left.end(1.0)
    assert left is None


def by_kind(process):
    return Counter(one.kind for one in process.spans)


def call_it(self):
    col.allreduce(self.buffer)


def test_a_timeline_has_all_that_its_processes_did(actors, tmp_path):
    workers = actors(Worker, 2)
    path = tmp_path / "t.json"
    with col.timeline(path) as line:
        col.declare_collective_group(workers)  # leased after the beginning
        refs = [one.get_buffer.remote() for one in workers]
        for _ in range(3):
            col.allreduce_refs(refs)
        with col.batch():
            col.broadcast_refs(refs)
            col.allreduce_refs(refs)
        with col.capture() as step:
            gradients = [step.call(one.get_buffer) for one in workers]
            col.allreduce_refs(gradients)
        with col.capture() as single:
            col.allreduce_refs(refs)
        for _ in range(5):
            step.run()
            single.run()
        ray.get([one.call.remote(call_it) for one in workers])
        running = col.summary()
    step.close()
    single.close()
    assert (line.missing, line.dropped) == ((), 0)

    document = json.loads(path.read_text())
    check(document)
    driver, *ranks = line.trace.processes
    assert (driver.name, by_kind(driver)) == ("driver", {PLAN: 4, RUN: 10})
    assert [one.ranks for one in ranks] == [(("default", 0),), (("default", 1),)]
    assert len({one.pid for one in line.trace.processes}) == 3
    for one in ranks:
        found = by_kind(one)
        # a run of the step with a method is a part, and so is its plan; that of the other is one; so is the call's
        assert (found[PART], found[CALL], found[METHOD]) == (4 + 2 * 5 + 5 + 1, 1, 1 + 5 + 1)
        assert found[CHECK] >= 4 + 10 + 1
        kernels = [each for each in one.spans if each.kind == KERNEL and each.label.calls]
        assert {(each.group, each.backend, each.label.rank, each.label.ranks) for each in kernels} == {
            ("default", "shm", one.ranks[0][1], 2)
        }
        assert all(line.trace.began_s <= each.begin_s <= each.end_s <= line.trace.ended_s + 1 for each in one.spans)
        assert "raycollect-capture" in set(one.threads.values())
    arrows = [one for one in document["traceEvents"] if one["ph"] == "f"]
    assert len(arrows) == 2 * 14, "from each plan and run to both ranks"

    rows = {row.op: row for row in line.summary().rows}
    assert (rows["allreduce"].calls, rows["broadcast"].calls, rows["batch"].calls) == (3 + 1 + 10 + 1, 1, 1)
    assert rows["allreduce"].nbytes == 15 * NBYTES
    assert rows["allreduce"].bus_bandwidth == rows["allreduce"].algorithm_bandwidth > 0
    assert rows["allreduce"].last_rank in (0, 1)
    assert 0 < rows["allreduce"].waiting < 1
    assert [row.op for row in running.rows] == [row.op for row in col.summary().rows]
    assert "default" in str(col.summary())
    assert "default" in line._repr_html_()


def test_waits_staging_and_failures_are_seen(actors):
    workers = actors(Worker, 2)
    col.declare_collective_group(workers)
    names = {"a": 3, "b": 5}

    def several(self):
        self.buffer = {name: np.ones(count, np.float32) for name, count in names.items()}
        return self.buffer

    refs = [one.make.remote(several) for one in workers]
    with col.timeline() as line:
        col.allreduce_refs(refs)  # small tensors travel packed
        sent = ray.put(np.ones(3))
        odd = [workers[0].get_buffer.remote(), workers[1].set_buffer.remote(sent), workers[1].get_buffer.remote()]
        with pytest.raises(MismatchError):
            col.allreduce_refs([odd[0], odd[2]])
        ray.get(workers[1].call.remote(inject.put, "after_kernel", "raise"))
        with pytest.raises(KernelError):
            col.allreduce_refs(refs)
    slices = [one for process in line.trace.processes[1:] for one in process.spans]
    assert {one.name for one in slices if one.kind == STAGING} == {"pack", "unpack"}
    plans = [(one.kind, one.error) for one in line.trace.processes[0].spans]
    assert plans[0] == (PLAN, "")
    assert plans[1] == (PLAN, "MismatchError")
    assert "MismatchError" in {one.error for one in slices if one.kind == CHECK}
    (row,) = line.summary().rows
    assert (row.op, row.calls, row.nbytes) == ("allreduce", 1, 4 * sum(names.values()))


def test_timeline_names_dead_and_stopped_members_within_its_timeout(actors):
    workers = actors(Worker, 3)
    group = col.declare_collective_group(workers)
    line = col.timeline(timeout_s=3.0)  # in which the third answers
    refs = [one.get_buffer.remote() for one in workers]
    col.allreduce_refs(refs)
    ray.kill(workers[0])
    assert wait_until(lambda: group.status().state == "broken")
    pid = group.status().members[1].pid
    with stopped(pid):
        line.stop()
    assert line.stop() is line
    dead, silent = sorted(line.missing, key=lambda one: "in time" in one)
    assert "has ended" in dead
    assert "did not answer in time" in silent
    assert f"pid {pid}" in silent
    driver, living = line.trace.processes
    assert (len(driver.spans), living.ranks) == (1, (("default", 2),))
    assert col.summary().missing == line.missing


def test_a_full_ring_says_what_it_has_lost(actors):
    """Of each participant it holds four runs: one that repeats is one entry, of which three spans are told."""
    workers = actors(Worker, 2)
    col.declare_collective_group(workers)
    refs = [one.get_buffer.remote() for one in workers]
    with col.timeline(limit=4) as line:
        for _ in range(8):
            col.allreduce_refs(refs)
    assert line.dropped > 0
    assert "were overwritten" in str(line.summary())
    assert [len(one.spans) for one in line.trace.processes] == [4, 12, 12]


def scraped():
    """What Prometheus would get of the counters, summed over the processes: (name, group, operation) -> value."""
    (node,) = ray.nodes()
    with urllib.request.urlopen(f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics") as page:
        lines = re.findall(r"^ray_(raycollect_\w+)\{(.*)\} (\S+)$", page.read().decode(), re.MULTILINE)
    totals = Counter()
    for name, tags, value in lines:
        tag = dict(re.findall(r'(\w+)="([^"]*)"', tags))
        totals[name, tag["group"], tag["operation"]] += float(value)
    return totals


def test_what_participants_count_is_at_the_endpoint_of_rays_metrics(actors):
    pytest.importorskip("prometheus_client", reason="Ray's agent exports metrics with ray[default] only")
    environment = {"RAYCOLLECT_METRICS": "1", "RAY_metrics_report_interval_ms": "1000"}
    workers = actors(Worker, 2, runtime_env={"env_vars": environment})
    col.declare_collective_group(workers, group_name="counted")
    refs = [one.get_buffer.remote() for one in workers]
    for _ in range(3):
        col.allreduce_refs(refs, group_name="counted")
    with col.capture() as step:
        col.allreduce_refs(refs, group_name="counted")
    step.run()
    step.close()
    ray.get([one.call.remote(lambda self: col.allreduce(self.buffer, "counted")) for one in workers])
    ray.get(workers[1].call.remote(inject.put, "after_kernel", "raise"))
    with pytest.raises(KernelError):
        col.broadcast_refs(refs, group_name="counted")

    def is_there():
        totals = scraped()
        calls, nbytes, seconds, waits = (
            totals[f"raycollect_{name}_total", "counted", "allreduce"]
            for name in ("calls", "bytes", "seconds", "wait_seconds")
        )
        failures = totals["raycollect_failures_total", "counted", "broadcast"]
        # The root of the broadcast may have run all of it.
        return (calls, nbytes) == (10, 10 * NBYTES) and min(seconds, waits) > 0 and failures in (1, 2)

    assert wait_until(is_there, 60.0)
    assert {name for name, *_ in scraped()} == set(METRICS)
