"""One rank of a receiver group: makes and verifies the next version in memory that no method sees; inside the actor."""

from __future__ import annotations

import operator
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from raycollect.backends.arrays import Array, box_of, byte_range
from raycollect.backends.elements import convert
from raycollect.core.model import Key
from raycollect.errors import (
    RaycollectError,
    RefusedError,
    VersionDirtyError,
    VersionNotWholeError,
    brief,
    strip_traceback,
)
from raycollect.member.participant import Participant
from raycollect.planner.boxes import extent, moved
from raycollect.pos import Container, Range, fetch
from raycollect.pos.boxes import MOST_BOXES, Box
from raycollect.weights import atoms, digests, protocol
from raycollect.weights.atoms import AtomPart, Layouts
from raycollect.weights.directory import Atoms, HolderRecord, Holders
from raycollect.weights.local_side import LocalSide
from raycollect.weights.protocol import Atom, Digests, RankState, Version
from raycollect.weights.receipts import RankReceipt
from raycollect.weights.source import WAIT_S, ServedArrays

HOLDER_S = 5.0
"""How long to wait for a holder while other holders remain, in seconds."""

READ_NBYTES = 64 << 20
"""The most bytes of one request, but at least an atom. Over the network they are in memory twice."""


class Receiver:
    """One rank of a receiver group: its tensors, and a second set in which the next version is made.

    Args:
        here: The participant of this process.
        name: The name of the publication.
        container: The tensors.
        layouts: The layouts of the receiver group.
        rank: The rank in the receiver group.
        inplace: Whether versions are made in the tensors themselves, while methods are refused.
        actor: The actor that owns the tensors.
    """

    def __init__(
        self,
        here: Participant,
        name: str,
        container: Container,
        layouts: Layouts,
        rank: int,
        *,
        inplace: bool,
        actor: Any = None,
    ) -> None:
        self._here = here
        self.name: str = name
        self._side = LocalSide("subscribe", container, layouts, rank, is_written=True)
        self._side.follow(actor)
        self.inplace: bool = inplace
        self._back = ServedArrays(self._side.live() if inplace else self._side.allocate_arrays())
        if not inplace:
            for array, live in zip(self._back.arrays, self._side.live(), strict=True):
                np.copyto(array, live)  # elements that no layout covers
        self._among: tuple[Atom, ...] = ()  # the atoms of a version; versions usually have the same ones
        self._parts: dict[Atom, tuple[AtomPart, ...]] = {}  # where the atoms of this rank lie
        self._marked: list[Range] = []  # the ranges that are dirty by an update in place
        self._is_aside = False  # whether the visible version is served from the tensors instead of from `_back`
        self._ahead = 0  # bytes that were read for a stream
        self._mapped: dict[str, Array] = {}  # keeps the memory of the last version's holders mapped
        self.state: RankState = RankState()
        self.stale_holders: tuple[Key, ...] = ()  # the keys of holders that did not have the version staged last
        self.where: tuple[Range, ...] = tuple(span for span in self._side.ranges() if span[0] < span[1])
        self.form: tuple[Any, ...] = (name, inplace, rank, tuple(layouts.items()))

    def stage(self, version: Version, holders: Holders, timeout_s: float) -> RankReceipt:
        """Makes a version in the second set of tensors: reads the missing atoms.

        The version that methods see stays available to other receivers, also if this fails.

        Raises:
            VersionNotWholeError: No holder gave some atoms with the right digests.
            CollectiveTimeoutError: The time limit has passed, and others still read the second set of tensors.
            TensorReplacedError, LayoutError: The tensors were replaced by others.
        """
        began_s, live = time.monotonic(), self._live()  # refuses replaced tensors before any rank shows the version
        self._know(tuple(version.digests))
        wanted = {atom: version.digests[atom] for atom in self._parts}
        if self.inplace:
            self._hold_in_place(live)
            self.state = protocol.stage_in_place(self.state, version, wanted, self._lying(version))
            self._mark(version)
        else:
            self.state = protocol.stage(self.state, version, wanted)
        read, failures = self._read_missing(version, holders, timeout_s)
        if self.state.missing:
            raise self._not_whole(version, holders, failures)
        landed = {atom: self.state.landed[atom] for atom in wanted}
        self.stale_holders = tuple(key for key, error in failures.items() if isinstance(error, RefusedError))
        read, self._ahead = read + self._ahead, 0
        return RankReceipt(
            rank=self._side.rank,
            actor=self._here.actor,
            digests=landed,
            nbytes=read,
            seconds=time.monotonic() - began_s,
        )

    def open_stream(self, version: Version, among: Sequence[Atom]) -> None:
        """Begins to receive a stream; `among` are the version's atoms."""
        self._know(tuple(among))
        self.state = protocol.open_stream(self.state, version, among)
        self._ahead = 0

    def land(self, version: Version, part: Digests, holders: Holders, timeout_s: float) -> int:
        """Reads atoms of the open version, and returns the bytes; `stage` reads atoms that this could not get."""
        part = {atom: digest for atom, digest in part.items() if atom in self._parts}
        self.state = protocol.expect(self.state, version, part)
        if self.state.staged != version or not self.state.is_open:  # late: the tensors may be served meanwhile
            return 0
        read, _ = self._read_missing(version, holders, timeout_s)
        self._ahead += read
        return read

    def show(self, version: Version, limit_s: float = WAIT_S) -> Key | None:
        """Makes a version visible to methods, and serves it to others; returns None if it is incomplete here.

        Only tensors whose bits differ are written.

        Raises:
            CollectiveTimeoutError: The time limit has passed, and others still read the tensors.
        """
        live = self._live()
        if self.inplace and self.state.staged == version:
            self._hold_in_place(live)
            present = {**self.state.landed, **self._lying(version)}
            self.state = protocol.stage_in_place(self.state, version, self.state.wanted, present)
        if not protocol.may_show(self.state, version):
            return None
        store = self._here.store
        if self._is_aside:
            self._back.withdraw(store)  # the tensors that serve the version are about to change
            self._is_aside = False
        if not self.inplace:
            self._copy(live, limit_s)
        store.mark_written([*self._side.wholes(), *self._marked])
        self._marked.clear()
        self._here.methods.refusals.pop(self.where, None)
        self.state = protocol.show(self.state, version)
        return self._back.serve(store)

    def _copy(self, live: list[Array], limit_s: float) -> None:
        """Copies atoms of the second set whose bits differ into the tensors that methods see."""
        pairs = [
            (part.name, self._side.box(live, part), self._side.box(self._back.arrays, part))
            for parts in self._parts.values()
            for part in parts
        ]
        changed = [pair for pair in pairs if not digests.is_same(*pair[1:])]
        if changed:
            with self._here.store.writing(self._side.ranges(), limit_s=limit_s):
                for _, into, array in changed:
                    np.copyto(into, array)
            self._side.raise_versions({name for name, _, _ in changed})

    def withdraw(self) -> None:
        """Stops serving."""
        self._back.withdraw(self._here.store)
        self._is_aside = False

    def close(self) -> None:
        """Stops serving, and lets methods see the tensors in any state."""
        self.withdraw()
        self._here.methods.refusals.pop(self.where, None)

    def where_now(self) -> tuple[Range, ...]:
        """Returns the current memory ranges of the tensors, some of which may have been replaced."""
        with suppress(RefusedError):
            self._live()
        return self.where

    def _live(self) -> list[Array]:
        """Returns the tensors that methods see, some of which may have been replaced; raises as `LocalSide.live`."""
        live = self._side.live()
        where = tuple(span for span in self._side.ranges() if span[0] < span[1])
        if where != self.where:
            refusals = self._here.methods.refusals
            if (refused := refusals.pop(self.where, None)) is not None:
                refusals[where] = refused
            self.where = where
        return live

    def _hold_in_place(self, live: list[Array]) -> None:
        if any(map(operator.ne, map(byte_range, live), self._back.ranges())):
            self.withdraw()  # the tensors were replaced
        self._back.arrays = live

    def _make_room(self) -> None:
        """Serves the visible version from the tensors, as the second set is about to be written."""
        if self.inplace:
            self.withdraw()
        elif not self._is_aside and self._back.key is not None:
            self._back.serve_instead(self._here.store, self._live())
            self._is_aside = True

    def _mark(self, version: Version) -> None:
        """Refuses methods, collectives and `get` on the tensors while these are dirty."""
        if not self.state.is_dirty:
            return
        self._side.raise_versions()
        here = self._here
        is_ours = self.where in here.methods.refusals  # by an earlier update that has not ended
        detail = "an update in place has begun, and has not ended"
        where = {"name": self.name, "version": str(version), "actor": here.actor, "detail": detail}
        here.methods.refusals[self.where] = strip_traceback(VersionDirtyError(rank=self._side.rank, **where))
        for span, owner in zip(self._side.ranges(), self._side.owners(), strict=True):
            if is_ours or not here.store.is_dirty([span]):  # a range that a failed collective left dirty stays dirty
                here.store.mark_dirty([span], [owner])
                self._marked.append(span)

    def _lying(self, version: Version) -> dict[Atom, bytes]:
        """Recomputes the digests of landed atoms that lie as they were put: others may have overwritten them."""
        present = {}
        for atom, parts in self._parts.items():
            if atom in self.state.landed and len(parts) == 1 and parts[0].box == atom[1]:
                box = self._side.box(self._back.arrays, parts[0])
                if box.dtype == np.dtype(version.dtypes[atom[0]]):
                    present[atom] = digests.digest(box)
        return present

    def _know(self, among: tuple[Atom, ...]) -> None:
        if self._among != among:
            self._among, self._parts = among, atoms.places(self._side.layouts, self._side.rank, among, whole=False)

    def _read_missing(
        self, version: Version, holders: Holders, timeout_s: float
    ) -> tuple[int, dict[Key, RaycollectError]]:
        """Reads the missing atoms into the second set of tensors; returns the bytes, and the errors by holder."""
        if not self.state.missing:
            return 0, {}
        until_s = time.monotonic() + timeout_s
        self._make_room()
        failures: dict[Key, RaycollectError] = {}
        before, self._mapped = self._mapped, {}
        read = 0
        with self._here.store.writing(self._back.ranges(), limit_s=timeout_s):
            for at, (holder, places) in enumerate(holders):
                mine = [atom for atom in self.state.missing if atom in places]
                left_s = until_s - time.monotonic()
                limit_s = left_s if at == len(holders) - 1 else min(left_s, HOLDER_S)
                for some in self._requests(mine):
                    try:
                        read += self._read(version, holder, places, some, limit_s)
                    except RaycollectError as exc:
                        failures[holder.key] = exc
                        break
        del before
        return read, failures

    def _requests(self, wanted: Sequence[Atom]) -> list[list[Atom]]:
        requests: list[list[Atom]] = []
        nbytes = READ_NBYTES
        for atom in wanted:
            size = int(np.prod(extent(atom[1]))) * self._side.layouts[atom[0]].itemsize
            if nbytes + size > READ_NBYTES or len(requests[-1]) == MOST_BOXES:
                requests.append([])
                nbytes = 0
            requests[-1].append(atom)
            nbytes += size
        return requests

    def _read(self, version: Version, holder: HolderRecord, places: Atoms, some: list[Atom], limit_s: float) -> int:
        boxes = [Box(*places[atom], extent(atom[1]), version.dtypes[atom[0]]) for atom in some]
        landed: dict[Atom, bytes] = {}
        member, read = holder.member, 0

        def take(at: int, array: Array) -> None:
            nonlocal read
            read += array.nbytes
            if array.base is not None:
                self._mapped[member.incarnation] = array
            landed[some[at]] = self._land(some[at], array)

        fetch.read(
            member.address, holder.key, boxes, take,
            actor=member.actor, incarnation=member.incarnation, timeout_s=limit_s,
        )  # fmt: skip
        self.state = protocol.land(self.state, version, landed)
        wrong = [atom for atom in some if self.state.landed.get(atom) != self.state.wanted[atom]]
        if wrong:
            raise VersionNotWholeError(name=self.name, detail=f"other bits than were put: {atoms.shown(wrong[0])}")
        return read

    def _land(self, atom: Atom, array: Array) -> bytes:
        """Writes an atom into the second set, and returns the digest of the written bytes."""
        parts = self._parts[atom]
        boxes = [self._side.box(self._back.arrays, part) for part in parts]
        if len(parts) == 1 and parts[0].box == atom[1] and boxes[0].dtype == array.dtype:
            return digests.copied(boxes[0], array)
        whole = np.empty(array.shape, array.dtype)
        digest = digests.copied(whole, array)
        for part, box in zip(parts, boxes, strict=True):
            lo, _ = moved(part.box, atom[1][0], (0,) * array.ndim)
            wanted = np.empty(box.shape, box.dtype)
            convert(wanted, box_of(whole, lo, part.size))
            if digests.copied(box, wanted) != digests.digest(wanted):
                return b""
        return digest

    def _not_whole(
        self, version: Version, holders: Holders, failures: Mapping[Key, RaycollectError]
    ) -> VersionNotWholeError:
        missing = self.state.missing
        tried = [
            f"{holder.member.actor}: {brief(failures[holder.key])}" for holder, _ in holders if holder.key in failures
        ]
        detail = f"{len(missing)} of {len(self.state.wanted)} parts are missing, first {atoms.shown(missing[0])}: "
        detail += "; ".join(tried) or "it has no holders"
        who = self._here.actor
        return VersionNotWholeError(
            name=self.name, version=str(version), rank=self._side.rank, actor=who, detail=detail
        )
