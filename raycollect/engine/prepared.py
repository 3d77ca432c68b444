"""What a run of a program has found out, as a value: all that a second run on the same operands needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from raycollect.backends import arrays
from raycollect.core.model import Kernel
from raycollect.engine.fusion_buffer import FusionBuffer
from raycollect.engine.steps import Bundle
from raycollect.observe import Tally
from raycollect.planner import Program
from raycollect.pos import Container, Range, Store

Count = tuple[Tally, int, int, float]
"""How a bundle is counted: where, its calls, their bytes, and its part of the time in the agreement."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prepared:
    """The steps of a run, and what it brings to the agreement; valid as long as its operands are unchanged.

    It keeps their memory but none of the containers, so that these can go.
    """

    program: Program
    places: tuple[Any, ...]  # `arrays.place_of` each tensor; empty: a second run has to prepare itself
    ranges: Sequence[Range]  # addresses of all tensors
    arrival: bytes  # that this participant brings
    first: Kernel | None  # that the backend may prepare before the agreement
    blobs: tuple[bytes, ...]  # that all have brought
    bundles: tuple[Bundle, ...]
    counts: tuple[Count, ...]  # for each bundle
    writes: Sequence[Range]  # addresses that the bundles write
    buffer: FusionBuffer | None = None  # in which small tensors travel

    def holds(self, containers: Sequence[Container], store: Store) -> bool:
        """Whether the operands, which are in these containers, are unchanged and not half-written."""
        places = iter(self.places)
        try:
            for one in containers:
                for tensor in one.tensors:
                    if arrays.place_of(tensor) != next(places, None):
                        return False
        except TypeError:  # a tensor has no memory any more
            return False
        return not (store.dirty and store.is_dirty(self.ranges))


def places_of(containers: Sequence[Container]) -> tuple[Any, ...]:
    """Where and how all tensors lie; raises TypeError where one has no memory any more."""
    return tuple([arrays.place_of(tensor) for one in containers for tensor in one.tensors])
