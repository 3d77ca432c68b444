"""Atomically written files, and JSON files of bounded length."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FRESH = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def write(path: str | os.PathLike[str], data: bytes) -> None:
    """Writes a file atomically; replaces a regular file of that name.

    Raises:
        OSError: It can't be written, or the path names a device, a FIFO, a directory or a link.
    """
    target = Path(path)
    check(target)
    folder = os.open(target.parent, _DIRECTORY)
    try:
        with unfinished(folder, data, 0o666) as fresh:
            os.rename(fresh, target.name, src_dir_fd=folder, dst_dir_fd=folder)
    finally:
        os.close(folder)


def read_json(path: str | os.PathLike[str], most_nbytes: int) -> Any:
    """Reads a file of JSON in UTF-8, which may begin with a byte order mark.

    Raises:
        OSError: The file can't be read.
        ValueError: It is longer than `most_nbytes`, or not JSON.
    """
    with Path(path).open("rb") as file:
        data = file.read(most_nbytes + 1)
    if len(data) > most_nbytes:
        raise ValueError(f"the file is longer than {most_nbytes} bytes")
    try:
        return json.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as exc:
        raise ValueError(f"the file is not JSON in UTF-8: {exc}") from exc


def check(path: Path) -> None:
    """Raises OSError if a path exists and is not a regular file."""
    try:
        kind = path.lstat().st_mode
    except FileNotFoundError:
        return
    if stat.S_ISDIR(kind):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if not stat.S_ISREG(kind):
        raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))


@contextlib.contextmanager
def unfinished(folder: int, data: bytes, mode: int) -> Iterator[str]:
    """Writes data to a file with a random name in an open directory, and removes it unless the block renames it."""
    name = f".{secrets.token_hex(8)}"
    fd = os.open(name, _FRESH, mode, dir_fd=folder)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
        yield name
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder)
