"""The command ``raycollect bench``: times collectives, or measures link costs for the planner."""

from __future__ import annotations

import logging
import os
import re
from typing import Any

import click
from click.core import ParameterSource
from msgspec import structs

from raycollect.cli.options import (
    ADDRESS_HELP,
    OPERATIONS,
    WAYS,
    Finite,
    as_json,
    print_json,
    ray_warnings_aside,
    refused,
)
from raycollect.group import link_costs
from raycollect.planner.wording import columns, counted, nbytes_words, seconds_words

FACTOR = 4  # from one size of a range to the next
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_SIZE = re.compile(r"(\d+)([KMG]?)", re.IGNORECASE)
_HEAD = ("size", "median", "p90", "algbw GB/s", "busbw GB/s")

_EXAMPLES = """\b
Examples:
  raycollect bench
  raycollect bench allgather --ranks 4 --sizes 1K,64K,4M --backend tcp
  raycollect bench --calibrate
  raycollect bench --calibrate --between 50 25
"""

_CALIBRATING = ("between", "output")
_TIMING = ("operation", "ranks", "sizes", "backend", "runs", "ways", "address")


def sizes_of(_context: click.Context, _parameter: click.Parameter, text: str) -> tuple[int, ...]:
    """Parses sizes in bytes: ``4:64M``, a range by a factor of 4, or a list, ``4,1K,1M``."""
    sizes = [_size(size) for size in text.split(":" if ":" in text else ",")]
    if ":" not in text:
        return tuple(dict.fromkeys(sizes))
    if len(sizes) != 2 or sizes[0] > sizes[1]:
        raise click.BadParameter(f"{text!r} is no range: from, a colon, to.")
    while sizes[-2] * FACTOR <= sizes[-1]:
        sizes.insert(-1, sizes[-2] * FACTOR)
    return tuple(sizes[:-1])


def _size(text: str) -> int:
    read = _SIZE.fullmatch(text.strip())
    nbytes = int(read[1]) * _UNITS[read[2].upper()] if read else 0
    if not nbytes:
        raise click.BadParameter(f"{text!r} is not a number of bytes above zero, such as 4, 64K or 1M.")
    return nbytes


def ways_of(_context: click.Context, _parameter: click.Parameter, text: str) -> tuple[str, ...]:
    """Parses a list of ways."""
    ways = tuple(dict.fromkeys(way.strip() for way in text.split(",")))
    for way in ways:
        if way not in WAYS:
            raise click.BadParameter(f"{way!r} is none of {', '.join(WAYS)}.")
    return ways


@click.command("bench", short_help="Times collectives, or measures for the planner.", epilog=_EXAMPLES)
@click.argument("operation", required=False, default="allreduce", metavar="[OPERATION]", type=click.Choice(OPERATIONS))
@click.option(
    "--ranks", type=click.IntRange(min=2), default=2, show_default=True, help="How many actors; they are made for it."
)
@click.option(
    "--sizes",
    callback=sizes_of,
    default="4:64M",
    show_default=True,
    help="The bytes, from:to by a factor of 4, or a list such as 4,1K,1M.",
)
@click.option("--backend", default="auto", show_default=True, help="The backend of their group.")
@click.option(
    "--runs", type=click.IntRange(min=1), default=20, show_default=True, help="How many are timed of each size."
)
@click.option(
    "--ways",
    callback=ways_of,
    default=",".join(WAYS),
    show_default=True,
    help="A captured step, the driver's operation on refs, calls that members make; Ray's library, the object store.",
)
@click.option("--address", metavar="HOST:PORT", help=f"{ADDRESS_HELP}, else one is started.")
@click.option("--calibrate", is_flag=True, help="Measure what moving bytes costs on this host; takes a few seconds.")
@click.option(
    "--between",
    metavar="MICROSECONDS GBIT/S",
    nargs=2,
    type=Finite(min=0, min_open=True),
    help="With --calibrate: the latency and the bandwidth between hosts, as you know them.",
)
@click.option("--output", metavar="FILE", help="With --calibrate: where to write it, not where the planner reads it.")
@as_json
@click.pass_context
def bench(context: click.Context, /, calibrate: bool, as_json: bool, **given: Any) -> None:
    """Times a collective between actors. Or, with --calibrate, measures for the planner.

    OPERATION is allreduce, by default, broadcast, allgather, reducescatter or alltoall.
    Sizes and bandwidths are those of nccl-tests. Each result is checked after its round. Ways to call it take turns.

    With --calibrate it measures what the planner chooses algorithms and predicts times by. The planner of a driver
    reads the file that RAYCOLLECT_COSTS names, else raycollect/costs.json under XDG_CONFIG_HOME (~/.config). One host
    can't measure the link between hosts: it keeps its default unless --between says what it is.
    """
    for name in _TIMING if calibrate else _CALIBRATING:
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            shown = "OPERATION" if name == "operation" else f"--{name}"
            alone = f"--calibrate times no collective: leave {shown} out."
            raise click.UsageError(alone if calibrate else f"Give --calibrate with {shown}.")
    if calibrate:
        _calibrate(given["between"], given["output"], as_json)
    else:
        _time({name: given[name] for name in _TIMING}, as_json)


_UNITS_OF_ROWS = {
    "nbytes": "bytes per rank",
    "median_s": "seconds",
    "p90_s": "seconds",
    "algorithm_bandwidth": "bytes per second",
    "bus_bandwidth": "bytes per second",
}


def _time(given: dict[str, Any], as_json: bool) -> None:
    from raycollect.cli import measuring  # with Ray

    address = given.pop("address")
    with ray_warnings_aside(as_json):
        start_ray(address)
        backend, rows, skipped = measuring.measure(**given)
    operation, ranks, runs = given["operation"], given["ranks"], given["runs"]
    if as_json:
        head = {"operation": operation, "ranks": ranks, "backend": backend, "dtype": "float32", "runs": runs}
        print_json({**head, "units": _UNITS_OF_ROWS, "skipped": skipped, "rows": [structs.asdict(row) for row in rows]})
        return
    click.echo(f"{operation} of float32 between {ranks} actors over {backend}, {counted(runs, 'run')} each")
    for way in given["ways"]:
        of_way = [row for row in rows if row.way == way]
        if of_way:
            title = f"{way}, timed in the {of_way[0].timed_in}"
            click.echo("\n".join(["", title, *columns([_HEAD, *map(_cells, of_way)], _HEAD)]))
        else:
            click.echo(f"\n{way}: skipped: {skipped[way]}")


def _cells(row: Any) -> tuple[str, ...]:
    rates = (f"{rate / 1e9:.3f}" for rate in (row.algorithm_bandwidth, row.bus_bandwidth))
    return nbytes_words(row.nbytes), seconds_words(row.median_s), seconds_words(row.p90_s), *rates


def start_ray(address: str | None) -> None:
    """Joins a cluster, or starts Ray without its dashboard and its logs on the screen; says which on stderr.

    Raises:
        ConnectionError: No cluster answers at that address, or at the address that `RAY_ADDRESS` names.
        RayClientError: It is an address of Ray Client.
    """
    import ray  # takes a second

    from raycollect.group import cluster_registry  # with Ray

    if ray.is_initialized():
        return
    named = address or os.environ.get("RAY_ADDRESS")
    try:
        target = "local" if named == "local" else cluster_registry.find_cluster(named)
    except ConnectionError:
        if named:
            raise
        target = "local"
    if target == "local":
        click.echo("starting Ray on this machine", err=True)
    else:
        cluster_registry.ClusterReader(target)  # ray.init would wait for most of a minute
        click.echo(f"joining the Ray cluster at {target}", err=True)
    ray.init(address=target, include_dashboard=False, log_to_driver=False, logging_level=logging.WARNING)


def _calibrate(between: tuple[float, float] | None, output: str | None, as_json: bool) -> None:
    from raycollect.cli import calibrate  # with numpy

    links = [calibrate.measure(backend) for backend in calibrate.BACKENDS]
    if between is not None:
        links.append(link_costs.given(latency_s=between[0] * 1e-6, bandwidth=between[1] * 1e9 / 8))
    if as_json:
        print_json([structs.asdict(link) for link in links])
    else:
        click.echo("\n".join(link_costs.table(links)))
    path = output or str(link_costs.default_path())
    with refused(f"{path!r} can't be written", "--output"):
        link_costs.write(path, links)
    click.echo(f"written to {path}", err=True)
