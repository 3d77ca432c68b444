"""What P3 promises: bad input is refused by name, nothing is touched, and the next call works."""

from __future__ import annotations

import numpy as np
import pytest
import ray

import raycollect as col
from raycollect import errors
from tests.ray.refusing import refused, trio
from tests.ray.workers import KindsActor, Plain, Worker, buffers

__all__ = ["trio"]  # a fixture


# ---------------------------------------------------------------------------------------------- refs


def test_a_ref_made_by_ray_put(trio):
    ref = ray.put(np.ones(10, np.float32))
    with refused(errors.ForeignRefError, "ray.put", "rank 1", ref.hex(), actors=trio):
        col.allreduce_refs([trio[0].get_buffer.remote(), ref, trio[2].get_buffer.remote()])


def test_a_ref_made_by_a_task(trio):
    @ray.remote
    def task():
        return np.ones(10, np.float32)

    with refused(errors.ForeignRefError, "returned by a task", actors=trio):
        col.allreduce_refs([task.remote(), trio[1].get_buffer.remote(), trio[2].get_buffer.remote()])


def test_a_handle_that_was_put_names_its_participant(trio):
    refs = buffers(trio)
    refs[1] = ray.put(ray.get(refs[1]))
    col.allreduce_refs(refs)
    np.testing.assert_array_equal(ray.get(trio[1].read.remote()), np.full(10, 3))


def test_no_ref_at_all(trio):
    with refused(errors.ForeignRefError, "an ndarray", actors=trio):
        col.allreduce_refs([np.ones(3), *buffers(trio[1:])])


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


def test_an_actor_where_a_ref_of_its_tensor_belongs(trio):
    with pytest.raises(errors.ForeignRefError, match="an actor handle") as caught:
        col.allreduce_refs(trio)
    assert [violation.rank for violation in caught.value.violations] == [0, 1, 2]
    with refused(errors.ForeignRefError, "not called (call it as actor.method.remote())", actors=trio):
        col.allreduce_refs([trio[0].get_buffer, *buffers(trio[1:])])


def test_a_reduce_op_in_the_place_of_the_group(trio):
    for given, said in (
        (col.ReduceOp.MAX, "a ReduceOp is not the name of a group; .* op='max'"),
        ("avg", "'avg'.* not declared; .* op='avg'"),
        ("Sum", "op='sum'"),
        ([1], "a list is not the name of a group"),
    ):
        with pytest.raises(errors.UnknownGroupError, match=said):
            col.allreduce_refs(buffers(trio), given)
    with pytest.raises(errors.UnknownGroupError, match="not declared") as caught:
        col.allreduce_refs(buffers(trio), "average")
    assert "op=" not in str(caught.value)


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


@pytest.mark.parametrize("op", ["avg", "AVG", col.ReduceOp.AVG])
def test_a_reduce_op_by_its_name(trio, op):
    np.testing.assert_array_equal(col.get(col.allreduce_refs(buffers(trio), op=op))[0], np.ones(10))
    np.testing.assert_array_equal(col.get(col.reduce_refs(buffers(trio), op=op)), np.ones(10))
    with refused(errors.InvalidArgumentError, "op is 'average', expected one of SUM,", actors=trio):
        col.allreduce_refs(buffers(trio), op="average")


def test_a_generator_in_place_of_its_items(trio, actors):
    (streamer,) = actors(KindsActor, 1)
    with refused(errors.ForeignRefError, "ObjectRefGenerator", actors=trio):
        col.allreduce_refs([streamer.stream.remote(), *buffers(trio[1:])])


def test_an_actor_that_is_no_participant(trio, actors):
    (plain,) = actors(Plain, 1)
    with refused(errors.NotAParticipantError, "Plain(", "CollectiveParticipant", actors=trio) as caught:
        col.allreduce_refs([plain.get_buffer.remote(), *buffers(trio[1:])])
    assert caught.value.violations[0].rank == -1, "it has none in the group"


def test_an_actor_that_is_no_participant_in_a_derived_group(actors):
    (plain,), (worker,) = actors(Plain, 1), actors(Worker, 1)
    with refused(errors.NotAParticipantError, "Plain("):
        col.allreduce_refs([plain.get_buffer.remote(), worker.get_buffer.remote()])


def test_an_actor_outside_the_group(trio, actors):
    (stranger,) = actors(Worker, 1)
    with refused(errors.NotAMemberError, "Buffers(", "expected one of", actors=trio):
        col.allreduce_refs([stranger.get_buffer.remote(), *buffers(trio[1:])])
    with refused(errors.NotAMemberError, actors=trio):
        col.send_ref(trio[0].get_buffer.remote(), stranger)


def test_two_refs_of_one_actor(trio):
    with refused(errors.DuplicateActorError, "rank 0", actors=trio):
        col.allreduce_refs([*buffers(trio), trio[0].get_buffer.remote()])
    with refused(errors.DuplicateActorError, actors=trio):
        col.send_ref(trio[0].get_buffer.remote(), trio[0].get_buffer.remote())


def test_two_refs_of_one_actor_in_a_derived_group(actors):
    (worker,) = actors(Worker, 1)
    with refused(errors.DuplicateActorError, "rank 1"):
        col.allreduce_refs([worker.get_buffer.remote(), worker.get_buffer.remote()])


def test_a_missing_member(trio):
    with refused(errors.MissingMemberError, "rank 1", actors=trio):
        col.allreduce_refs(buffers([trio[0], trio[2]]))


@pytest.mark.parametrize("refs", [[], (), None, 3])
def test_an_empty_list(cluster, refs):
    with refused(errors.MissingMemberError, "list of refs"):
        col.allreduce_refs(refs)


def test_all_violations_in_one_error(trio, actors):
    (stranger,) = actors(Worker, 1)
    with refused(errors.RefusedError, "Buffers(", "second ref", actors=trio) as caught:
        col.allreduce_refs([stranger.get_buffer.remote(), *buffers(trio), trio[2].get_buffer.remote()])
    assert {violation.kind for violation in caught.value.violations} == {"not_member", "duplicate"}


# ---------------------------------------------------------------------------------------------- values


def test_different_shapes_and_dtypes_are_all_named(trio):
    ray.get(trio[1].set_buffer.remote(np.ones(8, np.float32)))
    ray.get(trio[2].set_buffer.remote(np.ones(10, np.int32)))
    refs = buffers(trio)
    with refused(errors.MismatchError, "rank 1", "rank 2", "[8]", "int32", "float32", actors=trio) as caught:
        col.allreduce_refs(refs)
    found = {(violation.rank, violation.field): violation for violation in caught.value.violations}
    assert set(found) == {(1, "shape"), (2, "dtype")}
    assert found[1, "shape"].ref == refs[1].hex()
    assert found[1, "shape"].actor.startswith("Buffers(")


def test_broadcast_and_send_of_different_shapes(trio):
    ray.get(trio[1].set_buffer.remote(np.ones(8, np.float32)))
    with refused(errors.MismatchError, "rank 1", actors=trio):
        col.broadcast_refs(buffers(trio))
    with refused(errors.MismatchError, "[8]", actors=trio):
        col.send_ref(trio[0].get_buffer.remote(), trio[1].get_buffer.remote())


def test_a_value_that_is_no_tensor(trio):
    ref = trio[1].make.remote(lambda self: 42)
    with refused(errors.NotATensorError, "rank 1", "an int", ref.hex(), actors=trio):
        col.allreduce_refs([trio[0].get_buffer.remote(), ref, trio[2].get_buffer.remote()])
    with refused(errors.NotATensorError, actors=trio):
        col.send_ref(trio[0].get_buffer.remote(), ref)
    gradients = trio[1].make.remote(lambda self: {"weight": np.ones(10, np.float32), "bias": None})
    with refused(errors.NotATensorError, "a dict (['bias'] is a NoneType), returned by value", actors=trio):
        col.allreduce_refs([trio[0].get_buffer.remote(), gradients, trio[2].get_buffer.remote()])


def test_a_loss_without_dimensions(trio):
    """It goes by value as a number does; the error says what to return for it to be an operand."""
    losses = [worker.make.remote(lambda self: np.array(2.5)) for worker in trio]
    cure = "a numpy.ndarray without dimensions (return np.array([x]) or x.reshape(1), and it is kept)"
    with refused(errors.NotATensorError, cure, "rank 0", "rank 2", actors=trio):
        col.allreduce_refs(losses)
    with refused(errors.NotATensorError, cure, actors=trio):
        col.plan(col.allreduce_refs, losses)
    with refused(errors.NotATensorError, cure, actors=trio), col.batch():
        col.allreduce_refs(losses)
    kept = [worker.make.remote(lambda self: np.array(2.5).reshape(1)) for worker in trio]
    assert col.get(col.allreduce_refs(kept, op="avg"))[2] == [2.5]


def test_a_by_value_method(trio):
    with refused(errors.NotATensorError, "rank 2", "numpy.ndarray, returned by value", actors=trio):
        col.allreduce_refs([*buffers(trio[:2]), trio[2].read.remote()])


def test_a_producer_that_raised(trio):
    def boom(self):
        raise ValueError("boom")

    ref = trio[2].make.remote(boom)
    with refused(errors.ProducerFailedError, "rank 2", "ValueError: boom", ref.hex(), actors=trio) as caught:
        col.allreduce_refs([*buffers(trio[:2]), ref])
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_producer_that_never_ran(trio):
    """Its argument failed, so Ray never called the method: only Ray knows why."""

    @ray.remote
    def fail():
        raise KeyError("no such thing")

    ref = trio[0].make.remote(lambda self, argument: argument, fail.remote())
    with refused(errors.ProducerFailedError, "rank 0", "no such thing", actors=trio):
        col.allreduce_refs([ref, *buffers(trio[1:])])


def test_a_producer_that_never_ran_on_a_threaded_actor(actors):
    """The rank waits for its operand at first; the driver finds out that it will not come."""
    workers = actors(Worker, 2, max_concurrency=2)
    col.declare_collective_group(workers)

    @ray.remote
    def fail():
        raise KeyError("no such thing")

    ref = workers[0].make.remote(lambda self, argument: argument, fail.remote())
    with refused(errors.ProducerFailedError, "rank 0", "no such thing", actors=workers):
        col.allreduce_refs([ref, workers[1].get_buffer.remote()])
    with refused(errors.NotATensorError, "rank 1", actors=workers):
        col.allreduce_refs([workers[0].get_buffer.remote(), workers[1].make.remote(lambda self: "text")])
    col.allreduce_refs(buffers(workers))


def test_a_read_only_operand(trio):
    def freeze(self):
        self.buffer = np.ones(10, np.float32)
        self.buffer.flags.writeable = False
        return self.buffer

    ref = trio[1].make.remote(freeze)
    with refused(errors.ReadOnlyError, "rank 1", "read-only, expected", "inplace=False", actors=trio):
        col.allreduce_refs([trio[0].get_buffer.remote(), ref, trio[2].get_buffer.remote()])
    refs = [trio[0].get_buffer.remote(), ref, trio[2].get_buffer.remote()]
    np.testing.assert_array_equal(col.get(col.allreduce_refs(refs, inplace=False)[1]), np.full(10, 3))


def test_rays_own_arguments_are_read_only(trio):
    shared = ray.put(np.ones(10, np.float32))
    refs = [worker.make.remote(lambda self, array: array, shared) for worker in trio]
    said = "read-only (Ray's arguments are read-only views of shared objects), expected a writable array, such as np."
    with refused(errors.ReadOnlyError, "rank 0", "rank 1", "rank 2", said) as caught:
        col.allreduce_refs(refs)
    assert str(caught.value).count("(Ray's arguments") == 3
    np.testing.assert_array_equal(ray.get(shared), np.ones(10))


def test_the_same_tensor_twice(trio):
    def twice(self):
        self.buffer = np.zeros(4, np.float32)
        return [self.buffer[:3], self.buffer[1:]]

    with refused(errors.AliasError, "overlapping"):
        col.allreduce_refs([worker.make.remote(twice) for worker in trio])


def test_ops_without_a_meaning(trio):
    ray.get([worker.set_buffer.remote(np.ones(4, np.int32)) for worker in trio])
    with refused(errors.UnsupportedError, "AVG", "int32", actors=trio):
        col.allreduce_refs(buffers(trio), op=col.ReduceOp.AVG)
    ray.get([worker.set_buffer.remote(np.ones(4, np.complex64)) for worker in trio])
    with refused(errors.UnsupportedError, "MAX", "complex64", actors=trio):
        col.allreduce_refs(buffers(trio), op="max")
    with refused(errors.UnsupportedError, "BXOR", "complex64", actors=trio):
        col.allreduce_refs(buffers(trio), op=col.ReduceOp.BXOR)
    with refused(errors.InvalidArgumentError, "XOR", "one of SUM"):
        col.allreduce_refs(buffers(trio), op="XOR")


def test_use_after_free(trio):
    refs = buffers(trio)
    col.free(refs[1])
    with refused(errors.TensorFreedError, "rank 1", refs[1].hex(), actors=trio):
        col.allreduce_refs(refs)


def test_bad_ranks_and_timeouts(trio):
    with refused(errors.RefusedError, "src_rank", "7", actors=trio):
        col.broadcast_refs(buffers(trio), src_rank=7)
    for over_s in (0, -1):
        with refused(errors.RefusedError, "timeout_s", actors=trio):
            col.allreduce_refs(buffers(trio), timeout_s=over_s)


def test_a_wait_whose_time_is_over_looks(trio):
    """Callers subtract now from a deadline."""
    refs = buffers(trio)
    work = col.allreduce_refs(refs, async_op=True)
    assert work.wait(30) == work.wait(-0.5)
    assert len(col.get(refs, timeout_s=-0.5)) == 3


WRONG_TIMES = ["5", [], 10**400, float("nan"), float("-inf"), np.ones(2)]
WRONG_FLAGS = ["no", [], 2, np.ones(2)]


def test_an_option_that_makes_no_sense_is_refused_by_its_name(trio):
    """A flag that travels as it is would be refused at the other end, and cost the connection."""

    def timeline(**options):
        with col.timeline(**options):
            pass

    refs = buffers(trio)
    work = col.allreduce_refs(refs, async_op=True)
    work.wait(30)
    with col.capture() as step:
        col.barrier()
    calls = [
        (lambda **given: col.allreduce_refs(refs, **given), {"async_op", "inplace", "snapshot"}),
        (lambda **given: col.broadcast_refs(refs, **given), {"async_op"}),
        (lambda **given: col.barrier(**given), {"async_op"}),
        (lambda **given: col.batch(**given), {"async_op"}),
        (step.run, {"async_op"}),
        (lambda **given: col.get(refs, **given), {"ordered"}),
        (timeline, {"metrics"}),
        (work.wait, {"progress"}),
    ]
    for call, flags in calls:
        for option, values in ({"timeout_s": WRONG_TIMES} | dict.fromkeys(sorted(flags), WRONG_FLAGS)).items():
            for value in values:
                with pytest.raises(errors.InvalidArgumentError, match=f"{option} is"):
                    call(**{option: value})
    with pytest.raises(errors.InvalidArgumentError, match="path is"):
        timeline(path=3)
    with pytest.raises(errors.UnknownGroupError):
        col.barrier(np.ones(2))
    step.close()
