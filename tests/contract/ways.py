"""The ways to call a collective: one runner each, by public names alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import ray

import raycollect as col
from tests.contract.actors import CALL_TIMEOUT_S, Told
from tests.contract.cases import WORLD, Call, Case, called
from tests.contract.mismatches import Mismatch

BY_DRIVER = ("refs", "batch", "captured", "step")
BY_MEMBERS = ("member", "own", "torch")
"""In the group that the driver declares; in one that the members make; as process group of torch."""
WAYS = (*BY_DRIVER, *BY_MEMBERS)

MOST_AT_ONCE = 100
"""How many cases are one batch, or one step."""


@dataclass(frozen=True)
class Crew:
    """Actors in a group that the driver declared, in one that they made, and, once joined, in one of torch."""

    backend: str
    actors: list[Any]
    declared: str

    @property
    def own(self) -> str:
        return f"{self.declared} own"

    def group(self, way: str) -> str:
        """The name of the group that a way calls in."""
        return {"own": self.own, "torch": "torch"}.get(way, self.declared)

    def all(self, method: str, *args: Any, ranks: Iterable[int] = range(WORLD)) -> list[Any]:
        """Calls a method of all ranks at once."""
        return ray.get([getattr(self.actors[rank], method).remote(*args) for rank in ranks])


@dataclass(frozen=True)
class Operands:
    """The refs of a case: tensors and tensor lists, by rank; or none of them."""

    tensors: list[Any]
    lists: list[Any]

    @staticmethod
    def of(crew: Crew, at: int) -> Operands:
        return Operands([one.tensor.remote(at) for one in crew.actors], [one.pieces.remote(at) for one in crew.actors])


def operate(call: Call, operands: Operands, crew: Crew, timeout_s: float | None = None) -> dict[int, Any]:
    """Makes the driver's call; returns the outputs that it makes, by rank.

    Refs are given in another order than that of their ranks, and those of given outputs come back in that of the ranks.
    """
    tensors, lists = operands.tensors, operands.lists
    values = {**call.arguments(tensors, lists, crew.actors), "group_name": crew.declared, "timeout_s": timeout_s}
    made = called(getattr(col, call.function), values)
    if call.makes:
        return dict(enumerate(made)) if call.sole is None else {call.sole: made}
    assert made == call.outputs(tensors, lists)
    return {}


def run(way: str, crew: Crew, cases: Sequence[Case]) -> dict[str, dict[int, str]]:
    """Runs cases twice on the same memory; returns what is not as it must be, by case and rank."""
    if way in BY_MEMBERS:
        return _by_case(crew.all("run", crew.group(way), cases))
    found: dict[str, dict[int, str]] = {}
    for first in range(0, len(cases), MOST_AT_ONCE):
        some = cases[first : first + MOST_AT_ONCE]
        crew.all("begin", some)
        run_once = _RUNNERS[way](crew, some)
        for _ in range(2):
            run_once()
            for name, texts in _by_case(crew.all("differences")).items():
                found.setdefault(name, texts)
    return found


def _by_case(found: Sequence[dict[str, str]]) -> dict[str, dict[int, str]]:
    names = dict.fromkeys(name for texts in found for name in texts)
    return {name: {rank: texts[name] for rank, texts in enumerate(found) if name in texts} for name in names}


def _take(crew: Crew, at: int, made: dict[int, Any]) -> None:
    for rank, value in made.items():
        crew.actors[rank].take.remote(at, value)


def _run_refs(crew: Crew, cases: Sequence[Case | Mismatch]) -> Callable[[], None]:
    operands = [Operands.of(crew, at) for at in range(len(cases))]

    def run_once() -> None:
        for at, case in enumerate(cases):
            _take(crew, at, operate(case.call, operands[at], crew))

    return run_once


def _run_batch(crew: Crew, cases: Sequence[Case | Mismatch]) -> Callable[[], None]:
    operands = [Operands.of(crew, at) for at in range(len(cases))]

    def run_once() -> None:
        with col.batch():
            made = [operate(case.call, operands[at], crew) for at, case in enumerate(cases)]
        for at, outputs in enumerate(made):
            _take(crew, at, {rank: one.ref for rank, one in outputs.items()})

    return run_once


def _run_captured(crew: Crew, cases: Sequence[Case | Mismatch]) -> Callable[[], None]:
    operands = [Operands.of(crew, at) for at in range(len(cases))]
    with col.capture() as step:
        for at, case in enumerate(cases):
            for rank, value in operate(case.call, operands[at], crew).items():
                step.call(crew.actors[rank].take, at, value)
    return step.run


def _run_step(crew: Crew, cases: Sequence[Case | Mismatch]) -> Callable[[], None]:
    @col.step
    def step() -> None:
        for at, case in enumerate(cases):
            _take(crew, at, operate(case.call, Operands.of(crew, at), crew))

    return step


def _run_plan(crew: Crew, cases: Sequence[Case | Mismatch]) -> Callable[[], None]:
    operands = [Operands.of(crew, at) for at in range(len(cases))]

    def calls() -> None:
        for at, case in enumerate(cases):
            operate(case.call, operands[at], crew)

    def run_once() -> None:
        col.plan(calls)

    return run_once


_RUNNERS: dict[str, Callable[[Crew, Sequence[Case | Mismatch]], Callable[[], None]]] = {
    "plan": _run_plan,
    "refs": _run_refs,
    "batch": _run_batch,
    "captured": _run_captured,
    "step": _run_step,
}


# ---------------------------------------------------------------------------------------------- refusals

CALL_NUMBERS = {"batch": 1, "captured": 1, "step": 2 * WORLD}
"""Way -> the number of the refused call: in a traced step, after the methods that return the tensors and lists."""


def refused(way: str, crew: Crew, cases: dict[str, Mismatch]) -> dict[str, tuple[list[Told], list[str]]]:
    """Makes calls that are refused; by case, what each caller is told, and what is wrong then on each rank.

    In a batch or a captured step a valid call comes first, which must not run either. In a traced step it would, as the
    methods that return the tensors come in between.
    """
    if way in BY_MEMBERS:
        ranks = crew.all("refused", crew.group(way), list(cases.values()))
        return {name: ([one[at][0] for one in ranks], [one[at][1] for one in ranks]) for at, name in enumerate(cases)}
    found = {}
    for name, case in cases.items():
        several: list[Case | Mismatch] = [case]
        if way in ("batch", "captured"):
            several.insert(0, Case(operation="allreduce"))
        crew.all("begin", several)
        told = Told(None)
        try:
            _RUNNERS[way](crew, several)()
        except Exception as exc:
            told = Told(exc)
        wrong = crew.all("untouched")
        found[name] = [told], [*wrong, *([] if works(crew) else ["the next collective is wrong"])]
    return found


def works(crew: Crew) -> bool:
    """Whether the driver's next collective of the same group gives the right values."""
    refs = [one.ones.remote() for one in crew.actors]
    col.allreduce_refs(refs, crew.declared, timeout_s=CALL_TIMEOUT_S)
    return all((one == WORLD).all() for one in col.get(refs))
