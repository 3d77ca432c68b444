"""Options that commands share."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from typing import Any, TypeVar

import click

ADDRESS_HELP = "The Ray cluster, HOST:PORT; by default what RAY_ADDRESS says, else the one on this host"

_Command = TypeVar("_Command", bound=Callable[..., Any])


class Finite(click.FloatRange):
    """A number of a range; neither NaN, which compares with no bound, nor an infinite one."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Reads it, as `click.FloatRange` does."""
        found = float(super().convert(value, param, ctx))
        if not math.isfinite(found):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return found


def as_json(command: _Command) -> _Command:
    """Adds the option ``--json`` to a command."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON instead, for a program to read.")(command)


def print_json(value: Any) -> None:
    """Prints a value, for a program to read."""
    click.echo(json.dumps(value, indent=2))


def ray_warnings_aside(as_json: bool) -> AbstractContextManager[object]:
    """Sends to stderr what Ray prints meanwhile, which is no JSON."""
    return redirect_stdout(sys.stderr) if as_json else nullcontext()


@contextmanager
def refused(what: str, hint: str) -> Iterator[None]:
    """Around what the system may refuse: `what` tells the user so, and `hint` is the parameter that is at fault."""
    try:
        yield
    except (OSError, ValueError) as exc:  # ValueError: no file can have such a name
        reason = exc.strerror if isinstance(exc, OSError) else exc
        raise click.BadParameter(f"{what}: {reason}.", param_hint=hint) from exc
