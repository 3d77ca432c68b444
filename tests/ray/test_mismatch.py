"""Ranks that do not agree: one table of situations, on every backend, as plans and as calls of the members (P3, P4).

Each is one typed error for all who asked, which names the culprit's rank, actor and field. All processes live on, no
tensor has changed by a bit, and the next collective of the same group is right.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

import raycollect as col
from raycollect import errors
from raycollect.driver.controller import Controller
from tests.ray.situations import ODD, SITUATIONS, WORLD, Part, Situation
from tests.ray.test_imperative import told
from tests.ray.workers import Worker
from tests.waiting import wait_until

pytest.importorskip("torch")  # one of the backends is torch.distributed's gloo


BACKENDS = ("shm", "tcp", "gloo", "torch:gloo")
WAYS = ("plan", "call", "own")
"""The driver's operations; the members', in the group that the driver declared; the same in a group of their own."""

ABSENT_S = 1.0
"""How long ranks wait for one that does not come, in seconds."""


# ---------------------------------------------------------------------------------------------- inside the actors


_CALLS: dict[str, Callable[[Part, str, float | None], None]] = {
    "allreduce": lambda p, g, s: col.allreduce(p.tensor, g, p.op, timeout_s=s),
    "reduce": lambda p, g, s: col.reduce(p.tensor, p.root, g, p.op, timeout_s=s),
    "broadcast": lambda p, g, s: col.broadcast(p.tensor, p.root, g, timeout_s=s),
    "allgather": lambda p, g, s: col.allgather(p.pieces, p.tensor, g, timeout_s=s),
    "reducescatter": lambda p, g, s: col.reducescatter(p.tensor, p.pieces, g, p.op, timeout_s=s),
    "gather": lambda p, g, s: col.gather(p.pieces, p.tensor, p.root, g, timeout_s=s),
    "scatter": lambda p, g, s: col.scatter(p.tensor, p.pieces, p.root, g, timeout_s=s),
    "alltoall": lambda p, g, s: col.alltoall(p.pieces, p.tensor, g, timeout_s=s),
    "send": lambda p, g, s: col.send(p.tensor, p.root, g, timeout_s=s),
    "recv": lambda p, g, s: col.recv(p.tensor, p.root, g, timeout_s=s),
    "barrier": lambda p, g, s: col.barrier(g, timeout_s=s),
}


def bring(actor: Any, name: str, rank: int) -> None:
    """Keeps in an actor what it is to bring."""
    actor.part = SITUATIONS[name].part(rank)


def call(actor: Any, group_name: str, timeout_s: float | None = None) -> None:
    """The actor's half of the situation, by the members' operations."""
    _CALLS[actor.part.operation](actor.part, group_name, timeout_s)


def check(actor: Any, name: str, rank: int) -> tuple[bool, int]:
    """Whether what the actor brought is as it was made, and the actor's process."""
    return actor.part.bits() == SITUATIONS[name].part(rank).bits(), os.getpid()


def add(actor: Any, group_name: str, rank: int) -> list[float]:
    """A collective that works."""
    tensor = np.full(3, rank + 1.0)
    col.allreduce(tensor, group_name)
    return list(tensor)


def wait_for(actor: Any, path: str) -> None:
    """Keeps an actor busy until there is a file."""
    assert wait_until(Path(path).exists, 60)


# ---------------------------------------------------------------------------------------------- groups


@dataclass(frozen=True)
class Team:
    """The actors, in one group."""

    workers: list[Any]
    pids: list[int]
    group_name: str
    way: str

    def run(self, function: Callable[..., Any], *args: Any, ranks: Any = range(WORLD)) -> list[Any]:
        """What each gives or raises; all run at once."""
        return told([self.workers[rank].call.remote(function, *args) for rank in ranks])

    def each(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """As `run`; the last argument is the rank."""
        return told([one.call.remote(function, *args, rank) for rank, one in enumerate(self.workers)])

    def actor(self, rank: int) -> str:
        """What a person calls the actor of a rank."""
        return f"Buffers({self.workers[rank]._actor_id.hex()[:6]}"

    def go(self, situation: Situation, timeout_s: float | None = None, *, without: int = -1) -> list[Any]:
        """What everybody is told who asked for it: the driver, or each member that takes part and does come."""
        if self.way != "plan":
            ranks = [rank for rank in situation.ranks if rank != without]
            return self.run(call, self.group_name, timeout_s, ranks=ranks)
        try:
            return [self.plan(situation, timeout_s)]
        except errors.RaycollectError as exc:
            return [exc]

    def plan(self, situation: Situation, timeout_s: float | None) -> Any:
        """The driver's operation for it."""
        part = situation.odd()
        refs = [worker.make.remote(lambda self: self.part.tensor) for worker in self.workers]
        lists = [worker.make.remote(lambda self: self.part.pieces) for worker in self.workers]
        common = {"timeout_s": timeout_s}
        name = self.group_name
        if part.operation == "recv":
            return col.recv_ref(refs[ODD], refs[0], name, **common)
        operations: dict[str, Callable[[], Any]] = {
            "allreduce": lambda: col.allreduce_refs(refs, name, part.op, **common),
            "reduce": lambda: col.reduce_refs(refs, part.root, name, part.op, **common),
            "broadcast": lambda: col.broadcast_refs(refs, part.root, name, **common),
            "allgather": lambda: col.allgather_refs(lists, refs, name, **common),
            "reducescatter": lambda: col.reducescatter_refs(refs, lists, name, part.op, **common),
            "gather": lambda: col.gather_refs(lists[part.root], refs, part.root, name, **common),
            "scatter": lambda: col.scatter_refs(refs, lists[part.root], part.root, name, **common),
            "alltoall": lambda: col.alltoall_refs(lists, refs, name, **common),
        }
        return operations[part.operation]()

    def goes_on(self, name: str) -> None:
        """All live, nothing was written, and the next collective of the same group is right, in either way."""
        assert self.each(check, name) == [(True, pid) for pid in self.pids]
        assert self.each(add, self.group_name) == [[6.0] * 3] * WORLD
        if self.way == "own":
            return
        refs = [worker.make.remote(lambda self, n: np.full(3, n), rank) for rank, worker in enumerate(self.workers)]
        col.allreduce_refs(refs, self.group_name)
        assert all((found == 3).all() for found in col.get(refs))


@pytest.fixture(scope="module")
def workers(cluster):
    """Three actors for all tests of this module."""
    made = [Worker.options(num_cpus=0).remote() for _ in range(WORLD)]
    yield made
    trackers = [tracker for tracker in Controller.current().trackers() if not tracker.resolved]
    Controller.current().close()
    Controller._current = None
    for one in made:
        ray.kill(one)
    assert not trackers, f"still in flight: {trackers}"


@pytest.fixture(scope="module", params=BACKENDS)
def declared(request, workers):
    """The name of a group that the driver declares, and its backend."""
    name = f"declared {request.param}"
    group = col.declare_collective_group(workers, backend=request.param, group_name=name)
    yield name, request.param
    group.destroy()


@pytest.fixture(scope="module")
def own(declared, workers):
    """The name of a group that the members make themselves, of the same backend."""
    _, backend = declared
    name = f"own {backend}"

    def join(actor, rank):
        col.init_collective_group(WORLD, rank, backend, name)

    assert told([one.call.remote(join, rank) for rank, one in enumerate(workers)]) == [None] * WORLD
    yield name
    assert told([one.call.remote(lambda self: col.destroy_collective_group(name)) for one in workers]) == [None] * WORLD


@pytest.fixture
def team(request, declared, own, workers):
    pids = ray.get([one.call.remote(lambda self: os.getpid()) for one in workers])
    return Team(workers, pids, own if request.param == "own" else declared[0], request.param)


# ---------------------------------------------------------------------------------------------- what is told


def case(backend, way, what, *, is_more):
    return pytest.param(backend, way, what, marks=[pytest.mark.full] * is_more)


def _is_more(backend, way, name):
    """Each situation is shown as a plan and as calls, in groups of either kind, on one backend after the other.

    gloo has the check of tcp.
    """
    at = list(SITUATIONS).index(name)
    return way == WAYS[1 + at % 2] or backend != ("shm", "tcp", "torch:gloo")[(at + WAYS.index(way)) % 3]


CASES = [
    case(backend, way, name, is_more=_is_more(backend, way, name))
    for backend in BACKENDS
    for way in WAYS
    for name, one in SITUATIONS.items()
    if way != "plan" or not one.no_plan
]


@pytest.mark.parametrize(("declared", "team", "name"), CASES, indirect=["declared", "team"])
def test_a_mismatch_is_one_error_for_all(team, name):
    situation = SITUATIONS[name]
    team.each(bring, name)

    found = team.go(situation)

    assert all(isinstance(one, situation.error) for one in found), found
    assert all(one.violations == found[0].violations for one in found)
    culprits = {(violation.rank, violation.field) for violation in found[0].violations}
    assert {rank for rank, _ in culprits} == {ODD}
    assert not situation.field or (ODD, situation.field) in culprits, culprits
    assert all(violation.actor.startswith(team.actor(ODD)) for violation in found[0].violations)
    assert all(f"rank {ODD} ({team.actor(ODD)}" in str(one) for one in found)
    team.goes_on(name)


# ---------------------------------------------------------------------------------------------- who does not come


AWAITED = [
    case(
        backend,
        way,
        operation,
        is_more=(operation, backend) != ("allreduce", "shm") and (way != "plan" or backend in ("tcp", "gloo")),
    )
    for backend in BACKENDS
    for way in WAYS
    for operation in ("allreduce", "recv")
]


@pytest.mark.parametrize(("declared", "team", "operation"), AWAITED, indirect=["declared", "team"])
def test_timeout_names_the_missing_rank(team, operation, tmp_path):
    """The rank is busy in a method. The others are told whom they waited for, whatever it would have brought."""
    name = "count" if operation == "allreduce" else "receive of more"
    team.each(bring, name)
    busy = team.workers[ODD].call.remote(wait_for, str(tmp_path / "end"))

    found = team.go(SITUATIONS[name], ABSENT_S, without=ODD)

    (tmp_path / "end").touch()
    ray.get(busy)
    assert all(isinstance(one, errors.CollectiveTimeoutError) for one in found), found
    for one in found:
        assert ODD in one.missing
        assert one.timeout_s == ABSENT_S
        assert f"rank {ODD} ({team.actor(ODD)}" in str(one)
        assert "What to do" in str(one)
    team.goes_on(name)


MESHES = ["shm", "tcp", *(pytest.param(backend, marks=pytest.mark.full) for backend in ("gloo", "torch:gloo"))]
"""Where ranks agree: in shared memory, or on sockets, as those of gloo do."""


@pytest.mark.parametrize("declared", MESHES, indirect=True)
@pytest.mark.parametrize("team", ["plan"], indirect=True)
def test_a_thread_that_gives_up_ends_the_wait_of_another(team, tmp_path):
    """The wait ends when the thread says so, not when time is up. The rank that was awaited finds nothing to do."""
    team.each(bring, "count of a broadcast")
    busy = team.workers[ODD].call.remote(wait_for, str(tmp_path / "end"))
    refs = [worker.make.remote(lambda self: np.ones(5)) for worker in team.workers]
    work = col.allreduce_refs(refs, team.group_name, async_op=True, timeout_s=60)
    ray.wait([refs[0], refs[2]], num_returns=2)
    giving_up = threading.Timer(0.1, work.cancel)
    giving_up.start()

    began_s = time.monotonic()
    with pytest.raises(errors.PlanAbortedError, match="cancelled"):
        work.wait()

    assert time.monotonic() - began_s < 30  # not the minute that ranks wait for each other
    giving_up.join()
    team.run(lambda self: None, ranks=(0, 2))  # behind the plan, which they give up only once they hear of it
    (tmp_path / "end").touch()
    ray.get(busy)
    for found in col.get(refs):
        np.testing.assert_array_equal(found, np.ones(5))
    team.goes_on("count of a broadcast")


# ---------------------------------------------------------------------------------------------- plans against calls


@pytest.mark.parametrize("declared", MESHES, indirect=True)
@pytest.mark.parametrize("team", ["plan"], indirect=True)
@pytest.mark.parametrize("callers", [(ODD,), (0, 2)], ids=["one", "two"])
def test_a_call_out_of_step_with_a_plan_is_a_named_mismatch(team, callers):
    """Some ranks call what others never will, as the driver's plan comes first. It is found out, not waited for."""
    team.each(bring, "count")
    out_of_step = [team.workers[rank].call.remote(add, team.group_name, rank) for rank in callers]
    refs = [worker.make.remote(lambda self: np.ones(5)) for worker in team.workers]

    began_s = time.monotonic()
    col.allreduce_refs(refs, team.group_name)
    assert time.monotonic() - began_s < 30  # not the minute that ranks wait for each other

    assert all((found == WORLD).all() for found in col.get(refs))
    for error in told(out_of_step):
        assert isinstance(error, errors.MismatchError), error
        assert {violation.field for violation in error.violations} == {"call"}
        found = {violation.rank in callers: violation.found for violation in error.violations}
        assert found[True].startswith("the imperative allreduce")
        assert found[False].startswith("the driver's allreduce")
        assert all(violation.actor.startswith(team.actor(violation.rank)) for violation in error.violations)
    team.goes_on("count")
