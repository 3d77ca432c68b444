"""What P3 promises: bad input is refused by name, nothing is touched, and the next call works."""

from __future__ import annotations

import numpy as np
import pytest
import ray

import raycollect as col
from raycollect import errors
from tests.support.actors import Worker, buffers

# ---------------------------------------------------------------------------------------------- refs


def test_a_handle_that_was_put_names_its_participant(trio):
    refs = buffers(trio)
    refs[1] = ray.put(ray.get(refs[1]))
    col.allreduce_refs(refs)
    np.testing.assert_array_equal(ray.get(trio[1].read.remote()), np.full(10, 3))


def test_what_works_only_in_its_own_process_says_what_to_pass_instead(trio):
    with col.capture() as step:
        col.allreduce_refs(buffers(trio))
    with col.batch() as block:
        col.barrier("default")
    with col.publish(buffers(trio), "only here") as publication:
        for one, instead in (
            (step, "pass what `run` returns"),
            (step.run(async_op=True), "pass what `wait` returns"),
            (block, "its `refs`, after its block"),
            (col.barrier("default", async_op=True), "pass its `refs`"),
            (publication, r"subscribe\(name, ...\)"),
            (publication.stream(), r"subscribe\(name, ...\)"),
        ):
            for send in (trio[0].set_buffer.remote, ray.put, lambda value: trio[0].set_buffer.remote([{"in": value}])):
                with pytest.raises(errors.BoundToProcessError, match=f"What to do: .*{instead}") as caught:
                    send(one)
                assert caught.value.found.startswith(f"<{type(one).__name__}")  # what follows tells how far it is


def test_a_group_that_was_destroyed(actors):
    """One named "default" was taken for that name, and a group derived in its place."""
    workers = actors(Worker, 2)
    refs = buffers(workers)
    col.allreduce_refs(refs)  # remembered, with the group derived for it
    group = col.declare_collective_group(workers)
    group.destroy()
    for inplace in (True, False):
        with pytest.raises(errors.UnknownGroupError, match="not declared"):
            col.allreduce_refs(refs, group, inplace=inplace)
    col.allreduce_refs(refs)


def test_a_ref_can_not_be_marked_as_written(trio):
    """It was passed over in silence, and the tensor stayed dirty."""
    for given, said in ((trio[0].get_buffer.remote(), "an ObjectRef"), ([], "empty")):
        with pytest.raises(errors.NotATensorError, match=f"tensor is {said}, expected tensors of this process"):
            col.mark_written(given)


# ---------------------------------------------------------------------------------------------- values


def test_a_wait_whose_time_is_over_looks(trio):
    """Callers subtract now from a deadline."""
    refs = buffers(trio)
    ray.wait(refs, num_returns=3)
    work = col.allreduce_refs(refs, async_op=True)
    assert work.wait(30) == work.wait(-0.5)
    assert len(col.get(refs, timeout_s=-0.5)) == 3
