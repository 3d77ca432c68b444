"""Where rank 0 of a group that its members make posts its address. Needs no Ray; `ray_bootstrap_store` is Ray's.

A record exists only while the members join. A leader replaces a record that a dead leader left behind, which those who
connect find out, and what is not a record at all.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Protocol
from urllib.parse import quote, urlparse

from msgspec import Meta

from raycollect.core import files
from raycollect.core.codec import Codec, Wire
from raycollect.core.model import Address
from raycollect.errors import InvalidGroupError, ProtocolError
from raycollect.errors.text import is_path, shown

MOST_RECORD_NBYTES = 4096

MOST_WHO = 200
"""The longest name of a process, in characters."""

_MOST_FILE_NAME = 128
"""A longer group name is hashed for its file: some file systems take no more than 143 bytes."""

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # opening a FIFO would wait for who writes it


class Record(Wire, frozen=True, kw_only=True):
    """Where rank 0 listens, with the key of the group's channel, and what a person calls its process."""

    host: Annotated[str, Meta(min_length=1, max_length=255)]
    port: Annotated[int, Meta(ge=1, lt=1 << 16)]
    secret: Annotated[bytes, Meta(min_length=32, max_length=32)]
    who: Annotated[str, Meta(max_length=MOST_WHO)]

    @classmethod
    def of(cls, address: Address, who: str) -> Record:
        """The record of a process that listens there."""
        return cls(host=address.host, port=address.port, secret=address.secret, who=who[:MOST_WHO])

    @property
    def address(self) -> Address:
        """Where rank 0 listens."""
        return Address(host=self.host, port=self.port, secret=self.secret)

    def to_bytes(self) -> bytes:
        """Packs the record."""
        return _RECORDS.encode(self)

    @classmethod
    def from_bytes(cls, record: bytes) -> Record:
        """Reads a record; InvalidGroupError: it is none."""
        if len(record) > MOST_RECORD_NBYTES:
            raise _malformed(f"it is longer than {MOST_RECORD_NBYTES} bytes")
        try:
            return _RECORDS.decode(record)
        except ProtocolError as exc:
            raise _malformed(exc.detail) from None


_RECORDS = Codec[Record](Record, "record of rank 0", version=2)


def _malformed(why: str) -> InvalidGroupError:
    return InvalidGroupError(group_name="", detail=f"what is posted is not a record of rank 0: {why}")


class BootstrapStore(Protocol):
    """A few small records by name, for all processes of a job; `host` is this process's address for the others."""

    host: str

    def post(self, name: str, record: bytes, *, replace: bool = False) -> bool:
        """Posts a record; False if there is one of that name, which is not to be replaced."""
        ...

    def read(self, name: str) -> bytes | None:
        """The record of that name, or None; InvalidGroupError: it is none, and may be replaced."""
        ...

    def remove(self, name: str) -> None:
        """Removes the record of that name, which is there."""
        ...

    def where(self, name: str) -> str:
        """What a person calls the place of that record."""
        ...


class DirectoryBulletin:
    """Records as files in one directory, which only this user may access: they hold the key of the group's channel.

    The directory is opened once, so that renaming a parent does not change it. A record counts only if this user
    owns the file.

    Args:
        path: The directory, which is made if there is none. It is on a file system that all members share.
        host: The address of this process for the other members.

    Raises:
        InvalidGroupError: Others could read or replace what is in it; or it is no directory, or a link to one.
    """

    def __init__(self, path: str | os.PathLike[str], host: str = "127.0.0.1") -> None:
        if not is_path(path):
            detail = f"the rendezvous directory is {shown(path)}, not the path of one"
            raise InvalidGroupError(group_name="", detail=detail)
        self.host = host
        self._path = Path(path)
        with self._translated():
            self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._fd = os.open(self._path, _DIRECTORY)
        weakref.finalize(self, os.close, self._fd)
        found = os.fstat(self._fd)
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
            detail = f"the rendezvous directory {self._path} is open to other users: make it yours, and chmod 700 it"
            raise InvalidGroupError(group_name="", detail=detail)

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process opens it for itself."""
        return DirectoryBulletin, (self._path, self.host)

    def post(self, name: str, record: bytes, *, replace: bool = False) -> bool:
        """Posts a record, whole or not at all; False if there is one of that name, which is not to be replaced."""
        move = os.rename if replace else partial(os.link, follow_symlinks=False)
        with self._translated(), files.unfinished(self._fd, record, 0o600) as fresh:
            try:
                move(fresh, _file_name(name), src_dir_fd=self._fd, dst_dir_fd=self._fd)
            except FileExistsError:
                return False
        return True

    def read(self, name: str) -> bytes | None:
        """The record of that name; InvalidGroupError: it is no file of this user, or too long."""
        try:
            fd = os.open(_file_name(name), _FILE, dir_fd=self._fd)
            try:
                found = os.fstat(fd)
                if not stat.S_ISREG(found.st_mode):
                    raise _malformed("it is not a regular file")
                if found.st_uid != os.geteuid():
                    raise _malformed(f"it is a file of user {found.st_uid}, and this process runs as {os.geteuid()}")
                return os.read(fd, MOST_RECORD_NBYTES + 1)
            finally:
                os.close(fd)
        except FileNotFoundError:
            return None
        except OSError as exc:
            raise _malformed(f"it can't be read: {exc.strerror}") from exc

    def remove(self, name: str) -> None:
        """Removes the record of that name."""
        os.unlink(_file_name(name), dir_fd=self._fd)

    def where(self, name: str) -> str:
        """The path of the record."""
        return str(self._path / _file_name(name))

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except OSError as exc:
            detail = f"the rendezvous directory {self._path} can't be used: {exc.strerror}. Name a directory, no link"
            raise InvalidGroupError(group_name="", detail=detail) from exc


def _file_name(name: str) -> str:
    quoted = quote(name, safe="")  # has no ``+``, so that no two names have one file
    if len(quoted) <= _MOST_FILE_NAME:
        return f"group-{quoted}"
    return f"group+{hashlib.sha256(name.encode()).hexdigest()}"


def store_at(place: str) -> DirectoryBulletin:
    """The store of a URL ``file:///path``; InvalidGroupError: it is another kind of URL."""
    url = urlparse(place)
    if url not in (("file", host, url.path, "", "", "") for host in ("", "localhost")) or not url.path:
        raise InvalidGroupError(group_name="", detail=f"rendezvous {place!r} is not of the form 'file:///path'")
    return DirectoryBulletin(url.path)
