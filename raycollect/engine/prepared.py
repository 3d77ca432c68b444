"""The result of a run's preparation, as a value: everything that a second run on the same operands needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from raycollect.backends import array_places, arrays
from raycollect.core.model import Kernel
from raycollect.engine.fusion_buffer import FusionBuffer
from raycollect.engine.steps import PreparedBundle
from raycollect.observe import Tally
from raycollect.planner import Program
from raycollect.pos import Container, Range, Store

Count = tuple[Tally, int, int, float]
"""The counts of a bundle: its tally, its calls, their bytes, and its fraction of the time in the agreement."""


_FEW = 16  # the most tensors of a container that are compared one by one, which takes less time for one


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prepared:
    """The steps of a run, and its arrival; valid as long as its operands are unchanged.

    It refers to their memory but not to the containers, so that containers can be freed.
    """

    program: Program
    places: tuple[Any, ...]  # `operand_places`; empty: a second run needs its own preparation
    ranges: Sequence[Range]  # addresses of all tensors
    arrival: bytes  # of this participant, and its message in a repeated run
    message: bytes
    first: Kernel | None  # the kernel that the backend may prepare before the agreement
    messages: tuple[bytes, ...]  # the messages of all participants in a repeated run
    bundles: tuple[PreparedBundle, ...]
    counts: tuple[Count, ...]  # for each bundle
    writes: Sequence[Range]  # addresses that the bundles write
    buffer: FusionBuffer | None = None  # for small tensors

    def holds(self, containers: Sequence[Container], store: Store) -> bool:
        """Whether the operands in these containers are unchanged and not half-written."""
        places = iter(self.places)
        try:
            for container in containers:
                if len(container.tensors) > _FEW:
                    if not array_places.are_at(container.tensors, next(places, [])):
                        return False
                    continue
                for tensor in container.tensors:
                    if arrays.place_of(tensor) != next(places, None):
                        return False
        except TypeError:  # a tensor has no memory any more
            return False
        return not (store.dirty and store.is_dirty(self.ranges))


def operand_places(containers: Sequence[Container]) -> tuple[Any, ...]:
    """The addresses and layouts of all tensors; raises TypeError if a tensor has no memory any more."""
    places: list[Any] = []
    for container in containers:
        if len(container.tensors) > _FEW:
            places.append(array_places.places_of(container.tensors))
        else:
            places += map(arrays.place_of, container.tensors)
    return tuple(places)
