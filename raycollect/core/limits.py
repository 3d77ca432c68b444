"""Errors for a process that has run out of file descriptors or threads."""

from __future__ import annotations

import resource
from pathlib import Path

from raycollect.core import sockets
from raycollect.errors import ResourceLimitError

_NO_THREAD = "start new thread"  # CPython's message: it has no class and no errno for this
_FILES = Path("/proc/sys/kernel/threads-max"), Path("/sys/fs/cgroup/pids.max")


def exhausted(exc: BaseException | None, doing: str) -> ResourceLimitError | None:
    """The error for an exception that means a lack of descriptors or threads; None for other exceptions.

    Args:
        exc: The exception.
        doing: The failed action, for the message.
    """
    if isinstance(exc, ResourceLimitError):
        return exc
    if isinstance(exc, RuntimeError) and _NO_THREAD in str(exc):
        error = ResourceLimitError(resource="threads", limit=_most_threads(), detail=f"{doing}: {exc}")
    elif isinstance(exc, OSError) and exc.errno in sockets.FULL:
        limit = _soft(resource.RLIMIT_NOFILE)
        error = ResourceLimitError(resource="file descriptors", limit=limit, detail=f"{doing}: {exc}")
    else:
        return None
    error.__cause__ = exc
    return error


def _most_threads() -> int:
    limits = [_soft(resource.RLIMIT_NPROC)]
    for file in _FILES:
        try:
            limits.append(int(file.read_text()))
        except (OSError, ValueError):  # the file is missing, or contains "max"
            continue
    return min((limit for limit in limits if limit >= 0), default=-1)


def _soft(kind: int) -> int:
    limit = resource.getrlimit(kind)[0]
    return -1 if limit == resource.RLIM_INFINITY else limit
