"""Groups that come and go over the same actors, and actors that are killed and replaced: what grows meanwhile?

Run it with ``python -m tests.faults.soak``, or ``make soak``; it exits 1, and says what grew, if anything did. How that
is measured is in `tests/faults/growth.py`.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import click
import numpy as np
import ray

import raycollect as col
from raycollect import errors
from tests.faults.growth import BACKENDS, RULES, SETTLE_S, Look, Rule, by_class, grown, look, prepare, rising, slope
from tests.faults.report import write_section
from tests.support.actors import Buffers, spread

LASTING = 3
"""How many actors live from the first cycle to the last."""


# ---------------------------------------------------------------------------------------------- cycles


class Soaked(Buffers):
    """A participant with methods for captured steps."""

    def ones(self, size: int) -> Any:
        return np.ones(size, np.float32)

    def total(self, value: Any) -> float:
        return float(value.sum())


Actor = ray.remote(Soaked)


def start(count: int, **options: Any) -> list[Any]:
    return [Actor.options(num_cpus=0, **options).remote() for _ in range(count)]


def start_lasting() -> list[Any]:
    """Starts the lasting actors.

    The C library keeps memory for each of many threads that come and go, some 10 MB in all, which takes hundreds of
    cycles to fill: here for one, so that what is seen to grow is what grows.
    """
    return start(LASTING, runtime_env={"env_vars": {"MALLOC_ARENA_MAX": "1"}})


def _equal(refs: Sequence[Any], expected: Sequence[Any]) -> None:
    for found, one in zip(col.get(list(refs)), expected, strict=True):
        np.testing.assert_array_equal(np.asarray(found), one)


def _allreduce(name: str, actors: Sequence[Any]) -> None:
    refs = spread(actors, lambda rank: np.arange(5000) + rank)
    col.allreduce_refs(refs, name)
    _equal(refs, [sum(np.arange(5000) + rank for rank in range(len(actors)))] * len(actors))


def _broadcast(name: str, actors: Sequence[Any]) -> None:
    refs = spread(actors)
    col.broadcast_refs(refs, len(actors) - 1, name)
    _equal(refs, [[len(actors) - 1]] * len(actors))


def _send(name: str, actors: Sequence[Any]) -> None:
    refs = spread(actors)
    col.send_ref(refs[0], refs[-1], name)
    _equal([refs[-1], col.send_ref(refs[0], actors[1], name)], [[0], [0]])


def _outputs(name: str, actors: Sequence[Any]) -> None:
    refs = spread(actors, lambda rank: np.full(3 << 17, rank))  # larger than what is fetched with the answer
    _equal(col.allreduce_refs(refs, name, inplace=False), [np.full(3 << 17, sum(range(len(actors))))] * len(actors))
    _equal(refs[-1:], [np.full(3 << 17, len(actors) - 1)])


def _batch(name: str, actors: Sequence[Any]) -> None:
    many = [spread(actors, lambda rank, at=at: [rank + at]) for at in range(4)]
    with col.batch():
        for refs in many:
            col.allreduce_refs(refs, name)
    _equal([many[3][0]], [[sum(range(len(actors))) + 3 * len(actors)]])


def _captured(name: str, actors: Sequence[Any], *, closes: bool = True) -> None:
    with col.capture() as step:
        refs = [step.call(actor.ones, 9) for actor in actors]
        col.allreduce_refs(refs, name)
        step.returns([step.call(actor.total, ref) for actor, ref in zip(actors, refs, strict=True)])
    for _ in range(3):
        assert step.run() == [9.0 * len(actors)] * len(actors)
    if closes:
        step.close()


def _forsaken(name: str, actors: Sequence[Any]) -> None:
    """A captured step that is never closed: who has it no more is noticed when the next plan is sent."""
    _captured(name, actors, closes=False)
    _broadcast(name, actors)


USES: tuple[Callable[[str, Sequence[Any]], None], ...] = (
    _allreduce,
    _broadcast,
    _send,
    _outputs,
    _batch,
    _captured,
    _forsaken,
)


def use(cycle: int, actors: Sequence[Any]) -> str:
    """Declares a group of a new name and uses it; returns the name."""
    name = f"soak-{cycle}"
    col.declare_collective_group(actors, group_name=name, backend=BACKENDS[cycle % len(BACKENDS)])
    for one in USES:
        one(name, actors)
    return name


def come_and_go(cycle: int, actors: Sequence[Any]) -> None:
    col.destroy_collective_group(use(cycle, actors))


def kill_one(cycle: int, actors: Sequence[Any]) -> None:
    """One more actor is in the group, and is killed: in every other cycle while the others wait for it."""
    (victim,) = start(1)
    everybody = [*actors, victim]
    name = use(cycle, everybody)
    refs = spread(actors)
    if cycle % 2:
        work = col.allreduce_refs([*refs, victim.make.remote(_never)], name, async_op=True)
        ray.kill(victim)
        with suppress(errors.FaultError, errors.RefusedError):
            work.wait(SETTLE_S)
            raise AssertionError("a collective of a killed actor succeeded")
    else:
        ray.kill(victim)
    _await_broken(name, [*refs, victim.make.remote(_never)])
    col.destroy_collective_group(name)


def _await_broken(name: str, refs: Sequence[Any]) -> None:
    until_s = time.monotonic() + SETTLE_S
    while time.monotonic() < until_s:
        try:
            col.allreduce_refs(list(refs), name, timeout_s=5)
        except errors.GroupBrokenError:
            return
        except (errors.FaultError, errors.RefusedError):
            continue
    raise AssertionError("the death of an actor went unnoticed")


def _never(actor: Any) -> None:
    threading.Event().wait()


# ---------------------------------------------------------------------------------------------- phases


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """Cycles of one kind.

    Attributes:
        name: What a person calls it.
        cycle: One cycle: what to do with its number and the lasting actors.
        is_kept: Whether another group of the lasting actors is there all the time, so that no lease ends.
        kills: Whether its cycles are those of ``--kills``.
    """

    name: str
    cycle: Callable[[int, Sequence[Any]], None]
    is_kept: bool = False
    kills: bool = False


PHASES = (
    Phase(name="groups come and go", cycle=come_and_go),
    Phase(name="the same, beside a group that stays", cycle=come_and_go, is_kept=True),
    Phase(name="an actor is killed in each group", cycle=kill_one, kills=True),
    Phase(name="the same, beside a group that stays", cycle=kill_one, is_kept=True, kills=True),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a phase; `grew` is empty where all is well."""

    phase: Phase
    looks: tuple[Look, ...]
    duration_s: float
    grew: tuple[str, ...]
    classes: tuple[str, ...]


def soak(phase: Phase, actors: Sequence[Any], *, cycles: int, looks: int) -> Outcome:
    """Runs a phase. The first look is after one cycle of each way, or a third of all cycles.

    Args:
        phase: The phase.
        actors: The lasting actors.
        cycles: How many cycles.
        looks: How often to look after the first time.
    """
    begun_s = time.monotonic()
    warm = min(len(BACKENDS), -(-cycles // 3))
    at = sorted({warm + round((cycles - warm) * number / looks) for number in range(looks + 1)})
    found: list[Look] = []
    with _staying(actors) if phase.is_kept else nullcontext():
        for number in range(1, cycles + 1):
            phase.cycle(number, actors)
            if number in at:
                is_end = number in (at[0], at[-1])
                before = found[0] if found else None
                kills = number if phase.kills else 0
                found.append(look(number, actors, kills=kills, before=before, waits=is_end))
    grew = (*grown(found[0], found[-1]), *rising(found, killed=phase.kills))
    return Outcome(
        phase=phase,
        looks=tuple(found),
        duration_s=time.monotonic() - begun_s,
        grew=grew,
        classes=tuple(by_class(found[0], found[-1])),
    )


@contextmanager
def _staying(actors: Sequence[Any]) -> Iterator[None]:
    col.declare_collective_group(actors, group_name="staying")
    yield
    _broadcast("staying", actors)
    col.destroy_collective_group("staying")


def run(*, cycles: int, kills: int, warm: int, looks: int) -> list[Outcome]:
    """Runs all phases over the same lasting actors.

    Args:
        cycles: How many cycles the phases without kills have in all.
        kills: How many actors are killed in all.
        warm: How many cycles come before all phases: a new process takes memory for a while, and keeps it.
        looks: How often to look at each phase after the first time.
    """
    actors = start_lasting()
    ray.get([actor.call.remote(prepare) for actor in actors])
    for number in range(warm):
        come_and_go(number, actors)
    outcomes = []
    for phase in PHASES:
        count = (kills if phase.kills else cycles) // sum(one.kills == phase.kills for one in PHASES)
        outcomes.append(soak(phase, actors, cycles=count, looks=looks))
    for actor in actors:
        ray.kill(actor)
    return outcomes


# ---------------------------------------------------------------------------------------------- telling


def report(outcomes: Sequence[Outcome], *, warm: int) -> str:
    """A table of all phases in markdown, and what grew; `warm`: how many cycles came before."""
    looked = [[one.looks[0], one.looks[-1]] for one in outcomes]
    lines = [
        _introduction(warm),
        "",
        "| | " + " | ".join(one.phase.name for one in outcomes) + " |",
        "|---|" + "---|" * len(outcomes),
        "| cycles before the first look, and in all | "
        + " | ".join(f"{first.cycle}, {last.cycle}" for first, last in looked)
        + " |",
        "| seconds | " + " | ".join(f"{one.duration_s:.0f}" for one in outcomes) + " |",
    ]
    for rule in RULES:
        if rule.spread is not None:
            lines.append(f"| {rule.means} | " + " | ".join(_told(rule, *pair) for pair in looked) + " |")
        else:
            lines.append(
                f"| {rule.means}, per cycle | " + " | ".join(_told_slope(rule, one) for one in outcomes) + " |"
            )
    grew = [f"- {one.phase.name}: {line}" for one in outcomes for line in one.grew]
    return "\n".join([*lines, "", *(["What grew:", "", *grew] if grew else ["Nothing grew."])])


def _introduction(warm: int) -> str:
    names = ", ".join(BACKENDS)
    return (
        f"Each group is declared under a new name over {LASTING} lasting actors, used for {len(USES)} kinds of calls,"
        f" and destroyed; the groups take turns in {names}; {warm} cycles come before the phases."
        " A cell has the driver's figure / those of the actors: at the phase's first look -> at its last, where they"
        " differ. The last row is what a straight line through all looks says, in bytes."
    )


def _told(rule: Rule, first: Look, last: Look) -> str:
    pairs = [
        (figures[rule.figure], last.figures[process][rule.figure])
        for process, figures in first.figures.items()
        if rule.figure in figures
    ]
    return (
        " / ".join(f"{before} -> {after}" if before != after else str(before) for before, after in pairs) or "not known"
    )


def _told_slope(rule: Rule, outcome: Outcome) -> str:
    found = " / ".join(f"{slope(outcome.looks, one, rule.figure):,.0f}" for one in outcome.looks[0].figures)
    return f"{found} (at most {rule.slope_killed if outcome.phase.kills else rule.slope:,.0f})"


@click.command()
@click.option("--cycles", default=1000, show_default=True, help="Groups that come and go, in all.")
@click.option("--kills", default=100, show_default=True, help="Actors that are killed, in all.")
@click.option("--warm", default=100, show_default=True, help="Cycles before anything is looked at.")
@click.option("--looks", default=10, show_default=True, help="Looks at each phase after the first.")
@click.option("--write/--no-write", default=False, help="Writes the section of tests/faults/results.md.")
def main(cycles: int, kills: int, warm: int, looks: int, write: bool) -> None:
    """Lets groups and actors come and go, and exits 1 if anything grows."""
    ray.init(address="local", num_cpus=16, include_dashboard=False, log_to_driver=False, object_store_memory=1 << 29)
    outcomes = run(cycles=cycles, kills=kills, warm=warm, looks=looks)
    ray.shutdown()
    told = report(outcomes, warm=warm)
    click.echo(told)
    for one in outcomes:
        for line in one.classes:
            click.echo(f"{one.phase.name}: {line}")
    if write:
        write_section("soak", told)
    sys.exit(any(one.grew for one in outcomes))


if __name__ == "__main__":
    from tests.faults.soak import main as main_of_module  # not as __main__, whose functions would travel by value

    main_of_module()
