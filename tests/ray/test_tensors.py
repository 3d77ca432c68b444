"""Tensors of any library, kept and worked on where they lie."""

from __future__ import annotations

import numpy as np
import pytest
import ray

import raycollect as col
from raycollect import errors
from tests.support.actors import Worker
from tests.support.checks import refused

torch = pytest.importorskip("torch")


class Borrowed:
    """Has DLPack or the array interface, and nothing else."""

    def __init__(self, array, protocol):
        self.array = array
        if protocol == "dlpack":
            self.__class__ = WithDLPack
        else:
            self.__array_interface__ = array.__array_interface__


class WithDLPack(Borrowed):
    def __dlpack__(self, **arguments):
        return self.array.__dlpack__(**arguments)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


@pytest.fixture(params=["shm", pytest.param("gloo", marks=pytest.mark.full)])
def pair(request, actors):
    """Two actors in a declared group."""
    workers = actors(Worker, 2)
    col.declare_collective_group(workers, backend=request.param)
    return workers


def make(pair, function):
    """Keeps `function(self, rank)` in each actor."""
    return [actor.make.remote(function, rank) for rank, actor in enumerate(pair)]


def test_torch_tensors_are_reduced_where_they_are(pair):
    def put(self, rank):
        self.tensor = torch.full((2, 3), rank + 1.5)
        return self.tensor

    refs = make(pair, put)
    assert "float32[2, 3]" in repr(ray.get(refs[0]))
    col.allreduce_refs(refs)
    for actor in pair:
        assert torch.equal(ray.get(actor.call.remote(lambda self: self.tensor.clone())), torch.full((2, 3), 4.0))
    found = col.get(refs[1])
    assert torch.is_tensor(found)
    assert torch.equal(found, torch.full((2, 3), 4.0))
    (copied, made) = col.allreduce_refs(refs, inplace=False)
    assert torch.is_tensor(col.get(copied))
    assert ray.get(pair[1].call.remote(lambda self, value: torch.is_tensor(value), made))
    lists = col.get(col.allgather_refs(None, refs)[0])
    assert all(torch.equal(one, found) for one in lists)
    assert torch.is_tensor(col.get(col.send_ref(refs[0], pair[1])))


def test_a_models_state_is_one_operand(pair):
    def put(self, rank):
        torch.manual_seed(rank)
        self.model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
        self.model(torch.ones(4, 3) * rank)
        return self.model.state_dict()

    refs = make(pair, put)
    before = col.get(refs[1])
    assert before["1.num_batches_tracked"].dtype == torch.int64
    col.broadcast_refs(refs, src_rank=1)
    for actor in pair:
        state = ray.get(actor.call.remote(lambda self: {k: v.clone() for k, v in self.model.state_dict().items()}))
        assert list(state) == list(before)
        assert all(torch.equal(state[name], before[name]) for name in before)


def test_parameters_and_their_gradients(pair):
    def put(self, rank):
        self.parameter = torch.nn.Parameter(torch.full((3,), float(rank)))
        (self.parameter * (rank + 1)).sum().backward()
        return [self.parameter, self.parameter.grad]

    refs = make(pair, put)
    col.allreduce_refs(refs, op="avg")
    for actor in pair:
        value, grad, needed = ray.get(
            actor.call.remote(lambda self: (self.parameter.data, self.parameter.grad, self.parameter.requires_grad))
        )
        assert torch.equal(value, torch.full((3,), 0.5))
        assert torch.equal(grad, torch.full((3,), 1.5))
        assert needed


@pytest.mark.parametrize("protocol", ["dlpack", "interface"])
def test_any_object_with_a_memory_protocol_is_a_tensor(pair, protocol):
    def put(self, rank):
        self.array = np.full((2, 2), rank + 1.0)
        return Borrowed(self.array, protocol)

    refs = make(pair, put)
    col.allreduce_refs(refs)
    for actor in pair:
        np.testing.assert_array_equal(ray.get(actor.call.remote(lambda self: self.array)), np.full((2, 2), 3.0))
    np.testing.assert_array_equal(col.get(refs[0]), np.full((2, 2), 3.0))


def test_unsupported_tensors_go_by_value(pair):
    ref = pair[0].make.remote(lambda self: torch.zeros(3).to_sparse())
    with refused(errors.NotATensorError, "rank 0", "torch.sparse_coo", "to_dense()", actors=pair):
        col.allreduce_refs([ref, pair[1].get_buffer.remote()])
    ref = pair[0].make.remote(lambda self: torch.tensor([1 + 2j]).conj())
    with refused(errors.NotATensorError, "rank 0", "conjugated", "resolve_conj()", actors=pair):
        col.allreduce_refs([ref, pair[1].get_buffer.remote()])
    assert ray.get(ref).tolist() == [1 - 2j]
