"""One rank of a receiver group: verifies the next version in memory that no method sees; inside the actor."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

from raycollect.backends.arrays import Array
from raycollect.core.model import Key
from raycollect.core.signals import Deferred
from raycollect.errors import (
    RaycollectError,
    RefusedError,
    VersionDirtyError,
    VersionNotWholeError,
    strip_traceback,
)
from raycollect.member.participant import Participant
from raycollect.pos import Container, Range
from raycollect.pos.boxes import MOST_BOXES, Borrowed
from raycollect.weights import atoms, hosts, protocol, reads
from raycollect.weights.atoms import AtomPart, Layouts
from raycollect.weights.cut import Atom, Digests, VersionCut
from raycollect.weights.directory import Atoms, Holder, Holders
from raycollect.weights.exclusion import Exclusion
from raycollect.weights.hosts import Loan
from raycollect.weights.local_side import LocalSide
from raycollect.weights.protocol import RankState, Version
from raycollect.weights.reads import Arrived
from raycollect.weights.receipts import RankReceipt
from raycollect.weights.source import WAIT_S, ServedArrays
from raycollect.weights.target import Target

HOLDER_S, LENDER_S = 5.0, 1.0
"""How long to wait for a holder while other holders remain, and for one that only has to lend, in seconds."""

READ_NBYTES = 64 << 20
"""The most bytes of atoms that are read at once from another host, or in place, but at least an atom of each request.
In place they are in memory twice until they are written."""


class Receiver:
    """One rank of a receiver group: its tensors, and the elements of the next version until methods see it.

    These elements lie in the memory of a holder on this machine, which lends them, or they are copies of what arrived.
    A receiver in place copies what arrives into its tensors at once.

    Args:
        here: The participant of this process.
        name: The name of the publication.
        container: The tensors.
        layouts: The layouts of the receiver group.
        rank: The rank in the receiver group.
        inplace: Whether versions are made in the tensors themselves, while methods are refused.
        actor: The actor that owns the tensors.
        is_own: Whether the tensors are the process's own, so that no methods are refused.

    Attributes:
        exclusion: Excludes the methods of the actor.
    """

    exclusion: Exclusion

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
        is_own: bool = False,
    ) -> None:
        self._here = here
        self.name: str = name
        self._side = LocalSide("subscribe", container, layouts, rank, is_written=True)
        self._side.follow(actor)
        self.inplace: bool = inplace
        self._refusals: dict[object, RaycollectError] = {} if is_own else here.methods.refusals
        self._served = ServedArrays(self._side.live())  # the version that methods see
        self._offered = ServedArrays([], is_frozen=True)  # what arrived of the next one, for other ranks of this host
        self._lends = False
        self._staged: list[Array] = []  # the tensors, as of the last `stage`
        self._target = Target(self._side)
        self._marked: list[Range] = []  # the ranges that are dirty by an update in place
        self._ahead = 0  # bytes that were read for a stream
        self._next: dict[Atom, Array] = {}  # the verified elements of the next version
        self._lent: list[tuple[Borrowed, list[Atom]]] = []  # those that holders lend
        self._checked: dict[Atom, tuple[Key, bytes]] = {}  # atoms of a stream that were verified in a holder's memory
        self._mapped: dict[str, Array] = {}  # keeps the memory of the last version's holders mapped
        self._base: tuple[Digests, Holders] = {}, ()  # of the version staged last: the digests, and its holders
        self.state: RankState = RankState()
        self.loan: Loan = None  # of what was staged last
        self.stale_holders: tuple[Key, ...] = ()  # the keys of holders that did not have the version staged last
        self._ranges: list[Range] = self._side.ranges()
        self.where: tuple[Range, ...] = tuple(span for span in self._ranges if span[0] < span[1])
        self.form: tuple[Any, ...] = (name, inplace, is_own, rank, tuple(layouts.items()))

    def stage(self, version: Version, holders: Holders, timeout_s: float, *, lends: bool = False) -> RankReceipt:
        """Gets and verifies the atoms of a version that this rank lacks.

        The version that methods see stays available to other receivers, also if this fails. With `lends`, what arrived
        is available to other ranks of this host until methods see it, as `loan`.

        Raises:
            VersionNotWholeError: No holder gave some atoms with the right digests.
            CollectiveTimeoutError: The time limit has passed, and others still read the tensors (in place).
            TensorReplacedError, LayoutError: The tensors were replaced by others.
        """
        began_s = time.monotonic()
        self._staged = live = self._side.read(self._live())  # refuses replaced tensors before any rank shows it
        self._know(version.cut)
        self.release()
        self._lends = lends
        # Backwards, as the publisher has written the last ones last: they may still be in the cache
        wanted = {atom: version.digests[atom] for atom in reversed(self._target.parts)}
        self._next = {atom: it for atom, it in self._next.items() if self.state.landed.get(atom) == wanted[atom]}
        if self.inplace:
            self.state = protocol.stage_in_place(self.state, version, wanted, self._lying(live))
            self._mark(version)
        else:
            self.state = protocol.stage(replace(self.state, landed=self._present(wanted, live)), version, wanted)
        read, failures = self._read_missing(version, holders, timeout_s, live)
        self._checked.clear()
        if self.state.missing:
            self.release()
            who, detail = self._here.actor, reads.missing(self.state, self._target.cut, holders, failures)
            raise VersionNotWholeError(
                name=self.name, version=str(version), rank=self._side.rank, actor=who, detail=detail
            )
        self._base = wanted, holders
        landed = {atom: self.state.landed[atom] for atom in wanted}
        self.stale_holders = tuple(key for key, error in failures.items() if isinstance(error, RefusedError))
        read, self._ahead = read + self._ahead, 0
        if self._lends:
            borrowed = {atom for _, some in self._lent for atom in some}
            arrived = {atom: array for atom, array in self._next.items() if atom not in borrowed}
            self.loan = hosts.lend(self._here.store, self._offered, arrived, landed)
        return RankReceipt(
            rank=self._side.rank,
            actor=self._here.actor,
            digests=landed,
            nbytes=read,
            seconds=time.monotonic() - began_s,
        )

    def open_stream(self, version: Version) -> None:
        """Begins to receive a stream."""
        self._know(version.cut)
        self.state = protocol.open_stream(self.state, version.label, version.cut.atoms)
        self._ahead = 0

    def land(self, version: Version, part: Digests, holders: Holders, timeout_s: float) -> int:
        """Reads atoms of the open version, and returns the bytes; `stage` reads atoms that this could not get."""
        part = {atom: digest for atom, digest in part.items() if atom in self._target.parts}
        self.state = protocol.expect(self.state, version, part)
        if self.state.staged != version or not self.state.is_open:  # late
            return 0
        read, _ = self._read_missing(version, holders, timeout_s, self._live())
        self.release()  # `stage` borrows them once more, in one piece
        self._ahead += read
        return read

    def show(self, version: Version, limit_s: float = WAIT_S, *, is_fresh: bool = False) -> Key | None:
        """Makes a version visible to methods, and serves it to others; returns None if it is incomplete here.

        Only tensors whose bits differ are written. `is_fresh`: nothing can have written them since `stage`.

        Raises:
            CollectiveTimeoutError: The time limit has passed, and others still read the tensors.
        """
        until_s = time.monotonic() + limit_s
        live = self._staged if is_fresh else self._side.read(self._live())
        if self.inplace and self.state.staged == version:
            present = {**self.state.landed, **self._lying(live)}
            self.state = protocol.stage_in_place(self.state, version, self.state.wanted, present)
        elif not is_fresh and protocol.may_show(self.state, version):
            self._mend(version, limit_s, live)
        if not protocol.may_show(self.state, version):
            return None
        store = self._here.store
        if not self.inplace:
            self._copy(live, max(until_s - time.monotonic(), 0.0))
            self.release()
            self._next.clear()
        if store.dirty:
            store.mark_written([*self._side.wholes(), *self._marked])
        self._marked.clear()
        self._refusals.pop(self.where, None)
        self.state = protocol.show(self.state, version)
        self._served.arrays = live
        return self._served.serve(store)

    def _mend(self, version: Version, limit_s: float, live: list[Array]) -> None:
        """Reads atoms again that methods have overwritten since `stage`."""
        still = {atom: self.state.wanted[atom] for atom in self._next}
        others = {atom: digest for atom, digest in self.state.wanted.items() if atom not in still}
        present = self._present(others, live)
        if len(present) < len(others):
            self.state = protocol.stage(replace(self.state, landed={**still, **present}), version, self.state.wanted)
            self._read_missing(version, self._base[1], limit_s, live)

    def _copy(self, live: list[Array], limit_s: float) -> None:
        """Copies the atoms of the next version whose bits differ into the tensors that methods see.

        One converted atom is in memory at a time. None is made once the first atom is written, so that no lack of
        memory leaves a half-written version.
        """
        differing: dict[Atom, Sequence[AtomPart]] = {}
        for atom, array in reversed(self._next.items()):  # the cache may have those that were verified last
            if parts := self._target.differing(atom, self.state.wanted[atom], array, live):
                differing[atom] = parts
        if differing:
            with self._here.store.writing(self._side.memory(), limit_s=limit_s):
                self._served.withdraw(self._here.store)
                with Deferred():  # a handler that raises would leave a mix of two versions
                    for atom, parts in differing.items():
                        self._target.write(atom, parts, self._next[atom], live)
                    self._side.wrote(self._here.store, (part.name for parts in differing.values() for part in parts))

    def _present(self, wanted: Digests, live: list[Array]) -> dict[Atom, bytes]:
        """Returns the atoms with these digests that are here: as they arrived, or in the tensors, read again."""
        return {
            atom: digest
            for atom, digest in wanted.items()
            if (atom in self._next and self.state.landed.get(atom) == digest) or self._target.has(atom, digest, live)
        }

    def release(self) -> None:
        """Gives back what holders lend, and ends the loan."""
        self._offered.withdraw(self._here.store)
        self._offered.arrays, self.loan = [], None
        lent, self._lent = self._lent, []
        for borrowed, some in lent:
            borrowed.close()
            for atom in some:
                self._next.pop(atom, None)

    def withdraw(self) -> None:
        """Stops serving."""
        self.release()
        self._served.withdraw(self._here.store)

    def close(self) -> None:
        """Stops serving, and lets methods see the tensors in any state."""
        self.withdraw()
        self._refusals.pop(self.where, None)

    def where_now(self) -> tuple[Range, ...]:
        """Returns the current memory ranges of the tensors, some of which may have been replaced."""
        with suppress(RefusedError):
            self._live()
        return self.where

    def _live(self) -> list[Array]:
        """Returns the tensors that methods see, some of which may have been replaced; raises as `LocalSide.live`."""
        live, before = self._side.live(), self._ranges
        self._ranges = ranges = self._side.ranges()
        where = self.where if ranges is before else tuple(span for span in ranges if span[0] < span[1])
        if where != self.where:
            self._served.withdraw(self._here.store)
            if (refused := self._refusals.pop(self.where, None)) is not None:
                self._refusals[where] = refused
            self.where = where
        return live

    def _mark(self, version: Version) -> None:
        """Refuses methods, collectives and `get` on the tensors while these are dirty."""
        if not self.state.is_dirty:
            return
        self._side.raise_versions()
        here = self._here
        is_ours = self.where in self._refusals  # by an earlier update that has not ended
        detail = "an update in place has begun, and has not ended"
        where = {"name": self.name, "version": str(version), "actor": here.actor, "detail": detail}
        self._refusals[self.where] = strip_traceback(VersionDirtyError(rank=self._side.rank, **where))
        for span, owner in zip(self._side.ranges(), self._side.owners(), strict=True):
            if is_ours or not here.store.is_dirty([span]):  # a range that a failed collective left dirty stays dirty
                here.store.mark_dirty([span], [owner])
                self._marked.append(span)

    def _lying(self, live: list[Array]) -> dict[Atom, bytes]:
        """Recomputes the digests of landed atoms that lie as they were put: others may have overwritten them."""
        return self._target.lying(self.state.landed, live)

    def _know(self, cut: VersionCut) -> None:
        if self._target.cut != cut:
            same = self._target.know(cut)
            self._next = {atom: array for atom, array in self._next.items() if atom in same}
            self._checked = {atom: checked for atom, checked in self._checked.items() if atom in same}
            self._base = {atom: digest for atom, digest in self._base[0].items() if atom in same}, self._base[1]

    def _read_missing(
        self, version: Version, holders: Holders, timeout_s: float, live: list[Array]
    ) -> tuple[int, dict[Key, RaycollectError]]:
        """Gets the missing atoms; returns the bytes, and the errors by holder."""
        if not self.state.missing:
            return 0, {}
        until_s = time.monotonic() + timeout_s
        failures: dict[Key, RaycollectError] = {}
        before, self._mapped = self._mapped, {}
        read = 0
        with ExitStack() as claim:
            if self.inplace:
                self.withdraw()  # the tensors that serve the version are about to change
                claim.enter_context(self._here.store.writing(self._side.ranges(), limit_s=timeout_s))
            turns = reads.in_turn(holders, self._base[1], self._here.identity.machine)
            for at, (holder, places, since) in enumerate(turns):
                mine = [atom for atom in self.state.missing if atom in places]
                left_s = until_s - time.monotonic()
                if since:
                    read += self._read_deltas(version, holder, places, since, mine, min(left_s, HOLDER_S), live)
                    continue
                is_near = holder.is_publisher and holder.machine == self._here.identity.machine
                others = [more for _, more, _ in turns[at + 1 :]]
                has_others = bool(others) and all(any(atom in more for more in others) for atom in mine)
                limit_s = min(left_s, LENDER_S if is_near else HOLDER_S) if has_others else left_s
                is_bounded = self.inplace or holder.machine != self._here.identity.machine
                most_nbytes = READ_NBYTES if is_bounded else 1 << 62
                for some in self._batches(mine, most_nbytes, places):
                    try:
                        read += self._read(version, holder, places, some, limit_s, live)
                    except RaycollectError as exc:
                        failures[holder.key] = exc
                        break
        del before
        return read, failures

    def _read(
        self,
        version: Version,
        holder: Holder,
        places: Atoms,
        some: list[Atom],
        limit_s: float,
        live: list[Array],
    ) -> int:
        landed, read, target = dict[Atom, bytes](), 0, self._target
        borrowed = reads.whole(self._target.cut, holder, places, some, limit_s, in_arena=self._lends)
        try:
            for atom, array in zip(some, borrowed.arrays, strict=True):
                wanted = self.state.wanted[atom]
                if borrowed.is_lent and self._checked.get(atom) == (holder.key, wanted):
                    landed[atom] = wanted
                else:
                    landed[atom] = self._landed(atom, array, live)
                    read += array.nbytes
        except BaseException:
            borrowed.close()
            raise
        self.state = protocol.land(self.state, version, landed)
        right = [atom for atom in some if self.state.landed.get(atom) == self.state.wanted[atom]]
        if self.inplace:
            borrowed.close()
        else:
            self._hold(holder, borrowed, some, right)
        if len(right) < len(some):
            wrong = next(atom for atom in some if atom not in right)
            first = target.cut.differing(wrong, landed[wrong], self.state.wanted[wrong])
            raise VersionNotWholeError(
                name=self.name, detail=f"other bits than were put: {self._target.cut.shown(first)}"
            )
        return read

    def _batches(self, some: Iterable[Atom], most_nbytes: int, places: Atoms) -> list[list[Atom]]:
        """Divides atoms into those of one request each, at their places in a holder."""
        return atoms.batches(
            some, lambda atom: self._target.cut.nbytes([atom]), most_nbytes, MOST_BOXES, lambda atom: len(places[atom])
        )

    def _read_deltas(
        self,
        version: Version,
        holder: Holder,
        places: Atoms,
        since: Key,
        wanted: Sequence[Atom],
        limit_s: float,
        live: list[Array],
    ) -> int:
        """Makes atoms of those that lie here as in an earlier version; returns the bytes that arrived for them.

        An atom that does not lie here like that, or that a failure leaves out, stays missing: it is read as a whole.
        """
        before, target = self._base[0], self._target
        lying = {atom: boxes for atom in wanted if atom in before and (boxes := target.boxes(atom, live)) is not None}

        def get(some: list[Atom]) -> Arrived:
            bases = {atom: lying[atom] for atom in some}
            arrays, nbytes = reads.deltas(
                target.cut, holder, places, since, before, bases, limit_s, in_arena=self._lends
            )
            landed = {atom: self._landed(atom, array, live) for atom, array in arrays.items()}
            return Arrived({} if self.inplace else arrays, landed, nbytes)

        arrived = reads.in_threads(get, self._batches(lying, READ_NBYTES // reads.READERS, places))
        for some in arrived:
            self.state = protocol.land(self.state, version, some.landed)
            self._next |= {atom: it for atom, it in some.arrays.items() if some.landed[atom] == self.state.wanted[atom]}
        return sum(some.nbytes for some in arrived)

    def _landed(self, atom: Atom, array: Array, live: list[Array]) -> bytes:
        """Returns the recomputed digest of an atom that has arrived; writes it in place."""
        wanted = self.state.wanted[atom]
        return (
            self._target.land(atom, wanted, array, live) if self.inplace else self._target.digest(atom, wanted, array)
        )

    def _hold(self, holder: Holder, borrowed: Borrowed, some: list[Atom], right: list[Atom]) -> None:
        """Keeps verified atoms until methods see them."""
        elements = dict(zip(some, borrowed.arrays, strict=True))
        self._next |= {atom: elements[atom] for atom in right}
        if borrowed.is_lent:
            self._lent.append((borrowed, right))
            self._mapped[holder.incarnation] = borrowed.arrays[0]
            if self.state.is_open:
                self._checked |= {atom: (holder.key, self.state.wanted[atom]) for atom in right}
