"""One rank's tensors as the target of a version: which atoms lie in them, with which bits; inside the actor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from raycollect.backends.arrays import Array, as_bytes, box_of
from raycollect.backends.elements import convert, converted
from raycollect.planner.boxes import extent, moved
from raycollect.weights import atoms, digests
from raycollect.weights.atoms import AtomPart, Parts
from raycollect.weights.cut import NO_CUT, Atom, Digests, VersionCut
from raycollect.weights.local_side import LocalSide


class Target:
    """The atoms and buckets of a version in the tensors of a rank. `live` are the tensors, as of `LocalSide.live`.

    Args:
        side: The tensors.

    Attributes:
        cut: The atoms of a version; versions usually have the same ones.
        parts: Where those of this rank lie.
    """

    def __init__(self, side: LocalSide) -> None:
        self._side = side
        self.cut: VersionCut = NO_CUT
        self.parts: Parts = {}
        self._whole = frozenset[Atom]()  # the atoms that lie here as one box, or whose members do
        self._plain: dict[Atom, tuple[list[Array], list[memoryview] | None]] = {}  # see `_members`
        # The atoms that were written last: the digest in the version, and those of the parts as they lie here
        self._written: dict[Atom, tuple[bytes, bytes]] = {}

    def know(self, cut: VersionCut) -> frozenset[Atom]:
        """Begins a version with another cut; returns the atoms of both that have not changed."""
        before, self.cut = self.cut, cut
        self._side.bucket_views.clear()
        self.parts = atoms.places(self._side.layouts, self._side.rank, cut, whole=False)
        self._whole = frozenset(atom for atom, parts in self.parts.items() if self._is_whole(atom, parts))
        same = frozenset(before.atoms) & self.parts.keys() - before.members.keys() - cut.members.keys()
        self._plain = {}
        self._written = {atom: written for atom, written in self._written.items() if atom in same}
        return same

    def _is_whole(self, atom: Atom, parts: Sequence[AtomPart]) -> bool:
        lies = self.cut.lies.get(atom, (None,))
        return tuple(part.lies for part in parts) == lies and all(part.box == part.whole for part in parts)

    def boxes(self, atom: Atom, live: list[Array]) -> list[Array] | None:
        """Returns the box of an atom, or those of the members of a bucket, if they lie here as they are put.

        None: a part of them is not here, or has another element type.
        """
        if atom not in self._whole:
            return None
        boxes, dtype = [self._side.box(live, part) for part in self.parts[atom]], np.dtype(self.cut.dtypes[atom[0]])
        return boxes if all(box.dtype == dtype for box in boxes) else None

    def has(self, atom: Atom, digest: bytes, live: list[Array]) -> bool:
        """Returns whether an atom with this digest was written last, and still lies here."""
        written = self._written.get(atom)
        return (
            written is not None
            and written[0] == digest
            and b"".join([digests.digest(self._side.box(live, part)) for part in self.parts[atom]]) == written[1]
        )

    def lying(self, landed: Digests, live: list[Array]) -> dict[Atom, bytes]:
        """Recomputes the digests of those of these atoms that lie here as they are put."""
        lying = {}
        for atom, digest in landed.items():
            if atom in self.parts and (boxes := self.boxes(atom, live)) is not None:
                parts = b"".join(map(digests.digest, boxes))
                lying[atom] = digest if parts == digests.of_parts(digest) else parts
        return lying

    def digest(self, atom: Atom, wanted: bytes, array: Array) -> bytes:
        """Recomputes the digest of the elements of an atom or bucket, of which `wanted` is the right one."""
        whole = digests.digest(array)
        if whole == digests.of_whole(wanted):
            return wanted
        return digests.of_bucket(array, self.cut.lies_as_bytes[atom]) if atom in self.cut.members else whole

    def land(self, atom: Atom, wanted: bytes, array: Array, live: list[Array]) -> bytes:
        """Writes an atom into the tensors, and returns the digest of the written bytes; see `digest`."""
        pairs = list(self._elements(atom, array, live))
        if len(pairs) == 1 and pairs[0][1] is array:
            return digests.copied(*pairs[0])
        digest = self.digest(atom, wanted, array)
        for box, element in pairs:
            if digests.copied(box, element) != digests.digest(element):
                return b""
        return digest

    def differing(self, atom: Atom, digest: bytes, array: Array, live: list[Array]) -> Sequence[AtomPart]:
        """Returns the parts of an atom to write, whose bits differ; notes it as written.

        No converted elements are in memory afterwards, and those of one part meanwhile.
        """
        parts, before = self.parts[atom], self._written.get(atom)
        lies = digests.of_parts(digest)
        is_as_put = before is not None and digests.of_parts(before[0]) == before[1]  # so it is again
        if not is_as_put and self.boxes(atom, live) is None:
            lies = b"".join([digests.digest(element) for _, element in self._elements(atom, array, live)])
        self._written[atom] = digest, lies
        if before is None or atom not in self._whole:
            return parts if before is not None or not self._are_here(parts, array, live) else ()
        if atom not in self.cut.members:
            return parts  # what was written last is known to differ
        differ = digests.differing(before[0], digest)
        if all(differ):
            return parts
        pairs = zip(parts, differ, strict=True)
        return [part for part, differs in pairs if differs or not self._are_here((part,), array, live)]

    def write(self, atom: Atom, parts: Sequence[AtomPart], array: Array, live: list[Array]) -> None:
        """Writes parts of an atom into the tensors."""
        members = self._members(atom, live) if len(parts) == len(self.cut.members.get(atom, ())) else None
        if members is None:
            for part in parts:
                convert(self._side.box(live, part), _part_of(array, part))
            return
        memory = as_bytes(array).data
        for member, lies in zip(members, self.cut.lies_as_bytes[atom], strict=True):
            member[:] = memory[lies]

    def _members(self, atom: Atom, live: list[Array]) -> list[memoryview] | None:
        """Returns the bytes of the members of a bucket; None if some don't lie here as they are put, without gaps."""
        flat = self._side.flat(atom, self.parts[atom])
        if flat is None:
            return None
        of, members = self._plain.get(atom, ([], None))
        if of is not flat:
            is_as_put = self.boxes(atom, live) is not None
            members = [as_bytes(member).data for member in flat] if is_as_put else None
            self._plain[atom] = flat, members
        return members

    def _are_here(self, parts: Iterable[AtomPart], array: Array, live: list[Array]) -> bool:
        return all(digests.is_same(*pair) for pair in self._pairs(parts, array, live))

    def _elements(self, atom: Atom, array: Array, live: list[Array]) -> Iterator[tuple[Array, Array]]:
        return self._pairs(self.parts[atom], array, live)

    def _pairs(self, parts: Iterable[AtomPart], array: Array, live: list[Array]) -> Iterator[tuple[Array, Array]]:
        """Yields for each part the box of a tensor, and its elements as they are to lie there."""
        for part in parts:
            box, element = self._side.box(live, part), _part_of(array, part)
            yield box, element if box.dtype == element.dtype else converted(element, box.dtype)


def _part_of(array: Array, part: AtomPart) -> Array:
    """Returns a part of the elements of an atom or bucket."""
    if part.lies is not None:
        array = array[part.lies].reshape(extent(part.whole))
    if part.box == part.whole:
        return array
    lo, _ = moved(part.box, part.whole[0], (0,) * array.ndim)
    return box_of(array, lo, part.size)
