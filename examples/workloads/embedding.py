"""An embedding table that is sharded over actors: each looks up rows of all shards, and sends gradients back to them.

    python -m examples.workloads.embedding [--actors 4] [--rows 100000] [--runs 9] [--json]

Rank r holds the rows from `r * rows / ranks` on. Each actor has a batch of ids, which are of any rows, often the same
ones, and sometimes none at all. A lookup is two all-to-alls of uneven pieces. Each actor sorts its distinct ids, so
that those of one owner are adjacent, and asks every owner for its part. The owners look the rows up, and send them
back. Each actor puts them into the places of its batch. The gradient of the rows travels the same way as the ids: each
actor adds up the gradients of one row, and the owners add up the gradients of all actors.

The program compares lookups and gradients with a table in one piece, with duplicates and with actors that ask for
nothing, by calls and captured. Then it times a lookup in these ways: by `alltoall_refs`, by calls and captured, and
through the object store, with a remote call for each pair of actors.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray

import raycollect as col
from examples.workloads.report import Check, Report, Timing, command_line, compare, declared, ending, ensure_ray

Rows = NDArray[np.float32]
Ids = NDArray[np.int64]

SEED = 0
WIDTH = 64
SIZES = (64, 1024, 16384)
GROUP = "shards"


def first_rows(rows: int, ranks: int) -> Ids:
    """The first row of each rank, and the number of rows at the end; [ranks + 1]."""
    return np.arange(ranks + 1, dtype=np.int64) * rows // ranks


def make_rows(first: int, last: int) -> Rows:
    """Makes the rows [last - first, width] of the table, the same ones wherever they are made."""
    ids = np.arange(first, last, dtype=np.float32)[:, None]
    table: Rows = np.cos(ids * np.arange(1, WIDTH + 1, dtype=np.float32))
    return table


class Shard:
    """A shard of the table, and a batch. It does not use Ray."""

    def begin(self, rank: int, ranks: int, rows: int) -> None:
        """Makes the shard."""
        self.bounds = first_rows(rows, ranks)
        self.first = int(self.bounds[rank])
        self.table = make_rows(self.first, int(self.bounds[rank + 1]))
        self.gradient = np.zeros_like(self.table)

    def set_ids(self, ids: Ids) -> None:
        """Sets the batch: ids of any shape, in any order."""
        self.shape = ids.shape
        self.ids, self.places = np.unique(ids, return_inverse=True)
        self.places = self.places.reshape(-1)
        self.cuts = np.searchsorted(self.ids, self.bounds[1:-1])

    def requests(self) -> list[Ids]:
        """What this batch asks of each rank: sorted ids, each once."""
        return np.split(self.ids, self.cuts)

    def lookup(self, asked: list[Ids]) -> list[Rows]:
        """Looks up what each rank asks for, ids [n] -> rows [n, width]; remembers the ids for `collect`."""
        self.asked = [ids - self.first for ids in asked]
        return [self.table[ids] for ids in self.asked]

    def assemble(self, answers: list[Rows]) -> Rows:
        """Puts the rows from each rank into the places of the batch; [*ids.shape, width]."""
        self.found: Rows = np.concatenate(answers)[self.places].reshape(*self.shape, WIDTH)
        return self.found

    def spread(self, scale: float) -> list[Rows]:
        """The gradient that goes to each rank, rows [n, width], if that of the batch is `scale` times what was found.

        Args:
            scale: Stands for what a model would compute.
        """
        whole = (self.found * np.float32(scale)).reshape(-1, WIDTH)
        each = np.zeros((len(self.ids), WIDTH), np.float32)
        np.add.at(each, self.places, whole)
        return np.split(each, self.cuts)

    def collect(self, pieces: list[Rows]) -> None:
        """Adds what each rank gives to the gradient of this shard; each asked for a row only once."""
        self.gradient[...] = 0
        for ids, piece in zip(self.asked, pieces, strict=True):
            self.gradient[ids] += piece

    def get_gradient(self) -> Rows:
        """The gradient of the shard, like the shard."""
        return self.gradient

    def get_found(self) -> Rows:
        """The last result of `assemble`."""
        return self.found


@ray.remote(num_cpus=0)
class Owner(col.CollectiveParticipant, Shard):
    """A shard in an actor. The methods are for the comparison with the object store."""

    @col.by_value
    def request_of(self, rank: int) -> Ids:
        return self.requests()[rank]

    @col.by_value
    def lookup_one(self, ids: Ids) -> Rows:
        return self.table[ids - self.first]

    def assemble_all(self, *answers: Rows) -> None:
        self.assemble(list(answers))


# ---------------------------------------------------------------------------------------------- lookups


def look_up(owners: list[Any]) -> list[Any]:
    """A lookup of every actor's batch, by Ray calls; refs of what they found."""
    asked = col.alltoall_refs(None, [owner.requests.remote() for owner in owners], GROUP)
    rows = [owner.lookup.remote(ids) for owner, ids in zip(owners, asked, strict=True)]
    answers = col.alltoall_refs(None, rows, GROUP)
    return [owner.assemble.remote(answer) for owner, answer in zip(owners, answers, strict=True)]


def send_gradients(owners: list[Any], scale: float) -> list[Any]:
    """The backward pass of the lookup before; refs of the shards' gradients."""
    spread = [owner.spread.remote(scale) for owner in owners]
    pieces = col.alltoall_refs(None, spread, GROUP)
    for owner, piece in zip(owners, pieces, strict=True):
        owner.collect.remote(piece)
    return [owner.get_gradient.remote() for owner in owners]


@col.step
def look_up_in_a_step(owners: list[Any]) -> None:
    """The same, traced once. The batches, and so the sizes of all pieces, may differ in each run."""
    look_up(owners)


def look_up_by_object_store(owners: list[Any]) -> None:
    """The same without raycollect: a call for each pair asks, and one looks up."""
    done = []
    for owner in owners:
        asked = [owner.request_of.remote(rank) for rank in range(len(owners))]
        answers = [other.lookup_one.remote(ids) for other, ids in zip(owners, asked, strict=True)]
        done.append(owner.assemble_all.remote(*answers))
    ray.get(done)


# ---------------------------------------------------------------------------------------------- the whole


def set_batches(owners: list[Any], batches: Sequence[Ids]) -> None:
    """Gives each actor its batch."""
    ray.get([owner.set_ids.remote(ids) for owner, ids in zip(owners, batches, strict=True)])


def draw(size: int, actors: int, rows: int, seed: int) -> list[Ids]:
    """Draws ids as they are in practice: few of them are most of the batch."""
    rng = np.random.default_rng(seed)
    return [(rng.zipf(1.3, size) - 1) % rows * 7919 % rows for _ in range(actors)]


def strange_batches(actors: int, rows: int) -> list[Ids]:
    """Batches of other sizes: all ids one row; none at all; two dimensions; each row of a small part, backwards."""
    kinds = [
        np.full(50, rows - 1),
        np.empty(0, np.int64),
        np.arange(12, dtype=np.int64).reshape(3, 4) * (rows // 12),
        np.arange(min(rows, 100))[::-1],
    ]
    return [kinds[at % len(kinds)] for at in range(actors)]


def is_right(found: list[Rows], batches: list[Ids], table: Rows) -> bool:
    """Whether all rows are those of the whole table, to the last bit."""
    return all(np.array_equal(rows, table[ids]) for rows, ids in zip(found, batches, strict=True))


def check_batches(name: str, owners: list[Any], batches: list[Ids], table: Rows) -> list[Check]:
    """Looks batches up in all ways, sends gradients, and compares with the table in one piece."""
    ways: dict[str, Callable[[], object]] = {
        "calls": partial(look_up, owners),
        "captured": partial(look_up_in_a_step, owners),
        "object store": partial(look_up_by_object_store, owners),
    }
    set_batches(owners, batches)
    right = []
    for way in ways.values():
        way()
        right.append(is_right(col.get([owner.get_found.remote() for owner in owners]), batches, table))
    look_up(owners)
    gradient = np.concatenate(col.get(send_gradients(owners, 0.5)))
    expected = np.zeros(table.shape)
    for ids in batches:
        np.add.at(expected, ids, 0.5 * table[ids].astype(np.float64))
    difference = float(np.linalg.norm(gradient - expected) / np.linalg.norm(expected))
    wrong = [way for way, good in zip(ways, right, strict=True) if not good]
    return [
        Check(name=f"rows, {name}", found=f"wrong: {wrong}" if wrong else "right in each way", good=not wrong),
        Check(name=f"gradients, {name}", found=f"relative difference {difference:.0e}", good=difference < 1e-5),
    ]


def time_lookups(owners: list[Any], *, size: int, rows: int, runs: int) -> Timing:
    """Times lookups of batches of one size, the same in all ways."""
    set_batches(owners, draw(size, len(owners), rows, SEED + size))
    ways: dict[str, Callable[[], object]] = {
        "alltoall_refs, captured": partial(look_up_in_a_step, owners),
        "alltoall_refs, calls": lambda: ray.get(look_up(owners)),
        "object store, a call per pair": partial(look_up_by_object_store, owners),
    }
    return Timing(what=f"{size} ids in each of {len(owners)} actors", ms=compare(ways, runs))


def main(actors: int = 4, rows: int = 100_000, runs: int = 9, sizes: Sequence[int] = SIZES) -> Report:
    """Compares with a table in one piece, then times.

    Args:
        actors: How many actors the table is sharded over.
        rows: Of the table.
        runs: How often each way is timed.
        sizes: Ids in a batch of an actor.
    """
    ensure_ray()
    owners: list[Any] = [Owner.remote() for _ in range(actors)]
    with ending(owners), declared(owners, GROUP), closing(look_up_in_a_step):
        ray.get([owner.begin.remote(rank, actors, rows) for rank, owner in enumerate(owners)])
        table = make_rows(0, rows)
        cases = {
            "a usual batch": draw(sizes[0], actors, rows, SEED),
            "another size": draw(2 * sizes[0] + 1, actors, rows, SEED + 1),
            "duplicates and none": strange_batches(actors, rows),
            "none at all": [np.empty(0, np.int64)] * (actors - 1) + [np.array([0])],
        }
        checks = [check for name, batches in cases.items() for check in check_batches(name, owners, batches, table)]
        timings = tuple(time_lookups(owners, size=size, rows=rows, runs=runs) for size in sizes)
    return Report(
        title=f"A table of {rows} rows of {WIDTH} float32, sharded over {actors} actors",
        unit="lookup",
        checks=tuple(checks),
        timings=timings,
    )


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description="Lookups in a table that is sharded over actors.")
    made.add_argument("--actors", type=int, default=4, help="actors that hold the table (default 4)")
    made.add_argument("--rows", type=int, default=100_000, help="rows of the table (default 100000)")
    made.add_argument("--runs", type=int, default=9, help="how often each way is timed (default 9)")
    made.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="ids in a batch (default 64 1024 16384)")
    return made


if __name__ == "__main__":
    command_line(main, parser())
