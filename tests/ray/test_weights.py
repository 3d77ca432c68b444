"""Versions of weights over Ray: whole or not there. The numbers of pains are those of docs/weight-sync.md."""

from __future__ import annotations

import os
import signal
import time

import numpy as np
import pytest
import ray

import raycollect as col
from raycollect import errors
from raycollect.ray_bridge import ray_cluster, ray_session
from raycollect.weights.directory import VersionDirectory
from tests.ray.weight_actors import SHAPES, Weights, looks, replicas, spoil
from tests.support.waiting import has_ended, stop, wait_until


@pytest.fixture
def stopped():
    """Stops processes, and lets them go on in the end."""
    pids = []

    def stop_actor(actor):
        pids.append(ray.get(actor.pid.remote()))
        stop(pids[-1])

    yield stop_actor
    for pid in pids:
        os.kill(pid, signal.SIGCONT)


def test_what_is_closed_says_so(actors, name):
    trainer, rollout = actors(Weights, 2)
    pub, sub = col.publish(replicas([trainer]), name), col.subscribe(name, replicas([rollout]))
    for _ in range(3):
        pub.put()
    with pytest.raises(errors.UnknownVersionError, match=f"it is not there; the newest is 3 of epoch {pub.epoch}\n"):
        sub.update(1)
    sub.close()
    pub.close()
    for call in (sub.update, lambda: pub.push([sub]), pub.put, pub.stream):
        with pytest.raises(errors.InvalidArgumentError, match="is closed, expected one that is open"):
            call()


def test_ranks_of_a_receiver_group_have_tensors_of_their_own(actors, name):
    """Two ranks wrote the same tensors, each its own part of the version."""
    trainer, actor = actors(Weights, 2)
    ref = actor.make.remote(SHAPES)
    with col.publish(replicas([trainer]), name) as pub, col.subscribe(name, [ref]) as sub:
        with pytest.raises(errors.AliasError, match="rank 1: tensor is in the memory of rank 0's"):
            col.subscribe(name, [ref, ref])
        pub.put()
        assert sub.update().version.number == 1  # it goes on, as nobody has taken its place


def test_versions_reach_all_receivers_with_receipts(actors, name):
    trainer, *rollouts = actors(Weights, 3)
    with col.publish(replicas([trainer]), name) as pub, col.subscribe(name, replicas(rollouts)) as sub:
        with pytest.raises(errors.UnknownVersionError):
            sub.update()
        assert looks(rollouts, sub) == [([0.0], 0)] * 2
        for number in (1, 2, 3):
            ray.get(trainer.fill.remote(number))
            version = pub.put()
            receipt = sub.update()
            assert receipt.version == version == sub.version()
            assert (receipt.lost, receipt.skipped, len(receipt.ranks)) == ((), 0, 2)
            assert all(one.digests == version.digests for one in receipt.ranks)
            assert receipt.nbytes == 2 * version.nbytes
            assert looks(rollouts, sub) == [([number], number)] * 2


def test_an_actor_may_be_of_the_publisher_and_of_a_receiver_group(actors, name):
    (both,) = actors(Weights, 1)
    published = replicas([both])
    ray.get(both.fill.remote(1))
    with col.publish(published, name) as pub, col.subscribe(name, replicas([both])) as sub:
        pub.put()
        assert looks([both], sub) == [([0.0], 0)]
        assert sub.update().nbytes == sub.version().nbytes
        assert looks([both], sub) == [([1.0], 1)]
        assert sub.update().nbytes == 0


def test_pain_1_bits_that_are_not_those_put_are_never_shown(actors, name):
    trainer, *rollouts = actors(Weights, 3)
    with col.publish(replicas([trainer]), name) as pub, col.subscribe(name, replicas(rollouts)) as sub:
        ray.get(trainer.fill.remote(1))
        pub.put()
        sub.update()
        ray.get(trainer.fill.remote(2))
        pub.put()
        ray.get(trainer.__ray_call__.remote(spoil))
        with pytest.raises(errors.VersionNotWholeError, match="other bits than were put") as raised:
            sub.update()
        assert raised.value.rank in (0, 1)
        assert raised.value.actor.startswith("Weights")
        assert looks(rollouts, sub) == [([1.0], 1)] * 2
        pub.put()
        assert sub.update().skipped == 1
        assert looks(rollouts, sub) == [([2.0], 3)] * 2


def test_pain_1_replicas_that_differ_are_not_put(actors, name):
    *trainers, rollout = actors(Weights, 3)
    with col.publish(replicas(trainers), name) as pub, col.subscribe(name, replicas([rollout])) as sub:
        ray.get(trainers[0].fill.remote(1, ["down"]))
        with pytest.raises(errors.VersionNotPutError, match=r"replicas have different bits in 1 part,.*'down'"):
            pub.put()
        ray.get(trainers[1].fill.remote(1, ["down"]))
        assert pub.put().number == 1
        assert sub.update().nbytes == sub.version().nbytes
        assert sub.update().nbytes == 0


def test_pain_1_a_retry_reads_what_is_missing(actors, name):
    trainer, rollout = actors(Weights, 2)
    with col.publish(replicas([trainer]), name) as pub, col.subscribe(name, replicas([rollout])) as sub:
        pub.put()
        sub.update()
        ray.get(trainer.fill.remote(7, ["bias"]))
        pub.put()
        assert sub.update().nbytes == 5 * 4
        assert sub.update().nbytes == 0
        np.testing.assert_equal(ray.get(rollout.held.remote())["bias"], 7)


def test_pain_2_a_dead_trainer_is_told_and_nothing_of_it_is_seen(actors, name):
    trainer, rollout = actors(Weights, 2)
    pub, sub = col.publish(replicas([trainer]), name), col.subscribe(name, replicas([rollout]))
    pub.put()
    pid = ray.get(trainer.pid.remote())
    ray.kill(trainer)
    assert wait_until(lambda: has_ended(pid)), "as long as it lives it serves its version"
    with pytest.raises(errors.VersionNotPutError, match="its process has ended"):
        pub.put()
    with pytest.raises(errors.VersionNotWholeError, match="parts are missing"):
        sub.update()
    assert looks([rollout], sub) == [([0.0], 0)]


def test_pain_2_a_silent_rank_is_named_and_its_group_shows_nothing(actors, name, stopped):
    trainer, *rollouts = actors(Weights, 3)
    with col.publish(replicas([trainer]), name) as pub, col.subscribe(name, replicas(rollouts)) as sub:
        other = col.subscribe(name, replicas(actors(Weights, 1)))
        ray.get(trainer.fill.remote(1))
        pub.put()
        stopped(rollouts[1])
        with pytest.raises(errors.PushError) as raised:
            pub.push([sub, other], timeout_s=3.0)
        late, none = raised.value.errors
        assert (type(late), none) == (errors.VersionTimeoutError, None)
        assert (late.missing, late.is_shown) == ((1,), False)
        assert [(one.rank, one.answers) for one in late.reports] == [(1, False)]
        assert [one and one.version.number for one in raised.value.receipts] == [None, 1]
        assert looks(rollouts[:1], sub) == [([0.0], 0)]
        assert other.version().number == 1  # nobody else pays for it
        other.close()


def test_pain_2_sides_that_disagree_are_told_at_once(actors, name):
    trainer, rollout = actors(Weights, 2)
    shapes = SHAPES | {"down": (6, 9), "more": (2,)}
    with col.publish(replicas([trainer]), name) as pub, col.subscribe(name, replicas([rollout], shapes)) as sub:
        ray.get(trainer.fill.remote(1))
        pub.put()
        with pytest.raises(errors.LayoutError) as raised:
            sub.update(timeout_s=600.0)
        assert {"'down'", "'more'"} <= set(str(raised.value).replace(":", " ").replace(",", " ").split())
        assert looks([rollout], sub) == [([0.0], 0)]


def test_pain_3_each_side_says_its_layout_once(actors, name):
    trainers, rollouts = actors(Weights, 2), actors(Weights, 2)
    whole = np.arange(48, dtype=np.float32).reshape(8, 6)
    src = {key: col.layout([8, 6], mesh={"tp": 2}, spec=("tp",)) for key in "qk"}

    def load(full, local, rank):  # an engine's own loader: fused, cut otherwise, transposed
        for at, key in enumerate("qk"):
            local["qk"][3 * at : 3 * at + 3] = full[key][:, 3 * rank : 3 * rank + 3].T

    local = {"qk": np.empty((6, 8), np.float32)}
    ranks = [
        col.record_layout(lambda full, local, r=rank: load(full, local, r), local, dict.fromkeys("qk", (8, 6)))
        for rank in range(2)
    ]
    pub = col.publish([one.make.remote(dict.fromkeys("qk", (4, 6))) for one in trainers], name, layout=src)
    sub = col.subscribe(name, [one.make.remote({"qk": (6, 8)}) for one in rollouts], layout=col.join_layouts(ranks))
    for rank, one in enumerate(trainers):
        ray.get(one.fill.remote(whole[4 * rank : 4 * rank + 4]))
    pub.put()
    receipt = sub.update()
    for rank, one in enumerate(ray.get([one.held.remote() for one in rollouts])):
        np.testing.assert_equal(one["qk"], np.tile(whole[:, 3 * rank : 3 * rank + 3].T, (2, 1)))
    assert receipt.nbytes == 2 * whole.nbytes  # each byte once
    with pytest.raises(errors.LayoutError, match="not published"):
        col.subscribe(name, [one.make.remote({"x": (6, 8)}) for one in rollouts]).update()
    pub.close()
    sub.close()


def test_pain_3_a_layout_that_comes_late_and_another_dtype(actors, name):
    trainer, early, late = actors(Weights, 3)
    with col.publish(replicas([trainer], {"w": (8, 6)}), name) as pub:
        ray.get(trainer.fill.remote(1 / 3))
        pub.put()  # when it was cut, nobody knew of columns
        columns = col.layout([8, 6], mesh={"tp": 2}, spec=(None, "tp"), dtype="float16")
        refs = [one.make.remote({"w": (8, 3)}, "float16") for one in (early, late)]
        with col.subscribe(name, refs, layout={"w": columns}) as sub:
            sub.update()
            for held in ray.get([one.held.remote() for one in (early, late)]):
                np.testing.assert_equal(held["w"], np.full((8, 3), 1 / 3, np.float16))
        with (
            col.subscribe(name, [early.make.remote({"w": (8, 6)}, "float16")]) as sub,
            pytest.raises(errors.LayoutError, match=r"dtype float16.*float32, or a layout that asks for it"),
        ):
            sub.update()  # rounding is nothing that nobody asked for
        assert ray.get(early.held.remote())["w"].max() == 0


def test_pain_4_a_latecomer_is_served_while_the_trainer_stands_still(actors, name, stopped):
    trainer, first, second, third = actors(Weights, 4)
    with col.publish(replicas([trainer]), name) as pub, col.subscribe(name, replicas([first])) as sub:
        ray.get(trainer.fill.remote(1))
        pub.put()
        sub.update()
        stopped(trainer)
        with col.subscribe(name, replicas([second])) as late:
            assert late.update(timeout_s=10.0).version.number == 1
            assert looks([second], late) == [([1.0], 1)]
            ray.kill(first)  # and it serves others itself
            with col.subscribe(name, replicas([third])) as later:
                assert later.update(timeout_s=20.0).version.number == 1
                assert looks([third], later) == [([1.0], 1)]


def test_pain_4_a_receiver_that_dies_costs_nobody_else_the_update(actors, name):
    trainer, *rollouts = actors(Weights, 3)
    with col.publish(replicas([trainer]), name) as pub, col.subscribe(name, replicas(rollouts)) as sub:
        ray.get(trainer.fill.remote(1))
        pub.put()
        ray.kill(rollouts[0])
        receipt = sub.update()
        assert (receipt.lost, [one.rank for one in receipt.ranks]) == ((0,), [1])
        assert looks(rollouts[1:], sub) == [([1.0], 1)]


@ray.remote(num_cpus=0)
class Driver:
    """Another process that drives receivers; the publisher's driver knows nothing of it."""

    def update(self, name, actors, refs):
        self.actors = actors
        self.sub = col.subscribe(name, refs)
        return self.sub.update().version.number

    def publish(self, name, actors, refs):
        self.actors = actors
        self.pub = col.publish(refs, name)
        return self.pub.put().number


def test_pain_4_receivers_of_another_driver(actors, name):
    trainer, rollout = actors(Weights, 2)
    with col.publish(replicas([trainer]), name) as pub:
        ray.get(trainer.fill.remote(1))
        pub.put()
        driver = Driver.remote()
        assert ray.get(driver.update.remote(name, [rollout], replicas([rollout]))) == 1
        assert ray.get(rollout.look.remote())[0] == [1.0]
        ray.kill(driver)


def end(*ending):
    """Ends actors, and waits until Ray says so to others."""
    workers = ray.get([one.__ray_call__.remote(lambda _: ray_session.worker_id()) for one in ending])
    for one in ending:
        ray.kill(one)
    until_s = time.monotonic() + 60
    while not ray_cluster.living_workers().isdisjoint(workers):
        assert time.monotonic() < until_s


def test_pain_4_what_a_dead_publisher_left_is_there_as_long_as_somebody_serves_it(actors, name):
    trainer, other, first, second = actors(Weights, 4)
    driver = Driver.remote()
    ray.get(trainer.fill.remote(1))
    assert ray.get(driver.publish.remote(name, [trainer], replicas([trainer]))) == 1
    sub = col.subscribe(name, replicas([first]))
    sub.update()
    end(driver, trainer)
    with col.publish(replicas([other]), f"{name}/other"):
        late = col.subscribe(name, replicas([second]))
        assert late.update().version.number == 1
        assert looks([second], late) == [([0.0], 1)]
    end(first, second)
    assert VersionDirectory(name)._names("")
    with col.publish(replicas([other]), f"{name}/another"):
        assert VersionDirectory(name)._names("") == ["epochs/00000001"]


def test_pain_5_a_busy_receiver_gets_the_latest_and_counts_the_others(actors, name):
    trainer, rollout = actors(Weights, 2)
    with col.publish(replicas([trainer]), name) as pub, col.subscribe(name, replicas([rollout])) as sub:
        for number in range(1, 6):
            ray.get(trainer.fill.remote(number))
            pub.put(10 * number)
            if number == 1:
                sub.update()
        receipt = sub.update()
        assert (receipt.version.number, receipt.skipped) == (50, 3)
        with pytest.raises(errors.UnknownVersionError):
            sub.update(20)
        with pytest.raises(errors.InvalidArgumentError, match="above 50"):
            pub.put(50)
        assert sub.update(40).version.number == 40
        assert looks([rollout], sub) == [([4.0], 40)]


def test_pain_5_who_was_replaced_puts_nothing(actors, name):
    first, second, rollout = actors(Weights, 3)
    old = col.publish(replicas([first]), name)
    with col.subscribe(name, replicas([rollout])) as sub:
        old.put()
        sub.update()
        with col.publish(replicas([second]), name) as new:
            with pytest.raises(errors.PublisherReplacedError):
                old.put()
            assert sub.update().version.epoch == old.epoch  # until the new one has put something
            ray.get(second.fill.remote(9))
            new.put()
            assert sub.update().version.epoch == new.epoch
            assert looks([rollout], sub) == [([9.0], 1)]
        with col.publish(replicas([first]), name) as newest:  # the one before has ended in good order
            newest.put()
            assert sub.update().version.epoch == newest.epoch > new.epoch > old.epoch
            assert looks([rollout], sub) == [([0.0], 1)]


def test_pain_5_another_process_takes_no_name_of_one_that_lives(actors, name):
    first, second = actors(Weights, 2)
    driver, (other,) = Driver.remote(), actors(Weights, 1)
    with col.publish(replicas([first]), name) as pub:
        pub.put()
        with pytest.raises(ray.exceptions.RayTaskError) as raised:
            ray.get(driver.publish.remote(name, [second], replicas([second])))
        assert (type(raised.value.cause), raised.value.cause.name) == (errors.PublicationExistsError, name)
        assert str(os.getpid()) in raised.value.cause.detail
        assert pub.put().number == 2
    assert ray.get(driver.publish.remote(name, [second], replicas([second]))) == 1  # the first one was closed
    with pytest.raises(errors.PublicationExistsError):
        col.publish(replicas([other]), name)
    end(driver)
    with col.publish(replicas([other]), name) as pub:
        assert pub.put().number == 1


def test_what_is_refused(actors, name):
    trainer, threaded = actors(Weights, 1)[0], actors(Weights, 1, max_concurrency=2)[0]
    with pytest.raises(errors.UnsupportedError, match="methods overlap"):
        col.publish([threaded.make.remote(SHAPES)], name)
    with pytest.raises(errors.LayoutError, match="24 elements"):
        col.publish(
            [trainer.make.remote({"w": (4, 6)})],
            name,
            layout={"w": col.Layout.of_regions([8, 6], [col.Region(rank=0, box=((0, 4), (0, 6)), at=(0, 0))])},
        )
    with pytest.raises(errors.LayoutError, match="a partial sum"):
        partial = col.layout([8, 6], mesh={"dp": 2}, partial="dp")
        pair = actors(Weights, 2)
        col.publish([one.make.remote({"w": (8, 6)}) for one in pair], name, layout={"w": partial})
    with col.publish(replicas([trainer]), name) as pub, col.subscribe(name, replicas(actors(Weights, 1))) as sub:
        for wrong in (np.ones(2), -1, 1.5):
            with pytest.raises(errors.InvalidArgumentError, match="version is"):
                sub.update(wrong)
        for call in (pub.push, pub.stream):
            with pytest.raises(errors.InvalidArgumentError, match="subscriptions"):
                call([sub, sub])
        for wrong in (sub, [1], None):
            with pytest.raises(errors.InvalidArgumentError, match="subscriptions is"):
                pub.stream(wrong)
        with pytest.raises(errors.InvalidArgumentError, match="names is"):
            pub.stream().part(["up"])
        assert pub.put().number == 1
        assert sub.update().version.number == 1
