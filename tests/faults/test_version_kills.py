"""Versions flow from a trainer to receiver groups, whose processes are killed and replaced again and again.

Each element of the weights is the number of its version, so that a mixed version shows. After each step, whatever it
killed, every look saw one version, no older than the group's last receipt; every receipt has the digests that were put
and is of what the methods see; and a process that takes a victim's place gets the newest version at once, from the
trainer or from any receiver.
"""

from __future__ import annotations

import os
import random
import signal

import pytest
import ray

import raycollect as col
from raycollect import errors
from tests.ray.weight_actors import Weights, replicas

WIDTHS = (1, 2)
"""The ranks of each receiver group: one shows a version in the call that verifies it, two need a second call."""


class Group:
    """A receiver group, and the value that its last receipt said it shows."""

    def __init__(self, name, actors):
        self.name, self.actors, self.shown = name, actors, 0
        self.refs = replicas(actors)
        self.sub = col.subscribe(name, self.refs)

    def replace(self, rank, actor):
        """Gives a rank to another actor; the others keep their weights."""
        self.actors[rank] = actor
        (self.refs[rank],) = replicas([actor])
        self.sub = col.subscribe(self.name, self.refs)


class Versions:
    """A trainer and its receiver groups, and the versions that it has put, by their values."""

    def __init__(self, start, name, seed):
        self.start, self.name, self.random = start, name, random.Random(seed)
        self.value = self.posted = 0
        self.versions = {}
        self.kills = {"trainer": 0, "receiver": 0}
        self.looks = []
        self.publish()
        self.groups = [Group(name, start(Weights, width)) for width in WIDTHS]

    def publish(self):
        (self.trainer,) = self.start(Weights, 1)
        self.publication = col.publish(replicas([self.trainer]), self.name)

    def step(self, victim=None):
        """Puts a version and pushes it; a victim ends by itself meanwhile, a random time after it hears so."""
        self.value += 1
        if victim is not None:
            self.kills[victim] += 1
            group = self.random.choice(self.groups)
            rank = self.random.randrange(len(group.actors))
            ending = self.trainer if victim == "trainer" else group.actors[rank]
            ending.__ray_call__.remote(_end_after, self.random.uniform(0, 0.02))
        self.look()
        try:
            self.put_and_push()
        except errors.VersionError:
            assert victim is not None
        self.look()
        self.judge(None if victim is None else ending)
        if victim == "trainer":
            _await_end(ending)
            if any(group.shown == self.posted for group in self.groups):
                self.serve_latecomer()
            self.publish()
        elif victim == "receiver":
            _await_end(ending)
            group.replace(rank, *self.start(Weights, 1))
            self.check(group, group.sub.update())
            self.judge(None)

    def put_and_push(self):
        self.trainer.fill.remote(self.value)
        version = self.publication.put()
        self.versions[self.value], self.posted = version, self.value
        self.look()
        try:
            receipts = self.publication.push([group.sub for group in self.groups])
        except errors.PushError as exc:
            for group, receipt in zip(self.groups, exc.receipts, strict=True):
                if receipt is not None:
                    self.check(group, receipt)
            raise
        for group, receipt in zip(self.groups, receipts, strict=True):
            self.check(group, receipt)

    def check(self, group, receipt):
        """Notes what a receipt says, which is the newest version that was put."""
        version = self.versions[self.posted]
        assert receipt.version == version
        assert len(receipt.ranks) + len(receipt.lost) == len(group.actors)
        assert all(rank.digests == version.digests for rank in receipt.ranks), "a false receipt"
        group.shown = self.posted
        self.look([group])

    def serve_latecomer(self):
        """Without a trainer, whoever comes gets the newest version from a receiver."""
        actors = self.start(Weights, 1)
        latecomer = Group(self.name, actors)
        with latecomer.sub:
            self.check(latecomer, latecomer.sub.update())
            self.judge(None)
        ray.kill(actors[0])

    def look(self, groups=None):
        """Makes each receiver look at its weights, which have to be those of the last receipt, or later ones."""
        for group in self.groups if groups is None else groups:
            self.looks += [(actor, group.shown, actor.look.remote(group.sub)) for actor in group.actors]

    def judge(self, ending):
        for actor, shown, ref in self.looks:
            try:
                values, number = ray.get(ref)
            except ray.exceptions.RayActorError:
                assert actor is ending, "a death cost others"
                continue
            assert len(values) == 1, f"a mixed version: {values}"
            value = int(values[0])
            assert shown <= value <= self.posted, "not the version before, nor the next"
            assert not value or number == self.versions[value].number
        self.looks.clear()


def _end_after(actor, seconds):
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds + 1e-6)


def _await_end(actor):
    with pytest.raises(ray.exceptions.RayActorError):
        while True:
            ray.get(actor.pid.remote())


@pytest.mark.parametrize(
    ("count", "every"),
    [(16, 4), pytest.param(1000, 10, marks=[pytest.mark.full, pytest.mark.timeout(1800)])],
)
def test_pain_5_no_kill_mixes_a_version_or_costs_one_that_was_shown(actors, count, every):
    versions = Versions(actors, f"kills/{count}/{os.getpid()}", seed=count)
    victims = 0
    for number in range(1, count + 1):
        is_fatal = number % every == 0
        victims += is_fatal
        versions.step(("receiver", "trainer")[victims % 2] if is_fatal else None)
    versions.step()
    assert versions.posted == versions.value
    assert {group.shown for group in versions.groups} == {versions.value}
    assert min(versions.kills.values()) == count // every // 2
