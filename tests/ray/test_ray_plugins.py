"""raycollect in Ray's own registries: programs of `ray.util.collective` and of Ray Direct Transport name it."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import ray
from ray.experimental import set_target_for_ref
from ray.util import collective as ruc
from ray.util.collective.types import ReduceOp

import raycollect as col
from raycollect.member.participant import this_participant
from raycollect.ray_plugins.tensor_transport import TensorTransport
from tests.support.waiting import has_ended, wait_until

torch = pytest.importorskip("torch")

RANKS = 3
RIGHT = {ReduceOp.SUM: 6, ReduceOp.PRODUCT: 6, ReduceOp.MIN: 1, ReduceOp.MAX: 3}


@ray.remote(num_cpus=0)
class Rank:
    """A plain actor of a program that was written for Ray alone."""

    def __init__(self):
        col.register_with_ray()

    def join(self, rank, group="default"):
        ruc.init_collective_group(RANKS, rank, "raycollect", group)

    def leave(self, group="default"):
        ruc.destroy_collective_group(group)
        return ruc.is_group_initialized(group)

    def take(self, tensor):
        self.tensor = tensor

    def own(self, make, group="default"):
        self.tensor = make(ruc.get_rank(group) + 1)
        return ruc.get_rank(group), ruc.get_collective_group_size(group)

    def call(self, function, *args, **kwargs):
        getattr(ruc, function)(self.tensor, *args, **kwargs)
        return self.tensor

    def gather(self):
        into = [np.zeros_like(self.tensor) for _ in range(RANKS)]
        ruc.allgather(into, self.tensor)
        return into

    def scatter(self):
        ruc.reducescatter(self.tensor, [self.tensor + at for at in range(RANKS)])
        return self.tensor

    def exchange(self):
        rank = ruc.get_rank()
        if rank == 0:
            ruc.send(self.tensor, 2)
        elif rank == 2:
            ruc.recv(self.tensor, 0)
        ruc.barrier()
        return self.tensor


def array(value):
    return np.full(5, value, np.float32)


def matrix(value):
    return np.full((2, 3), value, np.float32)


def tensor(value):
    return torch.full((2, 3), float(value))


@pytest.fixture(scope="module")
def ranks(cluster):
    col.register_with_ray()
    actors = [Rank.remote() for _ in range(RANKS)]
    ray.get([actor.join.remote(rank) for rank, actor in enumerate(actors)])
    yield actors
    for actor in actors:
        ray.kill(actor)


def each(actors, method, *args, **kwargs):
    return ray.get([getattr(actor, method).remote(*args, **kwargs) for actor in actors])


def fill(actors, make=array):
    each(actors, "own", make)


def values(results):
    return [float(result.reshape(-1)[0]) for result in results]


@pytest.mark.parametrize("make", [array, tensor])
@pytest.mark.parametrize("op", ReduceOp)
def test_allreduce_of_every_op(ranks, make, op):
    fill(ranks, make)
    assert values(each(ranks, "call", "allreduce", op=op)) == [RIGHT[op]] * RANKS


@pytest.mark.parametrize("size", [5, 1_000_000], ids=["in the call", "in the object store"])
def test_an_argument_of_a_method_is_reduced_in_place(ranks, size):
    ray.get([actor.take.remote(np.full(size, rank, np.int64)) for rank, actor in enumerate(ranks)])
    results = each(ranks, "call", "broadcast", src_rank=1)
    assert values(results) == [1] * RANKS
    assert values(each(ranks, "call", "allreduce")) == [3] * RANKS


def test_arrays_and_tensors_meet_in_one_operation(ranks):
    ray.get([actor.own.remote(tensor if rank else matrix) for rank, actor in enumerate(ranks)])
    assert values(each(ranks, "call", "allreduce")) == [6] * RANKS


@pytest.mark.parametrize("root", range(RANKS))
def test_rooted_operations_of_every_root(ranks, root):
    fill(ranks)
    assert values(each(ranks, "call", "reduce", dst_rank=root))[root] == 6
    fill(ranks)
    assert values(each(ranks, "call", "broadcast", src_rank=root)) == [root + 1] * RANKS


def test_lists_and_pairs_of_ranks(ranks):
    fill(ranks)
    assert [values(one) for one in each(ranks, "gather")] == [[1, 2, 3]] * RANKS
    fill(ranks)
    assert values(each(ranks, "scatter")) == [6, 9, 12]
    fill(ranks)
    assert values(each(ranks, "exchange")) == [1, 2, 1]


def test_a_group_that_the_driver_creates(ranks):
    order = [2, 0, 1]
    ruc.create_collective_group(ranks, RANKS, order, "raycollect", "created")
    each(ranks, "own", array)
    assert values(each(ranks, "call", "allreduce", "created")) == [6] * RANKS
    assert each(ranks, "own", array, "created") == [(rank, RANKS) for rank in order]
    assert each(ranks, "leave", "created") == [False] * RANKS


def test_tensors_that_differ_are_refused_on_all_ranks(ranks):
    ray.get([actor.own.remote(array if rank else tensor) for rank, actor in enumerate(ranks)])
    for ref in [actor.call.remote("allreduce") for actor in ranks]:
        with pytest.raises(col.errors.MismatchError):
            ray.get(ref)
    fill(ranks)
    assert values(each(ranks, "call", "allreduce")) == [6] * RANKS


@pytest.fixture(scope="module")
def pair(cluster):
    col.register_with_ray()  # before Ray reads the decorator's argument

    class Moved:
        """An actor whose tensors Ray moves by this package."""

        @ray.method(tensor_transport="RAYCOLLECT")
        def make(self, shape, dtype):
            return {"a": torch.arange(np.prod(shape)).reshape(shape).to(dtype), "b": [torch.ones(3), "text"]}

        def take(self, value):
            return value["a"].tolist(), value["b"][0].tolist(), value["b"][1]

        def total(self, tensor):
            return float(tensor.sum())

        def pid(self):
            return os.getpid()

        def count(self):
            return this_participant().store.statistics().held

    actors = [ray.remote(num_cpus=0)(Moved).remote() for _ in range(3)]
    yield actors
    for actor in actors:
        ray.kill(actor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3), (257, 129)])
def test_an_actor_takes_what_another_has_made(pair, shape, dtype):
    expected = torch.arange(np.prod(shape)).reshape(shape).to(dtype).tolist()
    ref = pair[0].make.remote(shape, dtype)
    assert ray.get(pair[1].take.remote(ref)) == (expected, [1.0] * 3, "text")
    assert ray.get(ref)["a"].tolist() == expected  # the driver needs no group, either


def test_tensors_are_freed_with_their_ref(pair):
    ref = pair[0].make.remote((4,), torch.float32)
    ray.get(pair[1].take.remote(ref))
    wait_until(lambda: ray.get(pair[0].count.remote()) == 1)
    del ref
    wait_until(lambda: ray.get(pair[0].count.remote()) == 0)


def test_tensors_of_one_ref_are_stored_once(cluster):
    store = this_participant().store
    first, second = (TensorTransport().extract_tensor_transport_metadata("ref", [torch.ones(2)]) for _ in range(2))
    held = store.statistics().held
    TensorTransport().garbage_collect("ref", second, [])
    assert first.key == second.key
    assert store.statistics().held == held - 1


def test_the_driver_puts_a_tensor_that_an_actor_takes(pair):
    assert ray.get(pair[0].total.remote(ray.put(torch.ones(100_000), _tensor_transport="RAYCOLLECT"))) == 100_000


def test_a_tensor_arrives_in_memory_that_the_receiver_has(pair):
    ref, into = pair[0].make.remote((2, 3), torch.float32), [torch.zeros(2, 3), torch.zeros(3)]
    set_target_for_ref(ref, into)
    assert ray.get(ref)["a"] is into[0]
    assert into[0].tolist() == [[0, 1, 2], [3, 4, 5]]


def test_a_holder_that_has_died_is_an_error_of_the_receiver(pair):
    ref = pair[2].make.remote((4,), torch.float32)
    ray.get(pair[1].take.remote(ref))  # it is made
    pid = ray.get(pair[2].pid.remote())
    ray.kill(pair[2])
    wait_until(lambda: has_ended(pid))  # Ray calls it dead earlier, and until then it answers
    with pytest.raises(ray.exceptions.RayError):
        ray.get(pair[0].take.remote(ref), timeout=60)
    assert ray.get(pair[0].count.remote()) == 0  # it lives


def test_the_transport_moves_what_a_collective_has_written(pair):
    class Trainer(col.CollectiveParticipant):
        def __init__(self):
            self.weights = torch.ones(4)

        @ray.method(tensor_transport="RAYCOLLECT")
        def get_weights(self):
            return self.weights

    trainers = [ray.remote(num_cpus=0)(Trainer).remote() for _ in range(2)]
    refs = [trainer.get_weights.remote() for trainer in trainers]
    assert ray.get(pair[0].total.remote(refs[0])) == 4
    col.allreduce_refs(refs)
    assert ray.get(pair[1].total.remote(refs[0])) == 8


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # its import fails, as where it is not installed
import numpy as np, ray, raycollect
from ray.util import collective

@ray.remote(num_cpus=0)
class Rank:
    def __init__(self, rank):
        sys.modules["torch"] = None
        raycollect.register_with_ray()
        collective.init_collective_group(2, rank, backend="raycollect")

    def sum(self):
        array = np.ones(3)
        collective.allreduce(array)
        return array.tolist()

raycollect.register_with_ray()
ray.init(address=sys.argv[1], log_to_driver=False)
print(ray.get([rank.sum.remote() for rank in [Rank.remote(rank) for rank in range(2)]]))
"""


def test_the_backend_needs_no_torch(cluster):
    program = [sys.executable, "-c", WITHOUT_TORCH, ray.get_runtime_context().gcs_address]
    run = subprocess.run(program, check=True, capture_output=True, text=True)
    assert run.stdout.splitlines()[-1] == str([[2.0] * 3] * 2)  # Ray may print something before
