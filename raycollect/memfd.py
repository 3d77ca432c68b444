"""Memory without a name that processes share: a sealed memfd.

It can never change its size again, because a file that shrinks kills those who map it by SIGBUS.
"""

from __future__ import annotations

import fcntl
import os

__all__ = ["create", "is_sealed"]


def create(name: str, nbytes: int) -> int:
    """Makes one of that size, sealed; its pages have no memory yet.

    Args:
        name: What /proc calls it.
        nbytes: Its size.

    Returns:
        Its descriptor.

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


def is_sealed(fd: int, nbytes: int) -> bool:
    """Tells whether a file has that size, and will always have it."""
    return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _seals() == _seals() and os.fstat(fd).st_size == nbytes


def _seals() -> int:
    return fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
