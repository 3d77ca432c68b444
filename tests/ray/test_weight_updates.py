"""Updates that fail, that change nothing, and that several threads or rounds make at once."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import ray

import raycollect as col
from raycollect import errors
from tests.ray.weight_actors import SHAPES, Weights, held_by, looks, replicas
from tests.support.actors import Gate, Worker
from tests.support.waiting import has_ended, stopped, wait_until


def end(actor):
    pid = ray.get(actor.pid.remote())
    ray.kill(actor)
    assert wait_until(lambda: has_ended(pid))


def test_a_version_that_several_rounds_show_is_held_once_and_can_be_gone_back_to(actors, name):
    trainer, rollout = actors(Weights, 2)
    with col.publish(replicas([trainer]), name) as pub, col.subscribe(name, replicas([rollout])) as sub:
        ray.get(trainer.fill.remote(1))
        first = pub.put()
        sub.update()
        held = held_by(rollout)
        for _ in range(2):
            assert pub.push([sub])[0].nbytes == 0
        assert held_by(rollout) == held
        ray.get(trainer.fill.remote(2))
        pub.put()
        sub.update()
        sub.update(first, timeout_s=20.0)
        assert looks([rollout], sub) == [([1.0], 1)]
        assert held_by(rollout) == held


def test_an_update_that_fails_leaves_the_version_before_shown_and_served(actors, name):
    """Rank 1 of the publisher is gone, so that half of the next version lands."""
    (first, second), (rollout, latecomer) = actors(Weights, 2), actors(Weights, 2)
    layout = {"w": col.layout([8, 6], mesh={"tp": 2}, spec=("tp",))}
    pub = col.publish([one.make.remote({"w": (4, 6)}) for one in (first, second)], name, layout=layout)
    sub = col.subscribe(name, replicas([rollout], {"w": (8, 6)}))
    ray.get([one.fill.remote(1) for one in (first, second)])
    before = pub.put()
    sub.update()
    ray.get([one.fill.remote(2) for one in (first, second)])
    pub.put()
    end(second)
    with pytest.raises(errors.VersionNotWholeError):
        sub.update()
    assert looks([rollout], sub) == [([1.0], 1)]
    end(first)  # from now on the receiver alone has the version before
    late = col.subscribe(name, replicas([latecomer], {"w": (8, 6)}))
    assert late.update(before).version.number == 1
    assert looks([latecomer], late) == [([1.0], 1)]
    assert sub.update(before).version.number == 1


def test_an_update_to_the_version_that_is_shown_writes_nothing(actors, name):
    torch = pytest.importorskip("torch")
    trainer, rollout = actors(Weights, 1)[0], actors(Worker, 1)[0]

    def make(self):
        self.weights = {key: torch.zeros(shape, requires_grad=True) for key, shape in SHAPES.items()}
        return self.weights

    def counts(self):
        return {key: one._version for key, one in self.weights.items()}

    def spoil_one(self):
        with torch.no_grad():
            self.weights["bias"][0] = 9.0

    with col.publish(replicas([trainer]), name) as pub, col.subscribe(name, [rollout.make.remote(make)]) as sub:
        ray.get(trainer.fill.remote(1))
        pub.put()
        sub.update()
        before = ray.get(rollout.call.remote(counts))
        for _ in range(2):
            assert sub.update().nbytes == 0
        pub.put()  # of the same bits
        assert sub.update().version.number == 2
        assert ray.get(rollout.call.remote(counts)) == before
        ray.get(rollout.call.remote(spoil_one))  # and what others have written is written again, and nothing else
        spoiled = ray.get(rollout.call.remote(counts))
        sub.update()
        after = ray.get(rollout.call.remote(counts))
        assert [key for key in after if after[key] != spoiled[key]] == ["bias"]
        assert ray.get(rollout.call.remote(lambda self: float(self.weights["bias"].detach().max()))) == 1.0


def test_what_one_group_of_several_lacks_is_told_beside_the_receipts_of_the_others(actors, name):
    trainer, *rollouts = actors(Weights, 3)
    with (
        col.publish(replicas([trainer]), name) as pub,
        col.subscribe(name, replicas(rollouts[:1])) as good,
        col.subscribe(name, taken := replicas(rollouts[1:])) as ended,
        col.subscribe(name, taken),  # which ends the one before
    ):
        ray.get(trainer.fill.remote(1))
        pub.put()
        with pytest.raises(errors.PushError) as raised:
            pub.push([ended, good])
        assert [type(one) for one in raised.value.errors] == [errors.VersionNotWholeError, type(None)]
        assert [one and one.version.number for one in raised.value.receipts] == [None, 1]
        assert looks(rollouts[:1], good) == [([1.0], 1)]
        stream = pub.stream([good, ended])
        with pytest.raises(errors.PushError) as raised:
            stream.commit()
        assert [one and one.version.number for one in raised.value.receipts] == [2, None]


def test_threads_that_share_a_subscription_take_turns(actors, name):
    trainer, rollout, gate = actors(Weights, 1)[0], actors(Worker, 1)[0], actors(Gate, 1, max_concurrency=2)[0]
    refs = [rollout.make.remote(lambda self: {key: np.zeros(shape, np.float32) for key, shape in SHAPES.items()})]
    with col.publish(replicas([trainer]), name) as pub, col.subscribe(name, refs) as sub:
        pub.put()
        busy = rollout.call.remote(lambda self, gate: ray.get(gate.wait.remote()), gate)
        receipts, has_begun = [], threading.Event()

        def update():
            has_begun.set()
            receipts.append(sub.update())

        thread = threading.Thread(target=update)
        thread.start()
        assert has_begun.wait(20)
        assert wait_until(lambda: not sub._turns._claims.wait(sub.name, 0.0))
        with pytest.raises(errors.VersionTimeoutError) as raised:
            sub.update(timeout_s=0.2)
        assert (raised.value.missing, raised.value.timeout_s) == ((), 0.2)
        ray.get([gate.open.remote(), busy])
        assert sub.update().version.number == 1
        thread.join(20)
        assert [one.version.number for one in receipts] == [1]


def test_without_the_clusters_store_put_and_update_end_in_time(actors, name):
    trainer, rollout = actors(Weights, 2)
    with col.publish(replicas([trainer]), name) as pub, col.subscribe(name, replicas([rollout])) as sub:
        pub.put()
        sub.update()
        with stopped(control_store()):
            assert pub.push([sub], timeout_s=1.0)[0].version.number == 1  # this process knows who has it
            for call in (pub.put, sub.update):
                began_s = time.monotonic()
                with pytest.raises(errors.VersionTimeoutError) as raised:
                    call(timeout_s=1.0)
                assert time.monotonic() - began_s < 10.0
                assert (raised.value.timeout_s, raised.value.missing) == (1.0, ())
        ray.get(trainer.fill.remote(3))
        assert pub.put().number > 1
        sub.update()
        assert looks([rollout], sub)[0][0] == [3.0]


def control_store():
    """The process id of the control store of this Ray."""
    (server,) = ray._private.worker._global_node.all_processes["gcs_server"]
    return server.process.pid
