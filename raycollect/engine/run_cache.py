"""The results of a run's preparation and agreement, kept with its operands for the next run, as in a loop."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from raycollect.backends import arrays
from raycollect.backends.completion import Tie
from raycollect.core.model import Kernel
from raycollect.engine.fusion_buffer import FusionBuffer
from raycollect.engine.kernel_schedule import KernelSchedule
from raycollect.planner import Program
from raycollect.pos import Container, Range, Store

_REMEMBERED = 8  # how many programs a container remembers


class _Holder:
    """Keeps what was found, until one of the other containers is gone."""

    __slots__ = ("__weakref__", "prepared", "ties")

    def __init__(self, prepared: RunCache) -> None:
        self.prepared: RunCache | None = prepared
        self.ties: list[weakref.ref[Tie]] = []

    def is_of(self, name: int, others: Sequence[Container]) -> bool:
        if len(others) != len(self.ties):
            return False
        pairs = zip(self.ties, others, strict=True)
        return all((found := tie()) is not None and found is other.memo.get(name) for tie, other in pairs)

    def tie_to(self, tie: Tie) -> None:
        """Lets go of the memory of all operands when one of them is gone."""
        known = weakref.ref(self)

        def forget(_: object) -> None:
            holder = known()
            if holder is not None:
                holder.prepared = None

        self.ties.append(weakref.ref(tie, forget))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCache:
    """The results of one program's last run, valid as long as its operands are unchanged.

    It keeps their memory but none of the containers, so that these can go.
    """

    program: Program
    places: tuple[Any, ...]  # `arrays.place` of each tensor
    ranges: list[Range]  # addresses of all tensors
    arrival: bytes  # that this participant brings
    first: Kernel | None  # that the backend may prepare before the agreement
    blobs: tuple[bytes, ...]  # that all brought
    schedule: KernelSchedule  # that followed from them
    block: FusionBuffer | None

    @staticmethod
    def recall(program: Program, containers: Sequence[Container], store: Store) -> RunCache | None:
        """Finds what the last run of a program found out, and takes its fusion buffer.

        Returns:
            None where there was none, an operand has changed, or the buffer is in use.
        """
        known = RunCache.last(program, containers)
        if known is None:
            return None
        try:
            if known.places != places_of(containers) or store.is_dirty(known.ranges):
                return None
        except TypeError:  # a tensor has no memory any more
            return None
        return known if known.block is None or known.block.take() else None

    @staticmethod
    def last(program: Program, containers: Sequence[Container]) -> RunCache | None:
        """Returns the cache of a program's last run on these containers, even if they have changed since."""
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
            tie = container.memo[name] = Tie()
            holder.tie_to(tie)
        if containers:
            containers[0].memo[name] = holder


def places_of(containers: Sequence[Container]) -> tuple[Any, ...]:
    """Where and how all tensors lie; raises TypeError where one has no memory any more."""
    return tuple([arrays.place_of(tensor) for one in containers for tensor in one.tensors])
