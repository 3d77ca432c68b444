"""`allreduce_refs` from the driver, on refs that persist over the calls."""

from __future__ import annotations

from typing import Any

import raycollect as col
from benchmarks.crew import Contestant


class Declared(Contestant):
    """A contender of raycollect with a declared group, and a ref to each rank's buffer."""

    def __init__(self, name: str, ranks: int, *, arena: bool = False, count: int = 1) -> None:
        super().__init__(name, ranks, arena=arena, count=count)
        self.refs: list[Any] = []
        col.declare_collective_group(self.actors, group_name=self.group)

    def prepare(self, nbytes: int) -> None:
        """Makes the buffers, and one ref to each."""
        self.refs = []
        super().prepare(nbytes)
        self.refs = [actor.get_array.remote(self.name) for actor in self.actors]

    def close(self) -> None:
        """Lets go of refs and group, and ends the actors."""
        self.refs = []
        col.destroy_collective_group(self.group)
        super().close()


class Replayed:
    """A contender that records its operation as a captured step, once per size; stands before the other base."""

    step: Any = None

    def record(self) -> None:
        """Does the operation once, to be recorded in `step`."""
        raise NotImplementedError

    def prepare(self, nbytes: int) -> None:
        """Makes what the operation needs, and records it."""
        self._forget()
        super().prepare(nbytes)  # type: ignore[misc]
        with col.capture() as self.step:
            self.record()

    def operate(self) -> None:
        """One replay."""
        self.step.run()

    def close(self) -> None:
        """Lets go of the step, then of the rest."""
        self._forget()
        super().close()  # type: ignore[misc]

    def _forget(self) -> None:
        if self.step is not None:
            self.step.close()
            self.step = None


class RaycollectAllreduce(Declared):
    """`allreduce_refs`, in place."""

    def operate(self) -> None:
        """One call."""
        col.allreduce_refs(self.refs, group_name=self.group)
