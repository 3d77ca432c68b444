"""Where rank 0 of a group that its members make posts how it is reached. Needs no Ray; see `ray_bulletin` for Ray's.

A record is there only while the members join. One that a dead leader left behind is found out by those who try it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from pathlib import Path
from typing import Protocol
from urllib.parse import quote, urlparse

from raycollect.errors import InvalidGroupError

__all__ = ["Bulletin", "DirectoryBulletin", "bulletin_at"]


class Bulletin(Protocol):
    """A few small records by name, that all processes of a job can read.

    Attributes:
        host: The address of this process that the others can reach.
    """

    host: str

    def post(self, name: str, record: bytes) -> bool:
        """Posts a record where there is none of that name; False where there is."""
        ...

    def replace(self, name: str, record: bytes) -> None:
        """Posts a record in the place of another."""
        ...

    def read(self, name: str) -> bytes | None:
        """The record of that name; None where there is none."""
        ...

    def remove(self, name: str, record: bytes) -> None:
        """Takes a record away, unless it was replaced."""
        ...


class DirectoryBulletin:
    """Records as files of one directory, which belongs to this user alone: they hold the key of the group's channel.

    Args:
        path: The directory; made where there is none. On a file system that all members share.
        host: The address of this process that the other members can reach.

    Raises:
        InvalidGroupError: Others could read or replace what is in it.
    """

    def __init__(self, path: str | os.PathLike[str], host: str = "127.0.0.1") -> None:
        self.host = host
        self._path = Path(path)
        self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = self._path.stat()
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
            detail = f"the rendezvous directory {self._path} is open to other users: make it yours, and chmod 700 it"
            raise InvalidGroupError(group_name="", detail=detail)

    def post(self, name: str, record: bytes) -> bool:
        """Posts a record where there is none of that name."""
        fresh = self._write(record)
        try:
            os.link(fresh, self._file(name))
        except FileExistsError:
            return False
        finally:
            fresh.unlink()
        return True

    def replace(self, name: str, record: bytes) -> None:
        """Posts a record in the place of another."""
        self._write(record).replace(self._file(name))

    def read(self, name: str) -> bytes | None:
        """The record of that name."""
        try:
            return self._file(name).read_bytes()
        except FileNotFoundError:
            return None

    def remove(self, name: str, record: bytes) -> None:
        """Takes a record away, unless it was replaced."""
        if self.read(name) == record:
            with contextlib.suppress(FileNotFoundError):
                self._file(name).unlink()

    def _write(self, record: bytes) -> Path:
        """Writes a whole record under a name of its own, so that nobody reads half of it."""
        path = self._path / f".{secrets.token_hex(8)}"
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(record)
        return path

    def _file(self, name: str) -> Path:
        return self._path / f"group-{quote(name, safe='')}"


def bulletin_at(place: str) -> DirectoryBulletin:
    """The bulletin of a URL: ``file:///path``.

    Raises:
        InvalidGroupError: It is another kind of URL.
    """
    url = urlparse(place)
    if url.scheme != "file" or not url.path:
        raise InvalidGroupError(group_name="", detail=f"rendezvous {place!r} is no 'file:///path'")
    return DirectoryBulletin(url.path)
