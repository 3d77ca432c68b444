"""Many copies at once do what single copies do, whatever lies where."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from raycollect.backends.array_copies import ArrayCopies
from raycollect.backends.array_places import are_at, places_of
from raycollect.backends.arrays import place_of
from raycollect.backends.elements import convert
from raycollect.core.memory_vectors import MemoryVectors


def rows(rng: random.Random, sizes: list[int], *, joined: bool) -> list[Any]:
    """Arrays of these sizes, of which most lie one after the other if `joined`."""
    line, at, arrays = np.zeros(2 * sum(sizes) + 10, np.float32), 0, []
    for size in sizes:
        at += rng.random() < 0.02
        form = rng.random()
        if not joined or form < 0.02:
            arrays.append(np.zeros(size, rng.choice([np.float32] * 9 + [np.float64])))
        elif form < 0.04:
            arrays.append(np.zeros(2 * size, np.float32)[::2])
        else:
            arrays.append(line[at : at + size])
            at += size
    return arrays


@pytest.mark.parametrize("joined", ["targets", "sources", "both", "none"])
@pytest.mark.parametrize("count", [0, 1, 3, 40, 3000])
def test_each_array_gets_its_own_source(joined: str, count: int) -> None:
    rng = random.Random(count)
    sizes = [rng.choice([0, 1, 7, 500]) for _ in range(count)]
    targets = rows(rng, sizes, joined=joined in ("targets", "both"))
    sources = rows(rng, sizes, joined=joined in ("sources", "both"))
    copies = ArrayCopies(list(zip(targets, sources, strict=True)), convert)
    for turn in range(2):
        for at, source in enumerate(sources):
            source[...] = at + turn
        copies.run()
        assert all((target == at + turn).all() for at, target in enumerate(targets))
    assert sum(nbytes for _, nbytes in copies.steps) == sum(target.nbytes for target in targets)


def test_memory_that_is_not_there_is_told() -> None:
    into = np.zeros(8, np.uint8)
    wrong = MemoryVectors([(16, 8)])
    assert not wrong.gather(into.ctypes.data)
    assert not wrong.scatter(into.ctypes.data)


def test_arrays_that_moved_or_changed_are_not_where_they_were() -> None:
    tensors: list[Any] = [np.zeros(3 + at, np.float32) for at in range(20)]
    changes: list[Any] = [
        lambda: tensors[3].resize(9, refcheck=False),
        lambda: tensors[4].setflags(write=False),
        lambda: setattr(tensors[5], "dtype", np.int32),
        lambda: tensors.__setitem__(6, np.zeros(9, np.float32)),
        lambda: tensors.append(np.zeros(3)),
    ]
    for change in changes:
        places = places_of(tensors)
        assert are_at(tensors, places)
        change()
        assert not are_at(tensors, places)
    places = places_of(tensors)  # one is read-only
    assert places == list(map(place_of, tensors))
    assert are_at(tensors, places)
