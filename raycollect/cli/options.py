"""Options that commands share."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from typing import Any, TypeVar

import click

ADDRESS_HELP = "The Ray cluster, HOST:PORT; by default what RAY_ADDRESS says, else the one on this host"

_Command = TypeVar("_Command", bound=Callable[..., Any])


def as_json(command: _Command) -> _Command:
    """Adds the option ``--json`` to a command."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON instead, for a program to read.")(command)


def print_json(value: Any) -> None:
    """Prints a value, for a program to read."""
    click.echo(json.dumps(value, indent=2))


def ray_warnings_aside(as_json: bool) -> AbstractContextManager[object]:
    """Sends to stderr what Ray prints meanwhile, which is no JSON."""
    return redirect_stdout(sys.stderr) if as_json else nullcontext()
