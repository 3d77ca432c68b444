"""The directory of publications: who publishes, which versions there are, and which processes hold them.

Its records lie in Ray's internal key-value store, for all jobs of the cluster. A record of an epoch or a version is
written once and never changed. A holder's record is a hint: it may have gone, or have gone on to another version, which
whoever asks it finds out, and then removes the record. A publisher removes what is older than its two newest versions,
and with its first version all of earlier epochs. Nothing breaks if all of it is lost; the next put writes what counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Annotated, TypeVar
from urllib.parse import quote

from ray.exceptions import RayError

from raycollect.core import ray_internals
from raycollect.core.codec import Codec, Form
from raycollect.core.model import Address, Key
from raycollect.errors import VersionError
from raycollect.planner.layout import Layout
from raycollect.weights.atoms import Layouts
from raycollect.weights.protocol import Version

_NAMESPACE = b"raycollect"
_TIMEOUT_S = 30.0
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class HolderRecord:
    """A process that holds one rank's part of a version.

    Attributes:
        address: Where it serves reads.
        key: Under which key.
        actor: Its actor, for people.
        incarnation: Ray's id of the process.
        machine: Equal for processes of one host.
        signature: Of the layouts that say what it holds.
        rank: Its rank in them.
        is_publisher: Whether it is one of the publisher's, which is asked last.
    """

    address: Address
    key: Key
    actor: str
    incarnation: str
    machine: str
    signature: bytes
    rank: int
    is_publisher: bool


_HOLDERS = Codec[HolderRecord](HolderRecord, "record of a holder")
_LAYOUTS = Codec[Layouts](Mapping[str, Annotated[Layout, Form(Layout.to_bytes, Layout.from_bytes)]], "layouts")
_VERSIONS = Codec[Version](Version, "record of a version")


class Directory:
    """The records of one publication, for one thread at a time.

    Raises:
        VersionError: From every method: Ray's store does not answer.
    """

    def __init__(self, name: str) -> None:
        ray_internals.ensure_ray()
        self.name = name
        self._client = ray_internals.cluster_client()
        self._prefix = f"weights/{quote(name, safe='')}/"
        self._layouts: dict[bytes, Layouts] = {}
        self._own: dict[bytes, bytes] = {}

    # ------------------------------------------------------------------------------------------ epochs

    def begin_epoch(self, publisher: str) -> int:
        """Takes the next epoch, which nobody else has then."""
        while True:
            epoch = self.epoch() + 1
            if self._put(f"epochs/{epoch:08d}", publisher.encode(), overwrite=False):
                return epoch

    def epoch(self) -> int:
        """The newest epoch; 0 for none."""
        return max((int(one) for one in self._names("epochs/")), default=0)

    def keep_epoch(self, epoch: int, publisher: str) -> None:
        """Writes the record of an epoch again, where it was lost."""
        self._put(f"epochs/{epoch:08d}", publisher.encode(), overwrite=False)

    # ------------------------------------------------------------------------------------------ layouts

    def post_layouts(self, layouts: Layouts) -> bytes:
        """Writes the layouts of a side, and returns the name by which others find them."""
        packed = _LAYOUTS.encode(layouts)
        signature = blake2b(packed, digest_size=16).digest()
        self._layouts[signature], self._own[signature] = layouts, packed
        self.keep_layouts()
        return signature

    def keep_layouts(self) -> None:
        """Writes the layouts that were posted here again, where they were lost."""
        for signature, packed in self._own.items():
            self._put(f"layouts/{signature.hex()}", packed, overwrite=False)

    def layouts(self, signature: bytes) -> Layouts | None:
        """Those of a name."""
        if signature not in self._layouts:
            packed = self._get(f"layouts/{signature.hex()}")
            if packed is None:
                return None
            self._layouts[signature] = _LAYOUTS.decode(packed)
        return self._layouts[signature]

    def all_layouts(self) -> dict[bytes, Layouts]:
        """Those of all sides that are known, in order of their names."""
        found = {}
        for one in sorted(self._names("layouts/")):
            layouts = self.layouts(bytes.fromhex(one))
            if layouts is not None:
                found[bytes.fromhex(one)] = layouts
        return found

    # ------------------------------------------------------------------------------------------ versions

    def post_version(self, version: Version) -> None:
        """Makes a version known: from now on receivers can ask for it."""
        self._put(f"versions/{_numbered(version)}", _VERSIONS.encode(version), overwrite=False)

    def versions(self) -> list[tuple[int, int]]:
        """Epoch and number of the versions that are known, ascending."""
        return sorted(_number_of(one) for one in self._names("versions/"))

    def version(self, epoch: int, number: int) -> Version | None:
        """One version; None: it is not known any more."""
        packed = self._get(f"versions/{_numbered(Version(epoch, number))}")
        return None if packed is None else _VERSIONS.decode(packed)

    def latest(self) -> Version | None:
        """The newest version; None: there is none."""
        for epoch, number in reversed(self.versions()):
            found = self.version(epoch, number)
            if found is not None:  # else it was removed since
                return found
        return None

    def forget(self, version: Version) -> None:
        """Removes what is about a version."""
        self._forget(_numbered(version))

    def forget_before(self, version: Version) -> None:
        """Removes what is about older versions, and about earlier epochs."""
        for one in self._names("versions/"):
            if _number_of(one) < (version.epoch, version.number):
                self._forget(one)
        for one in self._names("epochs/"):
            if int(one) < version.epoch:
                self._delete(f"epochs/{one}")

    def _forget(self, number: str) -> None:
        self._delete(f"versions/{number}")
        self._delete(f"holders/{number}/", by_prefix=True)

    # ------------------------------------------------------------------------------------------ holders

    def post_holders(self, version: Version, holders: Iterable[HolderRecord]) -> None:
        """Says who holds a version."""
        for one in holders:
            self._put(f"holders/{_numbered(version)}/{one.key.hex()}", _HOLDERS.encode(one), overwrite=True)

    def holders(self, version: Version) -> list[HolderRecord]:
        """Who holds a version, as far as is known."""
        place = f"holders/{_numbered(version)}/"
        keys = [self._key(place + one) for one in sorted(self._names(place))]
        records = self._ask(lambda: self._client.internal_kv_multi_get(keys, _NAMESPACE, timeout=_TIMEOUT_S))
        return [_HOLDERS.decode(records[key]) for key in keys if records.get(key)]

    def drop_holder(self, version: Version, key: Key) -> None:
        """Removes the record of a holder that does not have the version any more."""
        self._delete(f"holders/{_numbered(version)}/{key.hex()}")

    def forget_all(self) -> None:
        """Removes all records of the publication but that of its epoch, so that the next one gets another."""
        for place in ("versions/", "holders/", "layouts/"):
            self._delete(place, by_prefix=True)

    # ------------------------------------------------------------------------------------------ Ray's store

    def _key(self, place: str) -> bytes:
        return (self._prefix + place).encode()

    def _put(self, place: str, value: bytes, *, overwrite: bool) -> bool:
        return bool(
            self._ask(
                lambda: self._client.internal_kv_put(self._key(place), value, overwrite, _NAMESPACE, timeout=_TIMEOUT_S)
            )
        )

    def _get(self, place: str) -> bytes | None:
        found: bytes | None = self._ask(
            lambda: self._client.internal_kv_get(self._key(place), _NAMESPACE, timeout=_TIMEOUT_S)
        )
        return found

    def _names(self, place: str) -> list[str]:
        prefix = self._key(place)
        keys = self._ask(lambda: self._client.internal_kv_keys(prefix, _NAMESPACE, timeout=_TIMEOUT_S))
        return [key[len(prefix) :].decode() for key in keys]

    def _delete(self, place: str, *, by_prefix: bool = False) -> None:
        self._ask(lambda: self._client.internal_kv_del(self._key(place), by_prefix, _NAMESPACE, timeout=_TIMEOUT_S))

    def _ask(self, call: Callable[[], _Result]) -> _Result:
        try:
            return call()
        except (RayError, RuntimeError) as exc:
            raise VersionError(name=self.name, detail=f"Ray's key-value store does not answer: {exc}") from exc


def _numbered(version: Version) -> str:
    return f"{version.epoch:08d}.{version.number:012d}"


def _number_of(text: str) -> tuple[int, int]:
    epoch, number = text.split(".")
    return int(epoch), int(number)
