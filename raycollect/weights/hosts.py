"""One copy per host: ranks of a receiver group that borrow what another rank of their host reads from other hosts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import structs

from raycollect.backends.arrays import Array
from raycollect.core.model import Key
from raycollect.planner.boxes import extent
from raycollect.pos import Store
from raycollect.weights.atoms import Layouts
from raycollect.weights.cut import Atom, Digests
from raycollect.weights.directory import Holder, Holders, in_order
from raycollect.weights.source import ServedArrays

Loan = tuple[Key, tuple[int, ...]] | None
"""What a rank lends that has staged a version: a key, and the number of the atom in each of its arrays."""


def lend(store: Store, served: ServedArrays, arrived: Mapping[Atom, Array], landed: Digests) -> Loan:
    """Serves the atoms that arrived in the memory of a rank; `landed` has all of its atoms."""
    numbers = tuple(number for number, atom in enumerate(landed) if atom in arrived)
    if not numbers:
        return None
    served.arrays = [arrived[atom] for atom in landed if atom in arrived]
    return served.serve(store), numbers


class Sharing:
    """The holders from which the ranks of a receiver group read a version, and which ranks lend what they read.

    On a host without a holder, one of the ranks that have the same elements stages first and lends to the others.

    Args:
        members: The ranks.
        layouts: Their layouts.
        holders: The holders of the version.
        lends: Whether the ranks have memory to lend, as they have not in place.

    Attributes:
        after: The ranks that stage after another one, and that rank of each.
    """

    def __init__(self, members: Sequence[Holder], layouts: Layouts, holders: Holders, *, lends: bool) -> None:
        self._members = members
        self._holders = holders
        self._lenders: dict[int, Holders] = {}
        near = {holder.machine for holder, _ in holders}
        far = [rank for rank, member in enumerate(members) if lends and member.machine not in near]
        tables = list({id(layout.regions): layout.regions for layout in layouts.values()}.values()) if far else []
        first: dict[Any, int] = {}
        leaders = {}
        for rank in far:
            boxes = [tuple(region.bounds for region in table.of_rank.get(rank, ())) for table in tables]
            leaders[rank] = first.setdefault((members[rank].machine, *boxes), rank)
        self.after: dict[int, int] = {rank: leader for rank, leader in leaders.items() if rank != leader}

    def is_alone(self, machine: str) -> bool:
        """Whether the only rank stages and shows in one call: on the driver's host, where the publisher lends to it.

        No other rank has to verify the version first, and the clock is the driver's.
        """
        return [member.machine for member in self._members] == [machine] and any(
            holder.is_publisher and holder.machine == machine for holder, _ in self._holders
        )

    def is_lender(self, rank: int) -> bool:
        """Whether others stage after a rank."""
        return rank in self.after.values()

    def holders(self, rank: int) -> Holders:
        """Returns the holders that a rank asks, in this order."""
        lenders = self._lenders.get(self.after.get(rank, rank), ())
        return [*lenders, *in_order(self._holders, rank, self._members[rank].machine)]

    def staged(self, rank: int, loan: Loan, landed: Digests) -> None:
        """Notes what a rank lends that has staged the version; `landed` has all of its atoms."""
        if loan is not None:
            key, numbers = loan
            among = list(landed)
            lent = [among[number] for number in numbers]
            places = {(name, box): ((at, (0,) * len(box[0]), extent(box)),) for at, (name, box) in enumerate(lent)}
            self._lenders[rank] = [(structs.replace(self._members[rank], key=key), places)]
