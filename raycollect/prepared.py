"""What a run of a program found out, remembered with its operands for the next one, as in a loop."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from raycollect.backends import arrays
from raycollect.model import Kernel
from raycollect.packing import Block
from raycollect.planner import Program
from raycollect.pos import Container, Range, Store
from raycollect.script import Script

__all__ = ["Prepared", "places_of"]

_REMEMBERED = 8
"""How many programs a container remembers."""


class _Tie:
    """Lives as long as the memo of a container does."""

    __slots__ = ("__weakref__",)


class _Holder:
    """Has what was found, until one of the other containers is gone."""

    __slots__ = ("__weakref__", "prepared", "ties")

    def __init__(self, prepared: Prepared) -> None:
        self.prepared: Prepared | None = prepared
        self.ties: list[weakref.ref[_Tie]] = []

    def is_of(self, name: int, others: Sequence[Container]) -> bool:
        """Whether the other containers are those that it was found with."""
        if len(others) != len(self.ties):
            return False
        pairs = zip(self.ties, others, strict=True)
        return all((found := tie()) is not None and found is other.memo.get(name) for tie, other in pairs)

    def tie_to(self, tie: _Tie) -> None:
        """Lets go of the memory of all operands when one of them is gone."""
        known = weakref.ref(self)

        def forget(_: object) -> None:
            holder = known()
            if holder is not None:
                holder.prepared = None

        self.ties.append(weakref.ref(tie, forget))


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What one program found about its operands, remembered with them as long as all are as they were.

    It has their memory but none of the containers, so that these can go.

    Attributes:
        program: The program.
        places: `arrays.place` of each tensor.
        ranges: The memory of all tensors.
        arrival: What this participant brings to the door.
        first: The first kernel, where the backend may prepare it before the door.
        blobs: What all brought.
        script: What followed from that.
        block: The staging.
    """

    program: Program
    places: tuple[Any, ...]
    ranges: list[Range]
    arrival: bytes
    first: Kernel | None
    blobs: tuple[bytes, ...]
    script: Script
    block: Block | None

    @staticmethod
    def recall(program: Program, containers: Sequence[Container], store: Store) -> Prepared | None:
        """Finds what the last run of a program found, and takes its staging.

        Returns:
            None where there was none, an operand is not as it was, or the staging is in use.
        """
        known = Prepared.last(program, containers)
        if known is None:
            return None
        try:
            if known.places != places_of(containers) or store.is_dirty(known.ranges):
                return None
        except TypeError:  # a tensor has no memory any more
            return None
        return known if known.block is None or known.block.take() else None

    @staticmethod
    def last(program: Program, containers: Sequence[Container]) -> Prepared | None:
        """What the last run of a program on these containers found, whether or not all is as it was."""
        name = id(program)  # the same object for the same bytes; comparing programs would take longer
        holder = containers[0].memo.get(name) if containers else None
        if type(holder) is not _Holder:
            return None
        known = holder.prepared
        if known is None or known.program is not program or not holder.is_of(name, containers[1:]):
            return None
        return known

    def remember(self, containers: Sequence[Container]) -> None:
        """Remembers it with the first container, tied to the others."""
        name, holder = id(self.program), _Holder(self)
        for container in containers:
            if len(container.memo) >= _REMEMBERED and name not in container.memo:
                container.memo.clear()
        for container in containers[1:]:
            tie = container.memo[name] = _Tie()
            holder.tie_to(tie)
        if containers:
            containers[0].memo[name] = holder


def places_of(containers: Sequence[Container]) -> tuple[Any, ...]:
    """Where and how all tensors lie.

    Raises:
        TypeError: One of them has no memory any more.
    """
    return tuple([arrays.place_of(tensor) for one in containers for tensor in one.tensors])
