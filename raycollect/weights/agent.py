"""What the participants of publications and subscriptions keep, and do when their driver says so; inside the actor.

A driver calls the functions at the end by `__ray_call__`, so that they take their places in the actor's queue: what a
method sees does not change while it runs. Reads of other processes are served beside methods (`pos.fetch`).
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from raycollect.backends.arrays import Array, byte_range
from raycollect.backends.elements import convert
from raycollect.core.model import TENSOR, Address, Key, Structure
from raycollect.engine.packed_boxes import box_of
from raycollect.errors import (
    PublisherReplacedError,
    RaycollectError,
    RefusedError,
    VersionNotWholeError,
    Violation,
    brief,
    refusal,
)
from raycollect.member.runtime import Runtime, describe
from raycollect.planner.boxes import extent, moved
from raycollect.pos import Container, Store, fetch
from raycollect.pos.boxes import MOST_BOXES, Box
from raycollect.weights import atoms, digests, protocol
from raycollect.weights.atoms import Layouts, Place
from raycollect.weights.local_side import LocalSide
from raycollect.weights.protocol import Atom, Digests, RankState, Version

HOLDER_S = 5.0
"""How long a holder that does not answer is waited for while there are others, in seconds."""

READ_NBYTES = 64 << 20
"""The most that one request asks for, which is in memory twice where it comes over the network; at least an atom."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Whom a rank may ask for atoms.

    Attributes:
        address: Where it serves reads.
        key: Under which key.
        actor: Its actor, for people.
        incarnation: Ray's id of the process.
        places: Each atom's tensor among those of the key, and its first element there.
    """

    address: Address
    key: Key
    actor: str
    incarnation: str
    places: Mapping[Atom, tuple[int, tuple[int, ...]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """What staging a version did on a rank.

    Attributes:
        digests: Of each of its atoms, from what lies there.
        nbytes: The bytes that were read for it.
        seconds: How long that took.
        gone: The keys of holders that did not have the version.
    """

    digests: Digests
    nbytes: int
    seconds: float
    gone: tuple[Key, ...]


@dataclass(slots=True, eq=False)
class _Kept:
    """Arrays that are served under a key, as long as they are not written."""

    arrays: list[Array]
    key: Key | None = None

    def serve(self, store: Store) -> Key:
        tensors, key = tuple(self.arrays), Key(secrets.token_bytes(28))  # a key that was freed is never held again
        store.put(key, Container(Structure("list", (), (TENSOR,) * len(tensors)), tensors, list(tensors)))
        self.key = key
        return key

    def withdraw(self, store: Store) -> None:
        if self.key is not None:
            store.free([self.key])
            self.key = None

    def ranges(self) -> list[tuple[int, int]]:
        return list(map(byte_range, self.arrays))


class Source:
    """One rank of a publisher: its tensors, and its parts of the two newest versions."""

    def __init__(self, container: Container, layouts: Layouts, rank: int) -> None:
        self._side = LocalSide("publish", container, layouts, rank, is_written=False)
        self._slots: dict[int, _Kept] = {}

    def seal(self, version: Version, among: Sequence[Atom]) -> tuple[Key, Digests]:
        """Copies this rank's part of a version, and digests it.

        Raises:
            TensorDirtyError: A failed collective has left a tensor half-written.
        """
        store = Runtime.current().store
        slot = self._slots.get(version.count % 2)
        if slot is None:
            slot = self._slots[version.count % 2] = _Kept(self._side.made())
        slot.withdraw(store)
        live, ranges = self._side.live(), self._side.ranges()
        places = atoms.places(self._side.layouts, self._side.rank, among, whole=True)
        with store.reading(ranges), store.writing(slot.ranges()):
            if store.is_dirty(ranges):
                dirty = Violation(kind="dirty", rank=self._side.rank, field="tensor", found="half-written")
                raise refusal("put", "", (dirty,))
            found = {
                atom: digests.copied(self._side.box(slot.arrays, one), self._side.box(live, one))
                for atom, (one,) in places.items()
            }
        return slot.serve(store), found

    def close(self) -> None:
        """Serves nothing any more."""
        for slot in self._slots.values():
            slot.withdraw(Runtime.current().store)
        self._slots.clear()


@dataclass(slots=True, eq=False)
class _Parts:
    """Where the atoms of a version lie on a rank; it is the same for many versions."""

    among: tuple[Atom, ...]
    found: dict[Atom, tuple[Place, ...]] = field(default_factory=dict)


class Receiver:
    """One rank of a receiver group: its tensors, and a second set in which the next version is made."""

    def __init__(self, name: str, container: Container, layouts: Layouts, rank: int) -> None:
        self.name: str = name
        self._side = LocalSide("subscribe", container, layouts, rank, is_written=True)
        self._back = _Kept(self._side.made())
        for array, live in zip(self._back.arrays, self._side.live(), strict=True):
            np.copyto(array, live)  # what no layout covers
        self._parts = _Parts(())
        self._mapped: dict[str, Array] = {}  # of the holders of the last version: their memory, which stays mapped
        self.state: RankState = RankState()
        self.span: tuple[Any, ...] = (tuple(self._side.ranges()), rank, tuple(layouts.items()))

    def stage(self, version: Version, holders: Sequence[Holder], timeout_s: float) -> Staged:
        """Makes a version in the second set of tensors, of what is missing there.

        Raises:
            VersionNotWholeError: Nobody gave some atoms with the right digests.
        """
        began_s = time.monotonic()
        store = Runtime.current().store
        among = tuple(version.digests)
        if self._parts.among != among:
            self._parts = _Parts(among, atoms.places(self._side.layouts, self._side.rank, among, whole=False))
        self._back.withdraw(store)
        wanted = {atom: version.digests[atom] for atom in self._parts.found}
        self.state = protocol.stage(self.state, version, wanted)
        failures: dict[Key, RaycollectError] = {}
        before, self._mapped = self._mapped, {}
        read = 0
        with store.writing(self._back.ranges()):
            for at, holder in enumerate(holders):
                mine = [atom for atom in self.state.missing if atom in holder.places]
                left_s = timeout_s - (time.monotonic() - began_s)
                limit_s = left_s if at == len(holders) - 1 else min(left_s, HOLDER_S)
                for some in self._requests(mine):
                    try:
                        read += self._read(version, holder, some, limit_s)
                    except RaycollectError as exc:
                        failures[holder.key] = exc
                        break
        del before
        if self.state.missing:
            raise self._not_whole(version, holders, failures)
        landed = {atom: self.state.landed[atom] for atom in wanted}
        gone = tuple(key for key, error in failures.items() if isinstance(error, RefusedError))
        return Staged(digests=landed, nbytes=read, seconds=time.monotonic() - began_s, gone=gone)

    def show(self, version: Version) -> Key | None:
        """Lets methods see a version, and serves it to others; None: it is not whole here."""
        if not protocol.may_show(self.state, version):
            return None
        store = Runtime.current().store
        live, ranges = self._side.live(), self._side.ranges()
        with store.writing(ranges):
            for parts in self._parts.found.values():
                for one in parts:
                    np.copyto(self._side.box(live, one), self._side.box(self._back.arrays, one))
            store.mark_written(self._side.wholes())
        self.state = protocol.show(self.state, version)
        return self._back.serve(store)

    def close(self) -> None:
        """Serves nothing any more."""
        self._back.withdraw(Runtime.current().store)

    def _requests(self, wanted: Sequence[Atom]) -> list[list[Atom]]:
        found: list[list[Atom]] = []
        nbytes = READ_NBYTES
        for atom in wanted:
            size = int(np.prod(extent(atom[1]))) * self._side.layouts[atom[0]].itemsize
            if nbytes + size > READ_NBYTES or len(found[-1]) == MOST_BOXES:
                found.append([])
                nbytes = 0
            found[-1].append(atom)
            nbytes += size
        return found

    def _read(self, version: Version, holder: Holder, some: list[Atom], limit_s: float) -> int:
        boxes = [Box(*holder.places[atom], extent(atom[1]), version.dtypes[atom[0]]) for atom in some]
        found: dict[Atom, bytes] = {}
        read = 0

        def take(at: int, array: Array) -> None:
            nonlocal read
            read += array.nbytes
            if array.base is not None:
                self._mapped[holder.incarnation] = array
            found[some[at]] = self._land(some[at], array)

        fetch.read(
            holder.address, holder.key, boxes, take,
            actor=holder.actor, incarnation=holder.incarnation, timeout_s=limit_s,
        )  # fmt: skip
        self.state = protocol.land(self.state, version, found)
        wrong = [atom for atom in some if self.state.landed.get(atom) != version.digests[atom]]
        if wrong:
            raise VersionNotWholeError(name=self.name, detail=f"other bits than were put: {atoms.shown(wrong[0])}")
        return read

    def _land(self, atom: Atom, array: Array) -> bytes:
        """Writes an atom where it belongs, and returns the digest of what lies there."""
        parts = self._parts.found[atom]
        boxes = [self._side.box(self._back.arrays, one) for one in parts]
        if len(parts) == 1 and parts[0].part == atom[1] and boxes[0].dtype == array.dtype:
            return digests.copied(boxes[0], array)
        whole = np.empty(array.shape, array.dtype)
        found = digests.copied(whole, array)
        for one, box in zip(parts, boxes, strict=True):
            lo, _ = moved(one.part, atom[1][0], (0,) * array.ndim)
            wanted = np.empty(box.shape, box.dtype)
            convert(wanted, box_of(whole, lo, one.size))
            if digests.copied(box, wanted) != digests.digest(wanted):
                return b""
        return found

    def _not_whole(
        self, version: Version, holders: Sequence[Holder], failures: Mapping[Key, RaycollectError]
    ) -> VersionNotWholeError:
        missing = self.state.missing
        tried = [f"{one.actor}: {brief(failures[one.key])}" for one in holders if one.key in failures]
        detail = f"{len(missing)} of {len(self.state.wanted)} atoms are missing, first {atoms.shown(missing[0])}: "
        detail += "; ".join(tried) or "no holder of it is known"
        who = Runtime.current().actor
        return VersionNotWholeError(
            name=self.name, version=str(version), rank=self._side.rank, actor=who, detail=detail
        )


# ---------------------------------------------------------------------------------------------- what a driver calls


class _Agents:
    """What this process has of publications and subscriptions."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.sources: dict[tuple[str, int], tuple[int, Source]] = {}  # by name and rank; with its epoch
        self.receivers: dict[str, dict[int, Receiver]] = {}  # by subscription and rank


_agents = _Agents()


@dataclass(frozen=True, slots=True, kw_only=True)
class Attached:
    """Who a rank is.

    Attributes:
        address: Where it serves reads.
        actor: Its actor, for people.
        incarnation: Ray's id of the process.
        machine: Equal for processes of one host.
        shown: The version that it shows already, of an earlier subscription of the same tensors.
    """

    address: Address
    actor: str
    incarnation: str
    machine: str
    shown: Version | None = None


def attach_source(actor: Any, name: str, epoch: int, key: Key, layouts: Layouts, rank: int) -> Attached:
    """This process has a rank of a publisher; that of an earlier epoch ends."""
    with _agents.lock:
        before = _agents.sources.pop((name, rank), None)
        if before is not None:
            before[1].close()
        _agents.sources[name, rank] = epoch, Source(_held(key), layouts, rank)
    return _attached(actor, "publish")


def seal(actor: Any, name: str, rank: int, version: Version, among: Sequence[Atom]) -> tuple[Key, Digests]:
    """`Source.seal`; PublisherReplacedError: another publisher has this process since."""
    epoch, source = _agents.sources.get((name, rank), (0, None))
    if source is None or epoch != version.epoch:
        raise PublisherReplacedError(name=name, version=str(version), rank=rank, detail=f"epoch {epoch} has begun")
    with Runtime.method_guard():
        return source.seal(version, among)


def detach_source(actor: Any, name: str, rank: int, epoch: int) -> None:
    """Ends what `attach_source` began."""
    with _agents.lock:
        before = _agents.sources.get((name, rank))
        if before is not None and before[0] == epoch:
            del _agents.sources[name, rank]
            before[1].close()


def attach_receiver(actor: Any, name: str, subscription: str, key: Key, layouts: Layouts, rank: int) -> Attached:
    """This process has a rank of a receiver group; the same tensors keep what they have of the publication."""
    made = Receiver(name, _held(key), layouts, rank)
    with _agents.lock:
        for known in _agents.receivers.values():
            if rank in known and known[rank].span == made.span and known[rank].name == name:
                made = known.pop(rank)
        _agents.receivers.setdefault(subscription, {})[rank] = made
    return _attached(actor, "subscribe", made.state.shown)


def stage(
    actor: Any, subscription: str, rank: int, version: Version, holders: Sequence[Holder], timeout_s: float
) -> Staged:
    """`Receiver.stage`."""
    return _receiver(subscription, rank).stage(version, holders, timeout_s)


def show(actor: Any, subscription: str, rank: int, version: Version) -> Key | None:
    """`Receiver.show`, between two methods."""
    with Runtime.method_guard():
        return _receiver(subscription, rank).show(version)


def detach_receiver(actor: Any, subscription: str) -> None:
    """Ends what `attach_receiver` began; the tensors stay as they are."""
    with _agents.lock:
        for one in _agents.receivers.pop(subscription, {}).values():
            one.close()


def shown(subscription: str) -> tuple[bool, Version | None]:
    """Whether this process has a rank of a subscription, and the version that its methods see."""
    ranks = _agents.receivers.get(subscription)
    if not ranks:
        return False, None
    return True, min((one.state.shown for one in ranks.values() if one.state.shown), default=None)


def _receiver(subscription: str, rank: int) -> Receiver:
    found = _agents.receivers.get(subscription, {}).get(rank)
    if found is None:
        raise VersionNotWholeError(
            name="", rank=rank, detail="its process was started anew, or others subscribed its tensors"
        )
    return found


def _held(key: Key) -> Container:
    return fetch.find(Runtime.current().store, key)


def _attached(actor: Any, op: str, shown: Version | None = None) -> Attached:
    member = describe(actor)
    if not member["ordered"]:
        found = "async, threaded or with concurrency groups, so that its methods overlap"
        raise refusal(op, "", (Violation(kind="unsupported", field="actor", found=found, actor=member["actor"]),))
    return Attached(shown=shown, **{name: member[name] for name in ("address", "actor", "incarnation", "machine")})
