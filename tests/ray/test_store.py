"""POS: what participants keep, under which id, and for how long (P1, P5, P6)."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest
import ray

import raycollect as col
from raycollect.errors import InvalidArgumentError, StoreFullError, TensorFreedError, TensorLostError
from raycollect.observe import run_steps
from tests.support.actors import Kinds, KindsActor, Plain, Worker, held
from tests.support.waiting import has_ended, wait_until


@pytest.fixture
def kinds(actors):
    return actors(KindsActor, 1)[0]


def assert_key(ref):
    handle = ray.get(ref)
    assert isinstance(handle, col.Handle)
    assert handle.key == ref.binary()
    return handle


@pytest.mark.parametrize("options", [{}, {"max_concurrency": 3}], ids=["ordered", "threaded"])
def test_keys_are_the_ids_of_the_refs(actors, options):
    actor = actors(KindsActor, 1, **options)[0]
    one = actor.get_buffer.remote()
    assert_key(one)
    first, second = actor.two.remote()
    assert assert_key(first).shape == (3,)
    assert assert_key(second).shape == (4,)
    np.testing.assert_array_equal(col.get(second), np.ones(4))


def test_num_returns_given_by_the_caller(kinds):
    first, second = kinds.pair.options(num_returns=2).remote()
    assert assert_key(first).shape == (3,)
    assert assert_key(second).shape == (4,)
    whole = assert_key(kinds.pair.remote())
    assert whole.structure.kind == "tuple"
    tensor, text = kinds.mixed.remote()
    assert assert_key(tensor).shape == (3,)
    assert ray.get(text) == "text"


def test_large_values_of_several_holders_are_fetched_in_the_order_of_the_refs(actors):
    holders = actors(Worker, 3)
    refs = [
        one.make.remote(lambda self, at=at: np.full(1 << 18, float(at))) for at, one in enumerate([*holders, *holders])
    ]
    for at, found in enumerate(col.get(refs)):
        np.testing.assert_array_equal(found, np.full(1 << 18, float(at)))
    assert col.free(refs[4]) == 1
    with pytest.raises(TensorFreedError) as caught:
        col.get(refs)
    assert [one.ref for one in caught.value.violations] == [refs[4].hex()]


def many(self, count):
    return {f"model.layers.{at}.experts.{at % 64}.lora_A.weight": np.full(at % 3, at) for at in range(count)}


@pytest.mark.parametrize("count", [20_000, pytest.param(100_000, marks=pytest.mark.full)])
def test_values_of_very_many_tensors_are_fetched_by_the_driver_and_by_other_participants(actors, count):
    """Their description is longer than a message; those of 100,000 tensors are longer than a list in one."""
    holder, other = actors(Worker, 2)
    ref = holder.make.remote(many, count)
    expected = many(None, count)
    found = col.get(ref)
    assert list(found) == list(expected)
    assert all(map(np.array_equal, found.values(), expected.values()))
    total = other.call.remote(lambda self, value: (len(value), sum(map(np.sum, value.values()))), ref)
    assert ray.get(total) == (count, sum(map(np.sum, expected.values())))


@pytest.mark.parametrize("name", ["int", "mixed", "empty", "object", "text", "masked"])
def test_everything_else_goes_by_value(kinds, name):
    value = ray.get(kinds.value.remote(name))
    assert not isinstance(value, col.Handle)
    assert type(value) is type(Kinds().plain_values()[name])


def test_numpy_scalars_and_opted_out_methods_go_by_value(kinds):
    assert ray.get(kinds.scalar.remote()) == np.float32(3)
    assert type(ray.get(kinds.read.remote())) is np.ndarray


@pytest.mark.parametrize("name", ["array", "bool", "arena", "torch"])
def test_a_tensor_without_dimensions_goes_by_value(kinds, name):
    before = held(kinds)
    value = ray.get(kinds.scalar.remote(name))
    assert type(value).__name__ == ("Tensor" if name == "torch" else "ndarray")
    assert tuple(value.shape) == ()
    assert value == (0 if name == "bool" else 3)
    assert bool(value) == (name != "bool")
    assert held(kinds) == before
    assert col.get(kinds.scalar.remote(name)) == value


def test_zero_dimensional_tensors_beside_others(kinds):
    """Each return and item by itself; in a container it is one of its tensors, as in a state_dict."""
    loss, state = kinds.scalar_and_state.options(num_returns=2).remote()
    assert ray.get(loss) == 3
    assert assert_key(state).infos[1].shape == ()
    assert col.get(state)["num_batches_tracked"] == 3
    first, second = kinds.scalars.remote()
    assert ray.get(first) == 3
    assert_key(second)


class Halves(col.CollectiveParticipant):
    """Returns a number, and a tensor once it is told."""

    def __init__(self):
        self.told = threading.Event()

    @ray.method(num_returns=2)
    def make(self):
        yield 0.5
        assert self.told.wait(60)
        yield np.ones(3)

    def tell(self):
        self.told.set()

    def steps(self):
        return list(run_steps.steps().values())


def test_a_return_that_goes_by_value_says_nothing_of_the_others(actors):
    """A plan on the second one waits for it."""
    (actor,) = actors(ray.remote(Halves), 1, max_concurrency=3)
    loss, gradient = actor.make.remote()
    work = col.allreduce_refs([gradient], async_op=True)
    assert wait_until(lambda: ray.get(actor.steps.remote()) == ["waits for an operand's method"])
    assert not ray.wait([loss], timeout=0)[0]
    actor.tell.remote()
    work.wait(60)
    np.testing.assert_array_equal(col.get(gradient), np.ones(3))
    assert ray.get(loss) == 0.5


def test_only_the_call_that_ray_makes_is_kept(kinds):
    np.testing.assert_array_equal(col.get(kinds.inner.remote()), np.full(10, 2))
    assert ray.get(kinds.in_thread.remote()) == "ndarray"


def test_the_holder_gets_the_very_tensor_and_others_a_copy(kinds, actors):
    ref = kinds.get_buffer.remote()
    assert ray.get(kinds.is_my_buffer.remote(ref, again=ref))
    (other,) = actors(KindsActor, 1)
    assert not ray.get(other.is_my_buffer.remote(ref))
    np.testing.assert_array_equal(col.get(other.add.remote(ref)), np.full(10, 2))


def test_a_plain_actor_gets_the_handle(kinds, actors):
    (plain,) = actors(Plain, 1)
    total = ray.get(plain.call.remote(lambda self, handle: float(np.asarray(handle).sum()), kinds.get_buffer.remote()))
    assert total == 10.0


def test_a_copy_arrives_while_the_holder_is_busy(kinds, actors):
    """The holder's queue is not used: it may wait for the very method that wants the copy."""
    ref = kinds.get_buffer.remote()
    ray.wait([ref])
    (other,) = actors(KindsActor, 1)
    busy = kinds.call.remote(lambda self, peer, refs: ray.get(peer.is_my_buffer.remote(refs[0])), other, [ref])
    assert ray.get(busy, timeout=30) is False


def test_an_ordered_get_waits_for_the_actors_queue(kinds):
    ref = kinds.get_buffer.remote()
    ray.wait([ref])

    def slow(self):
        self.buffer[:] = 5

    kinds.call.remote(slow)
    assert col.get(ref, ordered=True)[0] == 5

    @ray.remote(num_cpus=0)
    def elsewhere(refs):
        return col.get(refs, ordered=True)

    with pytest.raises(InvalidArgumentError, match=r"never had a handle of Kinds\("):
        ray.get(elsewhere.remote([ref]))


def test_freed_when_the_last_ref_is_gone_and_not_before(kinds):
    before = held(kinds)
    ref = kinds.get_buffer.remote()
    ray.wait([ref])
    assert held(kinds) == before + 1
    copy = ray.get(ray.put([ref]))[0]
    del ref
    ray.get(kinds.call.remote(lambda self: None))
    assert col.get(copy).shape == (10,)
    del copy
    assert wait_until(lambda: held(kinds) == before), held(kinds)


def test_pending_results_of_a_dead_actor_are_lost(actors):
    """Its methods had not ended, so that there is no handle; where there is one, its holder is out of reach."""
    worker = KindsActor.remote()
    there = worker.get_buffer.remote()
    handle = ray.get(there)
    pid = ray.get(worker.call.remote(lambda self: os.getpid()))
    running, waiting = worker.call.remote(lambda self: threading.Event().wait()), worker.get_buffer.remote()
    ray.kill(worker)
    assert wait_until(lambda: has_ended(pid)), "as long as it lives its values can be fetched"
    for ref in (running, waiting, [waiting], there, handle):
        with pytest.raises(TensorLostError, match=r"Kinds\("):
            col.get(ref)
    with pytest.raises(TensorLostError):
        col.get(there, ordered=True)
    with pytest.raises(TensorLostError):
        col.free(waiting)
    plain = Plain.remote()
    ray.kill(plain)
    with pytest.raises(ray.exceptions.RayActorError):
        col.get(plain.get_buffer.remote())


def test_free_and_use_after_free(kinds):
    ref = kinds.get_buffer.remote()
    assert col.free(ref) == 1
    assert col.free([ref]) == 0
    with pytest.raises(TensorFreedError, match="freed"):
        col.get(ref)
    with pytest.raises(TensorFreedError):
        ray.get(kinds.is_my_buffer.remote(ref))
    other = kinds.get_buffer.remote()
    assert col.get(other).shape == (10,)


def test_a_handle_is_fetched_and_freed_like_its_ref(kinds):
    ref = kinds.get_buffer.remote()
    handle = ray.get(ref)
    np.testing.assert_array_equal(col.get([handle])[0], col.get(ref))
    assert col.free(handle) == 1
    with pytest.raises(TensorFreedError, match="freed"):
        col.get(handle)


def test_ray_values_pass_through_get(kinds):
    assert col.get(ray.put(3)) == 3
    assert col.get([ray.put(3), kinds.scalar.remote()]) == [3, np.float32(3)]


def test_store_is_bounded_without_reference_counts_of_ray(actors):
    """The feature is Ray's own and may go: then `free` and a limit take its place."""

    def forget(self):
        from raycollect.member import participant
        from raycollect.member.runtime import this_runtime
        from raycollect.ray_bridge import ray_refs

        assert this_runtime()._parts.get(participant.Participant) is None
        ray_refs.on_last_ref = lambda ref, callback: False
        participant.STORE_LIMIT_WITHOUT_TOKENS = 3

    (worker,) = actors(Blind, 1)
    ray.get(worker._forget.remote(forget))
    refs = [worker.get_buffer.remote() for _ in range(3)]
    ray.wait(refs, num_returns=3)
    with pytest.raises(StoreFullError, match="free"):
        ray.get(worker.get_buffer.remote())
    assert col.free(refs) == 3
    np.testing.assert_array_equal(col.get(worker.get_buffer.remote()), np.ones(10))


@ray.remote
class Blind(col.CollectiveParticipant):
    """Is no participant until `get_buffer` is called."""

    def _forget(self, function):
        function(self)

    def get_buffer(self):
        return np.ones(10, np.float32)


def test_full_store_fails_only_the_plan_of_the_output(actors):
    def forget(self):
        from raycollect.member import participant
        from raycollect.ray_bridge import ray_refs

        ray_refs.on_last_ref = lambda ref, callback: False
        participant.STORE_LIMIT_WITHOUT_TOKENS = 3

    workers = actors(Blind, 2)
    ray.get([worker._forget.remote(forget) for worker in workers])
    refs = [[worker.get_buffer.remote() for worker in workers] for _ in range(3)]
    col.declare_collective_group(workers)
    with pytest.raises(StoreFullError, match="free"):
        col.allreduce_refs(refs[0], inplace=False)
    ray.get([worker._forget.remote(lambda self: None) for worker in workers])  # on all ranks, before there is room
    col.free(refs[2])
    outs = col.allreduce_refs(refs[0], inplace=False)
    np.testing.assert_array_equal(col.get(outs[1]), np.full(10, 2))
