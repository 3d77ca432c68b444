"""The links of the live views of this user's processes on this machine, so that `raycollect top` finds them.

A link contains the token that lets its holder read, so the files are readable by the user alone.
"""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from raycollect.core import files


def publish(link: str) -> Path:
    """Writes the link of this process; returns the file, which `withdraw` removes.

    Raises:
        OSError: No folder can be used.
    """
    *others, last = _folders()
    for folder in others:
        try:
            return _write(folder, link)
        except OSError:
            continue
    return _write(last, link)


def withdraw(file: Path) -> None:
    """Removes the file of a link."""
    file.unlink(missing_ok=True)


def published() -> dict[int, str]:
    """Returns the links by process id; removes those of processes that have ended."""
    links = dict[int, str]()
    for folder in _folders():
        if not _is_private(folder):
            continue
        for file in sorted(folder.iterdir()):
            link, _, started = file.read_text().partition("\n")
            if started and started == _started(file.name):
                links[int(file.name)] = link
            else:
                withdraw(file)
    return links


def _folders() -> list[Path]:
    """The folders in which links may be: a program and a terminal may have different environments."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    own = Path(tempfile.gettempdir(), f"raycollect-{os.getuid()}")
    return [Path(runtime, "raycollect"), own] if runtime else [own]


def _write(folder: Path, link: str) -> Path:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _is_private(folder):
        raise PermissionError(f"{folder} has to be a directory that only its owner, this user, can read")
    file = folder / str(os.getpid())
    files.write(file, f"{link}\n{_started(file.name)}".encode())
    file.chmod(0o600)
    return file


def _is_private(folder: Path) -> bool:
    try:
        status = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077


def _started(pid: str) -> str:
    """When a process has started, in clock ticks since the boot; empty if it has ended."""
    try:
        return Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""
