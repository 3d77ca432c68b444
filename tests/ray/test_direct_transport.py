"""Refs whose tensors Ray Direct Transport moves are operands as any: in place, where Ray's own store keeps them."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import ray

import raycollect as col
from raycollect import errors
from raycollect.ray_bridge import direct_transport
from tests.support.actors import Buffers, held
from tests.support.waiting import wait_until

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.filterwarnings(
    # Ray, on objects that come back to the actor that made them: here that is the point.
    "ignore:RDT ObjectRef:UserWarning"
)


class Direct(Buffers):
    """Its tensors are moved by Ray."""

    def begin(self, value):
        self.buffer = torch.full((10,), value)
        self.layers = {"w": torch.full((2, 3), value), "b": [torch.full((3,), value)]}

    @ray.method(tensor_transport="gloo")
    def get_moved(self):
        return self.buffer

    @ray.method(tensor_transport="gloo")
    def get_layers(self):
        return self.layers

    @ray.method(tensor_transport="gloo")
    def get_array(self):
        return np.ones(4, np.float32)

    @ray.method(tensor_transport="gloo")
    def get_text(self):
        return "text"

    @ray.method(tensor_transport="gloo")
    def boom(self):
        raise ValueError("boom")

    @ray.method(tensor_transport="gloo")
    @col.by_value
    def get_unkept(self):
        return self.buffer

    @ray.method(tensor_transport="gloo")
    def get_late(self, gate):
        ray.get(gate.wait.remote())
        return self.buffer

    @col.by_value
    def take(self, value):
        return type(value).__name__, np.asarray(value).tolist()

    @col.by_value
    def is_mine(self, value):
        return value is self.buffer


@ray.remote(enable_tensor_transport=True)
class Consumer:
    """An actor without the mixin."""

    def take(self, value):
        return type(value).__name__, value.tolist()

    def take_layers(self, value):
        return value["w"].tolist(), value["b"][0].tolist()


DirectWorker = ray.remote(Direct)


@pytest.fixture(scope="module")
def lasting_trio(cluster):
    """Two participants and an actor without the mixin, between which Ray moves tensors: it takes seconds to begin."""
    from ray.experimental.collective import create_collective_group, destroy_collective_group

    made = [cls.options(num_cpus=0).remote() for cls in (DirectWorker, DirectWorker, Consumer)]
    group = create_collective_group(made, backend="torch_gloo")
    yield made
    destroy_collective_group(group)
    for actor in made:
        ray.kill(actor)


@pytest.fixture
def trio(lasting_trio, tidy):
    """The participants hold ten ones and ten twos."""
    a, b, c = lasting_trio
    ray.get([actor.begin.remote(value) for actor, value in ((a, 1.0), (b, 2.0))])
    return a, b, c


def stored(actor):
    """How many objects Ray's own store of an actor holds."""

    def count(self):
        from ray._private.worker import global_worker

        return global_worker.rdt_manager.rdt_store.get_num_objects()

    return ray.get(actor.call.remote(count))


def test_inplace_allreduce_is_visible_after_ray_transfers_the_tensor(trio):
    a, b, c = trio
    refs = [a.get_moved.remote(), b.get_moved.remote()]
    assert all(map(direct_transport.is_direct, refs))

    assert col.allreduce_refs(refs) == refs

    assert ray.get(c.take.remote(refs[0])) == ("Tensor", [3.0] * 10)  # by Ray, without raycollect
    assert ray.get(b.take.remote(refs[0])) == ("Tensor", [3.0] * 10)
    assert ray.get([a.is_mine.remote(refs[0]), b.is_mine.remote(refs[1])]) == [True, True]
    assert [found.tolist() for found in col.get(refs)] == [[3.0] * 10] * 2
    assert type(col.get(refs[0])) is torch.Tensor


def test_mixed_with_ordinary_refs_in_a_batch_and_in_a_send(trio):
    a, b, c = trio
    moved, plain = a.get_moved.remote(), b.get_buffer.remote()

    with col.batch():
        col.allreduce_refs([moved, plain])
        sent = col.send_ref(moved, b)

    assert ray.get(c.take.remote(moved)) == ("Tensor", [3.0] * 10)
    assert col.get(sent).tolist() == [3.0] * 10
    assert not direct_transport.is_direct(sent)
    ray.get(b.set_buffer.remote(np.zeros(10, np.float32)))
    taken = b.get_moved.remote()
    with pytest.raises(errors.NotATensorError):
        col.send_ref(moved, b.get_text.remote())
    assert ray.get(b.take.remote(taken)) == ("ndarray", [0.0] * 10)
    col.send_ref(moved, taken)
    assert col.get(taken).tolist() == [3.0] * 10


def test_a_captured_step_works_on_them(trio):
    a, b, c = trio
    refs = [a.get_moved.remote(), b.get_moved.remote()]

    with col.capture() as step:
        col.allreduce_refs(refs)
        step.returns([step.call(actor.is_mine, ref) for actor, ref in zip((a, b), refs, strict=True)])
    assert step.run() == [True, True]
    step.run()
    step.close()
    assert ray.get(c.take.remote(refs[1])) == ("Tensor", [6.0] * 10)

    with pytest.raises(errors.NotAMemberError, match="by send_ref"), col.capture() as step:
        step.call(b.take, refs[0])


def test_values_without_a_tensor_raise_not_a_tensor_error(trio):
    a, b, _ = trio
    for wrong in (a.get_text, a.get_unkept):
        with pytest.raises(errors.NotATensorError):
            col.allreduce_refs([wrong.remote(), b.get_moved.remote()])
    with pytest.raises(errors.ProducerFailedError, match="boom"):
        col.allreduce_refs([a.boom.remote(), b.get_moved.remote()])
    for wrong in (a.get_text, a.get_unkept):
        with pytest.raises(errors.NotATensorError):
            col.free(wrong.remote())
    assert col.get(a.get_text.remote()) == "text"
    assert col.get(a.get_unkept.remote()).tolist() == [1.0] * 10


def test_transport_chosen_by_the_caller_of_a_method_works(trio):
    a, b, c = trio
    chosen = a.get_buffer.options(tensor_transport="gloo").remote()
    col.allreduce_refs([chosen, b.get_buffer.remote()])
    assert ray.get(c.take.remote(chosen)) == ("Tensor", [3.0] * 10)


def test_freed_with_the_last_ref_in_both_stores(trio):
    a, b, _ = trio
    ray.get(a.call.remote(lambda self: None))
    gc.collect()  # errors that tests before have caught keep refs in cycles
    assert wait_until(lambda: held(a) == stored(a) == 0)  # what these have left
    refs = [a.get_moved.remote(), b.get_moved.remote()]
    col.allreduce_refs(refs)
    ray.get([actor.is_mine.remote(refs[0]) for actor in (a, b)])
    assert held(a) == stored(a) == 1
    del refs
    assert wait_until(lambda: held(a) == stored(a) == 0)
    for _ in range(5):
        a.get_moved.remote()
    assert wait_until(lambda: held(a) == stored(a) == 0)


def test_use_after_free_raises_tensor_freed_error(trio):
    a, b, c = trio
    ref = a.get_moved.remote()
    assert col.free(ref) == 1
    with pytest.raises(errors.TensorFreedError):
        col.allreduce_refs([ref, b.get_moved.remote()])
    with pytest.raises(errors.TensorFreedError):
        col.get(ref)
    assert ray.get(c.take.remote(ref)) == ("Tensor", [1.0] * 10)  # Ray's own store has it until the ref is gone


def test_a_plan_waits_for_the_method(trio, actors, gate):

    a, b, c = trio
    col.declare_collective_group([a, b])
    ref = a.get_late.remote(gate)
    work = col.allreduce_refs([ref, b.get_moved.remote()], async_op=True)
    assert not work.done()
    ray.get(gate.open.remote())
    work.wait()
    assert ray.get(c.take.remote(ref)) == ("Tensor", [3.0] * 10)
    assert "float32" in col.plan(col.allreduce_refs, [ref, b.get_moved.remote()]).explain()
