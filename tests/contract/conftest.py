"""The crews of the contract: three actors per backend, for all tests of this package."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count, product
from pathlib import Path
from typing import Any

import pytest
import ray

import raycollect as col
from tests.contract.actors import Member
from tests.contract.cases import WORLD
from tests.contract.ways import Crew

BACKENDS = ("shm", "tcp", "gloo")

USUAL = {"tcp": ("refs", "member"), "gloo": ("refs", "own")}
"""Backend -> the ways that run on it by default."""

Crews = Callable[[str, str], Crew]

_numbers = count(1)


def table(ways: Sequence[str], backends: Sequence[str], *more: Sequence[Any]) -> list[Any]:
    """All combinations; by default every way runs on shm, and two ways run on each other backend."""

    def is_full(way: str, backend: str, *others: str) -> bool:
        return "every" in others or way not in USUAL.get(backend, ways)

    return [pytest.param(*one, marks=[pytest.mark.full] * is_full(*one)) for one in product(ways, backends, *more)]


def started(backend: str) -> Crew:
    """A crew, in a declared group."""
    if not col.is_backend_available(backend):
        pytest.skip(f"{backend} is not installed")
    actor = ray.remote(num_cpus=0)(Member)
    crew = Crew(backend, [actor.remote(rank) for rank in range(WORLD)], f"contract {backend} {next(_numbers)}")
    col.declare_collective_group(crew.actors, backend=backend, group_name=crew.declared)
    return crew


def join(crew: Crew, way: str, folder: Path) -> None:
    """Has a crew make the group of a way, where the driver has not declared it."""
    if way == "own":
        crew.all("join", WORLD, crew.backend, crew.own)
    if way == "torch":
        pytest.importorskip("torch")
        crew.all("join_torch", WORLD, crew.backend, f"file://{folder}/store")


def end(crew: Crew) -> None:
    for one in crew.actors:
        ray.kill(one)


@pytest.fixture(scope="package")
def crews(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crews]:
    """Gives the crew of a backend, ready for a way."""
    made: dict[str, Crew] = {}
    ready: set[tuple[str, str]] = set()

    def crew_of(backend: str, way: str) -> Crew:
        crew = made.get(backend) or made.setdefault(backend, started(backend))
        if (backend, way) not in ready:
            join(crew, way, tmp_path_factory.mktemp("torch"))
            ready.add((backend, way))
        return crew

    yield crew_of
    for crew in made.values():
        col.destroy_collective_group(crew.declared)
        end(crew)
