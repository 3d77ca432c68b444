"""Puts, pushes, updates, streams and going back by several threads at random: no hang, no mixed value, no rest."""

from __future__ import annotations

import itertools
import os
import random
import threading
import time
from collections import Counter, deque

import pytest
import ray

import raycollect as col
from raycollect import errors
from raycollect.weights.directory import Directory
from tests.ray.weight_actors import Weights, held_by, replicas

LIMIT_S = 120.0
EXPECTED = (
    errors.UnknownVersionError,  # of one that was put three versions ago
    errors.VersionNotPutError,  # of a stream that another thread's put has overtaken
    errors.VersionNotWholeError,  # its publisher sealed others over it while it was read
    errors.VersionDirtyError,  # a method between an update in place that failed and the next
)
"""What may happen to an operation beside those of other threads; nothing else may."""


class Storm:
    """What the threads share, and what they do. Each element of the tensors is a number that no two puts share."""

    def __init__(self, trainer, groups, pub, until_s):
        self.trainer, self.groups, self.pub, self.until_s = trainer, groups, pub, until_s
        self.values = itertools.count(1)
        self.recent = deque(maxlen=2)
        self.seen = {}  # by version: the values that any actor saw with it
        self.done, self.wrong, self.lock = Counter(), [], threading.Lock()
        self.pause = threading.Event()

    def put(self, chance):
        if chance is not None:
            self.pause.wait(chance.uniform(0.0, 0.4))  # so that some streams come to their ends
        self.trainer.fill.remote(next(self.values))
        self.recent.append(self.pub.put(timeout_s=LIMIT_S))

    def stream(self, chance):
        subs = [sub for sub, _ in chance.sample(self.groups, chance.randrange(len(self.groups) + 1))]
        made = self.pub.stream(subs)
        made.call("fill_each", next(self.values))
        made.commit(timeout_s=LIMIT_S)
        self.recent.append(made.version)

    def push(self, chance):
        subs = [sub for sub, _ in chance.sample(self.groups, chance.randrange(1, len(self.groups) + 1))]
        self.pub.push(subs, timeout_s=LIMIT_S)

    def update(self, chance):
        chance.choice(self.groups)[0].update(timeout_s=LIMIT_S)

    def go_back(self, chance):
        if self.recent:
            chance.choice(self.groups)[0].update(chance.choice(list(self.recent)), timeout_s=LIMIT_S)

    def look(self, chance):
        sub, actors = chance.choice(self.groups)
        values, number = ray.get(chance.choice(actors).look.remote(sub), timeout=LIMIT_S)
        with self.lock:
            self.seen.setdefault(number, set()).add(tuple(values))

    def run(self, operation, seed):
        """Does one kind of operation again and again; any error that is not expected is kept."""
        chance = random.Random(seed)
        while time.monotonic() < self.until_s:
            found = "done"
            try:
                getattr(self, operation)(chance)
            except errors.PushError as exc:
                unexpected = [one for one in exc.errors if one is not None and not isinstance(one, EXPECTED)]
                found = "PushError"
                self.wrong += unexpected
            except Exception as exc:
                cause = getattr(exc, "cause", exc)
                found = type(cause).__name__
                if not isinstance(cause, EXPECTED) or operation == "update":  # of the latest, which is always there
                    self.wrong.append(exc)
            with self.lock:
                self.done[operation, found] += 1


@pytest.mark.parametrize("seconds", [4.0, pytest.param(60.0, marks=pytest.mark.full)])
def test_a_storm_of_operations_by_several_threads(actors, seconds):
    name = f"storm/{os.getpid()}/{seconds:g}"
    trainer, *rollouts = everyone = actors(Weights, 5)
    refs = replicas(everyone)
    ray.wait(refs, num_returns=len(refs))
    before = [held_by(one) for one in everyone]
    pub = col.publish(refs[:1], name)
    subs = [
        col.subscribe(name, refs[1:3]),
        col.subscribe(name, refs[3:4]),
        col.subscribe(name, refs[4:5], inplace=True),
    ]
    groups = list(zip(subs, (rollouts[:2], rollouts[2:3], rollouts[3:4]), strict=True))
    storm = Storm(trainer, groups, pub, time.monotonic() + seconds)
    storm.put(None)
    pub.push(subs)
    kinds = ("put", "put", "stream", "push", "update", "update", "go_back", "look", "look")
    threads = [threading.Thread(target=storm.run, args=(kind, seed), daemon=True) for seed, kind in enumerate(kinds)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(seconds + LIMIT_S)
    print(f"{seconds:g} s: {dict(sorted(storm.done.items()))}, {len(storm.seen)} versions seen")
    assert not any(one.is_alive() for one in threads)
    assert not storm.wrong, storm.wrong
    assert all(len(found) == 1 and len(next(iter(found))) == 1 for found in storm.seen.values()), storm.seen
    assert {kind for kind, _ in storm.done} == set(kinds)
    assert {"put", "update", "look"} <= {kind for kind, found in storm.done if found == "done"}
    trainer.fill.remote(last := next(storm.values))
    pub.put()
    assert [one.version for one in pub.push(subs)] == [subs[0].version()] * 3
    assert [ray.get(one.look.remote())[0] for one in rollouts] == [[float(last)]] * 4
    for one in subs:
        one.close()
    pub.close()
    assert [held_by(one) for one in everyone] == before
    assert {one.partition("/")[0] for one in Directory(name)._names("")} == {"epochs"}
