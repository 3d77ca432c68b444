"""Anonymous memory that processes share: a sealed memfd.

Its size can never change: a file that shrinks kills those who map it by SIGBUS.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import secrets
import socket
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from raycollect.core.model import Segment

TOKEN_NBYTES = 32  # of the token at the beginning of memory that other processes find by its `Segment`


def create(name: str, nbytes: int) -> int:
    """Makes a sealed memfd, called `name` in /proc, whose pages have no memory yet; returns its descriptor.

    Raises:
        OSError, AttributeError: This system has none.
    """
    if not hasattr(os, "memfd_create"):
        raise OSError("this system has no memfd_create (Linux has)")
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _seals())
    except BaseException:
        os.close(fd)
        raise
    return fd


@cache
def memory_domain() -> str:
    """Equal for processes that can show each other memory: one boot, one set of namespaces, one user."""
    try:
        spaces = [str(Path("/proc/self/ns", name).readlink()) for name in ("ipc", "net", "mnt", "pid")]
        return "/".join([Path("/proc/sys/kernel/random/boot_id").read_text().strip(), *spaces, str(os.geteuid())])
    except OSError:
        return socket.gethostname()


def is_sealed(fd: int, nbytes: int) -> bool:
    """Whether a file has that size, and will always have it."""
    return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _seals() == _seals() and os.fstat(fd).st_size == nbytes


@contextmanager
def opened(segment: Segment, name: str, flags: int) -> Iterator[int]:
    """A descriptor of another process's memory, once it is sure to be that memory.

    Args:
        segment: Where it is, in a process of this machine and user.
        name: As `create` got it.
        flags: Those of `os.open`.

    Raises:
        OSError: The process is gone, or does not let this one see its memory.
    """
    path = f"/proc/{segment.pid}/fd/{segment.fd}"
    if not os.readlink(path).startswith(f"/memfd:{name} "):  # noqa: PTH115 - what else is there is not even opened
        raise OSError(errno.ESTALE, f"no longer memory of the name {name}", path)
    fd = os.open(path, flags | os.O_CLOEXEC)
    try:
        if not is_sealed(fd, segment.nbytes):
            raise OSError(errno.EINVAL, "not sealed, or of another size: are the versions of raycollect equal?", path)
        if os.pread(fd, TOKEN_NBYTES, 0) != segment.token:
            raise OSError(errno.ESTALE, "the memory of another process", path)
        yield fd
    finally:
        os.close(fd)


class OwnSegment:
    """Memory of this process that others of this machine find by its `segment`.

    Args:
        name: What it is called in /proc.
        nbytes: Its size.
        backed_nbytes: How much of it is there from the beginning; None: all. `back` adds more.

    Attributes:
        segment: Where it is.
        mapped: The memory; the token of `segment` is at its beginning.

    Raises:
        OSError: This system has none, or too little of it.
    """

    def __init__(self, name: str, nbytes: int, backed_nbytes: int | None = None) -> None:
        try:
            fd = create(name, nbytes)
        except AttributeError as exc:
            raise OSError(str(exc)) from exc
        self._fd = fd
        self._closing = weakref.finalize(self, _close, fd, os.getpid())
        self.back(0, nbytes if backed_nbytes is None else backed_nbytes)
        self.mapped: mmap.mmap = mmap.mmap(fd, nbytes)
        self.segment: Segment = Segment(os.getpid(), fd, secrets.token_bytes(TOKEN_NBYTES), nbytes)
        self.mapped[:TOKEN_NBYTES] = self.segment.token

    def back(self, at: int, nbytes: int) -> None:
        """Has the system provide memory for a part; OSError: there is too little, which would be SIGBUS later."""
        os.posix_fallocate(self._fd, at, nbytes)

    def close(self) -> None:
        """Closes the descriptor; the memory lives until all who map it are gone."""
        self._closing()


def _close(fd: int, pid: int) -> None:
    if os.getpid() == pid:  # in a forked child the number may be another file's by now
        os.close(fd)


def _seals() -> int:
    return fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
