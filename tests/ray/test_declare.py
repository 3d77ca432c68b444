"""Declaring groups: actors without the mixin, Ray's ways of calling, rank tables, options for the backend."""

from __future__ import annotations

import json
import os
import time
import types

import numpy as np
import pytest
import ray

import raycollect as col
from raycollect import backends, errors, experimental
from raycollect.core.model import GroupSpec
from raycollect.driver.batch import record
from raycollect.driver.controller import Controller
from raycollect.group.declaration import Declaration
from tests.support.actor_pool import reusable
from tests.support.actors import Plain, Worker, filled
from tests.support.checks import refused
from tests.support.waiting import has_ended, wait_until


@reusable
@ray.remote
class AsyncPlain:
    """An async actor without the mixin."""

    async def get_buffer(self):
        return np.ones(10, np.float32)


@ray.remote
class Unmade(col.CollectiveParticipant):
    """An actor that can't be made."""

    def __init__(self):
        raise FileNotFoundError("no weights at /models/7b")


def spec_of(group_name="default"):
    return Controller.current().groups.named(group_name).spec


def test_failed_actor_constructor_raises_actor_gone_error_with_cause(actors):
    (unmade,), (worker,) = actors(Unmade, 1), actors(Worker, 1)
    with refused(errors.ActorGoneError, "could not be made", "no weights at /models/7b"):
        col.declare_collective_group([worker, unmade])
    col.declare_collective_group([worker])


# ---------------------------------------------------------------------------------------------- plain actors


def test_actor_unknown_to_ray_raises_actor_gone_error(actors):
    """As that of a handle from before `ray.shutdown()`, in a notebook."""
    known = actors(Worker, 2)
    stranger = object.__new__(type(known[1]))
    vars(stranger).update(vars(known[1]), _ray_weak_ref=True, _ray_actor_id=ray.ActorID(bytes(12) + b"\1\0\0\0"))
    with refused(errors.ActorGoneError, "rank 1", "Ray knows no such actor: is it of a Ray that was shut down"):
        col.declare_collective_group([known[0], stranger])
    col.declare_collective_group(known)


@pytest.mark.parametrize("backend", ["shm", pytest.param("gloo", marks=pytest.mark.full)])
def test_actors_without_the_mixin_are_members(actors, backend):
    """Barriers include them, refs of theirs are refused at once, and the others' group works on."""
    (worker,), (plain,), (loose,), (threaded,) = (
        actors(Worker, 1),
        actors(Plain, 1),
        actors(AsyncPlain, 1),
        actors(Plain, 1, max_concurrency=2),
    )
    group = col.declare_collective_group([worker, plain, loose, threaded], backend=backend)
    assert [member.ordered for member in group.status().members] == [True, True, False, False]
    assert group.status().members[1].actor.startswith("Plain(")
    for _ in range(3):
        assert col.barrier() is None
    refs = [actor.get_buffer.remote() for actor in group.actors]
    with refused(errors.NotAParticipantError, "Plain(", "AsyncPlain(", "inherit", actors=[worker]) as caught:
        col.allreduce_refs(refs)
    assert [violation.rank for violation in caught.value.violations] == [1, 2, 3]
    with refused(errors.NotAParticipantError, "Plain("):
        col.send_ref(refs[0], plain)
    col.barrier()
    col.destroy_collective_group()
    col.declare_collective_group([plain, loose])
    col.barrier()


def test_barrier_follows_earlier_methods_of_a_plain_actor(actors, tmp_path):
    plain = actors(Plain, 2)
    col.declare_collective_group(plain)

    def note(self, path):
        time.sleep(0.1)  # a barrier that does not wait is over by then
        path.touch()

    plain[0].call.remote(note, tmp_path / "noted")
    col.barrier()
    assert (tmp_path / "noted").exists()


def test_a_plain_actor_that_dies_breaks_the_group(actors):
    plain = actors(Plain, 2)
    col.declare_collective_group(plain)
    pid = ray.get(plain[1].call.remote(lambda self: os.getpid()))
    ray.kill(plain[1])
    assert wait_until(lambda: has_ended(pid)), "as long as it lives it takes part"
    with pytest.raises((errors.ParticipantDiedError, errors.GroupBrokenError, errors.DispatchError), match=r"Plain\("):
        col.barrier()


# ---------------------------------------------------------------------------------------------- Ray's ways


def test_rays_own_call_runs_unchanged(actors):
    workers = actors(Plain, 2)
    group = col.create_collective_group(workers, 2, [1, 0], "gloo", "8", 5000)
    assert group.actors == (workers[1], workers[0])
    assert spec_of("8").timeout_s == 5.0
    col.barrier("8")
    col.create_collective_group(workers, 2, [0, 1], backend=col.types.Backend.GLOO, group_name="9")
    assert spec_of("9") == GroupSpec(
        name="9", group_id=spec_of("9").group_id, backend="gloo", world_size=2, timeout_s=30.0, memory="cpu"
    )
    col.declare_collective_group(workers, options={"rank": [1, 0], "group_name": "10", "gloo_timeout": 1000})
    assert spec_of("10").timeout_s == 1.0
    assert spec_of("10").backend == "shm"


def test_the_limit_of_a_group_is_that_of_its_calls(actors):
    def limits(call):
        return [request.timeout_s for request in record(call)[0]]

    def calls():
        col.allreduce_refs(refs)
        col.barrier("named")
        col.allreduce_refs(refs, "named", timeout_s=3)
        with col.batch(timeout_s=2):
            col.send_ref(*refs, "named")
            col.broadcast_refs(refs, 1, "named", timeout_s=3)
        col.allgather_refs(None, refs, "named")

    workers = actors(Worker, 2)
    refs = [worker.get_buffer.remote() for worker in workers]
    group = col.declare_collective_group(workers, group_name="named", timeout_s=7.5)
    assert limits(calls) == [60.0, 7.5, 3.0, 2.0, 3.0, 7.5]
    assert spec_of("named").timeout_s == 7.5
    assert ray.get(workers[1].call.remote(lambda self: col.get_group_handle("named").timeout_s)) == 7.5
    with col.capture(timeout_s=4) as step:
        col.barrier("named")
        col.barrier("named", timeout_s=5)
        assert [request.timeout_s for request in step._block.request_list.requests] == [4.0, 5.0]
    with col.capture() as step:
        col.barrier("named")
        assert step._block.request_list.requests[0].timeout_s == 7.5
    group.rebuild(timeout_s=30)
    assert limits(lambda: col.barrier("named")) == [7.5], "that of rebuilding is for joining alone"
    col.declare_collective_group(workers, group_name="both", timeout_s=7.5, gloo_timeout=1000)
    assert limits(lambda: col.barrier("both")) == [7.5]
    assert spec_of("both").timeout_s == 1.0
    for wrong in (0, -1, float("inf"), "5"):
        with refused(errors.InvalidGroupError, "timeout_s is"):
            col.declare_collective_group(workers, group_name="wrong", timeout_s=wrong)


def test_the_names_of_rays_experimental_module(actors):
    first, second, third = actors(Plain, 3)
    pair = experimental.create_collective_group([first, second], "GLOO", "pair")
    unnamed = experimental.create_collective_group([second, third], backend="shm")

    assert (pair.name, pair.backend, pair.get_rank(second), pair.get_rank(third)) == ("pair", "gloo", 1, -1)
    for names, asked in (
        ({"pair", unnamed.name}, {}),
        ({"pair", unnamed.name}, {"actors": [second]}),
        ({"pair"}, {"actors": [second, first]}),
        (set(), {"actors": [first, third]}),
        ({"pair"}, {"actors": [second], "backend": "GLOO"}),
    ):
        assert {one.name for one in experimental.get_collective_groups(**asked)} == names
    with refused(errors.UnknownBackendError, "no such"):
        experimental.get_collective_groups([first], "no such")

    experimental.destroy_collective_group(pair)
    assert [one.name for one in experimental.get_collective_groups()] == [unnamed.name]
    experimental.destroy_all_collective_groups()
    assert experimental.get_collective_groups() == []
    with pytest.raises(AttributeError, match=r"Compiled Graphs\. Call allreduce_refs in a captured step"):
        _ = experimental.allreduce


def test_a_group_stands_for_its_name(actors):
    def member(self, group):
        x = np.full(2, col.get_rank(group) + 1.0)
        col.allreduce(x, group, op="max")
        col.barrier(group)
        return group, x[0], col.get_collective_group_size(group), col.is_group_initialized(group)

    workers = actors(Worker, 2)
    group = col.declare_collective_group(workers, group_name="mine")
    refs = [worker.get_buffer.remote() for worker in workers]
    assert col.get(col.allreduce_refs(refs, group))[0][0] == 2
    with col.batch():
        col.broadcast_refs(refs, 1, group)
        col.send_ref(*refs, group_name=group)
    col.barrier(group)
    assert "mine" in str(col.plan(col.reduce_refs, refs, 0, group, "avg"))
    assert ray.get([worker.call.remote(member, group) for worker in workers]) == [("mine", 2.0, 2, True)] * 2
    col.destroy_collective_group(group)
    with refused(errors.UnknownGroupError, "'mine'", "not declared"):
        col.allreduce_refs(refs, group)


# ---------------------------------------------------------------------------------------------- options


def test_options_reach_every_member(actors):
    """A backend that this test registers in each process tells what its factory was given."""

    def register(self):
        from raycollect import backends
        from raycollect.backends.shm import communicator as shm

        def create(joining):
            register.seen = joining.spec
            return shm.create(joining)

        backends.register(
            backends.Capabilities(name="told", factory=create, interruptible=True, bitwise=True, cross_host=False)
        )
        self.seen = lambda: register.seen

    workers = actors(Worker, 2)
    ray.get([worker.call.remote(register) for worker in workers])
    register(types.SimpleNamespace())
    try:
        given = {"b": [1, [2.5, None]], "a": {"z": True, "y": "text"}}
        col.declare_collective_group(workers, backend="told", pg_options=given)
        wanted = (("a", (("y", "text"), ("z", True))), ("b", (1, (2.5, None))))
        assert spec_of().options == wanted
        for worker in workers:
            seen = ray.get(worker.call.remote(lambda self: self.seen()))
            assert seen == spec_of()
            assert hash(seen) == hash(spec_of())
        col.destroy_collective_group()
        vendor = types.SimpleNamespace(chip_map=[1, 0], is_high_priority=False, _hidden=object(), method=print)
        col.declare_collective_group(workers, backend="told", pg_options=vendor)
        assert spec_of().options == (("chip_map", (1, 0)), ("is_high_priority", False))
    finally:
        del backends.BACKENDS["told"]
    with refused(errors.InvalidGroupError, "pg_options.a.b[1]", "object", "pg_options.c", "dict"):
        col.declare_collective_group(workers, group_name="g", pg_options={"a": {"b": [1, object()]}, "c": {1: 2}})
    with refused(errors.InvalidGroupError, "pg_options is an object"):
        col.declare_collective_group(workers, group_name="g", pg_options=object())


# ---------------------------------------------------------------------------------------------- rank tables


def table(*nodes):
    """The JSON form: (device_id, rank) pairs of each node."""
    devices = [[{"device_id": str(device), "rank": str(rank)} for device, rank in node] for node in nodes]
    return {"version": "1.0", "node_list": [{"device_list": one} for one in devices]}


def test_a_rank_table_says_the_ranks(actors, tmp_path, monkeypatch):
    a, b, c = actors(Worker, 3)
    path = tmp_path / "table.json"
    path.write_text(json.dumps(table([(4, 2), (5, 0), (6, 1)])))
    for name, given in (("path", path), ("dict", json.loads(path.read_text())), ("value", col.RankTable.read(path))):
        assert col.declare_collective_group([a, b, c], group_name=name, rank_table=given).actors == (b, c, a)
    monkeypatch.setenv("RANK_TABLE_FILE", str(path))
    group = col.declare_collective_group([a, b, c])
    assert group.actors == (b, c, a)
    assert col.declare_collective_group([a, b, c], ranks=[0, 1, 2], group_name="g").actors == (a, b, c)
    refs = [actor.get_buffer.remote() for actor in (a, b, c)]
    assert col.broadcast_refs(refs, src_rank=2) == [refs[1], refs[2], refs[0]]
    assert group.rank_table() == col.RankTable.from_dict(table([(0, 0), (1, 1), (2, 2)]))
    assert group.rebuild([c, b, a]).actors == (c, b, a), "from then on it is their order that says the ranks"
    assert group.rebuild().actors == (c, b, a)
    assert col.broadcast_refs(refs, src_rank=2) == [refs[2], refs[1], refs[0]]
    with refused(errors.InvalidGroupError, "3 ranks on 1 node", "there are 2 actors", "RANK_TABLE_FILE", "pass ranks"):
        col.declare_collective_group([a, b], group_name="h")
    with refused(errors.InvalidGroupError, "pass one of them"):
        col.declare_collective_group([a, b, c], ranks=[0, 1, 2], rank_table=path, group_name="h")
    with refused(errors.InvalidGroupError, "node_list[1] has 1 device", "argument rank_table"):
        col.declare_collective_group([a, b, c], rank_table=table([(0, 0), (1, 1)], [(0, 2)]), group_name="h")
    monkeypatch.setenv("RANK_TABLE_FILE", str(tmp_path / "none.json"))
    with refused(errors.InvalidGroupError, "none.json", "RANK_TABLE_FILE"):
        col.declare_collective_group([a, b, c], group_name="h")


def test_a_group_calls_a_method_of_each_actor_in_rank_order(actors):
    a, b = actors(Worker, 2)
    group = col.declare_collective_group([a, b], ranks=[1, 0])
    filled([a, b], [1.0, 2.0])
    assert [found[0] for found in ray.get(group.call("read"))] == [2.0, 1.0]
    ray.get(group.call("set_buffer", value=np.full(3, 5.0)))
    assert [found.tolist() for found in col.get(col.allreduce_refs(group.call("get_buffer")))] == [[10.0] * 3] * 2
    with pytest.raises(AttributeError, match="get_bufer"):
        group.call("get_bufer")


def test_sccl_gets_the_devices_of_a_rank_table_as_chip_map():
    given = {"name": "g", "actors": (None, None), "rank_table": col.RankTable.from_dict(table([(7, 1), (3, 0)]))}
    declaration = Declaration(backend="torch:sccl", **given)
    assert declaration.spec("1", "torch:sccl").options == (("chip_map", (3, 7)),)
    assert declaration.spec("1", "torch:sccl").ops == backends.ops_of("torch:sccl")
    own = Declaration(backend="torch:sccl", options=(("chip_map", (0, 1)),), **given)
    assert own.spec("1", "torch:sccl").options == (("chip_map", (0, 1)),)
    assert declaration.spec("1", "gloo").options == ()


# ---------------------------------------------------------------------------------------------- inside the members


@pytest.mark.parametrize("cls", [Plain, AsyncPlain, Worker])
def test_members_may_leave_a_group_that_the_driver_declared(actors, cls):
    """As programs for `ray.util.collective` do, where the driver declares a group and each member destroys it."""
    workers = actors(cls, 2)

    def leave(self):
        col.destroy_collective_group()
        return col.get_rank()

    def leave_again(self):
        col.destroy_collective_group()

    def add(self):
        tensor = np.full(3, col.get_rank() + 1.0)
        col.allreduce(tensor)
        return tensor

    for _ in range(2):
        group = col.declare_collective_group(workers)
        np.testing.assert_array_equal(ray.get([w.__ray_call__.remote(add) for w in workers]), np.full((2, 3), 3.0))
        assert ray.get(workers[1].__ray_call__.remote(leave)) == -1
        with refused(errors.GroupBrokenError, "has left"):
            col.barrier()
        assert group.status().state == "broken"
        with pytest.raises(errors.GroupBrokenError, match=r"rank 1 .*has left"):
            ray.get(workers[0].__ray_call__.remote(add))
        with refused(errors.GroupExistsError, "default"):
            col.declare_collective_group(workers)
        assert ray.get(workers[0].__ray_call__.remote(leave)) == -1
        ray.get([w.__ray_call__.remote(leave_again) for w in workers])
    assert col.declare_collective_group(workers).status().state == "alive"
    col.barrier()


@pytest.mark.parametrize("dies", [False, True])
def test_a_cell_that_declares_a_group_runs_again(actors, dies):
    """The cell makes new actors each time; those of the old group may be dead."""
    before = None
    for value in range(3):
        workers = actors(Worker, 2)
        group = col.declare_collective_group(workers, replace=True)
        refs = filled(workers, [value, 1])
        col.allreduce_refs(refs)
        np.testing.assert_array_equal(col.get(refs[0]), np.full(7, value + 1))
        if before is not None:
            assert before.status().state == "destroyed"
        before = group
        if dies:
            ray.kill(workers[0])
    col.declare_collective_group(workers[1:], replace=True)  # over an actor of the old group


def test_a_declaration_that_is_refused_replaces_nothing(actors):
    workers = actors(Worker, 2)
    group = col.declare_collective_group(workers)
    with pytest.raises(errors.InvalidGroupError):
        col.declare_collective_group([workers[0], workers[0]], replace=True)
    assert group.status().state == "alive"
