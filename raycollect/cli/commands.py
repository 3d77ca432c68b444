"""The command line: ``raycollect COMMAND``, or ``python -m raycollect COMMAND``.

A command is a function under `main`; `bench` is in a module of its own. Ray takes a second to import, so a command that
needs Ray imports its module when it is called. Exit codes: 0; 1 if something was refused, or is missing; 2 for a wrong
command line; 130 if the user has stopped it (Ctrl-C). A user's mistake is reported as text; with `RAYCOLLECT_DEBUG` set
it is raised.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource
from msgspec import structs

import raycollect
from raycollect.cli.bench import bench
from raycollect.cli.options import ADDRESS_HELP, Finite, as_json, print_json, refused
from raycollect.cli.top import top
from raycollect.errors import InvalidGroupError, RaycollectError
from raycollect.group.rank_table import ENVIRONMENT_VARIABLE, RankTable
from raycollect.planner.wording import columns

if TYPE_CHECKING:
    from raycollect.group.cluster_registry import GroupRecord

STDOUT = "-"
DEBUG = "RAYCOLLECT_DEBUG"  # if set, an error is raised with its traceback
INTERRUPTED = 130  # the exit code of a program that Ctrl-C has ended
_PLAIN = (RaycollectError, ConnectionError, FileNotFoundError)  # errors whose text is for the user


class _Commands(click.Group):
    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo("Interrupted.", err=True)
            ctx.exit(INTERRUPTED)
        except BrokenPipeError:  # the reader has closed the pipe; click handles it
            raise
        except _PLAIN as exc:
            if os.environ.get(DEBUG):
                raise
            raise click.ClickException(str(exc)) from exc


_EXAMPLES = """\b
Examples:
  raycollect doctor
  raycollect status --watch 2
"""


@click.group(cls=_Commands, epilog=_EXAMPLES, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(raycollect.__version__, prog_name="raycollect")
def main() -> None:
    """Collective communication between Ray actors, called once, from the driver."""


main.add_command(bench)
main.add_command(top)


# ---------------------------------------------------------------------------------------------- rank-table

_RANK_TABLE_EXAMPLES = """\b
Examples:
  raycollect rank-table --device-id "[[0, 1]]"
  raycollect rank-table --device-id "[[0, 1], [0, 1]]" --output table.json
  raycollect rank-table --check table.json
"""


@main.command(
    "rank-table", short_help="Writes or checks a rank table.", epilog=_RANK_TABLE_EXAMPLES, no_args_is_help=True
)
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
@click.option("--check", "checked", metavar="FILE", help="Read a table and print its errors, or its contents.")
@as_json
@click.pass_context
def rank_table(
    context: click.Context, device_ids: str | None, output: str | None, checked: str | None, as_json: bool
) -> None:
    """Writes or checks a rank table: which rank runs on which device of which node (the JSON form of SCCL)."""
    from_environment = context.get_parameter_source("output") is ParameterSource.ENVIRONMENT
    try:
        if device_ids is not None and checked is None:
            table = RankTable.of_device_ids(_parsed(device_ids))
            _write(table, output or STDOUT, f" (from {ENVIRONMENT_VARIABLE})" if from_environment else "")
        elif device_ids is None and checked is not None:
            if output is not None and not from_environment:
                raise click.UsageError("--check writes nothing: leave --output out.")
            _show(RankTable.read(checked), checked, as_json)
        else:
            raise click.UsageError("Give either --device-id or --check.")
    except InvalidGroupError as exc:  # without the name of a group
        raise click.ClickException(exc.detail) from exc


def _parsed(device_ids: str) -> Any:
    try:
        return json.loads(device_ids.replace("'", '"'))  # accepts Python's quotes
    except (ValueError, RecursionError) as exc:
        problem = f'{device_ids[:100]!r} is not a nested list such as "[[0, 1], [0, 1]]": {exc}.'
        raise click.BadParameter(problem, param_hint="--device-id") from exc


def _show(table: RankTable, path: str, as_json: bool) -> None:
    if as_json:
        places = enumerate(table.chip_map)
        print_json([{"rank": rank, "node": table.node_of(rank), "device": device} for rank, device in places])
        return
    click.echo(f"{path}: {table}")
    for rank, device_id in enumerate(table.chip_map):
        click.echo(f"rank {rank}: node {table.node_of(rank)}, device {device_id}")


def _write(table: RankTable, path: str, origin: str) -> None:
    if path == STDOUT:
        click.echo(table.to_json(), nl=False)
        return
    with refused(f"{path!r}{origin} can't be written", "--output"):
        table.write(path)
    click.echo(f"{table}, written to {path}{origin}", err=True)


# ---------------------------------------------------------------------------------------------- doctor

_DOCTOR_EXAMPLES = """\b
Examples:
  raycollect doctor
  raycollect doctor --json
"""


@main.command("doctor", short_help="Checks this machine, and how to install the rest.", epilog=_DOCTOR_EXAMPLES)
@as_json
@click.pass_context
def doctor(context: click.Context, as_json: bool) -> None:
    """Lists what raycollect can use on this machine, what is missing, and the command that installs it.

    Libraries are imported in child processes, which takes some seconds with torch. A running Ray cluster is asked; no
    cluster is started. The exit code is 1 if a required item is missing.
    """
    from raycollect.cli import doctor as examining  # with all backends

    findings = examining.examine()
    lacking = examining.lacking(findings)
    if as_json:
        print_json({"ok": not lacking, "findings": [asdict(finding) for finding in findings]})
    else:
        said = f"missing, and required: {', '.join(lacking)}" if lacking else "nothing is missing that is required"
        click.echo("\n".join([*examining.table(findings), said]))
    context.exit(1 if lacking else 0)


# ---------------------------------------------------------------------------------------------- status

_STATUS_EXAMPLES = """\b
Examples:
  raycollect status
  raycollect status default --watch 2
  raycollect status --address 10.0.0.1:6379 --json
"""

_NOT_KNOWN = "Only the process that declared the group can ask its members what they are doing: group.status()."


@main.command("status", short_help="The declared groups of a running Ray cluster.", epilog=_STATUS_EXAMPLES)
@click.argument("group", required=False)
@click.option("--address", metavar="HOST:PORT", help=f"{ADDRESS_HELP}.")
@click.option(
    "--watch",
    "every_s",
    metavar="SECONDS",
    type=Finite(min=0.1, max=86_400),
    help="Look again and again, until Ctrl-C; with --json one line each time.",
)
@as_json
def status(group: str | None, address: str | None, every_s: float | None, as_json: bool) -> None:
    """Lists the declared groups of a running Ray cluster, or those of one name, and the state of their members.

    The process that declares a group posts its members. Ray says whether their actors are alive. Only the process that
    declared the group can ask what they are doing, by group.status().
    """
    from raycollect.group import cluster_registry  # with Ray

    cluster = cluster_registry.ClusterReader(cluster_registry.find_cluster(address))
    while True:
        groups = cluster.groups(group)
        if as_json:
            rows = [
                {
                    **structs.asdict(record),
                    "members": [structs.asdict(member) for member in record.members],
                    "summary": cluster_registry.summary(record.members),
                }
                for record in groups
            ]
            click.echo(json.dumps(rows, indent=None if every_s else 2))
        else:
            if every_s:
                click.clear()
            click.echo("\n".join(_status_lines(cluster.address, groups)))
        if not every_s:
            return
        time.sleep(every_s)


def _status_lines(address: str, groups: Sequence[GroupRecord]) -> list[str]:
    from raycollect.group import cluster_registry  # with Ray

    lines = [f"Ray cluster at {address}: {len(groups) or 'no'} declared group{'' if len(groups) == 1 else 's'}"]
    for group in groups:
        rebuilt = f", rebuilt {group.epoch} times" if group.epoch else ""
        process = f"{'actor' if group.actor_id else 'driver'} process {group.pid} on {group.host} (job {group.job_id})"
        lines += ["", f"{group.name}: {cluster_registry.summary(group.members)}"]
        lines += [f"  {len(group.members)} ranks over {group.backend}{rebuilt}"]
        lines += [f"  declared {_ago(time.time() - group.since)} ago by {process}"]
        rows = [
            ("rank", "actor", "state", "node", "pid", "restarts"),
            *((str(m.rank), m.actor, m.state, m.node_id[:8], str(m.pid), str(m.restarts)) for m in group.members),
        ]
        lines += [f"    {line}".rstrip() for line in columns(rows)]
    return [*lines, "", _NOT_KNOWN] if groups else lines


def _ago(seconds: float) -> str:
    for name, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{int(seconds // length)} {name}"
    return f"{max(int(seconds), 0)} s"
