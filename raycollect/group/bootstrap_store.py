"""The store in which rank 0 posts its address for the other members. Needs no Ray; `ray_bootstrap_store` uses Ray's.

A record exists only while the members join. A leader replaces the record of a dead leader, and a malformed record.
Members that connect detect a dead leader.
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
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # opening a FIFO would wait for its writer


class LeaderRecord(Wire, frozen=True, kw_only=True):
    """The address of rank 0, the key of the group's channel, and the name of its process for a person."""

    host: Annotated[str, Meta(min_length=1, max_length=255)]
    port: Annotated[int, Meta(ge=1, lt=1 << 16)]
    secret: Annotated[bytes, Meta(min_length=32, max_length=32)]
    who: Annotated[str, Meta(max_length=MOST_WHO)]

    @classmethod
    def of(cls, address: Address, who: str) -> LeaderRecord:
        """Makes the record of a process that listens at an address."""
        return cls(host=address.host, port=address.port, secret=address.secret, who=who[:MOST_WHO])

    @property
    def address(self) -> Address:
        """The address of rank 0."""
        return Address(host=self.host, port=self.port, secret=self.secret)

    def to_bytes(self) -> bytes:
        """Packs the record."""
        return _RECORDS.encode(self)

    @classmethod
    def from_bytes(cls, record: bytes) -> LeaderRecord:
        """Reads a record; InvalidGroupError: it is malformed."""
        if len(record) > MOST_RECORD_NBYTES:
            raise _malformed(f"it is longer than {MOST_RECORD_NBYTES} bytes")
        try:
            return _RECORDS.decode(record)
        except ProtocolError as exc:
            raise _malformed(exc.detail) from None


_RECORDS = Codec[LeaderRecord](LeaderRecord, "record of rank 0", version=2)


def _malformed(why: str) -> InvalidGroupError:
    return InvalidGroupError(group_name="", detail=f"the posted record of rank 0 is malformed: {why}")


class BootstrapStore(Protocol):
    """Small records by name, shared by all processes of a job; `host` is this process's address for the others."""

    host: str

    def post(self, name: str, record: bytes, *, replace: bool = False) -> bool:
        """Posts a record; False if there is one of that name, which is not to be replaced."""
        ...

    def read(self, name: str) -> bytes | None:
        """The record of that name, or None; InvalidGroupError: it is malformed, and may be replaced."""
        ...

    def remove(self, name: str) -> None:
        """Removes the record of that name, which exists."""
        ...

    def where(self, name: str) -> str:
        """The location of that record, for a message."""
        ...


class DirectoryBulletin:
    """Records as files in one directory, which only this user may access: they hold the key of the group's channel.

    The directory is opened once, so that renaming a parent does not change it. A record counts only if this user
    owns the file.

    Args:
        path: The directory, on a file system that all members share. It is created if it does not exist.
        host: The address of this process for the other members.

    Raises:
        InvalidGroupError: Other users can access the directory, or the path is not a directory, or is a link.
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
        status = os.fstat(self._fd)
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            detail = f"the rendezvous directory {self._path} is open to other users: make it yours, and chmod 700 it"
            raise InvalidGroupError(group_name="", detail=detail)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the path: another process opens the directory itself."""
        return DirectoryBulletin, (self._path, self.host)

    def post(self, name: str, record: bytes, *, replace: bool = False) -> bool:
        """Posts a record atomically; False if that name has one, and `replace` is False."""
        move = os.rename if replace else partial(os.link, follow_symlinks=False)
        with self._translated(), files.unfinished(self._fd, record, 0o600) as fresh:
            try:
                move(fresh, _file_name(name), src_dir_fd=self._fd, dst_dir_fd=self._fd)
            except FileExistsError:
                return False
        return True

    def read(self, name: str) -> bytes | None:
        """The record of that name; InvalidGroupError: it is not a regular file of this user, or too long."""
        try:
            fd = os.open(_file_name(name), _FILE, dir_fd=self._fd)
            try:
                status = os.fstat(fd)
                if not stat.S_ISREG(status.st_mode):
                    raise _malformed("it is not a regular file")
                if status.st_uid != os.geteuid():
                    raise _malformed(f"it is a file of user {status.st_uid}, and this process runs as {os.geteuid()}")
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
            detail = (
                f"the rendezvous directory {self._path} can't be used: {exc.strerror}. Pass a directory, not a link"
            )
            raise InvalidGroupError(group_name="", detail=detail) from exc


def _file_name(name: str) -> str:
    quoted = quote(name, safe="")  # contains no ``+``, so two names never share a file
    if len(quoted) <= _MOST_FILE_NAME:
        return f"group-{quoted}"
    return f"group+{hashlib.sha256(name.encode()).hexdigest()}"


def store_at(place: str) -> DirectoryBulletin:
    """The store of a URL ``file:///path``; InvalidGroupError: the URL has another form."""
    url = urlparse(place)
    if url not in (("file", host, url.path, "", "", "") for host in ("", "localhost")) or not url.path:
        raise InvalidGroupError(group_name="", detail=f"rendezvous {place!r} is not of the form 'file:///path'")
    return DirectoryBulletin(url.path)
