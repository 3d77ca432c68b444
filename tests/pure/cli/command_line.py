"""Runs the command line as a user does."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner, Result

import raycollect
from raycollect.cli.commands import main

ROOT = Path(raycollect.__file__).parents[1]


def run_command(*args: str, environ: dict[str, str | None] | None = None) -> Result:
    result = CliRunner().invoke(main, list(args), env={"RANK_TABLE_FILE": None, **(environ or {})})
    assert result.exception is None or isinstance(result.exception, SystemExit), "a traceback"
    return result
