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
from raycollect.errors import InvalidGroupError, KernelError
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


# ---------------------------------------------------------------------------------------------- bench

_BENCH_EXAMPLES = """\b
Examples:
  raycollect bench --calibrate
  raycollect bench --calibrate --between 50 25
  raycollect bench --calibrate --output costs.json
"""


@main.command("bench", epilog=_BENCH_EXAMPLES, no_args_is_help=True)
@click.option("--calibrate", is_flag=True, help="Measure what moving bytes costs on this host; takes a few seconds.")
@click.option(
    "--between",
    metavar="MICROSECONDS GBIT/S",
    nargs=2,
    type=click.FloatRange(min=0, min_open=True),
    help="The latency and the bandwidth between hosts, as you know them: one host can't measure them.",
)
@click.option("--output", metavar="FILE", help="Where to write it, instead of where the planner reads it.")
def bench(calibrate: bool, between: tuple[float, float] | None, output: str | None) -> None:
    """Measures this machine for the planner, which chooses algorithms and predicts times by what is found.

    The planner of a driver reads the file that RAYCOLLECT_COSTS names, else raycollect/costs.json under XDG_CONFIG_HOME
    (~/.config). The link between hosts keeps its default unless --between says what it is.
    """
    if not calibrate:
        raise click.UsageError("Give --calibrate: there is nothing else yet.")
    from raycollect import calibrate as measuring  # with numpy
    from raycollect import costs

    try:
        found = [measuring.measure(backend) for backend in measuring.BACKENDS]
    except KernelError as exc:
        raise click.ClickException(str(exc)) from exc
    if between is not None:
        found.append(costs.given(latency_s=between[0] * 1e-6, bandwidth=between[1] * 1e9 / 8))
    for line in costs.table(found):
        click.echo(line)
    path = output or str(costs.default_path())
    try:
        costs.write(path, found)
    except (OSError, ValueError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else exc
        raise click.BadParameter(f"{path!r} can't be written: {reason}.", param_hint="--output") from exc
    click.echo(f"written to {path}", err=True)
