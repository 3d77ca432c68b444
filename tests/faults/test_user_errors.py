"""What users do by mistake or in good faith hurts nobody: no hang, no dead process, no wrong data; a clear error."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import ray

import raycollect as col
from raycollect import errors
from tests.faults.groups import PATIENT_S, assert_works, refs_of
from tests.support.actors import Worker, told


def resize(self):
    self.buffer.resize(16, refcheck=False)


def resize_back(self):
    self.buffer.resize(8, refcheck=False)
    self.buffer[:] = 1


def replace_it(self):
    self.buffer = np.full(8, 100, np.float32)


def delete(self):
    del self.buffer


def close(self):
    self.buffer.flags.writeable = False


def torch_resize(self):
    self.buffer.resize_(16)


def torch_resize_back(self):
    self.buffer.resize_(8).fill_(1)


def torch_storage(self):
    self.buffer.untyped_storage().resize_(0)


def empty_list(self):
    self.buffer.clear()


def fill_list(self):
    self.buffer.append(np.ones(8, np.float32))


def wipe(self):
    """What no method should do: it empties the store behind everybody's back."""
    from raycollect.member.participant import this_participant

    store = this_participant().store
    store.free(list(store._held))


def of_numpy(self):
    self.buffer = np.ones(8, np.float32)
    return self.buffer


def of_torch(self):
    import torch

    self.buffer = torch.ones(8)
    return self.buffer


def of_list(self):
    self.buffer = [np.ones(8, np.float32)]
    return self.buffer


CHANGES: dict[Any, list[tuple[Any, Any]]] = {
    of_numpy: [(resize, errors.MismatchError), (resize_back, None), (replace_it, None), (delete, None)],
    of_torch: [
        (torch_resize, errors.MismatchError),
        (torch_resize_back, None),
        (torch_storage, errors.NotATensorError),
    ],
    of_list: [(empty_list, errors.TensorReplacedError), (fill_list, None), (wipe, errors.TensorFreedError)],
    "closed": [(close, errors.ReadOnlyError)],
}
"""How a tensor is made -> what its actor does between two collectives, and what the next one raises; None: it works."""


@pytest.mark.parametrize(
    ("make", "backend"),
    [
        (of_numpy, "shm"),
        pytest.param(of_numpy, "tcp", marks=pytest.mark.full),
        pytest.param(of_torch, "shm", marks=pytest.mark.full),
        (of_torch, "gloo"),
        (of_list, "tcp"),
        ("closed", "gloo"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_tensor_changed_after_its_return_is_read_anew(actors, backend, make):
    """A ref names storage: what it holds is looked at by each collective anew, and let go of by none."""
    pytest.importorskip("torch")
    pair = actors(Worker, 2)
    col.declare_collective_group(pair, backend=backend)
    refs = [worker.make.remote(make if callable(make) else of_numpy) for worker in pair]
    for _ in range(3):  # it is remembered by then
        col.allreduce_refs(refs, op="max")
    for change, error in CHANGES[make]:
        ray.get(pair[0].call.remote(change))
        if error is None:
            col.allreduce_refs(refs, op="max", timeout_s=PATIENT_S)
        else:
            with pytest.raises(error) as caught:
                col.allreduce_refs(refs, timeout_s=PATIENT_S)
            assert caught.value.violations
        assert all(np.asarray(leaf).max() == 1 for leaf in np.ravel(col.get(refs[1])))
    assert_works(pair, "default")


def drive(self, workers, count=1, name="inner"):
    """Drives a group of others; returns what they hold in the end."""
    group = col.declare_collective_group(workers, group_name=name)
    refs = [worker.make.remote(lambda self: np.ones(3)) for worker in workers]
    for _ in range(count):
        col.allreduce_refs(refs, name, timeout_s=PATIENT_S)
    found = float(col.get(refs[0])[0])
    group.destroy()
    return found


def test_an_actor_drives_its_own_group_while_it_is_in_one(actors):
    outer, (first, second) = actors(Worker, 2), actors(Worker, 2)
    col.declare_collective_group(outer, group_name="outer")
    refs = refs_of(outer)
    nested = outer[0].call.remote(drive, [first, second], 10)
    work = col.allreduce_refs(refs, "outer", async_op=True)
    assert ray.get(nested) == 2**10
    work.wait(PATIENT_S)
    np.testing.assert_array_equal(col.get(refs), np.full((2, 10), 2))
    assert_works([first, second])


def by_call(refs):
    col.allreduce_refs(refs, timeout_s=5)


def by_batch(refs):
    with col.batch(timeout_s=5):
        col.allreduce_refs(refs)


def by_step(refs):
    with col.capture(timeout_s=5) as step:
        col.allreduce_refs(refs)
    step.run()


@pytest.mark.parametrize("way", [by_call, by_batch, by_step], ids=lambda way: way.__name__)
def test_an_actor_that_drives_a_plan_that_it_takes_part_in(actors, way):
    pair = actors(Worker, 2)

    def drive_oneself(self, workers):
        way([worker.get_buffer.remote() for worker in workers])

    (found,) = told([pair[0].call.remote(drive_oneself, pair)])
    assert isinstance(found, errors.SelfDrivenError), found
    assert pair[0]._actor_id.hex()[:6] in found.actor
    assert_works(pair)


def test_two_drivers_of_the_same_actors_and_two_of_others(actors):
    """The second one is told who has them; it is given those that are nobody's, and the others once they are free."""
    trio, rivals = actors(Worker, 3), actors(Worker, 2)
    group = col.declare_collective_group(trio[:2])
    for wanted in (trio[:2], [trio[2], trio[1]]):
        (found,) = told([rivals[0].call.remote(drive, wanted)])
        assert isinstance(found, errors.ControllerConflictError), found
        assert "driver process" in found.holder
        assert str(os.getpid()) in found.holder
        assert found.actor.startswith("Buffers(")
    assert_works(trio[:2], "default")
    group.destroy()
    halves = [[trio[0], trio[1]], [trio[2], *actors(Worker, 1)]]
    at_once = [rival.call.remote(drive, half, 20) for rival, half in zip(rivals, halves, strict=True)]
    assert ray.get(at_once) == [2**20] * 2
    assert_works(trio)
