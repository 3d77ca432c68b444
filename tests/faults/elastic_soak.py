"""A member is killed every second while an allreduce loop runs, and replaced: how long until the next right result?

Run it with ``python -m tests.faults.elastic_soak``; it exits 1 if a result was wrong, or if anything grew (as in
`tests/faults/growth.py`). It kills by SIGKILL at a random moment, in a thread of its own.

Every member keeps a model, to which it adds the sum of all gradients of each step. The driver computes the same with
numpy, from who was a member in each step. A step whose run failed counts for nobody: a member holds its sum back until
the next run says that all had it. A newcomer gets the model of a member that stayed, by a broadcast.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from statistics import median
from typing import Any
from zlib import crc32

import click
import numpy as np
import ray

import raycollect as col
from raycollect import errors
from tests.faults.growth import Look, by_class, grown, look, prepare, rising
from tests.support.actors import Buffers
from tests.support.waiting import has_ended

SIZE = 4096
"""The elements of a gradient."""

LOST = (errors.FaultError, errors.GroupError, errors.RefusedError)
"""What a loop gets that has lost a member."""
WARM = 10
"""How many steps come before a look, so that members remember what they do of steps that are repeated."""
MOST_S = 60.0
"""How long a step may fail before the loop gives up."""


def gradient_of(number: int, step: int) -> Any:
    """What member `number` computes in a step: small whole numbers, whose sums are exact in any order."""
    return ((np.arange(SIZE) * (number + 1) + 7 * step) % 64).astype(np.float32)


class Trainee(Buffers):
    """Holds a model, and the sum of the last step until it is known that all had it."""

    def begin(self, number: int) -> int:
        self.number, self.held = number, (-1, np.zeros(SIZE, np.float32))
        self.buffer, self.model = np.zeros(SIZE, np.float32), np.zeros(SIZE, np.float64)
        return os.getpid()

    def settle(self, good: int) -> Any:
        """Adds what is held, if all had it: `good` is the last step that went well."""
        step, total = self.held
        if step == good:
            self.model += total
        self.held = (-1, total)
        return self.model

    def gradient(self, step: int, good: int) -> Any:
        self.settle(good)
        np.copyto(self.buffer, gradient_of(self.number, step))
        col.mark_written(self.buffer)  # a kernel may have been cut off in it
        return self.buffer

    def hold(self, step: int, total: Any) -> tuple[int, int]:
        self.held = (step, total.copy())
        return crc32(total), crc32(self.model)

    def check(self, name: str) -> tuple[int, int, float]:
        """A call of the members' own: rank, world size and the sum of all ranks."""
        ranks = np.full(3, col.get_rank(name), np.float32)
        col.allreduce(ranks, name)
        return col.get_rank(name), col.get_collective_group_size(name), float(ranks[0])


Actor = ray.remote(num_cpus=0)(Trainee)


@dataclass
class Loop:
    """An allreduce loop over a group whose members die.

    Attributes:
        lasting: How many members are never killed: the first ones.
        is_traced: Whether it runs a step; else it calls operations and methods.
    """

    backend: str
    size: int = 4
    lasting: int = 2
    is_traced: bool = True
    name: str = "elastic"
    step: int = 0
    good: int = 0
    made: int = 0
    wrong: list[str] = field(default_factory=list)
    recovered_s: list[float] = field(default_factory=list)  # from kill to the next right result
    waited_s: list[float] = field(default_factory=list)  # for the new actor, which is made before where there was time
    replaced_s: list[float] = field(default_factory=list)  # in `Group.replace`
    killed: tuple[float, int] | None = None  # when the last process was killed, and which, until it is replaced

    def start(self) -> None:
        self.spares = ThreadPoolExecutor(1)
        lasting = [Actor.options(runtime_env={"env_vars": {"MALLOC_ARENA_MAX": "1"}}) for _ in range(self.lasting)]
        self.members = [self._ready(one) for one in (*lasting, *[Actor] * (self.size - self.lasting))]
        actors = [actor for actor, _, _ in self.members]
        self.group = col.declare_collective_group(actors, backend=self.backend, group_name=self.name)
        ray.get([actor.call.remote(prepare) for actor in actors[: self.lasting]])
        self.model = np.zeros(SIZE, np.float64)
        self.next: Future[Any] = self.spares.submit(self._ready, Actor)
        self.traced = col.step(self._iteration) if self.is_traced else None

    def _ready(self, cls: Any) -> tuple[Any, int, int]:
        """An actor, its number, its process."""
        self.made += 1
        actor, number = cls.remote(), self.made
        return actor, number, ray.get(actor.begin.remote(number))

    def _iteration(self, step: int, good: int) -> Any:
        refs = [actor.gradient.remote(step, good) for actor, _, _ in self.members]
        col.allreduce_refs(refs, self.name)
        return [actor.hold.remote(step, ref) for (actor, _, _), ref in zip(self.members, refs, strict=True)]

    def turn(self) -> None:
        """One step that goes well, however many members are lost on the way."""
        self.step += 1
        until_s = time.monotonic() + MOST_S
        while True:
            try:
                told = self._run() if self.traced is None else self.traced(self.step, self.good)
                break
            except LOST:
                if time.monotonic() > until_s:
                    raise
                self._mend()
        total = sum(gradient_of(number, self.step) for _, number, _ in self.members)
        if [tuple(one) for one in told] != [(crc32(total), crc32(self.model))] * self.size:
            self.wrong.append(f"step {self.step}: {told}, not {(crc32(total), crc32(self.model))}")
        self.model = self.model + total
        self.good = self.step
        killed = self.killed
        if killed is not None and killed[1] not in [pid for _, _, pid in self.members]:
            self.recovered_s.append(time.perf_counter() - killed[0])
            self.killed = None

    def _run(self) -> Any:
        actors = [actor for actor, _, _ in self.members]
        refs = [actor.gradient.remote(self.step, self.good) for actor in actors]
        col.allreduce_refs(refs, self.name, timeout_s=20)
        try:
            return ray.get([actor.hold.remote(self.step, ref) for actor, ref in zip(actors, refs, strict=True)])
        except ray.exceptions.RayError as exc:
            raise errors.ParticipantDiedError(detail=str(exc)) from exc

    def _mend(self) -> None:
        """Replaces who is dead, and gives the newcomers the model."""
        while dead := [rank for rank, (_, _, pid) in enumerate(self.members) if has_ended(pid)]:
            began_s = time.perf_counter()
            newcomers = [self._spare() for _ in dead]
            there_s = time.perf_counter()
            try:
                self.group.replace(dead, [actor for actor, _, _ in newcomers])
                self.waited_s.append(there_s - began_s)
                self.replaced_s.append(time.perf_counter() - there_s)
                for rank, one in zip(dead, newcomers, strict=True):
                    self.members[rank] = one
                refs = [actor.settle.remote(self.good) for actor in self.group.actors]
                col.broadcast_refs(refs, 0, self.name, timeout_s=20)
            except LOST:
                continue  # another one has died meanwhile

    def _spare(self) -> tuple[Any, int, int]:
        found, self.next = self.next.result(), self.spares.submit(self._ready, Actor)
        return found

    def kill(self, chance: random.Random) -> None:
        """Kills a member, unless the last one is not replaced yet."""
        if self.killed is None:
            _, _, pid = self.members[chance.randrange(self.lasting, self.size)]
            self.killed = time.perf_counter(), pid
            os.kill(pid, signal.SIGKILL)

    def check(self) -> None:
        """The members' own calls see the ranks of now."""
        told = ray.get([actor.check.remote(self.name) for actor in self.group.actors])
        if told != [(rank, self.size, sum(range(self.size))) for rank in range(self.size)]:
            self.wrong.append(f"members' own call: {told}")

    def stop(self) -> None:
        if self.traced is not None:
            self.traced.close()
        self.group.destroy()
        self.spares.shutdown()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a loop; `wrong` and `grew` are empty where all is well."""

    loop: Loop
    steps: int
    kills: int
    looks: tuple[Look, ...]
    grew: tuple[str, ...]


def soak(loop: Loop, *, seconds: float, every_s: float, looks: int = 6, seed: int = 1) -> Outcome:
    """Runs a loop, and kills a member every so many seconds, unless the last one is not replaced yet."""
    loop.start()
    found, chance, done = [], random.Random(seed), threading.Event()

    def killer() -> None:
        while not done.wait(every_s * chance.uniform(0.5, 1.5)):
            loop.kill(chance)

    loop.turn()
    for number in range(looks):
        done.clear()
        thread = threading.Thread(target=killer)
        thread.start()
        until_s = time.monotonic() + seconds / looks
        while time.monotonic() < until_s:
            loop.turn()
        done.set()
        thread.join()
        while loop.killed is not None:
            loop.turn()
        loop.check()
        for _ in range(WARM):
            loop.turn()
        loop.next.result()
        actors = [actor for actor, _, _ in loop.members[: loop.lasting]]
        before = found[0] if found else None
        found.append(
            look(
                loop.step,
                actors,
                kills=len(loop.recovered_s),
                before=before,
                waits=looks > 1 and number in (0, looks - 1),
            )
        )
    grew = (*grown(found[0], found[-1]), *(rising(found, killed=True) if looks > 2 else ()))
    loop.stop()
    return Outcome(loop=loop, steps=loop.step, kills=len(loop.recovered_s), looks=tuple(found), grew=grew)


def told(outcome: Outcome) -> str:
    """A line for a person."""
    loop = outcome.loop
    way = "step" if loop.is_traced else "operations"
    return (
        f"{loop.backend}, {way}: {outcome.steps} steps, {outcome.kills} kills; from kill to the next right result "
        f"{_spread(loop.recovered_s)}, of that for a new actor {_spread(loop.waited_s)}, in Group.replace "
        f"{_spread(loop.replaced_s)}; wrong: {len(loop.wrong)}; grew: {', '.join(outcome.grew) or 'nothing'}"
    )


def _spread(took: Sequence[float]) -> str:
    ms = [1000 * one for one in sorted(took)]
    return f"median {median(ms):.0f} ms, 90 % {ms[len(ms) * 9 // 10]:.0f} ms, worst {ms[-1]:.0f} ms"


def run(seconds: float, every_s: float, ways: Sequence[tuple[str, bool]], tell: Callable[[str], None]) -> bool:
    """Runs all loops one after the other; returns whether all went well."""
    well = True
    for backend, is_traced in ways:
        outcome = soak(Loop(backend=backend, is_traced=is_traced), seconds=seconds / len(ways), every_s=every_s)
        tell(told(outcome))
        for line in (*outcome.loop.wrong[:5], *(by_class(outcome.looks[0], outcome.looks[-1]) if outcome.grew else ())):
            tell(line)
        well = well and not outcome.loop.wrong and not outcome.grew
    return well


@click.command()
@click.option("--seconds", default=600.0, show_default=True, help="For how long, in all.")
@click.option("--every", default=1.0, show_default=True, help="Seconds between two kills, on average.")
def main(seconds: float, every: float) -> None:
    """Kills and replaces members of allreduce loops, and exits 1 if a result is wrong, or anything grows."""
    ray.init(address="local", num_cpus=16, include_dashboard=False, log_to_driver=False, object_store_memory=1 << 28)
    ways = [("shm", True), ("tcp", True), ("shm", False)]
    well = run(seconds, every, ways, click.echo)
    ray.shutdown()
    sys.exit(not well)


if __name__ == "__main__":
    from tests.faults.elastic_soak import (
        main as main_of_module,
    )  # not as __main__, whose functions would travel by value

    main_of_module()
