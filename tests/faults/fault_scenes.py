"""Runs one case of the fault matrix: three actors of which one has a fault, and what is left afterwards."""

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
from tests.faults.inject import IN_KERNEL, Folder
from tests.faults.matrix import (
    DRIVER,
    FAULTS,
    GROUP,
    IN_THE_CHECK,
    LARGE,
    LIMIT_S,
    RUNS_BEFORE,
    SHORT_S,
    SMALL,
    WORLD_SIZE,
    Case,
)
from tests.support.waiting import has_ended, wait_until


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
        comes_last: Whether the faulty rank calls when the others are in the call: in a group that has formed, who calls
            after a death gets another error.
    """

    def __init__(self, case: Case, workers: Sequence[Any], folder: Folder) -> None:
        self.row, self.backend = case.row, case.backend
        self.workers = tuple(workers)
        self.folder = folder
        self.others = tuple(rank for rank in range(WORLD_SIZE) if rank != self.row.rank)
        self.alive = self.others if self.row.is_deadly else tuple(range(WORLD_SIZE))
        self.before: Sequence[float] = range(1, WORLD_SIZE + 1)
        self.after = float(sum(self.before))
        self.comes_last = (self.row.caller, self.row.phase) == ("own call", "before_check")
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
        """Puts the fault into its rank, and into the others what notes that they have come."""
        row = self.row
        nth = RUNS_BEFORE + 1 if row.caller == "run" else 2 if self.is_chunked else 1
        more = {"way": self.backend} if row.fault in IN_THE_CHECK else {}
        where = {"group": GROUP, "folder": str(self.folder.path)}
        faults = [FAULTS[row.fault](row.rank, row.phase, nth=nth, **where, **more)]
        if self.comes_last:
            faults += [inject.note_at(rank, row.phase, **where) for rank in self.others]
        ray.get([self.workers[fault.rank].call.remote(inject.put_fault, fault) for fault in faults])

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

    def call_all(self) -> Sequence[Any]:
        """Has all ranks call a collective."""
        calls = {rank: self._call(rank) for rank in self.others}
        if self.comes_last:
            assert wait_until(lambda: all(map(self.folder.has_come, self.others))), "the others did not call"
        calls[self.row.rank] = self._call(self.row.rank)
        return [calls[rank] for rank in range(WORLD_SIZE)]

    def _call(self, rank: int) -> Any:
        return self.workers[rank].call.remote(reduce_here, GROUP, self.row.timeout_s)

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
        workers: Three actors of `tests.support.actors.Worker`.
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
            assert wait_until(lambda: has_ended(faulty_pid)), "the fault was not consumed"
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
    scene.all_called(seen, scene.call_all())

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
