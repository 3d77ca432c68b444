"""Results of methods that a collective takes and nobody keeps: what stays of many of them in the driver and the actors?

Run it with ``python -m tests.faults.fresh_refs``; ``--of ray`` does without raycollect what its handles once needed of
Ray: each method returns a nested ``ray.put``. How memory is measured is in `tests/faults/growth.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import click
import ray

import raycollect as col
from tests.faults import growth, soak
from tests.faults.growth import Look, grown

PARTS, WARM_PARTS = 10, 2
"""How often the command looks, and when it begins to compare: what is remembered, of so many, is full by then."""


class Nested:
    """An actor without raycollect, whose results hold a ref that it owns."""

    def make(self) -> Any:
        return [ray.put(b"")]

    def figures(self) -> growth.Figures:
        growth.give_back()
        return growth.figures_of_process()


def of_raycollect(counts: Sequence[int]) -> Iterator[Look]:
    """Reduces fresh refs of lasting actors; a look after each of the counts, which increase."""
    actors = soak.start_lasting()
    ray.get([actor.call.remote(growth.prepare) for actor in actors])
    group = col.declare_collective_group(actors, group_name="fresh")

    def iterate() -> None:
        col.allreduce_refs([actor.ones.remote(1) for actor in actors], group)

    yield from _repeated(counts, len(actors), iterate, lambda count: growth.look(count, actors))
    col.destroy_collective_group("fresh")
    for actor in actors:
        ray.kill(actor)


def of_ray(counts: Sequence[int]) -> Iterator[Look]:
    """The same number of results that hold a nested ref each; nothing is reduced."""
    remote = ray.remote(num_cpus=0, runtime_env={"env_vars": {"MALLOC_ARENA_MAX": "1"}})(Nested)
    actors = [remote.remote() for _ in range(soak.LASTING)]

    def iterate() -> None:
        ray.get([actor.make.remote() for actor in actors])

    def look(count: int) -> Look:
        told = ray.get([actor.figures.remote() for actor in actors])
        growth.give_back()
        figures = {"driver": growth.figures_of_process(), **{f"actor {at}": one for at, one in enumerate(told)}}
        return Look(cycle=count, figures=figures, classes={})

    yield from _repeated(counts, len(actors), iterate, look)
    for actor in actors:
        ray.kill(actor)


def _repeated(
    counts: Sequence[int], width: int, iterate: Callable[[], None], look: Callable[[int], Look]
) -> Iterator[Look]:
    made = 0
    for count in counts:
        while made < count:
            iterate()
            made += width
        yield look(made)


def growth_per_ref(first: Look, last: Look) -> dict[str, float]:
    """How many bytes of private memory each process took for each ref between two looks."""
    refs = last.cycle - first.cycle
    return {
        process: (last.figures[process]["private"] - before["private"]) / refs
        for process, before in first.figures.items()
    }


WAYS = {"raycollect": of_raycollect, "ray": of_ray}


@click.command()
@click.option("--refs", default=100_000, show_default=True, help="How many, of all actors together.")
@click.option("--of", "way", type=click.Choice(list(WAYS)), default="raycollect", show_default=True, help="Whose.")
def main(refs: int, way: str) -> None:
    """Makes many fresh refs, and tells what memory the processes hold meanwhile, in MB."""
    ray.init(address="local", num_cpus=16, include_dashboard=False, log_to_driver=False, object_store_memory=1 << 29)
    begun_s, looks = time.monotonic(), []
    for one in WAYS[way]([refs * part // PARTS for part in range(PARTS + 1)]):
        looks.append(one)
        told = " / ".join(f"{figures['private'] / 1e6:.1f}" for figures in one.figures.values())
        click.echo(f"{one.cycle:>7} refs: {told} MB ({' / '.join(one.figures)}), {time.monotonic() - begun_s:.0f} s")
    first = looks[WARM_PARTS]
    for process, nbytes in growth_per_ref(first, looks[-1]).items():
        click.echo(f"{process}: {nbytes:.0f} bytes per ref after the first {first.cycle}")
    for line in grown(first, looks[-1]) if way == "raycollect" else ():
        click.echo(line)
    ray.shutdown()


if __name__ == "__main__":
    from tests.faults.fresh_refs import main as main_of_module  # not as __main__, whose classes would travel by value

    main_of_module()
