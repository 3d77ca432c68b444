"""`allreduce_refs` from the driver, on refs that persist over the calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import raycollect as col
from benchmarks.crew import Contestant


class Declared(Contestant):
    """A contender of raycollect with a declared group, and a ref to each rank's buffer."""

    def __init__(self, name: str, actors: Sequence[Any], *, arena: bool = False, count: int = 1) -> None:
        super().__init__(name, actors, arena=arena, count=count)
        self.refs: list[Any] = []
        col.declare_collective_group(self.actors, group_name=self.group)

    def prepare(self, nbytes: int) -> None:
        """Makes the buffers, and one ref to each."""
        self.refs = []
        super().prepare(nbytes)
        self.refs = [actor.get_array.remote(self.name) for actor in self.actors]

    def close(self) -> None:
        """Lets go of refs, group and buffers."""
        self.refs = []
        col.destroy_collective_group(self.group)
        super().close()


class RaycollectAllreduce(Declared):
    """`allreduce_refs`, in place."""

    def operate(self) -> None:
        """One call."""
        col.allreduce_refs(self.refs, group_name=self.group)
