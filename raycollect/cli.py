"""The command line: ``raycollect COMMAND``, or ``python -m raycollect COMMAND``.

A command is a function under `main`. Ray takes a second to import, so none of it is imported here: a command that needs
Ray imports its module when it is called. Exit codes: 0; 1 where something was refused; 2 for a wrong command line.
"""

from __future__ import annotations

import json
from typing import Any

import click
from click.core import ParameterSource

import raycollect
from raycollect.errors import InvalidGroupError
from raycollect.rank_table import ENVIRONMENT_VARIABLE, RankTable

STDOUT = "-"


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(raycollect.__version__, prog_name="raycollect")
def main() -> None:
    """Collective communication between Ray actors, said once, by the driver."""


# ---------------------------------------------------------------------------------------------- rank-table

_RANK_TABLE_EXAMPLES = """\b
Examples:
  raycollect rank-table --device-id "[[0, 1]]"
  raycollect rank-table --device-id "[[0, 1], [0, 1]]" --output table.json
  raycollect rank-table --check table.json
"""


@main.command("rank-table", epilog=_RANK_TABLE_EXAMPLES, no_args_is_help=True)
@click.option(
    "--device-id",
    "--device_id",
    "device_ids",
    metavar="LISTS",
    help="Write the table of these devices: one list of device ids per node. Ranks are counted through in this order.",
)
@click.option(
    "--output",
    metavar="FILE",
    envvar=ENVIRONMENT_VARIABLE,
    show_envvar=True,
    help="Where to write it; - is stdout, which is also the default.",
)
@click.option(
    "--check", "checked", metavar="FILE", help="Read a table and say what is wrong with it, or what it holds."
)
@click.pass_context
def rank_table(context: click.Context, device_ids: str | None, output: str | None, checked: str | None) -> None:
    """Writes or checks a rank table: which rank runs on which device of which node (the JSON form of SCCL)."""
    from_environment = context.get_parameter_source("output") is ParameterSource.ENVIRONMENT
    try:
        if device_ids is not None and checked is None:
            table = RankTable.of_device_ids(_parsed(device_ids))
            _write(table, output or STDOUT, f" (from {ENVIRONMENT_VARIABLE})" if from_environment else "")
        elif device_ids is None and checked is not None:
            if output is not None and not from_environment:
                raise click.UsageError("--check writes nothing: leave --output out.")
            _show(RankTable.read(checked), checked)
        else:
            raise click.UsageError("Give either --device-id or --check.")
    except InvalidGroupError as exc:  # no group is meant here: the detail alone
        raise click.ClickException(exc.detail) from exc


def _parsed(device_ids: str) -> Any:
    try:
        return json.loads(device_ids.replace("'", '"'))  # Python's quotes are as good
    except (ValueError, RecursionError) as exc:
        problem = f'{device_ids[:100]!r} is no nested list such as "[[0, 1], [0, 1]]": {exc}.'
        raise click.BadParameter(problem, param_hint="--device-id") from exc


def _show(table: RankTable, path: str) -> None:
    click.echo(f"{path}: {table}")
    for rank, device_id in enumerate(table.chip_map):
        click.echo(f"rank {rank}: node {table.node_of(rank)}, device {device_id}")


def _write(table: RankTable, path: str, origin: str) -> None:
    if path == STDOUT:
        click.echo(table.to_json(), nl=False)
        return
    try:
        table.write(path)
    except (OSError, ValueError) as exc:  # ValueError: no file can have such a name
        reason = exc.strerror if isinstance(exc, OSError) else exc
        raise click.BadParameter(f"{path!r}{origin} can't be written: {reason}.", param_hint="--output") from exc
    click.echo(f"{table}, written to {path}{origin}", err=True)
