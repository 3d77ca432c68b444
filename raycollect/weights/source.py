"""One rank of a publisher: copies its tensors, and serves the copies as versions; inside the actor."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from raycollect.backends.arrays import Array, DeviceArray, byte_range
from raycollect.backends.elements import TORCH_DTYPES, native
from raycollect.core import threads
from raycollect.core.model import TENSOR, Key, Structure
from raycollect.errors import VersionNotPutError, Violation, refusal
from raycollect.member.participant import Participant
from raycollect.planner.boxes import extent
from raycollect.planner.reshard.matching import CONVERTED
from raycollect.pos import Container, Store
from raycollect.pos.boxes import empty
from raycollect.weights import atoms, digests
from raycollect.weights.atoms import Layouts, Parts
from raycollect.weights.cut import NO_CUT, Atom, Digests, VersionCut
from raycollect.weights.exclusion import Exclusion
from raycollect.weights.local_side import LocalSide
from raycollect.weights.protocol import Version

WAIT_S = 60.0
"""How long an actor waits by default for readers of memory that is to be written, in seconds."""

_THREADS, _THREAD_NBYTES = min(4, os.cpu_count() or 1), 8 << 20
"""The most threads that copy a version, and the bytes from which on another one helps."""

_NOTHING: Array = np.empty(0, np.uint8)
"""Stands for a tensor that is not sealed yet."""


@dataclass(slots=True, eq=False)
class ServedArrays:
    """Arrays that are served under a key; `is_frozen` if nobody writes them meanwhile."""

    arrays: list[Array]
    is_frozen: bool = False
    key: Key | None = None

    def serve(self, store: Store) -> Key:
        """Serves the arrays, under the same key if they are served already."""
        listed = Structure("list", (), (TENSOR,) * len(self.arrays))
        container = Container(listed, tuple(self.arrays), list(self.arrays), is_frozen=self.is_frozen)
        if self.key is None:
            self.key = Key(secrets.token_bytes(28))  # a freed key can't be used again
            store.put(self.key, container)
        else:
            store.replace(self.key, container)
        return self.key

    def withdraw(self, store: Store) -> None:
        """Stops serving the arrays."""
        if self.key is not None:
            store.free([self.key])
            self.key = None


@dataclass(slots=True, eq=False)
class _Slot(ServedArrays):
    """One version: the copies, by tensor or bucket, in which order they are served, and the digests of their atoms."""

    is_frozen: bool = True
    cut: VersionCut = NO_CUT
    order: Sequence[int] = ()
    copies: dict[int, Array] = field(default_factory=dict)
    sealed: dict[Atom, bytes] = field(default_factory=dict)

    def serve(self, store: Store) -> Key:
        """Serves the copies that there are."""
        self.arrays = [self.copies.get(at, _NOTHING) for at in self.order]
        return super(_Slot, self).serve(store)


@dataclass(slots=True, eq=False)
class _Filling:
    """A version that is being sealed, part by part."""

    attempt: bytes
    slot: _Slot
    key: Key
    before: _Slot | None  # the version before


class Source:
    """One rank of a publisher: its tensors, and its parts of the two newest versions.

    A version shares the copies of tensors that have not changed since the version before. A copy is written again when
    no version has it, unless a receiver still reads it: then the receiver keeps it, and another copy is allocated.

    Attributes:
        exclusion: Excludes the methods of the actor.
    """

    exclusion: Exclusion

    def __init__(
        self,
        here: Participant,
        container: Container,
        layouts: Layouts,
        rank: int,
        actor: Any = None,
        dtype: str = "",
    ) -> None:
        self._here = here
        self._dtype = TORCH_DTYPES[dtype] if dtype else None  # as which floats are put
        self._side = LocalSide("publish", container, layouts, rank, is_written=False)
        self._side.follow(actor)
        self._slots: dict[int, _Slot] = {}  # by the count of the version
        self._spare: dict[int, list[Array]] = {}  # by tensor or bucket: the copies that no version has
        self._cut: VersionCut = NO_CUT
        self._places: Parts = {}  # where the atoms lie
        self._copy_of: dict[Atom, int] = {}  # the tensor of each atom; of a bucket a number behind those of tensors
        self._filling: _Filling | None = None
        self._failed = (b"", "")  # the attempt that failed last, and how

    def seal(
        self, version: Version, cut: VersionCut | None, attempt: bytes, limit_s: float = WAIT_S
    ) -> tuple[Key, Digests]:
        """Copies this rank's part of a version, or the rest of a stream, and digests it.

        Args:
            version: The version.
            cut: Its atoms, in the first call of an attempt; None in others.
            attempt: The id of the put or stream; atoms that another attempt sealed are sealed again.
            limit_s: How long to wait for plans that write the tensors, in seconds.

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
        filling = self._begin(version, cut, attempt)
        left = [atom for atom in self._places if atom not in filling.slot.sealed]
        self._copy(filling, left, live, max(until_s - time.monotonic(), 0.0))
        self._filling = None
        return filling.key, filling.slot.sealed

    def seal_part(
        self,
        version: Version,
        cut: VersionCut | None,
        attempt: bytes,
        part: object,
        limit_s: float = WAIT_S,
    ) -> tuple[Key, Digests]:
        """Copies some tensors of a version, and digests them. The tensors may be written again when this returns.

        Args:
            version: As in `seal`, which seals the rest.
            cut: As in `seal`.
            attempt: As in `seal`.
            part: A name, a list of names, or a dict by name of tensors that replace those of this rank.
            limit_s: How long to wait for others that write the tensors.

        Raises:
            VersionNotPutError: As `seal`; or the part is invalid, or was sealed before.
            TensorDirtyError: As `seal`.
        """
        filling = self._begin(version, cut, attempt)
        names = [part] if isinstance(part, str) else part
        if not isinstance(names, (list, tuple, Mapping)) or not names:
            raise self._wrong(version, f"{type(part).__name__} is no part: a name, names, or a dict of tensors by name")
        live = list(self._side.live())
        for name in names:
            is_given = isinstance(names, Mapping)
            fault = self._side.replace(live, name, names[name]) if is_given else self._side.fault_of(name)
            if fault:
                raise self._wrong(version, f"{name!r} is {fault}")
        wanted = [atom for atom in self._places if self._side.key_of(atom[0]) in names]
        again = [atom for atom in wanted if atom in filling.slot.sealed]
        if again:
            raise self._wrong(version, f"{self._side.key_of(again[0][0])!r} was sealed before")
        return filling.key, self._copy(filling, wanted, live, limit_s)

    def nbytes(self, some: Iterable[Atom]) -> int:
        """Returns the bytes of atoms."""
        return self._cut.nbytes(some)

    def fail(self, version: Version, attempt: bytes, detail: str) -> VersionNotPutError:
        """Marks an attempt as failed, so that it can't be sealed; returns the error."""
        self._failed = attempt, detail
        return self._wrong(version, detail)

    def close(self) -> None:
        """Stops serving."""
        for slot in self._slots.values():
            slot.withdraw(self._here.store)
        self._slots.clear()
        self._spare.clear()
        self._filling = None

    def begin(self, version: Version, cut: VersionCut | None, attempt: bytes) -> None:
        """Begins a version whose parts may be none, and drops versions but the one before; see `seal`."""
        self._begin(version, cut, attempt)

    def _begin(self, version: Version, cut: VersionCut | None, attempt: bytes) -> _Filling:
        if self._filling is not None and self._filling.attempt == attempt:
            return self._filling
        if cut is None:
            raise self._wrong(version, "another stream or put has begun, and took its place")
        count = self._side.count
        if self._cut != cut:
            self._side.bucket_views.clear()
            self._cut, self._places = cut, atoms.places(self._side.layouts, self._side.rank, cut, whole=True)
            self._copy_of = {
                atom: self._side.tensor(atom[0]) if (number := cut.numbers.get(atom)) is None else count + number
                for atom in self._places
            }
            self._spare = {at: some for at, some in self._spare.items() if at < count}  # other buckets
        before = self._slots.pop(version.count - 1, None)
        for slot in self._slots.values():
            slot.withdraw(self._here.store)
            for at, array in slot.copies.items():
                spare, shared = self._spare.setdefault(at, []), None if before is None else before.copies.get(at)
                if (at < count or slot.cut == cut) and not any(array is other for other in (shared, *spare)):
                    spare.append(array)
        self._leave_to_readers()
        slot = _Slot([], cut=cut, order=sorted({*self._copy_of.values()}))
        self._slots = {version.count: slot} if before is None else {version.count - 1: before, version.count: slot}
        self._filling = _Filling(attempt, slot, slot.serve(self._here.store), before)
        return self._filling

    def _leave_to_readers(self) -> None:
        """Keeps no spare copies that are still read; new readers can't find them."""
        is_read = self._here.store.is_read
        if is_read(byte_range(array) for some in self._spare.values() for array in some):
            self._spare = {
                at: [array for array in some if not is_read([byte_range(array)])] for at, some in self._spare.items()
            }

    def _copy(self, filling: _Filling, wanted: Sequence[Atom], live: list[Array], limit_s: float) -> Digests:
        store = self._here.store
        ranges = self._side.ranges()
        by_copy: dict[int, list[Atom]] = {}  # by tensor or bucket
        for atom in wanted:
            by_copy.setdefault(self._copy_of[atom], []).append(atom)
        sealed: dict[Atom, bytes] = {}
        with store.reading(ranges, limit_s=limit_s):
            if store.is_dirty(ranges):
                dirty = Violation(kind="dirty", rank=self._side.rank, field="tensor", found="half-written")
                raise refusal("put", "", (dirty,))
            items = list(by_copy.items())
            large = [atom for atom in wanted if atom not in self._cut.members]  # buckets hold the GIL
            count = min(_THREADS, 1 + self.nbytes(large) // _THREAD_NBYTES)
            if DeviceArray in set(map(type, live)):
                count = 1  # copies from a device follow the work that this thread has enqueued
            with threads.pool("raycollect-copy", count) as workers:  # copies and digests hold no GIL
                others = [
                    threads.submit(workers, self._copy_each, filling, items[at::count], live) for at in range(1, count)
                ]
                sealed |= self._copy_each(filling, items[::count], live)
                for other in others:
                    sealed |= other.result()
        filling.slot.sealed.update(sealed)
        filling.slot.serve(store)
        return sealed

    def _copy_each(
        self, filling: _Filling, copies: Iterable[tuple[int, Sequence[Atom]]], live: list[Array]
    ) -> dict[Atom, bytes]:
        """Copies atoms, by tensor or bucket, unless the version before has the same bits of it."""
        sealed = dict[Atom, bytes]()
        for at, some in copies:
            if at < self._side.count:
                sealed |= self._copy_tensor(filling, at, some, live)
            else:
                sealed[some[0]] = self._copy_bucket(filling, at, some[0], live)
        return sealed

    def _copy_tensor(self, filling: _Filling, at: int, some: Sequence[Atom], live: list[Array]) -> dict[Atom, bytes]:
        before, sealed = filling.before, dict[Atom, bytes]()
        array = self._side.on_host(at, live[at])
        held = {at: array}
        boxes = [(atom, part, self._side.box(held, part)) for atom in some for part in self._places[atom]]
        dtype = native(array.dtype)
        is_converted = self._dtype not in (None, dtype) and dtype.name in CONVERTED
        if is_converted and self._dtype is not None:
            dtype = self._dtype
        elif before is not None and all(
            atom in before.sealed and digests.is_same(self._side.box(before.copies, part), box)
            for atom, part, box in boxes
        ):
            filling.slot.copies[at] = before.copies[at]
            return {atom: before.sealed[atom] for atom in some}
        spare = self._spare.setdefault(at, [])
        filling.slot.copies[at] = fresh = spare.pop() if spare else self._side.allocate_array(array, dtype)
        for atom, part, box in boxes:
            sealed[atom] = digests.copied(self._side.box(filling.slot.copies, part), box)
        if is_converted and before is not None and all(before.sealed.get(atom) == sealed[atom] for atom in some):
            filling.slot.copies[at] = before.copies[at]
            spare.append(fresh)
        return sealed

    def _copy_bucket(self, filling: _Filling, at: int, bucket: Atom, live: list[Array]) -> bytes:
        parts = self._places[bucket]
        boxes = self._side.flat(bucket, parts)
        if boxes is None:
            held = {of: self._side.on_host(of, live[of]) for of in {self._side.tensor(part.name) for part in parts}}
            boxes = [self._side.box(held, part).reshape(-1) for part in parts]
        spare = self._spare.setdefault(at, [])
        fresh = spare.pop() if spare else empty(extent(bucket[1]), self._cut.dtypes[bucket[0]], in_arena=True)
        digests.join(fresh, boxes)
        before = filling.before
        if before is not None and before.cut == self._cut and digests.is_same(before.copies[at], fresh):
            filling.slot.copies[at] = before.copies[at]
            spare.append(fresh)
            return before.sealed[bucket]
        filling.slot.copies[at] = fresh
        return digests.of_bucket(fresh, self._cut.lies_as_bytes[bucket])

    def _wrong(self, version: Version, detail: str) -> VersionNotPutError:
        who = self._here.actor
        return VersionNotPutError(name="", version=str(version), rank=self._side.rank, actor=who, detail=detail)
