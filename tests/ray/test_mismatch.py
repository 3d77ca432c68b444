"""Ranks that do not agree: one table of situations, on every backend, as plans and as calls of the members (P3, P4).

Each is one typed error for all who asked, which names the culprit's rank, actor and field. All processes live on, no
tensor has changed by a bit, and the next collective of the same group is right.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

import raycollect as col
from raycollect import errors
from raycollect.driver.controller import Controller
from tests.ray.test_imperative import told
from tests.ray.workers import Worker

pytest.importorskip("torch")  # one of the backends is torch.distributed's gloo

WORLD = 3
ODD = 1
"""The culprit's rank; two others agree, so that there is no doubt who it is."""

BACKENDS = ("shm", "tcp", "gloo", "torch:gloo")
WAYS = ("plan", "call", "own")
"""The driver's verbs; the members' verbs, in the group that the driver declared; the same in a group of their own."""

ABSENT_S = 1.0
"""How long ranks wait for one that does not come, in seconds."""


# ---------------------------------------------------------------------------------------------- what ranks bring


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one rank does.

    Attributes:
        verb: The operation; ``"recv"`` for the taker of a send, ``""`` for a rank that has no part in it.
        tensor: The operand, or of an alltoall the pieces that are given.
        pieces: The `tensor_list`, or of an alltoall the pieces that are taken.
        op: The reduce op.
        root: The root; of a send or receive the other rank.
    """

    verb: str
    tensor: Any = None
    pieces: Any = None
    op: str = "sum"
    root: int = 0

    def bits(self) -> list[bytes]:
        """All that its tensors hold."""
        return [np.asarray(one).tobytes() for one in (*leaves(self.tensor), *leaves(self.pieces))]


def leaves(value: Any) -> list[Any]:
    """The arrays of a value; nothing of what is no array."""
    if isinstance(value, (list, tuple)):
        return [one for item in value for one in leaves(item)]
    return [value] if isinstance(value, np.ndarray) else []


def some(count: int = 4, dtype: str = "float32", start: int = 1) -> np.ndarray[Any, Any]:
    """An array without zeros."""
    return np.arange(start, start + count).astype(dtype)


def some_pieces(*counts: int) -> list[np.ndarray[Any, Any]]:
    return [some(count, start=10 * at) for at, count in enumerate(counts or (4,) * WORLD)]


def read_only() -> np.ndarray[Any, Any]:
    array = some()
    array.flags.writeable = False
    return array


def overlapping() -> list[np.ndarray[Any, Any]]:
    whole = some(4 + WORLD)
    return [whole[at : at + 4] for at in range(WORLD)]


# ---------------------------------------------------------------------------------------------- the table


@dataclass(frozen=True, kw_only=True)
class Situation:
    """One way in which a rank does not fit.

    Attributes:
        most: What the ranks that agree do.
        odd: What the culprit does.
        field: What is named as wrong with it.
        error: What is raised.
        first: What rank 0 does, where that is something of its own: it sends, or is the root.
        idle: True where rank 2 has no part in it.
        no_plan: Why one call of the driver can't say this; empty where it can.
    """

    most: Callable[[], Part]
    odd: Callable[[], Part]
    field: str
    error: type[errors.RefusedError] = errors.MismatchError
    first: Callable[[], Part] | None = field(default=None)
    idle: bool = False
    no_plan: str = ""

    def part(self, rank: int) -> Part:
        """What a rank does; made anew each time, always the same."""
        if rank == ODD:
            return self.odd()
        if rank == 0 and self.first is not None:
            return self.first()
        return Part(verb="") if self.idle else self.most()

    @property
    def ranks(self) -> list[int]:
        """The ranks that take part."""
        return [rank for rank in range(WORLD) if self.part(rank).verb]


def pair(verb: str, first: Callable[[], Part], odd: Callable[[], Part], what: str, **others: Any) -> Situation:
    """A situation between rank 0 and the culprit alone."""
    return Situation(most=lambda: Part(verb=verb), first=first, odd=odd, field=what, idle=True, **others)


ONE_CALL = "a call of the driver has one {} for all ranks"

SITUATIONS = {
    "count": Situation(
        most=lambda: Part(verb="allreduce", tensor=some(4)),
        odd=lambda: Part(verb="allreduce", tensor=some(8)),
        field="shape",
    ),
    "shape": Situation(
        most=lambda: Part(verb="allreduce", tensor=some(4)),
        odd=lambda: Part(verb="allreduce", tensor=some(4).reshape(2, 2)),
        field="shape",
    ),
    "dtype": Situation(
        most=lambda: Part(verb="allreduce", tensor=some(4, "float32")),
        odd=lambda: Part(verb="allreduce", tensor=some(4, "int32")),
        field="dtype",
    ),
    "count of a broadcast": Situation(
        most=lambda: Part(verb="broadcast", tensor=some(4)),
        odd=lambda: Part(verb="broadcast", tensor=some(8)),
        field="shape",
    ),
    "dtype of a reduce": Situation(
        most=lambda: Part(verb="reduce", tensor=some(4, "float32")),
        odd=lambda: Part(verb="reduce", tensor=some(4, "float64")),
        field="dtype",
    ),
    "dtype of an allgather": Situation(
        most=lambda: Part(verb="allgather", tensor=some(4), pieces=some_pieces()),
        odd=lambda: Part(verb="allgather", tensor=some(4, "int32"), pieces=some_pieces()),
        field="dtype",
    ),
    "reduce op": Situation(
        most=lambda: Part(verb="allreduce", tensor=some(), op="sum"),
        odd=lambda: Part(verb="allreduce", tensor=some(), op="max"),
        field="reduce op",
        no_plan=ONE_CALL.format("reduce op"),
    ),
    "root": Situation(
        most=lambda: Part(verb="broadcast", tensor=some(), root=0),
        odd=lambda: Part(verb="broadcast", tensor=some(), root=1),
        field="root",
        no_plan=ONE_CALL.format("root"),
    ),
    "root of a reduce": Situation(
        most=lambda: Part(verb="reduce", tensor=some(), root=2),
        odd=lambda: Part(verb="reduce", tensor=some(), root=1),
        field="root",
        no_plan=ONE_CALL.format("root"),
    ),
    "allreduce against broadcast": Situation(
        most=lambda: Part(verb="allreduce", tensor=some()),
        odd=lambda: Part(verb="broadcast", tensor=some()),
        field="op",
        no_plan=ONE_CALL.format("operation"),
    ),
    "allgather against barrier": Situation(
        most=lambda: Part(verb="allgather", tensor=some(), pieces=some_pieces()),
        odd=lambda: Part(verb="barrier"),
        field="op",
        no_plan=ONE_CALL.format("operation"),
    ),
    "a list against a tensor": Situation(
        most=lambda: Part(verb="allreduce", tensor=some()),
        odd=lambda: Part(verb="allreduce", tensor=[some()]),
        field="structure",
    ),
    "a longer list": Situation(
        most=lambda: Part(verb="allreduce", tensor=[some(), some()]),
        odd=lambda: Part(verb="allreduce", tensor=[some(), some(), some()]),
        field="tensor count",
    ),
    "a tensor list that is too short": Situation(
        most=lambda: Part(verb="allgather", tensor=some(), pieces=some_pieces()),
        odd=lambda: Part(verb="allgather", tensor=some(), pieces=some_pieces(4, 4)),
        field="output",
        error=errors.InvalidArgumentError,
    ),
    "an item of the wrong size": Situation(
        most=lambda: Part(verb="allgather", tensor=some(), pieces=some_pieces()),
        odd=lambda: Part(verb="allgather", tensor=some(), pieces=some_pieces(4, 4, 5)),
        field="shape of output 2",
    ),
    "an item of a reducescatter": Situation(
        most=lambda: Part(verb="reducescatter", tensor=some(), pieces=some_pieces()),
        odd=lambda: Part(verb="reducescatter", tensor=some(), pieces=some_pieces(4, 4, 5)),
        field="shape of input 2",
    ),
    "a reducescatter of too few": Situation(
        most=lambda: Part(verb="reducescatter", tensor=some(), pieces=some_pieces()),
        odd=lambda: Part(verb="reducescatter", tensor=some(), pieces=some_pieces(4, 4)),
        field="input",
        error=errors.InvalidArgumentError,
    ),
    "a scatter into less": Situation(
        first=lambda: Part(verb="scatter", tensor=some(), pieces=some_pieces()),
        most=lambda: Part(verb="scatter", tensor=some()),
        odd=lambda: Part(verb="scatter", tensor=some(3)),
        field="shape of output",
    ),
    "a gather into too few": Situation(
        most=lambda: Part(verb="gather", tensor=some(), root=ODD),
        odd=lambda: Part(verb="gather", tensor=some(), pieces=some_pieces(4, 4), root=ODD),
        field="output",
        error=errors.InvalidArgumentError,
    ),
    "a piece of an alltoall": Situation(
        most=lambda: Part(verb="alltoall", tensor=some_pieces(), pieces=some_pieces()),
        odd=lambda: Part(verb="alltoall", tensor=some_pieces(), pieces=some_pieces(4, 4, 3)),
        field="shape of output 2",
    ),
    "shape of a reduce": Situation(
        most=lambda: Part(verb="reduce", tensor=some(4), root=2),
        odd=lambda: Part(verb="reduce", tensor=some(5), root=2),
        field="shape",
    ),
    "dtype of a broadcast": Situation(
        most=lambda: Part(verb="broadcast", tensor=some(4, "float32"), root=2),
        odd=lambda: Part(verb="broadcast", tensor=some(4, "int32"), root=2),
        field="dtype",
    ),
    "dtype of an item": Situation(
        most=lambda: Part(verb="allgather", tensor=some(), pieces=some_pieces()),
        odd=lambda: Part(verb="allgather", tensor=some(), pieces=[some(), some(4, "int32"), some()]),
        field="dtype of output 1",
    ),
    "dtype of a gather": Situation(
        first=lambda: Part(verb="gather", tensor=some(), pieces=some_pieces()),
        most=lambda: Part(verb="gather", tensor=some()),
        odd=lambda: Part(verb="gather", tensor=some(4, "int32")),
        field="dtype",
    ),
    "a gather into the wrong size": Situation(
        most=lambda: Part(verb="gather", tensor=some(), root=ODD),
        odd=lambda: Part(verb="gather", tensor=some(), pieces=some_pieces(4, 4, 5), root=ODD),
        field="shape of output 2",
    ),
    "a scatter of too few": Situation(
        most=lambda: Part(verb="scatter", tensor=some(), root=ODD),
        odd=lambda: Part(verb="scatter", tensor=some(), pieces=some_pieces(4, 4), root=ODD),
        field="input",
        error=errors.InvalidArgumentError,
    ),
    "dtype of a scatter": Situation(
        first=lambda: Part(verb="scatter", tensor=some(), pieces=some_pieces()),
        most=lambda: Part(verb="scatter", tensor=some()),
        odd=lambda: Part(verb="scatter", tensor=some(4, "int32")),
        field="dtype of output",
    ),
    "a reducescatter into more": Situation(
        most=lambda: Part(verb="reducescatter", tensor=some(), pieces=some_pieces()),
        odd=lambda: Part(verb="reducescatter", tensor=some(5), pieces=some_pieces()),
        field="shape of output",
    ),
    "a reducescatter into another dtype": Situation(
        most=lambda: Part(verb="reducescatter", tensor=some(), pieces=some_pieces()),
        odd=lambda: Part(verb="reducescatter", tensor=some(4, "float64"), pieces=some_pieces()),
        field="dtype of output",
    ),
    "an alltoall of too few": Situation(
        most=lambda: Part(verb="alltoall", tensor=some_pieces(), pieces=some_pieces()),
        odd=lambda: Part(verb="alltoall", tensor=some_pieces(4, 4), pieces=some_pieces()),
        field="input",
        error=errors.InvalidArgumentError,
    ),
    "an alltoall into too few": Situation(
        most=lambda: Part(verb="alltoall", tensor=some_pieces(), pieces=some_pieces()),
        odd=lambda: Part(verb="alltoall", tensor=some_pieces(), pieces=some_pieces(4, 4)),
        field="output",
        error=errors.InvalidArgumentError,
    ),
    "receive of more": pair(
        "send",
        lambda: Part(verb="send", tensor=some(4), root=ODD),
        lambda: Part(verb="recv", tensor=some(8), root=0),
        "shape",
    ),
    "receive of less": pair(
        "send",
        lambda: Part(verb="send", tensor=some(8), root=ODD),
        lambda: Part(verb="recv", tensor=some(4), root=0),
        "shape",
    ),
    "receive of another dtype": pair(
        "send",
        lambda: Part(verb="send", tensor=some(4, "float32"), root=ODD),
        lambda: Part(verb="recv", tensor=some(4, "int32"), root=0),
        "dtype",
    ),
    "a read-only target": Situation(
        most=lambda: Part(verb="allreduce", tensor=some()),
        odd=lambda: Part(verb="allreduce", tensor=read_only()),
        field="operand",
        error=errors.ReadOnlyError,
    ),
    "receive into read-only memory": pair(
        "send",
        lambda: Part(verb="send", tensor=some(), root=ODD),
        lambda: Part(verb="recv", tensor=read_only(), root=0),
        "operand",
        error=errors.ReadOnlyError,
    ),
    "targets that overlap": Situation(
        most=lambda: Part(verb="allgather", tensor=some(), pieces=some_pieces()),
        odd=lambda: Part(verb="allgather", tensor=some(), pieces=overlapping()),
        field="operand",
        error=errors.AliasError,
    ),
    "one target twice": Situation(
        most=lambda: Part(verb="allgather", tensor=some(), pieces=some_pieces()),
        odd=lambda: Part(verb="allgather", tensor=some(), pieces=[some()] * WORLD),
        field="operand",
        error=errors.AliasError,
    ),
    "no tensor": Situation(
        most=lambda: Part(verb="allreduce", tensor=some()),
        odd=lambda: Part(verb="allreduce", tensor="text"),
        field="",  # of a plan the operand, of a call the argument
        error=errors.NotATensorError,
    ),
    "receive into no tensor": pair(
        "send",
        lambda: Part(verb="send", tensor=some(), root=ODD),
        lambda: Part(verb="recv", tensor="text", root=0),
        "",
        error=errors.NotATensorError,
    ),
    "a reduce op without a meaning": Situation(
        most=lambda: Part(verb="allreduce", tensor=some(4, "complex64"), op="sum"),
        odd=lambda: Part(verb="allreduce", tensor=some(4, "complex64"), op="max"),
        field="reduce op",
        error=errors.RefusedError,  # it is not what the others do, and numpy has no meaning for it
        no_plan=ONE_CALL.format("reduce op"),
    ),
}


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
    """The actor's half of the situation, by the members' verbs."""
    _CALLS[actor.part.verb](actor.part, group_name, timeout_s)


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
    while not Path(path).exists():
        time.sleep(0.01)  # polls for what another process does


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
        """The driver's verb for it."""
        part = situation.odd()
        refs = [worker.make.remote(lambda self: self.part.tensor) for worker in self.workers]
        lists = [worker.make.remote(lambda self: self.part.pieces) for worker in self.workers]
        common = {"timeout_s": timeout_s}
        name = self.group_name
        if part.verb == "recv":
            return col.recv_ref(refs[ODD], refs[0], name, **common)
        verbs: dict[str, Callable[[], Any]] = {
            "allreduce": lambda: col.allreduce_refs(refs, name, part.op, **common),
            "reduce": lambda: col.reduce_refs(refs, part.root, name, part.op, **common),
            "broadcast": lambda: col.broadcast_refs(refs, part.root, name, **common),
            "allgather": lambda: col.allgather_refs(lists, refs, name, **common),
            "reducescatter": lambda: col.reducescatter_refs(refs, lists, name, part.op, **common),
            "gather": lambda: col.gather_refs(lists[part.root], refs, part.root, name, **common),
            "scatter": lambda: col.scatter_refs(refs, lists[part.root], part.root, name, **common),
            "alltoall": lambda: col.alltoall_refs(lists, refs, name, **common),
        }
        return verbs[part.verb]()

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


CASES = [
    # The ways differ alike on every backend, and gloo has the door of tcp.
    case(backend, way, name, is_more=backend == "gloo" or (backend != "shm" and way != "call"))
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
    case(backend, way, verb, is_more=(verb, backend) != ("allreduce", "shm") and way != "plan")
    for backend in BACKENDS
    for way in WAYS
    for verb in ("allreduce", "recv")
]


@pytest.mark.parametrize(("declared", "team", "verb"), AWAITED, indirect=["declared", "team"])
def test_timeout_names_the_missing_rank(team, verb, tmp_path):
    """It is busy in a method; the others are told whom they waited for, whatever it would have brought."""
    name = "count" if verb == "allreduce" else "receive of more"
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


@pytest.mark.parametrize("team", ["plan"], indirect=True)
def test_a_thread_that_gives_up_ends_the_wait_of_another(team, tmp_path):
    """As soon as it says so, and not when time is up; who was waited for finds nothing to do."""
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
    (tmp_path / "end").touch()
    ray.get(busy)
    for found in col.get(refs):
        np.testing.assert_array_equal(found, np.ones(5))
    team.goes_on("count of a broadcast")


# ---------------------------------------------------------------------------------------------- plans against calls


@pytest.mark.parametrize("team", ["plan"], indirect=True)
@pytest.mark.parametrize("callers", [(ODD,), (0, 2)], ids=["one", "two"])
def test_a_call_out_of_step_with_a_plan_is_a_named_mismatch(team, callers):
    """Some ranks call what the others never will, as the driver's plan is before it: found out, not waited for."""
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
