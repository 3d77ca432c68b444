"""Options that commands share."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from typing import Any, TypeVar

import click

# Operation of `bench` -> the part of the whole tensor that a rank gives, and the part that it takes; "": in place
OPERATIONS: Mapping[str, tuple[str, str]] = {
    "allreduce": ("whole", ""),
    "broadcast": ("whole", ""),
    "allgather": ("piece", "whole"),
    "reducescatter": ("whole", "piece"),
    "alltoall": ("whole", "whole"),
}
WAYS = ("captured", "refs", "members", "ray.util.collective", "object-store")

ADDRESS_HELP = "The Ray cluster, HOST:PORT; by default RAY_ADDRESS, else the cluster on this host"

_Command = TypeVar("_Command", bound=Callable[..., Any])


class Finite(click.FloatRange):
    """A finite number of a range; click's own range accepts NaN."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Parses the number."""
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return number


def as_json(command: _Command) -> _Command:
    """Adds the option ``--json`` to a command."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON instead, for a program to read.")(command)


def print_json(value: Any) -> None:
    """Prints a value, for a program to read."""
    click.echo(json.dumps(value, indent=2))


def ray_warnings_aside(as_json: bool) -> AbstractContextManager[object]:
    """Redirects Ray's output to stderr if stdout is for JSON."""
    return redirect_stdout(sys.stderr) if as_json else nullcontext()


@contextmanager
def refused(what: str, hint: str) -> Iterator[None]:
    """Converts an OSError or ValueError to a usage error; `what` failed, and `hint` is the parameter at fault."""
    try:
        yield
    except (OSError, ValueError) as exc:  # ValueError: no file can have such a name
        reason = exc.strerror if isinstance(exc, OSError) else exc
        raise click.BadParameter(f"{what}: {reason}.", param_hint=hint) from exc
