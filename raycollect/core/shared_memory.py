"""Anonymous memory that processes share: a sealed memfd.

Its size can never change: a shrinking file kills processes that map it by SIGBUS.
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

TOKEN_NBYTES = 32  # of the token at the beginning of a segment


def create(name: str, nbytes: int) -> int:
    """Creates a sealed memfd, called `name` in /proc, whose pages have no memory yet; returns its descriptor.

    Raises:
        OSError, AttributeError: The system does not support it.
    """
    if not hasattr(os, "memfd_create"):
        raise OSError("this system lacks memfd_create, which Linux has")
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
    """Whether a file has that size, and can't change it."""
    return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _seals() == _seals() and os.fstat(fd).st_size == nbytes


@contextmanager
def opened(segment: Segment, name: str, flags: int) -> Iterator[int]:
    """Opens a descriptor of another process's memory, and verifies that it is that memory.

    Args:
        segment: Memory of a process of this machine and user.
        name: The name passed to `create`.
        flags: The flags of `os.open`.

    Raises:
        OSError: The process has ended, or does not allow access to its memory.
    """
    path = f"/proc/{segment.pid}/fd/{segment.fd}"
    if not os.readlink(path).startswith(f"/memfd:{name} "):  # noqa: PTH115 - other files are not even opened
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
    """Memory of this process that other processes of this machine map by its `segment`.

    Args:
        name: Its name in /proc.
        nbytes: Its size.
        backed_nbytes: The part, from the beginning, that gets memory at once; None: all. `back` adds more.

    Attributes:
        segment: Its description for other processes.
        mapped: The memory; the token of `segment` is at its beginning.

    Raises:
        OSError: The system lacks memfd, or has too little memory.
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
        """Allocates memory for a part; raises OSError without enough memory, which would be SIGBUS later."""
        os.posix_fallocate(self._fd, at, nbytes)

    def close(self) -> None:
        """Closes the descriptor; the memory lives as long as a process maps it."""
        self._closing()


def _close(fd: int, pid: int) -> None:
    if os.getpid() == pid:  # in a forked child the descriptor may be another file's
        os.close(fd)


def _seals() -> int:
    return fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
