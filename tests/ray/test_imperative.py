"""The members' operations inside actors and tasks: with the mixin and without, in groups of either kind."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import ray

import raycollect as col
from raycollect.errors import (
    GroupBrokenError,
    GroupExistsError,
    InvalidGroupError,
    UnknownGroupError,
)
from tests.support.actor_pool import reusable
from tests.support.actors import Plain, Worker, told
from tests.support.waiting import wait_until


@reusable
@ray.remote
class Bare:
    """Code as it is written for `ray.util.collective`: no mixin, the group is made inside."""

    def join(self, world_size, rank, backend="auto", group_name="default"):
        col.init_collective_group(world_size, rank, backend, group_name)
        self.rank = rank

    def call(self, function, *args):
        return function(self.rank, *args)


def allreduce(rank, group_name="default", n=4, timeout_s=None):
    x = np.full(n, rank + 1.0)
    col.allreduce(x, group_name, timeout_s=timeout_s)
    return x


def bare(actors, count, *args):
    """That many actors of one group."""
    made = actors(Bare, count)
    for rank, one in enumerate(made):
        one.join.remote(count, rank, *args)
    return made


def on_all(workers, function, *args):
    return told([one.call.remote(function, *args) for one in workers])


# ---------------------------------------------------------------------------------------------- groups of their own


@pytest.mark.parametrize(
    "backend", ["auto", *(pytest.param(one, marks=pytest.mark.full) for one in ("shm", "gloo")), "GLOO"]
)
def test_actors_without_the_mixin_make_a_group(actors, backend):
    workers = bare(actors, 2, backend)
    assert all((x == 3).all() for x in on_all(workers, allreduce))
    ranks = on_all(workers, lambda rank: (col.get_rank(), col.get_collective_group_size(), col.is_group_initialized()))
    assert ranks == [(0, 2, True), (1, 2, True)]
    assert on_all(workers, lambda rank: col.get_rank("another")) == [-1, -1]


def test_tasks_make_a_group(cluster):
    @ray.remote(num_cpus=0)
    def member(rank):
        col.init_collective_group(2, rank, "auto", "of-tasks")
        try:
            return allreduce(rank, "of-tasks")[0]
        finally:
            col.destroy_group("of-tasks")

    assert ray.get([member.remote(rank) for rank in range(2)], timeout=60) == [3.0, 3.0]
    assert ray.get([member.remote(rank) for rank in range(2)], timeout=60) == [3.0, 3.0]


def test_the_environment_names_a_group(actors):
    def variables(rank):
        names = {"group_name": "env", "rank": rank, "world_size": 2, "backend": "auto"}
        return {"env_vars": {f"collective_{name}": str(value) for name, value in names.items()}}

    workers = [actors(Plain, 1, runtime_env=variables(rank))[0] for rank in range(2)]
    found = told([one.call.remote(lambda self, r: allreduce(r, "env"), rank) for rank, one in enumerate(workers)])
    assert all((x == 3).all() for x in found)


def _live(worker, rank, rounds):
    """Forms a group, uses it and leaves it, again and again, at a pace of its own; each rank leads in turn."""
    for number in range(rounds):
        col.init_collective_group(3, (rank + number) % 3, "auto", "again")
        assert (allreduce(rank, "again") == 6).all()
        col.destroy_collective_group("again")
        if (number + rank) % 4 == 0:
            time.sleep(0.002 * rank)  # it has something else to do


def test_a_group_is_formed_again_and_again_by_members_of_unequal_pace(actors):
    living = [one.call.remote(_live, rank, 6) for rank, one in enumerate(actors(Plain, 3))]
    assert told(living) == [None] * 3


def test_the_driver_is_no_member(cluster):
    with pytest.raises(InvalidGroupError, match="neither a Ray actor nor a task"):
        col.init_collective_group(2, 0)
    with pytest.raises(UnknownGroupError):
        col.allreduce(np.ones(2), "nobody")
    assert col.get_rank("nobody") == -1


def test_defect_6_nothing_of_a_group_stays_in_the_cluster(actors):
    from ray.experimental import internal_kv
    from ray.util import list_named_actors

    def records():
        return internal_kv._internal_kv_list(b"group/", namespace=b"raycollect")

    others = list_named_actors(all_namespaces=True)  # of Ray Train, say, which this cluster ran before
    leader, follower = actors(Bare, 2)
    leader.join.remote(2, 0, "auto", "fleeting")
    assert wait_until(records)
    follower.join.remote(2, 1, "auto", "fleeting")
    assert all((x == 3).all() for x in on_all([leader, follower], allreduce, "fleeting"))
    assert records() == []
    assert [one for one in list_named_actors(all_namespaces=True) if one not in others] == []


def test_defect_6_names_do_not_collide_across_jobs(actors):
    def key_of(rank):
        from raycollect.group.ray_bootstrap_store import RayBootstrapStore

        return RayBootstrapStore("")._key("g")

    [worker] = actors(Plain, 1)
    key = ray.get(worker.call.remote(lambda self: key_of(0)))
    assert ray.get_runtime_context().get_job_id().encode() in key


@ray.remote(num_cpus=0)
class Team:
    """Makes the members of a group of its own, as the trainer of one experiment of several does."""

    def __init__(self):
        self.members = [Plain.options(num_cpus=0).remote() for _ in range(2)]

    def begin(self, rank, *args):
        """Has a member join, and returns the ref of what it gets, without waiting."""
        return [self.members[rank].call.remote(_join_and_sum, rank, *args)]


def _join_and_sum(self, rank, value, timeout_ms, rendezvous=None):
    col.init_collective_group(2, rank, "auto", "team", timeout_ms, rendezvous=rendezvous)
    x = np.full(3, float(value))
    col.allreduce(x, "team")
    col.destroy_collective_group("team")
    return x[0]


def _leads(_):
    from ray.experimental import internal_kv

    return any(key.endswith(b"/team") for key in internal_kv._internal_kv_list("group/", namespace=b"raycollect"))


def test_teams_that_different_processes_made_never_meet_under_one_name(actors):
    one, other = actors(Team, 2)
    [observer] = actors(Plain, 1)
    leader = ray.get(one.begin.remote(0, 1, 60_000))
    assert wait_until(lambda: ray.get(observer.call.remote(_leads)))
    [error] = told(ray.get(other.begin.remote(1, 10, 1_000)))  # it would have been taken for the leader's rank 1
    assert isinstance(error, InvalidGroupError), error
    assert "Plain(" in error.detail
    assert "rendezvous='job'" in error.detail
    follower = ray.get(one.begin.remote(1, 1, 60_000))
    assert told(leader + follower) == [2, 2]
    pairs = [
        ray.get(team.begin.remote(rank, value, 60_000)) for rank in range(2) for team, value in ((one, 1), (other, 10))
    ]
    assert told([ref for pair in pairs for ref in pair]) == [2, 20, 2, 20]


def test_members_that_different_processes_made_meet_where_they_say_so(actors):
    one, other = actors(Team, 2)
    refs = [*ray.get(one.begin.remote(0, 1, 60_000, "job")), *ray.get(other.begin.remote(1, 10, 60_000, "job"))]
    assert told(refs) == [11, 11]


# ---------------------------------------------------------------------------------------------- declared groups


@pytest.mark.parametrize("cls", [Worker, Plain])
def test_members_of_a_declared_group_call_it_until_it_is_destroyed(actors, cls):
    workers = actors(cls, 2)
    group = col.declare_collective_group(workers, group_name="declared")

    def body(self):
        rank = col.get_rank("declared")
        return allreduce(rank, "declared")[0], rank

    assert on_all(workers, body) == [(3.0, 0), (3.0, 1)]
    group.destroy()

    def is_gone():
        gone = on_all(workers, lambda self: allreduce(0, "declared"))
        return all(isinstance(one, (UnknownGroupError, GroupBrokenError)) for one in gone)

    # The members hear of it by another way than the method comes: before, while they are in it, or after.
    assert wait_until(is_gone)


def test_a_group_of_the_members_keeps_its_name_from_the_driver(actors):
    workers = bare(actors, 2, "auto", "taken")
    on_all(workers, allreduce, "taken")
    with pytest.raises(GroupExistsError):
        col.declare_collective_group(workers, group_name="taken")
    assert all((x == 3).all() for x in on_all(workers, allreduce, "taken"))


def test_threads_of_an_actor_use_groups_of_their_own(actors):
    workers = actors(Worker, 2, max_concurrency=4)

    def body(self, rank):
        for name in "ab":
            col.init_collective_group(2, rank, "shm", name)
        found = {}

        def use(name):
            for _ in range(50):
                found[name] = allreduce(rank, name)[0]

        threads = [threading.Thread(target=use, args=(name,)) for name in ("ab" if rank else "ba")]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
        for name in "ab":
            col.destroy_group(name)
        return found

    results = told([one.call.remote(body, rank) for rank, one in enumerate(workers)])
    assert results == [{"a": 3.0, "b": 3.0}] * 2
