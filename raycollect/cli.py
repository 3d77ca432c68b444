"""The command line: ``raycollect COMMAND``, or ``python -m raycollect COMMAND``.

A command is a function under `main`. Ray takes a second to import, so none of it is imported here: a command that needs
Ray imports its module when it is called. Exit codes: 0; 1 where something was refused, or is missing; 2 for a wrong
command line; 130 where the user has stopped it (Ctrl-C). A mistake of the user's is told in words; with
`RAYCOLLECT_DEBUG` set it is raised.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

import raycollect
from raycollect.errors import InvalidGroupError, RaycollectError
from raycollect.rank_table import ENVIRONMENT_VARIABLE, RankTable

if TYPE_CHECKING:
    from raycollect.posted import Posted

STDOUT = "-"

DEBUG = "RAYCOLLECT_DEBUG"
"""Set: an error is raised with its traceback, instead of told."""

INTERRUPTED = 130
"""What a shell says of a program that Ctrl-C has ended."""

_PLAIN = (RaycollectError, ConnectionError, FileNotFoundError)
"""Errors whose text is for the user."""


class _Commands(click.Group):
    """Commands whose errors are told in words."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo("Interrupted.", err=True)
            ctx.exit(INTERRUPTED)
        except BrokenPipeError:  # whoever read it has had enough; click knows what to do
            raise
        except _PLAIN as exc:
            if os.environ.get(DEBUG):
                raise
            raise click.ClickException(str(exc)) from exc


_as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON instead, for a program to read.")


def _print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2))


_EXAMPLES = """\b
Examples:
  raycollect doctor
  raycollect demo
  raycollect status --watch 2
"""


@click.group(cls=_Commands, epilog=_EXAMPLES, context_settings={"help_option_names": ["-h", "--help"]})
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
@click.option(
    "--check", "checked", metavar="FILE", help="Read a table and say what is wrong with it, or what it holds."
)
@_as_json
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
    except InvalidGroupError as exc:  # no group is meant here: the detail alone
        raise click.ClickException(exc.detail) from exc


def _parsed(device_ids: str) -> Any:
    try:
        return json.loads(device_ids.replace("'", '"'))  # Python's quotes are as good
    except (ValueError, RecursionError) as exc:
        problem = f'{device_ids[:100]!r} is no nested list such as "[[0, 1], [0, 1]]": {exc}.'
        raise click.BadParameter(problem, param_hint="--device-id") from exc


def _show(table: RankTable, path: str, as_json: bool) -> None:
    if as_json:
        places = enumerate(table.chip_map)
        _print_json([{"rank": rank, "node": table.node_of(rank), "device": device} for rank, device in places])
        return
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


@main.command(
    "bench", short_help="Measures this machine for the planner.", epilog=_BENCH_EXAMPLES, no_args_is_help=True
)
@click.option("--calibrate", is_flag=True, help="Measure what moving bytes costs on this host; takes a few seconds.")
@click.option(
    "--between",
    metavar="MICROSECONDS GBIT/S",
    nargs=2,
    type=click.FloatRange(min=0, min_open=True),
    help="The latency and the bandwidth between hosts, as you know them: one host can't measure them.",
)
@click.option("--output", metavar="FILE", help="Where to write it, instead of where the planner reads it.")
@_as_json
def bench(calibrate: bool, between: tuple[float, float] | None, output: str | None, as_json: bool) -> None:
    """Measures this machine for the planner, which chooses algorithms and predicts times by what is found.

    The planner of a driver reads the file that RAYCOLLECT_COSTS names, else raycollect/costs.json under XDG_CONFIG_HOME
    (~/.config). The link between hosts keeps its default unless --between says what it is.
    """
    if not calibrate:
        raise click.UsageError("Give --calibrate: there is nothing else yet.")
    from raycollect import calibrate as measuring  # with numpy
    from raycollect import costs

    found = [measuring.measure(backend) for backend in measuring.BACKENDS]
    if between is not None:
        found.append(costs.given(latency_s=between[0] * 1e-6, bandwidth=between[1] * 1e9 / 8))
    if as_json:
        _print_json([asdict(one) for one in found])
    else:
        click.echo("\n".join(costs.table(found)))
    path = output or str(costs.default_path())
    try:
        costs.write(path, found)
    except (OSError, ValueError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else exc
        raise click.BadParameter(f"{path!r} can't be written: {reason}.", param_hint="--output") from exc
    click.echo(f"written to {path}", err=True)


# ---------------------------------------------------------------------------------------------- doctor

_DOCTOR_EXAMPLES = """\b
Examples:
  raycollect doctor
  raycollect doctor --json
"""

_COLOURS = {"ok": "green", "warning": "yellow", "missing": "red"}


@main.command("doctor", short_help="What is here, what is missing, what installs it.", epilog=_DOCTOR_EXAMPLES)
@_as_json
@click.pass_context
def doctor(context: click.Context, as_json: bool) -> None:
    """Says what this machine has of what raycollect can use, what is missing, and the line that installs it.

    Libraries are imported in child processes, which takes some seconds where torch is. A running Ray cluster is asked,
    none is started. Ends with 1 where something is missing without which nothing works.
    """
    from raycollect import doctor as examining

    findings = examining.examine(examining.Machine())
    lacking = examining.lacking(findings)
    if as_json:
        _print_json({"ok": not lacking, "findings": [asdict(one) for one in findings]})
    else:
        for line in examining.table(findings, shutil.get_terminal_size((120, 24)).columns):
            state = line.split(" ")[2] if line.startswith("  ") else ""  # in the second column, where it is one
            colour = _COLOURS.get(state)
            click.echo(line if colour is None else line.replace(state, click.style(state, fg=colour), 1))
        said = f"missing, and required: {', '.join(lacking)}" if lacking else "nothing is missing that is required"
        click.echo(f"\n{said}")
    context.exit(1 if lacking else 0)


# ---------------------------------------------------------------------------------------------- demo

_DEMO_EXAMPLES = """\b
Examples:
  raycollect demo
  raycollect demo allreduce
  raycollect demo --address 10.0.0.1:6379
"""

_ADDRESS_HELP = "The Ray cluster, HOST:PORT; by default what RAY_ADDRESS says, else the one on this host"


@main.command("demo", short_help="Shows a collective at work.", epilog=_DEMO_EXAMPLES)
@click.argument("name", required=False, type=click.Choice(["allreduce", "digits"]))
@click.option("--address", metavar="HOST:PORT", help=f"{_ADDRESS_HELP}, else one is started.")
@_as_json
@click.pass_context
def demo(context: click.Context, name: str | None, address: str | None, as_json: bool) -> None:
    """Shows a collective at work; takes less than half a minute.

    allreduce: two actors, one sum, and its time beside the way through Ray's object store. digits: training on
    handwritten digits in two actors; it needs a checkout and scikit-learn, and is what runs where these are there.
    """
    from raycollect import demo as showing  # with Ray

    chosen = name or showing.default()
    showing.start_ray(address)
    if chosen == showing.DIGITS:
        found = showing.digits(show=not as_json)
    else:
        result = showing.allreduce(lambda line: click.echo(line, err=as_json))
        found = {**asdict(result), "ok": result.ok}
    if as_json:
        _print_json({"demo": chosen, **found})
    elif not found["ok"]:
        click.echo("NOT OK: that is not what was expected", err=True)
    context.exit(0 if found["ok"] else 1)


# ---------------------------------------------------------------------------------------------- status

_STATUS_EXAMPLES = """\b
Examples:
  raycollect status
  raycollect status default --watch 2
  raycollect status --address 10.0.0.1:6379 --json
"""

_NOT_KNOWN = "What they are doing only the process that declared the group can ask: group.status()."


@main.command("status", short_help="The declared groups of a running Ray cluster.", epilog=_STATUS_EXAMPLES)
@click.argument("group", required=False)
@click.option("--address", metavar="HOST:PORT", help=f"{_ADDRESS_HELP}.")
@click.option(
    "--watch",
    "every_s",
    metavar="SECONDS",
    type=click.FloatRange(min=0.1),
    help="Look again and again, until Ctrl-C; with --json one line each time.",
)
@_as_json
def status(group: str | None, address: str | None, every_s: float | None, as_json: bool) -> None:
    """Lists the declared groups of a running Ray cluster, or those of one name, and the state of their members.

    Who declares a group posts who its members are. Whether their actors live is what Ray says. What they are doing
    only the process that declared the group can ask, by group.status().
    """
    from raycollect import posted  # with Ray

    cluster = posted.Cluster(posted.find_cluster(address))
    while True:
        found = cluster.groups(group)
        if as_json:
            rows = [{**asdict(one), "summary": posted.summary(one.members)} for one in found]
            click.echo(json.dumps(rows, indent=None if every_s else 2))
        else:
            if every_s:
                click.clear()
            click.echo("\n".join(_status_lines(cluster.address, found)))
        if not every_s:
            return
        time.sleep(every_s)


def _status_lines(address: str, groups: Sequence[Posted]) -> list[str]:
    from raycollect import posted

    lines = [f"Ray cluster at {address}: {len(groups) or 'no'} declared group{'' if len(groups) == 1 else 's'}"]
    for one in groups:
        rebuilt = f", rebuilt {one.epoch} times" if one.epoch else ""
        process = f"{'actor' if one.actor_id else 'driver'} process {one.pid} on {one.host} (job {one.job_id})"
        lines += ["", f"{one.name}: {posted.summary(one.members)}"]
        lines += [f"  {len(one.members)} ranks over {one.backend}, {one.ordering} order{rebuilt}"]
        lines += [f"  declared {_ago(time.time() - one.since)} ago by {process}"]
        rows = [
            (str(member.rank), member.actor, member.state, member.node_id[:8], str(member.pid), str(member.restarts))
            for member in one.members
        ]
        lines += _columns([("rank", "actor", "state", "node", "pid", "restarts"), *rows])
    return [*lines, "", _NOT_KNOWN] if groups else lines


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = (zip(row, widths, strict=True) for row in rows)
    return [f"    {'  '.join(f'{text:<{width}}' for text, width in row)}".rstrip() for row in padded]


def _ago(seconds: float) -> str:
    """``3 min``: the largest unit of which there is at least one."""
    for name, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{int(seconds // length)} {name}"
    return f"{max(int(seconds), 0)} s"
