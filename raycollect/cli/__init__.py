"""The command line: `raycollect`, or `python -m raycollect`."""

from __future__ import annotations

from raycollect.cli.commands import main

__all__ = ["main"]
