"""How the tensors of a version are cut: into atoms, which are read and verified one by one, and small ones in buckets.

A version of many small tensors would spend its time on messages about them. So small atoms of one element type that the
same ranks have and need lie side by side in a bucket. A bucket is an atom itself: of a tensor with one dimension, which
no rank has as such. Its digest consists of those of its members, so that a wrong one is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any

from raycollect.core.codec import Codec
from raycollect.core.weighted_cache import WeightedCache
from raycollect.planner.boxes import Box, volume, words
from raycollect.planner.layout import ITEMSIZES

Atom = tuple[str, Box]
"""A part of a tensor with a digest of its own: the tensor's name, and a box of it. Or a bucket of such parts."""

Digests = Mapping[Atom, bytes]

DIGEST_NBYTES = 16
"""The bytes of a digest of one atom."""

_COMPRESSED_NBYTES = 32 << 10
_CACHED_ATOMS = 1 << 17  # in each half of the cache of cuts: 76 MB

_Packed = tuple[tuple[str, str, Box, tuple[Atom, ...]], ...]
# Of each atom: the name, the element type, the box, and the members if it is a bucket
_CUTS = Codec[_Packed](_Packed, "cut of a version", long_nbytes=_COMPRESSED_NBYTES)


class VersionCut:
    """The atoms of a version; pickled as bytes that are decoded once per process.

    Args:
        dtypes: The atoms in order, and the element type of each.
        members: The atoms in each bucket.
    """

    def __init__(self, dtypes: Mapping[Atom, str], members: Mapping[Atom, tuple[Atom, ...]]) -> None:
        self.atoms: tuple[Atom, ...] = tuple(dtypes)
        # In the order of the atoms, as after `unpack`: buckets are served in this order
        self.members: Mapping[Atom, tuple[Atom, ...]] = {atom: members[atom] for atom in dtypes if atom in members}
        self.dtypes: dict[str, str] = {name: dtype for (name, _), dtype in dtypes.items()}
        self.numbers: dict[Atom, int] = {bucket: number for number, bucket in enumerate(self.members)}

    @cached_property
    def packed(self) -> bytes:
        """The cut as bytes; the inverse of `unpack`."""
        return _CUTS.encode(
            tuple((name, self.dtypes[name], box, self.members.get((name, box), ())) for name, box in self.atoms)
        )

    @staticmethod
    def unpack(packed: bytes) -> VersionCut:
        """Reads the bytes of `packed`.

        Raises:
            ProtocolError: They are malformed.
        """
        return _unpacked(packed)

    @cached_property
    def tensors(self) -> dict[str, str]:
        """The element type of each tensor, by name."""
        members = {name: self.dtypes[bucket[0]] for bucket, some in self.members.items() for name, _ in some}
        buckets = {name for name, _ in self.members}
        return {**{name: dtype for name, dtype in self.dtypes.items() if name not in buckets}, **members}

    def parts(self) -> Iterable[Atom]:
        """Yields the atoms, and instead of each bucket its members."""
        for atom in self.atoms:
            yield from self.members.get(atom, (atom,))

    def nbytes(self, some: Iterable[Atom]) -> int:
        """Returns the bytes of atoms."""
        return sum(volume(box) * ITEMSIZES[self.dtypes[name]] for name, box in some)

    @cached_property
    def lies(self) -> dict[Atom, tuple[slice, ...]]:
        """The elements of each member in its bucket, by bucket."""
        return {bucket: _slices([volume(box) for _, box in some]) for bucket, some in self.members.items()}

    @cached_property
    def lies_as_bytes(self) -> dict[Atom, tuple[slice, ...]]:
        """As `lies`, in bytes."""
        return {
            bucket: _slices([volume(box) * ITEMSIZES[self.dtypes[bucket[0]]] for _, box in some])
            for bucket, some in self.members.items()
        }

    def shown(self, atom: Atom) -> str:
        """Returns an atom as text."""
        members = self.members.get(atom)
        if members is None:
            return f"{atom[0]!r}{words(atom[1])}"
        return f"{members[0][0]!r} to {members[-1][0]!r} ({len(members)} parts)"

    def differing(self, atom: Atom, some: bytes, other: bytes) -> Atom:
        """Returns the first member of a bucket whose digests differ, or the atom itself."""
        for at, member in enumerate(self.members.get(atom, ())):
            of_member = slice(at * DIGEST_NBYTES, (at + 1) * DIGEST_NBYTES)
            if some[of_member] != other[of_member]:
                return member
        return atom

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, VersionCut) and self.packed == other.packed)

    def __hash__(self) -> int:
        return hash(self.packed)

    def __reduce__(self) -> tuple[Any, ...]:
        return VersionCut.unpack, (self.packed,)

    def __repr__(self) -> str:
        return f"<VersionCut, {len(self.atoms)} atoms, {len(self.members)} of them buckets>"


def _unpack(packed: bytes) -> VersionCut:
    atoms = _CUTS.decode(packed)
    members = {(name, box): some for name, _, box, some in atoms if some}
    cut = VersionCut({(name, box): dtype for name, dtype, box, _ in atoms}, members)
    cut.packed = packed
    return cut


def _weight(_: bytes, cut: VersionCut) -> int:
    return len(cut.atoms) + sum(map(len, cut.members.values()))


_unpacked = WeightedCache(_unpack, _weight, _CACHED_ATOMS)


def _slices(sizes: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(stop - size, stop) for size, stop in zip(sizes, accumulate(sizes), strict=True))


NO_CUT = VersionCut({}, {})
"""Stands for a cut that is not sent again, or not known yet."""
