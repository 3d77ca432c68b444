"""What groups over three hosts compute, what their links carry and what these are taken to cost; see `programs`."""

from __future__ import annotations

import functools
import os
import socket
import tempfile
from urllib.parse import urlsplit

import numpy as np
import pytest
import ray

import raycollect as col
from raycollect.core.model import RANK_ORDER
from raycollect.group import link_costs
from tests.hosts.cluster import outside
from tests.support.actors import Buffers, buffers

PER_HOST = 2
FAR = 1 << 21  # elements: enough that what else is on the links does not count

Worker = ray.remote(num_cpus=0)(Buffers)


def on(host: int):
    """A worker on a host."""
    return Worker.options(resources={f"host{host}": 0.1}).remote()


def keep(workers, values):
    """Refs to a value on each worker."""
    return [w.make.remote(copied, value) for w, value in zip(workers, values, strict=True)]


def copied(self, value):
    return [one.copy() for one in value] if isinstance(value, list) else value.copy()


def fill(workers, size, *, pieces=False):
    """Refs to different values on each worker; second, the values."""
    values = [np.random.default_rng(rank).uniform(0.5, 1.5, size).astype(np.float32) for rank in range(len(workers))]
    given = [list(value.reshape(len(workers), -1)) if pieces else value for value in values]
    return keep(workers, given), values


def by_host(parts):
    """The left fold over hosts of those inside each."""
    inside = [functools.reduce(np.add, parts[at : at + PER_HOST]) for at in range(0, len(parts), PER_HOST)]
    return functools.reduce(np.add, inside)


def same(refs, expected):
    """All refs hold that, bit for bit."""
    for found in col.get(refs):
        np.testing.assert_array_equal(found, expected)


# ------------------------------------------------------------------------------------------ what comes out


def bits(workers):
    """Every way of calling gives the same bits: the fold host by host; on request, that in rank order."""
    group = col.declare_collective_group(workers)
    assert group.backend == "tcp", group.backend
    for size in (100, 100_002):
        refs, values = fill(workers, size)
        total = by_host(values)
        same(col.allreduce_refs(refs, inplace=False), total)
        with col.batch():
            made = [col.allreduce_refs(refs, inplace=False) for _ in range(3)]
        for one in made:
            same(one, total)
        with col.capture() as step:
            step.returns(col.allreduce_refs(refs, inplace=False))
        for _ in range(4):
            for found in step.run():
                np.testing.assert_array_equal(found, total)
        step.close()
        found = ray.get([w.call.remote(member_sum, v) for w, v in zip(workers, values, strict=True)])
        for one in found:
            np.testing.assert_array_equal(one, total)
    (row,) = col.plan(col.allreduce_refs, refs).rows
    assert "over hosts" in row.bits, row.bits
    group.destroy()
    col.declare_collective_group(workers, pg_options=dict([RANK_ORDER]))
    same(col.allreduce_refs(refs, inplace=False), functools.reduce(np.add, values))
    (row,) = col.plan(col.allreduce_refs, refs).rows
    assert row.bits == "the left fold in rank order", row.bits
    col.destroy_collective_group()


def member_sum(self, value):
    found = value.copy()
    col.allreduce(found)
    return found


def minimum(workers):
    """No link carries more than 3 % above the fewest bytes possible."""
    col.declare_collective_group(workers)
    hosts, world, nbytes = 3, len(workers), 4 * FAR * 3
    refs, _ = fill(workers, 3 * FAR)
    pieces, _ = fill(workers, 3 * FAR, pieces=True)
    others, _ = fill(workers, 3 * FAR, pieces=True)
    scattered = col.reducescatter_refs(None, pieces)
    gathered = col.allgather_refs(None, scattered)
    least = {
        "allreduce": (lambda: col.allreduce_refs(refs), 2 * (hosts - 1) / hosts),
        "reduce": (lambda: col.reduce_refs(refs), 1),
        "broadcast": (lambda: col.broadcast_refs(refs), 1),
        "reducescatter": (lambda: col.reducescatter_refs(scattered, pieces), (hosts - 1) / hosts),
        "allgather": (lambda: col.allgather_refs(gathered, scattered), PER_HOST * (hosts - 1) / world),
        "alltoall": (lambda: col.alltoall_refs(others, pieces), PER_HOST * (world - PER_HOST) / world),
    }
    for name, (run, share) in least.items():
        sends_little(name, run, share * nbytes)
    col.destroy_collective_group()
    col.declare_collective_group(workers, backend="gloo")
    for name in ("broadcast", "allgather"):  # what is not left to the library
        run, share = least[name]
        sends_little(f"{name} on gloo", run, share * nbytes)
    col.destroy_collective_group()


def sends_little(name, run, least):
    run()  # so that nothing is formed or learned any more
    before = outside("counters")
    run()
    sent = [new[0] - old[0] for old, new in zip(before, outside("counters"), strict=True)]
    print(f"{name}: {[f'{one / 1e6:.2f}' for one in sent]} MB by host, the least is {least / 1e6:.2f}")
    assert max(sent) < 1.03 * least, name


def links(workers):
    """What the file of costs says of links between hosts is what the planner reckons with, and tells."""
    col.declare_collective_group(workers)
    refs = buffers(workers)
    assert _between(refs).source == "assumed"
    os.environ["RAYCOLLECT_COSTS"] = tempfile.mkstemp()[1]
    link_costs.write(os.environ["RAYCOLLECT_COSTS"], [link_costs.given(latency_s=1.0, bandwidth=2.0)])
    col.destroy_collective_group()
    col.declare_collective_group(workers)
    told = _between(refs)
    assert (told.latency_s, told.bandwidth, told.source) == (1.0, 2.0, "from the file")
    del os.environ["RAYCOLLECT_COSTS"]


def _between(refs):
    found = dict(col.plan(col.allreduce_refs, refs).links)["between"]
    print(found)
    return found


# ------------------------------------------------------------------------------------------ where members are


def places(workers):
    """The backend is chosen by where the members are, again whenever they change; a tensor is fetched from a host."""
    near, far = workers[:PER_HOST], workers[PER_HOST]
    group = col.declare_collective_group(near)
    assert group.backend == "shm", group.backend
    with pytest.raises(col.errors.BackendUnavailableError):
        col.declare_collective_group([near[0], far], group_name="far", backend="shm")
    assert group.add(far).backend == "tcp", group.backend
    same(col.allreduce_refs(keep(group.actors, [np.ones(3)] * 3)), np.full(3, 3.0))
    assert group.remove(PER_HOST).backend == "shm", group.backend
    same(made := col.allreduce_refs(keep(near, [np.ones(3)] * PER_HOST)), np.full(3, float(PER_HOST)))
    ray.get(far.set_buffer.remote(made[0]))
    np.testing.assert_array_equal(ray.get(far.read.remote()), np.full(3, float(PER_HOST)))
    group.destroy()


def views(workers):
    """An actor of another host finds the view of this process, and reads it through Ray alone."""
    col.declare_collective_group(workers)
    with col.live() as view:
        frame, *refused = ray.get(workers[-1].call.remote(look_at, view.link, ray.util.get_node_ip_address()))
        assert (frame["pid"], len(frame["groups"][0]["ranks"])) == (os.getpid(), len(workers))
        assert refused == [True, True]


def look_at(_self, link, host):
    """The frame of the only view of the cluster; whether connections to it from this host are refused."""
    (found,) = col.live_views()
    assert found.host == host
    port = urlsplit(link).port
    refused = []
    for address in (host, "127.0.0.1"):
        with socket.socket() as connection:
            refused.append(connection.connect_ex((address, port)) != 0)
    return found.frame(), *refused


PROGRAMS = {one.__name__: one for one in (bits, minimum, links, places, views)}
