"""Readers checksum their weights all the time while versions flow, and processes are killed at random steps."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections import Counter

import pytest
import ray

import raycollect as col
from raycollect import errors
from raycollect.weights.directory import VersionDirectory
from tests.ray.weight_actors import Weights, replicas

FAULTS = ("trainer", "reader", "directory")


class Flow:
    """A trainer, readers in a group each, and what they saw."""

    def __init__(self, actors, name, readers, seed):
        self.start, self.name = actors, name
        self.random = random.Random(seed)
        self.value = 0
        self.seen = Counter()
        self.looks = []
        self.faults = Counter()
        self.publish()
        self.readers = [self.reader() for _ in range(readers)]

    def publish(self):
        (self.trainer,) = self.start(Weights, 1)
        self.pub = col.publish(replicas([self.trainer]), self.name)

    def reader(self):
        (actor,) = self.start(Weights, 1)
        return actor, col.subscribe(self.name, replicas([actor]))

    def step(self, fault=None):
        """Brings a version to all, while each reader looks; a process may die in the middle of it."""
        self.value += 1
        if fault is not None:
            self.kill_soon(fault)
        self.look()
        try:
            if self.value % 2:
                self.push()
            else:
                self.stream()
        except errors.VersionError:
            if fault is None:
                raise
        self.look()
        self.judge()
        if fault is not None:
            self.mend(fault)

    def push(self):
        """Puts a version, and updates all."""
        self.trainer.fill.remote(self.value)
        version = self.pub.put()
        self.number = version.number
        self.look()
        for receipt in self.pub.push([sub for _, sub in self.readers]):
            self.check(receipt, version)

    def stream(self):
        """The same, tensor by tensor."""
        stream = self.pub.stream([sub for _, sub in self.readers])
        self.number = stream.version.number
        stream.call("fill_each", self.value)
        self.look()
        for receipt in stream.commit():
            self.check(receipt, stream.version)

    def kill_soon(self, fault):
        """What is chosen ends on its own after some microseconds, whatever is under way then."""
        self.faults[fault] += 1
        after_s = self.random.uniform(0, 0.03)
        if fault == "directory":
            self.victim = threading.Timer(after_s, lambda: VersionDirectory(self.name)._delete("", by_prefix=True))
            self.victim.start()
        else:
            self.victim = self.trainer if fault == "trainer" else self.random.choice(self.readers)[0]
            self.victim.__ray_call__.remote(_end_after, after_s)

    def mend(self, fault):
        """Who is gone is replaced, the readers by latecomers."""
        if fault == "directory":
            self.victim.join()
            return
        with pytest.raises(ray.exceptions.RayActorError):
            while True:
                ray.get(self.victim.pid.remote())
        if fault == "trainer":
            self.publish()
            return
        self.readers = [one for one in self.readers if one[0] is not self.victim]
        assert all(sub.version().number == self.number for _, sub in self.readers), "a death cost others"
        self.readers.append(self.reader())

    def look(self):
        self.looks += [(actor.look.remote(sub), actor) for actor, sub in self.readers]

    def judge(self):
        for ref, _ in self.looks:
            try:
                values, _ = ray.get(ref)
            except ray.exceptions.RayActorError:
                continue
            assert len(values) == 1, f"a mixed version: {values}"
            self.seen[values[0]] += 1
        self.looks.clear()

    def check(self, receipt, version):
        assert receipt.version == version
        for one in receipt.ranks:
            assert one.digests == version.digests, "a false receipt"


def _end_after(actor, seconds):
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds + 1e-6)


def test_pain_5_readers_see_one_version_while_versions_flow(actors):
    flow = Flow(actors, f"flow/{os.getpid()}", 2, seed=1)
    for _ in range(2):  # put and stream
        flow.step()
    flow.step("reader")
    flow.step("trainer")
    flow.step("directory")
    flow.step()
    assert max(flow.seen) == flow.value
    assert set(flow.faults) == set(FAULTS)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_pain_5_a_thousand_versions_with_a_fault_at_every_twentieth(actors):
    flow = Flow(actors, f"flow/{os.getpid()}/full", 3, seed=2)
    for number in range(1000):
        flow.step(flow.random.choice(FAULTS) if number % 20 == 19 else None)
    flow.step()
    assert max(flow.seen) == flow.value
    assert min(flow.faults[fault] for fault in FAULTS) >= 10
