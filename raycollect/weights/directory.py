"""The directory of publications: the publishers, their versions, and the processes that hold each version.

The records lie in Ray's internal key-value store, for all jobs of the cluster. A record of an epoch or a version is
written once and never changed. That of a version has the publisher's ranks as its first holders. Each update adds one
record of the receivers that hold the version then. It is a hint: a receiver may have ended or moved on to another
version; a receiver that fails to read from it removes it from the record. A publisher removes the records of all but
its two newest versions, and with its first version those of earlier epochs. `publish` also removes other publications
that ended without a `close` (`sweep`). The record of a name's last epoch stays, some 50 bytes, so that no epoch number
is used twice. If all records are lost, the next put writes them again.

A request takes about 0.5 ms, as long as a small update. A put makes two while its caller waits, and a push makes one.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from functools import partial
from hashlib import blake2b
from types import GenericAlias
from typing import Any, TypeVar, get_type_hints
from urllib.parse import quote, unquote

from ray.exceptions import RayError

from raycollect.core.codec import Codec, Wire
from raycollect.core.model import Address, Key
from raycollect.errors import ProtocolError, VersionError, VersionTimeoutError
from raycollect.planner.layout import Layout
from raycollect.ray_bridge import ray_cluster, ray_session
from raycollect.ray_bridge.ray_cluster import KeyValueStore
from raycollect.weights.atoms import Layouts, Piece
from raycollect.weights.cut import Atom, VersionCut
from raycollect.weights.protocol import Version

_ROOT = "weights/"
_TIMEOUT_S, _LEAST_S, _HINT_S = 30.0, 0.05, 2.0
"""The most seconds that one request may take, and the least: a result is still posted after the deadline. The most for
a hint."""
_ENDED = "-"
"""Replaces the publisher's process in the record of a closed publication."""
MOST_SWEPT = 16
"""How many publications of ended publishers one `sweep` examines."""

_Result = TypeVar("_Result")


class Holder(Wire, frozen=True, kw_only=True):
    """The process of a rank, and what it holds.

    Attributes:
        address: The address at which it serves reads.
        actor: The display name of its actor.
        incarnation: Ray's id of the process.
        rank: Its rank in its side.
        is_publisher: Whether it is a rank of the publisher.
        signature: The signature of its side's layouts.
        key: The key under which it serves the tensors of a version; empty if it holds none.
        machine: The id of its host.
    """

    address: Address
    actor: str
    incarnation: str
    rank: int
    is_publisher: bool
    signature: bytes = b""
    key: Key = Key(b"")
    machine: str


Atoms = Mapping[Atom, Sequence[Piece]]
"""The atoms that a holder serves, and where they lie under its key: a bucket perhaps in several pieces."""

Holders = Sequence[tuple[Holder, Atoms]]
"""The holders that a rank may read from, in this order."""

Listed = tuple[int, bytes]
"""The epoch and the signature of layouts that the directory has."""


_HOLDERS = Codec[tuple[Holder, ...]](tuple[Holder, ...], "record of holders")
_LAYOUTS = Codec[dict[str, bytes]](dict[str, bytes], "layouts")
_VERSIONS = Codec[Any](
    GenericAlias(tuple, (*{**get_type_hints(Version), "cut": bytes}.values(), tuple[Holder, ...])),
    "record of a version",
)

MOST_RECEIVERS = 8
"""How many receivers that hold a version a rank may ask before it asks publishers of other hosts."""


def in_order(holders: Holders, rank: int, machine: str) -> Holders:
    """Orders holders for a rank, in rotation.

    First the publisher on its host, which lends its memory; then receivers, those of its host first; then publishers.
    """
    at = rank % max(len(holders), 1)
    lenders, receivers, others = list[Any](), list[Any](), list[Any]()
    for holder, atoms in [*holders[at:], *holders[:at]]:
        some = receivers if not holder.is_publisher else lenders if holder.machine == machine else others
        some.append((holder, atoms))
    receivers.sort(key=lambda pair: pair[0].machine != machine)
    return lenders + receivers[:MOST_RECEIVERS] + others


class _Records:
    """The records in Ray's store whose keys begin with a prefix."""

    def __init__(self, prefix: str, name: str) -> None:
        ray_session.ensure_ray()
        self.name = name
        self._store = KeyValueStore()
        self._prefix = prefix
        self._limit_s = self._until_s = math.inf

    def _key(self, place: str) -> bytes:
        return (self._prefix + place).encode()

    @contextmanager
    def within(self, timeout_s: float, until_s: float) -> Iterator[None]:
        """Bounds the time of all requests of a block together; a request after the deadline still gets a moment.

        `timeout_s` is for messages; `until_s` is a time of `time.monotonic`.
        """
        self._limit_s, self._until_s = timeout_s, until_s
        try:
            yield
        finally:
            self._limit_s = self._until_s = math.inf

    def _put(self, place: str, value: bytes, *, overwrite: bool, most_s: float = _TIMEOUT_S) -> bool:
        return self._ask(partial(self._store.put, self._key(place), value, overwrite=overwrite), most_s)

    def _get(self, place: str) -> bytes | None:
        return self._ask(partial(self._store.get, self._key(place)))

    def _get_all(self, places: Sequence[str]) -> list[bytes | None]:
        return self._ask(partial(self._store.get_all, [self._key(place) for place in places]))

    def _names(self, place: str) -> list[str]:
        prefix = self._key(place)
        return [key[len(prefix) :].decode() for key in self._ask(partial(self._store.keys, prefix))]

    def _delete(self, place: str, *, by_prefix: bool = False) -> None:
        self._ask(partial(self._store.delete, self._key(place), by_prefix=by_prefix))

    def _ask(self, call: Callable[..., _Result], most_s: float = _TIMEOUT_S) -> _Result:
        limit_s = min(max(self._until_s - time.monotonic(), _LEAST_S), most_s)
        try:
            return call(timeout_s=limit_s)
        except (RayError, RuntimeError) as exc:
            detail = f"Ray's key-value store does not answer: {exc}"
            if time.monotonic() >= self._until_s:
                raise VersionTimeoutError(name=self.name, timeout_s=self._limit_s, detail=detail) from exc
            raise VersionError(name=self.name, detail=detail) from exc


class VersionDirectory(_Records):
    """The records of one publication, for one thread at a time.

    Raises:
        VersionError: Every method: Ray's store does not answer.
        VersionTimeoutError: Every method: Ray's store has not answered within the time of `within`.
    """

    def __init__(self, name: str) -> None:
        super().__init__(f"{_ROOT}{quote(name, safe='')}/", name)
        self._layouts: dict[bytes, Layouts] = {}
        self._own: dict[bytes, bytes] = {}

    # ------------------------------------------------------------------------------------------ epochs

    def begin_epoch(self, worker: str) -> int:
        """Takes the next unused epoch for a process, given by Ray's id of it."""
        while not self.keep_epoch(epoch := self.epoch() + 1, worker):
            pass
        return epoch

    def epoch(self) -> int:
        """Returns the newest epoch; 0 for none."""
        return max((int(number) for number in self._names("epochs/")), default=0)

    def keep_epoch(self, epoch: int, worker: str) -> bool:
        """Writes the record of an epoch again if it was lost; returns False if the record exists."""
        return self._put(f"epochs/{epoch:08d}", worker.encode(), overwrite=False)

    def publisher(self) -> str:
        """Returns Ray's id of the process that began the newest epoch; empty if it was closed, or there is no epoch."""
        epoch = self.epoch()
        worker = (self._get(f"epochs/{epoch:08d}") or b"").decode() if epoch else ""
        return "" if worker == _ENDED else worker

    def end_epoch(self, epoch: int) -> None:
        """Marks an epoch as closed. Its record stays, so that the next publisher gets another number."""
        self._put(f"epochs/{epoch:08d}", _ENDED.encode(), overwrite=True)

    # ------------------------------------------------------------------------------------------ layouts

    def post_layouts(self, layouts: Layouts, epoch: int) -> bytes:
        """Writes the layouts of a side in an epoch, and returns the signature by which others find them."""
        packed = _LAYOUTS.encode({name: layout.to_bytes() for name, layout in layouts.items()})
        signature = blake2b(packed, digest_size=16).digest()
        self._layouts[signature], self._own[signature] = layouts, packed
        self.keep_layouts(epoch)
        return signature

    def keep_layouts(self, epoch: int, listed: Collection[Listed] = (), *, is_hint: bool = False) -> None:
        """Writes the layouts that this process posted, if an epoch does not have them; `listed` are there."""
        most_s = _HINT_S if is_hint else _TIMEOUT_S
        for signature, packed in self._own.items():
            if (epoch, signature) not in listed:
                self._put(_layouts_at(epoch, signature), packed, overwrite=False, most_s=most_s)

    def layouts(self, signature: bytes, epoch: int) -> Layouts | None:
        """Returns the layouts of a signature; None if unknown."""
        if signature not in self._layouts:
            packed = self._get(_layouts_at(epoch, signature))
            if packed is None:
                return None
            encoded = _LAYOUTS.decode(packed)
            self._layouts[signature] = {name: Layout.from_bytes(layout) for name, layout in encoded.items()}
        return self._layouts[signature]

    def listed(self) -> tuple[int, frozenset[Listed], frozenset[tuple[int, int]]]:
        """Returns the newest epoch, 0 for none, which layouts are there, and which versions have records."""
        epoch, layouts, versions = 0, set[Listed](), set[tuple[int, int]]()
        for kind, _, rest in (name.partition("/") for name in self._names("")):
            if kind == "epochs":
                epoch = max(epoch, int(rest))
            elif kind == "layouts":
                layouts.add((int(rest[:8]), bytes.fromhex(rest[9:])))
            elif kind == "versions":
                versions.add(_number_of(rest.partition("/")[0]))
        return epoch, frozenset(layouts), frozenset(versions)

    def all_layouts(self, listed: Iterable[Listed]) -> dict[bytes, Layouts]:
        """Returns the listed layouts of all sides, in order of their signatures."""
        result = {}
        for epoch, signature in sorted(listed, key=lambda entry: entry[1]):
            layouts = self.layouts(signature, epoch)
            if layouts is not None:
                result[signature] = layouts
        return result

    # ------------------------------------------------------------------------------------------ versions

    def post_version(self, version: Version, holders: Iterable[Holder]) -> None:
        """Publishes a version that the publisher's ranks hold: from now on receivers can update to it."""
        values = {field.name: getattr(version, field.name) for field in fields(version)} | {"cut": version.cut.packed}
        record = [*values.values(), tuple(holders)]
        self._put(_version_at(version), _VERSIONS.encode(record), overwrite=False)

    def version(self, epoch: int, number: int) -> Version | None:
        """Returns a version; None if its record was removed."""
        packed = self._get(_version_at(Version(epoch, number)))
        if packed is None:
            return None
        values = dict(zip([field.name for field in fields(Version)], _VERSIONS.decode(packed), strict=False))
        return Version(**{**values, "cut": VersionCut.unpack(values["cut"])})

    def latest(self) -> Version | None:
        """Returns the newest version; None if no version was put."""
        while names := [name for name in self._names("versions/") if "/" not in name]:
            for epoch, number in sorted(map(_number_of, names), reverse=True):
                if (version := self.version(epoch, number)) is not None:
                    return version
            # All were removed meanwhile. A publisher removes versions only after newer ones, or when it closes.
        return None

    def forget(self, version: Version) -> None:
        """Removes the records of a version."""
        self._delete(_version_at(version), by_prefix=True)

    def forget_before(self, version: Version) -> None:
        """Removes older versions and earlier epochs; layouts of earlier epochs move to the epoch of this version."""
        for number in {_number_of(entry.partition("/")[0]) for entry in self._names("versions/")}:
            if number < (version.epoch, version.number):
                self.forget(Version(*number))
        for entry in self._names("layouts/"):
            packed = self._get(f"layouts/{entry}") if int(entry[:8]) < version.epoch else None
            if packed is not None:
                self._put(f"layouts/{version.epoch:08d}/{entry[9:]}", packed, overwrite=False)
                self._delete(f"layouts/{entry}")
        self._forget_epochs(version.epoch - 1)

    def forget_all(self, epoch: int) -> None:
        """Removes all records up to an epoch except those of the epochs, so that epochs stay unique."""
        for place in ("versions/", "layouts/"):
            for number in sorted({entry[:8] for entry in self._names(place)}):
                if int(number) <= epoch:
                    self._delete(place + number, by_prefix=True)

    def remove(self, epoch: int) -> None:
        """Removes all records up to an epoch, whose publishers and holders have ended, except that epoch's own record.

        So the next publisher takes a later epoch, even if it begins meanwhile.
        """
        self.forget_all(epoch)
        self._forget_epochs(epoch - 1)

    def _forget_epochs(self, epoch: int) -> None:
        for entry in self._names("epochs/"):
            if int(entry) <= epoch:
                self._delete(f"epochs/{entry}")

    # ------------------------------------------------------------------------------------------ holders

    def post_holders(self, version: Version, holders: Sequence[Holder]) -> None:
        """Adds holders of a version, in one record."""
        if holders:
            place = f"{_version_at(version)}/{holders[0].key.hex()}"
            self._put(place, _HOLDERS.encode(tuple(holders)), overwrite=True, most_s=_HINT_S)

    def holders(self, version: Version) -> list[Holder]:
        """Returns the recorded holders of a version, first the publisher's ranks."""
        return [holder for _, holders in self._records_of(version) for holder in holders]

    def all_holders(self) -> list[Holder]:
        """Returns the recorded holders of all versions."""
        return [holder for _, holders in self._holders(self._names("versions/")) for holder in holders]

    def drop_holders(self, version: Version, keys: Collection[Key]) -> None:
        """Removes receivers that no longer have a version; the publisher's ranks stay as long as the version."""
        for name, holders in self._records_of(version):
            left = [holder for holder in holders if holder.key not in keys]
            if "/" in name and len(left) < len(holders):
                self._delete(f"versions/{name}")
                self.post_holders(version, left)

    def _records_of(self, version: Version) -> list[tuple[str, Sequence[Holder]]]:
        place = _numbered(version)
        return self._holders([place, *(f"{place}/{entry}" for entry in self._names(f"versions/{place}/"))])

    def _holders(self, names: Iterable[str]) -> list[tuple[str, Sequence[Holder]]]:
        """Returns the holders in each record of a version that is there."""
        names = sorted(names)
        records = self._get_all([f"versions/{name}" for name in names])
        return [
            (name, _HOLDERS.decode(packed) if "/" in name else _VERSIONS.decode(packed)[-1])
            for name, packed in zip(names, records, strict=True)
            if packed
        ]


def sweep(name: str) -> None:
    """Removes other publications whose publishers and holders have all ended.

    The living processes are listed after the publishers are read, and before the holders are. So a publisher that began
    later does not count as dead; and if no holder was alive then, no process can have become a holder since.
    """
    root = _Records(_ROOT, name)
    epochs: dict[str, list[tuple[int, str]]] = {}
    more = set()  # publications with more records than that of their last epoch
    for place in root._names(""):
        quoted, kind, rest = place.split("/", 2)
        if kind in ("epochs", "versions") and unquote(quoted) != name:
            if quoted in epochs or kind == "versions":
                more.add(quoted)
            epochs.setdefault(quoted, []).append((int(rest[:8]), place if kind == "epochs" else ""))
        elif kind not in ("epochs", "versions"):
            more.add(quoted)
    epochs = {quoted: some for quoted, some in epochs.items() if quoted in more}
    if not epochs:
        return
    places = [place for some in epochs.values() for _, place in some if place]
    publishers = {place: (worker or b"").decode() for place, worker in zip(places, root._get_all(places), strict=True)}
    living = root._ask(lambda timeout_s: ray_cluster.living_workers())
    lasting = living | {""}  # a record that was removed meanwhile: another process is sweeping that name
    ended = [
        quoted for quoted, some in epochs.items() if lasting.isdisjoint(publishers[place] for _, place in some if place)
    ]
    for quoted in random.sample(ended, min(len(ended), MOST_SWEPT)):  # in order, the first ones could hide the others
        other = VersionDirectory(unquote(quoted))
        with suppress(ProtocolError):  # written by another release of this library, which removes it
            if living.isdisjoint(holder.incarnation for holder in other.all_holders()):
                other.remove(max(epoch for epoch, _ in epochs[quoted]))


def _layouts_at(epoch: int, signature: bytes) -> str:
    return f"layouts/{epoch:08d}/{signature.hex()}"


def _version_at(version: Version) -> str:
    return f"versions/{_numbered(version)}"


def _numbered(version: Version) -> str:
    return f"{version.epoch:08d}.{version.number:019d}"  # of one length, as records are removed by prefix


def _number_of(text: str) -> tuple[int, int]:
    epoch, number = text.split(".")
    return int(epoch), int(number)
