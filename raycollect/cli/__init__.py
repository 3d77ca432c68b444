"""The command line: `raycollect`, or `python -m raycollect`."""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """Runs the command line."""
    from raycollect.cli import commands  # with click, which the harness of the benchmarks does not need

    commands.main()
