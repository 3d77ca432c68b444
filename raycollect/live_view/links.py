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
        OSError: The folder can't be made, or is another user's.
    """
    folder = _folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check(folder)
    file = folder / str(os.getpid())
    files.write(file, link.encode())
    file.chmod(0o600)
    return file


def withdraw(file: Path) -> None:
    """Removes the file of a link."""
    file.unlink(missing_ok=True)


def published() -> dict[int, str]:
    """Returns the links by process id; removes those of processes that have ended.

    Raises:
        OSError: The folder is another user's.
    """
    folder = _folder()
    if not folder.is_dir():
        return {}
    _check(folder)
    links = dict[int, str]()
    for file in sorted(folder.iterdir()):
        if not file.name.isdigit():
            continue
        if Path(f"/proc/{file.name}").exists():
            links[int(file.name)] = file.read_text()
        else:
            withdraw(file)
    return links


def _folder() -> Path:
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime, "raycollect") if runtime else Path(tempfile.gettempdir(), f"raycollect-{os.getuid()}")


def _check(folder: Path) -> None:
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise PermissionError(f"{folder} has to be a directory that only its owner, this user, can read")
