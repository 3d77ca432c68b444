"""Versions of weights over three hosts: who comes late, deltas, and a host that is cut off while it reads.

See `programs`.
"""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import time

import numpy as np
import ray

import raycollect as col
from raycollect.weights.directory import VersionDirectory
from tests.hosts.cluster import outside
from tests.hosts.faults import answer
from tests.ray.weight_actors import Weights

SHAPES = {f"layer{at}": (1 << 10, 1 << 11) for at in range(8)}
NBYTES = 8 * 4 << 21  # half a second of a link
LIMIT_S = 60.0


def on(host: int):
    """An actor with weights on a host, and a ref to them."""
    actor = Weights.options(resources={f"host{host}": 0.1}).remote()
    return actor, actor.make.remote(SHAPES)


def shows(actors, sub, version):
    """All elements of all actors are of a version, and the actors say so."""

    def inside(actor, sub):
        values = {float(one) for array in actor.weights.values() for one in (array.min(), array.max())}
        return values, sub.version()

    for found in ray.get([one.__ray_call__.remote(inside, sub) for one in actors]):
        assert found == ({float(version.number)}, version), found


def check(receipt, version, count):
    """Every rank has verified all of a version."""
    assert (receipt.version, receipt.lost, len(receipt.ranks)) == (version, (), count), receipt
    assert all(one.digests == version.digests for one in receipt.ranks)


def put(pub, trainer, number):
    """Puts a version whose elements are its number."""
    trainer.fill.remote(number)
    return pub.put(number)


def three(name):
    """A publisher on host 1, and a receiver group with a rank on each host."""
    trainer, ref = on(1)
    receivers, refs = zip(*(on(host) for host in (1, 2, 3)), strict=True)
    name = f"{name}/{os.getpid()}"
    return trainer, receivers, col.publish([ref], name), col.subscribe(name, list(refs))


def versions(_):
    """Updates on three hosts; one that comes late on host 3 is served by the receiver there, over no link."""
    trainer, receivers, pub, sub = three("versions")
    with pub, sub:
        for number in (1, 2):
            version = put(pub, trainer, number)
            check(sub.update(), version, 3)
            shows(receivers, sub, version)
        actor, ref = on(3)
        with col.subscribe(pub.name, [ref]) as late:
            before = outside("counters")
            check(late.update(), version, 1)
            sent = [new[0] - old[0] for old, new in zip(before, outside("counters"), strict=True)]
            assert max(sent) < NBYTES / 8, sent
            shows([actor], late, version)
        actor, ref = on(2)
        ray.kill(trainer)
        ray.kill(receivers[1])  # what is left is on other hosts
        with col.subscribe(pub.name, [ref]) as late:
            check(late.update(timeout_s=LIMIT_S), version, 1)
            shows([actor], late, version)


def versions_cut(_):
    """Host 3 is cut off for five seconds while it reads: the update heals, or an error names it; then all is well."""
    trainer, receivers, pub, sub = three("versions_cut")
    with pub, sub:
        first = put(pub, trainer, 1)
        check(sub.update(), first, 3)
        version = put(pub, trainer, 2)
        cut = threading.Thread(target=cut_while_it_reads, args=(outside("counters")[2][1],))
        cut.start()
        began_s = time.monotonic()
        told = ""
        try:
            receipt = sub.update(timeout_s=LIMIT_S)
        except col.errors.VersionError as exc:
            told = f"{type(exc).__name__}: {exc}"
        took_s = time.monotonic() - began_s
        cut.join()
        print(f"after {took_s:.1f} s: {told or [f'{one.seconds:.1f} s' for one in receipt.ranks]}")
        answer(receivers, "pid")
        if told:
            assert "Weights(" in told, "nobody is named"
        else:
            assert took_s > 5, "it was not cut"
            check(receipt, version, 3)
        shows(receivers, sub, first if told else version)
        version = put(pub, trainer, 3)
        check(sub.update(timeout_s=LIMIT_S), version, 3)
        shows(receivers, sub, version)


def cut_while_it_reads(received):
    """Cuts host 3 off when it has a quarter of a version, for five seconds."""
    until_s = time.monotonic() + LIMIT_S
    while outside("counters")[2][1] - received < NBYTES / 4:
        assert time.monotonic() < until_s
    outside("cut", 3)
    time.sleep(5)  # the fault itself
    outside("heal", 3)


def versions_delta(_):
    """Hosts that have the version before get what differs, bit by bit; all others, the whole."""
    for inplace in (False, True):
        trainer, ref = on(1)
        receivers, refs = zip(*(on(host) for host in (2, 3)), strict=True)
        actors = [trainer, *receivers]
        name = f"versions_delta/{inplace}/{os.getpid()}"
        with col.publish([ref], name) as pub, col.subscribe(name, list(refs), inplace=inplace) as sub:
            version = put(pub, trainer, 1)
            check(sub.update(), version, 2)
            for count, most in ((1, NBYTES / 8), (1, NBYTES / 8), (2, 4 * NBYTES), (1, NBYTES / 8)):
                for _ in range(count):
                    step(trainer)
                    version = pub.put()
                assert brings(sub, version, actors) < most
            ray.get(receivers[0].fill.remote(7, ["layer3"]))
            step(trainer)
            assert brings(sub, pub.put(), actors) < NBYTES / 2
            again = col.publish([ref], name)
            for most in (4 * NBYTES, NBYTES / 8):
                step(trainer)
                assert brings(sub, again.put(), actors) < most


def versions_shared(_):
    """A version crosses the link to a host once for all ranks there; without the rank that reads it, too."""
    trainer, ref = on(1)
    receivers, refs = zip(*(on(host) for host in (2, 2, 2, 3)), strict=True)
    name = f"versions_shared/{os.getpid()}"
    with col.publish([ref], name) as pub, col.subscribe(name, list(refs)) as sub:
        for most in (2.5 * NBYTES, NBYTES / 8):
            step(trainer)
            assert brings(sub, pub.put(), [trainer, *receivers]) < most
        ray.kill(receivers[0])
        step(trainer)
        version = pub.put()
        receipt = sub.update(timeout_s=LIMIT_S)
        assert (receipt.version, receipt.lost) == (version, (0,)), receipt
        assert len(set(ray.get([actor.__ray_call__.remote(bits) for actor in (trainer, *receivers[1:])]))) == 1


def step(trainer):
    """Changes some elements of each tensor, to NaNs and others."""

    def inside(actor):
        for at, array in enumerate(actor.weights.values()):
            words = array.reshape(-1).view(np.uint32)
            words[at::61] += 1
            words[at::997] = 0x7FC00000 + at

    ray.get(trainer.__ray_call__.remote(inside))


def brings(sub, version, actors):
    """Updates a receiver group to a version that has the bits of all actors; returns the bytes that host 1 has sent."""
    before = outside("counters")[0][0]
    check(sub.update(timeout_s=LIMIT_S), version, len(actors) - 1)
    sent = outside("counters")[0][0] - before
    assert len(set(ray.get([actor.__ray_call__.remote(bits) for actor in actors]))) == 1
    return sent


def bits(actor):
    """A digest of the bits of an actor's tensors."""
    return hashlib.sha1(b"".join(array.tobytes() for array in actor.weights.values())).digest()


@ray.remote(num_cpus=0)
class Publisher:
    """A publisher that is not closed."""

    def publish(self, name, actors, refs):
        self.actors = actors
        self.pub = col.publish(refs, name)
        return self.pub.put().number


def versions_raylet(_):
    """A host ends with a publisher and its actor: another one removes what is left, once Ray knows that it ended."""
    actor, ref = on(3)
    publisher = Publisher.options(resources={"host3": 0.1}).remote()
    assert ray.get(publisher.publish.remote("left", [actor], [ref])) == 1
    assert outside("signal", 3, "raylet", int(signal.SIGKILL)) == 1
    _, mine = on(1)
    until_s = time.monotonic() + LIMIT_S
    while VersionDirectory("left").latest() is not None:
        assert time.monotonic() < until_s
        with col.publish([mine], "other"):
            pass


PROGRAMS = {one.__name__: one for one in (versions, versions_cut, versions_delta, versions_shared, versions_raylet)}
