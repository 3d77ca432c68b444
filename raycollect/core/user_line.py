"""The line of the user's program that called this library."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path
from types import FrameType

_OURS = str(Path(__file__).parents[1])
_STDLIB = sysconfig.get_paths()["stdlib"]
_PACKAGES = "/site-packages/", "/dist-packages/"


def user_line() -> str:
    """The innermost line outside this library, Python's and installed packages: ``"/home/me/train.py:12"``."""
    frame: FrameType | None = sys._getframe(1)
    innermost = ""
    while frame is not None:
        file, line = frame.f_code.co_filename, frame.f_lineno
        if not file.startswith(_OURS):
            innermost = innermost or f"{file}:{line}"
            if not file.startswith((_STDLIB, "<frozen")) and not any(folder in file for folder in _PACKAGES):
                return f"{file}:{line}"
        frame = frame.f_back
    return innermost
