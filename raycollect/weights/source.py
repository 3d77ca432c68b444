"""One rank of a publisher: copies its tensors, and serves the copies as versions; inside the actor."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from raycollect.backends.arrays import Array, byte_range
from raycollect.core.model import TENSOR, Key, Structure
from raycollect.errors import VersionNotPutError, Violation, refusal
from raycollect.member.participant import Participant
from raycollect.planner.boxes import volume
from raycollect.pos import Container, Store
from raycollect.weights import atoms, digests
from raycollect.weights.atoms import AtomPart, Layouts
from raycollect.weights.local_side import LocalSide
from raycollect.weights.protocol import Atom, Digests, Version

WAIT_S = 60.0
"""How long an actor waits by default for readers of memory that is to be written, in seconds."""


@dataclass(slots=True, eq=False)
class ServedArrays:
    """Arrays that are served under a key while they are not written."""

    arrays: list[Array]
    key: Key | None = None

    def serve(self, store: Store) -> Key:
        """Begins to serve the arrays, unless they are served already."""
        if self.key is None:
            self.key = Key(secrets.token_bytes(28))  # a freed key can't be used again
            store.put(self.key, _listed(self.arrays))
        return self.key

    def serve_instead(self, store: Store, others: list[Array]) -> None:
        """Makes the key, if any, stand for other arrays with the same elements."""
        if self.key is not None:
            store.replace(self.key, _listed(others))

    def withdraw(self, store: Store) -> None:
        """Stops serving the arrays."""
        if self.key is not None:
            store.free([self.key])
            self.key = None

    def ranges(self) -> list[tuple[int, int]]:
        """Returns the memory ranges of the arrays."""
        return list(map(byte_range, self.arrays))


def _listed(tensors: list[Array]) -> Container:
    return Container(Structure("list", (), (TENSOR,) * len(tensors)), tuple(tensors), list(tensors))


@dataclass(slots=True, eq=False)
class _Filling:
    """A version that is being sealed, part by part."""

    attempt: bytes
    slot: ServedArrays
    key: Key
    places: dict[Atom, tuple[AtomPart, ...]]
    sealed: dict[Atom, bytes] = field(default_factory=dict)


class Source:
    """One rank of a publisher: its tensors, and its parts of the two newest versions."""

    def __init__(self, here: Participant, container: Container, layouts: Layouts, rank: int, actor: Any = None) -> None:
        self._here = here
        self._side = LocalSide("publish", container, layouts, rank, is_written=False)
        self._side.follow(actor)
        self._slots: dict[int, ServedArrays] = {}
        self._filling: _Filling | None = None
        self._failed = (b"", "")  # the attempt that failed last, and how

    def seal(
        self, version: Version, among: Sequence[Atom] | None, attempt: bytes, limit_s: float = WAIT_S
    ) -> tuple[Key, Digests]:
        """Copies this rank's part of a version, or the rest of a stream, and digests it.

        Args:
            version: The version.
            among: Its atoms, in the first call of an attempt; None in others.
            attempt: The id of the put or stream; atoms that another attempt sealed are sealed again.
            limit_s: How long to wait for readers of the version that is overwritten, and for plans that write the
                tensors, in seconds.

        Raises:
            VersionNotPutError: A part of this attempt has failed, or another attempt has replaced it.
            CollectiveTimeoutError: The time limit has passed.
            TensorDirtyError: A failed collective has left a tensor half-written.
            TensorReplacedError, LayoutError: The tensors were replaced by others.
        """
        until_s = time.monotonic() + limit_s
        if self._failed[0] == attempt:
            raise self._wrong(version, self._failed[1])
        live = self._side.live()
        filling = self.begin(version, among, attempt, limit_s)
        left = [atom for atom in filling.places if atom not in filling.sealed]
        self._copy(filling, left, live, max(until_s - time.monotonic(), 0.0))
        self._filling = None
        return filling.key, filling.sealed

    def seal_part(
        self, version: Version, among: Sequence[Atom] | None, attempt: bytes, part: object
    ) -> tuple[Key, Digests]:
        """Copies some tensors of a version, and digests them. The tensors may be written again when this returns.

        Args:
            version: As in `seal`, which seals the rest.
            among: As in `seal`.
            attempt: As in `seal`.
            part: A name, a list of names, or a dict by name of tensors that replace those of this rank.

        Raises:
            VersionNotPutError: As `seal`; or the part is invalid, or was sealed before.
            TensorDirtyError: As `seal`.
        """
        filling = self.begin(version, among, attempt)
        names = [part] if isinstance(part, str) else part
        if not isinstance(names, (list, tuple, Mapping)) or not names:
            raise self._wrong(version, f"{type(part).__name__} is no part: a name, names, or a dict of tensors by name")
        live = self._side.live()
        for name in names:
            is_given = isinstance(names, Mapping)
            fault = self._side.replace(live, name, names[name]) if is_given else self._side.fault_of(name)
            if fault:
                raise self._wrong(version, f"{name!r} is {fault}")
        wanted = [atom for atom in filling.places if self._side.key_of(atom[0]) in names]
        again = [atom for atom in wanted if atom in filling.sealed]
        if again:
            raise self._wrong(version, f"{self._side.key_of(again[0][0])!r} was sealed before")
        return filling.key, self._copy(filling, wanted, live, WAIT_S)

    def nbytes(self, among: Iterable[Atom]) -> int:
        """Returns the bytes of atoms."""
        return sum(volume(box) * self._side.layouts[name].itemsize for name, box in among)

    def fail(self, version: Version, attempt: bytes, detail: str) -> VersionNotPutError:
        """Marks an attempt as failed, so that it can't be sealed; returns the error."""
        self._failed = attempt, detail
        return self._wrong(version, detail)

    def close(self) -> None:
        """Stops serving."""
        for slot in self._slots.values():
            slot.withdraw(self._here.store)
        self._slots.clear()
        self._filling = None

    def begin(
        self, version: Version, among: Sequence[Atom] | None, attempt: bytes, limit_s: float = WAIT_S
    ) -> _Filling:
        """Returns the copy in which a version is sealed, in place of the version before the last; see `seal`."""
        if self._filling is not None and self._filling.attempt == attempt:
            return self._filling
        if among is None:
            raise self._wrong(version, "another stream or put has begun, and took its place")
        store = self._here.store
        slot = self._slots.get(version.count % 2)
        if slot is None:
            slot = self._slots[version.count % 2] = ServedArrays(self._side.allocate_arrays())
        slot.withdraw(store)
        with store.writing(slot.ranges(), limit_s=limit_s):  # waits for readers
            pass
        places = atoms.places(self._side.layouts, self._side.rank, among, whole=True)
        self._filling = _Filling(attempt, slot, slot.serve(store), places)
        return self._filling

    def _copy(self, filling: _Filling, wanted: Sequence[Atom], live: list[Array], limit_s: float) -> Digests:
        store = self._here.store
        ranges = self._side.ranges()
        with store.reading(ranges, limit_s=limit_s):
            if store.is_dirty(ranges):
                dirty = Violation(kind="dirty", rank=self._side.rank, field="tensor", found="half-written")
                raise refusal("put", "", (dirty,))
            slot = filling.slot.arrays
            sealed = {}
            for atom in wanted:
                (part,) = filling.places[atom]
                sealed[atom] = digests.copied(self._side.box(slot, part), self._side.box(live, part))
        filling.sealed.update(sealed)
        return sealed

    def _wrong(self, version: Version, detail: str) -> VersionNotPutError:
        who = self._here.actor
        return VersionNotPutError(name="", version=str(version), rank=self._side.rank, actor=who, detail=detail)
