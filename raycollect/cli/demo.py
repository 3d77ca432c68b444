"""What `raycollect demo` runs: training on handwritten digits where the examples are, else a sum between two actors.

Both join the cluster that `RAY_ADDRESS` names, or that runs on this host, and start Ray where there is none.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray

import raycollect as col
from raycollect.cli.bench.operations import timed
from raycollect.group import cluster_registry

ALLREDUCE, DIGITS = "allreduce", "digits"

ELEMENTS = 1_000_000
RUNS = 20
DIGITS_STEPS = 100
DIGITS_ACTORS = 2
DIGITS_RUNS = 20
GROUP = "raycollect-demo"

Say = Callable[[str], None]


class Adder(col.CollectiveParticipant):
    """Holds an array of one number; in shared memory, as `raycollect.full` makes it."""

    def __init__(self, elements: int, value: float) -> None:
        self.array: NDArray[np.float32] = col.full(elements, value, np.float32)

    def get_array(self) -> NDArray[np.float32]:
        """Returns the array itself: it stays in this process, and its ref stands for it."""
        return self.array

    @col.by_value
    def copy_array(self) -> NDArray[np.float32]:
        """Returns a copy, through Ray's object store."""
        return self.array

    def set_array(self, array: NDArray[np.float32]) -> None:
        """Overwrites the array."""
        self.array[:] = array


@dataclass(frozen=True, slots=True, kw_only=True)
class Summed:
    """The results of the demo `allreduce`."""

    backend: str
    elements: int  # of each array, 4 bytes each
    expected: float  # what every element should be after the first sum
    found: tuple[float, float]  # the lowest and the highest of all actors
    declare_s: float  # to form the group
    mean_s: float  # median, in place
    store_s: float  # median of the same mean through Ray's object store

    @property
    def ok(self) -> bool:
        """True where every element is the sum."""
        return self.found == (self.expected, self.expected)


def start_ray(address: str | None) -> None:
    """Joins a cluster, or starts Ray without its dashboard and its logs on the screen.

    Raises:
        ConnectionError: Nobody answers at that address, or at the one that `RAY_ADDRESS` names.
        RayClientError: It is one of Ray Client.
    """
    if ray.is_initialized():
        return
    named = address or os.environ.get("RAY_ADDRESS")
    if named and named != "local":
        cluster_registry.ClusterReader(cluster_registry.find_cluster(named))  # ray.init would wait for most of a minute
    ray.init(address=address, include_dashboard=False, log_to_driver=False, logging_level=logging.WARNING)


def examples() -> Path | None:
    """The folder of the digits' program and the package around it, where this is a checkout and its libraries are."""
    root = Path(col.__file__).parents[1]
    is_there = (root / "examples" / "digits.py").is_file()
    return root if is_there and all(find_spec(name) for name in ("sklearn", "tqdm")) else None


def default() -> str:
    """The demo that runs where none is named."""
    return ALLREDUCE if examples() is None else DIGITS


def digits(show: bool) -> dict[str, Any]:
    """Trains on handwritten digits in two actors, see examples/digits.py; returns the fields of its result, and ``ok``.

    Raises:
        FileNotFoundError: The examples, or what they need, are not there.
    """
    root = examples()
    if root is None:
        raise FileNotFoundError("the demo 'digits' needs a checkout of raycollect, and: pip install scikit-learn tqdm")
    sys.path.insert(0, str(root))
    try:
        program = importlib.import_module("examples.digits")
    finally:
        sys.path.remove(str(root))
    ray.cloudpickle.register_pickle_by_value(program)  # the workers of a running cluster do not have the checkout
    try:
        result = program.main(steps=DIGITS_STEPS, actors=DIGITS_ACTORS, runs=DIGITS_RUNS)
    finally:
        ray.cloudpickle.unregister_pickle_by_value(program)
    if show:
        program.show(result)
    return {**asdict(result), "ok": result.ok}


def allreduce(say: Say) -> Summed:
    """Sums two actors' arrays in place, and times it beside the way through Ray's object store."""
    worker: Any = ray.remote(num_cpus=0)(Adder)
    actors = [worker.remote(ELEMENTS, float(rank + 1)) for rank in range(2)]
    say(f"two actors, each with {ELEMENTS:,} float32: one of 1s, the other of 2s")
    began_s = perf_counter()
    group = col.declare_collective_group(actors, group_name=GROUP)
    declare_s = perf_counter() - began_s
    try:
        say(f"declare_collective_group(actors): backend {group.backend}, {declare_s * 1e3:.0f} ms with their start")
        refs = [actor.get_array.remote() for actor in actors]
        col.allreduce_refs(refs, GROUP)
        arrays = col.get(refs)
        found = min(float(one.min()) for one in arrays), max(float(one.max()) for one in arrays)
        say(f"allreduce_refs(refs): both now hold {found[0]:g}s")
        mean_s = median(
            timed(lambda: col.allreduce_refs(refs, GROUP, col.ReduceOp.AVG), RUNS)  # the values stay as they are
        )
        store_s = median(timed(lambda: _through_the_store(actors), RUNS))
        say(f"their mean, {ELEMENTS * 4 / 1e6:g} MB each, in place: {mean_s * 1e3:.2f} ms, the median of {RUNS}")
        say(f"the same through Ray's object store and the driver: {store_s * 1e3:.2f} ms")
    finally:
        group.destroy()
        for actor in actors:
            ray.kill(actor)
    return Summed(
        backend=group.backend,
        elements=ELEMENTS,
        expected=3.0,
        found=found,
        declare_s=declare_s,
        mean_s=mean_s,
        store_s=store_s,
    )


def _through_the_store(actors: list[Any]) -> None:
    # The mean without this package: fetch the arrays, take it here, put it, and hand it back.
    arrays = ray.get([actor.copy_array.remote() for actor in actors])
    mean = ray.put(sum(arrays[1:], arrays[0]) / len(arrays))
    ray.get([actor.set_array.remote(mean) for actor in actors])
