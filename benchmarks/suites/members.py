"""Allreduce called by the members: each actor's method calls it in a loop, by its own library.

What changes where a program of `ray.util.collective` changes one import: the same class of actors, the same calls. The
time of a call is that of the rank on which it lasted longest; Ray's own calls of methods are not in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import ray

from benchmarks import names
from benchmarks.crew import Contestant, Joined
from benchmarks.report import Record, Skipped
from benchmarks.suite import BURST, Choice, Maker, entry, sweep
from benchmarks.targets import KB, MB
from raycollect.errors import BackendNotInstalledError

NAME = "members"
TITLE = "allreduce called by the members, float32, in place"
REFERENCE = names.RAY
NEEDS_RAY = True

RANKS = (2, 4)
SIZES = (4, 64 * KB, MB, 4 * MB, 16 * MB)


def _runs(nbytes: int) -> tuple[int, int]:
    return (60, 300) if nbytes < MB else (24, 96)


def measure(choice: Choice) -> Iterator[Record]:
    """Measures over 2 and 4 actors."""
    for ranks in choice.ranks or RANKS:
        choice.progress(f"{NAME}: starts {ranks} actors")
        makers: list[Maker] = [
            entry(names.TORCH_GLOO, Loop, ranks, "torch:gloo"),
            entry(names.GLOO, Loop, ranks, "gloo"),
            entry(names.TCP, Loop, ranks, "tcp"),
            entry(names.RAY, Loop, ranks, "gloo", library="ray"),
        ]
        sizes = choice.sizes or SIZES
        yield from sweep(NAME, choice, makers, op="allreduce", ranks=ranks, sizes=sizes, runs=_runs, burst=BURST)


class Loop(Joined, Contestant):
    """One method of each actor, which calls a library's `allreduce` several times.

    Args:
        name: What it is called.
        ranks: The number of actors.
        backend: What the group is made with.
        library: ``"raycollect"``, or ``"ray"`` for `ray.util.collective` over gloo.

    Raises:
        Skipped: The backend needs what is not installed.
    """

    def __init__(self, name: str, ranks: int, backend: str, *, library: str = "raycollect") -> None:
        try:
            super().__init__(name, ranks, library=library, backend=backend)
        except BackendNotInstalledError as exc:
            raise Skipped(str(exc)) from exc

    def run(self, count: int) -> Sequence[float]:
        """One method of each actor with so many calls."""
        spent = ray.get(
            [actor.loop.remote(self._library, "allreduce", self.name, self.group, count) for actor in self.actors]
        )
        return [max(ranks) for ranks in zip(*spent, strict=True)]
