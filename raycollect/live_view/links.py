"""The links of the live views of this user's processes on this machine, so that `raycollect top` finds them.

A link contains the token that lets its holder read, so the files are readable by the user alone.
"""

from __future__ import annotations

import os
import stat
import tempfile
import urllib.request
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

from raycollect.core import files

FILES = ("frame.json", "timeline.json")
"""What a view has for programs, beside its page."""

LONGEST_S = 30.0
"""How long a view may take to answer, in seconds."""


def publish(link: str) -> Path:
    """Writes the link of this process; returns the file, which `withdraw` removes.

    Raises:
        OSError: No folder can be used.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime:
        with suppress(OSError):
            return _write(Path(runtime, "raycollect"), link)
    return _write(_own_folder(), link)


def withdraw(file: Path) -> None:
    """Removes the file of a link."""
    file.unlink(missing_ok=True)


def published() -> dict[int, str]:
    """Returns the links by process id; removes those of processes that have ended."""
    links = dict[int, str]()
    for folder in _folders():
        if not _is_private(folder):
            continue
        for file in sorted(folder.glob(f"*{_suffix()}")):
            try:
                link, _, started = file.read_text().partition("\n")
            except FileNotFoundError:  # its process, or another reader, has removed it
                continue
            if started and started == _started(file.stem):
                links[int(file.stem)] = link
            else:
                withdraw(file)
    return links


def check(name: str) -> None:
    """Raises ValueError if a view has no such file: errors of a request may contain its link, and so the token."""
    if name not in FILES:
        raise ValueError(f"a live view has the files {' and '.join(FILES)}, and not {name!r}")


def read(link: str, name: str) -> bytes:
    """Returns a file of a view of this machine.

    Raises:
        ValueError: A view has no such file.
        OSError, HTTPException: The view gives no answer.
    """
    check(name)
    directly = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy would get the token
    with directly.open(link.rstrip("/") + "/" + name, timeout=LONGEST_S) as answer:
        body: bytes = answer.read()
        return body


def _folders() -> list[Path]:
    """The folders in which links may be: a program, a terminal and Ray's tasks may have different environments."""
    runtime = f"/run/user/{os.getuid()}"  # what XDG_RUNTIME_DIR usually is
    folders = [Path(parent, "raycollect") for parent in (os.environ.get("XDG_RUNTIME_DIR") or runtime, runtime)]
    return list(dict.fromkeys([*folders, _own_folder()]))


def _own_folder() -> Path:
    return Path(tempfile.gettempdir(), f"raycollect-{os.getuid()}")


def _write(folder: Path, link: str) -> Path:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _is_private(folder):
        raise PermissionError(f"{folder} has to be a directory that only its owner, this user, can read")
    file = folder / f"{os.getpid()}{_suffix()}"
    files.write(file, f"{link}\n{_started(file.stem)}".encode())
    file.chmod(0o600)
    return file


def _is_private(folder: Path) -> bool:
    try:
        status = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077


def _suffix() -> str:
    """The suffix of files of this machine's processes: machines and containers may share a folder."""
    spaces = [str(Path("/proc/self/ns", kind).readlink()) for kind in ("net", "pid")]
    machine = Path("/proc/sys/kernel/random/boot_id").read_text()
    return "." + blake2b("/".join([machine, *spaces]).encode(), digest_size=8).hexdigest()


def _started(pid: str) -> str:
    """When a process has started, in clock ticks since the boot; empty if it has ended."""
    try:
        return Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""
