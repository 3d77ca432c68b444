"""What each fault has to lead to: a table, and what runs one case of it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ray

import raycollect as col
from raycollect import errors
from tests.faults import inject
from tests.faults.inject import IN_KERNEL, Fault, Folder
from tests.ray.workers import wait_until

GROUP = "faulty"
WORLD_SIZE = 3
LIMIT_S = 20.0
"""How long anybody may have to wait for an error, on a machine that does other things too. How long it took on one that
did not is in docs/reliability.md."""

SHORT_S = 1.5
"""The time limit of a collective that will not end."""

SMALL, LARGE = 10, 1_250_000
"""Elements of float32; of the large arrays each backend makes several chunks."""

RUNS_BEFORE = 3
"""How many runs of a captured step go well; from the third on they are done the short way."""

FAULTS: dict[str, Callable[..., Fault]] = {
    "SIGKILL": partial(inject.die_at, way="sigkill"),
    "os._exit": partial(inject.die_at, way="exit"),
    "ray.kill": partial(inject.die_at, way="ray.kill"),
    "SystemExit": partial(inject.die_at, way="SystemExit"),
    "raises": inject.raise_at,
    "is held": inject.delay_at,
    "loses its arrival": inject.drop_at,
    "garbles its arrival": inject.corrupt_at,
    "loses a frame": partial(inject.drop_at, way="link"),
    "garbles a frame": partial(inject.corrupt_at, way="link"),
}
"""What a participant does."""

DEADLY = ("SIGKILL", "os._exit", "ray.kill", "SystemExit")
AT_THE_DOOR = ("loses its arrival", "garbles its arrival")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What a fault has to lead to.

    Attributes:
        fault: A name in `FAULTS`.
        phase: Where it strikes.
        backends: On which.
        caller: A name in `CALLERS`: by what the ranks came there.
        rank: In which rank.
        error: What is raised on the driver; in calls of the members, on all other ranks. None: nothing.
        goes_on: Whether the driver hears no more than that its wait is over and the collective goes on.
        later: What is raised then, once the rank goes on.
        other: What is raised instead of `error`, where somebody else may be the first to tell.
        blamed: The ranks of which one is named; empty: the rank.
        leaves: What the tensors of the other ranks may be afterwards; see `Seen.tensors`.
        works: Whether the very group can be used again; by all, where nobody has died.
        timeout_s: The time limit of the collective.
    """

    fault: str
    phase: str
    backends: tuple[str, ...]
    caller: str = "plan"
    rank: int = 1
    error: type[BaseException] | None
    goes_on: bool = False
    later: type[BaseException] | None = None
    other: type[BaseException] | None = None
    blamed: tuple[int, ...] = ()
    leaves: tuple[str, ...]
    works: bool
    timeout_s: float = 60.0

    @property
    def is_deadly(self) -> bool:
        return self.fault in DEADLY


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A row on one of its backends."""

    row: Row
    backend: str

    def __str__(self) -> str:
        row = self.row
        words = (row.caller, self.backend, row.phase, *row.fault.split(), *(() if row.rank else ("hub",)))
        return "-".join(words)


@dataclass(slots=True, kw_only=True)
class Seen:
    """What came of a case.

    Attributes:
        raised: What was raised, by the rank that raised it; `DRIVER`: on the driver.
        seconds: From the fault to the last of them.
        later: What was raised on the driver once the rank went on, where there was no outcome before.
        outputs: What whoever uses an output of one of the other ranks gets.
        pids: The processes of the other ranks, before and after.
        tensors: What became of the tensors of the other ranks: ``"before"`` is what they held, ``"after"`` the result;
            ``"dirty"`` can't be read; ``"torn"`` is never right.
        survivors: What another collective gives those who live, in a group of their own.
        group: What the group gives when it is used again.
    """

    raised: dict[int, BaseException | None] = field(default_factory=dict)
    seconds: float = 0.0
    later: BaseException | None = None
    outputs: list[BaseException | None] = field(default_factory=list)
    pids: tuple[tuple[int, ...], ...] = ()
    tensors: tuple[str, ...] = ()
    survivors: BaseException | None = None
    group: BaseException | None = None


DRIVER = -1


# ---------------------------------------------------------------------------------------------- what the actors run


def fresh(self: Any, rank: int, size: int) -> Any:
    """Makes the actor's array anew."""
    self.buffer = np.full(size, rank + 1, np.float32)
    return self.buffer


def reduce_here(self: Any, group: str, timeout_s: float) -> None:
    """Calls a collective itself."""
    col.allreduce(self.buffer, group, timeout_s=timeout_s)


def join_here(self: Any, group: str, rank: int, backend: str) -> None:
    """Makes a group with the other members, and forms it by a first collective."""
    col.init_collective_group(WORLD_SIZE, rank, backend, group)
    col.barrier(group)


def leave(self: Any, group: str) -> None:
    """Ends its part in a group of the members' own."""
    col.destroy_collective_group(group)


def pid_of(self: Any) -> int:
    """The process of an actor."""
    return os.getpid()


# ---------------------------------------------------------------------------------------------- one case


class Scene:
    """Three actors, one of which has a fault.

    Args:
        case: The case.
        workers: The actors.
        folder: See `Folder`.

    Attributes:
        row: What it has to lead to.
        backend: On which backend.
        others: The ranks without the fault.
        alive: The ranks that live on.
        refs: The arrays, by rank.
        before: What the arrays hold before the collective in which the fault strikes, by rank.
        after: What it makes of them.
    """

    def __init__(self, case: Case, workers: Sequence[Any], folder: Folder) -> None:
        self.row, self.backend = case.row, case.backend
        self.workers = tuple(workers)
        self.folder = folder
        self.others = tuple(rank for rank in range(WORLD_SIZE) if rank != self.row.rank)
        self.alive = self.others if self.row.is_deadly else tuple(range(WORLD_SIZE))
        self.before: Sequence[float] = range(1, WORLD_SIZE + 1)
        self.after = float(sum(self.before))
        self.is_chunked = self.row.phase == IN_KERNEL and self.row.caller != "run"
        self.refs = self.make(LARGE if self.is_chunked else SMALL)

    def make(self, size: int = SMALL, ranks: Sequence[int] = range(WORLD_SIZE)) -> list[Any]:
        """Makes the arrays of ranks anew, and waits until they are there."""
        refs = [self.workers[rank].make.remote(fresh, rank, size) for rank in ranks]
        ray.wait(refs, num_returns=len(refs))
        return refs

    def declare(self) -> Any:
        """Declares the group."""
        return col.declare_collective_group(self.workers, group_name=GROUP, backend=self.backend)

    def put_fault(self) -> None:
        """Puts the fault into its rank."""
        row = self.row
        nth = RUNS_BEFORE + 1 if row.caller == "run" else 2 if self.is_chunked else 1
        more = {"way": self.backend} if row.fault in AT_THE_DOOR else {}
        fault = FAULTS[row.fault](row.rank, row.phase, nth=nth, group=GROUP, folder=str(self.folder.path), **more)
        ray.get(self.workers[row.rank].call.remote(inject.put_fault, fault))

    def heard(self, seen: Seen, work: Any) -> None:
        """Waits for an outcome on the driver; where there is none yet, lets the rank go on, and waits for it again."""
        if self.row.goes_on:  # a short wait, which begins when there is something to wait for
            assert wait_until(lambda: self.folder.struck_s is not None), "the fault was not consumed"
        limit_s = SHORT_S if self.row.goes_on else LIMIT_S
        seen.raised[DRIVER] = raised_by(lambda: work.wait(limit_s))
        seen.seconds = time.time() - (self.folder.struck_s or 0)
        if self.row.goes_on:
            self.folder.release()
            seen.later = raised_by(lambda: work.wait(LIMIT_S))

    def all_called(self, seen: Seen, calls: Sequence[Any]) -> None:
        """Waits for the calls of the other ranks."""
        for rank in self.others:
            seen.raised[rank] = raised_by(lambda rank=rank: ray.get(calls[rank]))
        seen.seconds = time.time() - (self.folder.struck_s or 0)

    def tensor(self, rank: int) -> str:
        """What became of a rank's tensor."""
        try:
            found = col.get(self.refs[rank])
        except errors.TensorDirtyError:
            return "dirty"
        states = {"before": self.before[rank], "after": self.after}
        return next((name for name, value in states.items() if (found == value).all()), "torn")

    def reduce_once(self, ranks: Sequence[int], group: str) -> None:
        """A collective of ranks, which has to be right."""
        refs = self.make(SMALL, ranks)
        col.allreduce_refs(refs, group)
        for found in col.get(refs):
            np.testing.assert_array_equal(found, sum(rank + 1 for rank in ranks))

    def survive(self) -> None:
        """A collective of those who are not held, in a group of their own."""
        workers = [self.workers[rank] for rank in self.others]
        col.declare_collective_group(workers, group_name="survivors", backend=self.backend)
        self.reduce_once(self.others, "survivors")


def run_case(case: Case, workers: Sequence[Any], path: Path) -> Seen:
    """Runs a case, and looks at what is left.

    Args:
        case: The case.
        workers: Three actors of `tests.ray.workers.Worker`.
        path: A fresh directory.
    """
    folder = Folder(path)
    try:
        scene, seen = Scene(case, workers, folder), Seen()

        def pids() -> tuple[int, ...]:
            return tuple(ray.get([workers[rank].call.remote(pid_of) for rank in scene.others]))

        faulty_pid, before = ray.get(workers[case.row.rank].call.remote(pid_of)), pids()
        again = CALLERS[case.row.caller](scene, seen)
        assert folder.struck_s is not None, "the fault was not consumed"
        seen.pids = before, pids()
        seen.tensors = tuple(map(scene.tensor, scene.others))
        seen.survivors = raised_by(scene.survive)
        folder.release()
        seen.group = raised_by(again)
        if case.row.is_deadly:
            assert wait_until(lambda: not Path(f"/proc/{faulty_pid}").exists()), "the fault was not consumed"
        else:
            ray.get(workers[case.row.rank].call.remote(inject.take_back))
        return seen
    finally:
        folder.close()


def raised_by(call: Callable[[], Any]) -> BaseException | None:
    """What a call raises; of what a method raised, what it was there."""
    try:
        call()
    except ray.exceptions.RayTaskError as exc:
        return exc.cause  # type: ignore[no-any-return]
    except (errors.RaycollectError, ray.exceptions.RayError) as exc:
        return exc
    return None


# ---------------------------------------------------------------------------------------------- who calls


def by_plan(scene: Scene, seen: Seen, *, inplace: bool = True) -> Callable[[], None]:
    """The driver calls a collective."""
    scene.declare()
    scene.put_fault()
    work = col.allreduce_refs(scene.refs, GROUP, inplace=inplace, async_op=True, timeout_s=scene.row.timeout_s)
    scene.heard(seen, work)
    if not inplace:
        uses = [scene.workers[rank].set_buffer.remote(work.refs[rank]) for rank in scene.others]
        seen.outputs = [raised_by(lambda ref=ref: ray.get(ref)) for ref in uses]
    return lambda: scene.reduce_once(scene.alive, GROUP) if not scene.row.is_deadly else col.barrier(GROUP)


def by_run(scene: Scene, seen: Seen) -> Callable[[], None]:
    """The driver runs a captured step."""
    scene.declare()
    scene.put_fault()
    with col.capture() as step:
        col.allreduce_refs(scene.refs, GROUP, timeout_s=scene.row.timeout_s)
    for _ in range(RUNS_BEFORE):
        step.run()
    value = scene.after * WORLD_SIZE ** (RUNS_BEFORE - 1)
    scene.before, scene.after = [value] * WORLD_SIZE, value * WORLD_SIZE
    scene.heard(seen, step.run(async_op=True))
    assert isinstance(raised_by(step.run), errors.CaptureBrokenError)
    step.close()
    return lambda: scene.reduce_once(scene.alive, GROUP) if not scene.row.is_deadly else col.barrier(GROUP)


def by_call(scene: Scene, seen: Seen) -> Callable[[], None]:
    """The members of a declared group call a collective."""
    scene.declare()
    scene.put_fault()
    return _called(scene, seen)


def by_own_call(scene: Scene, seen: Seen) -> Callable[[], None]:
    """The members of a group of their own call a collective."""
    ray.get([one.call.remote(join_here, GROUP, at, scene.backend) for at, one in enumerate(scene.workers)])
    scene.put_fault()
    again = _called(scene, seen)

    def once_more() -> None:
        try:
            again()
        finally:
            ray.get([scene.workers[rank].call.remote(leave, GROUP) for rank in scene.alive])

    return once_more


def _called(scene: Scene, seen: Seen) -> Callable[[], None]:
    row = scene.row
    scene.all_called(seen, [one.call.remote(reduce_here, GROUP, row.timeout_s) for one in scene.workers])

    def again() -> None:
        scene.make(SMALL, scene.alive)
        ray.get([scene.workers[rank].call.remote(reduce_here, GROUP, LIMIT_S) for rank in scene.alive])

    return again


CALLERS: dict[str, Callable[[Scene, Seen], Callable[[], None]]] = {
    "plan": by_plan,
    "outputs": partial(by_plan, inplace=False),
    "run": by_run,
    "call": by_call,
    "own call": by_own_call,
}
"""Each gives what uses the group once more."""


# ---------------------------------------------------------------------------------------------- the table

MESH = ("shm", "tcp")
ALL = (*MESH, "gloo")

UNTOUCHED, DONE, DIRTY = ("before",), ("after",), ("dirty",)
NOT_TORN = (*UNTOUCHED, *DONE, *DIRTY)
"""Whoever is told while it leaves the door stops there; whoever needs no more of the others ends well, as what small
arrays hold comes with the arrivals; the rest is dirty."""


def _rows(phase: str, backends: tuple[str, ...], fault: str, error: Any, leaves: tuple[str, ...], **more: Any) -> Row:
    """A row; a group breaks where somebody has died, unless it says otherwise."""
    return Row(
        **{"works": fault not in DEADLY} | more, fault=fault, phase=phase, backends=backends, error=error, leaves=leaves
    )


_DIED, _FAILED, _LATE = errors.ParticipantDiedError, errors.KernelError, errors.CollectiveTimeoutError
_GARBLED = errors.ProtocolError
_SHORT: dict[str, Any] = {"timeout_s": SHORT_S}
_GOES_ON: dict[str, Any] = {"goes_on": True}

TABLE: tuple[Row, ...] = (
    # a process ends
    _rows("before_door", ALL, "SIGKILL", _DIED, UNTOUCHED),
    _rows("after_door", ALL, "SIGKILL", _DIED, NOT_TORN),
    _rows("before_kernel", ALL, "SIGKILL", _DIED, NOT_TORN),
    _rows("in_kernel", ALL, "SIGKILL", _DIED, DIRTY),
    _rows("after_kernel", ALL, "SIGKILL", _DIED, NOT_TORN),
    _rows("before_door", ("shm",), "os._exit", _DIED, UNTOUCHED),
    _rows("before_kernel", ("tcp",), "ray.kill", _DIED, NOT_TORN),
    _rows("before_door", ALL, "SystemExit", _DIED, UNTOUCHED),
    # a participant fails
    _rows("before_door", ALL, "raises", _FAILED, UNTOUCHED),
    _rows("after_door", ALL, "raises", _FAILED, NOT_TORN),
    _rows("before_kernel", ALL, "raises", _FAILED, NOT_TORN),
    _rows("in_kernel", MESH, "raises", _FAILED, DIRTY),
    _rows("in_kernel", ("gloo",), "raises", _FAILED, DIRTY, works=False),
    _rows("after_kernel", ALL, "raises", _FAILED, NOT_TORN),
    # a participant stays away
    _rows("before_door", ALL, "is held", _LATE, UNTOUCHED, **_SHORT),
    _rows("in_kernel", MESH, "is held", _LATE, DIRTY, **_SHORT),
    _rows("in_kernel", ("gloo",), "is held", _LATE, DIRTY, works=False, **_SHORT),
    _rows("after_door", ALL, "is held", _LATE, DONE, **_GOES_ON),
    _rows("before_kernel", ALL, "is held", _LATE, DONE, **_GOES_ON),
    _rows("after_kernel", ALL, "is held", _LATE, DONE, **_GOES_ON),
    # what it says is lost, or damaged
    _rows("before_door", ("shm",), "loses its arrival", None, DONE),
    *(
        _rows(
            "before_door", (on,), "loses its arrival", errors.PlanAbortedError, UNTOUCHED, blamed=(0, 1, 2), works=False
        )
        for on in ("tcp", "gloo")
    ),
    _rows("before_door", ("shm",), "garbles its arrival", _GARBLED, UNTOUCHED),
    _rows("before_door", ("tcp", "gloo"), "garbles its arrival", _GARBLED, NOT_TORN),
    _rows("after_kernel", ("tcp", "gloo"), "loses a frame", _LATE, DONE, works=False, later=_DIED, **_GOES_ON),
    _rows("after_kernel", ("tcp", "gloo"), "garbles a frame", _DIED, NOT_TORN, works=False),
    # where outputs are made
    *(
        _rows("before_door", ALL, fault, error, UNTOUCHED, caller="outputs")
        for fault, error in (("SIGKILL", _DIED), ("raises", _FAILED))
    ),
    *(
        _rows("in_kernel", MESH, fault, error, UNTOUCHED, caller="outputs")
        for fault, error in (("SIGKILL", _DIED), ("raises", _FAILED))
    ),
    # runs of a captured step
    _rows("before_door", ALL, "SIGKILL", _DIED, UNTOUCHED, caller="run"),
    _rows("in_kernel", MESH, "SIGKILL", _DIED, NOT_TORN, caller="run"),
    _rows("after_kernel", MESH, "SIGKILL", _DIED, NOT_TORN, caller="run"),
    _rows("before_door", ALL, "raises", _FAILED, UNTOUCHED, caller="run"),
    _rows("in_kernel", MESH, "raises", _FAILED, NOT_TORN, caller="run"),
    _rows("before_door", MESH, "is held", _LATE, UNTOUCHED, caller="run", **_SHORT),
    # calls of the members
    _rows("before_door", ALL, "SIGKILL", _DIED, UNTOUCHED, caller="call"),
    _rows("in_kernel", ALL, "SIGKILL", _DIED, DIRTY, caller="call"),
    _rows("before_door", ALL, "raises", _FAILED, UNTOUCHED, caller="call"),
    _rows("in_kernel", MESH, "raises", errors.PlanAbortedError, DIRTY, caller="call"),
    _rows("before_door", ALL, "is held", _LATE, UNTOUCHED, caller="call", **_SHORT),
    _rows("in_kernel", ALL, "is held", _LATE, DIRTY, caller="call", **_SHORT),
    *(_rows("before_door", MESH, "SIGKILL", _DIED, UNTOUCHED, caller="own call", rank=rank) for rank in (0, 1)),
    _rows("in_kernel", MESH, "SIGKILL", _DIED, DIRTY, caller="own call"),
)


def cases() -> list[Case]:
    """Every row on each of its backends."""
    return [Case(row=row, backend=backend) for row in TABLE for backend in row.backends]
