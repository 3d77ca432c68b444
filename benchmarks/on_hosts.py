"""Measures on hosts in network namespaces (`tests.hosts`), from a driver on the first one; root only.

The suite `hosts` starts a cluster and this module in it: it prints its records, each a line of JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import ray

import raycollect as col
from benchmarks import names
from benchmarks.crew import Contestant, Plain
from benchmarks.report import Record, Row, Skip, Traffic
from benchmarks.suite import Choice, close, compare, entry, gather
from benchmarks.targets import MB
from benchmarks.theirs import RayGroup
from tests.hosts.cluster import Cluster, outside
from tests.hosts.namespaces import shaping_objection

HOSTS, PER_HOST = 3, 2
RANKS = HOSTS * PER_HOST
SIZES = (4, MB, 64 * MB)
EVEN = {"1 Gbit per s": "1gbit", "10 Gbit per s": "10gbit"}
"""The links, by what they are called."""

_LINE = "record "
_KINDS: dict[str, type[Row | Skip | Traffic]] = {one.__name__: one for one in (Row, Skip, Traffic)}
_LIMIT_S = 900.0


def measured(suite: str, choice: Choice) -> Iterator[Record]:
    """Runs the suite in a cluster of its own."""
    reason = shaping_objection()
    if reason:
        yield Skip(suite=suite, contender="all", reason=reason)
        return
    told = {"quick": choice.quick, "sizes": choice.sizes, "runs": choice.runs}
    with Cluster(HOSTS) as cluster:
        command = [sys.executable, "-m", "benchmarks.on_hosts", json.dumps(told)]
        for line in cluster.driver(command, timeout_s=_LIMIT_S).splitlines():
            if line.startswith(_LINE):
                kind, fields = json.loads(line.removeprefix(_LINE))
                yield _KINDS[kind](**fields)


# ------------------------------------------------------------------------------------------ on the first host


def placed(actor_class: type) -> list[Any]:
    """Starts `PER_HOST` actors on each host, by rank."""
    remote = ray.remote(num_cpus=0)(actor_class)
    hosts = [rank // PER_HOST + 1 for rank in range(RANKS)]
    return [remote.options(resources={f"host{host}": 0.1}).remote(rank) for rank, host in enumerate(hosts)]


class Placed(Contestant):
    """A contender whose actors are on the hosts; stands before the other base."""

    def start(self) -> list[Any]:
        """Starts the actors, by rank."""
        return placed(self.ACTOR)


class Refs(Placed):
    """A driver's call on refs to the actors' buffers; `more` are arguments of the declaration."""

    def __init__(self, name: str, op: str, **more: Any) -> None:
        super().__init__(name, RANKS)
        self._op = op
        self.declared = col.declare_collective_group(self.actors, group_name=f"{name} {self.group}", **more)
        self._refs: list[Any] = []

    def prepare(self, nbytes: int) -> None:
        """Makes the buffers, and takes refs to them."""
        super().prepare(nbytes)
        self._refs = [actor.get_array.remote(self.name) for actor in self.actors]
        self.fill()

    def operate(self) -> None:
        """One call."""
        call = col.broadcast_refs if self._op == "broadcast" else col.allreduce_refs
        call(self._refs, group_name=self.declared.name, timeout_s=120)

    def check(self, runs: int) -> None:
        """Raises unless the operands hold what they must."""
        if self._op == "allreduce":
            super().check(runs)
        else:
            self.must_hold(1.0)

    def close(self) -> None:
        """Ends the group."""
        self.declared.destroy()
        super().close()


class Theirs(Placed, RayGroup):
    """A method of each actor that calls `ray.util.collective`, over gloo."""

    ACTOR = Plain

    def __init__(self, name: str, op: str) -> None:
        super().__init__(name, RANKS)
        self._op = op

    def operate(self) -> None:
        """One call."""
        ray.get([actor.each.remote(self._op, self.name, self.group) for actor in self.actors])

    def check(self, runs: int) -> None:
        """Raises unless the operands hold what they must."""
        if self._op == "allreduce":
            super().check(runs)
        else:
            self.must_hold(1.0)


class Store(Placed):
    """A broadcast through the object store: the root puts, the others copy into their buffers."""

    ACTOR = Plain

    def operate(self) -> None:
        """One broadcast."""
        value = self.actors[0].read.remote(self.name)
        ray.get([actor.write.remote(self.name, value) for actor in self.actors[1:]])

    def check(self, runs: int) -> None:
        """Raises unless all have what the root has."""
        self.must_hold(1.0)


def _shape(rates: Sequence[str]) -> None:
    for host, rate in enumerate(rates, 1):
        outside("shape", host, rate)


def even(choice: Choice) -> Iterator[Record]:
    """Times of one operation, and what its busiest link sends, on links that are all alike."""
    for links, rate in EVEN.items():
        _shape([rate] * HOSTS)
        for op, least in (("allreduce", 2 * (HOSTS - 1) / HOSTS), ("broadcast", 1.0)):
            makers = [
                entry(names.TCP, Refs, op),
                entry(names.GLOO, Refs, op, backend="gloo"),
            ]
            makers.append(entry(names.RAY, Theirs, op))
            if op == "broadcast":
                makers.append(entry(names.STORE, Store, RANKS))
            contenders, skipped = gather("hosts", makers)
            yield from skipped
            for nbytes in choice.sizes or SIZES:
                runs = choice.runs_or(3, 40 if nbytes < MB else 16 if nbytes < 16 * MB else 4)
                what = {"op": f"{op}, {links}", "ranks": RANKS, "nbytes": nbytes}
                yield from compare(contenders, suite="hosts", runs=runs, **what)
                for one in contenders:
                    sent = _sent(one)
                    yield Traffic(contender=one.name, sent_nbytes=sent, least_nbytes=round(least * nbytes), **what)
            close(contenders)


def _sent(contender: Contestant) -> int:
    before = outside("counters")
    contender.run(1)
    return max(new[0] - old[0] for old, new in zip(before, outside("counters"), strict=True))


def main(told: str) -> None:
    """Measures, on the first host, and prints the records."""
    ray.init(log_to_driver=False, logging_level="warning")
    given = json.loads(told)
    choice = Choice(quick=given["quick"], sizes=tuple(given["sizes"]), runs=given["runs"])
    for record in even(choice):
        print(_LINE + json.dumps([type(record).__name__, asdict(record)]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
