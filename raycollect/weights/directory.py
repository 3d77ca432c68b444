"""The directory of publications: who publishes, which versions there are, and which processes hold them.

Its records lie in Ray's internal key-value store, for all jobs of the cluster. A record of an epoch or a version is
written once and never changed. A holder's record is a hint: it may have gone, or have gone on to another version, which
whoever asks it finds out, and then removes the record. A publisher removes what is older than its two newest versions,
and with its first version all of earlier epochs. Whoever publishes removes other publications that ended without a
`close` (`sweep`). Of each name the record of its last epoch stays, some 50 bytes, so that no epoch comes twice. Nothing
breaks if all of it is lost; the next put writes what counts.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from raycollect.planner.boxes import Point
from raycollect.planner.layout import Layout
from raycollect.ray_bridge import ray_cluster, ray_session
from raycollect.ray_bridge.ray_cluster import KeyValueStore
from raycollect.weights.atoms import Layouts
from raycollect.weights.protocol import Atom, Version

_ROOT = "weights/"
_TIMEOUT_S, _LEAST_S = 30.0, 0.05
"""The most that one request may take, and the least: what was done by then is still to be said, in seconds."""
_ENDED = "-"
"""In place of a publisher's process, of one that was closed."""
MOST_SWEPT = 16
"""How many publications one `sweep` looks into, of those whose publishers have ended."""

_Result = TypeVar("_Result")


class Member(Wire, frozen=True, kw_only=True):
    """The process of a rank.

    Attributes:
        address: Where it serves reads.
        actor: Its actor, for people.
        incarnation: Ray's id of the process.
        machine: Equal for processes of one host.
    """

    address: Address
    actor: str
    incarnation: str
    machine: str


class Holder(Wire, frozen=True, kw_only=True):
    """A process that holds one rank's part of a version.

    Attributes:
        member: The process.
        key: Under which key.
        signature: Of the layouts that say what it holds.
        rank: Its rank in them.
        is_publisher: Whether it is one of the publisher's, which is asked last.
    """

    member: Member
    key: Key
    signature: bytes
    rank: int
    is_publisher: bool


Atoms = Mapping[Atom, tuple[int, Point]]
"""What can be had of a holder: each atom's tensor among those of its key, and its first element there."""

Holders = Sequence[tuple[Holder, Atoms]]
"""Whom a rank may ask, in this order."""


_HOLDERS = Codec[Holder](Holder, "record of a holder")
_LAYOUTS = Codec[dict[str, bytes]](dict[str, bytes], "layouts")
_VERSIONS = Codec[Any](GenericAlias(tuple, tuple(get_type_hints(Version).values())), "record of a version")


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
        """Bounds what all requests of a block take together; those that come later get a moment.

        `timeout_s` is for messages; `until_s` by `time.monotonic`.
        """
        self._limit_s, self._until_s = timeout_s, until_s
        try:
            yield
        finally:
            self._limit_s = self._until_s = math.inf

    def _put(self, place: str, value: bytes, *, overwrite: bool) -> bool:
        return self._ask(partial(self._store.put, self._key(place), value, overwrite=overwrite))

    def _get(self, place: str) -> bytes | None:
        return self._ask(partial(self._store.get, self._key(place)))

    def _get_all(self, places: Sequence[str]) -> list[bytes | None]:
        return self._ask(partial(self._store.get_all, [self._key(one) for one in places]))

    def _names(self, place: str) -> list[str]:
        prefix = self._key(place)
        return [key[len(prefix) :].decode() for key in self._ask(partial(self._store.keys, prefix))]

    def _delete(self, place: str, *, by_prefix: bool = False) -> None:
        self._ask(partial(self._store.delete, self._key(place), by_prefix=by_prefix))

    def _ask(self, call: Callable[..., _Result]) -> _Result:
        limit_s = min(max(self._until_s - time.monotonic(), _LEAST_S), _TIMEOUT_S)
        try:
            return call(timeout_s=limit_s)
        except (RayError, RuntimeError) as exc:
            detail = f"Ray's key-value store does not answer: {exc}"
            if time.monotonic() >= self._until_s:
                raise VersionTimeoutError(name=self.name, timeout_s=self._limit_s, detail=detail) from exc
            raise VersionError(name=self.name, detail=detail) from exc


class Directory(_Records):
    """The records of one publication, for one thread at a time.

    Raises:
        VersionError: From every method: Ray's store does not answer.
        VersionTimeoutError: The same, and the time of `within` is over.
    """

    def __init__(self, name: str) -> None:
        super().__init__(f"{_ROOT}{quote(name, safe='')}/", name)
        self._layouts: dict[bytes, Layouts] = {}
        self._own: dict[bytes, bytes] = {}

    # ------------------------------------------------------------------------------------------ epochs

    def begin_epoch(self, worker: str) -> int:
        """Takes the next epoch, which nobody else has or had, for a process by Ray's id of it."""
        while not self.keep_epoch(epoch := self.epoch() + 1, worker):
            pass
        return epoch

    def epoch(self) -> int:
        """The newest epoch; 0 for none."""
        return max((int(one) for one in self._names("epochs/")), default=0)

    def keep_epoch(self, epoch: int, worker: str) -> bool:
        """Writes the record of an epoch again, where it was lost; False: there is one."""
        return self._put(f"epochs/{epoch:08d}", worker.encode(), overwrite=False)

    def publisher(self) -> str:
        """Ray's id of the process that has begun the newest epoch; empty where that was ended, or there is none."""
        epoch = self.epoch()
        worker = (self._get(f"epochs/{epoch:08d}") or b"").decode() if epoch else ""
        return "" if worker == _ENDED else worker

    def end_epoch(self, epoch: int) -> None:
        """Says that the publisher of an epoch has closed it. The record stays, so that the next one gets another."""
        self._put(f"epochs/{epoch:08d}", _ENDED.encode(), overwrite=True)

    # ------------------------------------------------------------------------------------------ layouts

    def post_layouts(self, layouts: Layouts, epoch: int) -> bytes:
        """Writes the layouts of a side in an epoch, and returns the name by which others find them."""
        packed = _LAYOUTS.encode({name: layout.to_bytes() for name, layout in layouts.items()})
        signature = blake2b(packed, digest_size=16).digest()
        self._layouts[signature], self._own[signature] = layouts, packed
        self.keep_layouts(epoch)
        return signature

    def keep_layouts(self, epoch: int) -> None:
        """Writes the layouts that were posted here, where an epoch does not have them."""
        for signature, packed in self._own.items():
            self._put(_layouts_at(epoch, signature), packed, overwrite=False)

    def layouts(self, signature: bytes, epoch: int) -> Layouts | None:
        """Those of a name."""
        if signature not in self._layouts:
            packed = self._get(_layouts_at(epoch, signature))
            if packed is None:
                return None
            found = _LAYOUTS.decode(packed)
            self._layouts[signature] = {name: Layout.from_bytes(layout) for name, layout in found.items()}
        return self._layouts[signature]

    def all_layouts(self) -> dict[bytes, Layouts]:
        """Those of all sides that are known, of whatever epoch, in order of their names."""
        found = {}
        for signature, epoch in sorted((one[9:], int(one[:8])) for one in self._names("layouts/")):
            layouts = self.layouts(bytes.fromhex(signature), epoch)
            if layouts is not None:
                found[bytes.fromhex(signature)] = layouts
        return found

    # ------------------------------------------------------------------------------------------ versions

    def post_version(self, version: Version) -> None:
        """Makes a version known: from now on receivers can ask for it."""
        self._put(
            f"versions/{_numbered(version)}",
            _VERSIONS.encode([getattr(version, one.name) for one in fields(version)]),
            overwrite=False,
        )

    def version(self, epoch: int, number: int) -> Version | None:
        """One version; None: it is not known any more."""
        packed = self._get(f"versions/{_numbered(Version(epoch, number))}")
        return None if packed is None else Version(*_VERSIONS.decode(packed))

    def latest(self) -> Version | None:
        """The newest version; None: there is none."""
        while names := self._names("versions/"):
            for epoch, number in sorted(map(_number_of, names), reverse=True):
                if (found := self.version(epoch, number)) is not None:
                    return found
            # All were removed since, and a publisher removes them only for newer ones, or as it closes.
        return None

    def forget(self, version: Version) -> None:
        """Removes what is about a version."""
        self._delete(f"versions/{_numbered(version)}")
        self._delete(f"holders/{_numbered(version)}/", by_prefix=True)

    def forget_before(self, version: Version) -> None:
        """Removes what is about older versions and earlier epochs; the layouts of receivers go over to this one."""
        for one in self._names("versions/"):
            if _number_of(one) < (version.epoch, version.number):
                self.forget(Version(*_number_of(one)))
        for one in self._names("layouts/"):
            packed = self._get(f"layouts/{one}") if int(one[:8]) < version.epoch else None
            if packed is not None:
                self._put(f"layouts/{version.epoch:08d}/{one[9:]}", packed, overwrite=False)
                self._delete(f"layouts/{one}")
        self._forget_epochs(version.epoch - 1)

    def forget_all(self, epoch: int) -> None:
        """Removes all until an epoch but the records of the epochs, so that the next one gets another."""
        for place in ("versions/", "holders/", "layouts/"):
            for number in sorted({one[:8] for one in self._names(place)}):
                if int(number) <= epoch:
                    self._delete(place + number, by_prefix=True)

    def remove(self, epoch: int) -> None:
        """Removes all until an epoch, whose publishers and holders have ended, but the record of that epoch.

        So the next publisher takes a later one, even if it comes meanwhile.
        """
        self.forget_all(epoch)
        self._forget_epochs(epoch - 1)

    def _forget_epochs(self, epoch: int) -> None:
        for one in self._names("epochs/"):
            if int(one) <= epoch:
                self._delete(f"epochs/{one}")

    # ------------------------------------------------------------------------------------------ holders

    def post_holders(self, version: Version, holders: Iterable[Holder]) -> None:
        """Says who holds a version."""
        for one in holders:
            self._put(f"holders/{_numbered(version)}/{one.key.hex()}", _HOLDERS.encode(one), overwrite=True)

    def holders(self, version: Version) -> list[Holder]:
        """Who holds a version, as far as is known."""
        return self._holders(f"holders/{_numbered(version)}/")

    def all_holders(self) -> list[Holder]:
        """Who holds any version, as far as is known."""
        return self._holders("holders/")

    def _holders(self, place: str) -> list[Holder]:
        records = self._get_all([place + one for one in sorted(self._names(place))])
        return [_HOLDERS.decode(one) for one in records if one]

    def drop_holder(self, version: Version, key: Key) -> None:
        """Removes the record of a holder that does not have the version any more."""
        self._delete(f"holders/{_numbered(version)}/{key.hex()}")


def sweep(name: str) -> None:
    """Removes other publications of which nobody can have anything: their publishers and holders have all ended.

    Processes are asked for when the publishers are known, and before the holders are. So a publisher is not taken for
    dead because it began later; and where no holder lived then, nobody can have become one since.
    """
    root = _Records(_ROOT, name)
    known: dict[str, list[tuple[int, str]]] = {}
    more = set()  # those of which more is left than the record of their last epoch
    for place in root._names(""):
        quoted, kind, rest = place.split("/", 2)
        if kind in ("epochs", "holders") and unquote(quoted) != name:
            if quoted in known or kind == "holders":
                more.add(quoted)
            known.setdefault(quoted, []).append((int(rest[:8]), place if kind == "epochs" else ""))
        elif kind not in ("epochs", "holders"):
            more.add(quoted)
    known = {quoted: some for quoted, some in known.items() if quoted in more}
    if not known:
        return
    places = [place for some in known.values() for _, place in some if place]
    publishers = {place: (one or b"").decode() for place, one in zip(places, root._get_all(places), strict=True)}
    living = root._ask(lambda timeout_s: ray_cluster.living_workers())
    lasting = living | {""}  # a record that was removed since: the name is another one's business
    ended = [
        quoted for quoted, some in known.items() if lasting.isdisjoint(publishers[place] for _, place in some if place)
    ]
    for quoted in random.sample(ended, min(len(ended), MOST_SWEPT)):  # else those that are served could hide others
        other = Directory(unquote(quoted))
        with suppress(ProtocolError):  # another release of this library has written it, and removes it
            if living.isdisjoint(one.member.incarnation for one in other.all_holders()):
                other.remove(max(epoch for epoch, _ in known[quoted]))


def _layouts_at(epoch: int, signature: bytes) -> str:
    return f"layouts/{epoch:08d}/{signature.hex()}"


def _numbered(version: Version) -> str:
    return f"{version.epoch:08d}.{version.number:012d}"


def _number_of(text: str) -> tuple[int, int]:
    epoch, number = text.split(".")
    return int(epoch), int(number)
